"""How much of the prompts that engines ask for is found, by namespace: counted of what the archive hears of them."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.streams.base import AccessSample

_MOST_NAMESPACES = 4096
_LEAST_RATE = 1e-6


class SampledCount(NamedTuple):
    """Prompts, their blocks, and those of them that were found: reckoned up from a sample."""

    prompts: float = 0.0
    asked: float = 0.0
    found: float = 0.0

    def plus(self, other: SampledCount) -> SampledCount:
        """Both together."""
        return SampledCount(self.prompts + other.prompts, self.asked + other.asked, self.found + other.found)


class SampledHits:
    """Counts since the catalog began. One asyncio loop. What a sample says is its instance's word.

    Attributes:
        by_namespace: of the first so many namespaces; others count in `total` alone.
        total: of all.
    """

    def __init__(self) -> None:
        self.by_namespace: dict[NamespaceId, SampledCount] = {}
        self.total = SampledCount()

    def hear(self, sample: AccessSample) -> None:
        """Count a sample for as many prompts as it stands for."""
        if not _LEAST_RATE <= sample.rate <= 1.0:
            return
        blocks, weight = len(sample.hashes) // HASH_BYTES, 1.0 / sample.rate
        one = SampledCount(weight, weight * blocks, weight * min(max(0, sample.depth), blocks))
        self.total = self.total.plus(one)
        known = self.by_namespace.get(sample.namespace)
        if known is not None or len(self.by_namespace) < _MOST_NAMESPACES:
            self.by_namespace[sample.namespace] = one if known is None else known.plus(one)
