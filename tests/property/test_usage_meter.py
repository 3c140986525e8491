"""What tenants use: both meters, the account of a manager and the sums of a log, against a fold that counts each block
for itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from structlog.testing import capture_logs

from kvbm import _native
from kvbm.core.backend import LedgerProtocol
from kvbm.core.codec import Frame, FrameBytes
from kvbm.core.events import (
    BlocksCreated,
    BlocksMigrated,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    UsageRecorded,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import HASH_BYTES, UNKNOWN, Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier
from kvbm.core.usage import (
    HOUR_MS,
    LONGEST_STEP_MS,
    UsageEntry,
    UsageHour,
    UsageMeter,
    UsageSums,
    csv_of,
    entries_of,
    gap_of,
    start_of,
)
from kvbm.manager.record.usage_account import UsageAccount, UsagePlan
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.reference.ledger import Ledger
from kvbm.reference.usage_meter import ReadableMeter
from tests.usage_instances import (
    BEGUN_MS,
    INSTANCE,
    LATE,
    POOLS,
    SPACES,
    TENANTS,
    Clock,
    Driven,
    decoded,
    do_something,
    driven,
)

SEEDS = range(2)


def test_what_was_used_before_an_erasure_is_recorded_no_more_and_what_comes_later_is() -> None:
    one, rng = driven(), random.Random(5)
    for _ in range(40):
        do_something(one.stream.ledger, rng, SPACES[:2])
    one.account.read_locked(SPACES[0].id, {Tier.HBM: 3})
    one.take()
    one.clock.ms += HOUR_MS
    one.stream.ledger.stop()  # nothing is recorded meanwhile: the first hour waits
    one.take()
    one.stream.erase_usage(1, lambda tenant: tenant == "acme")
    waiting = one.account.take_events()
    assert [[row.tenant for row in event.rows] for event in waiting] == [[""]]

    later = driven()
    later.take()
    later.account.read_locked(SPACES[0].id, {Tier.HBM: 3})
    later.stream.erase_usage(1, lambda tenant: tenant == "acme")
    for _ in range(2):
        later.clock.ms += HOUR_MS  # the period in which it was erased, then one after
        later.account.read_locked(SPACES[0].id, {Tier.HBM: 4})
        later.take()
    later.stream.end()
    later.take()
    assert [[(row.tenant, row.read_blocks[0]) for row in event.rows] for event in later.events()] == [
        [],
        [("acme", 4)],
        [],
    ]


class Naive:
    """Counts block by block and millisecond step by step what the frames of an instance say, from nothing but them."""

    def __init__(self) -> None:
        self.fold = Residencies(strict=True)
        self.last_ms: int | None = None
        self.held: Counter[tuple[int, str, Tier]] = Counter()  # (hour, tenant, tier) → block milliseconds
        self.put: Counter[tuple[int, str, Tier]] = Counter()
        self.tenants = {space.id: space.tenant for space in SPACES}

    def pass_to(self, now_ms: int) -> None:
        if self.last_ms is not None and 0 < now_ms - self.last_ms <= LONGEST_STEP_MS:
            at = self.last_ms
            while at < now_ms:
                end = min(now_ms, (at // HOUR_MS + 1) * HOUR_MS)
                for tier in Tier:
                    for one in self.fold.held[tier].values():
                        self.held[at // HOUR_MS, self.tenant(one.namespace), tier] += end - at
                at = end
        self.last_ms = now_ms

    def tenant(self, namespace: NamespaceId) -> str:
        return self.tenants.get(namespace, UNKNOWN)

    def take(self, frame: Frame) -> None:
        self.pass_to(frame.wall_time_ns // 1_000_000)
        assert self.last_ms is not None
        hour = self.last_ms // HOUR_MS
        for event in frame.events:
            self.fold.evolve(event)
            if isinstance(event, BlocksCreated):
                self.put[hour, self.tenant(event.namespace), event.tier] += len(event.hashes) // HASH_BYTES
            elif isinstance(event, BlocksMigrated) and event.cause == MigrateCause.OFFLOAD:
                self.put[hour, self.tenant(event.namespace), event.target] += len(event.hashes) // HASH_BYTES


def told(events: list[UsageRecorded]) -> tuple[Counter[tuple[int, str, Tier]], Counter[tuple[int, str, Tier]]]:
    """What recorded stretches say, in the naive fold's terms."""
    held: Counter[tuple[int, str, Tier]] = Counter()
    put: Counter[tuple[int, str, Tier]] = Counter()
    for event in events:
        assert event.since_ms <= event.until_ms <= (event.since_ms // HOUR_MS + 1) * HOUR_MS
        assert event.block_bytes == (4096,) * 4
        for row in event.rows:
            for tier in Tier:
                held[event.since_ms // HOUR_MS, row.tenant, tier] += row.block_ms[tier]
                put[event.since_ms // HOUR_MS, row.tenant, tier] += row.put_blocks[tier]
    return +held, +put


BOTH = pytest.mark.parametrize(
    ("new_ledger", "new_meter"), [(_native.Ledger, _native.UsageMeter), (Ledger, ReadableMeter)], ids=["c++", "python"]
)


@pytest.mark.parametrize("seed", SEEDS)
@BOTH
def test_what_is_recorded_is_what_a_naive_fold_of_the_log_counts(
    seed: int, new_ledger: Callable[..., LedgerProtocol], new_meter: Callable[[int], UsageMeter]
):
    """Hours, hostile names, a namespace nobody told of, a clock that goes back and one that jumps, epochs in place."""
    rng = random.Random(seed)
    one = driven(new_ledger, new_meter, every_s=rng.choice([60, 600, 3600]))
    reads: Counter[tuple[str, Tier]] = Counter()
    tokens: Counter[str] = Counter()
    epoch = 1
    for _ in range(90):
        for _ in range(rng.randrange(4)):
            do_something(one.stream.ledger, rng, [*SPACES, LATE])
        if rng.random() < 0.3:
            space, tier, blocks = rng.choice([*SPACES, LATE]), rng.choice(list(Tier)), rng.randint(1, 9)
            one.account.prefill_tokens_per_s = rng.choice([0.0, 1000.0])
            one.account.read_locked(space.id, {tier: blocks})
            tenant = UNKNOWN if space is LATE else space.tenant
            reads[tenant, tier] += blocks
            tokens[tenant] += 0 if space is LATE else 16 * blocks
        one.take()
        if rng.random() < 0.04:
            epoch += 1
            one.stream.restart(Epoch(epoch))
            one.take()
        one.clock.ms += rng.choice([0, 1, 7, 5_000, 400_000, 400_000, 2 * HOUR_MS, -90_000, 40 * HOUR_MS])
    one.take()
    one.stream.end()
    one.take()
    naive = Naive()
    for at_ms, frames in one.takes:
        naive.pass_to(at_ms)  # where nothing was recorded, the log says nothing of the clock
        for frame in decoded(frames):
            naive.take(frame)
    held, put = told(one.events())
    assert held == +naive.held
    assert put == +naive.put
    rows = [row for event in one.events() for row in event.rows]
    found: Counter[tuple[str, Tier]] = Counter()
    for row in rows:
        for tier in Tier:
            found[row.tenant, tier] += row.read_blocks[tier]
    assert +found == +reads
    saved = Counter({tenant: sum(row.saved_tokens for row in rows if row.tenant == tenant) for tenant in tokens})
    assert +saved == +tokens
    for row in rows:  # at 1,000 tokens a second each token is a millisecond
        assert row.saved_us == 1000 * (row.saved_tokens - row.unrated_tokens)
    assert one.events()[-1].is_last and not any(event.is_last for event in one.events()[:-1])
    assert len(held) > 20 and len(put) > 20, "the log says too little to prove anything"


@pytest.mark.parametrize("seed", SEEDS)
def test_both_meters_count_the_same_of_any_frames(seed: int):
    rng = random.Random(seed)
    one = driven()
    native, readable = _native.UsageMeter(8), ReadableMeter(8)
    for _ in range(60):
        do_something(one.stream.ledger, rng, SPACES)
        one.clock.ms += rng.choice([0, 3, 1_000, 50 * HOUR_MS, -5])
        for frame in one.stream.take():
            native.take(frame.data)
            readable.take(frame.data)
        if rng.random() < 0.3:
            assert native.cut(one.clock.ms) == readable.cut(one.clock.ms)
    assert native.cut(one.clock.ms + 10) == readable.cut(one.clock.ms + 10)


def test_hours_end_on_the_clock_also_where_nothing_happens():
    one = driven()
    one.take()
    assert one.stream.usage_due_in_s() == pytest.approx((HOUR_MS - BEGUN_MS % HOUR_MS) / 1000)
    one.clock.ms += 3 * HOUR_MS
    one.take()
    one.take()
    first = BEGUN_MS // HOUR_MS * HOUR_MS
    stretches = [(event.since_ms, event.until_ms) for event in one.events()]
    assert stretches == [
        (BEGUN_MS, first + HOUR_MS),
        (first + HOUR_MS, first + 2 * HOUR_MS),
        (first + 2 * HOUR_MS, first + 3 * HOUR_MS),
    ]


def test_a_stream_that_overflowed_records_its_hours_once_it_goes_on():
    one = driven(event_bytes=1 << 20)
    ledger, rng = one.stream.ledger, random.Random(1)
    one.take()
    while not ledger.overflowed:
        do_something(ledger, rng, SPACES)
    one.clock.ms += HOUR_MS
    one.take()
    one.take()
    assert not one.events()
    one.stream.restart(Epoch(2))
    one.take()
    one.take()
    assert [(event.since_ms, event.is_last) for event in one.events()] == [(BEGUN_MS, False)]
    assert decoded(one.frames)[-1].epoch == 2


def with_tenants(names: list[str], event_bytes: int) -> tuple[Driven, list[Namespace]]:
    """An instance that knows a namespace of each, and has that much room for events."""
    spaces = [Namespace(model="tiny", block_tokens=1, tenant=name) for name in names]
    one = driven(event_bytes=event_bytes)
    account = UsageAccount(UsagePlan(_native.UsageMeter), POOLS, RevisionedNamespaces(spaces))
    one.stream.usage = account
    return one._replace(account=account), spaces


def test_usage_that_finds_no_room_is_recorded_once_and_with_the_next_epoch():
    one, spaces = with_tenants([f"{number:0200}" for number in range(4096)], 1 << 20)
    one.take()
    for space in spaces:
        one.account.read_locked(space.id, {Tier.HOST: 1})
    one.clock.ms += HOUR_MS
    one.take()
    assert one.stream.ledger.overflowed
    one.take()
    assert 0 < len(one.events()) < 4
    one.stream.restart(Epoch(2))
    for _ in range(3):
        one.take()
    tenants = [row.tenant for event in one.events() for row in event.rows]
    assert tenants == [space.tenant for space in spaces]


def test_a_name_of_nothing_but_nul_fits_its_event():
    one, spaces = with_tenants(["\0" * 255, "ü" * 127 + "\0"], 1 << 20)
    one.take()
    for space in spaces:
        one.account.read_locked(space.id, {Tier.HOST: 1})
    one.stream.end()
    one.take()
    assert [row.tenant for event in one.events() for row in event.rows] == ["ü" * 127, "\ufffd" * 85]


def test_a_stream_ends_also_where_its_last_usage_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    one = driven()
    one.take()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one.account, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.stream.end()
    one.stream.end()
    one.take()
    assert isinstance(decoded(one.frames)[-1].events[-1], InstanceStopped)


def sums_of(streams: Iterator[list[FrameBytes]]) -> UsageSums:
    sums = UsageSums()
    for frames in streams:
        for frame in decoded(frames):
            for offset, event in enumerate(frame.events, frame.first_offset):
                if isinstance(event, UsageRecorded):
                    for entry in entries_of(frame.instance, frame.epoch, offset, event):
                        sums.add(entry)
    return sums


def test_a_crash_is_a_gap_and_a_clean_stop_is_none():
    clock = Clock()
    streams = []
    for epoch, ends in ((1, "killed"), (2, "stopped"), (3, "goes on")):
        one = driven(epoch=epoch, clock=clock)
        one.take()
        clock.ms += HOUR_MS
        one.take()
        one.take()
        clock.ms += 600_000
        if ends == "stopped":
            one.stream.end()
            one.take()
        streams.append(one.frames)
        clock.ms += 60_000
    sums = sums_of(iter(streams))
    gaps = sums.report().gaps
    assert [(gap.since, gap.until) for gap in gaps] == [
        ("2026-09-21T15:00:00Z", "2026-09-21T15:24:20Z"),
        ("2026-09-21T17:00:00Z", ""),
    ]
    hour_ms = BEGUN_MS // HOUR_MS * HOUR_MS
    assert not sums.report(since_ms=hour_ms, until_ms=hour_ms + HOUR_MS).gaps  # it goes on behind that
    told = [
        sums.report(since_ms=at, until_ms=at + HOUR_MS).gaps for at in range(hour_ms, hour_ms + 5 * HOUR_MS, HOUR_MS)
    ]
    assert tuple(gap for hour in told for gap in hour) == gaps


def started(pools: Sequence[PoolStated], epoch: int, at_ms: int) -> UsageEntry | None:
    event = InstanceStarted(epoch=Epoch(epoch), pools=tuple(pools))
    return start_of(InstanceId("a"), at_ms * 1_000_000 + 999_999, event)


def test_what_was_used_before_the_first_record_is_a_gap():
    """Marks of epochs beside records, in any order: each time at which nothing covers an instance is told once."""
    own, at = [PoolStated(Tier.HOST, 8, 64)], BEGUN_MS
    for records, wanted in (
        ([], [(at, None)]),  # it goes on, or was killed
        ([(3, at + 30, at + 40, True)], [(at, at + 30)]),  # killed twice, then whole
        ([(1, at, at + 5, False), (3, at + 30, at + 40, True)], [(at + 5, at + 30)]),
        ([(1, at, at + 5, True), (3, at + 30, at + 40, True)], [(at + 10, at + 30)]),  # stopped, killed, whole
        ([(1, at, at + 5, True), (2, at + 10, at + 12, True), (3, at + 30, at + 40, False)], [(at + 40, None)]),
        ([(3, at, at + 40, True)], []),  # its epochs were given up: what it counts goes on over them
    ):
        entries = [started(own, epoch, at + 10 * begun) for epoch, begun in ((1, 0), (2, 1), (3, 3))]
        for epoch, since_ms, until_ms, is_last in records:
            event = UsageRecorded(since_ms=since_ms, until_ms=until_ms, is_last=is_last, block_bytes=(0,) * 4)
            entries += entries_of(InstanceId("a"), Epoch(epoch), Offset(7), event)
        for order in (entries, entries[::-1]):
            sums = UsageSums()
            for entry in order:
                assert entry is not None
                sums.add(entry)
            told = [gap_of(InstanceId("a"), since, until) for since, until in wanted]
            assert list(sums.report().gaps) == told, records


def test_who_has_no_slots_of_its_own_records_nothing():
    assert started([], 1, BEGUN_MS) is None
    assert started([PoolStated(Tier.HBM, 0, 0)], 1, BEGUN_MS) is None  # a bridge
    assert started([PoolStated(Tier.OBJECT, 9, 64, Reach.CLUSTER, "s3")], 1, BEGUN_MS) is None  # a janitor


def test_names_of_tenants_come_out_of_csv_as_they_went_in():
    import csv
    import io

    one = driven()
    one.take()
    for number, space in enumerate(SPACES, 1):
        one.account.read_locked(space.id, {Tier.HBM: number})
    one.stream.end()
    one.take()
    text = csv_of(sums_of(iter([one.frames])).report().hours)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert {row["tenant"]: int(row["hbm_read_blocks"]) for row in rows} == {
        tenant: number for number, tenant in enumerate(TENANTS, 1)
    }
    assert "\r" not in text and text.endswith("\n")
    forged = UsageHour(hour="2026-09-21T15:00:00Z", tenant="a\r2026-09-21T15:00:00Z,acme,9")
    (row,) = csv.DictReader(io.StringIO(csv_of([forged]), newline=""))
    assert row["tenant"] == forged.tenant


def test_more_tenants_than_an_event_holds_are_told_in_several():
    spaces = [Namespace(model="tiny", block_tokens=1, tenant=f"t{number:04}") for number in range(2500)]
    account = UsageAccount(UsagePlan(_native.UsageMeter), POOLS, RevisionedNamespaces(spaces))
    account.take([], {}, 1000)
    for space in spaces:
        account.read_locked(space.id, {Tier.HOST: 1})
    account.take([], account.take_reads_locked(2000, is_last=True), 2000, is_last=True)
    events = account.take_events()
    assert [len(event.rows) for event in events] == [1024, 1024, 452]
    assert [row.tenant for event in events for row in event.rows] == [space.tenant for space in spaces]
    sums = UsageSums()
    for offset, event in enumerate(events):
        for entry in entries_of(INSTANCE, Epoch(1), offset, event):
            sums.add(entry)
    assert len(sums.report().hours) == 2500 and not sums.report().gaps


def test_an_erasure_that_is_forgotten_for_newer_ones_is_said_once():
    space = Namespace(model="tiny", block_tokens=1, tenant="acme")
    account = UsageAccount(UsagePlan(_native.UsageMeter), POOLS, RevisionedNamespaces([space]))
    account.take([], {}, 1000)
    account.read_locked(space.id, {Tier.HOST: 1})
    account.erase_locked(1, lambda tenant: tenant == "acme", 1500)
    with capture_logs() as logs:
        for number in range(2, 257):
            account.erase_locked(number, lambda _: False, 1500)
    assert not logs
    with capture_logs() as logs:
        account.erase_locked(257, lambda _: False, 1500)
        account.erase_locked(258, lambda _: False, 1500)
    assert [(one["event"], one["number"], one["log_level"]) for one in logs] == [("erasure.forgotten", 1, "warning")]
    account.take([], account.take_reads_locked(2000, is_last=True), 2000, is_last=True)
    assert [row.tenant for event in account.take_events() for row in event.rows] == ["acme"]  # as the line says
