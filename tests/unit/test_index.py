"""The cluster index and claims that SQL knew before. What it holds in general: tests/property/test_index.py."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm.catalog.index import lookup
from kvbm.catalog.sql.rows import InstanceRow
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import BlocksCreated, BlocksEvicted, Event, EvictReason, InstanceStarted, PoolStated
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Offset, Reach, Tier, pack_slots
from kvbm.reference.cluster_index import MOST_POOLS_OF_ONE
from kvbm.streams.base import StreamMessage
from tests.indexes import Twin, each_twin, frame_bytes

ONE = InstanceId("one")
SPACE = Namespace(model="m", block_tokens=16).id
BLOCK = bytes(range(16))


@each_twin
def test_a_claim_loaded_from_sql_is_withdrawn_whatever_tier_the_pool_is_in(twin: Twin) -> None:
    index = twin.index()
    index.claim("shared", SPACE, BLOCK)
    pools = (PoolStated(Tier.NVME, 8, 64, Reach.CLUSTER, "shared"),)
    evicted = BlocksEvicted(namespace=SPACE, tier=Tier.NVME, reason=EvictReason.CORRUPT, hashes=BLOCK)
    index.apply(frame_bytes(ONE, InstanceStarted(epoch=Epoch(1), pools=pools), evicted))
    assert not index.holders(SPACE, BLOCK)
    assert index.claim_counts() == {"shared": 0}


@each_twin
def test_claims_of_an_older_epoch_joined_mid_stream_go_to_the_pool_that_sql_knows(twin: Twin) -> None:
    pools = (PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, "shared"),)
    known = InstanceRow(id=ONE, cluster="c", epoch=Epoch(2), first_seen_ns=1, last_frame_ns=1, pools=pools)
    index = twin.index()
    index.claim("shared", SPACE, BLOCK)
    sequencer = twin.sequencer(index, known=[known])
    event = BlocksEvicted(namespace=SPACE, tier=Tier.OBJECT, reason=EvictReason.CORRUPT, hashes=BLOCK)
    frame = Frame(instance=ONE, epoch=Epoch(1), first_offset=Offset(5), wall_time_ns=1, events=(event,), digest=0)
    sequencer.step(0.0, [StreamMessage(1, "kvbm.v1.events.c.one", encode_frame(frame))])
    assert not index.anomalies()
    assert not index.holders(SPACE, BLOCK)


def shared(name: str) -> PoolStated:
    return PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, name)


def started(index: Any, instance: InstanceId, name: str, *events: Event) -> None:
    """An instance begins with a cluster pool of this name."""
    index.apply(frame_bytes(instance, InstanceStarted(epoch=Epoch(1), pools=(shared(name),)), *events))


def audited(index: Any) -> None:
    for _ in range(2):  # what goes during a pass is forgotten at the end of the next
        while not index.audit().is_whole:
            pass


CREATED = BlocksCreated(namespace=SPACE, tier=Tier.OBJECT, hashes=BLOCK, slots=b"", parent=NO_PARENT, start=0)
GONE = BlocksEvicted(namespace=SPACE, tier=Tier.OBJECT, reason=EvictReason.CORRUPT, hashes=BLOCK)


@each_twin
def test_cluster_pools_that_nobody_claims_or_names_are_forgotten_and_make_room_for_others(twin: Twin) -> None:
    index = twin.index()
    index.claim("stored", SPACE, BLOCK)
    for number in range(2 * MOST_POOLS_OF_ONE):  # one name after the other, as after so many starts
        started(index, ONE, f"pool-{number}", CREATED, GONE)
        assert index.pool_name(ONE, Tier.OBJECT) == f"pool-{number}"
        audited(index)
        assert index.claim_counts() == {"stored": 1, f"pool-{number}": 0}
    index.begin_blind(ONE, Epoch(2))  # the name of the last start is the best guess still
    audited(index)
    assert index.pool_name(ONE, Tier.OBJECT) == f"pool-{number}"
    index.drop(ONE)
    index.unclaim("stored", SPACE, BLOCK)
    audited(index)
    assert index.claim_counts() == {}


@each_twin
def test_who_is_followed_after_a_drop_brings_as_many_pools_as_anybody(twin: Twin) -> None:
    index = twin.index()
    for number in range(MOST_POOLS_OF_ONE):
        started(index, ONE, f"pool-{number}", CREATED)
    started(index, ONE, "too-many")
    assert index.pool_name(ONE, Tier.OBJECT) is None
    index.drop(ONE)
    next_one = InstanceId("next")  # it gets the number of the one before
    for number in range(MOST_POOLS_OF_ONE):
        started(index, next_one, f"other-{number}", CREATED)
        assert index.pool_name(next_one, Tier.OBJECT) == f"other-{number}"
    for number in range(MOST_POOLS_OF_ONE):
        index.unclaim(f"pool-{number}", SPACE, BLOCK)
    audited(index)  # what the one before had brought goes, and makes no room for the next
    assert index.claim_counts() == {f"other-{number}": 1 for number in range(MOST_POOLS_OF_ONE)}
    started(index, next_one, "too-many")
    assert index.pool_name(next_one, Tier.OBJECT) is None


@each_twin
def test_who_has_very_many_blocks_is_named_as_far_as_their_masks_have_room(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, blocks = twin.index(), b"".join(at.to_bytes(16) for at in range(64))
    pools = (PoolStated(Tier.HBM, 64, 64, Reach.INSTANCE, ""),)
    created = BlocksCreated(
        namespace=SPACE, tier=Tier.HBM, hashes=blocks, slots=pack_slots(range(64)), parent=NO_PARENT, start=0
    )
    for name in ("one", "two", "three"):
        index.apply(frame_bytes(InstanceId(name), InstanceStarted(epoch=Epoch(1), pools=pools), created))
    monkeypatch.setattr(lookup, "_MASKS_BYTES", 2 * (64 // 8 + 1))
    for limit, wanted in ((8, 2), (1, 1)):
        answer = lookup.presence(index, SPACE, blocks, limit)
        assert [one.bits() for one in answer.holders] == [b"\xff" * 8] * wanted
        assert answer.more == 3 - wanted
