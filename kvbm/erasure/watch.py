"""A thread of an instance that reads the record of erasures now and then, goes on with what is under way, and says how
far it has come.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvbm.core.errors import ErasureError, StreamError
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure.instance import InstanceErasures
from kvbm.erasure.report import INSTANCE, Answer
from kvbm.safe_log import SafeLog
from kvbm.streams.nats.api import ServerMessage

log = SafeLog()

_BUSY_S = 0.2  # between two steps while something is under way
_AGAIN_S = 2.0  # after the stream did not answer
_STOP_S = 5.0


class InstanceErasureLog(Protocol):
    """What an instance asks of the stream: `erasure.stream.ErasureLog`."""

    async def record(self) -> ServerMessage | None: ...
    async def put_answer(self, name: str, data: bytes) -> None: ...
    async def close(self) -> None: ...


class WatchOptions(NamedTuple):
    """How the record is watched.

    Attributes:
        poll_s: between two looks at it.
        hold_s: how long blocks of an earlier process are held back while it is not known; below 0: until it is.
    """

    poll_s: float
    hold_s: float


class ErasureWatch:
    """See the module.

    Args:
        connect: opens the log. Raises StreamError.
        hold_back: serve nothing that an earlier process left, or serve it again.
        is_known: whether the start has read the record.
    """

    def __init__(
        self,
        name: str,
        erasures: InstanceErasures,
        connect: Callable[[], Awaitable[InstanceErasureLog]],
        hold_back: Callable[[bool], None],
        is_known: bool,
        options: WatchOptions,
    ) -> None:
        self._name, self._erasures, self._connect, self._hold_back = name, erasures, connect, hold_back
        self._options = options
        self._holds = not is_known
        self._begun_s = time.monotonic()
        self._said: object = None
        self._log: InstanceErasureLog | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-erasure-{name}", daemon=True)

    def start(self) -> None:
        """Begin; what is not known yet is held back from now on."""
        if self._holds:
            self._hold_back(True)
        self._thread.start()

    def stop(self) -> None:
        """End: no pool is used by it any more when this returns, unless a device does not answer."""
        self._stopping.set()
        waiting = self._waiting
        if waiting is not None:
            loop, task = waiting
            with suppress(RuntimeError):  # it has ended just now
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    # -- its own thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with asyncio.Runner() as runner:
                    self._watch(runner)
                    runner.run(self._close())
                return
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    raise
                return
            except (OSError, RuntimeError) as error:  # a loop needs descriptors, and its resolver a thread
                if self._stopping.is_set():
                    return  # all is done; Python 3.12 starts no thread while it ends
                log.warning(
                    "erasure.not_watched",
                    instance=self._name,
                    why=str(error),
                    remedy="raise ulimit -n, or -u; it is tried again",
                )
                self._log = None
                if self._stopping.wait(_AGAIN_S):
                    return

    def _watch(self, runner: asyncio.Runner) -> None:
        last = ""
        while not self._stopping.is_set():
            pause_s = self._options.poll_s
            try:
                self._turn(runner)
                if last:
                    log.info("erasure.record_read", instance=self._name)
                last = ""
            except (StreamError, ErasureError, TimeoutError) as error:
                if str(error) != last:
                    last = str(error)
                    log.info("erasure.record_unread", instance=self._name, why=last)
                runner.run(self._close())
                self._release_late()
                pause_s = min(pause_s, _AGAIN_S)
                self._erasures.step()
            self._stopping.wait(_BUSY_S if self._erasures.is_busy else pause_s)

    def _turn(self, runner: asyncio.Runner) -> None:
        """Read the record, go on, and say how far that is.

        The loop runs while something is asked, and not while a device works.
        """
        found = runner.run(self._read())
        if found is not None:
            self._erasures.take(records.decoded(found.data))
        self._release()
        self._erasures.step()
        progress = self._erasures.progress()
        if progress and progress != self._said:
            answer = Answer(name=self._name, kind=INSTANCE, at_ns=time.time_ns(), progress=progress)
            runner.run(self._say(report.encoded(answer)))
            self._said = progress

    async def _read(self) -> ServerMessage | None:
        self._note_waiting()
        if self._log is None:
            self._log = await self._connect()
        return await self._log.record()

    async def _say(self, data: bytes) -> None:
        self._note_waiting()
        assert self._log is not None
        await self._log.put_answer(self._name, data)

    async def _close(self) -> None:
        if self._log is not None:
            await self._log.close()
            self._log = None

    def _note_waiting(self) -> None:
        """`stop` cancels what is waited for."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting = asyncio.get_running_loop(), task
        if self._stopping.is_set():
            task.cancel()

    def _release(self) -> None:
        if self._holds:
            self._holds = False
            self._hold_back(False)

    def _release_late(self) -> None:
        hold_s = self._options.hold_s
        if self._holds and 0 <= hold_s <= time.monotonic() - self._begun_s:
            log.warning(
                "erasure.unknown",
                instance=self._name,
                waited_s=hold_s,
                remedy="blocks of an earlier run are served all the same: see to NATS; erasure.hold_s says how long "
                "they are held back,"
                " -1 until the record was read",
            )
            self._release()
