"""The catalog's index is the union of what its instances hold and what its pools are claimed to hold, whatever they do."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.catalog.index import ClusterIndex, Holder
from kvbm.catalog.projector import Projector
from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    MigrateCause,
    PoolStated,
    ResidenciesStated,
    RoundEnded,
)
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier, pack_slots, split_hashes
from kvbm.core.residency import Residencies
from kvbm.streams.base import Heartbeat, StreamMessage
from tests.property.test_command_sequences import NAMESPACES, POOLS, Driver, chain, commands, finish_round
from tests.strategies import frames as any_frames

INSTANCES = [InstanceId(name) for name in ("a", "b", "c")]
POOL = POOLS[-1].name
thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
scripts = st.lists(st.tuples(st.integers(0, len(INSTANCES) - 1), commands), max_size=80)
Key = tuple[NamespaceId, SequenceHash]


class Cluster:
    """Several ledgers, one stream, one projector that reads it, and the answer it should come to."""

    def __init__(self) -> None:
        self.drivers = [Driver() for _ in INSTANCES]
        self.projector = Projector(ClusterIndex(), decode_frame, "KVBM")
        self.claims: set[Key] = set()
        self.sequence = 0
        self.sent = [0] * len(INSTANCES)
        for which in range(len(INSTANCES)):
            self.send(which)

    @property
    def index(self) -> ClusterIndex:
        return self.projector.index

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
        self.projector.step(0.0, messages)

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


def indexed(index: ClusterIndex, with_claims: bool = True) -> dict[Key, set[Holder]]:
    """What the index says of every block it knows."""
    found = {
        (namespace, SequenceHash(block)): {
            holder for holder in index.holders(namespace, SequenceHash(block)) if with_claims or not holder.is_pool
        }
        for namespace, table in index._tables.items()
        for block in table
    }
    return {key: holders for key, holders in found.items() if holders}


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


@thorough
@given(scripts)
def test_the_index_is_the_union_of_residencies_and_claims(script: list[tuple[int, tuple[Any, ...]]]) -> None:
    cluster = Cluster()
    for which, command in script:
        cluster.run(which, command)
    cluster.finish()
    assert indexed(cluster.index) == cluster.held()
    assert cluster.index.claim_counts().get(POOL, 0) == len(cluster.claims)
    assert cluster.projector.counters.digest_mismatches == cluster.projector.counters.holes == 0
    assert not cluster.index.anomalies
    for name, driver in zip(INSTANCES, cluster.drivers, strict=True):
        fold = cluster.index.fold(name)
        assert fold is not None and fold.digest == driver.ledger.residencies.digest
        assert not cluster.index.is_doubtful(name)
        cluster.index.drop(name)
    assert indexed(cluster.index) == {key: {Holder(POOL, Tier.OBJECT, True)} for key in cluster.claims}


@thorough
@given(scripts, st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.lists(st.integers(0, 7), max_size=3))))
def test_prefixes_are_what_counting_block_by_block_gives(
    script: list[tuple[int, tuple[Any, ...]]], queries: list[tuple[int, int, list[int]]]
) -> None:
    cluster = Cluster()
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


@thorough
@given(st.lists(masks, max_size=40), st.lists(st.booleans(), min_size=len(INSTANCES), max_size=len(INSTANCES)))
def test_prefixes_are_right_for_any_pattern_of_holes(pattern: list[list[int]], shares: list[bool]) -> None:
    """Every block anywhere: three instances in any tiers, a pool with any claims, which not every instance can read."""
    index, namespace = ClusterIndex(), NAMESPACES[0].id
    held: dict[Key, set[Holder]] = {}
    for name, shared in zip(INSTANCES, shares, strict=True):
        index.apply(name, InstanceStarted(epoch=Epoch(1), pools=POOLS if shared else POOLS[:3]))
    blocks = split_hashes(chain(0, len(pattern)))
    for block, tiers in zip(blocks, pattern, strict=True):
        for name, bits in zip(INSTANCES, tiers, strict=False):
            for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
                if bits >> tier & 1:
                    index.apply(name, BlocksCreated(namespace=namespace, tier=tier, hashes=block))
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


@thorough
@given(scripts, st.sets(st.integers(0, 79)))
def test_after_lost_frames_a_round_makes_every_instance_whole(
    script: list[tuple[int, tuple[Any, ...]]], lost: set[int]
) -> None:
    cluster = Cluster()
    for at, (which, command) in enumerate(script):
        cluster.run(which, command, lose=at in lost)
    now_s = 0.0
    for which, driver in enumerate(cluster.drivers):
        finish_round(driver, 3)
        driver.ledger.begin_round()
        finish_round(driver, 3)
        driver.cut()
        cluster.send(which)
        published = Heartbeat(
            instance=INSTANCES[which], cluster="c", epoch=driver.epoch, published=driver.ledger.applied, wall_time_ns=0
        )
        cluster.projector.hear(now_s, published)
        while cluster.projector.position(INSTANCES[which]) < (driver.epoch, driver.ledger.applied):
            now_s += 2.0
            cluster.projector.hear(now_s, published)
            cluster.projector.step(now_s + 1.0, [], at_end=True)
            assert now_s < 1000
    assert indexed(cluster.index, with_claims=False) == cluster.held(with_claims=False)
    assert not any(cluster.index.is_doubtful(name) for name in INSTANCES)


few_hashes = st.lists(st.sampled_from(split_hashes(chain(0, 4))), min_size=1, max_size=4, unique=True).map(b"".join)


@st.composite
def crowded_events(draw: st.DrawFn) -> Event:
    """Legal or not: few blocks in few slots of two namespaces, so that events collide in every way."""
    namespace, tier, hashes = draw(st.sampled_from(NAMESPACES)).id, draw(st.sampled_from(Tier)), draw(few_hashes)
    count = len(hashes) // 16
    slots = draw(st.just(b"") | st.permutations(range(4)).map(lambda order: pack_slots(order[:count])))
    match draw(st.integers(0, 5)):
        case 0:
            return BlocksCreated(namespace=namespace, tier=tier, hashes=hashes, slots=slots)
        case 1:
            return BlocksMigrated(
                namespace=namespace, source=draw(st.sampled_from(Tier)), target=tier, kept=draw(st.booleans()),
                cause=MigrateCause.OFFLOAD, hashes=hashes, slots=slots,
            )  # fmt: skip
        case 2:
            return BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.CLEARED, hashes=hashes)
        case 3:
            return ResidenciesStated(
                namespace=namespace, tier=tier, round=draw(st.integers(0, 2)), hashes=hashes, slots=slots
            )
        case 4:
            return RoundEnded(tier=tier, round=draw(st.integers(0, 2)), count=draw(st.integers(0, 4)))
        case _:
            pools = st.sampled_from([POOLS, POOLS[:3], (), (PoolStated(Tier.HBM, 4, 1, Reach.CLUSTER, "shared"),)])
            return InstanceStarted(epoch=Epoch(draw(st.integers(1, 3))), pools=draw(pools))


def held_by_folds(index: ClusterIndex) -> dict[Key, set[Holder]]:
    found: dict[Key, set[Holder]] = {}
    for name in index.instances():
        fold = index.fold(name)
        assert fold is not None
        for tier, held in fold.held.items():
            for block, residency in held.items():
                found.setdefault((residency.namespace, block), set()).add(Holder(name, tier, False))
    return found


@thorough
@given(st.lists(st.tuples(st.sampled_from(INSTANCES), crowded_events()), max_size=60))
def test_no_sequence_of_events_parts_the_table_from_the_folds(events: list[tuple[InstanceId, Event]]) -> None:
    index = ClusterIndex()
    claims: set[tuple[str, Tier, Key]] = set()
    for name, event in events:
        delta = index.apply(name, event)
        for change in delta.claimed:
            if pool := index.pool_name(name, change.tier):
                claims.add((pool, change.tier, (change.namespace, change.hash)))
        for change in delta.unclaimed:
            if pool := index.pool_name(name, change.tier):
                claims.discard((pool, change.tier, (change.namespace, change.hash)))
    expected = held_by_folds(index)
    for pool, tier, key in claims:
        expected.setdefault(key, set()).add(Holder(pool, tier, True))
    assert indexed(index) == expected
    assert index.residency_count() == sum(map(len, held_by_folds(index).values()))
    assert index.block_count() == len(expected)
    counts = {pool: len({key for name, _, key in claims if name == pool}) for pool in index.claim_counts()}
    assert index.claim_counts() == counts


@thorough
@given(st.lists(any_frames(), max_size=12))
def test_no_sequence_of_frames_breaks_the_projector(frames: list[Frame]) -> None:
    projector = Projector(ClusterIndex(), decode_frame, "KVBM")
    for sequence, frame in enumerate(frames, 1):
        nearer = msgspec.structs.replace(
            frame, instance=INSTANCES[frame.digest % 2], first_offset=Offset(frame.epoch % 3)
        )
        projector.step(0.0, [message(nearer, sequence)], at_end=True)
    assert indexed(projector.index, with_claims=False) == held_by_folds(projector.index)
    assert (projector.take_batch() is None) == (not frames)
