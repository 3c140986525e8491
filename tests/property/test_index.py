"""The catalog's index is the union of what its instances hold and what its pools are claimed to hold, whatever
they do.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.index.cluster_index import ClusterIndex, Holder, is_suspect
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.fold import Change, Residencies
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, Tier, pack_slots, split_hashes
from kvbm.streams.base import Heartbeat, StreamMessage
from tests.examples import examples
from tests.indexes import Key, Twin, crowded_events, each_twin, frame_bytes, held_of
from tests.ledger_driver import NAMESPACES, POOLS, Driver, chain, commands, finish_snapshot
from tests.strategies import frames as any_frames

INSTANCES = [InstanceId(name) for name in ("a", "b", "c")]
POOL = POOLS[-1].name
thorough = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
scripts = st.lists(st.tuples(st.integers(0, len(INSTANCES) - 1), commands), max_size=80)


class Cluster:
    """Several ledgers, one stream, one sequencer that reads it, and the answer it should come to."""

    def __init__(self, twin: Twin) -> None:
        self.drivers = [Driver() for _ in INSTANCES]
        self.sequencer = twin.sequencer()
        self.claims: set[Key] = set()
        self.sequence = 0
        self.sent = [0] * len(INSTANCES)
        for which in range(len(INSTANCES)):
            self.send(which)

    @property
    def index(self) -> ClusterIndex:
        return self.sequencer.index

    def run(self, which: int, command: tuple[Any, ...], lose: bool = False) -> None:
        self.drivers[which].run(command)
        self.send(which, lose)

    def send(self, which: int, lose: bool = False) -> None:
        frames = self.drivers[which].frames
        for frame in frames[self.sent[which] :]:
            self.sequence += 1
            if not lose:
                self.step([message(msgspec.structs.replace(frame, instance=INSTANCES[which]), self.sequence)])
            self.note_claims(frame)
        self.sent[which] = len(frames)

    def step(self, messages: list[StreamMessage]) -> None:
        self.sequencer.step(0.0, messages)

    def note_claims(self, frame: Frame) -> None:
        fold = Residencies(strict=False)
        fold.pools = {pool.tier: pool for pool in POOLS}
        for event in frame.events:
            if not isinstance(event, InstanceStarted):
                delta = fold.evolve(event)
                self.claims |= {(change.namespace, change.hash) for change in delta.claimed}
                self.claims -= {(change.namespace, change.hash) for change in delta.unclaimed}

    def finish(self) -> None:
        for which, driver in enumerate(self.drivers):
            driver.cut()
            self.send(which)

    def held(self, with_claims: bool = True) -> dict[Key, set[Holder]]:
        found: dict[Key, set[Holder]] = {}
        for name, driver in zip(INSTANCES, self.drivers, strict=True):
            for tier, held in driver.ledger.residencies.held.items():
                for block, residency in held.items():
                    found.setdefault((residency.namespace, block), set()).add(Holder(name, tier, False))
        for key in self.claims if with_claims else ():
            found.setdefault(key, set()).add(Holder(POOL, Tier.OBJECT, True))
        return found


def message(frame: Frame, sequence: int) -> StreamMessage:
    return StreamMessage(sequence, f"kvbm.v1.events.c.{frame.instance}", encode_frame(frame))


ALL_KEYS = {
    (namespace.id, block) for namespace in NAMESPACES for prompt in range(6) for block in split_hashes(chain(prompt, 8))
}


def indexed(index: ClusterIndex, with_claims: bool = True) -> dict[Key, set[Holder]]:
    """What the index says of every block there can be here."""
    return held_of(index, ALL_KEYS, with_claims)


def brute_force(held: dict[Key, set[Holder]], namespace: NamespaceId, hashes: bytes) -> dict[str, tuple[Any, ...]]:
    """Depth, tiers and reach of every instance and depth of the pool, block by block from the definition."""
    blocks = [held.get((namespace, block), set()) for block in split_hashes(hashes)]
    answers: dict[str, tuple[Any, ...]] = {}
    for name in INSTANCES:
        depth, by_tier = 0, [0, 0, 0, 0]
        while depth < len(blocks) and (tiers := [h.tier for h in blocks[depth] if h.name == name and not h.is_pool]):
            by_tier[min(tiers)] += 1
            depth += 1
        reach = depth
        while reach < len(blocks) and any(holder.is_pool for holder in blocks[reach]):
            reach += 1
        if reach:
            answers[name] = (depth, tuple(by_tier), reach)
    depth = 0
    while depth < len(blocks) and any(holder.is_pool for holder in blocks[depth]):
        depth += 1
    if depth:
        answers[POOL] = (depth,)
    return answers


def answers(index: ClusterIndex, namespace: NamespaceId, hashes: bytes) -> dict[str, tuple[Any, ...]]:
    found = index.prefixes(namespace, hashes)
    told: dict[str, tuple[Any, ...]] = {d.instance: (d.depth, d.by_tier, d.reach) for d in found.instances}
    assert found.deepest == max([d.depth for d in found.instances] + [p.depth for p in found.pools], default=0)
    return told | {pool.pool: (pool.depth,) for pool in found.pools}


@each_twin
@thorough
@given(scripts)
def test_the_index_is_the_union_of_residencies_and_claims(
    twin: Twin, script: list[tuple[int, tuple[Any, ...]]]
) -> None:
    cluster = Cluster(twin)
    for which, command in script:
        cluster.run(which, command)
    cluster.finish()
    assert indexed(cluster.index) == cluster.held()
    assert cluster.index.claim_counts().get(POOL, 0) == len(cluster.claims)
    assert cluster.sequencer.counters.digest_mismatches == cluster.sequencer.counters.holes == 0
    assert not cluster.index.anomalies()
    for name, driver in zip(INSTANCES, cluster.drivers, strict=True):
        view = cluster.index.view(name)
        assert view is not None and view.digest == driver.ledger.residencies.digest
        assert not view.suspect
        cluster.index.drop(name)
    assert indexed(cluster.index) == {key: {Holder(POOL, Tier.OBJECT, True)} for key in cluster.claims}


@each_twin
@thorough
@given(scripts, st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.lists(st.integers(0, 7), max_size=3))))
def test_prefixes_are_what_counting_block_by_block_gives(
    twin: Twin, script: list[tuple[int, tuple[Any, ...]]], queries: list[tuple[int, int, list[int]]]
) -> None:
    cluster = Cluster(twin)
    for which, command in script:
        cluster.run(which, command)
    cluster.finish()
    held = cluster.held()
    for prompt, depth, foreign in queries:
        blocks = split_hashes(chain(prompt, depth))
        for at in foreign:  # holes, and blocks that belong elsewhere
            blocks[at % depth] = split_hashes(chain(at, 8))[at]
        namespace, hashes = NAMESPACES[prompt % len(NAMESPACES)].id, b"".join(blocks)
        assert answers(cluster.index, namespace, hashes) == brute_force(held, namespace, hashes)


masks = st.lists(st.integers(0, 0b1111), min_size=4, max_size=4)


@each_twin
@thorough
@given(st.lists(masks, max_size=40), st.lists(st.booleans(), min_size=len(INSTANCES), max_size=len(INSTANCES)))
def test_prefixes_are_right_for_any_pattern_of_holes(twin: Twin, pattern: list[list[int]], shares: list[bool]) -> None:
    """Every block anywhere: three instances in any tiers, a pool with any claims, which not every instance can read."""
    index, namespace = twin.index(), NAMESPACES[0].id
    held: dict[Key, set[Holder]] = {}
    for name, shared in zip(INSTANCES, shares, strict=True):
        index.apply(frame_bytes(name, InstanceStarted(epoch=Epoch(1), pools=POOLS if shared else POOLS[:3])))
    blocks = split_hashes(chain(0, len(pattern)))
    for block, tiers in zip(blocks, pattern, strict=True):
        for name, bits in zip(INSTANCES, tiers, strict=False):
            for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
                if bits >> tier & 1:
                    index.apply(frame_bytes(name, BlocksCreated(namespace=namespace, tier=tier, hashes=block)))
                    held.setdefault((namespace, block), set()).add(Holder(name, tier, False))
        if tiers[3] & 1:
            index.claim(POOL, namespace, block)
            held.setdefault((namespace, block), set()).add(Holder(POOL, Tier.OBJECT, True))
    expected = brute_force(held, namespace, b"".join(blocks))
    for name, shared in zip(INSTANCES, shares, strict=True):
        if not shared and name in expected:  # it cannot go on in a pool it has not
            depth, tiers_held, _ = expected.pop(name)
            expected |= {name: (depth, tiers_held, depth)} if depth else {}
    assert answers(index, namespace, b"".join(blocks)) == expected


exclusions = st.lists(st.tuples(st.integers(0, 79), st.integers(0, len(INSTANCES) - 1), st.booleans()), max_size=9)


@each_twin
@thorough
@given(scripts, exclusions, st.sets(st.sampled_from([Tier.HBM, Tier.HOST, Tier.NVME])))
def test_answers_are_those_of_a_cluster_without_what_is_excluded(
    twin: Twin,
    script: list[tuple[int, tuple[Any, ...]]],
    exclusions: list[tuple[int, int, bool]],
    pods: set[Tier],
) -> None:
    """Whatever happens before and after: the index says what counting blocks without these residencies gives, and
    forgets nothing.
    """
    cluster = Cluster(twin)
    excluded: set[InstanceId] = set()
    script = [*script, *((which, ("cut",)) for which in range(len(INSTANCES)))]
    # The ledgers declare their own pools; what others can read is told anew, in an epoch that takes_snapshot what there
    # is.
    for at, (which, command) in enumerate(script):
        cluster.run(which, command)
        for when, whose, is_excluded in exclusions:
            if when == at % 80:
                cluster.index.exclude(INSTANCES[whose], is_excluded)
                (excluded.add if is_excluded else excluded.discard)(INSTANCES[whose])
    declare(cluster, pods)
    held = cluster.held()
    shown = {
        key: kept
        for key, holders in held.items()
        if (kept := {h for h in holders if h.is_pool or h.name not in excluded or h.tier in pods})
    }
    assert indexed(cluster.index) == shown
    for namespace, block in ALL_KEYS:
        left_out = {h.name for h in held.get((namespace, block), set()) - shown.get((namespace, block), set())}
        assert set(cluster.index.excluded_holders(namespace, block)) == left_out
    for prompt in range(6):
        for namespace in NAMESPACES:
            expected = brute_force(shown, namespace.id, chain(prompt, 8))
            for name in excluded:
                if expected.get(name, (1,))[0] == 0:
                    del expected[name]  # it reaches only what others have
            assert answers(cluster.index, namespace.id, chain(prompt, 8)) == expected
    for name in INSTANCES:
        view = cluster.index.view(name)
        assert view is not None and view.excluded == (name in excluded)
        cluster.index.exclude(name, False)
    assert indexed(cluster.index) == held


def declare(cluster: Cluster, pods: set[Tier]) -> None:
    """A new epoch of every instance, whose pools in these tiers can be read by others, and what it holds."""
    pools = tuple(msgspec.structs.replace(p, reach=Reach.POD) if p.tier in pods else p for p in POOLS)
    for name, driver in zip(INSTANCES, cluster.drivers, strict=True):
        events: list[Event] = [InstanceStarted(epoch=Epoch(99), pools=pools)]
        for tier, held in driver.ledger.residencies.held.items():
            events += [
                BlocksCreated(
                    namespace=residency.namespace, tier=tier, hashes=block, slots=pack_slots([residency.slot])
                )
                for block, residency in held.items()
            ]
        cluster.index.apply(frame_bytes(name, *events, epoch=99))


@each_twin
@thorough
@given(scripts, st.sets(st.integers(0, 79)))
def test_after_lost_frames_a_snapshot_makes_every_instance_whole(
    twin: Twin, script: list[tuple[int, tuple[Any, ...]]], lost: set[int]
) -> None:
    cluster = Cluster(twin)
    for at, (which, command) in enumerate(script):
        cluster.run(which, command, lose=at in lost)
    now_s = 0.0
    for which, driver in enumerate(cluster.drivers):
        finish_snapshot(driver, 3)
        driver.ledger.begin_snapshot()
        finish_snapshot(driver, 3)
        driver.cut()
        cluster.send(which)
        published = Heartbeat(
            instance=INSTANCES[which], cluster="c", epoch=driver.epoch, published=driver.ledger.applied, wall_time_ns=0
        )
        cluster.sequencer.on_heartbeat(now_s, published)
        while cluster.sequencer.position(INSTANCES[which]) < (driver.epoch, driver.ledger.applied):
            now_s += 2.0
            cluster.sequencer.on_heartbeat(now_s, published)
            cluster.sequencer.step(now_s + 1.0, [], at_end=True)
            assert now_s < 1000
    assert indexed(cluster.index, with_claims=False) == cluster.held(with_claims=False)
    assert not any(is_suspect(cluster.index, name) for name in INSTANCES)


class Folds:
    """What the index is fused from: a fold for each instance, and a dictionary of claims."""

    def __init__(self) -> None:
        self.folds = {name: Residencies(strict=False) for name in INSTANCES}
        self.claims: dict[str, set[tuple[Tier, Key]]] = {}
        self.anomalies: Counter[str] = Counter()

    def evolve(self, name: InstanceId, event: Event) -> None:
        fold = self.folds[name]
        delta = fold.evolve(event)
        self.anomalies.update(rule for rule, _ in delta.anomalies)
        for pool in fold.pools.values():
            if pool.reach == Reach.CLUSTER:
                self.claims.setdefault(pool.name, set())
        for change in delta.claimed:
            self.speak_of(fold, change, False)
        for change in delta.unclaimed:
            self.speak_of(fold, change, True)

    def speak_of(self, fold: Residencies, change: Change, withdrawn: bool) -> None:
        pool, key = fold.pools.get(change.tier), (change.namespace, change.hash)
        if pool is None:
            self.anomalies["unnamed-claim"] += 1
        elif withdrawn:
            self.claims[pool.name] -= {(tier, key) for tier in Tier}
        else:
            self.claims[pool.name].add((change.tier, key))

    def held(self) -> dict[Key, set[Holder]]:
        found: dict[Key, set[Holder]] = {}
        for name, fold in self.folds.items():
            for tier, held in fold.held.items():
                for block, residency in held.items():
                    found.setdefault((residency.namespace, block), set()).add(Holder(name, tier, False))
        for pool, claims in self.claims.items():
            for tier, key in claims:
                found.setdefault(key, set()).add(Holder(pool, tier, True))
        return found


@st.composite
def tidy_events(draw: st.DrawFn) -> Event:
    """Of `crowded_events`, those of which fold and index say the same: no slots, and a block is in one namespace."""
    event = draw(crowded_events())
    if isinstance(event, InstanceStarted | SnapshotEnded):
        return event
    changes: dict[str, Any] = {"namespace": NAMESPACES[0].id}
    if not isinstance(event, BlocksEvicted):
        changes["slots"] = b""
    return msgspec.structs.replace(event, **changes)


def numbered(events: list[tuple[InstanceId, Event]]) -> list[tuple[InstanceId, Event]]:
    """The same events, with a snapshot number that was used before taken for the current one or a new one."""
    last: Counter[tuple[InstanceId, Tier]] = Counter()
    done = []
    for name, event in events:
        if isinstance(event, ResidenciesListed | SnapshotEnded):
            last[name, event.tier] += event.snapshot % 2
            done.append((name, msgspec.structs.replace(event, snapshot=last[name, event.tier])))
        else:
            done.append((name, event))
    return done


@each_twin
@thorough
@given(st.lists(st.tuples(st.sampled_from(INSTANCES), tidy_events()), max_size=60).map(numbered))
def test_no_sequence_of_events_parts_the_index_from_its_folds(
    twin: Twin, events: list[tuple[InstanceId, Event]]
) -> None:
    index, folds = twin.index(), Folds()
    for name, event in events:
        folds.evolve(name, event)
        index.apply(frame_bytes(name, event, epoch=folds.folds[name].epoch))
    expected = folds.held()
    assert indexed(index) == expected
    assert index.residency_count() == sum(fold.count() for fold in folds.folds.values())
    assert index.claim_counts() == {pool: len({key for _, key in claims}) for pool, claims in folds.claims.items()}
    assert index.anomalies() == dict(folds.anomalies)
    for name in index.instances():
        view, fold = index.view(name), folds.folds[name]
        assert view is not None and (view.epoch, view.digest) == (fold.epoch, fold.digest)
        assert {tier: count for tier, count in view.counts.items() if count} == {
            tier: fold.count(tier) for tier in Tier if fold.count(tier)
        }
        if fold.pools:
            own = [tier for tier in fold.pools if not fold.is_cluster(tier)]
            assert view.suspect == (not all(fold.is_whole(tier) for tier in own))


@each_twin
@thorough
@given(st.lists(any_frames(), max_size=12))
def test_no_sequence_of_frames_breaks_the_sequencer(twin: Twin, frames: list[Frame]) -> None:
    sequencer, rows = twin.sequencer(), RowCollector("KVBM")
    keys: set[Key] = set()
    for sequence, frame in enumerate(frames, 1):
        nearer = msgspec.structs.replace(
            frame, instance=INSTANCES[frame.digest % 2], first_offset=Offset(frame.epoch % 3)
        )
        rows.take(sequencer.step(0.0, [message(nearer, sequence)], at_end=True))
        for event in frame.events:
            if not isinstance(event, InstanceStarted | InstanceStopped | SnapshotEnded):
                keys |= {(event.namespace, block) for block in split_hashes(event.hashes)}
    held = held_of(sequencer.index, keys, with_claims=False)
    assert sequencer.index.residency_count() == sum(map(len, held.values()))
    assert (rows.take_batch(sequencer.safe_mark(), sequencer.rows) is None) == (not frames)
