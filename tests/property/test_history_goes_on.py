"""A history that goes on, however its log is cut into pieces, says what one says that is made of the whole log; and
what it counts of a moment is what its stays say.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.assembly import NATIVE, NATIVE_STAYS
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, InstanceId, Offset, pack_slots
from kvbm.core.stays import StayState
from kvbm.reference.history import StayHistory
from kvbm.replay.history import write_history
from kvbm.replay.history_moment import Moments
from kvbm.replay.opening import open_source
from kvbm.replay.sql import HistoryDatabase
from kvbm.streams.base import Fence, StreamMessage
from kvbm.streams.fence_records import encode_told
from tests.examples import examples
from tests.small_events import SLOTS, small_events, small_frames

BEGIN_NS = 1_767_225_600_000_000_000
MIDNIGHT = datetime(2026, 1, 1)  # noqa: DTZ001 - histories are in UTC, without a zone
STANDS_FOR_NONE = pack_slots([SLOTS[-1]])
events_in_slots = small_events().filter(lambda one: STANDS_FOR_NONE not in getattr(one, "slots", b""))
steps_of_events = st.lists(
    st.just("missed") | st.tuples(st.integers(1, 3), st.lists(events_in_slots, min_size=1, max_size=5)), max_size=12
)
TABLES = ("history", "events", "instances", "namespaces", "holes", "residencies", "claimed_objects", "tenants")


def rows_of(state: StayState) -> tuple[object, ...]:
    return (
        state.epoch,
        state.tiers.tobytes(),
        tuple(state.namespaces),
        tuple(state.names),
        state.lasting.tobytes(),
        state.snapshots.tobytes(),
    )


@given(steps_of_events, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_fold_goes_on_from_the_state_of_another(steps: list[Any], data: st.DataObject):
    cut = data.draw(st.integers(0, len(steps)))
    whole, native, reference = _native.StayHistory(), _native.StayHistory(), StayHistory()
    ended: list[list[np.ndarray]] = [[], [], []]
    for number, frame in enumerate(small_frames(steps)):
        if number == cut:
            states = native.state(), reference.state()
            assert rows_of(states[0]) == rows_of(states[1])
            native, reference = _native.StayHistory(), StayHistory()
            native.resume(states[1])
            reference.resume(states[0])
        for fold, taken in zip((whole, native, reference), ended, strict=True):
            if frame is None:
                fold.miss_events()
            else:
                fold.evolve_frame(frame)
            taken.append(fold.take_ended())
    for fold, taken in zip((native, reference), ended[1:], strict=True):
        assert (
            np.concatenate([*taken, fold.lasting()]).tobytes() == np.concatenate([*ended[0], whole.lasting()]).tobytes()
        )
        assert rows_of(fold.state()) == rows_of(whole.state())


def test_a_state_that_contradicts_itself_is_refused():
    state = _native.StayHistory().state()
    row = np.zeros(1, dtype=state.lasting.dtype)
    for broken in (
        state._replace(lasting=row),  # without a snapshot
        state._replace(lasting=row, snapshots=np.zeros(1, dtype="<u4")),  # of no namespace
        state._replace(tiers=state.tiers[:2]),
        state._replace(names=("a", "a")),
    ):
        with pytest.raises(Exception, match=r"goes on once|names no|twice"):
            _native.StayHistory().resume(broken)


def a_log(seed: int) -> list[bytes]:
    """Pieces of a log: frames of two instances, some twice, some too late or not at all, fences, and damage."""
    chance = random.Random(seed)
    strategy_rows = _EVENTS.pool(seed)
    pieces: list[bytes] = []
    places = {"one": (1, 0, 1), "two": (1, 0, 1)}  # epoch, offset, life
    for number in range(chance.randint(5, 40)):
        name = chance.choice(["one", "one", "two"])
        epoch, offset, life = places[name]
        kind = chance.random()
        if kind < 0.06:
            life += 1
            fence = Fence(Epoch(epoch), f"run-{life}", number + 1, ((Epoch(epoch), f"run-{life}"),))
            message = StreamMessage(number + 1, f"kvbm.events.local.{name}", b"", 0, None)
            pieces.append(encode_told(message, fence))
            places[name] = (epoch, offset, life)
            continue
        if kind < 0.16:
            epoch, offset = epoch + 1, 0
        elif kind < 0.22:
            offset += chance.randint(1, 5)  # a hole
        events = [chance.choice(strategy_rows) for _ in range(chance.randint(1, 4))]
        if offset == 0 and chance.random() < 0.8:
            events[0] = InstanceStarted(epoch=Epoch(epoch))
        frame = Frame(
            instance=InstanceId(name),
            epoch=Epoch(epoch),
            first_offset=Offset(offset),
            wall_time_ns=BEGIN_NS + 10**9 * (number + chance.choice([0, 0, 0, -3])),
            digest=0,
            events=tuple(events),
        )
        pieces.append(encode_frame(frame))
        places[name] = (epoch, offset + len(events), life)
        if chance.random() < 0.1:
            pieces.append(chance.choice(pieces))
        if chance.random() < 0.15 and len(pieces) > 1:
            pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
        if chance.random() < 0.05:
            pieces[-1] = pieces[-1][:-3] + b"xyz"
    return pieces


class _Events:
    """Events that strategies make, which are slow to draw from within a loop."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def pool(self, seed: int) -> list[Any]:
        if not self._made:

            @given(events_in_slots)
            @settings(max_examples=300, deadline=None, database=None)
            def gather(event: Any) -> None:
                self._made.append(event)

            gather()
        return self._made


