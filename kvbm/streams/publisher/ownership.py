"""Which run of an instance may publish its events: what fences, events and heartbeats on the stream show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import ORIGIN, EpochRuns, Fence, Heartbeat, Position, Tail

LOG_EPOCHS = 64  # named by a fence, the newest of them


def unknown_runs() -> Mapping[Epoch, str]:
    """Of a log that does not know who began its epochs."""
    return {}


class OtherWriter(NamedTuple):
    """Another run that owns the instance.

    Attributes:
        epoch: that run's, as far as is known.
        run: "" when only its events are known.
    """

    epoch: Epoch
    run: str


class Ownership:
    """Whether this run owns its instance, as far as the stream has shown.

    A fence of a newer epoch, of another run in the same epoch, or set by another run after this run's own, means that
    another process owns the instance. Only a fence that this run has once replaced means nothing: the server has lost
    its end.

    Args:
        run: of this process.
        first_epoch: this run's first; those before it are of the log's earlier runs.
        runs: which processes began the log's epochs, as far as it knows.

    Attributes:
        fence_sequence: of the fence that the stream has, as of the last connection; 0: none, or it is another run's to
            keep.
        fence_epoch: the newest of this run that the stream has had.
        minimum: before it, another run has owned the instance: nobody reads frames of ours from there.
        other_epoch: while another run owns it, the epoch to surpass.
    """

    def __init__(self, run: str, first_epoch: Epoch, runs: Callable[[], Mapping[Epoch, str]]) -> None:
        self.fence_sequence = 0
        self.fence_epoch = Epoch(0)
        self.minimum = ORIGIN
        self.other_epoch = Epoch(0)
        self._run = run
        self._first_epoch = first_epoch
        self._runs = runs
        self._found: Fence | None = None  # the other run's fence that the one being set replaces
        self._replaced: dict[str, int] = {}  # run → sequence of its newest fence that this run has replaced
        self._other_fence: Fence | None = None  # of the run that owns it
        self._reported: OtherWriter | None = None
        self._other_heartbeat: Heartbeat | None = None
        self._silent_from_s = 0.0
        self._is_taking_over = False

    @property
    def has_fence(self) -> bool:
        """Whether the stream's fence is this run's, as of the last connection."""
        return self.fence_sequence > 0 and self._found is None  # until the fence is moved

    def fence(self) -> Fence:
        """The fence that messages name."""
        return Fence(self.fence_epoch, self._run, self.fence_sequence)

    def epochs_after(self, confirmed: Position, epoch: Epoch) -> EpochRuns:
        """The epochs that are not on the stream to their end, as far as is known, and who began each: what a fence
        names.

        Args:
            confirmed: the stream holds everything before it.
            epoch: the newest.
        """
        known = {begun: run for begun, run in self._runs().items() if confirmed.epoch <= begun < self._first_epoch}
        own = range(max(self._first_epoch, confirmed.epoch), epoch + 1)
        runs = known | {Epoch(begun): self._run for begun in own[-LOG_EPOCHS:]}
        return tuple(sorted(runs.items()))[-LOG_EPOCHS:]

    # -- what a connection finds ---------------------------------------------------------------------------------------

    def take_found(self, fence: Fence | None) -> None:
        """Take the fence that the stream has: one of this run's was set, though its acknowledgement may not
        have come.
        """
        if fence is not None and fence.run == self._run:
            self.fence_epoch = max(self.fence_epoch, fence.epoch)

    def is_anothers(self, fence: Fence | None, tail: Tail | None, epoch: Epoch) -> bool:
        """Whether fence and end of events show that another run owns the instance.

        Args:
            epoch: the manager's.
        """
        newest = tail.end.epoch if tail is not None else Epoch(0)
        if fence is not None and self.fence_epoch and fence.run != self._run:  # this run has owned it
            return fence.sequence > self._replaced.get(fence.run, 0) or newest > epoch
        if fence is not None and fence.epoch >= epoch:
            return fence.epoch > epoch or fence.run != self._run or newest > epoch
        # a run sends events of an epoch only once it has set a fence for it, so without that they are another's
        return newest > epoch or newest == epoch > self.fence_epoch

    def claim(self, fence: Fence | None, tail: Tail | None) -> None:
        """Take what a connection has found, which is no other's to keep: the next fence replaces it."""
        self._reported = None
        if fence is None and tail is None:
            self._replaced.clear()  # of a stream that is gone
        others = [Epoch(0) if tail is None else tail.end.epoch]
        if fence is not None and fence.run != self._run:
            others.append(fence.epoch)
        if max(others) >= max(self._first_epoch, self.fence_epoch + 1):  # it came between this run's own
            self.minimum = Position(Epoch(max(others) + 1), Offset(0))
        if fence is not None and fence.run not in (self._run, self._runs().get(fence.epoch) or fence.run):
            # two processes began that epoch, each for itself while it could not ask: the other's is on the stream
            self.minimum = max(self.minimum, Position(Epoch(fence.epoch + 1), Offset(0)))
        self.fence_sequence = fence.sequence if fence is not None else 0
        self._found = fence if fence is not None and fence.run != self._run else None

    def fence_stored(self, fence: Fence) -> None:
        """The stream has this run's fence."""
        self.fence_sequence = fence.sequence
        if self._found is not None:
            self._replaced[self._found.run] = max(self._found.sequence, self._replaced.get(self._found.run, 0))
            self._found = None
        self.fence_epoch = max(self.fence_epoch, fence.epoch)

    # -- another run owns it -------------------------------------------------------------------------------------------

    def lose(self, fence: Fence | None, tail: Tail | None, now_s: float) -> OtherWriter | None:
        """Another run owns the instance. Gives who, unless it was given before."""
        self.fence_sequence = 0
        self.other_epoch = max(
            fence.epoch if fence is not None else Epoch(0), tail.end.epoch if tail is not None else Epoch(0)
        )
        self._other_fence = fence
        self.minimum = Position(Epoch(self.other_epoch + 1), Offset(0))
        self._is_taking_over = False
        self._silent_from_s = now_s
        run = fence.run if fence is not None and fence.epoch == self.other_epoch else ""
        other = OtherWriter(self.other_epoch, run)
        if other == self._reported:
            return None
        self._reported = other
        return other

    def take_heartbeat(self, heartbeat: Heartbeat | None, now_s: float, silence_s: float) -> bool:
        """Take the last heartbeat on the stream.

        Whether to take over now, once: the other run was silent for `silence_s`.
        """
        if heartbeat is not None and heartbeat.run != self._run and heartbeat != self._other_heartbeat:
            is_first = self._other_heartbeat is None
            self._other_heartbeat = heartbeat
            if not is_first:  # the first may be old: it is by its successors that another shows it is alive
                self._silent_from_s = now_s
        if now_s - self._silent_from_s < silence_s or self._is_taking_over:
            return False
        self._is_taking_over = True
        if self._other_fence is not None:  # the next one that it sets shows it is alive
            self._replaced[self._other_fence.run] = self._other_fence.sequence
        return True
