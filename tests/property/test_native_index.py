"""The native index is its specification, side by side: whatever comes, both say the same of everything."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.catalog.index.cluster_index import ClusterIndex, Holder, Prefixes
from kvbm.catalog.index.lookup import lookup
from kvbm.core.answers import LIMIT
from kvbm.core.codec import encode_frame
from kvbm.core.errors import FrameError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Reach, SequenceHash, Tier, split_hashes
from kvbm.core.prompt_batches import LOOKUP, PromptBatch, answers_head, decode_lookups
from kvbm.reference.cluster_index import MOST_POOLS_OF_ONE, MOST_SPACES_OF_ONE, ReferenceIndex
from tests.examples import examples
from tests.indexes import ROOM, Key, crowded_events, few_hashes, frame_bytes, held_of
from tests.ledger_driver import NAMESPACES, POOLS, Driver, chain, commands

WILD = [InstanceId(f"wild-{number}") for number in range(4)]  # send whatever they like
TAME = [InstanceId(f"tame-{number}") for number in range(2)]  # have a ledger
EVERYONE = WILD + TAME
SPACES = [namespace.id for namespace in NAMESPACES]
KEYS: set[Key] = {(space, block) for space in SPACES for prompt in range(6) for block in split_hashes(chain(prompt, 8))}
SHARED = (PoolStated(Tier.HBM, 4, 1, Reach.CLUSTER, "shared"), PoolStated(Tier.OBJECT, 4, 1, Reach.CLUSTER))
TWICE = (PoolStated(Tier.HOST, 4, 1, Reach.CLUSTER, "shared"), PoolStated(Tier.HOST, 4, 1))
PODS = (PoolStated(Tier.HBM, 4, 1), PoolStated(Tier.NVME, 4, 1, Reach.POD), PoolStated(Tier.HOST, 4, 1, Reach.POD))
OBJECTS = (PoolStated(Tier.HBM, 4, 1), PoolStated(Tier.OBJECT, 0, 1, Reach.CLUSTER, "objects#blocks=2"))
DECLARED = [POOLS, POOLS[:3], POOLS[:1], (), SHARED, TWICE, TWICE[::-1], PODS, PODS[1:], OBJECTS]
POOL_NAMES = [POOLS[-1].name, "shared", "object", "nobody's", OBJECTS[1].name]
thorough = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def claims_of(index: ClusterIndex) -> list[tuple[str, NamespaceId, SequenceHash]]:
    """Every claim, page by page."""
    found: list[tuple[str, NamespaceId, SequenceHash]] = []
    first: int | None = 0
    while first is not None:
        first, runs = index.claims(first, 1)
        found += [(pool, space, block) for pool, space, hashes in runs for block in split_hashes(hashes)]
    return sorted(found)


class Twins:
    """A native index and the reference, told the same."""

    def __init__(self, capacity: int = ROOM) -> None:
        self.capacity = capacity
        self.native = _native.ClusterIndex(capacity)
        self.model = ReferenceIndex(capacity)
        self.drivers = {name: Driver() for name in TAME}
        self.sent = dict.fromkeys(TAME, 0)
        self.saved = 0  # checkpoints

    def both(self, call: str, *values: Any) -> Any:
        told = [getattr(index, call)(*values) for index in (self.native, self.model)]
        assert told[0] == told[1], (call, values)
        return told[0]

    def run(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("events", name, events, skip):
                epoch = next((event.epoch for event in events if isinstance(event, InstanceStarted)), Epoch(1))
                self.both("apply", frame_bytes(name, *events, epoch=epoch), 0, skip)
            case ("damaged", name, event, at):
                data = bytearray(frame_bytes(name, event))
                data[at % len(data)] ^= 1 << at % 8
                for index in (self.native, self.model):
                    with pytest.raises(FrameError):
                        index.apply(bytes(data))
            case ("ledger", name, command):
                driver = self.drivers[name]
                driver.run(command)
                for frame in driver.frames[self.sent[name] :]:
                    self.both("apply", encode_frame(msgspec.structs.replace(frame, instance=name)))
                self.sent[name] = len(driver.frames)
            case ("agrees", name, is_own, digest):
                view = self.model.view(name)
                self.both("agrees", name, view.digest if is_own and view is not None else digest)
            case ("sweep", pages):
                self.native.sweep(pages)
            case ("audit", pages):
                found = self.native.audit(pages)
                assert not found.differing and not found.damaged
            case ("reload",):
                self.reload()
            case ("check", queries):
                self.check(queries)
            case _:
                self.both(*action)

    def reload(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/checkpoint"
            self.saved += 1
            note = b"note %d" % self.saved
            self.native.write_checkpoint(path, note)
            self.native = _native.ClusterIndex(self.capacity)
            assert self.native.load_checkpoint(path) == note
        # What a snapshot that was open has listed is not in a checkpoint, nor what is soft.
        self.model._anomalies.clear()
        self.model._object_blocks.clear()
        for entry in self.model._instances.values():
            entry.waiting = entry.excluded = False
            entry.queued = entry.lent_tiers = 0
            for fold in entry.tiers.values():
                fold.is_open = False

    def check(self, queries: list[tuple[NamespaceId, bytes, int]] = []) -> None:  # noqa: B006
        for call in ("residency_count", "anomalies"):
            self.both(call)
        # a pool without claims may have been forgotten by an audit
        native, model = (
            {pool: count for pool, count in one.claim_counts().items() if count} for one in (self.native, self.model)
        )
        assert native == model
        assert sorted(self.native.instances()) == sorted(self.model.instances())
        for name in [*EVERYONE, InstanceId("unknown")]:
            self.both("view", name)
            for tier in Tier:
                self.both("pool_name", name, tier)
        assert held_of(self.native, KEYS) == held_of(self.model, KEYS)
        for key in KEYS:
            left_out = self.native.excluded_holders(*key)
            assert len(left_out) == len(set(left_out))
            assert set(left_out) == set(self.model.excluded_holders(*key))
        assert claims_of(self.native) == claims_of(self.model)
        assert set(self.native.namespaces()) >= set(self.model.namespaces())
        for space, hashes, best in queries:
            told, all_told = self.native.prefixes(space, hashes, best), self.native.prefixes(space, hashes)
            assert unordered(all_told) == unordered(self.model.prefixes(space, hashes))
            assert told.more == max(0, sum(one.depth > 0 for one in all_told.instances) - best) * bool(best)
            few = [*self.model.instances()[::2], InstanceId("unknown")]
            assert unordered(self.native.prefixes(space, hashes, 0, few)) == unordered(
                self.model.prefixes(space, hashes, 0, few)
            )
            self.check_order(
                self.native.prefixes(space, hashes, best, few), self.model.prefixes(space, hashes, best, few), best
            )
            assert (told.deepest, told.pools) == (all_told.deepest, all_told.pools)
            assert set(told.instances) <= set(all_told.instances)
            assert len(set(told.instances)) == len(told.instances)
            self.check_order(told, self.model.prefixes(space, hashes, best), best)
            self.check_presence(space, hashes, best, few)
            self.check_colder(space, hashes, best, few)
            for whole in (True, False):
                self.both("lent", space, hashes, 9, whole)
                self.both("lent", space, hashes, best, whole)
            limit, behind = max(best, 1), frozenset(EVERYONE[:1])
            for only in (None, few):
                native = self.native.lookup(space, hashes, limit, only, "asked", 1.5, behind)
                assert native == lookup(self.native, space, hashes, limit, only, "asked", 1.5, behind)
                model = self.model.lookup(space, hashes, limit, only, "asked", 1.5, behind)
                assert native == model
            for index in (self.native, self.model):
                found = index.lookup(space, hashes, limit, None, "asked", 1.5, ())
                is_found = bool(found.deepest or found.instances or found.pools)
                told_json = index.lookup_json(space, hashes, limit, "asked", "1.5")
                assert told_json == (msgspec.json.encode(found) if is_found else None)
            asked = PromptBatch(LOOKUP, max(best, 1), space, [(hashes, 0), (hashes[:HASH_BYTES], 0)])
            prompts = [prompt for prompt, _ in asked.prompts]
            encoded = answers_head(LOOKUP, 2, 0.0) + self.native.encode_prefixes(space, prompts, asked.limit)
            wanted = [lookup(self.native, space, prompt, limit=asked.limit) for prompt in prompts]
            assert decode_lookups(encoded, asked) == [
                msgspec.structs.replace(one, excluded=[], more_excluded=0) for one in wanted
            ]

    def check_colder(self, space: NamespaceId, hashes: bytes, best: int, few: list[InstanceId]) -> None:
        """What lies in HOST and below, whatever else lies in HBM."""
        for hottest in Tier:
            for only in (None, few):
                native = self.native.prefixes(space, hashes, 0, only, hottest)
                assert unordered(native) == unordered(self.model.prefixes(space, hashes, 0, only, hottest))
                assert not any(sum(one.by_tier[:hottest]) for one in native.instances)
                told = self.native.prefixes(space, hashes, best, only, hottest=hottest)
                self.check_order(told, self.model.prefixes(space, hashes, best, only, hottest=hottest), best)

    def check_presence(self, space: NamespaceId, hashes: bytes, best: int, few: list[InstanceId]) -> None:
        """Which blocks are held, in any order and with holes: as the model says, which asks for each by itself."""
        for asked in (hashes, b"".join(split_hashes(hashes)[::-1]) + hashes[:HASH_BYTES]):
            for only in (None, few):
                for most in (0, best):
                    native, model = (index.presence(space, asked, most, only) for index in (self.native, self.model))
                    assert native == model

    @staticmethod
    def check_order(native: Prefixes, model: Prefixes, best: int) -> None:
        """The best come in one order, the model's; all of them in none."""
        assert unordered(native) == unordered(model)
        assert native.more == model.more
        assert not best or native.instances == model.instances

    def finish(self) -> None:
        while self.native.sweep(3):
            pass
        assert not self.native.needs_sweep()
        self.check()
        self.both("block_count")
        assert self.model.audit().differing == []
        while not (found := self.native.audit(3)).is_whole:
            pass
        assert (found.differing, found.damaged) == ([], 0)
        while not (found := self.native.audit(1000)).is_whole:
            pass
        assert found == self.model.audit()
        self.both("claim_counts")
        for name in self.native.instances():
            view = self.native.view(name)
            assert view is not None and view.digest == self.native.recomputed_digest(name)


