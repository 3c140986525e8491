"""Questions to a history: some processes that answer one at a time each, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.history.processes import Beside
from kvbm.catalog.history.wire import ASK, BODY, CANCEL, END, HEAD, REFUSAL, HistoryAsk, HistoryHead, HistoryRefusal
from kvbm.core.errors import CatalogError
from kvbm.safe_log import SafeLog

log = SafeLog()

WAIT_S = 5.0  # for a process that is free
_LEAVE_S = 3.0  # a cancelled question has so long to end
_START_S = 10.0  # a process has so long to start: above what a question may take, and to end one that was cancelled
_GRACE_S = 2.0  # a question that takes longer than it may, above what it may
FAILED = "history_failed"


class HistoryReply:
    """An answer that has begun: its head, then its body piece by piece."""

    def __init__(self, head: HistoryHead, body: AsyncIterator[bytes]) -> None:
        self.head, self.body = head, body


class HistoryReaders:
    """See the module. One asyncio loop.

    Args:
        command: starts a process that answers.
        processes: so many at most; each is started when it is first needed, and again when it has died.
        waiting: so many questions wait at most.
        on_failed: called when a process says that the history is damaged.
    """

    def __init__(
        self, command: Sequence[str], processes: int, waiting: int, on_failed: Callable[[], None] = lambda: None
    ) -> None:
        self._command, self._waiting, self._on_failed = command, waiting, on_failed
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Beside] = []
        self._in_line = 0
        self._generation = 0  # readers of an older one are ended when they are done
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._said = ""

    @asynccontextmanager
    async def ask(self, asked: HistoryAsk) -> AsyncIterator[HistoryReply]:
        """Ask, and read the answer within. Who leaves early has the question cancelled.

        Raises: ApiError: there is no answer, or no room; while the body is read too.
        """
        await self._wait_in_line()
        reader: Beside | None = None
        starting, generation = self._taken(), self._generation
        is_done = True  # nothing is asked yet
        try:
            try:
                async with asyncio.timeout(asked.within_s + _GRACE_S + _START_S) as limit:
                    reader = await asyncio.shield(starting)
                    is_done = False
                    if reader.has_spoken:
                        limit.reschedule(asyncio.get_running_loop().time() + asked.within_s + _GRACE_S)
                    await reader.send(ASK, msgspec.json.encode(asked))
                    head = await self._head(reader)

                    async def body() -> AsyncIterator[bytes]:
                        nonlocal is_done
                        while (part := await self._part(reader)) is not None:
                            yield part
                        is_done = True

                    yield HistoryReply(head, body())
            except TimeoutError:
                is_started = reader is not None and reader.has_spoken
                raise (_too_slow(asked.within_s) if is_started else _starting()) from None
            except CatalogError as error:
                if reader is not None:
                    reader.kill()
                raise ApiError(503, FAILED, f"the history does not answer: {error}", "ask again") from None
            except ApiError:
                is_done = True  # a refusal ends an answer
                raise
        finally:
            self._leave(starting, is_done, generation)

    def renew(self) -> None:
        """Have those that answer begin anew: nothing of what they had open stays open."""
        self._generation += 1
        while self._idle:
            self._end(self._idle.pop())

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._is_closed = True
        self.renew()
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _wait_in_line(self) -> None:
        if self._free.locked():
            if self._in_line >= self._waiting:
                raise _busy()
            self._in_line += 1
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._free.acquire()
            except TimeoutError:
                raise _busy() from None
            finally:
                self._in_line -= 1
        else:
            await self._free.acquire()
        if self._is_closed:
            self._free.release()
            raise ApiError(503, "history_building", "the catalog is stopping", "ask another one")

    def _taken(self) -> asyncio.Future[Beside]:
        """A process that is free, or one that is started; who asks may be gone before it is there."""
        while self._idle:
            reader = self._idle.pop()
            if reader.is_alive:
                taken: asyncio.Future[Beside] = asyncio.get_running_loop().create_future()
                taken.set_result(reader)
                return taken
            self._end(reader)
        return asyncio.create_task(Beside.start(self._command), name="catalog-history-start")

    async def _head(self, reader: Beside) -> HistoryHead:
        kind, part = await reader.receive()
        if kind == REFUSAL:
            raise self._refused(part)
        if kind != HEAD:
            raise CatalogError(f"the process has sent a part of kind {kind} first")
        return msgspec.json.decode(part, type=HistoryHead)

    async def _part(self, reader: Beside) -> bytes | None:
        kind, part = await reader.receive()
        if kind == REFUSAL:
            raise self._refused(part)
        return part if kind == BODY else None

    def _refused(self, part: bytes) -> ApiError:
        refusal = msgspec.json.decode(part, type=HistoryRefusal)
        if refusal.code == FAILED:
            if refusal.message != self._said:
                log.warning("history.failed", why=refusal.message)
            self._said = refusal.message
            self._on_failed()
        return ApiError(refusal.status, refusal.code, refusal.message, refusal.what_to_do)

    def _leave(self, starting: asyncio.Future[Beside], is_done: bool, generation: int) -> None:
        """Have the process be free again, once it has started, and what it is asked is over."""
        task = asyncio.create_task(self._freed(starting, is_done, generation), name="catalog-history-leave")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _freed(self, starting: asyncio.Future[Beside], is_done: bool, generation: int) -> None:
        reader: Beside | None = None
        try:
            reader = await starting
            if not is_done:
                async with asyncio.timeout(_LEAVE_S if reader.has_spoken else _START_S):
                    await reader.send(CANCEL, b"")
                    while (await reader.receive())[0] not in (END, REFUSAL):
                        pass
            if generation == self._generation and not self._is_closed:
                self._idle.append(reader)
                return
        except (CatalogError, TimeoutError):
            if reader is not None:
                reader.kill()
        finally:
            self._free.release()
        if reader is not None:
            await reader.close()

    def _end(self, reader: Beside) -> None:
        task = asyncio.create_task(reader.close(), name="catalog-history-end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _busy() -> ApiError:
    return ApiError(429, "history_busy", "too many questions to the history wait already", "ask again in a second")


def _starting() -> ApiError:
    return ApiError(
        429, "history_busy", "what answers questions to the history is still starting", "ask again in a second"
    )


def _too_slow(within_s: float) -> ApiError:
    words = f"the question took longer than {within_s:g} s"
    return ApiError(504, "too_slow", words, "ask for less, or give within_s (limits.history_s)")
