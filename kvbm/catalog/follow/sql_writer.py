"""Gathered rows → SQL, at SQL's own speed: the index never waits for the database.

While the database is away rows wait, up to a limit. Beyond it they are dropped, and once the database is back a second
sequencer reads them again from where SQL stands, over an index that holds nothing. The same helps when a database was
restored from an older copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.follow.message_applier import slices
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.sql.rows import ClaimRun, InstanceRow, InstanceRows, StoreBatch
from kvbm.catalog.sql.store import BatchOutcome, SqlStore
from kvbm.catalog.threads import in_thread
from kvbm.core.errors import CatalogError, StreamError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, split_hashes
from kvbm.core.parts import ALL_PARTS, scope_name
from kvbm.safe_log import SafeLog
from kvbm.streams.base import START, EventStream, Mark, StreamMessage, StreamState, still_holds
from kvbm.streams.nats.setup import STREAM

log = SafeLog()

WAITING_BYTES = 64 << 20  # of rows that wait for the database
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
NAME_EVERY_S = 5.0  # while no batch is stored, which would tell that SQL counts the stream under another name
_FETCH_WAIT_S = 0.25
CLAIMS_EVERY_S = 3600.0  # how often claims are counted
CLAIMS_LEAST_S = 10.0  # between two readings of all claims: many instances may have gaps one after the other
_HANDOVER_S = 5.0  # how long the index stands still at most while both sequencers come to one place
_MOST_TIMES = 4  # the limit, while a transaction is under way
_PART = "SQL"


class Numbering(NamedTuple):
    """A stream's name in SQL, and the place it has there."""

    name: str
    place: Mark


async def numbering(
    store: SqlStore,
    cluster: str | None,
    state: StreamState,
    stream: EventStream | None = None,
    lost: str = "",
    parts: tuple[int, ...] = ALL_PARTS,
) -> Numbering:
    """Name of the stream in SQL, and its place. Another store is another stream, so the name has the time it was made.

    A stream that no longer holds the message at the stored place has lost its end, and its sequences name other
    messages from there on: it gets a name of its own too, and the newest of these counts. Raises CatalogError,
    StreamError.

    Args:
        stream: is asked for that message; None: nobody can be, and a stream that reaches the place is believed.
        lost: the name under which it was read until it lost its end.
        parts: that are read: whoever reads others reads another stream.
    """
    scope = scope_name(cluster, parts)
    first = f"{STREAM}/{scope}@{state.created}" if scope else f"{STREAM}@{state.created}"
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


def _first_name(name: str) -> str:
    """What a stream was called before it lost its end for the first time."""
    whose, _, number = name.rpartition("#")
    return whose if number.isdigit() else name


def _generation(name: str, first: str) -> int:
    """How often a stream has lost its end before it got a name, from 1; 0 for another stream's name."""
    if name == first:
        return 1
    whose, _, number = name.rpartition("#")
    return int(number) if whose == first and number.isdigit() else 0


class WriterOptions(NamedTuple):
    """How rows are written.

    Attributes:
        cluster: the one that is followed; None for all. parts: of it, those that are.
        every_s: pause between two transactions.
        waiting_bytes: of rows that may wait for the database.
        claims_every_s: how often claims are counted: another catalog may have stored some that the stream has lost
            since.
    """

    cluster: str | None = None
    every_s: float = 0.1
    waiting_bytes: int = WAITING_BYTES
    claims_every_s: float = CLAIMS_EVERY_S
    parts: tuple[int, ...] = ALL_PARTS


NewSequencer = Callable[[Iterable[InstanceRow], Iterable[Namespace]], Sequencer]  # of what SQL has


