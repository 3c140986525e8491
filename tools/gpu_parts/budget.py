"""Who may take how much of the time: what one part does not use is there for those after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RESERVE_S = 10.0  # of the whole, for the report
GRACE_S = 6.0  # of a part, between the moment it should end and its end by force


class Share(NamedTuple):
    """A part and what it weighs against those after it."""

    name: str
    weight: float


class Turn(NamedTuple):
    """How long a part may run.

    Attributes:
        asked_s: it stops by itself after so long. forced_s: it is ended.
    """

    asked_s: float
    forced_s: float


class Budget:
    """Seconds for parts that run one after the other. It has no clock.

    Args:
        shares: the parts in their order.
        until: when the whole ends, on the caller's clock.
    """

    def __init__(self, shares: Sequence[Share], until: float) -> None:
        self._left = list(shares)
        self._until = until

    def turn(self, name: str, now: float) -> Turn | None:
        """The turn of the next part, by its weight among those left;

        None: too little is left to begin it. Raises ValueError: another is next.
        """
        share = self._left.pop(0)
        if share.name != name:
            raise ValueError(f"{name} asks for its turn, {share.name} is next")
        weights = share.weight + sum(other.weight for other in self._left)
        forced_s = (self._until - RESERVE_S - now) * share.weight / weights
        if forced_s <= 2 * GRACE_S:
            return None
        return Turn(forced_s - GRACE_S, forced_s)
