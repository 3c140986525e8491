"""Both implementations of the cluster index, each with the scan of its language, and frames to feed them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvbm import _native
from kvbm.catalog.index import ClusterIndex, Holder, NewIndex
from kvbm.catalog.projector import Projector
from kvbm.catalog.reference_index import ReferenceIndex
from kvbm.core import codec
from kvbm.core.codec import Frame
from kvbm.core.events import Event
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, SequenceHash
from kvbm.core.kernels import ScanFrames

ROOM = 1 << 20  # a capacity nothing here comes near
Key = tuple[NamespaceId, SequenceHash]


class Twin(NamedTuple):
    """One of the two implementations."""

    new_index: NewIndex
    scan_frames: ScanFrames

    def index(self, capacity: int = ROOM) -> ClusterIndex:
        return self.new_index(capacity)

    def projector(self, index: ClusterIndex | None = None, **known: object) -> Projector:
        return Projector(index or self.index(), self.scan_frames, "KVBM", **known)  # type: ignore[arg-type]


REFERENCE = Twin(ReferenceIndex, codec.scan_frames)
NATIVE = Twin(_native.ClusterIndex, _native.scan_frames)
each_twin = pytest.mark.parametrize("twin", [REFERENCE, NATIVE], ids=["reference", "native"])


def frame_bytes(instance: InstanceId, *events: Event, epoch: int = 1, digest: int = 0) -> bytes:
    """A frame of these events; an index does not look at its offset."""
    return _native.encode_frame(
        Frame(
            instance=instance, epoch=Epoch(epoch), first_offset=Offset(0), wall_time_ns=1, events=events, digest=digest
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