def unordered(found: Prefixes) -> tuple[Any, ...]:
    assert len(set(found.instances)) == len(found.instances) and len(set(found.pools)) == len(found.pools)
    return found.deepest, set(found.instances), found.pools  # pools have an order


@st.composite
def wild_events(draw: st.DrawFn) -> list[Event]:
    """What fits a frame: an InstanceStarted is of its frame's epoch."""
    kind = draw(st.integers(0, 9))
    space, tier = draw(st.sampled_from(SPACES)), draw(st.sampled_from(Tier))
    if kind == 0:
        return [InstanceStarted(epoch=Epoch(draw(st.integers(1, 3))), pools=draw(st.sampled_from(DECLARED)))]
    if kind == 1:
        return [InstanceStopped(reason=StopReason.SHUTDOWN)]
    if kind == 2:  # snapshots that are begun and given up, more of them than there are generations
        first = draw(st.integers(0, 9))
        listed = draw(st.lists(few_hashes, min_size=1, max_size=7))
        return [
            ResidenciesListed(namespace=space, tier=tier, snapshot=first + number, hashes=hashes)
            for number, hashes in enumerate(listed)
        ]
    if kind in (3, 4):  # a snapshot that ends, as often as not with the right count
        number, listed = draw(st.integers(0, 9)), draw(st.lists(few_hashes, max_size=2))
        count = sum(len(hashes) // 16 for hashes in listed)
        off = draw(st.sampled_from([0, 0, 0, 1]))
        return [
            *(ResidenciesListed(namespace=space, tier=tier, snapshot=number, hashes=hashes) for hashes in listed),
            SnapshotEnded(tier=tier, snapshot=number, count=count + off),
        ]
    return [event for event in draw(st.lists(crowded_events(), min_size=1, max_size=4)) if not is_start(event)] or [
        BlocksCreated(namespace=space, tier=tier, hashes=draw(few_hashes))
    ]


def is_start(event: Event) -> bool:
    return isinstance(event, InstanceStarted)


blocks = st.sampled_from([*split_hashes(chain(0, 4)), *split_hashes(chain(1, 3)), SequenceHash(bytes(16))])
queries = st.tuples(
    st.sampled_from([*SPACES, NamespaceId(bytes(16))]),
    st.one_of(
        st.tuples(st.integers(0, 5), st.integers(0, 8)).map(lambda which: chain(*which)),
        st.lists(blocks, max_size=6).map(b"".join),
        st.integers(1, 4).map(lambda depth: chain(0, depth)),
    ),
    st.integers(0, 4),
)
names = st.sampled_from(EVERYONE)
declared = st.sampled_from(DECLARED)
actions = st.one_of(
    st.tuples(st.just("events"), st.sampled_from(WILD), wild_events(), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("events"), st.sampled_from(WILD), wild_events(), st.just(0)),
    st.tuples(st.just("events"), st.sampled_from(WILD), wild_events(), st.just(0)),
    st.tuples(st.just("ledger"), st.sampled_from(TAME), commands),
    st.tuples(st.just("ledger"), st.sampled_from(TAME), commands),
    st.tuples(
        st.just("damaged"), names, crowded_events().filter(lambda event: not is_start(event)), st.integers(0, 999)
    ),
    st.tuples(st.just("begin_blind"), names, st.integers(1, 3).map(Epoch), st.none() | declared, declared),
    st.tuples(st.just("miss"), names),
    st.tuples(st.just("wait"), names, st.booleans()),
    st.tuples(st.just("exclude"), names, st.booleans()),
    st.tuples(st.just("exclude"), names, st.booleans()),
    st.tuples(st.just("report_queued"), names, st.integers(0, 3) | st.just(2**40)),
    st.tuples(st.just("report_lent_tiers"), names, st.sampled_from([0, 2, 6, 6, 15])),
    st.tuples(st.just("audit"), st.integers(1, 300)),
    st.tuples(st.just("agrees"), names, st.booleans(), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("drop"), names),
    st.tuples(st.sampled_from(["claim", "unclaim"]), st.sampled_from(POOL_NAMES), st.sampled_from(SPACES), few_hashes),
    st.tuples(st.just("size_objects"), st.sampled_from(SPACES), st.sampled_from([0, 1, 2, 3, 2**40])),
    st.tuples(st.just("sweep"), st.integers(1, 300)),
    st.tuples(st.just("reload")),
    st.tuples(st.just("check"), st.lists(queries, max_size=3)),
)


@thorough
@given(st.lists(actions, max_size=60), st.sampled_from([ROOM, ROOM, 3, 9, 25]), st.lists(queries, max_size=4))
def test_the_native_index_is_the_reference(
    script: list[tuple[Any, ...]], capacity: int, asked: list[tuple[NamespaceId, bytes, int]]
) -> None:
    twins = Twins(capacity)
    for action in script:
        twins.run(action)
        twins.both("anomalies")
        twins.both("residency_count")
    twins.check(asked)
    twins.finish()


@thorough
@given(st.lists(st.tuples(st.sampled_from(TAME), commands), max_size=80))
def test_of_legal_streams_the_index_has_the_ledgers_digests_and_nothing_to_complain_of(
    script: list[tuple[InstanceId, tuple[Any, ...]]],
) -> None:
    index, drivers, sent = _native.ClusterIndex(ROOM), {name: Driver() for name in TAME}, dict.fromkeys(TAME, 0)
    for name, command in [*script, *((name, ("cut",)) for name in TAME)]:
        driver = drivers[name]
        driver.run(command)
        for frame in driver.frames[sent[name] :]:
            index.apply(encode_frame(msgspec.structs.replace(frame, instance=name)))
            view = index.view(name)
            assert view is not None and view.digest == frame.digest == index.recomputed_digest(name)
            assert index.agrees(name, frame.digest)
        sent[name] = len(driver.frames)
        index.sweep(1)
    for name, driver in drivers.items():
        view = index.view(name)
        assert view is not None and view.digest == driver.ledger.residencies.digest and not view.suspect
        held = driver.ledger.residencies.held
        assert view.counts == {pool.tier: len(held[pool.tier]) for pool in POOLS[:3]}
    assert index.anomalies() == {}


def test_snapshots_given_up_for_ever_are_told_apart_from_the_one_that_ends() -> None:
    twins, name = Twins(), WILD[0]
    blocks = split_hashes(chain(0, 8))
    twins.run(("events", name, [InstanceStarted(epoch=Epoch(1), pools=POOLS)], 0))
    for number in range(1, 30):
        hashes = blocks[number % 8] + blocks[(number + 3) % 8]
        twins.run(
            ("events", name, [ResidenciesListed(namespace=SPACES[0], tier=Tier.HBM, snapshot=number, hashes=hashes)], 0)
        )
        twins.check()
    ended = [
        ResidenciesListed(namespace=SPACES[0], tier=Tier.HBM, snapshot=30, hashes=blocks[5]),
        SnapshotEnded(tier=Tier.HBM, snapshot=30, count=1),
    ]
    twins.run(("events", name, ended, 0))
    assert twins.native.holders(SPACES[0], blocks[5]) == [Holder(name, Tier.HBM, False)]
    assert twins.native.residency_count() == 1
    twins.finish()


@pytest.mark.parametrize("life", range(6))
def test_equals_come_by_name_whatever_a_table_is_hashed_with(life: int) -> None:
    """Every life draws a secret of its own, and a checkpoint is read in the order of the table that wrote it."""
    twins, space, blocks = Twins(), SPACES[0], split_hashes(chain(0, 8))
    depths = {"zone-b": 2, "s3": 5, "azure": 2, "ceph": 2, "redis": 8}
    for number, (pool, depth) in enumerate(depths.items()):
        name = InstanceId(f"writer {number}")
        stated = PoolStated(Tier.OBJECT, 0, 1, Reach.CLUSTER, pool)
        held = BlocksCreated(namespace=space, tier=Tier.OBJECT, hashes=b"".join(blocks[:depth]))
        twins.both("apply", frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=(stated,)), held))
    equals = ["engine-c", "engine-a", "engine-d", "engine-b"]
    for engine in equals:
        held = BlocksCreated(namespace=space, tier=Tier.HBM, hashes=b"".join(blocks[:4]))
        twins.both("apply", frame_bytes(InstanceId(engine), InstanceStarted(epoch=Epoch(1), pools=POOLS[:1]), held))
    for _ in range(life):
        twins.reload()
    wanted = sorted(depths.items(), key=lambda one: (-one[1], one[0]))
    for index in (twins.native, twins.model):
        for best in (0, 3):
            assert [tuple(one) for one in index.prefixes(space, b"".join(blocks), best).pools] == wanted
        for best in (1, 3, 4):
            assert [one.instance for one in index.prefixes(space, b"".join(blocks), best).instances] == sorted(equals)[
                :best
            ]
            found = index.presence(space, b"".join(blocks), best)
            assert [row.holder.name for row in found.rows] == [*sorted(equals)[:best], *sorted(depths)]
    answer = lookup(twins.native, space, b"".join(blocks))
    assert answer == twins.model.lookup(space, b"".join(blocks), LIMIT, None, answer.namespace, 0.0, ())
    assert [(one.pool, one.depth) for one in answer.pools] == wanted
    asked = PromptBatch(LOOKUP, 3, space, [(b"".join(blocks), 0)])
    for index in (twins.native, twins.model):
        encoded = answers_head(LOOKUP, 1, 0.0) + index.encode_prefixes(space, [b"".join(blocks)], 3)
        read = decode_lookups(encoded, asked)[0]
        assert read.pools == answer.pools
        assert (
            [one.instance for one in read.instances]
            == [one.instance for one in answer.instances][:3]
            == sorted(equals)[:3]
        )


