"""Small logs of which histories are made, and the history of some frames."""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from kvbm.assembly import NATIVE, NATIVE_STAYS
from kvbm.core.backend import REFERENCE
from kvbm.core.codec import Frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Offset, Reach, Tier, pack_slots
from kvbm.reference.history import StayHistory as ReadableHistory
from kvbm.replay.history import write_history
from kvbm.replay.history_manifest import HistoryManifest
from kvbm.replay.opening import open_source
from tests.captures import BEGIN_NS, SECOND_NS, packed

ACME, OTHER = Namespace(model="m", block_tokens=16, tenant="acme"), Namespace(model="m", block_tokens=16)
POOLS = (
    PoolStated(Tier.HBM, 8, 1000),
    PoolStated(Tier.HOST, 8, 1000),
    PoolStated(Tier.NVME, 8, 1000),
    PoolStated(Tier.OBJECT, 0, 1000, Reach.CLUSTER, "s3://bucket/kv"),
)
START = InstanceStarted(epoch=Epoch(1), pools=POOLS, namespaces=(ACME, OTHER), engine="bench", version="9")
ONE, TWO, THREE = (bytes([number]) * 16 for number in (0x11, 0x22, 0x33))
BEGIN = datetime(2026, 1, 1)  # noqa: DTZ001 - histories are in UTC, without a zone


def frames_of(steps: list[list[Event]], instance: str = "one", epoch: int = 1) -> list[Frame]:
    """A frame a step, a second apart; a start begins the next epoch."""
    frames: list[Frame] = []
    offset = 0
    for number, events in enumerate(steps):
        if isinstance(events[0], InstanceStarted):
            epoch, offset = events[0].epoch, 0
        frames.append(
            Frame(
                instance=InstanceId(instance),
                epoch=Epoch(epoch),
                first_offset=Offset(offset),
                wall_time_ns=BEGIN_NS + number * SECOND_NS,
                digest=0,
                events=tuple(events),
            )
        )
        offset += len(events)
    return frames


def created(tier: Tier, hashes: bytes, slots: list[int], space: Namespace = ACME) -> BlocksCreated:
    return BlocksCreated(
        namespace=space.id, tier=tier, hashes=hashes, parent=NO_PARENT, start=0, slots=pack_slots(slots)
    )


def migrated(source: Tier | InstanceId, target: Tier, hashes: bytes, slots: list[int], **more: Any) -> BlocksMigrated:
    return BlocksMigrated(
        namespace=ACME.id,
        source=source,
        target=target,
        kept=more.get("kept", True),
        cause=more.get("cause", MigrateCause.OFFLOAD),
        hashes=hashes,
        slots=pack_slots(slots) if slots else b"",
    )


LOG = [
    [START],
    [created(Tier.HBM, ONE + TWO, [0, 1])],
    [migrated(Tier.HBM, Tier.HOST, ONE, [0])],
    [BlocksEvicted(namespace=ACME.id, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=ONE)],
    [migrated(Tier.HOST, Tier.NVME, ONE, [5], kept=False), migrated(Tier.NVME, Tier.OBJECT, ONE, [])],
    [migrated(InstanceId("peer"), Tier.HOST, THREE, [3], cause=MigrateCause.FETCH)],
    [InstanceStarted(epoch=Epoch(2), pools=POOLS, namespaces=(ACME, OTHER))],
    [
        ResidenciesListed(namespace=ACME.id, tier=Tier.NVME, snapshot=1, hashes=ONE, slots=pack_slots([5])),
        SnapshotEnded(tier=Tier.NVME, snapshot=1, count=1),
    ],
    [BlocksEvicted(namespace=ACME.id, tier=Tier.OBJECT, reason=EvictReason.TTL, hashes=ONE)],
    [InstanceStopped(reason=StopReason.SHUTDOWN)],
]


def made(folder: Path, frames: list[Frame], is_readable: bool = False) -> HistoryManifest:
    """The history of frames, in folder/history."""
    capture = folder / "capture.kvbm"
    capture.write_bytes(packed(frames))
    how = (REFERENCE, ReadableHistory) if is_readable else (NATIVE, NATIVE_STAYS)
    return write_history(open_source(str(capture)), folder / "history", *how)


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


def cut_at(frame: Frame, wall_time_ns: int) -> Frame:
    return msgspec.structs.replace(frame, wall_time_ns=wall_time_ns)
