"""The projector's rows → SQL, at SQL's own speed: the index never waits for the database.

While the database is away rows wait, up to a limit. Beyond it they are let go, and once the database is back a second projector reads
them again from where SQL stands, over an index that holds nothing. The same helps when a database was restored from an older copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import structlog

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.index import NewIndex
from kvbm.catalog.sequencer import Projector
from kvbm.catalog.sql_store import ClaimRun, Outcome, Store, StoreBatch
from kvbm.core.backend import ScanFrames
from kvbm.core.errors import CatalogError, StreamError
from kvbm.core.ids import HASH_BYTES, NamespaceId, split_hashes
from kvbm.streams.base import START, EventStream, Mark, StreamMessage, StreamState, still_holds
from kvbm.streams.nats.setup import STREAM

log = structlog.get_logger()

WAITING_BYTES = 64 << 20  # of rows that wait for the database
SLICE_BYTES = 64 << 10  # messages applied at once, so that requests are answered in between
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
_FETCH_WAIT_S = 0.25
CLAIMS_EVERY_S = 3600.0  # how often claims are counted
CLAIMS_LEAST_S = 10.0  # between two readings of all claims: many instances may have gaps one after the other
_HANDOVER_S = 5.0  # how long the index stands still at most while both projectors come to one place
_MOST_TIMES = 4  # the limit, while a transaction is under way
_PART = "SQL"


class Numbering(NamedTuple):
    """A stream's name in SQL, and the place it has there."""

    name: str
    place: Mark


async def numbering(
    store: Store, cluster: str | None, state: StreamState, stream: EventStream | None = None, lost: str = ""
) -> Numbering:
    """Name of the stream in SQL, and its place. Another store is another stream, so the name tells when it was made.

    A stream that no longer holds the message at the stored place has lost its end, and its sequences name other messages from there
    on: it gets a name of its own too, and the newest of these counts. Raises CatalogError, StreamError.

    Args:
        stream: is asked for that message; None: nobody can be, and a stream that reaches the place is believed.
        lost: the name under which it was read until it lost its end.
    """
    first = f"{STREAM if cluster is None else f'{STREAM}/{cluster}'}@{state.created}"
    places = {_generation(name, first): place for name, place in (await store.positions()).items()}
    generation = max([1, *places])
    place = places.get(generation, START)
    is_held = place.sequence <= state.last_sequence if stream is None else await still_holds(stream, place)
    is_over = _named(first, generation) in await store.streams_over()
    if generation <= _generation(lost, first) or not is_held or is_over:
        generation, place = max(generation, _generation(lost, first)) + 1, START
        log.warning("stream.end_lost", stream=_named(first, generation), end=state.last_sequence)
    return Numbering(_named(first, generation), place)


def _named(first: str, generation: int) -> str:
    return first if generation == 1 else f"{first}#{generation}"


def _generation(name: str, first: str) -> int:
    """How often a stream has lost its end before it got a name, from 1; 0 for another stream's name."""
    if name == first:
        return 1
    whose, _, number = name.rpartition("#")
    return int(number) if whose == first and number.isdigit() else 0