# -- many holders, many blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_a_prefix_that_a_crowd_holds_is_told_as_the_reference_does(seed: int) -> None:
    """Sets of many holders, who leave the prefix at few places or many; pools that go on with it; some have
    died since.
    """
    twins, chance = Twins(), random.Random(seed)
    crowd = [InstanceId(f"one of many {number}") for number in range(50)]
    prefix, space = [SequenceHash(bytes([number]) * 16) for number in range(90)], SPACES[0]
    ends = chance.sample(range(1, 90), 4) if seed % 2 else range(1, 90)
    second = PoolStated(Tier.NVME, 4, 1, Reach.CLUSTER, "second")
    for name in crowd:
        pools = chance.choice([POOLS, POOLS[:3], (POOLS[0], second), (POOLS[0], second, POOLS[3])])
        twins.both("apply", frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=pools)))
        for tier in (Tier.HBM, Tier.HOST):
            held = b"".join(prefix[chance.choice([0, 0, 0, 0, 20]) : chance.choice(ends)])
            if held:
                twins.both("apply", frame_bytes(name, BlocksCreated(namespace=space, tier=tier, hashes=held)))
        if chance.random() < 0.3:
            hole = chance.choice(prefix)
            evicted = BlocksEvicted(namespace=space, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=hole)
            twins.both("apply", frame_bytes(name, evicted))
        twins.both("report_queued", name, chance.randrange(3))
    for pool in (POOLS[-1].name, "second"):
        for _ in range(3):
            first = chance.randrange(90)
            twins.both("claim", pool, space, b"".join(prefix[first : first + 30]))
    wanted = [(space, b"".join(prefix[first:]), best) for first, best in ((0, 0), (0, 3), (0, 20), (7, 1), (25, 200))]
    twins.check(wanted)
    for name in chance.sample(crowd, 30):
        twins.both(*chance.choice([("drop", name), ("begin_blind", name, Epoch(2))]))
    twins.check(wanted)
    for name in chance.sample(crowd, 25):
        twins.both("exclude", name, True)
    twins.check(wanted)
    twins.native.sweep(chance.randrange(300))
    twins.check(wanted)
    twins.reload()
    twins.check(wanted)
    twins.finish()
    twins.check(wanted)


