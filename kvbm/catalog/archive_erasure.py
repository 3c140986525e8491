"""Takes frames and samples out of an archive's files. A file that has none of them stays as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvbm.core.codec import MAGIC, Frame, decode_frame, decode_header
from kvbm.core.errors import FrameError
from kvbm.streams.access_samples import encode_sample, read_samples
from kvbm.streams.base import AccessSample
from kvbm.streams.erased_records import ERASED_MAGIC, ErasedRecord, encode_erased, erased_bytes
from kvbm.streams.fence_records import FENCE_MAGIC, HEAD_BYTES, record_bytes


class Meant(NamedTuple):
    """Which frames and samples go."""

    frame: Callable[[Frame], bool]
    sample: Callable[[AccessSample], bool]
    number: int


class Rewritten(NamedTuple):
    """A file afterwards. `bytes`: its size."""

    bytes: int
    taken_out: int


def rewrite_frames(path: Path, size: int, meant: Meant) -> Rewritten:
    """Take frames out of a file of whole frames and fences, and say so in their place; what is damaged goes, too, for nobody knows what it names.

    Args:
        size: of its whole part.
    Raises: OSError: the folder refuses; the file is as it was.
    """
    data = memoryview(path.read_bytes()[:size])
    kept: list[memoryview] = []
    at = taken_out = 0
    while at < size:
        head = bytes(data[at : at + HEAD_BYTES])
        record = record_bytes(head) or erased_bytes(head)
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
            at = _next(data, at + 1)
            continue
        if meant.frame(frame):
            taken_out += 1
            kept.append(memoryview(encode_erased(_in_its_place(frame, meant.number))))
        else:
            kept.append(piece)
        at += header.frame_bytes
    if not taken_out:
        return Rewritten(size, 0)
    _put(path, b"".join(kept))
    return Rewritten(sum(map(len, kept)), taken_out)


def _in_its_place(frame: Frame, number: int) -> ErasedRecord:
    return ErasedRecord(
        instance=frame.instance, epoch=frame.epoch, first_offset=frame.first_offset, event_count=len(frame.events),
        wall_time_ns=frame.wall_time_ns, number=number,
    )  # fmt: skip


def rewrite_samples(path: Path, meant: Meant) -> int:
    """Take samples out of a day's file; gives how many. Raises OSError: as `rewrite_frames`."""
    samples = list(read_samples(path))
    kept = [sample for sample in samples if not meant.sample(sample)]
    if len(kept) < len(samples):
        _put(path, b"".join(map(encode_sample, kept)))
    return len(samples) - len(kept)


def _next(data: memoryview, at: int) -> int:
    rest = bytes(data[at:])
    found = [place for magic in (MAGIC, FENCE_MAGIC, ERASED_MAGIC) if (place := rest.find(magic)) >= 0]
    return at + min(found) if found else len(data)


def _put(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
