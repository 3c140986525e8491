"""The cluster index and claims that SQL knew before. What it holds in general: tests/property/test_index.py."""

from __future__ import annotations

import pytest

from kvbm.catalog.index import lookup
from kvbm.catalog.sql.rows import InstanceRow
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import BlocksCreated, BlocksEvicted, EvictReason, InstanceStarted, PoolStated
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Offset, Reach, Tier, pack_slots
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