def test_a_table_that_grows_and_shrinks_under_a_sweep_loses_nothing() -> None:
    """So many blocks that a shard has pages, and moves while a sweep is somewhere in it.

    The model is a set for each instance.
    """
    index, chance, space = _native.ClusterIndex(1 << 24), random.Random(5), SPACES[0]
    held: dict[InstanceId, set[int]] = {name: set() for name in WILD}
    passes, audits, most = 0, 0, 0
    for step in range(120):
        name, first = chance.choice(WILD), chance.randrange(1_000_000)
        numbers = range(first, first + chance.randint(1, 30_000))
        run = b"".join(numbered(space, number) for number in numbers)
        if chance.random() < (0.9 if step < 80 else 0.2):
            held[name].update(numbers)
            index.apply(frame_bytes(name, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=run)))
        else:
            held[name].difference_update(numbers)
            event = BlocksEvicted(namespace=space, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=run)
            index.apply(frame_bytes(name, event))
        if chance.random() < 0.05:
            held[name].clear()
            index.begin_blind(name, Epoch(1), POOLS)
        audits += audited(index, 37 * step % 300)
        passes += not index.sweep(chance.randrange(200)) and index.block_count() > 100_000
        most = max(most, index.memory()["table"])
    assert passes > 1 and audits > 1
    for _ in range(2):
        assert index.residency_count() == sum(map(len, held.values()))
        for number in chance.sample(range(1_030_000), 20_000):
            found = [holder.name for holder in index.holders(space, numbered(space, number))]
            assert found == [name for name in WILD if number in held[name]]
        for name in WILD:
            view = index.view(name)
            assert view is not None and view.digest == index.recomputed_digest(name)
        swept(index)
        assert index.block_count() == len(set[int]().union(*held.values()))
    for name in WILD:
        index.drop(name)
    swept(index)
    assert index.block_count() == index.residency_count() == 0
    assert index.memory()["table"] < most / 2


