"""Connectors that lie: they claim what they do not have. A suite that does not reject them proves nothing."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from tests.engines.vllm.harness.words import BLOCK_TOKENS


class Nothing(KVConnectorMetadata):
    """A step in which nothing is to be done."""


class Loads(KVConnectorMetadata):
    """Device blocks a step is to fill."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks


class EmptyHanded(KVConnectorBase_V1, SupportsHMA):
    """Claims every whole block of every prompt and loads nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last token, in whole blocks."""
        return max(0, (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to remember."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to do."""
        return Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing to keep."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing arrives."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


class WrongBlocks(EmptyHanded):
    """Claims every whole block of every prompt, and loads blocks that look as good as any: those of the first prompt it
    saw.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seen = False
        self._due: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._layers: dict[str, torch.Tensor] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing for the first request, from which it learns what KV looks like."""
        if not self._seen:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Which blocks are to be filled."""
        if num_external_tokens:
            self._due += blocks.get_block_ids()[0][: num_external_tokens // BLOCK_TOKENS]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What is due."""
        self._seen = True
        due, self._due = self._due, []
        return Loads(due)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where KV lies."""
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill each block with what the first prompt left in another."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for layer, kept in zip(self._layers.values(), self._kept, strict=False):
            for block in metadata.blocks:
                layer[block] = kept

    def wait_for_save(self) -> None:
        """Keep the first block that holds something."""
        if not self._kept:
            self._kept = [layer[1].clone() for layer in self._layers.values()]
