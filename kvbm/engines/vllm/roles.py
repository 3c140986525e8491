"""What an engine does with blocks: vLLM's `kv_role`."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from kvbm.config import Settings
from kvbm.engines.vllm.handoff import HandoffRules


class EngineRole(NamedTuple):
    """Which of the two halves of the work an engine takes part in.

    Attributes:
        loads: prompts get blocks from kvbm's tiers.
        stores: computed blocks go to them.
        handoff: of prompts that other engines compute or decode.
    """

    loads: bool = True
    stores: bool = True
    handoff: HandoffRules = HandoffRules()

    @classmethod
    def of(cls, kv_role: str, handoff: HandoffRules = HandoffRules()) -> EngineRole:  # noqa: B008  # frozen
        """A producer stores and loads nothing, a consumer the other way round."""
        return cls(kv_role != "kv_producer", kv_role != "kv_consumer", handoff)

    def suited(self, settings: Settings) -> Settings:
        """Settings without what this role does not do: who stores nothing puts no objects of what it has loaded from
        nearer.
        """
        if self.stores:
            return settings
        return replace(settings, offload=replace(settings.offload, object="never"))
