"""The ledger's stream, under the manager's lock: its frames, its rounds, and another epoch of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvbm.core.backend import LedgerTwin
from kvbm.core.codec import FrameBytes
from kvbm.core.events import MAX_RUN_BLOCKS
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.manager.snapshot_policy import Began, Dropped, Ended, Input
from kvbm.streams.base import Position


class WholeRound(NamedTuple):
    """A round that has ended: what lies before `began` is needless once everything before `ended` is safe."""

    began: Position
    ended: Position


class EventSource:
    """What the frame writer asks of a ledger; any thread may call it. Nothing is recorded after `end`.

    Args:
        ledger: started.
        lock: held around every call of the ledger, by whoever calls it.
    """

    def __init__(
        self, instance: InstanceId, ledger: LedgerTwin, lock: threading.Lock, wall_clock_ns: Callable[[], int]
    ) -> None:
        self._instance, self._ledger, self._lock, self._wall_clock_ns = instance, ledger, lock, wall_clock_ns
        self._ended = False
        self._began: Position | None = None  # of the round under way
        self._happened: list[Input] = []
        self._whole: deque[WholeRound] = deque()
        self._note_epoch(ledger.applied)

    @property
    def epoch(self) -> Epoch:
        """The epoch of the newest events."""
        return self._ledger.epoch

    @property
    def overflowed(self) -> bool:
        """Whether events no longer fitted, so that the stream has ended."""
        return self._ledger.overflowed

    @property
    def ended(self) -> bool:
        """Whether the stream has ended for good."""
        return self._ended

    def take(self) -> list[FrameBytes]:
        """The events that wait, as frames."""
        now_ns = self._wall_clock_ns()
        with self._lock:
            return self._ledger.take_frames(self._instance, now_ns)

    def restart(self, epoch: Epoch) -> Offset | None:
        """Begin another epoch in place; events that still wait are given up, since its first round says what they led to.

        Returns: the offset after the round; None when the stream has ended for good.
        """
        with self._lock:
            if self._ended:
                return None
            self._ledger.take_frames(self._instance, 0)
            after = self._ledger.restart(epoch)
            if self._began is not None:
                self._happened.append(Dropped())
                self._began = None
            self._note_epoch(after)
            return after

    def expected_round_end(self) -> Offset:
        """About where the first round of an epoch that began now would end."""
        with self._lock:
            tiers = [self._ledger.counts(pool.tier) for pool in self._ledger.pools if pool.slots]
        return Offset(1 + sum(2 + counts.held // MAX_RUN_BLOCKS for counts in tiers))

    def begin_round(self) -> bool:
        """Begin a round; False when one is under way, or the stream has ended."""
        with self._lock:
            began = Position(self._ledger.epoch, self._ledger.applied)
            if self._ended or not self._ledger.begin_round():
                return False
            self._began = began
            self._happened.append(Began())
            return True

    def step_round(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """State some more of what is held; whether the round goes on."""
        with self._lock:
            if self._ended:
                return False
            going_on = self._ledger.step_round(limit)
            if self._began is not None and not going_on:
                if self._ledger.overflowed:
                    self._happened.append(Dropped())
                else:
                    self._whole.append(WholeRound(self._began, Position(self._ledger.epoch, self._ledger.applied)))
                    self._happened.append(Ended())
                self._began = None
            return going_on

    @property
    def in_round(self) -> bool:
        """Whether a round is under way."""
        return self._began is not None

    def take_happened(self) -> list[Input]:
        """What became of rounds since the last call, whoever began or stepped them."""
        with self._lock:
            happened, self._happened = self._happened, []
        return happened

    def take_whole(self, safe: Position) -> WholeRound | None:
        """The last round of which everything lies before `safe`, once."""
        with self._lock:
            found = None
            while self._whole and self._whole[0].ended <= safe:
                found = self._whole.popleft()
        return found

    def waits_for(self, position: Position) -> bool:
        """Whether a round has ended before a position that nobody has taken."""
        return any(whole.ended <= position for whole in tuple(self._whole))

    def end(self) -> None:
        """End the stream for good. Under the lock."""
        self._ended = True
        self._ledger.stop()

    def _note_epoch(self, after: Offset) -> None:
        """An epoch's first round is whole as it begins."""
        epoch = self._ledger.epoch
        self._happened += [Began(), Ended()]
        self._whole.clear()
        self._whole.append(WholeRound(Position(epoch, Offset(0)), Position(epoch, after)))
