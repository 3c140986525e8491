"""Listens for questions over NATS for as long as the catalog runs: to whom, from when on, and again after a lost
connection.

Until the catalog is ready it takes only the question whether it is: those of a queue group share what comes, and a
question that a catalog takes which has not read enough is one that another could have answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kvbm.catalog.edge.asks import Asks
from kvbm.core.asks import READY, ask_subject
from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.base import AskLine, AskSource
from kvbm.streams.nats.connection import RefusedError

log = SafeLog()

LOOK_S = 0.2
_CONNECT_S = 5.0
_PAUSE_FIRST_S = 0.05
_PAUSE_MOST_S = 2.0
_REFUSED_PAUSE_S = 30.0  # until the server's permissions are others
_END_S = 2.0


class AskListener:
    """One loop over connections. Belongs to one asyncio loop.

    Args:
        cluster: whose questions; None for those of all.
        names: of callers; None for everybody.
        is_ready: whether all questions may come.
    """

    def __init__(
        self,
        stream: AskSource,
        cluster: str | None,
        names: Callable[[], list[str] | None],
        is_ready: Callable[[], bool],
    ) -> None:
        self.wake = asyncio.Event()
        self._stream, self._cluster, self._names, self._is_ready = stream, cluster or "*", names, is_ready

    async def run(self, asks: Asks) -> None:
        """Listen until it is cancelled; then end what is under way."""
        pause_s = _PAUSE_FIRST_S
        while True:
            line: AskLine | None = None
            try:
                line = await self._stream.open_asks(asks, _CONNECT_S)
                is_told = False
                while line.is_open:
                    await line.listen(self._wanted(asks))
                    if not is_told and self._is_ready():
                        is_told = True
                        log.info("asks.listening", cluster=self._cluster)
                    pause_s = _PAUSE_FIRST_S
                    self.wake.clear()
                    try:
                        await asyncio.wait_for(self.wake.wait(), LOOK_S)
                    except TimeoutError:
                        pass
            except RefusedError as error:
                log.warning("asks.refused", why=str(error))
                pause_s = _REFUSED_PAUSE_S
            except StreamError as error:
                log.debug("asks.unreachable", why=str(error))
            except asyncio.CancelledError:
                if line is not None:
                    await _end(line, asks)
                raise
            finally:
                if line is not None:
                    await line.close()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, max(pause_s, _PAUSE_MOST_S))

    def _wanted(self, asks: Asks) -> list[str]:
        """Subjects to listen to now. Who is muted where everybody may ask mutes all."""
        verb, muted, names = "*" if self._is_ready() else READY, asks.muted(), self._names()
        if names is None:
            return [] if muted else [ask_subject(self._cluster, "*", verb)]
        return [ask_subject(self._cluster, name, verb) for name in names if name not in muted]


async def _end(line: AskLine, asks: Asks) -> None:
    """No more questions; answer those that have come."""
    try:
        async with asyncio.timeout(_END_S):
            await line.drain()
            if asks.under_way:
                await asyncio.wait(asks.under_way, timeout=_END_S)
    except (TimeoutError, StreamError) as error:
        log.debug("asks.ended_early", why=str(error))
    for task in tuple(asks.under_way):
        task.cancel()
