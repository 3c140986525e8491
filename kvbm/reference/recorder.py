"""The events a ledger has decided: folded at once, waiting for the journal in bounded room.

An event that does not fit any more is an *overflow*: the stream ends there with InstanceStopped. Later events are
folded and not recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbm.core.codec import STOPPED_BYTES, FrameBytes, cut_frames, encode_frame, encoded_bytes
from kvbm.core.events import Event, InstanceStarted, InstanceStopped, StopReason
from kvbm.core.fold import Change, Delta, Residencies
from kvbm.core.ids import DURABLE_TIERS, InstanceId, Offset, Tier


class Recorder:
    """Folds the events of one ledger and keeps them until they are taken as frames.

    Args:
        event_bytes: room for events that wait, as large as frames would make them; what begins or ends an epoch comes
            on top.
        follow: called after each event with what it changed.

    Attributes:
        residencies: what is held.
        applied: offset the next event gets.
        overflowed: whether the stream has ended for want of room.
        waiting: how many events wait.
    """

    def __init__(self, event_bytes: int, follow: Callable[[Delta], None]) -> None:
        self.residencies = Residencies(strict=True)
        self.applied = Offset(0)
        self.overflowed = False
        self._follow = follow
        self._event_bytes = event_bytes
        self._waiting: list[Event] = []
        self._digests: list[int] = []  # after each waiting event
        self._waiting_bytes = 0  # of those that count

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_closed(self, tier: Tier) -> bool:
        """Whether a tier takes nothing any more, because nothing about it would be durable."""
        return self.overflowed and tier in DURABLE_TIERS

    def begin(self, event: InstanceStarted) -> list[Change]:
        """Begin an epoch at offset 0.

        Soft state does not follow: blocks stay in their slots until they are listed again.

        Returns: what was held, which is not any more.
        Raises: IllegalEventError: the epoch is not newer. LayoutError: the event fits no frame. Nothing has changed
            then.
        """
        encoded_bytes(event)  # raises where it fits no frame
        dropped = self.residencies.evolve(event).withdrawn
        self.applied, self.overflowed = Offset(0), False
        self._wait(event, self.residencies.digest)
        return dropped

    def record(self, event: Event, counted: bool = True, followed: bool = True) -> None:
        """Fold an event and let it wait, or overflow.

        Args:
            counted: whether it counts against the room for waiting events.
            followed: whether soft state follows; not where the event only says again what is held.
        Raises: IllegalEventError, LayoutError: nothing has changed then.
        """
        size, before = encoded_bytes(event), self.residencies.digest
        delta = self.residencies.evolve(event)
        if not self.overflowed:
            if counted and self._waiting_bytes + size + STOPPED_BYTES > self._event_bytes:
                self.overflowed = True
                self._wait(InstanceStopped(reason=StopReason.OVERFLOW), before)
            else:
                self._wait(event, self.residencies.digest)
                self._waiting_bytes += size if counted else 0
        if followed:
            self._follow(delta)

    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]:
        """The events recorded since the last call, cut into frames; [] when there are none.

        Raises: LayoutError: the instance's name does not fit a frame; the events wait on.
        """
        first = Offset(self.applied - len(self._waiting))
        epoch = self.residencies.epoch
        frames = [
            FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, encode_frame(frame))
            for frame in cut_frames(instance, epoch, first, self._waiting, self._digests, wall_time_ns)
        ]
        self._waiting, self._digests, self._waiting_bytes = [], [], 0
        return frames

    def _wait(self, event: Event, digest: int) -> None:
        self._waiting.append(event)
        self._digests.append(digest)
        self.applied = Offset(self.applied + 1)