_EVENTS = _Events()


def answers(folder: Path, moments: Sequence[datetime]) -> list[object]:
    with HistoryDatabase(folder) as opened:
        told: list[object] = [opened.ask(f"FROM {name} ORDER BY ALL").rows for name in TABLES]
        counts = Moments(folder, opened.manifest)
        for moment in moments:
            held = opened.ask(
                "SELECT instance, stream, life, tier, namespace, count(*) FROM residencies_at(?) GROUP BY ALL", [moment]
            ).rows
            counted = [
                (one.instance, one.stream, one.life, one.tier, one.namespace, one.blocks)
                for one in counts.held_at(moment)
            ]
            assert sorted(counted) == sorted(held), moment
            told.append(sorted(held))
        notes = [one for one in opened.manifest.notes if "tail torn" not in one]
        return [*told, notes, [one.message for one in opened.manifest.findings], opened.manifest.until]


def cut_into(folder: Path, pieces: list[bytes], chance: random.Random, is_archive: bool) -> list[list[tuple[str, int]]]:
    """Writings: how far each file reaches at each."""
    data = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    files = sorted({0, *(chance.sample(ends[:-1], min(2, len(ends) - 1)) if is_archive else ())})
    cuts = sorted({chance.choice([chance.randint(1, len(data)), chance.choice(ends)]) for _ in range(4)} | {len(data)})
    return [
        [
            (f"{begin:020}.kvbm", begin, min(cut, end))
            for begin, end in zip(files, [*files[1:], len(data)], strict=True)
            if begin < cut
        ]
        for cut in cuts
    ]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 60))])
def test_a_history_cut_anywhere_is_the_one_made_at_once(seed: int):
    chance = random.Random(seed)
    pieces = a_log(seed)
    data = b"".join(pieces)
    is_archive = chance.random() < 0.7
    with tempfile.TemporaryDirectory() as above:
        logs, folder, anew = Path(above) / "log", Path(above) / "history", Path(above) / "anew"
        logs.mkdir()
        for writing in cut_into(logs, pieces, chance, is_archive):
            for name, begin, end in writing:
                (logs / name).write_bytes(data[begin:end])
            source = str(logs if is_archive else logs / writing[0][0])
            report = write_history(open_source(source), folder, NATIVE, NATIVE_STAYS)
            assert not any("anew" in note for note in report.notes)
            write_history(open_source(source), anew, NATIVE, NATIVE_STAYS, anew=True)
            moments = [MIDNIGHT + timedelta(seconds=chance.uniform(-2, len(pieces) + 2)) for _ in range(3)]
            moments += [MIDNIGHT + timedelta(seconds=chance.randint(-2, len(pieces))) for _ in range(3)]
            assert answers(folder, moments) == answers(anew, moments)
