"""What an instance's heartbeats report as published and is not read yet: the evidence that a hole is a gap."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ids import Epoch
from kvbm.streams.base import Fence, Heartbeat, Position, run_of


class Reported(NamedTuple):
    """A report.

    Attributes:
        run: of the process that reported it; "" when the heartbeat has none.
    """

    published: Position
    since_s: float
    run: str


class PublishedReports:
    """The report that counts, of one instance.

    A heartbeat speaks of one epoch alone: whether all of an older one was published, or never will be, is not in it. A
    newer epoch than the one that is read takes the place of what was reported of the older, whose end nobody will send
    any more. What another life reported of an epoch does not count: nobody will send that.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: Reported | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known to be reported."""
        return self._known is None

    def on_heartbeat(self, now_s: float, heartbeat: Heartbeat, position: Position, fence: Fence | None) -> None:
        """Take note of a heartbeat.

        Args:
            position: the next event to apply. fence: the fence read last.
        """
        published = Position(heartbeat.epoch, heartbeat.published)
        known = self._known
        if known is None and published <= position:
            return
        if _contradicts(fence, published.epoch, heartbeat.run):
            return
        if known is not None and fence is not None and known.run != heartbeat.run == fence.run:
            known = self._known = None  # whose place it is knows better
        if published <= position:
            return
        if known is None or known.published <= position or known.published.epoch < published.epoch:
            self._known = Reported(published, now_s, heartbeat.run)

    def take_fence(self, fence: Fence) -> None:
        """A fence may show that the report is of another life."""
        if self._known is not None and _contradicts(fence, self._known.published.epoch, self._known.run):
            self._known = None

    def unread(self, position: Position) -> Reported | None:
        """The report, if what it names is not read yet."""
        if self._known is not None and self._known.published <= position:
            self._known = None
        return self._known

    def clear(self) -> None:
        """Nothing was reported."""
        self._known = None


def _contradicts(fence: Fence | None, epoch: Epoch, run: str) -> bool:
    """Whether a fence knows another run to have begun an epoch than the one a heartbeat is of."""
    return bool(run) and run_of(fence, epoch) not in ("", run)
