"""A thread of an instance that reads the record of erasures now and then, goes on with what is under way, and says how far it has come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import structlog

from kvbm.core.errors import ErasureError, StreamError
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure.instance import InstanceErasures
from kvbm.erasure.report import INSTANCE, Answer
from kvbm.streams.nats.api import Stored

log = structlog.get_logger()

_BUSY_S = 0.2  # between two steps while something is under way
_AGAIN_S = 2.0  # after the stream did not answer
_STOP_S = 5.0


class Log(Protocol):
    """What an instance asks of the stream: `streams.nats.erasures.ErasureLog`."""

    async def record(self) -> Stored | None: ...
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
        self, name: str, erasures: InstanceErasures, connect: Callable[[], Awaitable[Log]], hold_back: Callable[[bool], None],
        is_known: bool, options: WatchOptions,
    ) -> None:  # fmt: skip
        self._name, self._erasures, self._connect, self._hold_back = name, erasures, connect, hold_back
        self._options = options
        self._holds = not is_known
        self._begun_s = time.monotonic()
        self._said: object = None
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
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:
            log.exception(
                "erasure.watch_broke", instance=self._name, why=str(error), remedy="report it; restart the engine"
            )

    async def _watch(self) -> None:
        connected: Log | None = None
        last = ""
        while not self._stopping.is_set():
            pause_s = self._options.poll_s
            try:
                connected = connected or await self._connect()
                await self._turn(connected)
                if last:
                    log.info("erasure.record_read", instance=self._name)
                last = ""
            except (StreamError, ErasureError, TimeoutError) as error:
                if str(error) != last:
                    last = str(error)
                    log.info("erasure.record_unread", instance=self._name, why=last)
                if connected is not None:
                    await connected.close()
                    connected = None
                self._release_late()
                pause_s = min(pause_s, _AGAIN_S)
                await asyncio.to_thread(self._erasures.step)
            await self._sleep(_BUSY_S if self._erasures.is_busy else pause_s)
        if connected is not None:
            await connected.close()

    async def _turn(self, connected: Log) -> None:
        found = await connected.record()
        if found is not None:
            record = records.decoded(found.data)
            await asyncio.to_thread(self._erasures.take, record)
        self._release()
        await asyncio.to_thread(self._erasures.step)
        progress = self._erasures.progress()
        if progress and progress != self._said:
            answer = Answer(name=self._name, kind=INSTANCE, at_ns=time.time_ns(), progress=progress)
            await connected.put_answer(self._name, report.encoded(answer))
            self._said = progress

    def _release(self) -> None:
        if self._holds:
            self._holds = False
            self._hold_back(False)

    def _release_late(self) -> None:
        hold_s = self._options.hold_s
        if self._holds and 0 <= hold_s <= time.monotonic() - self._begun_s:
            log.warning(
                "erasure.unknown", instance=self._name, waited_s=hold_s, effect="blocks of an earlier run are served all the same",
                remedy="see to NATS; erasure.hold_s says how long they are held back, -1 until the record was read",
            )  # fmt: skip
            self._release()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.to_thread(self._stopping.wait, seconds)
