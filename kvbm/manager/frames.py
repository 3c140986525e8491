"""Events that wait → frames in the journal. The cutter is pure; a thread drives it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from kvbm.core.codec import MAX_FRAME_NAMESPACES, Frame
from kvbm.core.events import BlocksEvicted, Event, InstanceStarted, RunEvent
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.kernels import Kernels
from kvbm.core.ledger import Pending
from kvbm.manager.offsets import Offsets
from kvbm.streams.base import FrameBytes

log = structlog.get_logger()

FRAME_EVENT_BYTES = 64 << 10  # a frame is cut once its events reach this size


def cut_frames(
    instance: InstanceId, epoch: Epoch, first: Offset, pending: Sequence[Pending], wall_time_ns: int
) -> Iterator[Frame]:
    """Waiting events as frames of bounded size, in order.

    Args:
        first: offset of `pending[0]`.
    """
    begin = size = 0
    namespaces: set[bytes] = set()
    for index, entry in enumerate(pending):
        own = {entry.event.namespace} if isinstance(entry.event, RunEvent) else set()
        if size >= FRAME_EVENT_BYTES or len(namespaces | own) > MAX_FRAME_NAMESPACES:
            yield _frame(instance, epoch, first, pending, begin, index, wall_time_ns)
            begin, size, namespaces = index, 0, set()
        size += _event_bytes(entry.event)
        namespaces |= own
    if begin < len(pending):
        yield _frame(instance, epoch, first, pending, begin, len(pending), wall_time_ns)


def _event_bytes(event: Event) -> int:
    if isinstance(event, RunEvent):
        return 32 + len(event.hashes) + (0 if isinstance(event, BlocksEvicted) else len(event.slots))
    return 256 * (1 + len(event.namespaces)) if isinstance(event, InstanceStarted) else 16


def _frame(
    instance: InstanceId, epoch: Epoch, first: Offset, pending: Sequence[Pending], begin: int, end: int, wall: int
) -> Frame:
    return Frame(
        instance=instance, epoch=epoch, first_offset=Offset(first + begin), wall_time_ns=wall,
        digest=pending[end - 1].digest, events=tuple(entry.event for entry in pending[begin:end]),
    )  # fmt: skip


class FrameSink(Protocol):
    """Where frames become durable: the journal, or memory."""

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame. Raises OSError: nothing of it was written; it may be tried again."""


class FrameWriter:
    """The thread that cuts frames and makes them durable. The engine never waits for it.

    Args:
        take: the ledger's waiting events under its lock: (offset of the first, events).
        written: called after frames have become durable.
        linger_s: how long events may gather before a frame is cut.
    """

    def __init__(
        self,
        instance: InstanceId,
        epoch: Epoch,
        sink: FrameSink,
        kernels: Kernels,
        take: Callable[[], tuple[Offset, list[Pending]]],
        offsets: Offsets,
        written: Callable[[], None],
        linger_s: float = 0.002,
        retry_s: float = 1.0,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._instance, self._epoch = instance, epoch
        self._sink, self._kernels, self._take, self._offsets, self._written = sink, kernels, take, offsets, written
        self._linger_s, self._retry_s, self._wall_clock_ns = linger_s, retry_s, wall_clock_ns
        self._wake = threading.Event()
        self._stopping = False
        self._unwritten: deque[FrameBytes] = deque()
        self._failing = False
        self._broke = False
        self._thread = threading.Thread(target=self._run, name=f"kvbm-frames-{instance}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notify(self) -> None:
        """There are events. Costs nothing while a frame is already on its way."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits and end; False when it was not all written in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not (self._thread.is_alive() or self._unwritten or self._broke)

    def drain(self) -> bool:
        """Cut and write everything that waits now; False when the device refused, and it will be tried again."""
        first, pending = self._take()
        if pending:
            for frame in cut_frames(self._instance, self._epoch, first, pending, self._wall_clock_ns()):
                data = self._kernels.encode_frame(frame)
                self._unwritten.append(FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, data))
        wrote = bool(self._unwritten)
        while self._unwritten:
            try:
                self._sink.append(self._unwritten[0])
            except OSError as error:
                if not self._failing:
                    log.warning("journal.write_failed", error=str(error), waiting_frames=len(self._unwritten))
                self._failing = True
                return False
            self._offsets.advance_durable(self._unwritten.popleft().next_offset)
        if self._failing:
            log.info("journal.write_resumed")
            self._failing = False
        if wrote:
            self._written()
        return True

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()  # before looking at what it woke for: a stop that comes now wakes it once more
            stopping = self._stopping
            try:
                done = self.drain()
            except Exception:
                # What was taken is lost, and nothing may be written after a hole. The engine goes on; nothing is durable any more.
                self._broke = True
                log.exception("journal.writer_broke", instance=self._instance, remedy="restart the engine; report it")
                return
            if stopping:
                return
            time.sleep(self._linger_s if done else self._retry_s)
            if not done:
                self._wake.set()
