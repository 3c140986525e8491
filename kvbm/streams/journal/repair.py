"""Finds the good frames of a segment when its folder is opened, and cuts what follows them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvbm.core.backend import Backend
from kvbm.core.codec import FRAME_OVERHEAD_BYTES, MAGIC, MAX_FRAME_BYTES, VERSION
from kvbm.core.errors import FrameError, JournalError, NewerFrameError, TornFrameError
from kvbm.core.ids import InstanceId, Offset
from kvbm.files import opener
from kvbm.safe_log import SafeLog
from kvbm.streams.journal.segments import JournalSegment, scan_file, segment_files

log = SafeLog()

_COPY_BYTES = 4 << 20  # copied at once
_KEPT_BYTES = 256 << 20  # of a damaged end; a sparse file may be larger than the disk


def load_segments(folder: Path, instance: InstanceId, backend: Backend) -> list[JournalSegment]:
    """The segments of a folder, in order, each cut at the end of its last whole frame.

    Raises: JournalError: a segment is another instance's, was written by a newer kvbm, or a file's name is not a
        segment's. OSError: a file cannot be read and repaired.
    """
    found = []
    files = segment_files(folder)
    for index, (epoch, first, path) in enumerate(files):
        following = files[index + 1] if index + 1 < len(files) else None
        until = following[1] if following is not None and following[0] == epoch else None
        segment = JournalSegment(path, epoch, first)
        _scan(segment, until, instance, backend)
        found.append(segment)
    return found


def _scan(segment: JournalSegment, until: Offset | None, instance: InstanceId, backend: Backend) -> None:
    """Find a segment's frames, and cut what are none.

    Args:
        until: where the next segment of the epoch begins: frames from there on are here from before they were written
            again, there.
    """
    error: FrameError | None = None
    has_repeats = False
    for _, frames, _, why_ended in scan_file(segment.path, None, backend):
        error = why_ended
        if frames and frames[0].instance != instance:
            raise JournalError(
                f"{segment.path} is of instance {frames[0].instance!r}, not {instance!r}; "
                "give each instance its own folder"
            )
        for frame in frames:
            has_repeats = until is not None and frame.next_offset > until
            if has_repeats:
                break
            segment.add(frame.first_offset, frame.next_offset, frame.end - frame.at)
        if has_repeats:
            break
    is_first = not segment.size  # behind older frames it is damage: one kvbm writes one file
    if isinstance(error, NewerFrameError) and is_first and not _is_damaged_header(segment.path, backend):
        raise JournalError(
            f"{segment.path} was written by a newer kvbm (frame version {error.version}, this one reads up to "
            f"{VERSION}); upgrade kvbm or use another folder"
        )
    if has_repeats:
        log.info("journal.repeats_cut", segment=str(segment.path), at=segment.size)
        os.truncate(segment.path, segment.size)
    elif error is not None:
        _cut(segment, error)
    segment.synced = segment.size
    if segment.damaged_path.exists():
        segment.damaged_bytes = segment.damaged_path.stat().st_size
        segment.is_damaged = _is_more_than_torn(segment.damaged_path, backend)


def _is_more_than_torn(cut: Path, backend: Backend) -> bool:
    """Whether what was cut off, now or by an opening whose process began no epoch that is whole, was not a crash's
    work: it does not begin as a frame does, or a good frame lies somewhere behind.
    """
    with open(cut, "rb", opener=opener) as file:
        size = min(os.fstat(file.fileno()).st_size, MAX_FRAME_BYTES)
        if not size:
            return True
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:  # mapped: what was cut may be large
            if not isinstance(backend.scan_frames(data)[1], TornFrameError):
                return True
            at = data.find(MAGIC, 1)
            while at > 0:
                if backend.scan_frames(data, at)[0]:
                    return True
                at = data.find(MAGIC, at + 1)
            return False


def _is_damaged_header(path: Path, backend: Backend) -> bool:
    """Whether nobody newer wrote the first frame of a file, though its version says so: it has a size that no frame
    has, or it is a good one but for its version.
    """
    with open(path, "rb", opener=opener) as file:
        head = file.read(12)
        size = int.from_bytes(head[8:], "little")
        if size < FRAME_OVERHEAD_BYTES:
            return True
        data = head + file.read(min(size, MAX_FRAME_BYTES) - len(head))
    of_known = (data[:4] + version.to_bytes(2, "little") + data[6:] for version in range(1, VERSION + 1))
    return any(backend.scan_frames(one)[0] for one in of_known)


def _cut(segment: JournalSegment, error: FrameError) -> None:
    damaged = segment.damaged_path
    damaged.unlink(missing_ok=True)  # an older one may be open to others
    with (
        open(segment.path, "rb", opener=opener) as source,
        open(damaged, "xb", opener=opener) as kept,
    ):
        source.seek(segment.size)
        cut_bytes = os.fstat(source.fileno()).st_size - segment.size
        left_bytes = _KEPT_BYTES
        while left_bytes > 0 and (piece := source.read(min(_COPY_BYTES, left_bytes))):
            left_bytes -= kept.write(piece)
        kept.flush()
        os.fsync(kept.fileno())
    os.truncate(segment.path, segment.size)
    log.warning(
        "journal.tail_cut",
        segment=str(segment.path),
        at=segment.size,
        cut_bytes=cut_bytes,
        kept_as=str(damaged),
        why=error.detail,
    )
