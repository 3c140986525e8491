"""Takes frames, usage and samples out of an archive's files. A file that has none of them stays as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.catalog.follow.archive import PART
from kvbm.core.codec import MAGIC, UNKNOWN_DIGEST, Frame, decode_frame, decode_header, encode_frame
from kvbm.core.errors import FrameError
from kvbm.core.events import Event, UsageRecorded
from kvbm.core.ids import Offset
from kvbm.files import open_plain, read_plain
from kvbm.streams.access_samples import encode_sample, read_samples
from kvbm.streams.base import AccessSample
from kvbm.streams.erased_records import ERASED_MAGIC, ErasedRecord, decode_erased, encode_erased, erased_bytes
from kvbm.streams.fence_records import FENCE_MAGIC, HEAD_BYTES, decode_fence, record_bytes

_MOST_BYTES = 256 << 20  # of a file of frames, which is about 64 MiB long


class Meant(NamedTuple):
    """What goes: frames, samples, and of what tenants have used the rows of some tenants.

    Attributes:
        number: of the erasure.
    """

    frame: Callable[[Frame], bool]
    sample: Callable[[AccessSample], bool]
    tenant: Callable[[str], bool]
    number: int


def rewrite_frames(path: Path, meant: Meant) -> int:
    """Take frames out of a file of whole frames and fences, and say so in their place; gives how many.

    What other tenants have used stays, in frames of its own. What is damaged goes, too, for nobody knows what it names,
    and so does what no archive has written that far into a file.

    Raises: OSError: the folder refuses; the file is as it was.
    """
    whole = read_plain(path, _MOST_BYTES)
    data = memoryview(whole)
    kept: list[memoryview] = []
    at, taken_out = 0, int(path.stat().st_size > len(whole))
    while at < len(data):
        record = _record_at(data, at)
        if record:
            kept.append(data[at : at + record])
            at += record
            continue
        try:
            header = decode_header(bytes(data[at : at + 512]))
            piece = data[at : at + header.frame_bytes]
            frame, _ = decode_frame(bytes(piece))
        except FrameError:
            taken_out += 1
            at = _next(whole, at + 1)
            continue
        left = _left_of(frame, meant)
        if left is None:
            kept.append(piece)
        else:
            taken_out += 1
            kept += map(memoryview, left)
        at += header.frame_bytes
    if taken_out:
        _put(path, kept)
    return taken_out


def _record_at(data: memoryview, at: int) -> int:
    """How long the fence or record is that begins here and is whole; 0 when none does."""
    head = bytes(data[at : at + HEAD_BYTES])
    for size, decode in ((record_bytes(head), decode_fence), (erased_bytes(head), decode_erased)):
        if size and size <= len(data) - at and decode(bytes(data[at : at + size])) is not None:
            return size
    return 0


def _left_of(frame: Frame, meant: Meant) -> list[bytes] | None:
    """What takes the place of a frame; None: it stays."""
    events = tuple(_without(event, meant) if isinstance(event, UsageRecorded) else event for event in frame.events)
    if meant.frame(frame):
        return list(_apart(frame, events, meant.number))
    if all(one is other for one, other in zip(events, frame.events, strict=True)):
        return None
    return [encode_frame(msgspec.structs.replace(frame, events=events))]


def _without(event: UsageRecorded, meant: Meant) -> UsageRecorded:
    """An event without the rows of the tenants that are meant; the same where it has none."""
    rows = tuple(row for row in event.rows if not meant.tenant(row.tenant))
    return event if len(rows) == len(event.rows) else msgspec.structs.replace(event, rows=rows)


def _apart(frame: Frame, events: Iterable[Event], number: int) -> Iterator[bytes]:
    """A frame that goes: records in the place of its events, but for those that say what others have used.

    The frame's digest is of its end. What the instance held before that nobody can tell.
    """
    at = frame.first_offset
    for is_usage, run in groupby(events, key=lambda event: isinstance(event, UsageRecorded)):
        those = tuple(run)
        if is_usage:
            digest = frame.digest if at + len(those) == frame.next_offset else UNKNOWN_DIGEST
            yield encode_frame(msgspec.structs.replace(frame, first_offset=at, digest=digest, events=those))
        else:
            record = ErasedRecord(
                instance=frame.instance,
                epoch=frame.epoch,
                first_offset=at,
                event_count=len(those),
                wall_time_ns=frame.wall_time_ns,
                number=number,
            )
            yield encode_erased(record)
        at = Offset(at + len(those))


def rewrite_samples(path: Path, meant: Meant) -> int:
    """Take samples out of a day's file, and what is damaged; gives how many. Raises OSError: as `rewrite_frames`."""
    seen = 0

    def kept() -> Iterator[bytes]:
        nonlocal seen
        for sample in read_samples(path):
            seen += 1
            if not meant.sample(sample):
                yield encode_sample(sample)

    part = path.with_name(f"{path.name}{PART}")
    samples, size = _write(part, kept())
    if size == path.stat().st_size:
        part.unlink()
        return 0
    _replace(part, path)
    return max(1, seen - samples)


def _next(data: bytes, at: int) -> int:
    found = [place for magic in (MAGIC, FENCE_MAGIC, ERASED_MAGIC) if (place := data.find(magic, at)) >= 0]
    return min(found, default=len(data))


def _put(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    part = path.with_name(f"{path.name}{PART}")
    _write(part, parts)
    _replace(part, path)


def _write(part: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """How many parts a new file has, and how many bytes."""
    count = size = 0
    part.unlink(missing_ok=True)
    with open(open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
        for piece in parts:
            size += out.write(piece)
            count += 1
        out.flush()
        os.fsync(out.fileno())
    return count, size


def _replace(part: Path, path: Path) -> None:
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
