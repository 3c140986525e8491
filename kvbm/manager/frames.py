"""The ledger's frames → the journal, by a thread of their own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from kvbm.core.codec import FrameBytes
from kvbm.core.ids import InstanceId
from kvbm.manager.offsets import Offsets

log = structlog.get_logger()


class FrameSink(Protocol):
    """Where frames become durable: the journal, or memory."""

    def append(self, frame: FrameBytes) -> None:
        """Write one whole frame. Raises OSError: nothing of it was written; it may be tried again."""


class FrameWriter:
    """The thread that makes frames durable. The engine never waits for it.

    Nothing is taken while the device refuses what was taken before, so that what waits stays in the ledger's bounded room.

    Args:
        take: the ledger's waiting events as frames, under its lock.
        written: called after frames have become durable.
        linger_s: how long events may gather before a frame is cut.
    """

    def __init__(
        self,
        instance: InstanceId,
        sink: FrameSink,
        take: Callable[[], list[FrameBytes]],
        offsets: Offsets,
        written: Callable[[], None],
        linger_s: float = 0.002,
        retry_s: float = 1.0,
    ) -> None:
        self._instance = instance
        self._sink, self._take, self._offsets, self._written = sink, take, offsets, written
        self._linger_s, self._retry_s = linger_s, retry_s
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
        """Take and write everything that waits now; False when the device refused, and it will be tried again."""
        if not self._write():
            return False
        self._unwritten.extend(self._take())
        return self._write()

    def _write(self) -> bool:
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
