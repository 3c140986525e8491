"""Frames as columns: a whole buffer of frames as a few arrays, for who reads many events and needs no objects.

Events and frames are rows of structured arrays; a run of blocks is rows [first_block, first_block + count) of `hashes`
and `slots`. What an event does not have is NO_CODE in a byte, NO_ROW in an index, and 0 elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

import numpy as np

from kvbm.core.codec import decode_frame, decode_header
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    RunEvent,
    SnapshotEnded,
    UsageRecorded,
)
from kvbm.core.ids import HASH_BYTES, Tier, hash_count

NO_CODE = 0xFF
NO_ROW = 0xFFFFFFFF
NO_SLOT = 0xFFFFFFFF

FRAME_ROW = np.dtype(
    [
        ("at", "<u8"),  # where the frame lies in the buffer
        ("epoch", "<u8"),
        ("first_offset", "<u8"),  # offset of its first event
        ("wall_time_ns", "<u8"),
        ("digest", "<u8"),
        ("first_event", "<u8"),  # its rows of `events` begin here
        ("event_count", "<u4"),
        ("instance", "<u4"),  # row of `names`
    ]
)

EVENT_ROW = np.dtype(
    [
        ("kind", "u1"),  # as in the frame: 1 InstanceStarted … 8 UsageRecorded
        ("tier", "u1"),  # for BlocksMigrated the target
        ("source", "u1"),  # of BlocksMigrated: the tier; NO_CODE for an instance, which `other` names
        ("code", "u1"),  # EvictReason, MigrateCause or StopReason
        ("has_slots", "u1"),
        ("kept", "u1"),
        ("offset", "<u8"),  # in its instance's stream
        ("first_block", "<u8"),  # its rows of `hashes` and `slots` begin here
        ("frame", "<u4"),  # row of `frames`
        ("count", "<u4"),  # how many they are; for SnapshotEnded what it counted
        ("namespace", "<u4"),  # row of `namespaces`
        ("start", "<u4"),  # of BlocksCreated
        ("snapshot", "<u4"),  # of ResidenciesListed and SnapshotEnded
        ("other", "<u4"),  # BlocksMigrated from an instance: row of `names`; InstanceStarted: row of `starts`
        ("parent", "u1", (HASH_BYTES,)),  # of BlocksCreated
    ],
    align=True,
)


class FrameColumns(NamedTuple):
    """The frames of a buffer.

    Attributes:
        frames: F frames as FRAME_ROW, in order.
        events: E events as EVENT_ROW, in order.
        hashes: (B, 16) uint8, of all runs.
        slots: B slots, uint32; NO_SLOT for blocks of a run without.
        namespaces: (N, 16) uint8, distinct ids in the order of their first use.
        names: of instances, distinct, in the order of their first use.
        starts: the InstanceStarted, in order.
    """

    frames: np.ndarray
    events: np.ndarray
    hashes: np.ndarray
    slots: np.ndarray
    namespaces: np.ndarray
    names: tuple[str, ...]
    starts: tuple[InstanceStarted, ...]


def decode_columns(data: bytes, at: int = 0, limit: int | None = None) -> tuple[FrameColumns, int]:
    """The frames from a position on as columns, and the position after them.

    Args:
        data: whole frames, one after the other.
        at: where the first begins; at the end or beyond it there are none.
        limit: read so many frames at most; None for all there are.
    Raises: as `decode_frame`, at the first frame it refuses.
    """
    table = _Table()
    while at < len(data) and (limit is None or len(table.frames) < limit):
        at = table.add_frame(data, at)
    return table.columns(), at


class _Table:
    def __init__(self) -> None:
        self.frames: list[tuple[object, ...]] = []
        self._events: list[tuple[object, ...]] = []
        self._hashes, self._slots = bytearray(), bytearray()
        self._namespaces: dict[bytes, int] = {}
        self._names: dict[str, int] = {}
        self._starts: list[InstanceStarted] = []

    def add_frame(self, data: bytes, at: int) -> int:
        header = decode_header(data, at)
        frame, end = decode_frame(data, at)
        instance = self._names.setdefault(frame.instance, len(self._names))
        self.frames.append(
            (
                at,
                frame.epoch,
                frame.first_offset,
                frame.wall_time_ns,
                frame.digest,
                len(self._events),
                header.event_count,
                instance,
            )
        )
        for index, event in enumerate(frame.events):
            self._add_event(event, (frame.first_offset + index) % (1 << 64))
        return end

    def _add_event(self, event: Event, offset: int) -> None:
        tier = source = code = NO_CODE
        kept, start, snapshot_, other, parent = False, 0, 0, NO_ROW, bytes(HASH_BYTES)
        namespace, hashes, slots = NO_ROW, b"", b""
        first_block = len(self._hashes) // HASH_BYTES
        match event:
            case InstanceStarted():
                kind, count, other = 1, 0, len(self._starts)
                self._starts.append(event)
            case BlocksCreated():
                kind, tier, start, parent = 2, event.tier, event.start, event.parent
                hashes, slots = event.hashes, event.slots
            case BlocksMigrated():
                kind, tier, code, kept = 3, event.target, event.cause, event.kept
                if isinstance(event.source, Tier):
                    source = event.source
                else:
                    other = self._names.setdefault(event.source, len(self._names))
                hashes, slots = event.hashes, event.slots
            case BlocksEvicted():
                kind, tier, code, hashes = 4, event.tier, event.reason, event.hashes
            case ResidenciesListed():
                kind, tier, snapshot_, hashes, slots = 5, event.tier, event.snapshot, event.hashes, event.slots
            case SnapshotEnded():
                kind, tier, snapshot_, count = 6, event.tier, event.snapshot, event.count
            case InstanceStopped():
                kind, code, count = 7, event.reason, 0
            case UsageRecorded():
                kind, count = 8, 0
            case _:
                assert_never(event)
        if isinstance(event, RunEvent):
            count = hash_count(hashes)
            namespace = self._namespaces.setdefault(event.namespace, len(self._namespaces))
            self._hashes += hashes
            self._slots += slots or NO_SLOT.to_bytes(4, "little") * count
        self._events.append(
            (
                kind,
                tier,
                source,
                code,
                bool(slots),
                kept,
                offset,
                first_block,
                len(self.frames) - 1,
                count,
                namespace,
                start,
                snapshot_,
                other,
                np.frombuffer(parent, dtype=np.uint8),
            )
        )

    def columns(self) -> FrameColumns:
        return FrameColumns(
            frames=np.array(self.frames, dtype=FRAME_ROW),
            events=np.array(self._events, dtype=EVENT_ROW),
            hashes=np.frombuffer(self._hashes, dtype=np.uint8).reshape(-1, HASH_BYTES),
            slots=np.frombuffer(self._slots, dtype="<u4"),
            namespaces=np.frombuffer(b"".join(self._namespaces), dtype=np.uint8).reshape(-1, HASH_BYTES),
            names=tuple(self._names),
            starts=tuple(self._starts),
        )
