"""A thread that waits for what becomes durable. What is durable when: tests/unit/test_offsets.py."""

from __future__ import annotations

import threading

from kvbm.core.ids import Epoch, Offset
from kvbm.manager.offsets import Offsets

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
