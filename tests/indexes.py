"""Both implementations of the cluster index, each with the scan of its language, and frames to feed them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from kvbm import _native
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.index.cluster_index import ClusterIndex, Holder, NewIndex
from kvbm.core import codec
from kvbm.core.backend import ScanFrames
from kvbm.core.codec import Frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier, pack_slots, split_hashes
from kvbm.reference.cluster_index import ReferenceIndex
from tests.ledger_driver import NAMESPACES, POOLS, chain

ROOM = 1 << 20  # a capacity nothing here comes near
Key = tuple[NamespaceId, SequenceHash]


class Twin(NamedTuple):
    """One of the two implementations."""

    new_index: NewIndex
    scan_frames: ScanFrames

    def index(self, capacity: int = ROOM) -> ClusterIndex:
        return self.new_index(capacity)

    def sequencer(self, index: ClusterIndex | None = None, **known: object) -> Sequencer:
        return Sequencer(index or self.index(), self.scan_frames, **known)  # type: ignore[arg-type]


REFERENCE = Twin(ReferenceIndex, codec.scan_frames)
NATIVE = Twin(_native.ClusterIndex, _native.scan_frames)
each_twin = pytest.mark.parametrize("twin", [REFERENCE, NATIVE], ids=["reference", "native"])


def frame_bytes(instance: InstanceId, *events: Event, epoch: int = 1, digest: int = 0, wall_time_ns: int = 1) -> bytes:
    """A frame of these events; an index does not look at its offset."""
    return _native.encode_frame(
        Frame(
            instance=instance,
            epoch=Epoch(epoch),
            first_offset=Offset(0),
            wall_time_ns=wall_time_ns,
            events=events,
            digest=digest,
        )
    )


def held_of(index: ClusterIndex, keys: set[Key], with_claims: bool = True) -> dict[Key, set[Holder]]:
    """What an index says of these blocks, those that nobody holds left out. It never says the same holder twice."""
    found: dict[Key, set[Holder]] = {}
    for key in keys:
        holders = index.holders(*key)
        assert holders == sorted(set(holders))
        if kept := {holder for holder in holders if with_claims or not holder.is_pool}:
            found[key] = kept
    return found


few_hashes = st.lists(st.sampled_from(split_hashes(chain(0, 4))), min_size=1, max_size=4, unique=True).map(b"".join)
snapshots = st.integers(0, 7)


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
                namespace=namespace,
                source=draw(st.sampled_from(Tier)),
                target=tier,
                kept=draw(st.booleans()),
                cause=MigrateCause.OFFLOAD,
                hashes=hashes,
                slots=slots,
            )
        case 2:
            return BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.CLEARED, hashes=hashes)
        case 3:
            return ResidenciesListed(
                namespace=namespace, tier=tier, snapshot=draw(snapshots), hashes=hashes, slots=slots
            )
        case 4:
            return SnapshotEnded(tier=tier, snapshot=draw(snapshots), count=draw(st.integers(0, 4)))
        case _:
            pools = st.sampled_from([POOLS, POOLS[:3], (), (PoolStated(Tier.HBM, 4, 1, Reach.CLUSTER, "shared"),)])
            return InstanceStarted(epoch=Epoch(draw(st.integers(1, 3))), pools=draw(pools))