class SqlWriter:
    """Brings gathered rows to SQL. One asyncio loop.

    Args:
        sequencer, rows: the one that reads the stream, and the rows of what it has read.
        begun: the stream's name in SQL, and its place there.
        applying: held by whoever applies messages to the sequencer.
        new_sequencer: makes the second one, over an index that holds nothing.

    Attributes:
        stored: sequence up to which SQL has everything.
        read_again: how often rows were dropped and read again.
        waiting_bytes: of rows that may wait for the database.
        is_behind: rows were dropped, and are not read again yet.
    """

    def __init__(
        self,
        store: SqlStore,
        stream: EventStream,
        sequencer: Sequencer,
        rows: RowCollector,
        begun: Numbering,
        applying: asyncio.Lock,
        degraded: Degraded,
        new_sequencer: NewSequencer,
        options: WriterOptions = WriterOptions(),  # noqa: B008
    ) -> None:
        self.name, self.stored = begun.name, begun.place.sequence
        self.read_again = 0
        self.waiting_bytes = options.waiting_bytes
        self.is_behind = False
        self._store, self._stream, self._sequencer, self._rows = store, stream, sequencer, rows
        self._applying, self._degraded, self._new_sequencer = applying, degraded, new_sequencer
        self._cluster, self._parts = options.cluster, options.parts
        self._every_s, self._claims_every_s = options.every_s, options.claims_every_s
        self._count_claims_s = time.monotonic() + options.claims_every_s
        self._look_at_name_s = time.monotonic() + NAME_EVERY_S
        self._take_claims_s = 0.0  # not before
        self._batch: StoreBatch | None = None
        self._stream_is_back = asyncio.Event()
        self._is_unchecked = False  # the stream may have lost what SQL has
        self._lost = ""  # the name until the stream's store was replaced
        # given out before what is read again: the stream may not have their messages
        self._unstored: list[ClaimRun] = []

    async def run(self) -> None:
        """Store for ever."""
        retry_s = RETRY_FIRST_S
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._store_what_waits()
            except (CatalogError, StreamError) as error:
                why = f"rows wait for the stream: {error}" if isinstance(error, StreamError) else str(error)
                self._degraded.note(_PART, why)
                if self._rows.waiting_bytes > self.waiting_bytes:
                    self._drop_rows(str(error))
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, RETRY_MOST_S)
            else:
                self._degraded.clear(_PART)
                retry_s = RETRY_FIRST_S

    async def _pause(self, retry_s: float) -> None:
        """Wait, no longer than until the stream is heard again: it may be what was missing."""
        self._stream_is_back.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(retry_s):
                await self._stream_is_back.wait()

    def bound(self) -> None:
        """Drop rows when far more wait than may, because the database neither takes nor refuses them."""
        if self._rows.waiting_bytes > _MOST_TIMES * self.waiting_bytes:
            self._drop_rows("the database takes too long")

    async def flush(self) -> None:
        """Store what is left, once; what was dropped is left to the next start. Raises CatalogError, StreamError."""
        await self._check_if_wanted()
        if await self._store_batch() and not self.is_behind:
            await self._store_batch()  # what was cut before, then what came after it

    def begin_anew(self) -> None:
        """The stream's store was replaced: count it under another name, and read its rows once the name is known."""
        self._lost = self.name or self._lost
        self._unstored += self._rows.waiting_claims()  # the batch that waits is stored under the old name
        self.name, self.stored = "", 0
        self._rows.renumber("", 0)
        self._drop_rows("the stream's store was replaced")

    def on_changes(self, changes: Changes) -> None:
        """Messages were applied: their rows are gathered."""
        self._rows.take(changes)
        if changes.renumbered:
            self.begin_anew()
        self.bound()

    def on_reader(self) -> None:
        """The connection was lost meanwhile: before anything is stored, look whether the stream still has what SQL
        stands at.

        Another catalog may have stored messages that this one has not read and the stream has lost since. Rows of the
        messages that have their sequences now would be taken for stored.
        """
        self._is_unchecked = True
        self._stream_is_back.set()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _store_what_waits(self) -> None:
        await self._check_if_wanted()
        if await self._store_batch():
            self._look_at_name_s = time.monotonic() + NAME_EVERY_S
        elif self._batch is None and time.monotonic() >= self._look_at_name_s:
            self._look_at_name_s = time.monotonic() + NAME_EVERY_S
            await self._look_at_name()
        if not self.name:
            state = await self._stream.state()
            self.name, place = await numbering(self._store, self._cluster, state, self._stream, self._lost, self._parts)
            self.stored = place.sequence
            self._rows.renumber(self.name, self.stored)
        if self.is_behind:
            await self._read_again()
        elif self._batch is None and not self._sequencer.waiting():
            if time.monotonic() >= self._count_claims_s:
                self._count_claims_s = time.monotonic() + self._claims_every_s
                counted = sum(self._sequencer.index.claim_counts().values())
                self._rows.may_lack_claims |= counted != await self._store.claim_count()
            if self._rows.may_lack_claims and time.monotonic() >= self._take_claims_s:
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

    async def _look_at_name(self) -> None:
        """While nothing is to be stored, look whether another catalog has given this stream a later name.

        Under the old one nobody is forgotten, and what others forget is not heard of. The name of another server's
        stream tells nothing: its catalog and this one would drive each other on. Raises CatalogError: it has, or the
        database does not answer.
        """
        name, first = self.name, _first_name(self.name)
        counted = (await self._store.positions()).keys() - await self._store.streams_over()
        if name == self.name and any(_generation(other, first) > _generation(name, first) for other in counted):
            self._give_over(name)

    async def _take_claims(self) -> None:
        """Bring the index's claims to what SQL has: their events were missed here, or the stream has lost them since.

        What is claimed and withdrawn meanwhile is repeated at the end. Raises CatalogError.
        """
        index = self._sequencer.index
        self._rows.watch_claims()
        is_whole = False
        try:
            await self._store_batch()  # SQL has then all that the index had
            if self._batch is not None or self.is_behind:
                return
            stored: dict[tuple[str, NamespaceId], list[bytes]] = {}
            async for chunk in self._store.claims():
                index.claim(chunk.pool, chunk.namespace, chunk.hashes)
                stored.setdefault((chunk.pool, chunk.namespace), []).append(chunk.hashes)
            if sum(index.claim_counts().values()) != sum(
                len(run) // HASH_BYTES for runs in stored.values() for run in runs
            ):
                known = await in_thread(_sorted_columns, stored)  # ten million take seconds
                first: int | None = 0
                while first is not None:
                    first, runs = index.claims(first)
                    for pool, namespace, hashes in runs:
                        index.unclaim(pool, namespace, _lacking(hashes, known.get((pool, namespace))))
                    await asyncio.sleep(0)
            is_whole = True
        finally:
            for run in self._rows.take_watched():  # claims of another time were brought in meanwhile
                (index.unclaim if run.withdrawn else index.claim)(run.pool, run.namespace, run.hashes)
            self._rows.may_lack_claims |= not is_whole

    async def _store_batch(self) -> bool:
        """Store the batch that waits, or a new one. Returns whether one was stored. Raises CatalogError: try again."""
        batch = self._batch or self._take_batch()
        if batch is None:
            return False
        self._batch = batch
        applied = await self._store.apply(batch)
        if applied.outcome is BatchOutcome.OVER:
            self._batch = None
            self._give_over(batch.stream, batch.claims)
            return False
        is_met = applied.outcome in (BatchOutcome.OVERTAKEN, BatchOutcome.REPEATED) and batch.stream == self.name
        before = len(self._unstored)
        if is_met and not await self._is_of_history(batch.stream, Mark(applied.position, applied.fingerprint)):
            self._batch = None  # the other catalog has read messages that the stream has lost since
            self._unstored[before:before] = batch.claims
            return False
        if (
            applied.outcome is BatchOutcome.OVERTAKEN
        ):  # rows hold how things are, so the rest of them may be stored again
            self._batch = msgspec.structs.replace(batch, previous=applied.position)
            return False
        self._batch = None
        if applied.outcome is BatchOutcome.MISSING:
            log.warning(
                "database.replaced",
                stream=batch.stream,
                position=applied.position,
                expected=batch.previous,
                what_to_do="nothing: rows are read again from there as far as the stream has them",
            )
            self._unstored += [*batch.claims, *self._rows.waiting_claims()]
            self._drop_rows("the database was restored or replaced")
            return False
        if batch.stream == self.name:
            self.stored = max(self.stored, applied.position)
            if applied.outcome is BatchOutcome.REPEATED:
                self._repeat_extra(batch, self._rows)
        return True

    def _take_batch(self) -> StoreBatch | None:
        return self._rows.take_batch(self._sequencer.safe_mark(), self._sequencer.rows)

    def _repeat_extra(self, batch: StoreBatch, rows: RowCollector) -> None:
        """Another catalog has stored these messages, and not the batch's extra rows: they go with the next one."""
        if batch.has_extra_rows:
            if rows is self._rows:
                self._add_all_instances()
            rows.add_namespaces(self._sequencer.namespaces(), self._sequencer.newest_wall_ns)
        rows.add_claims(self._still_held(batch.claims[: batch.extra_claims]))

    def _add_all_instances(self) -> None:
        """Give out the rows of all instances: the stream may not have what they come from."""
        self._rows.add_instances(self._known_instances())

    def _known_instances(self) -> list[InstanceId]:
        return [name for name in self._sequencer.followed if self._sequencer.position(name).epoch]

    def _newest_rows(self, second: Sequencer, instance: InstanceId) -> InstanceRows:
        """The rows of an instance as whoever has read further of it knows them: the stream may have lost since what
        the sequencer has read, and the second one does not wait for what is missing.
        """
        first = self._sequencer
        is_first = instance in first.followed and first.position(instance) >= second.position(instance)
        return (first if is_first else second).rows(instance)

    def _give_over(self, name: str, claims: Sequence[ClaimRun] = ()) -> None:
        """SQL counts the stream under another name since: another catalog has seen it replaced, or its end lost.

        Args:
            claims: of a batch under the old name, which SQL refuses.

        Raises CatalogError where this catalog has not: its name is looked up in a while. Two that read different
        servers would drive each other on.
        """
        self._unstored += claims
        if name != self.name:
            return  # what was cut before the name was looked up
        log.warning("stream.end_lost", stream=self.name, stored=self.stored, why="SQL counts it under another name")
        self.begin_anew()
        raise CatalogError(
            f"another catalog has read that the stream {name} was replaced or has lost its end; if this lasts, the "
            "catalogs of this database read different NATS servers"
        )

    def _drop_rows(self, why: str) -> None:
        if not self.is_behind:
            log.warning("rows.dropped", stored=self.stored, read=self._sequencer.sequence, why=why)
        self.is_behind = True
        self._rows.drop_rows()

    async def _read_again(self) -> None:
        """Bring SQL to where the sequencer is, by another. Raises CatalogError, StreamError: to be begun anew."""
        name, place = self.name, await self._check_place()
        if self.name != name:
            return
        self.stored = stored = place.sequence
        positions = await self._store.instance_positions()
        known = await self._store.instances()
        namespaces = [row.fields for row in await self._store.namespaces() if row.fields.id == row.id]
        second, rows = self._new_sequencer(known, namespaces), RowCollector(name, stored)
        if stored:
            rows.take(second.restore_positions(place, positions.values()))
        rows.add_claims(self._still_held(self._unstored))
        rows.add_namespaces(self._sequencer.namespaces(), self._sequencer.newest_wall_ns)
        log.info("rows.read_again", after=stored)
        reader = await self._stream.pull(stored, self._cluster, fingerprint=place.fingerprint, parts=self._parts)
        try:
            while not reader.at_end or max(second.sequence, reader.reached) < self._sequencer.sequence:
                await self._step(second, rows, await reader.fetch(_FETCH_WAIT_S))
                await self._store_all(second, rows)
                if not rows.waiting_claims():
                    self._unstored = []  # given out again after what follows, they would stand against it
                if self.name != name:
                    return  # the stream was replaced meanwhile; begin anew
            async with self._applying:
                deadline_s = time.monotonic() + _HANDOVER_S
                while max(second.sequence, reader.reached) < self._sequencer.sequence:  # damage may hide the last ones
                    if time.monotonic() > deadline_s:
                        return
                    await self._step(second, rows, await reader.fetch(_FETCH_WAIT_S))
                # before the batch, which else ends before them, and the next one would not begin there
                rows.take(second.pass_holes())
                # with this batch, for there may be no next message; the stream may have lost what they come from
                rows.add_instances(self._known_instances())
                self._batch = rows.take_batch(second.safe_mark(), partial(self._newest_rows, second))
                self._rows.gather_after(max(second.sequence, stored))
                self._rows.take_rows(rows, self._sequencer.followed)
                self._add_all_instances()
                self._rows.add_namespaces(self._sequencer.namespaces(), self._sequencer.newest_wall_ns)
                self.is_behind = False
                self._unstored = []
                self.read_again += 1
            log.info("rows.caught_up", stored=self.stored, read=second.sequence)
        finally:
            await reader.close()

    def _still_held(self, claims: Sequence[ClaimRun]) -> list[ClaimRun]:
        """Of what waited for SQL, what the index still has so.

        A batch whose answer was lost may be stored, as may one of another catalog; SQL then stands behind what these
        claims come from, and what has withdrawn them since is not read again.
        """
        index = self._sequencer.index
        kept = []
        for run in claims:
            blocks = [
                block
                for block in split_hashes(run.hashes)
                if any(holder.is_pool and holder.name == run.pool for holder in index.holders(run.namespace, block))
                != run.withdrawn
            ]
            if blocks:
                kept.append(msgspec.structs.replace(run, hashes=b"".join(blocks)))
        return kept

    async def _step(self, second: Sequencer, rows: RowCollector, messages: Sequence[StreamMessage]) -> None:
        for part in slices(messages):
            changes = second.step(time.monotonic(), part)
            rows.take(changes)
            if changes.renumbered:
                raise StreamError("the stream was replaced while rows were read again")
            await asyncio.sleep(0)

    async def _store_all(self, second: Sequencer, rows: RowCollector) -> None:
        batch = rows.take_batch(second.safe_mark(), second.rows)
        while batch is not None:
            applied = await self._store.apply(batch)
            if not applied and not await self._is_of_history(batch.stream, Mark(applied.position, applied.fingerprint)):
                raise StreamError(
                    "the stream has lost messages that another catalog had stored while rows were read again"
                )
            match applied.outcome:
                case BatchOutcome.OVERTAKEN:
                    batch = msgspec.structs.replace(batch, previous=applied.position)
                case BatchOutcome.OVER:
                    self._batch = None
                    self._give_over(batch.stream, batch.claims)
                    raise CatalogError(f"the stream {batch.stream} is over in SQL")
                case BatchOutcome.MISSING:
                    raise CatalogError(f"the database stands at {applied.position}, before {batch.previous}")
                case outcome:
                    self.stored = max(self.stored, applied.position)
                    if outcome is BatchOutcome.REPEATED:
                        self._repeat_extra(batch, rows)
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