def test_a_shard_that_moves_while_the_sweep_is_in_it_is_swept_from_its_beginning() -> None:
    """What a death has left must not slip by, for its numbers are given to others when the sweep has been
    everywhere.
    """
    index, chance, space = _native.ClusterIndex(1 << 24), random.Random(6), SPACES[0]
    dead, alive = WILD[:2]

    def gain(name: InstanceId, blocks: int) -> None:
        index.apply(
            frame_bytes(name, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=chance.randbytes(16 * blocks)))
        )

    grown = 880_000
    gain(alive, grown)
    gain(dead, 20_000)
    index.drop(dead)
    for _ in range(100):
        assert index.sweep(1)
        gain(alive, 8_000)
        grown += 8_000
    swept(index)
    assert index.block_count() == index.residency_count() == grown
    gain(dead, 1000)
    for name in (dead, alive):
        view = index.view(name)
        assert view is not None and view.digest == index.recomputed_digest(name)


def test_instances_that_come_and_go_for_ever_take_no_more_room() -> None:
    """Numbers of the forgotten are given to others, and nobody is taken for who had his number before."""
    index, space = _native.ClusterIndex(1 << 20), SPACES[0]
    stays = [InstanceId(f"stays-{number}") for number in range(3)]
    for number, name in enumerate(stays):
        index.apply(frame_bytes(name, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=numbered(space, number))))
    rest = 0
    for life in range(3000):
        name = InstanceId(f"life-{life}")
        block = numbered(space, 10 + life % 7)
        index.begin_blind(name, Epoch(1), POOLS)
        index.apply(frame_bytes(name, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=block)))
        assert [holder.name for holder in index.holders(space, SequenceHash(block))] == [name]
        assert index.instances().count(name) == 1 and len(index.instances()) == 4
        index.drop(name)
        assert index.view(name) is None and index.holders(space, SequenceHash(block)) == []
        if life % 5 == 0:
            swept(index)
        if life == 1000:
            swept(index)
            rest = index.memory()["rest"]
    swept(index)
    assert index.memory()["rest"] <= rest and index.block_count() == 3
    for number, name in enumerate(stays):
        assert [holder.name for holder in index.holders(space, SequenceHash(numbered(space, number)))] == [name]


