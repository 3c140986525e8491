"""What a pool has is counted in whole objects: whoever reads it can have no part of one.

Both twins; and who says how large objects are.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.catalog.index.object_sizes import ObjectSizes
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.router import RoutingTask
from kvbm.config import RoutingSettings
from kvbm.core.events import BlocksCreated, InstanceStarted, PoolStated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier
from kvbm.core.layout import named_blocks, pool_name
from kvbm.core.prompt_batches import LOOKUP, PromptBatch, answers_head, decode_lookups
from kvbm.streams.base import Heartbeat
from tests.indexes import Twin, each_twin, frame_bytes

K, TOKENS = 8, 16
ONE, TWO = InstanceId("one"), InstanceId("two")
SPACE = Namespace(model="m", block_tokens=TOKENS).id
OTHER = Namespace(model="other", block_tokens=TOKENS).id
STORE = "s3://bucket/kv"
MARKED = pool_name(STORE, K, True)
HASHES = b"".join(number.to_bytes(HASH_BYTES, "big") for number in range(1, 33))
BLOCK_BYTES = 1 << 20


def run(begin: int, end: int) -> bytes:
    return HASHES[begin * HASH_BYTES : end * HASH_BYTES]


def start(index: ClusterIndex, instance: InstanceId, pool: str, *held: range) -> None:
    """An instance that uses a pool and has these blocks in HBM."""
    pools = (PoolStated(Tier.HBM, 64, BLOCK_BYTES), PoolStated(Tier.OBJECT, 0, BLOCK_BYTES, Reach.CLUSTER, pool))
    events = [
        BlocksCreated(namespace=SPACE, tier=Tier.HBM, hashes=run(blocks.start, blocks.stop), slots=b"")
        for blocks in held
    ]
    index.apply(frame_bytes(instance, InstanceStarted(epoch=Epoch(1), pools=pools), *events))


def depth_of(index: ClusterIndex, asked: bytes, pool: str, namespace: NamespaceId = SPACE) -> int:
    """What answers say that a pool has; all of them say the same."""
    said = {one.pool: one.depth for one in index.prefixes(namespace, asked).pools}
    told = index.lookup(namespace, asked, 9, None, "asked", 0.0, ())
    batch = PromptBatch(LOOKUP, 9, namespace, [(asked, 0)])
    encoded = answers_head(LOOKUP, 1, 0.0) + index.encode_prefixes(namespace, [asked], 9)
    for answer in (told, decode_lookups(encoded, batch)[0]):
        assert {one.pool: one.depth for one in answer.pools} == said
        assert answer.deepest == max([*said.values(), *(one.depth for one in answer.instances)], default=0)
    return said.get(pool, 0)


def reaches(index: ClusterIndex, asked: bytes) -> dict[str, tuple[int, int]]:
    return {one.instance: (one.depth, one.reach) for one in index.prefixes(SPACE, asked).instances}


@each_twin
@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize(
    ("claimed", "asked", "wanted"), [(24, 20, 16), (24, 24, 24), (13, 24, 8), (5, 24, 0), (16, 5, 0)]
)
def test_a_pool_has_whole_objects_or_nothing(
    twin: Twin, is_marked: bool, claimed: int, asked: int, wanted: int
) -> None:
    index, pool = twin.index(), MARKED if is_marked else STORE
    index.claim(pool, SPACE, run(0, claimed))
    assert depth_of(index, run(0, asked), pool) == (wanted if is_marked else min(claimed, asked))
    index.size_objects(SPACE, K)
    assert depth_of(index, run(0, asked), pool) == wanted
    assert [one.held for one in index.presence(SPACE, run(0, asked)).rows] == [
        ((1 << min(claimed, asked)) - 1).to_bytes(-(-asked // 8), "little")
    ]  # each block by itself is claimed


@each_twin
def test_an_instance_reaches_on_with_objects_that_are_claimed_from_their_first_block(twin: Twin) -> None:
    index = twin.index()
    start(index, ONE, MARKED, range(10))  # ends within the second object
    start(index, TWO, MARKED)
    index.claim(MARKED, SPACE, run(8, 24))
    assert reaches(index, HASHES) == {ONE: (10, 24)}
    assert reaches(index, run(0, 20)) == {
        ONE: (10, 16)
    }  # the third object's name is its last block's, which was not asked for
    index.unclaim(MARKED, SPACE, run(8, 9))
    assert reaches(index, HASHES) == {ONE: (10, 10)}  # it has that block, but the object lacks it
    index.claim(MARKED, SPACE, run(0, 9))
    assert reaches(index, HASHES) == {ONE: (10, 24), TWO: (0, 24)}
    assert reaches(index, run(0, 7)) == {ONE: (7, 7)}


@each_twin
def test_a_route_counts_whole_objects(twin: Twin) -> None:
    index = twin.index()
    start(index, ONE, MARKED)
    index.claim(MARKED, SPACE, run(0, 24))
    router = index.router(RoutingSettings(prefill_tokens_per_s=10.0))  # so that reading is always worth it
    candidates = router.candidates()
    router.add(candidates, ONE)
    asked = run(0, 20) + b"".join(bytes([200 + at]) * HASH_BYTES for at in range(4))
    best = router.route(0.0, RoutingTask(SPACE, asked, 24 * TOKENS, TOKENS), [candidates], None, 9).best
    assert [(one.depth, one.fetch_blocks, one.missing_tokens) for one in best] == [(16, 16, 8 * TOKENS)]


@each_twin
def test_the_smallest_size_that_was_told_counts_and_only_in_its_namespace(twin: Twin) -> None:
    index = twin.index()
    for space in (SPACE, OTHER):
        index.claim(STORE, space, run(0, 13))
        index.claim(MARKED, space, run(0, 13))
    for told, wanted in ((0, 13), (1 << 20, 0), (8, 8), (64, 8), (4, 12), (0, 12), (1, 13), (8, 13)):
        index.size_objects(SPACE, told)
        assert depth_of(index, HASHES, STORE) == wanted
    assert depth_of(index, HASHES, MARKED) == 8  # its name says it
    assert depth_of(index, HASHES, STORE, OTHER) == 13
    index.forget_namespace(SPACE)
    index.unclaim(STORE, SPACE, run(0, 13))
    index.claim(STORE, SPACE, run(0, 13))
    index.size_objects(SPACE, 8)
    assert depth_of(index, HASHES, STORE) == 8


NAMES = {
    "": 0,
    "s3://bucket": 0,
    "blocks=4": 0,
    "s3://b#sealed": 0,
    "s3://b#blocks=4": 4,
    "s3://b#blocks=4,sealed": 4,
    "s3://b#sealed,blocks=4": 4,
    "s3://b#x#blocks=4": 4,
    "s3://b#blocks=4#x": 0,
    "s3://b#blocks=": 0,
    "s3://b#blocks=04": 0,
    "s3://b#blocks=0": 0,
    "s3://b#blocks=-4": 0,
    "s3://b#blocks=+4": 0,
    "s3://b#blocks=4_0": 0,
    "s3://b#blocks= 4": 0,
    "s3://b#blocks=9999999": 9_999_999,
    "s3://b#blocks=10000000": 0,
    "s3://b#blocks=\u0664": 0,
    "s3://b#Blocks=4": 0,
    "s3://b#myblocks=4": 0,
    "s3://b#blocks=x,blocks=4": 4,
    "#blocks=4": 4,
    "s3://b#": 0,
    "s3://b#,": 0,
}


@each_twin
def test_both_languages_read_the_same_of_a_pools_name(twin: Twin) -> None:
    for name, wanted in NAMES.items():
        assert named_blocks(name) == wanted, name
        index = twin.index()
        index.claim(name, SPACE, run(0, 13))
        assert depth_of(index, HASHES, name) == 13 // (wanted or 1) * (wanted or 1), name
    for blocks, is_sealed in ((0, False), (0, True), (4, False), (1, True)):
        assert named_blocks(pool_name(STORE, blocks, is_sealed)) == blocks


class Site:
    """Heartbeats of instances that have named namespaces."""

    def __init__(self, twin: Twin) -> None:
        self.index = twin.index()
        self.names: dict[InstanceId, frozenset[NamespaceId]] = {}
        self.sizes = ObjectSizes(self.index, self)

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        return self.names.get(instance, frozenset())

    def beat(self, instance: InstanceId, blocks: int, names: Sequence[NamespaceId] = (SPACE,)) -> None:
        self.names[instance] = frozenset(names)
        beat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, object_blocks=blocks
        )
        self.sizes.hear(instance, LastHeartbeat(beat, 0.0))


@each_twin
def test_an_instance_says_how_large_its_objects_are_where_their_pools_name_does_not(twin: Twin) -> None:
    site = Site(twin)
    for pool in (STORE, MARKED):
        for space in (SPACE, OTHER):
            site.index.claim(pool, space, run(0, 13))
    site.beat(ONE, 4)  # its start was not read yet: it may use another pool
    assert depth_of(site.index, HASHES, STORE) == 13
    start(site.index, ONE, MARKED)
    site.beat(ONE, K)
    assert (depth_of(site.index, HASHES, STORE), depth_of(site.index, HASHES, MARKED)) == (13, 8)
    start(site.index, TWO, STORE)
    site.beat(TWO, 0)  # of a kvbm that does not say it
    assert depth_of(site.index, HASHES, STORE) == 13
    site.beat(TWO, 4)
    assert (depth_of(site.index, HASHES, STORE), depth_of(site.index, HASHES, STORE, OTHER)) == (12, 13)
    site.beat(TWO, 4, [SPACE, OTHER])  # it has named another since
    assert (depth_of(site.index, HASHES, STORE), depth_of(site.index, HASHES, STORE, OTHER)) == (12, 12)
    site.sizes.forget(TWO)
    assert depth_of(site.index, HASHES, STORE) == 12
