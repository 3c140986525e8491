"""Under which of our namespaces another engine's blocks are, and in which of our tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbm.core.ids import UNKNOWN, Namespace, SequenceHash, Tier

MAX_NAMESPACES = 255  # of one source: a frame names no more

MEDIA: Mapping[str, Tier] = {
    "GPU": Tier.HBM,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "STORAGE": Tier.NVME,
    "DISK": Tier.NVME,
    "EXTERNAL": Tier.OBJECT,
}
"""An engine's word for a medium → our tier.

A word that is not here is refused: it may be anything, and HBM it is not.
"""


class ForeignSource(NamedTuple):
    """What is known of an engine beside its events.

    Attributes:
        model, tenant, revision: as its namespaces name them.
        secret: the tenant's.
        pool: the cluster pool that its word for blocks beyond the engine means; "" for none.
        counts_copies: whether a block that is stored again on the GPU is another copy, which is removed by itself.
        most_blocks: remembered at a time, at most.
        most_gone: of them, blocks that no tier holds any more: what is stored behind them is known by them.
        scheme: how its blocks become hashes of ours, as its namespaces name it.
    """

    model: str
    tenant: str = ""
    revision: str = UNKNOWN
    secret: bytes = b""
    pool: str = ""
    counts_copies: bool = True
    most_blocks: int = 2_000_000
    most_gone: int = 65_536
    scheme: str = "sha256"


class Home(NamedTuple):
    """A namespace of a source's, and where its chains start."""

    namespace: Namespace
    root: SequenceHash


class Homes:
    """The namespaces of one source, by a small number each, as its events name them."""

    def __init__(self, source: ForeignSource) -> None:
        self.all: list[Home] = []
        self._source = source
        self._numbers: dict[tuple[str, int, int], int] = {}

    def number(self, lora: str, group: int, block_tokens: int) -> int | None:
        """The namespace of blocks of an adapter, KV group and size; None: there are too many."""
        found = self._numbers.get((lora, group, block_tokens))
        if found is not None or len(self.all) == MAX_NAMESPACES:
            return found
        source = self._source
        namespace = Namespace(
            model=source.model,
            block_tokens=block_tokens,
            revision=source.revision,
            kv_dtype=UNKNOWN,
            layout=UNKNOWN,
            kv_group=group,
            ranks=UNKNOWN,
            lora=lora,
            tenant=source.tenant,
            scheme=source.scheme,
        )
        self._numbers[lora, group, block_tokens] = len(self.all)
        self.all.append(Home(namespace, namespace.root(source.secret)))
        return len(self.all) - 1
