"""What moving bytes costs."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ids import Tier


class Link(NamedTuple):
    """What a transfer costs: a fixed part and a part per byte."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """Time to move `size` bytes."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


# Reads of the own instance by tier: what a router assumes until transfers have been measured.
TIER_LINKS: dict[Tier, Link] = {
    Tier.HBM: Link(0.0, float("inf")),
    Tier.HOST: Link(20e-6, 20e9),
    Tier.NVME: Link(150e-6, 3e9),
    Tier.OBJECT: Link(20e-3, 0.5e9),
}
