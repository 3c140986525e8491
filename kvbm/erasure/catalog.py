"""A catalog's side of erasures: its database, its archive, its index and its checkpoints, once no instance and no
object is left to name them.

What names the erased comes to a catalog by the stream for as long as somebody has events of it to send. So a catalog
waits until every instance that SQL knows has answered that it is done, and until no claim of the object pool is left;
then it does all of its own at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvbm.catalog.follow.archive import SAMPLES_EVERY_S
from kvbm.catalog.sql.rows import NamespaceRow
from kvbm.core.codec import RUN_EVENTS, Frame
from kvbm.core.errors import CatalogError, ErasureError, FencedError, StreamError
from kvbm.core.events import JANITOR, InstanceStarted
from kvbm.core.ids import NamespaceId
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure import sql as sql_erasure
from kvbm.erasure.archive import Meant, rewrite_frames, rewrite_samples
from kvbm.erasure.record import DamagedRecordError, Erasure, Matcher, Record
from kvbm.erasure.report import CATALOG, INSTANCE, OBJECTS, Answer, ErasedPlace, Progress
from kvbm.erasure.stream import EventsKept
from kvbm.safe_log import SafeLog
from kvbm.streams.base import AccessSample
from kvbm.streams.nats.api import ServerMessage

if TYPE_CHECKING:
    from kvbm.catalog.service import CatalogService

log = SafeLog()

_STEP_S = 1.0  # between two looks while something is under way
_LEAVE_S = 2.0
_SAMPLES_S = 3 * SAMPLES_EVERY_S  # what was heard by then is in the archive
_NAMED = 3  # of those that are waited for


class CatalogErasureLog(Protocol):
    """What a catalog asks of the stream: `erasure.stream.ErasureLog`."""

    async def make(self) -> None: ...
    async def record(self) -> ServerMessage | None: ...
    async def put_record(self, data: bytes, expected: int) -> int: ...
    async def put_answer(self, name: str, data: bytes) -> None: ...
    async def answers(self) -> dict[str, bytes]: ...
    async def events_kept(self) -> EventsKept: ...
    async def close(self) -> None: ...


class CatalogErasures:
    """A companion of a catalog's service. One asyncio loop.

    Args:
        name: of this catalog, as no other of the cluster has it.
        connect: opens the log. Raises StreamError.
        poll_s: between two looks at the record.
    """

    def __init__(
        self, service: CatalogService, name: str, connect: Callable[[], Awaitable[CatalogErasureLog]], poll_s: float
    ) -> None:
        self._service, self._name, self._connect, self._poll_s = service, name, connect, poll_s
        self._progress: dict[int, Progress] = {}
        self._said: object = None
        self._settled: dict[
            int, tuple[int, float]
        ] = {}  # the stream's end when nobody was left to send anything, and when that was
        self._record = Record()
        self._log: CatalogErasureLog | None = None
        self._is_busy = False

    async def run(self) -> None:
        """Go on for ever; trouble is noted. One that leaves nothing behind says so when it is cancelled."""
        try:
            while True:
                await self._step()
                await asyncio.sleep(min(_STEP_S, self._poll_s) if self._is_busy else self._poll_s)
        except asyncio.CancelledError:
            await self._leave()
            raise

    async def _step(self) -> None:
        try:
            if self._log is None:
                self._log = await self._connect()
                await self._log.make()
                await self._recall(self._log)
            await self._turn(self._log)
            self._service.degraded.clear("erasures")
        except (StreamError, ErasureError, CatalogError, OSError, TimeoutError) as error:
            self._service.degraded.note("erasures", str(error))
            if self._log is not None:
                await self._log.close()
                self._log = None

    async def _leave(self) -> None:
        service = self._service
        has_files = service.checkpointer is not None or service.archive is not None
        connected, self._log = self._log, None
        if connected is None:
            return
        with suppress(StreamError, OSError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                if not has_files and service.store.engine.dialect.name != "sqlite":
                    await self._say(connected, gone=True)
                await connected.close()

    async def _say(self, connected: CatalogErasureLog, gone: bool = False) -> None:
        in_force = {one.number for one in self._record.erasures}
        said = {number: progress for number, progress in self._progress.items() if number in in_force}
        if said != self._said or gone:
            answer = Answer(name=self._name, kind=CATALOG, at_ns=time.time_ns(), progress=said, gone=gone)
            await connected.put_answer(self._name, report.encoded(answer))
            self._said = said

    async def _recall(self, connected: CatalogErasureLog) -> None:
        """What this catalog has said before.

        While the stream has events of before that, it is done once more: they may have been read anew.
        """
        first_ns = (await connected.events_kept()).first_ns
        for answer in await _answers(connected):
            if answer.name == self._name:
                self._progress = {
                    number: progress
                    for number, progress in answer.progress.items()
                    if progress.done_ns and (first_ns is None or progress.done_ns < first_ns)
                } | self._progress

    async def _restored(self, connected: CatalogErasureLog) -> Record:
        """The record; where the stream has lost it, or it is damaged, this catalog's copy, put back.

        Raises ErasureError.
        """
        found = await connected.record()
        try:
            if found is not None:
                return records.decoded(found.data)
        except DamagedRecordError:
            if not self._record.newest:
                raise
        if self._record.newest:
            await connected.make()
            with suppress(FencedError):  # another catalog was first
                await connected.put_record(records.encoded(self._record), found.sequence if found is not None else 0)
                log.warning("erasure.record_restored", newest=self._record.newest)
            self._said = None  # answers are lost with it
        return self._record

    async def _turn(self, connected: CatalogErasureLog) -> None:
        self._record = await self._restored(connected)
        self._is_busy = False
        if open_ones := [one for one in self._record.erasures if not self._is_done(one.number)]:
            self._is_busy = True
            answers = await _answers(connected)
            for erasure in open_ones:
                self._progress[erasure.number] = await self._go_on(erasure, answers)
        await self._say(connected)

    def _is_done(self, number: int) -> bool:
        return number in self._progress and self._progress[number].done_ns > 0

    async def _go_on(self, erasure: Erasure, answers: Sequence[Answer]) -> Progress:
        matcher = Matcher(erasure)
        meant = await self._meant(matcher)
        waits = await self._waits(erasure, answers, matcher, list(meant))
        if waits:
            self._settled.pop(erasure.number, None)
        else:
            waits = await self._unread(erasure.number)
        if waits:
            return Progress(places=tuple(ErasedPlace(name=name, waits=waits) for name in self._places()))
        try:
            places = await self._erase(erasure, matcher, meant)
        except (CatalogError, OSError) as error:
            return Progress(places=tuple(ErasedPlace(name=name, waits=str(error)) for name in self._places()))
        log.info("erasure.done", number=erasure.number, namespaces=len(meant))
        return Progress(places=tuple(places), done_ns=time.time_ns())

    def _places(self) -> list[str]:
        names = ["SQL", "index"]
        return [
            *names,
            *["checkpoints"][: self._service.checkpointer is not None],
            *["archive"][: self._service.archive is not None],
            *["history"][: self._service.past is not None],
        ]

    async def _meant(self, matcher: Matcher) -> set[NamespaceId]:
        """The namespaces that are meant, of those this catalog has heard of: the record's, and those whose own fields
        say whose they are.
        """
        service = self._service
        known = {*service.index.namespaces(), *await service.store.claimed_namespaces()}
        tenants: dict[NamespaceId, str | None] = dict.fromkeys(known)
        tenants |= {one: fields.tenant for one, fields in service.sequencer.namespaces().items()}
        tenants |= proven_tenants(await service.store.namespaces())
        return {one for one, tenant in tenants.items() if matcher.namespace(one, tenant)}

    async def _waits(
        self, erasure: Erasure, answers: Sequence[Answer], matcher: Matcher, meant: Sequence[NamespaceId]
    ) -> str:
        """For whom this catalog has to wait; "" for nobody."""
        service = self._service
        known = await service.store.instances(of_all_parts=True)  # they write claims and namespaces of the same tables
        expected = [row.id for row in known if row.engine != JANITOR]
        answers = report.counted(answers, expected)
        left = report.unfinished(answers, erasure.number, INSTANCE, expected) if expected else {}
        if left:
            names = sorted(left)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return f"instances {', '.join(names[:_NAMED])}{more}"
        of = None if matcher.is_whole else matcher.of
        if report.unfinished(answers, erasure.number, OBJECTS):
            return "the object pool's janitor"
        claims = await sql_erasure.claimed(service.store.engine, meant, of)
        if claims:
            return f"{claims} claims of objects: kvbm-catalog erase with the pool's settings"
        return ""

    async def _unread(self, number: int) -> str:
        """What of all that was sent this catalog has not read and stored yet; "" for nothing."""
        service = self._service
        if number not in self._settled:
            self._settled[number] = await service.stream.last_sequence(), time.monotonic()
        end, since_s = self._settled[number]
        read = end if service.lag.messages() == 0 else service.sequencer.sequence
        stored = min(service.writer.stored, service.archive.sequence if service.archive is not None else end)
        is_late = service.archive is not None and time.monotonic() - since_s < _SAMPLES_S
        if read < end or stored < min(end, service.sequencer.sequence) or is_late:
            return "the stream to be read and stored"
        return ""

    async def _erase(self, erasure: Erasure, matcher: Matcher, meant: Collection[NamespaceId]) -> list[ErasedPlace]:
        service = self._service
        places = []
        if matcher.is_whole:
            tenants = [one for one in await sql_erasure.named_tenants(service.store.engine) if matcher.tenant(one)]
            service.sequencer.usage.forget(matcher.tenant)
            service.sequencer.forget_namespaces(meant)
            for namespace in meant:
                service.index.forget_namespace(namespace)
            rows = await sql_erasure.erase_rows(service.store.engine, list(meant), tenants)
            places.append(ErasedPlace(name="SQL", erased=f"{rows} rows"))
            places.append(ErasedPlace(name="index", erased=f"{len(meant)} namespaces"))
        else:
            await sql_erasure.erase_rows(service.store.engine, [], [])  # what claims left in its files
            places += [ErasedPlace(name="SQL", erased="the claims"), ErasedPlace(name="index", erased="the blocks")]
        if service.archive is not None:
            known = Matcher(erasure, map(erasure.namespace_digest, meant))
            gone = _meant_by(known, erasure.number)
            taken_out = await service.archive.rewrite(
                partial(rewrite_frames, meant=gone), partial(rewrite_samples, meant=gone)
            )
            places.append(ErasedPlace(name="archive", erased=f"{taken_out} frames and samples"))
        if service.past is not None:
            await service.past.erase()
            places.append(ErasedPlace(name="history", erased="all of it; it is made anew of the archive"))
        if service.checkpointer is not None:
            if not await service.checkpointer.write_alone():
                raise CatalogError(f"no new checkpoint: {service.degraded}")
            places.append(ErasedPlace(name="checkpoints", erased="all older ones"))
        return places


def proven_tenants(rows: Iterable[NamespaceRow]) -> dict[NamespaceId, str]:
    """Whose namespaces are, of which SQL has the fields: those whose id is that of the fields."""
    return {row.id: row.fields.tenant for row in rows if row.fields.id == row.id}


def _meant_by(matcher: Matcher, number: int) -> Meant:
    def frame(found: Frame) -> bool:
        for event in found.events:
            if isinstance(event, InstanceStarted):
                if matcher.is_whole and any(matcher.namespace(one.id, one.tenant) for one in event.namespaces):
                    return True
            elif isinstance(event, RUN_EVENTS) and matcher.namespace(event.namespace) and matcher.any(event.hashes):
                return True
        return False

    def sample(found: AccessSample) -> bool:
        return matcher.namespace(found.namespace) and matcher.any(found.hashes)

    return Meant(frame, sample, matcher.tenant, number)


async def _answers(connected: CatalogErasureLog) -> list[Answer]:
    return report.answers_of(await connected.answers())
