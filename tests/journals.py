"""Journals in a folder, and frames to write into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbm.assembly import NATIVE
from kvbm.core.codec import Frame, FrameBytes
from kvbm.core.errors import FrameError
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.streams.base import ORIGIN
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions

INSTANCE = InstanceId("instance-0")


def a_frame(first: int, events: int = 1, epoch: int = 1, blocks: int = 1) -> FrameBytes:
    """A good frame of creations."""
    made = tuple(
        BlocksCreated(
            namespace=NamespaceId(bytes(HASH_BYTES)),
            tier=Tier.HOST,
            hashes=b"".join((at * blocks + n + 1).to_bytes(HASH_BYTES, "little") for n in range(blocks)),
        )
        for at in range(first, first + events)
    )
    frame = Frame(
        instance=INSTANCE, epoch=Epoch(epoch), first_offset=Offset(first), wall_time_ns=0, digest=0, events=made
    )
    return FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, NATIVE.encode_frame(frame))


def whole_frames(path: Path) -> list[Frame]:
    """The frames of a segment up to a torn tail."""
    data, at, frames = path.read_bytes(), 0, []
    while at < len(data):
        try:
            frame, at = NATIVE.decode_frame(data, at)
        except FrameError:
            break
        frames.append(frame)
    return frames


FRAME_BYTES = len(a_frame(0).data)


def begun(folder: Path, **more: Any) -> Journal:
    """A journal whose first epoch has begun, or the next one.

    Args:
        more: fields of `JournalOptions`, or arguments of `Journal.open`.
    """
    options = {name: more.pop(name) for name in JournalOptions._fields if name in more}
    journal = Journal.open(folder, INSTANCE, NATIVE, JournalOptions(**options), **more)
    journal.begin_epoch(Epoch(journal.epoch + 1))
    return journal


def all_frames(journal: Journal) -> list[FrameBytes]:
    return journal.read_after(ORIGIN, 1 << 30)
