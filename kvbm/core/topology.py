"""What moving bytes costs, and how far apart two places are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.ids import Tier


class Link(NamedTuple):
    """What a transfer costs: a fixed part and a part per byte."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """Time to move `size` bytes."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """How far apart two places are: the labels, counted from the innermost, up to the outermost that differs. 0: the
    same place.

    Args:
        one, other: labels of a place, outermost first, such as ("zone-a", "rack-3", "host-17"). Where nothing is known
            of a place, it is as far as the other has labels.
    """
    same = 0
    for here, there in zip(one, other, strict=False):
        if here != there:
            break
        same += 1
    return max(len(one), len(other)) - same


ASSUMED_BLOCK_BYTES = 2 << 20  # of a block whose size nobody has said: 16 tokens of a model with 8 billion parameters

# Reads of the own instance by tier: what a router assumes until transfers have been measured.
TIER_LINKS: dict[Tier, Link] = {
    Tier.HBM: Link(0.0, float("inf")),
    Tier.HOST: Link(20e-6, 20e9),
    Tier.NVME: Link(150e-6, 3e9),
    Tier.OBJECT: Link(20e-3, 0.5e9),
}
