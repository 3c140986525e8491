"""Frames of one instance that arrived before those they follow."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvbm.core.codec import ScannedFrame
from kvbm.core.ids import Offset
from kvbm.streams.base import START, Mark

# Frames in one instance's reorder buffer; more are left to be sent again, or to the next snapshot.
REORDER_BYTES = 16 << 20


class BufferedState(msgspec.Struct, frozen=True):
    """A frame in a reorder buffer as a checkpoint keeps it: its bytes, and the mark before its message."""

    data: bytes
    sequence: int
    fingerprint: int | None


class _Buffered(NamedTuple):
    """A frame, its bytes, and the mark before the message it came with."""

    frame: ScannedFrame
    data: bytes
    before: Mark


class ReorderBuffer:
    """Frames of an instance that arrived before those they follow.

    Attributes:
        bytes: their size.
    """

    __slots__ = ("_frames", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._frames: dict[Offset, _Buffered] = {}

    def __bool__(self) -> bool:
        return bool(self._frames)

    def frames(self) -> list[bytes]:
        """The frames it holds, in the order they came in."""
        return [buffered.data for buffered in self._frames.values()]

    def state(self) -> tuple[BufferedState, ...]:
        """What a checkpoint keeps."""
        return tuple(
            BufferedState(one.data, one.before.sequence, one.before.fingerprint) for one in self._frames.values()
        )

    def first_offset(self) -> Offset | None:
        """Where the first frame begins; None when there is none."""
        return min(self._frames, default=None)

    def marks(self) -> list[Mark]:
        """The marks before the messages of its frames: who begins at the first of them reads all of these again."""
        return [buffered.before for buffered in self._frames.values()]

    def put(self, frame: ScannedFrame, data: bytes, before: Mark) -> None:
        """Keep a frame, while there is room: its own bytes alone, not the rest of its message."""
        size = frame.end - frame.at
        if frame.first_offset not in self._frames and self.bytes + size <= REORDER_BYTES:
            alone = data[frame.at : frame.end]
            self._frames[frame.first_offset] = _Buffered(frame._replace(at=0, end=size), alone, before)
            self.bytes += size

    def offsets(self) -> list[Offset]:
        """Where its frames begin, in order."""
        return sorted(self._frames)

    def pop(self, offset: Offset) -> _Buffered:
        """Take the frame out that begins at an offset."""
        buffered = self._frames.pop(offset)
        self.bytes -= len(buffered.data)
        return buffered

    def begin_anew(self) -> None:
        """The stream's sequences began anew: the marks are of another history."""
        self._frames = {first: buffered._replace(before=START) for first, buffered in self._frames.items()}

    def clear(self) -> None:
        """Drop everything."""
        self._frames, self.bytes = {}, 0
