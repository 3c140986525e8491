"""What is durable in which epoch, and what a wait for an epoch that has gone ends with."""

from __future__ import annotations

from kvbm.core.ids import Epoch, Offset
from kvbm.manager.record.offsets import Offsets

ONE, TWO, THREE = Epoch(1), Epoch(2), Epoch(3)


def test_an_offset_is_durable_once_its_epoch_has_reached_it() -> None:
    offsets = Offsets()
    offsets.begin_epoch(ONE, Offset(4))
    assert offsets.is_durable(ONE, Offset(0))
    assert not offsets.is_durable(ONE, Offset(1))
    offsets.advance_durable(ONE, Offset(5))
    assert offsets.is_durable(ONE, Offset(5))
    assert not offsets.is_durable(ONE, Offset(6))
    assert offsets.durable == (1, 5)


def test_an_offset_that_never_was_written_counts_once_a_later_snapshot_is_whole() -> None:
    offsets = Offsets()
    offsets.begin_epoch(ONE, Offset(4))
    offsets.advance_durable(ONE, Offset(5))
    offsets.begin_epoch(TWO, Offset(3))
    assert offsets.is_durable(ONE, Offset(5))
    assert not offsets.is_durable(ONE, Offset(6))
    offsets.advance_durable(TWO, Offset(2))
    assert not offsets.is_durable(ONE, Offset(6))
    assert not offsets.is_whole(TWO)
    offsets.advance_durable(TWO, Offset(3))
    assert offsets.is_durable(ONE, Offset(6))
    assert offsets.is_whole(TWO)
    assert not offsets.is_durable(TWO, Offset(4))


def test_an_offset_of_a_later_epoch_is_not_durable_because_an_earlier_one_came_far() -> None:
    offsets = Offsets()
    offsets.begin_epoch(ONE, Offset(1))
    offsets.advance_durable(ONE, Offset(100))
    offsets.begin_epoch(TWO, Offset(3))
    assert not offsets.is_durable(TWO, Offset(1))
    offsets.begin_epoch(THREE, Offset(3))  # the snapshot of the second was never written
    assert not offsets.is_durable(TWO, Offset(1))
    assert offsets.is_durable(ONE, Offset(100))
    offsets.advance_durable(THREE, Offset(3))
    assert offsets.is_durable(TWO, Offset(1))
