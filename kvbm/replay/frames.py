"""A source's good frames by instance, in the order of offsets, with where each lies: what `diff` walks along.

Only places and fingerprints stay in memory, 64 bytes a frame. The bytes are read again where they are needed; those of
a live stream are copied into a temporary file first.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvbm.core.codec import FrameBytes, ScannedFrame
from kvbm.core.ids import Epoch, Offset
from kvbm.files import open_plain
from kvbm.replay.findings import ReplayFinding, damage_finding, damage_text
from kvbm.replay.order import (
    Conflict,
    DamagedBytes,
    LifeBegins,
    Missing,
    Next,
    StreamKey,
    WentBack,
    fingerprint,
    in_order,
    life_text,
)
from kvbm.replay.scan import NOTED
from kvbm.replay.source import FramePlace, Located, SourceError
from kvbm.streams.base import Position


class IndexedFrame(NamedTuple):
    """One frame, without its bytes.

    Attributes:
        print: 64 bits of its bytes.
        digest: as the frame has it.
    """

    epoch: Epoch
    first: Offset
    next: Offset
    print: int
    digest: int


class InstanceFrames:
    """One instance's frames: each begins where the one before ends, or behind a hole, or in a later epoch at any
    offset.
    """

    def __init__(self, library: FrameLibrary) -> None:
        self._library = library
        self._epochs, self._firsts, self._nexts = array("Q"), array("Q"), array("Q")
        self._prints, self._digests = array("Q"), array("Q")
        self._files, self._sizes, self._ats = array("I"), array("I"), array("Q")
        self._sequences, self._message_ats = array("Q"), array("I")  # of a stream; empty for files

    def add(self, located: Located, frame: ScannedFrame) -> None:
        """The next frame."""
        self._epochs.append(frame.epoch)
        self._firsts.append(frame.first_offset)
        self._nexts.append(frame.next_offset)
        self._prints.append(fingerprint(frame, located.data))
        self._digests.append(frame.digest)
        place = located.place
        file, at = self._library.keep(place, located.data)
        self._files.append(file)
        self._ats.append(at)
        self._sizes.append(len(located.data))
        if place.sequence is not None:
            self._sequences.append(place.sequence)
            self._message_ats.append(place.at)

    def __len__(self) -> int:
        return len(self._epochs)

    def __getitem__(self, index: int) -> IndexedFrame:
        return IndexedFrame(
            Epoch(self._epochs[index]),
            Offset(self._firsts[index]),
            Offset(self._nexts[index]),
            self._prints[index],
            self._digests[index],
        )

    @property
    def begin(self) -> Position:
        """Where the first frame begins."""
        return Position(Epoch(self._epochs[0]), Offset(self._firsts[0]))

    @property
    def end(self) -> Position:
        """Where the last frame ends."""
        return Position(Epoch(self._epochs[-1]), Offset(self._nexts[-1]))

    def first_beyond(self, position: Position) -> int:
        """The first frame that ends after a position."""
        low = bisect_right(self._epochs, position.epoch - 1)
        high = bisect_right(self._epochs, position.epoch)
        return bisect_right(self._nexts, position.offset, low, high)

    def data(self, index: int) -> bytes:
        """A frame's bytes, read again. Raises SourceError: they are not there any more."""
        return self._library.read(self._files[index], self._ats[index], self._sizes[index])

    def place(self, index: int) -> FramePlace:
        """Where a frame lies."""
        if self._sequences:
            return FramePlace(self._library.name, self._sequences[index], self._message_ats[index])
        return FramePlace(self._library.path(self._files[index]), None, self._ats[index])


class FrameLibrary:
    """All instances' frames of one source. A context manager: it holds files open.

    Attributes:
        notes: what is worth saying of the source and keeps nobody from comparing.
        findings: damage.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.instances: dict[StreamKey, InstanceFrames] = {}
        self.notes: list[str] = []
        self.findings: list[ReplayFinding] = []
        self._paths: dict[str, int] = {}
        self._handles: list[int] = []
        self._open = ExitStack()
        self._copy: int | None = None  # number of the temporary file
        self._copied = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def fill(self, located: Iterable[Located], is_trimmed: bool) -> None:
        """Read a source to its end."""
        conflicts = stale = lost = 0
        for item in in_order(located, is_trimmed):
            if isinstance(item, DamagedBytes):
                if item.damage.kind in NOTED:
                    self.notes.append(damage_text(item))
                else:
                    self.findings.append(damage_finding(item))
                continue
            key, step = item
            if isinstance(step, Next):
                if key not in self.instances:
                    self.instances[key] = InstanceFrames(self)
                self.instances[key].add(step.located, step.frame)
            elif isinstance(step, LifeBegins):
                self.instances.pop(key, None)
                self.notes.append(life_text(key, step))
            conflicts += isinstance(step, Conflict)
            stale += isinstance(step, WentBack)
            lost += step.next - step.first if isinstance(step, Missing) else 0
        for count, what in (
            (conflicts, "frames that contradict what was seen before; the first are believed"),
            (stale, "frames of epochs that were over; they are left out"),
            (lost, "events missing between others"),
        ):
            if count:
                self.notes.append(f"{self.name} has {count:,} {what}; kvbm-replay verify names them")

    def keep(self, place: FramePlace, data: bytes) -> tuple[int, int]:
        """Where a frame's bytes can be read again: a file's number, and the byte."""
        if place.sequence is not None:
            return self._keep_copy(data)
        number = self._paths.get(place.source)
        if number is None:
            number = self._paths[place.source] = self._opened(place.source)
        return number, place.at

    def path(self, number: int) -> str:
        """The name of a file."""
        return next(path for path, known in self._paths.items() if known == number)

    def read(self, number: int, at: int, size: int) -> bytes:
        """Bytes of a file. Raises SourceError: they are not there any more."""
        data = os.pread(self._handles[number], size, at)
        if len(data) < size:
            raise SourceError(f"{self.name} became shorter while it was read; try again once nobody writes it")
        return data

    def _opened(self, path: str) -> int:
        try:
            handle = open_plain(Path(path), follows=True)
        except OSError as error:
            raise SourceError(
                f"{path} was let go while it was read ({error.strerror}); try again, or diff a copy"
            ) from None
        self._open.callback(os.close, handle)
        self._handles.append(handle)
        return len(self._handles) - 1

    def _keep_copy(self, data: bytes) -> tuple[int, int]:
        if self._copy is None:
            unnamed = tempfile.TemporaryFile(prefix="kvbm-replay-")  # noqa: SIM115 - closed with the rest
            file = self._open.enter_context(unnamed)
            self._handles.append(file.fileno())
            self._copy = len(self._handles) - 1
        at, self._copied = self._copied, self._copied + len(data)
        try:
            view = memoryview(data)
            while view:  # a disk that fills up may take a part first
                view = view[os.pwrite(self._handles[self._copy], view, self._copied - len(view)) :]
        except OSError as error:
            raise SourceError(
                f"the stream's frames cannot be copied to {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a "
                "folder with room"
            ) from None
        return self._copy, at


def frame_bytes(frame: IndexedFrame, data: bytes) -> FrameBytes:
    """A frame with its bytes."""
    return FrameBytes(frame.epoch, frame.first, frame.next, data)
