"""The native fold and scan are their specifications: same residencies, digests, flags, anomalies, refusals and
words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core import codec
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.errors import FrameError, IllegalEventError, LayoutError, MalformedFrameError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier, pack_slots
from tests.captures import make_capture, packed
from tests.examples import examples
from tests.held import recomputed_digest
from tests.small_events import HASHES, OWNERS, small_events
from tests.strategies import frames, pools_stated

Missed = int  # in a sequence of events: the rest is read after something was missed; above 0, blindly in this epoch


def check_same(native: _native.Residencies, reference: Residencies) -> None:
    """All that can be asked of a fold."""
    for name in ("strict", "epoch", "stopped", "digest", "pools"):
        assert getattr(native, name) == getattr(reference, name), name
    assert list(native.pools) == list(reference.pools)
    assert recomputed_digest(native) == recomputed_digest(reference) == reference.digest
    assert native.count() == reference.count()
    for tier in Tier:
        assert native.blocks(tier) == reference.blocks(tier)
        assert native.count(tier) == reference.count(tier)
        assert native.tier_digest(tier) == reference.tier_digest(tier)
        assert native.is_whole(tier) == reference.is_whole(tier)
        assert native.is_cluster(tier) == reference.is_cluster(tier)


def outcome(fold: Any, event: Event) -> object:
    """The anomalies of an event, or its refusal."""
    try:
        result = fold.evolve(event)
    except IllegalEventError as error:
        return error.rule, str(error)
    return result if isinstance(result, list) else result.anomalies


def fold_both(strict: bool, history: Sequence[Event | Missed]) -> list[str]:
    """Fold a history side by side. Returns the rules that were broken."""
    native, reference = _native.Residencies(strict), Residencies(strict)
    broken: list[str] = []
    for event in history:
        if isinstance(event, int):
            for fold in (native, reference):
                fold.strict = False if event > 0 else fold.strict
                if event > 0:
                    fold.begin_blind(Epoch(event))
                else:
                    fold.miss_events()
        else:
            ours, theirs = outcome(native, event), outcome(reference, event)
            assert ours == theirs
            broken += [ours[0]] if isinstance(ours, tuple) else [rule for rule, _ in ours]  # type: ignore[union-attr]
        check_same(native, reference)
    return broken


# -- any events at all -------------------------------------------------------------------------------------------------

START = InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.HBM, 2000, 64), PoolStated(Tier.HOST, 8, 64)))
histories = st.lists(small_events() | st.sampled_from([0, 0, 7]), max_size=40)


@settings(max_examples=examples(400))
@given(st.booleans(), st.booleans(), histories)
def test_any_history_folds_alike(strict: bool, is_started: bool, history: list[Event | Missed]):
    fold_both(strict, [START, *history] if is_started else history)


@given(st.lists(pools_stated, max_size=6))
def test_pools_are_kept_as_they_were_listed(listed: list[PoolStated]):
    fold_both(True, [InstanceStarted(epoch=Epoch(1), pools=tuple(listed))])


# -- what instances do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_what_an_instance_does_is_legal_for_both(seed: int):
    assert fold_both(True, [entry.event for entry in make_capture(seed).recorded]) == []


def test_what_is_left_of_histories_folds_alike():
    broken: set[str] = set()
    for seed in range(60):
        pick = random.Random(seed)
        events = [entry.event for entry in make_capture(seed, commands=100).recorded]
        history: list[Event | Missed] = []
        while events:
            length = pick.randint(1, 40)
            history += events[:length]
            del events[: length + pick.randint(1, 10)]
            history.append(pick.choice([0, 0, 1 + len(history)]))
        broken |= set(fold_both(False, history))
    assert broken >= {"evicted-unheld", "slot-reused", "snapshot-incomplete"}, "or nothing was missed"


def test_every_rule_is_met():
    rng = random.Random(1)
    strict: set[str] = set()
    lenient: set[str] = set()
    for _ in range(300):
        history: list[Event | Missed] = [START, *(random_event(rng) for _ in range(40))]
        strict |= set(fold_both(True, history))
        lenient |= set(fold_both(False, history))
    assert strict == {
        "epoch-not-newer",
        "already-stopped",
        "created-twice",
        "evicted-unheld",
        "migrated-unheld",
        "migrated-twice",
        "moved-nowhere",
        "repeated-in-run",
        "foreign-namespace",
        "slot-outside",
        "slot-reused",
        "snapshot-added",
        "moved-silently",
        "snapshot-went-back",
        "snapshot-incomplete",
        "snapshot-withdrew",
    }
    assert lenient == {
        "created-twice",
        "evicted-unheld",
        "moved-silently",
        "slot-reused",
        "snapshot-added",
        "snapshot-incomplete",
        "snapshot-withdrew",
    }
    assert fold_both(True, [SnapshotEnded(tier=Tier.HBM, snapshot=1, count=0)]) == ["not-started"]


def random_event(rng: random.Random) -> Event:
    """As `small_events`, from a seed, and more often legal."""
    tier = rng.choice([Tier.HBM, Tier.HOST])
    namespace = rng.choice([OWNERS[0]] * 5 + OWNERS)
    run = rng.choices(HASHES, k=rng.randint(1, 2))
    hashes, slots = b"".join(run), pack_slots(rng.choice([HASHES.index(block), rng.randint(0, 9)]) for block in run)
    match rng.randint(0, 40):
        case 0:
            return rng.choice([InstanceStopped(reason=StopReason.SHUTDOWN), UsageRecorded(since_ms=1, until_ms=2)])
        case 1:
            return InstanceStarted(epoch=Epoch(rng.randint(0, 3)), pools=START.pools)
        case number if number < 14:
            return BlocksCreated(namespace=namespace, tier=tier, hashes=hashes, slots=slots)
        case number if number < 20:
            source, target = rng.choice([(Tier.HBM, Tier.HOST), (Tier.HOST, Tier.HBM), (Tier.HBM, Tier.HBM)])
            return BlocksMigrated(
                namespace=namespace,
                source=source,
                target=target,
                kept=rng.random() < 0.5,
                cause=MigrateCause.FETCH,
                hashes=hashes,
                slots=slots,
            )
        case number if number < 26:
            return BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.QUOTA, hashes=hashes)
        case number if number < 33:
            return ResidenciesListed(
                namespace=namespace, tier=tier, snapshot=rng.randint(1, 4), hashes=hashes, slots=slots
            )
        case _:
            return SnapshotEnded(tier=tier, snapshot=rng.randint(1, 4), count=rng.choice([0, 0, 1, 2]))


def test_thousands_of_blocks_come_and_go_alike():
    rng = random.Random(3)
    native, reference = _native.Residencies(), Residencies()
    free = list(range(6000))
    held: list[tuple[bytes, list[int]]] = []
    events: list[Event] = [InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.HBM, 6000, 64),))]
    for _ in range(1500):
        if held and (len(free) < 16 or rng.random() < 0.4):
            run, slots = held.pop(rng.randrange(len(held)))
            free += slots
            events.append(BlocksEvicted(namespace=OWNERS[0], tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=run))
        else:
            run, slots = rng.randbytes(16 * 16), [free.pop(rng.randrange(len(free))) for _ in range(16)]
            held.append((run, slots))
            events.append(BlocksCreated(namespace=OWNERS[0], tier=Tier.HBM, hashes=run, slots=pack_slots(slots)))
    for index, event in enumerate(events):
        assert outcome(native, event) == outcome(reference, event) == []
        if index % 300 == 0:
            check_same(native, reference)
    check_same(native, reference)
    assert native.memory_bytes > 28 * native.count()


# -- whole frames ------------------------------------------------------------------------------------------------------


def frame_of(events: Sequence[Event], epoch: int = 1) -> Frame:
    return Frame(
        instance=InstanceId("i"),
        epoch=Epoch(epoch),
        first_offset=Offset(7),
        wall_time_ns=5,
        digest=9,
        events=tuple(events),
    )


def folded(fold: Any, data: bytes, at: int, first: int) -> tuple[Any, ...]:
    """What folding a frame gives, with the refusal as words."""
    result = fold.evolve_frame(data, at, first)
    illegal = result.illegal
    assert illegal is None or type(illegal) is IllegalEventError
    return (*result._replace(illegal=None), illegal and (illegal.rule, str(illegal)))


@settings(max_examples=examples(300))
@given(st.booleans(), st.lists(small_events(), min_size=1, max_size=12), st.integers(0, 13), st.binary(max_size=9))
@example(True, [START, InstanceStarted(epoch=Epoch(2)), InstanceStopped(reason=StopReason.FENCED)], 0, b"")
def test_a_frame_folds_as_far_in_both(strict: bool, events: list[Event], first: int, before: bytes):
    native, reference = _native.Residencies(strict), Residencies(strict)
    for fold in (native, reference):
        fold.evolve(START)
    data = before + encode_frame(frame_of(events)) + b"rest"
    assert folded(native, data, len(before), first) == folded(reference, data, len(before), first)
    check_same(native, reference)


def test_a_frame_that_is_not_good_changes_nothing():
    good = encode_frame(frame_of([BlocksCreated(namespace=OWNERS[0], tier=Tier.HBM, hashes=HASHES[0])]))
    late = bytearray(good)
    late[12:16] = (2).to_bytes(4, "little")  # one event more than there is: the first one is still good
    for data in (good[:-1], b"x" + good[1:], good[:-1] + b"x", with_checksum(bytes(late))):
        words = []
        for fold in (_native.Residencies(), Residencies()):
            fold.evolve(START)
            with pytest.raises(FrameError) as raised:
                fold.evolve_frame(data)
            words.append((type(raised.value), str(raised.value)))
            assert fold.count() == 0
        assert words[0] == words[1]


def test_what_is_no_event_is_refused():
    fold = _native.Residencies()
    for wrong in (None, 7, frame_of([START])):
        with pytest.raises(TypeError):
            fold.evolve(wrong)  # type: ignore[arg-type]
    created = BlocksCreated(namespace=OWNERS[0], tier=Tier.HBM, hashes=HASHES[0] + HASHES[1], slots=b"1234")
    for event in (created, msgspec.structs.replace(created, hashes=b"short", slots=b"")):
        with pytest.raises(LayoutError):
            fold.evolve(event)
    with pytest.raises(ValueError):
        fold.count(9)  # type: ignore[arg-type]


# -- scans -------------------------------------------------------------------------------------------------------------


def with_checksum(data: bytes) -> bytes:
    """The same bytes as a frame whose length and checksum fit them."""
    body = bytearray(data[:-4])
    body[8:12] = len(data).to_bytes(4, "little")
    return bytes(body) + _native.crc32c(body).to_bytes(4, "little")


def scanned(scan: Any, data: bytes, at: int) -> object:
    found, error = scan(data, at)
    return found, error and (type(error), error.at, str(error))


@given(st.lists(frames(max_events=3), max_size=4), st.binary(max_size=8), st.binary(max_size=30))
def test_a_scan_finds_the_same_frames_and_the_same_end(these: list[Frame], before: bytes, after: bytes):
    data = before + packed(these) + after
    ours = scanned(_native.scan_frames, data, len(before))
    assert ours == scanned(codec.scan_frames, data, len(before))
    found, error = _native.scan_frames(data, len(before))
    assert [(one.epoch, one.first_offset, one.digest) for one in found[: len(these)]] == [
        (frame.epoch, frame.first_offset, frame.digest) for frame in these
    ]
    assert (error is None) == (not after)


@settings(max_examples=examples(300))
@given(frames(max_events=4), frames(max_events=4), st.data())
def test_a_hostile_frame_ends_both_scans_in_the_same_words(good: Frame, frame: Frame, draw: st.DataObject):
    data = bytearray(encode_frame(frame))
    for _ in range(draw.draw(st.integers(1, 3))):
        position = draw.draw(st.integers(6, len(data) - 5))
        data[position : position + draw.draw(st.integers(0, 4))] = draw.draw(st.binary(max_size=6))
    whole = encode_frame(good) + with_checksum(bytes(data)) + encode_frame(good)
    assert scanned(_native.scan_frames, whole, 0) == scanned(codec.scan_frames, whole, 0)
    first = len(encode_frame(good))
    ours, theirs = _native.Residencies(strict=False), Residencies(strict=False)
    results = []
    for fold in (ours, theirs):
        try:
            results.append(folded(fold, whole, first, 0))
        except FrameError as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]
    check_same(ours, theirs)


def test_the_largest_numbers_are_scanned_as_they_are():
    most = 2**64 - 1
    frame = Frame(
        instance=InstanceId("i"),
        epoch=Epoch(most),
        first_offset=Offset(most),
        wall_time_ns=most,
        digest=most,
        events=(InstanceStopped(reason=StopReason.FENCED),) * 2,
    )
    (ours,), error = _native.scan_frames(encode_frame(frame))
    assert error is None and ours == codec.scan_frames(encode_frame(frame))[0][0]
    assert (ours.next_offset, ours.event_count) == (most + 2, 2)


def test_a_start_that_does_not_decode_is_told_before_what_comes_after_it():
    blob = msgspec.msgpack.encode(START).replace(b"\x01", b"\xc1", 1)
    bad = b"\x01" + len(blob).to_bytes(4, "little") + blob
    header = b"KVBM\x01\x00\x01\x00" + bytes(4) + (2).to_bytes(4, "little") + bytes(32)
    for after in (b"\x07\x00", b"\x09"):
        data = with_checksum(header + b"i" + bad + after + bytes(4))
        ours = scanned(_native.scan_frames, data, 0)
        assert ours == scanned(codec.scan_frames, data, 0)
        assert isinstance(ours, tuple) and ours[0] == [] and ours[1][0] is MalformedFrameError
        assert "InstanceStarted does not decode" in ours[1][2]
