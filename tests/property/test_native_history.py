"""The native history is its specification, row by row, and both say at each moment what the fold holds then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core.events import Event, InstanceStarted
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, NamespaceId, SequenceHash, Tier
from kvbm.core.stays import CLAIMED, LASTING
from kvbm.reference.history import StayHistory
from tests.examples import examples
from tests.small_events import small_events, small_frames

MISSED = "missed"  # in a sequence of frames: some were
Moment = dict[tuple[Tier, SequenceHash], NamespaceId]

frames_of_events = st.lists(
    st.just(MISSED) | st.tuples(st.integers(1, 3), st.lists(small_events(), min_size=1, max_size=5)), max_size=12
)


def told(history: StayHistory | _native.StayHistory) -> tuple[np.ndarray, np.ndarray, tuple[NamespaceId, ...], object]:
    return history.take_ended(), history.lasting(), tuple(history.namespaces), tuple(history.names)


@given(frames_of_events)
@settings(max_examples=examples(300), deadline=None)
def test_the_native_history_is_its_specification(steps: list[str | tuple[int, list[Event]]]):
    native, reference = _native.StayHistory(), StayHistory()
    for data in small_frames(steps):
        for history in (native, reference):
            if data is None:
                history.miss_events()
            else:
                history.evolve_frame(data)
        ours, theirs = told(native), told(reference)
        assert ours[0].tobytes() == theirs[0].tobytes(), (ours[0], theirs[0])
        assert ours[1].tobytes() == theirs[1].tobytes(), (ours[1], theirs[1])
        assert ours[2:] == theirs[2:]
        assert native.count() == reference.count() == len(ours[1])


@given(frames_of_events)
@settings(max_examples=examples(200), deadline=None)
def test_stays_say_what_was_held_at_each_moment(steps: list[str | tuple[int, list[Event]]]):
    history, fold = _native.StayHistory(), Residencies(strict=False)
    ended: list[np.ndarray] = []
    held: list[Moment] = []
    for data, step in zip(small_frames(steps), steps, strict=True):
        if data is None or isinstance(step, str):
            history.miss_events()
            fold.miss_events()
        else:
            history.evolve_frame(data)
            ended.append(history.take_ended())
            _fold(fold, Epoch(max([step[0], fold.epoch])), step[1])
        held.append({(tier, block): one.namespace for tier in Tier for block, one in fold.held[tier].items()})
    rows = np.concatenate([*ended, history.lasting()]) if ended else history.lasting()
    for number, moment in enumerate(held):
        assert _held_at(rows, history.namespaces, (number + 1) * 10**9) == moment


def _fold(fold: Residencies, epoch: Epoch, events: Sequence[Event]) -> None:
    for event in events:
        if isinstance(event, InstanceStarted):
            fold.begin_blind(epoch)
            fold.evolve(InstanceStarted(epoch=epoch, pools=event.pools))
        else:
            if fold.epoch != epoch:
                fold.begin_blind(epoch)
            fold.evolve(event)


def _held_at(rows: np.ndarray, namespaces: Sequence[NamespaceId], time_ns: int) -> Moment:
    """What was held behind the frame of a time; a block that was held twice would be found twice."""
    is_held = (rows["begin"] != 0xFF) & (rows["end"] != CLAIMED) & (rows["begin_ns"] <= time_ns)
    is_held &= (rows["end"] == LASTING) | (rows["end_ns"] > time_ns)
    found = [
        ((Tier(int(row["tier"])), SequenceHash(row["hash"].tobytes())), namespaces[row["namespace"]])
        for row in rows[is_held]
    ]
    assert len(dict(found)) == len(found)
    return dict(found)
