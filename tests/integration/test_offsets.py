"""A thread that waits for what becomes durable. What is durable when: tests/unit/test_offsets.py."""

from __future__ import annotations

import threading

from kvbm.core.ids import Epoch, Offset
from kvbm.manager.record.offsets import Offsets
from kvbm.streams.base import ORIGIN, Position

ONE, TWO = Epoch(1), Epoch(2)


def test_a_wait_ends_when_another_epochs_snapshot_is_whole() -> None:
    offsets = Offsets()
    offsets.begin_epoch(ONE, Offset(1))
    reached: list[bool] = []
    waiting = threading.Thread(target=lambda: reached.append(offsets.wait_durable(ONE, Offset(9), 60.0)))
    waiting.start()
    offsets.begin_epoch(TWO, Offset(2))
    offsets.advance_durable(TWO, Offset(2))
    waiting.join(60.0)
    assert reached == [True]
    assert not offsets.wait_durable(TWO, Offset(3), 0.0)


class _Looked(Offsets):
    """Another epoch begins and comes far as soon as one has looked at how far the last one has come, unless that is
    kept out.
    """

    _at = ORIGIN
    _is_watched = False

    @property
    def _durable(self) -> Position:
        seen, is_watched, self._is_watched = self._at, self._is_watched, False
        if is_watched:
            other = threading.Thread(target=self._go_on)
            other.start()
            other.join()
        return seen

    @_durable.setter
    def _durable(self, durable: Position) -> None:
        self._at = durable

    def _go_on(self) -> None:
        if self._changed.acquire(blocking=False):
            self.begin_epoch(TWO, Offset(1000))
            self.advance_durable(TWO, Offset(100))
            self._changed.release()


def test_an_epoch_and_its_offset_are_looked_at_together() -> None:
    offsets = _Looked()
    offsets.begin_epoch(ONE, Offset(1))
    offsets.advance_durable(ONE, Offset(5))
    offsets._is_watched = True
    assert not offsets.is_durable(ONE, Offset(50))