def test_a_checkpoint_written_while_numbers_change_hands_has_nobodys_blocks_under_anothers_name(tmp_path: Path) -> None:
    index, space = _native.ClusterIndex(1 << 20), SPACES[0]
    blocks = b"".join(numbered(space, number) for number in range(5000))
    gone, new = InstanceId("gone"), InstanceId("new")
    index.apply(frame_bytes(gone, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=blocks)))
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            index.drop(gone)
            index.apply(frame_bytes(new, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=blocks[:16])))
            index.drop(new)
            index.apply(frame_bytes(gone, BlocksCreated(namespace=space, tier=Tier.HBM, hashes=blocks)))
            index.sweep(64)

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        for number in range(30):
            path = str(tmp_path / f"{number}.index")
            index.write_checkpoint(path)
            loaded = _native.ClusterIndex(1 << 20)
            loaded.load_checkpoint(path)
            view = loaded.view(new)
            assert view is None or view.counts.get(Tier.HBM, 0) <= 1
            assert set(loaded.instances()) <= {gone, new}
            loaded.drop(gone)
            loaded.apply(
                frame_bytes(InstanceId("third"), BlocksCreated(namespace=space, tier=Tier.HBM, hashes=blocks[:32]))
            )
            assert "third" in loaded.instances() and gone not in loaded.instances()
    finally:
        over.set()
        turning.join()


# -- a checkpoint and what came since ----------------------------------------------------------------------------------


