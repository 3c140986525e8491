"""The native ledger does what the reference does: the same results, refusals, counts, digests and bytes of frames."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, takewhile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core.backend import LedgerProtocol
from kvbm.core.codec import FrameBytes, decode_frame
from kvbm.core.errors import KvbmError, LayoutError, LedgerError
from kvbm.core.events import EvictReason, MigrateCause, PoolStated, StopReason
from kvbm.core.fold import Residencies
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Reach,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.policy import EVICTION_POLICIES, OTHERS, Share
from kvbm.core.results import LEAST_EVENT_BYTES, LENT_TIERS, NOT_HELD, SNAPSHOT_LOOKS, Allocation, Copy, Recovered
from kvbm.reference.ledger import Ledger
from tests.examples import examples

POOLS = (
    PoolStated(Tier.HBM, 9, 64),
    PoolStated(Tier.HOST, 6, 64),
    PoolStated(Tier.NVME, 12, 64),
    PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, "s3://bucket/kv"),
)
SLOT_TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)
NAMESPACES = (Namespace(model="a", block_tokens=16), Namespace(model="b", block_tokens=16))
SOURCES = (*Tier, InstanceId("peer-é"))
INSTANCE = InstanceId("wörker-0")

AFTER_A_STOP = (8, 9, 11, 21, 22, 24, 25, 28, 29)  # the steps that ask for no slots: nobody does then

Step = tuple[int, int, int, int, int]  # which command, and four numbers it takes its arguments from


def block(number: int) -> SequenceHash:
    return SequenceHash(hashlib.sha256(b"block %d" % number).digest()[:HASH_BYTES])


# Few blocks, so that they meet again; some are asked for under both namespaces.
BLOCKS = [block(number) for number in range(20)]
MANY_BLOCKS = b"".join(number.to_bytes(HASH_BYTES, "little") for number in range(1, LEAST_EVENT_BYTES // HASH_BYTES))


def run_of(first: int, count: int, stride: int = 1) -> bytes:
    return b"".join(BLOCKS[(first + index * stride) % len(BLOCKS)] for index in range(count))


class Twins:
    """Both ledgers side by side: what is asked of one is asked of the other, and must come out the same."""

    def __init__(
        self,
        eviction: str,
        event_bytes: int = 64 << 20,
        pools: Sequence[PoolStated] = POOLS,
        shares: Sequence[Share] = (),
    ) -> None:
        self.reference: LedgerProtocol = Ledger(pools, eviction, event_bytes, shares)
        self.native: LedgerProtocol = _native.Ledger(pools, eviction, event_bytes, shares)
        self.eviction, self.event_bytes, self.pools, self.shares = eviction, event_bytes, tuple(pools), shares
        self.frames: list[FrameBytes] = []
        self.allocated: list[tuple[Tier, bytes]] = []
        self.pinned: list[tuple[Tier, bytes]] = []
        self.copies: list[Copy] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def both(*arguments: object, **named: object) -> Any:
            results = []
            for ledger in (self.reference, self.native):
                try:
                    results.append(getattr(ledger, name)(*arguments, **named))
                except LayoutError as error:
                    results.append(type(error))  # the codec's words differ where struct has spoken
                except KvbmError as error:
                    results.append((type(error), str(error), vars(error)))
            assert results[0] == results[1], (name, arguments, named)
            assert type(results[0]) is type(results[1])
            self.check()
            return results[1]

        return both

    def check(self) -> None:
        for name in ("epoch", "applied", "digest", "stopped", "overflowed", "pools"):
            assert getattr(self.reference, name) == getattr(self.native, name), name
        assert self.reference.copies_in_flight() == self.native.copies_in_flight()
        for pool in self.pools:
            if pool.slots:
                assert self.reference.counts(pool.tier) == self.native.counts(pool.tier)
                assert self.reference.kept(pool.tier) == self.native.kept(pool.tier)
                assert self.reference.share_counts(pool.tier) == self.native.share_counts(pool.tier)

    def cut(self) -> None:
        frames = self.take_frames(INSTANCE, 7)
        self.frames.extend(frames)

    def recover(self) -> None:
        """The process dies, and another begins with what NVME has kept."""
        self.cut()
        entries = []
        for held in split_hashes(self.held(Tier.NVME)):
            entry = self.reference.residencies.held[Tier.NVME][held]
            assert entry.slot is not None
            entries.append(Recovered(held, entry.namespace, entry.slot))
        epoch = Epoch(self.reference.epoch + 1)
        frames = self.frames
        self.__init__(self.eviction, self.event_bytes, self.pools, self.shares)  # type: ignore[misc]
        self.frames = frames
        self.assign(NAMESPACES[0].id, "a")
        self.start(epoch, NAMESPACES, ("zone-a", "rack-3"), "engine", "0", {Tier.NVME: entries})

    def begin_another(self, newer_by: int) -> None:
        """Another epoch begins in place. What is held says the same before and after, to the owner and to a fold."""
        self.cut()
        before = {tier: sorted(split_hashes(self.native.held(tier))) for tier in SLOT_TIERS}
        after = self.restart(Epoch(self.native.epoch + newer_by))
        if newer_by > 0:
            assert {tier: sorted(split_hashes(self.native.held(tier))) for tier in SLOT_TIERS} == before
            assert after == self.native.applied
            assert not self.native.stopped

    def verify(self) -> None:
        """Every event was legal, every digest is that of the events before it, and the last says what is held."""
        self.cut()
        fold = Residencies(strict=True)
        for frame in self.frames:
            decoded, end = decode_frame(frame.data)
            assert end == len(frame.data)
            assert (decoded.epoch, decoded.first_offset, decoded.next_offset) == frame[:3]
            for event in decoded.events:
                fold.evolve(event)
            assert fold.digest == decoded.digest
        if not self.native.overflowed:
            assert fold.digest == self.native.digest
            for pool in self.pools:
                assert b"".join(fold.held[pool.tier]) == self.native.held(pool.tier)
                for namespace in (None, *(one.id for one in NAMESPACES)):
                    assert self.native.held_of(pool.tier, namespace) == self.reference.held_of(pool.tier, namespace)

    # -- one step of a script, made from numbers so that any numbers are a script

    def step(self, step: Step) -> None:
        kind, a, b, c, d = step
        if self.native.stopped and not self.native.overflowed and kind not in AFTER_A_STOP:
            return
        tier, namespace = SLOT_TIERS[a % 3], NAMESPACES[d % 2].id
        match kind:
            case 0 | 1 | 2:
                self.prefill(namespace, a, 1 + b % 6)
            case 3:
                self.find(run_of(a, b % 8), bool(c % 2), Tier(d % 4), (None, namespace)[c // 2 % 2])
            case 4 | 5 | 6:
                if self.pinned:
                    self.unpin(*self.pinned.pop(b % len(self.pinned)), c % 3 == 0)
            case 7 | 8 | 9:
                self.write(kind, namespace, tier, a, b, c)
            case 10 | 11 | 12 | 13 | 14:
                self.drop_or_keep(step, namespace, tier)
            case 15 | 16 | 17:
                copy = self.begin_copy(namespace, SOURCES[b % 5], Tier(a % 4), run_of(c, 1 + d % 7, 1 + a % 2))
                if isinstance(copy, Copy):
                    self.copies.append(copy)
            case 18 | 19 | 20:
                if self.copies:
                    self.arrive(self.copies.pop(a % len(self.copies)), b, c, d)
            case 21 | 22 | 23:
                self.begin_snapshot() if kind == 21 else self.step_snapshot(1 + a % 4)
            case 24:
                self.cut()
            case 25 | 29:
                self.ask(tier, a, b) if kind == 25 else self.lend_some(namespace, run_of(a, b % 12), Tier(c % 4))
            case 26:
                self.misuse(namespace, tier, a, b, c)
            case _:
                self.end(kind, a, b)

    def find(self, hashes: bytes, pinned: bool, hottest: Tier, namespace: NamespaceId | None) -> None:
        found = self.match(hashes, pinned, hottest, namespace)
        assert all(tier >= hottest for tier in found.tiers)
        if namespace is not None:
            for tier, slot in zip(found.tiers, split_slots(found.slots), strict=True):
                assert slot in split_slots(self.native.held_of(Tier(tier), namespace)[1])
        if pinned:
            placed = zip(found.tiers, split_slots(found.slots), strict=True)
            own = pack_slots(slot for tier, slot in placed if tier == hottest)
            if hottest in SLOT_TIERS:
                self.pinned.append((hottest, own))

    def lend_some(self, namespace: NamespaceId, hashes: bytes, coldest: Tier) -> None:
        """What is lent is of the namespace, in the hottest tier that may be lent from, and ends where there is none;
        then it is pinned.
        """
        tiers = [tier for tier in LENT_TIERS if tier <= coldest]
        before = [[self.native.holds(tier, held, namespace) for tier in tiers] for held in split_hashes(hashes)]
        lent = self.lend(namespace, hashes, coldest)
        wanted = [tiers[held.index(True)] for held in takewhile(any, before)]
        assert (lent.depth, list(lent.tiers)) == (len(wanted), wanted)
        placed = list(zip(lent.tiers, split_slots(lent.slots), strict=True))
        for tier in tiers:
            self.pinned.append((tier, pack_slots(slot for at, slot in placed if at == tier)))

    def write(self, kind: int, namespace: NamespaceId, tier: Tier, a: int, b: int, c: int) -> None:
        if kind == 7:
            allocation = self.allocate(tier, b % 5, (None, NAMESPACES[0].id, NAMESPACES[1].id)[c % 3])
            if isinstance(allocation, Allocation):
                self.allocated.append((tier, allocation.slots))
        elif self.allocated and kind == 8:
            self.create_some(namespace, a, b, c)
        elif self.allocated:
            self.release(*self.allocated.pop(a % len(self.allocated)))

    def drop_or_keep(self, step: Step, namespace: NamespaceId, tier: Tier) -> None:
        kind, a, b, c, d = step
        match kind:
            case 10:
                self.evict(tier, run_of(b, 1 + c % 4, 1 + d % 2), EvictReason(d % 7))
            case 11:
                if d % 2:
                    self.claim(Tier(a % 4), namespace, run_of(b, c % 25), InstanceId("finder"))
                else:
                    self.forget(Tier(a % 4), namespace, run_of(b, c % 25), EvictReason.MISSING)
            case 14:
                self.expire(float(a % 10))
            case _:
                priority = (0, 0, 50, 99, 100, 100, 101, -1)[c % 8]
                whose, most = (None, namespace)[a % 2], (None, None, d % 4)[c % 3]
                self.keep(tier, run_of(b, 1 + c % 5), float(d % 10), priority, whose, a % 3 == 0, most)

    def arrive(self, copy: Copy, b: int, c: int, d: int) -> None:
        arrived = [b % 4 > 0 or bool(c >> i & 1) for i in range(len(copy.hashes) // HASH_BYTES)]
        pinned = b % 3 == 0
        holders = self.end_copy(copy, arrived, MigrateCause(c % 3), kept=d % 3 > 0, pinned=pinned)
        if isinstance(holders, list) and copy.target in SLOT_TIERS:
            mine = split_slots(self.native.held_of(copy.target, copy.namespace)[1])
            assert all(slot in mine for slot in holders if slot is not None), "a copy ends in another namespace's slots"
        if pinned and isinstance(holders, list):
            self.pinned.append((copy.target, pack_slots(slot for slot in holders if slot is not None)))

    def end(self, kind: int, a: int, b: int) -> None:
        if kind == 27 and a % 4 == 0:
            self.recover()
        elif kind == 28 and a % 16 == 0:
            self.stop(StopReason(b % 3))
        elif kind == 28 and a % 4 == 1:
            self.begin_another(b % 4)

    def prefill(self, namespace: NamespaceId, first: int, count: int) -> None:
        hashes = run_of(first, count)
        found = self.match(hashes, True, Tier.HBM, (None, namespace)[first // 2 % 2])
        held = [tier == Tier.HBM for tier in found.tiers] + [False]
        depth = held.index(False)
        slots = split_slots(found.slots)
        extra = [slot for slot, local in zip(slots[depth:], held[depth:], strict=False) if local]
        self.unpin(Tier.HBM, pack_slots(extra))
        allocation = self.allocate(Tier.HBM, count - depth, namespace)
        if not isinstance(allocation, Allocation):
            self.unpin(Tier.HBM, pack_slots(slots[:depth]))
            return
        parent = SequenceHash(hashes[(depth - 1) * 16 : depth * 16]) if depth else NO_PARENT
        created = self.create(namespace, Tier.HBM, parent, depth, hashes[depth * 16 :], allocation.slots)
        if isinstance(created, bytes):
            self.pinned.append((Tier.HBM, pack_slots(slots[:depth]) + created))
        else:  # a block is held under the other namespace
            self.release(Tier.HBM, allocation.slots)
            self.unpin(Tier.HBM, pack_slots(slots[:depth]))

    def create_some(self, namespace: NamespaceId, a: int, b: int, c: int) -> None:
        """Blocks in any tier, some of them held already, named twice, or too few or many."""
        at = a % len(self.allocated)
        tier, slots = self.allocated[at]
        count = len(slots) // 4 + (c % 11 == 0)
        hashes = run_of(b, count, 10 if c % 13 == 0 else 1)
        if c % 3 == 2 and b % 2:  # they are there already
            if isinstance(self.adopt(namespace, tier, hashes, slots, INSTANCE), int):
                del self.allocated[at]
            return
        created = self.create(namespace, tier, BLOCKS[a % 20], (0, 1, c)[c % 3], hashes, slots)
        if isinstance(created, bytes):
            del self.allocated[at]
            self.pinned.append((tier, created))

    def ask(self, tier: Tier, a: int, b: int) -> None:
        self.lacking(Tier(b % 4), run_of(a, b % 9))
        for namespace in (None, *(one.id for one in NAMESPACES), NamespaceId(b"n" * 16)):
            self.look(run_of(a, b % 25), Tier(b % 4), namespace)
            self.holds(Tier(b % 4), BLOCKS[a % 20], namespace)
        self.match(BLOCKS[a % 20], hottest=tier)
        self.held(tier)

    def look(self, hashes: bytes, hottest: Tier, namespace: NamespaceId | None) -> None:
        """Holders are those that `match` and `holds` name."""
        holders = self.holders(hashes, hottest, namespace)
        found = self.match(hashes, False, hottest, namespace)
        assert holders.startswith(found.tiers) and holders[found.depth : found.depth + 1] in (b"", bytes([NOT_HELD]))
        for holder, held in zip(holders, split_hashes(hashes), strict=True):
            colder = [tier for tier in SLOT_TIERS if tier >= hottest and self.native.holds(tier, held, namespace)]
            assert holder == min(colder, default=NOT_HELD)

    def misuse(self, namespace: NamespaceId, tier: Tier, a: int, b: int, c: int) -> None:
        """What a caller has no right to. Slots it has a right to by chance are left alone, or given back at once."""
        numbers = [b % 14, c % 14]
        slots = pack_slots(numbers[: 1 + a % 2])
        is_ours = any(slot in numbers for _, run in self.allocated for slot in split_slots(run))
        match a % 7:
            case 0:
                if not isinstance(self.pin(tier, slots[:4]), tuple):
                    self.unpin(tier, slots[:4])
            case 1:
                if not is_ours:
                    self.release(tier, slots)
            case 2:
                if not is_ours:
                    self.create(namespace, tier, NO_PARENT, 0, run_of(c, 1), slots[:4])
                    self.adopt(namespace, tier, run_of(c, 1), slots[:4], INSTANCE)
            case 3:
                self.pin(Tier.OBJECT, b"")
                self.allocate(Tier.OBJECT, 1)
                self.create(namespace, tier, NO_PARENT, 2**32, run_of(c, 1), b"")
            case 4:
                self.start(Epoch(99))
            case 5:
                self.unpin(tier, pack_slots([13]))
            case _:
                self.match(b"seventeen bytes !")
                self.holders(b"seventeen bytes !", tier)


numbers = st.integers(0, 63)
steps = st.tuples(st.integers(0, 29), numbers, numbers, numbers, numbers)
thorough = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize("eviction", list(EVICTION_POLICIES))
@thorough
@given(script=st.lists(steps, min_size=20, max_size=150))
def test_any_script_comes_out_the_same(eviction: str, script: list[Step]):
    twins = Twins(eviction)
    twins.start(Epoch(1), NAMESPACES, ("zone-a", "rack-3"), "engine", "1.0")
    for step in script:
        twins.step(step)
    twins.verify()


# The second namespace is nobody's with a share of its own.
SHARES = (
    (Share("a", 3), Share("absent", 2)),
    (Share(OTHERS, 2, {Tier.NVME: 3, Tier.HOST: 0}), Share("a", 1, {Tier.NVME: 4, Tier.HOST: 5})),
)


@pytest.mark.parametrize("eviction", list(EVICTION_POLICIES))
@pytest.mark.parametrize("shares", SHARES)
@settings(parent=thorough, max_examples=examples(150))
@given(script=st.lists(steps, min_size=20, max_size=150))
def test_tenants_with_shares_come_out_the_same(eviction: str, shares: Sequence[Share], script: list[Step]):
    twins = Twins(eviction, shares=shares)
    twins.assign(NAMESPACES[0].id, "a")
    twins.start(Epoch(1), NAMESPACES)
    for step in script:
        twins.step(step)
    twins.assign(NAMESPACES[0].id, "nobody")  # what it holds counts there
    twins.verify()
    for step in script:
        twins.step(step)
    twins.verify()


@pytest.mark.parametrize("eviction", list(EVICTION_POLICIES))
@settings(parent=thorough, max_examples=8)
@given(room=st.integers(0, 900), script=st.lists(steps, min_size=10, max_size=60))
def test_an_overflow_comes_at_the_same_event_and_ends_the_same_things(eviction: str, room: int, script: list[Step]):
    twins = Twins(eviction, LEAST_EVENT_BYTES)
    twins.start(Epoch(1), NAMESPACES)
    filler = (LEAST_EVENT_BYTES - 8 - room) // HASH_BYTES
    twins.forget(Tier.OBJECT, NAMESPACES[0].id, MANY_BLOCKS[: filler * HASH_BYTES], EvictReason.MISSING)
    for step in script:
        if step[0] not in (24, 27, 28):  # taking the frames makes room
            twins.step(step)
    twins.begin_another(1)
    for step in script:
        twins.step(step)
    twins.verify()


def test_long_runs_and_many_frames_are_cut_the_same():
    pools = (PoolStated(Tier.HBM, 6000, 64), PoolStated(Tier.NVME, 5000, 64))
    twins = Twins("s3fifo", pools=pools)
    twins.start(Epoch(1))
    for index in range(4):
        first = 10_000 * (index % 2) + 1000 * (index // 2)  # each namespace has blocks of its own
        hashes = b"".join(block(first + number) for number in range(2500))
        allocation = twins.allocate(Tier.HBM, 2500)
        slots = twins.create(bytes([index % 2] * 16), Tier.HBM, BLOCKS[0], 5, hashes, allocation.slots)
        copy = twins.begin_copy(bytes([index % 2] * 16), Tier.HBM, Tier.NVME, hashes)
        twins.end_copy(copy, [True] * (len(copy.hashes) // 16), MigrateCause.OFFLOAD, kept=index % 2 == 0)
        twins.unpin(Tier.HBM, slots)
    twins.begin_snapshot()
    while twins.step_snapshot():
        pass
    twins.recover()
    assert len(twins.frames) > 5
    twins.verify()


def test_snapshots_over_large_pools_are_stepped_and_restarted_the_same():
    count = 2 * SNAPSHOT_LOOKS
    twins = Twins("lru", pools=(PoolStated(Tier.HBM, count + 70, 64), PoolStated(Tier.NVME, 3, 64)))
    twins.start(Epoch(1))

    def fill(first: int, length: int, namespace: bytes) -> bytes:
        hashes = b"".join(number.to_bytes(HASH_BYTES, "little") for number in range(first, first + length))
        allocation = twins.allocate(Tier.HBM, length)
        twins.unpin(Tier.HBM, twins.create(namespace, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots))
        return hashes

    older = [fill(1 + at, 64, bytes([at // 64 % 3] * 16)) for at in range(0, count, 64)]
    twins.begin_snapshot()
    twins.step_snapshot(1000)
    for run in older[:-9]:
        twins.evict(Tier.HBM, run[32:], EvictReason.CLEARED)
    fill(1 << 20, count // 2 - 500, b"n" * 16)
    while twins.step_snapshot(100):
        pass
    twins.cut()
    assert sum(frame.next_offset - frame.first_offset for frame in twins.frames) > 300
    twins.begin_another(1)
    twins.begin_snapshot()
    while twins.step_snapshot(5000):
        pass
    twins.verify()


def test_a_frame_is_cut_before_its_256th_namespace_in_both():
    twins = Twins("lru")
    twins.start(Epoch(1))
    for index in chain(range(300), range(250, 560)):
        twins.forget(Tier.OBJECT, index.to_bytes(16, "little"), BLOCKS[0], EvictReason.MISSING)
    twins.cut()
    assert [end.first_offset == begin.next_offset for begin, end in pairwise(twins.frames)] == [True, True]
    twins.verify()


def test_a_name_that_fits_no_frame_leaves_the_events_waiting_in_both():
    twins = Twins("lru")
    twins.start(Epoch(1))
    for name in ("", "n" * 256, "\ud800"):
        assert twins.take_frames(InstanceId(name), 7) is LayoutError
    twins.verify()
    assert twins.frames
    assert twins.take_frames(InstanceId("i"), 7) == []


def test_neither_does_anything_before_its_start():
    twins = Twins("lru")
    twins.step((0, 1, 3, 0, 0))
    twins.stop()
    twins.forget(Tier.OBJECT, NAMESPACES[0].id, BLOCKS[0], EvictReason.MISSING)
    twins.begin_snapshot()
    twins.step_snapshot()
    assert twins.take_frames(INSTANCE, 7) == []


def test_both_refuse_to_be_made_or_started_in_the_same_words():
    words = []
    for kind in (Ledger, _native.Ledger):
        for arguments in (
            (POOLS, "mru"),
            (POOLS, "lru", LEAST_EVENT_BYTES - 1),
            (POOLS, "lru", LEAST_EVENT_BYTES, (Share("a"), Share("a", 2))),
            (POOLS, "lru", LEAST_EVENT_BYTES, (Share("a", 0),)),
        ):
            with pytest.raises(LedgerError) as refused:
                kind(*arguments)
            words.append(str(refused.value))
    assert words[:4] == words[4:]
    a, b = NAMESPACES[0].id, NAMESPACES[1].id
    for entries in (
        [Recovered(BLOCKS[0], a, 12)],
        [Recovered(BLOCKS[0], a, 1), Recovered(BLOCKS[0], a, 2)],
        [Recovered(BLOCKS[0], a, 1), Recovered(BLOCKS[0], b, 2)],
        [Recovered(BLOCKS[0], a, 1), Recovered(BLOCKS[1], a, 1)],
        [Recovered(BLOCKS[0], a, 1), Recovered(BLOCKS[1], b, 1)],
    ):
        assert isinstance(Twins("lru").start(Epoch(1), recovered={Tier.NVME: entries}), tuple)
    assert isinstance(Twins("lru").start(Epoch(0)), tuple)


def test_blocks_of_another_namespace_are_neither_found_nor_taken():
    twins = Twins("lru")
    twins.start(Epoch(1), NAMESPACES)
    mine, other = NAMESPACES[0].id, NAMESPACES[1].id
    hashes = run_of(0, 3)
    slots = twins.create(mine, Tier.HBM, NO_PARENT, 0, hashes, twins.allocate(Tier.HBM, 3).slots)
    assert twins.match(hashes, False, Tier.HBM, mine).depth == 3
    twins.unpin(Tier.HBM, slots)
    before = twins.counts(Tier.HBM)
    for namespace in (other, NamespaceId(b"n" * 16)):
        assert twins.match(hashes, True, Tier.HBM, namespace) == (0, b"", b"")
        assert twins.holders(hashes, Tier.HBM, namespace) == bytes([NOT_HELD]) * 3
        assert not twins.holds(Tier.HBM, BLOCKS[0], namespace)
        assert twins.keep(Tier.HBM, hashes, 9.0, 0, namespace) == 0
        assert twins.begin_copy(namespace, Tier.HBM, Tier.NVME, hashes) is None
    assert twins.counts(Tier.HBM) == before
    given = twins.allocate(Tier.HBM, 2).slots
    new = block(99)
    refused = twins.create(other, Tier.HBM, NO_PARENT, 0, new + hashes[:HASH_BYTES], given)
    assert (
        refused[0] is LedgerError
        and "block 1 of 2 to create in HBM is held there under another namespace" in refused[1]
    )
    assert not twins.holds(Tier.HBM, SequenceHash(new))
    twins.release(Tier.HBM, given)
    assert twins.match(hashes, False, Tier.HBM, mine).depth == 3
    twins.verify()


def test_a_load_does_not_end_in_slots_that_another_namespace_has_filled_meanwhile():
    twins = Twins("lru")
    twins.start(Epoch(1), NAMESPACES)
    mine, other = NAMESPACES[0].id, NAMESPACES[1].id
    hashes = run_of(0, 2)
    copy = twins.begin_copy(other, InstanceId("peer"), Tier.HBM, hashes)
    slots = twins.create(mine, Tier.HBM, NO_PARENT, 0, hashes, twins.allocate(Tier.HBM, 2).slots)
    twins.unpin(Tier.HBM, slots)
    before = twins.counts(Tier.HBM).evictable
    assert list(twins.end_copy(copy, [True, True], MigrateCause.FETCH, kept=True, pinned=True)) == [None, None]
    assert twins.counts(Tier.HBM).evictable == before
    twins.verify()


@pytest.mark.parametrize("target", [Tier.NVME, Tier.OBJECT])
def test_a_copy_whose_source_is_another_namespaces_meanwhile_has_not_arrived(target: Tier):
    twins = Twins("lru")
    twins.start(Epoch(1), NAMESPACES)
    mine, other = NAMESPACES[0].id, NAMESPACES[1].id
    hashes = run_of(0, 2)
    given = twins.create(other, Tier.HBM, NO_PARENT, 0, hashes, twins.allocate(Tier.HBM, 2).slots)
    twins.unpin(Tier.HBM, given)
    copy = twins.begin_copy(other, Tier.HBM, target, hashes)
    twins.evict(Tier.HBM, hashes, EvictReason.CLEARED)
    twins.create(mine, Tier.HBM, NO_PARENT, 0, hashes, twins.allocate(Tier.HBM, 2).slots)
    applied = twins.native.applied
    assert list(twins.end_copy(copy, [True, True], MigrateCause.OFFLOAD)) == [None, None]
    assert twins.native.applied == applied
    twins.verify()
