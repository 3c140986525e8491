"""Bytes → the frames in them and the damage between, so that one flipped bit spoils one frame and not the rest."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbm.core.backend import Backend
from kvbm.core.codec import MAGIC, MAX_FRAME_BYTES, VERSION, FrameHeader, ScannedFrame, decode_header
from kvbm.core.errors import FrameError, NewerFrameError, TornFrameError
from kvbm.streams.erased_records import ERASED_MAGIC, decode_erased, erased_bytes
from kvbm.streams.fence_records import FENCE_MAGIC, HEAD_BYTES, FenceRecord, decode_fence, record_bytes
from kvbm.streams.fence_records import VERSION as FENCE_VERSION

CORRUPT, NEWER, TORN = "corrupt-frame", "newer-frame", "torn-tail"
ERASED = "erased-frame"  # taken out by an erasure
NOTED = (TORN, ERASED)  # which are no defects

_HEADER_MOST = 48 + 255  # header and the longest name
_SCAN_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20  # frames are proven good so many bytes at a time

Skip = Callable[[int], int]
ReadAt = Callable[[int, int], bytes]  # (at, size) → that many bytes, fewer only at the end


def _no_holes(at: int) -> int:
    return at


class Damage(NamedTuple):
    """Bytes that are no good frame, up to where the next frame begins.

    Attributes:
        kind: CORRUPT, NEWER (a newer kvbm wrote it), TORN (the bytes end before the frame does, and no frame follows),
            or ERASED.
        header: what its header holds, as far as it can be read; it may be what was damaged.
    """

    kind: str
    why: str
    size: int
    header: FrameHeader | None


class Piece(NamedTuple):
    """A frame or a fence with its bytes, or damage; and where it begins.

    `at` counts; a frame's own counts in some buffer.
    """

    at: int
    found: ScannedFrame | Damage | FenceRecord
    data: bytes


def scan(read: ReadAt, end: int, backend: Backend, skip: Skip = _no_holes) -> Iterator[Piece]:
    """The frames of the bytes [0, end), each with its position, and damage where there is none.

    Args:
        skip: the first position from a given one on that is in no hole; nothing is looked for in holes, which may be
            larger than the disk.
    """
    at = base = 0
    batch = b""  # the bytes from `base` on
    while at < end:
        frames, error = backend.scan_frames(batch, at - base)
        if not frames and (error is None or isinstance(error, TornFrameError)) and (at > base or not batch):
            base, batch = at, read(at, min(_BATCH_BYTES, end - at))
            frames, error = backend.scan_frames(batch)
        for frame in frames:
            yield Piece(base + frame.at, frame, batch[frame.at : frame.end])
        if frames:
            at = base + frames[-1].end
            continue
        erased = _erased_at(read, at, end)
        if erased is not None:
            yield Piece(at, erased, b"")
            at += erased.size
            continue
        size = record_bytes(read(at, min(HEAD_BYTES, end - at)))
        if size > end - at:
            yield Piece(at, Damage(TORN, "the bytes end before the fence does", end - at, None), b"")
            return
        fence = decode_fence(read(at, size)) if size else None
        if isinstance(fence, int):
            why = f"a fence of version {fence}; this kvbm reads up to {FENCE_VERSION}: upgrade it"
            yield Piece(at, Damage(NEWER, why, size, None), b"")
            at += size
            continue
        if fence is not None:
            yield Piece(at, fence, read(at, size))
            at += size
            continue
        try:
            found, data = _scan_at(read, at, end, backend)  # it may only be longer than a batch
        except FrameError as refusal:
            damage = _damage(read, at, end, backend, refusal, skip)
            yield Piece(at, damage, b"")
            at += damage.size
        else:
            yield Piece(at, found, data)
            at += len(data)


def _erased_at(read: ReadAt, at: int, end: int) -> Damage | None:
    """What says that a frame was erased here; None where nothing does."""
    size = erased_bytes(read(at, min(HEAD_BYTES, end - at)))
    record = decode_erased(read(at, size)) if 0 < size <= end - at else None
    if record is None:
        return None
    header = FrameHeader(
        instance=record.instance,
        epoch=record.epoch,
        first_offset=record.first_offset,
        event_count=record.event_count,
        wall_time_ns=record.wall_time_ns,
        digest=0,
        frame_bytes=size,
    )
    return Damage(ERASED, f"erased by erasure {record.number}", size, header)


def _scan_at(read: ReadAt, at: int, end: int, backend: Backend) -> tuple[ScannedFrame, bytes]:
    header = decode_header(read(at, min(_HEADER_MOST, end - at)))
    data = read(at, min(header.frame_bytes, end - at))
    return _only_frame(data, backend), data


def _only_frame(data: bytes, backend: Backend) -> ScannedFrame:
    """The one frame these bytes are. Raises FrameError."""
    frames, error = backend.scan_frames(data)
    if error is not None:
        raise error
    return frames[0]


def _damage(read: ReadAt, at: int, end: int, backend: Backend, error: FrameError, skip: Skip) -> Damage:
    header = _guess_header(read(at, min(_HEADER_MOST, end - at)))
    following = _next_frame(read, at, end, backend, header, skip)
    size = following - at
    if isinstance(error, NewerFrameError):
        if any(_decodes_when_set(read, at, size, backend, version=known) for known in range(1, VERSION + 1)):
            return Damage(
                CORRUPT, "its version field was changed; with a version of this kvbm the checksum matches", size, header
            )
        return Damage(NEWER, error.detail, size, header)
    if isinstance(error, TornFrameError):
        if following == end and not _decodes_when_set(read, at, size, backend, length=size):
            return Damage(TORN, error.detail, size, header)
        return Damage(CORRUPT, f"its length field was changed: {error.detail}", size, header)
    return Damage(CORRUPT, error.detail, size, header)


def _guess_header(head: bytes) -> FrameHeader | None:
    """What the header holds if magic and version are taken for good."""
    try:
        return decode_header(_with(head, VERSION, None))
    except FrameError:
        return None


def _decodes_when_set(
    read: ReadAt, at: int, size: int, backend: Backend, version: int | None = None, length: int | None = None
) -> bool:
    """Whether these bytes are a good frame once a field of the header is what it should be."""
    if size > MAX_FRAME_BYTES:
        return False
    try:
        backend.decode_frame(_with(read(at, size), version, length))
    except FrameError:
        return False
    return True


def _with(data: bytes, version: int | None, length: int | None) -> bytes:
    head = MAGIC + (data[4:6] if version is None else struct.pack("<H", version)) + data[6:8]
    return head + (data[8:12] if length is None else struct.pack("<I", length)) + data[12:]


def _next_frame(read: ReadAt, at: int, end: int, backend: Backend, header: FrameHeader | None, skip: Skip) -> int:
    """Where reading goes on: at the end the header names, if a frame begins there, or at a good frame before that."""
    stop = end
    if header is not None:
        named_end = at + header.frame_bytes
        if named_end < end and read(named_end, len(MAGIC)) in (MAGIC, FENCE_MAGIC, ERASED_MAGIC):
            stop = named_end
    position = at + 1
    while (position := _find_magic(read, position, stop, skip)) < stop:
        try:
            _scan_at(read, position, end, backend)
        except FrameError:
            position += 1
        else:
            return position
    return stop


def _find_magic(read: ReadAt, start: int, stop: int, skip: Skip) -> int:
    """The first position in [start, stop) where the magic stands, or `stop`."""
    while (start := skip(start)) < stop:  # the magic has no zeros, so it does not reach out of a hole
        found = read(start, min(_SCAN_BYTES, stop - start) + len(MAGIC) - 1).find(MAGIC)
        if found >= 0:
            return min(start + found, stop)
        start += _SCAN_BYTES
    return stop