def busy_stream(seed: int, events: int) -> list[bytes]:
    """Frames of three instances with many blocks: legal but for snapshots that are given up, with restarts and
    claims.
    """
    chance = random.Random(seed)
    held: dict[tuple[InstanceId, Tier], dict[bytes, None]] = {(name, tier): {} for name in WILD for tier in Tier}
    snapshots: Counter[tuple[InstanceId, Tier]] = Counter()
    frames = [frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=POOLS)) for name in WILD]
    for _ in range(events):
        name, tier, space = chance.choice(WILD), chance.choice(list(Tier)), chance.choice(SPACES)
        mine, kind = held[name, tier], chance.random()
        if kind < 0.6:
            new = [block for number in chance.sample(range(4000), 60) if (block := numbered(space, number)) not in mine]
            mine.update(dict.fromkeys(new))
            frames.append(frame_bytes(name, BlocksCreated(namespace=space, tier=tier, hashes=b"".join(new))))
        elif kind < 0.9:
            old = [block for block in chance.sample(list(mine), min(40, len(mine))) if block[:1] == space[:1]]
            if old:
                for block in old:
                    del mine[block]
                evicted = BlocksEvicted(namespace=space, tier=tier, reason=EvictReason.CAPACITY, hashes=b"".join(old))
                frames.append(frame_bytes(name, evicted))
        elif kind < 0.99:
            snapshots[name, tier] += 1
            number, listed = snapshots[name, tier], list(mine)
            for owner in SPACES:
                told = b"".join(block for block in listed if block[:1] == owner[:1])
                if told:
                    event = ResidenciesListed(namespace=owner, tier=tier, snapshot=number, hashes=told)
                    frames.append(frame_bytes(name, event))
            if chance.random() < 0.7:
                frames.append(frame_bytes(name, SnapshotEnded(tier=tier, snapshot=number, count=len(listed))))
        else:
            for gone in Tier:
                held[name, gone].clear()
                snapshots[name, gone] = 0
            frames.append(frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=POOLS)))
    return frames


def audited(index: _native.ClusterIndex, pages: int) -> bool:
    """Goes on with the audit, which finds nothing. Whether a pass has ended."""
    found = index.audit(pages)
    assert not found.differing and not found.damaged
    return found.is_whole


def numbered(space: NamespaceId, number: int) -> SequenceHash:
    """A block of this namespace and of no other."""
    return SequenceHash(space[:1] + number.to_bytes(15, "big"))


BUSY_KEYS: set[Key] = {(space, numbered(space, number)) for space in SPACES for number in range(4000)}


def same_to_readers(index: Any, other: Any, keys: set[Key]) -> None:
    assert held_of(index, keys) == held_of(other, keys)
    for call in ("residency_count", "claim_counts", "block_count"):
        assert getattr(index, call)() == getattr(other, call)(), call
    assert sorted(index.instances()) == sorted(other.instances())
    for name in index.instances():
        one, two = index.view(name), other.view(name)
        assert (one.epoch, one.digest, one.pools, one.counts) == (two.epoch, two.digest, two.pools, two.counts)
        assert index.recomputed_digest(name) == other.recomputed_digest(name) == one.digest


def swept(index: Any) -> None:
    while index.sweep():
        pass


@pytest.mark.parametrize("seed", range(2))
def test_a_checkpoint_written_while_frames_are_applied_and_all_since_is_the_live_index(
    seed: int, tmp_path: Path
) -> None:
    frames = busy_stream(seed, 1500)
    assert SPACES[0][:1] != SPACES[1][:1]
    live, model = _native.ClusterIndex(ROOM), ReferenceIndex(ROOM)
    half = len(frames) // 2
    for data in frames[:half]:
        live.apply(data)
    begun, written = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        for number in range(8):
            before.append(live.write_checkpoint(str(tmp_path / f"{number}"))[2])
        written.set()

    before: list[int] = []  # frames applied before each
    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    for number, data in enumerate(frames[half:]):
        live.apply(data)
        if number % 5 == 0:
            live.sweep(3)
    thread.join()
    assert written.is_set()
    swept(live)
    for data in frames:
        model.apply(data)
    assert held_of(live, BUSY_KEYS) == held_of(model, BUSY_KEYS)
    for number in range(8):
        loaded = _native.ClusterIndex(ROOM)
        loaded.load_checkpoint(str(tmp_path / f"{number}"))
        for data in frames[before[number] :]:
            loaded.apply(data)
        swept(loaded)
        same_to_readers(loaded, live, BUSY_KEYS)


def test_a_checkpoint_brings_back_nobody_who_has_gone_and_was_not_swept() -> None:
    """What a snapshot has withdrawn, a restart has ended, or a drop."""
    twins, hashes = Twins(), chain(0, 4)
    created = BlocksCreated(namespace=SPACES[0], tier=Tier.HBM, hashes=hashes)
    for name in WILD:
        twins.run(("events", name, [InstanceStarted(epoch=Epoch(1), pools=POOLS), created], 0))
    listed = ResidenciesListed(namespace=SPACES[0], tier=Tier.HBM, snapshot=1, hashes=hashes[:16])
    twins.run(("events", WILD[0], [listed, SnapshotEnded(tier=Tier.HBM, snapshot=1, count=1)], 0))
    twins.run(("events", WILD[1], [InstanceStarted(epoch=Epoch(2), pools=POOLS)], 0))
    twins.run(("drop", WILD[2]))
    twins.run(("begin_blind", WILD[3], Epoch(2)))
    for _ in range(2):
        twins.check([(SPACES[0], hashes, 0)])
        twins.reload()
    twins.finish()