class Storing:
    """Brings a projector's rows to SQL. One asyncio loop.

    Args:
        applying: held by whoever applies messages to the projector.
        new_index, scan_frames: for the second projector.
        claims_every_s: how often claims are counted: another catalog may have stored some that the stream has lost since.

    Attributes:
        stored: sequence up to which SQL has everything.
        read_again: how often rows were let go and read again.
    """

    def __init__(
        self,
        store: Store,
        stream: EventStream,
        cluster: str | None,
        projector: Projector,
        begun: Numbering,
        applying: asyncio.Lock,
        degraded: Degraded,
        new_index: NewIndex,
        scan_frames: ScanFrames,
        every_s: float = 0.1,
        waiting_bytes: int = WAITING_BYTES,
        claims_every_s: float = CLAIMS_EVERY_S,
    ) -> None:
        self.name, self.stored = begun.name, begun.place.sequence
        self.read_again = 0
        self._store, self._stream, self._cluster, self._projector = store, stream, cluster, projector
        self._applying, self._degraded = applying, degraded
        self._new_index, self._scan_frames = new_index, scan_frames
        self._every_s, self._waiting_bytes, self._claims_every_s = every_s, waiting_bytes, claims_every_s
        self._count_claims_s = time.monotonic() + claims_every_s
        self._take_claims_s = 0.0  # not before
        self._batch: StoreBatch | None = None
        self._is_behind = False  # rows were let go
        self._is_unchecked = False  # the stream may have lost what SQL has
        self._lost = ""  # the name until the stream's store was replaced
        self._unstored: list[
            ClaimRun
        ] = []  # given out before what is read again: the stream may not have their messages

    async def run(self) -> None:
        """Store for ever."""
        retry_s = RETRY_FIRST_S
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._store_what_waits()
            except (CatalogError, StreamError) as error:
                self._degraded.note(_PART, str(error))
                if self._projector.waiting_bytes > self._waiting_bytes:
                    self._let_go(str(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MOST_S)
            else:
                self._degraded.clear(_PART)
                retry_s = RETRY_FIRST_S

    def bound(self) -> None:
        """Let rows go when far more wait than may, because the database neither takes nor refuses them."""
        if self._projector.waiting_bytes > _MOST_TIMES * self._waiting_bytes:
            self._let_go("the database takes too long")

    async def flush(self) -> None:
        """Store what is left, once; what was let go is left to the next start. Raises CatalogError, StreamError."""
        await self._check_if_wanted()
        if await self._store_batch() and not self._is_behind:
            await self._store_batch()  # what was cut before, then what came after it

    def begin_anew(self) -> None:
        """The stream's store was replaced: count it under another name, and read its rows once the name is known."""
        self._lost = self.name or self._lost
        self._unstored += self._projector.waiting_claims()  # the batch that waits is stored under the old name
        self.name, self.stored = "", 0
        self._projector.renumber("", 0)
        self._let_go("the stream's store was replaced")

    def check_place(self) -> None:
        """The connection was lost meanwhile: before anything is stored, look whether the stream still has what SQL stands at.

        Another catalog may have stored messages that this one has not read and the stream has lost since. Rows of the messages that
        have their sequences now would be taken for stored.
        """
        self._is_unchecked = True

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _store_what_waits(self) -> None:
        await self._check_if_wanted()
        await self._store_batch()
        if not self.name:
            state = await self._stream.state()
            self.name, place = await numbering(self._store, self._cluster, state, self._stream, self._lost)
            self.stored = place.sequence
            self._projector.renumber(self.name, self.stored)
        if self._is_behind:
            await self._read_again()
        elif self._batch is None and not self._projector.waiting():
            if time.monotonic() >= self._count_claims_s:
                self._count_claims_s = time.monotonic() + self._claims_every_s
                counted = sum(self._projector.index.claim_counts().values())
                self._projector.may_lack_claims |= counted != await self._store.claim_count()
            if self._projector.may_lack_claims and time.monotonic() >= self._take_claims_s:
                await self._take_claims()
                self._take_claims_s = time.monotonic() + CLAIMS_LEAST_S

    async def _check_if_wanted(self) -> None:
        if not self._is_unchecked or not self.name:
            return
        self._is_unchecked = False
        try:
            await self._check_place()
        except BaseException:
            self._is_unchecked = True
            raise

    async def _check_place(self) -> Mark:
        """SQL's place, looked at as `_is_of_history` does."""
        name = self.name
        place = (await self._store.positions()).get(name, START)
        await self._is_of_history(name, place)
        return place

    async def _is_of_history(self, name: str, place: Mark) -> bool:
        """Whether the stream holds what SQL stands at; rows are read anew, under another name, when it does not."""
        if await still_holds(self._stream, place):
            return True
        if name == self.name:
            log.warning("stream.end_lost", stream=name, stored=place.sequence)
            self.begin_anew()
        return False

    async def _take_claims(self) -> None:
        """Bring the index's claims to what SQL has: their events were missed here, or the stream has lost them since.

        What is claimed and withdrawn meanwhile is said again at the end. Raises CatalogError.
        """
        index = self._projector.index
        self._projector.watch_claims()
        is_whole = False
        try:
            await self._store_batch()  # SQL has then all that the index had
            if self._batch is not None or self._is_behind:
                return
            stored: dict[tuple[str, NamespaceId], list[bytes]] = {}
            async for chunk in self._store.claims():
                index.claim(chunk.pool, chunk.namespace, chunk.hashes)
                stored.setdefault((chunk.pool, chunk.namespace), []).append(chunk.hashes)
            if sum(index.claim_counts().values()) != sum(
                len(run) // HASH_BYTES for runs in stored.values() for run in runs
            ):
                known = await asyncio.to_thread(_sorted_columns, stored)  # ten million take seconds
                first: int | None = 0
                while first is not None:
                    first, runs = index.claims(first)
                    for pool, namespace, hashes in runs:
                        index.unclaim(pool, namespace, _lacking(hashes, known.get((pool, namespace))))
                    await asyncio.sleep(0)
            is_whole = True
        finally:
            self._projector.claim_again()
            self._projector.may_lack_claims |= not is_whole

    async def _store_batch(self) -> bool:
        """Store the batch that waits, or a new one. Returns whether one was stored. Raises CatalogError: try again."""
        batch = self._batch or self._projector.take_batch()
        if batch is None:
            return False
        self._batch = batch
        applied = await self._store.apply(batch)
        if applied.outcome is Outcome.OVER:
            self._give_over(batch)
            return False
        is_met = applied.outcome in (Outcome.OVERTAKEN, Outcome.REPEATED) and batch.stream == self.name
        before = len(self._unstored)
        if is_met and not await self._is_of_history(batch.stream, Mark(applied.position, applied.fingerprint)):
            self._batch = None  # the other catalog has read messages that the stream has lost since
            self._unstored[before:before] = batch.claims
            return False
        if applied.outcome is Outcome.OVERTAKEN:  # rows say how things are, so the rest of them may be said again
            self._batch = msgspec.structs.replace(batch, previous=applied.position)
            return False
        self._batch = None
        if applied.outcome is Outcome.MISSING:
            log.warning(
                "database.replaced", stream=batch.stream, position=applied.position, expected=batch.previous,
                what_to_do="nothing: rows are read again from there as far as the stream has them",
            )  # fmt: skip
            self._unstored += [*batch.claims, *self._projector.waiting_claims()]
            self._let_go("the database was restored or replaced")
            return False
        if batch.stream == self.name:
            self.stored = max(self.stored, applied.position)
            if applied.outcome is Outcome.REPEATED:
                self._tell_again(batch, self._projector)
        return True

    def _tell_again(self, batch: StoreBatch, projector: Projector) -> None:
        """Another catalog has stored these messages, and not what this batch told besides: it goes with the next one."""
        if batch.tells and projector is self._projector:
            projector.tell_all()
        elif batch.tells:
            projector.tell_namespaces(self._projector.namespaces(), self._projector.newest_wall_ns)
        projector.add_claims(self._still_so(batch.claims[: batch.told_claims]))

    def _give_over(self, batch: StoreBatch) -> None:
        """SQL counts the stream under another name since: another catalog has seen it replaced, or its end lost.

        Raises CatalogError where this catalog has not: its name is looked up in a while. Two that read different servers would
        drive each other on.
        """
        self._batch = None
        self._unstored += batch.claims
        if batch.stream != self.name:
            return  # what was cut before the name was looked up
        log.warning("stream.end_lost", stream=self.name, stored=self.stored, why="SQL counts it under another name")
        self.begin_anew()
        raise CatalogError(
            f"another catalog has read that the stream {batch.stream} was replaced or has lost its end; if this lasts, the "
            "catalogs of this database read different NATS servers"
        )

    def _let_go(self, why: str) -> None:
        if not self._is_behind:
            log.warning("rows.let_go", stored=self.stored, read=self._projector.sequence, why=why)
        self._is_behind = True
        self._projector.let_rows_go()

    async def _read_again(self) -> None:
        """Bring SQL to where the projector is, by another. Raises CatalogError, StreamError: to be begun anew."""
        name, place = self.name, await self._check_place()
        if self.name != name:
            return
        self.stored = stored = place.sequence
        positions = await self._store.instance_positions()
        second = Projector(
            self._new_index(1), self._scan_frames, name, stored, known=await self._store.instances(),
            namespaces=[row.fields for row in await self._store.namespaces() if row.fields.id == row.id],
        )  # fmt: skip
        if stored:
            second.restore_blind(place, positions.values())
        second.add_claims(self._still_so(self._unstored))
        second.tell_namespaces(self._projector.namespaces(), self._projector.newest_wall_ns)
        log.info("rows.read_again", after=stored)
        reader = await self._stream.pull(stored, self._cluster, fingerprint=place.fingerprint)
        try:
            while not reader.at_end or max(second.sequence, reader.reached) < self._projector.sequence:
                await self._step(second, await reader.fetch(_FETCH_WAIT_S))
                await self._store_all(second)
                if not second.waiting_claims():
                    self._unstored = []  # said again after what follows, they would stand against it
                if self.name != name:
                    return  # the stream was replaced meanwhile; begin anew
            async with self._applying:
                deadline_s = time.monotonic() + _HANDOVER_S
                while max(second.sequence, reader.reached) < self._projector.sequence:  # damage may hide the last ones
                    if time.monotonic() > deadline_s:
                        return
                    await self._step(second, await reader.fetch(_FETCH_WAIT_S))
                second.pass_holes()  # before the batch, which else ends before them, and the next one would not begin there
                self._batch = second.take_batch()
                self._projector.gather_after(max(second.sequence, stored))
                self._projector.take_rows(second)
                self._projector.tell_all()
                self._is_behind = False
                self._unstored = []
                self.read_again += 1
            log.info("rows.caught_up", stored=self.stored, read=second.sequence)
        finally:
            await reader.close()

    def _still_so(self, claims: Sequence[ClaimRun]) -> list[ClaimRun]:
        """Of what waited for SQL, what the index still says.

        A batch whose answer was lost may be stored, as may one of another catalog; SQL then stands behind what these claims come from,
        and what has withdrawn them since is not read again.
        """
        index = self._projector.index
        so = []
        for run in claims:
            blocks = [
                block for block in split_hashes(run.hashes)
                if any(holder.is_pool and holder.name == run.pool for holder in index.holders(run.namespace, block)) != run.withdrawn
            ]  # fmt: skip
            if blocks:
                so.append(msgspec.structs.replace(run, hashes=b"".join(blocks)))
        return so

    async def _step(self, second: Projector, messages: Sequence[StreamMessage]) -> None:
        for part in slices(messages):
            if second.step(time.monotonic(), part).renumbered:
                raise StreamError("the stream was replaced while rows were read again")
            await asyncio.sleep(0)

    async def _store_all(self, second: Projector) -> None:
        batch = second.take_batch()
        while batch is not None:
            applied = await self._store.apply(batch)
            if not applied and not await self._is_of_history(batch.stream, Mark(applied.position, applied.fingerprint)):
                raise StreamError(
                    "the stream has lost messages that another catalog had stored while rows were read again"
                )
            match applied.outcome:
                case Outcome.OVERTAKEN:
                    batch = msgspec.structs.replace(batch, previous=applied.position)
                case Outcome.OVER:
                    self._give_over(batch)
                    raise CatalogError(f"the stream {batch.stream} is over in SQL")
                case Outcome.MISSING:
                    raise CatalogError(f"the database stands at {applied.position}, before {batch.previous}")
                case outcome:
                    self.stored = max(self.stored, applied.position)
                    if outcome is Outcome.REPEATED:
                        self._tell_again(batch, second)
                    batch = None


def _hash_column(hashes: bytes) -> np.ndarray:
    """Packed hashes as a column that can be sorted, (n,) of 16 bytes."""
    return np.frombuffer(hashes, dtype=f"S{HASH_BYTES}")


def _sorted_columns(runs: dict[tuple[str, NamespaceId], list[bytes]]) -> dict[tuple[str, NamespaceId], np.ndarray]:
    """The hashes of each pool and namespace as a sorted column."""
    return {key: np.sort(_hash_column(b"".join(parts))) for key, parts in runs.items()}


def _lacking(hashes: bytes, known: np.ndarray | None) -> bytes:
    """Those of packed hashes that are not among known ones."""
    if known is None:
        return hashes
    column = _hash_column(hashes)
    at = np.minimum(np.searchsorted(known, column), len(known) - 1)
    return bytes(column[known[at] != column].tobytes())


def slices(messages: Sequence[StreamMessage]) -> list[Sequence[StreamMessage]]:
    """Messages in parts of about SLICE_BYTES; one empty part when there are none."""
    parts: list[Sequence[StreamMessage]] = []
    begin = size = 0
    for at, message in enumerate(messages):
        if size and size + len(message.data) > SLICE_BYTES:
            parts.append(messages[begin:at])
            begin, size = at, 0
        size += len(message.data)
    parts.append(messages[begin:])
    return parts
