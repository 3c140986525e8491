"""Plain frames, applied many at a time: those that go on exactly where their instance stands, and change nothing but
blocks.

Nearly all frames are plain, and the sequencer has nothing to decide about them. So a run of messages of them is one
call of the index, which the native one makes without the interpreter, in a thread of its own: questions are answered
meanwhile. Positions are known after the call, when everything in it has been applied. The first message that is not
plain as a whole ends a run, and the sequencer takes it by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from kvbm.catalog.index.cluster_index import ClusterIndex, PlaceReached, PlainApplied, PlainClaims, StreamPlace
from kvbm.core.codec import decode_frame
from kvbm.core.errors import FrameError, LayoutError
from kvbm.core.events import InstanceStarted, InstanceStopped, UsageRecorded
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    from kvbm.core.codec import Frame

log = SafeLog()

RUN_BYTES = 1 << 20  # of messages in a run, about
THREAD_BYTES = 16 << 10  # a run of fewer is applied at once: handing it over would take longer
WAIT_S = 60.0  # for a run's end; it takes milliseconds


class PlainRun(NamedTuple):
    """Messages in stream order, each with the number of its instance's place; how many bytes they are."""

    messages: list[tuple[int, bytes]]
    places: list[StreamPlace]
    bytes: int


class Applier(Protocol):
    """Applies runs, one at a time."""

    async def apply(self, run: PlainRun, take: Callable[[PlainApplied], None]) -> None:
        """Apply a run, and call `take` with what it has done, even when the task is cancelled.

        Other tasks go on meanwhile.
        """

    def close(self) -> None:
        """End what it has begun. Idempotent."""


class ApplyThread(Protocol):
    """A native thread that applies one run at a time."""

    def fileno(self) -> int:
        """A file that becomes readable when the run has ended."""

    def begin(self, messages: list[tuple[int, bytes]], places: list[StreamPlace]) -> None:
        """Begin a run. Raises LayoutError: one is under way."""

    def finish(self) -> PlainApplied:
        """Wait for its end."""

    def close(self) -> None:
        """End the thread after the run under way. Idempotent."""


@runtime_checkable
class Threaded(Protocol):
    """An index whose runs a thread can apply without the interpreter: the native one."""

    def apply_thread(self) -> ApplyThread:
        """A new thread. Raises RuntimeError: the system gives none. LayoutError: it gives no descriptor."""


class InPlace:
    """Applies runs at once, on the loop: for an index that cannot do better."""

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index

    async def apply(self, run: PlainRun, take: Callable[[PlainApplied], None]) -> None:
        """As `Applier.apply`."""
        take(self._index.apply_plain(run.messages, run.places))

    def close(self) -> None:
        """As `Applier.close`."""


class InThread:
    """Applies runs of some size in a native thread, so that the loop answers meanwhile. Belongs to one loop.

    Where the system gives no thread, a run is applied at once, on the loop, and the next one asks for a thread again.

    Args:
        new_thread: begins a thread. Raises RuntimeError: there is none. LayoutError: there is no descriptor.
    """

    def __init__(self, index: ClusterIndex, new_thread: Callable[[], ApplyThread]) -> None:
        self._index, self._new_thread = index, new_thread
        self._thread: ApplyThread | None = None
        self._is_closed = self._is_told = False

    async def apply(self, run: PlainRun, take: Callable[[PlainApplied], None]) -> None:
        """As `Applier.apply`."""
        thread = self._begun() if run.bytes >= THREAD_BYTES else None
        if thread is None:
            take(self._index.apply_plain(run.messages, run.places))
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        file = thread.fileno()
        thread.begin(run.messages, run.places)
        loop.add_reader(file, ended.set)
        try:
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
        finally:
            loop.remove_reader(file)
            take(thread.finish())

    def close(self) -> None:
        """As `Applier.close`."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.close()

    def _begun(self) -> ApplyThread | None:
        """The thread; None where there is none now."""
        if self._thread is None and not self._is_closed:
            try:
                self._thread = self._new_thread()
            except (RuntimeError, LayoutError) as error:
                if not self._is_told:
                    log.warning(
                        "catalog.apply_thread_lacking",
                        why=str(error),
                        notice="events are applied between answers until there is a thread",
                    )
                self._is_told = True
        return self._thread


def applier_of(index: ClusterIndex) -> Applier:
    """The best there is for an index."""
    return InThread(index, index.apply_thread) if isinstance(index, Threaded) else InPlace(index)


def apply_plain(
    index: ClusterIndex, messages: Sequence[tuple[int, bytes]], places: Sequence[StreamPlace]
) -> PlainApplied:
    """What `ClusterIndex.apply_plain` does, by the other methods of an index: the specification of the native one."""
    reached = [PlaceReached(place.offset, 0, 0, 0, 0) for place in places]
    claims: list[PlainClaims] = []
    frames = events = blocks = 0
    for number, (at, data) in enumerate(messages):
        place = places[at]
        plain = _plain_frames(data, place.instance, place.epoch, reached[at].offset)
        for end, frame in plain or ():
            applied = index.apply(data, end.begin)
            frames, events, blocks = frames + 1, events + applied.events, blocks + applied.blocks
            claims += [PlainClaims(number, frame.wall_time_ns, one) for one in applied.claims]
            before = reached[at]
            reached[at] = PlaceReached(
                Offset(frame.first_offset + len(frame.events)),
                frame.digest,
                max(before.wall_time_ns, frame.wall_time_ns),
                number,
                before.frames + 1,
            )
            if not index.agrees(place.instance, frame.digest):
                return PlainApplied(number, end.end, frames, events, blocks, reached, claims)
        if plain is None:
            return PlainApplied(number, None, frames, events, blocks, reached, claims)
    return PlainApplied(len(messages), None, frames, events, blocks, reached, claims)


class _Span(NamedTuple):
    """Where a frame lies in its message: [begin, end)."""

    begin: int
    end: int


def _plain_frames(data: bytes, instance: InstanceId, epoch: Epoch, offset: Offset) -> list[tuple[_Span, Frame]] | None:
    """The frames of a message that is plain for an instance that stands there; None: it is not."""
    found: list[tuple[_Span, Frame]] = []
    at = 0
    while at < len(data):
        try:
            frame, end = decode_frame(data, at)
        except FrameError:
            return None
        if (frame.instance, frame.epoch, frame.first_offset) != (instance, epoch, offset):
            return None
        if any(isinstance(event, InstanceStarted | InstanceStopped | UsageRecorded) for event in frame.events):
            return None
        found.append((_Span(at, end), frame))
        at, offset = end, Offset(offset + len(frame.events))
    return found or None