def test_a_checkpoint_keeps_what_the_pools_were_declared_as(tmp_path: Path) -> None:
    index, name = _native.ClusterIndex(ROOM), WILD[0]
    index.apply(frame_bytes(name, InstanceStarted(epoch=Epoch(3), pools=POOLS), epoch=3))
    index.begin_blind(WILD[1], Epoch(1), SHARED)
    index.begin_blind(WILD[2], Epoch(1), likely=POOLS)
    index.apply(frame_bytes(WILD[3], InstanceStarted(epoch=Epoch(1), pools=POOLS)))
    index.drop(WILD[3])
    index.write_checkpoint(str(tmp_path / "c"))
    loaded = _native.ClusterIndex(ROOM)
    assert loaded.load_checkpoint(str(tmp_path / "c")) == b""
    assert loaded.instances() == WILD[:3]
    for known in WILD[:3]:
        assert loaded.view(known) == index.view(known)
    loaded.wait(WILD[3], False)
    assert loaded.instances() == WILD
    again = loaded.view(WILD[3])
    assert again is not None and (again.epoch, again.pools) == (0, ())


@pytest.mark.parametrize("skip", [0, 1, 3000, 5000])
def test_a_frame_of_very_many_events_says_the_same_from_any_event_on(skip: int) -> None:
    """Above a few thousand events they are not kept but read twice."""
    start = InstanceStarted(epoch=Epoch(1), pools=POOLS)
    runs = [
        BlocksCreated(namespace=SPACES[0], tier=Tier.HBM, hashes=number.to_bytes(16, "little"))
        for number in range(4999)
    ]
    native, model = _native.ClusterIndex(ROOM), ReferenceIndex(ROOM)
    for index in (native, model):
        index.apply(frame_bytes(WILD[0], start, runs[0]))
    data = frame_bytes(WILD[0], start, *runs)
    assert native.apply(data, 0, skip) == model.apply(data, 0, skip)
    assert native.view(WILD[0]) == model.view(WILD[0])
    assert native.anomalies() == model.anomalies()


def test_both_refuse_what_one_instance_names_beyond_its_bounds_and_forget_what_nobody_holds() -> None:
    twins, block = Twins(), chain(0, 1)
    spaces = [NamespaceId(number.to_bytes(16, "big")) for number in range(MOST_SPACES_OF_ONE + 2)]

    def say(
        name: InstanceId, event: type[BlocksCreated] | type[BlocksEvicted], named: list[NamespaceId], tier: Tier
    ) -> None:
        more = {"reason": EvictReason.CAPACITY} if event is BlocksEvicted else {}
        for at in range(0, len(named), 200):
            events = [event(namespace=one, tier=tier, hashes=block, **more) for one in named[at : at + 200]]
            twins.run(("events", name, events, 0))

    one, other = WILD[:2]
    for name in (one, other):
        twins.run(("events", name, [InstanceStarted(epoch=Epoch(1), pools=SHARED[1:])], 0))
    say(one, BlocksCreated, spaces[:-1], Tier.HBM)
    say(one, BlocksCreated, spaces[-1:], Tier.OBJECT)
    assert twins.both("anomalies") == {"refused-at-capacity": 2}
    assert twins.both("view", one).partial
    say(other, BlocksCreated, spaces[-2:], Tier.HBM)
    assert twins.both("holders", spaces[-1], SequenceHash(block)) == [Holder(other, Tier.HBM, False)]
    say(one, BlocksEvicted, spaces[10:-2], Tier.HBM)
    assert twins.native.audit(100_000).is_whole
    assert twins.model.audit().is_whole
    assert sorted(twins.native.namespaces()) == sorted(twins.model.namespaces()) == [*spaces[:10], *spaces[-2:]]
    say(one, BlocksCreated, spaces[10:], Tier.HBM)
    assert twins.both("anomalies") == {
        "refused-at-capacity": 2 + 2
    }  # of as many as it may, ten it holds, two others have brought
    pools = [PoolStated(Tier.OBJECT, 0, 1, Reach.CLUSTER, f"pool-{number}") for number in range(MOST_POOLS_OF_ONE + 2)]
    for pool in pools:
        twins.run(("events", other, [InstanceStarted(epoch=Epoch(1), pools=(pool,))], 0))
    assert len(twins.both("claim_counts")) == MOST_POOLS_OF_ONE + 1
    assert twins.both("pool_name", other, Tier.OBJECT) is None
