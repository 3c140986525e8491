"""From the log, the state of a catalog: its SQL rows and a checkpoint of its index, by the sequencer that a catalog
runs itself.

A catalog takes a checkpoint only for the stream it was made of, so the state has to name one and a place in it:

    an archive            the stream it was written from, after the last message in it
    the live stream       itself, after the last message read
    --stream URL          that one, at its end: the log must have all that is there, instance by instance
    anything else         none: the stream's name is "rebuilt", and only tools that ask for it by this name load it
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.catalog.follow.archive import ArchivePosition
from kvbm.catalog.follow.checkpoints import Checkpointing, Writing
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.sql_writer import numbering
from kvbm.catalog.index.cluster_index import ClusterIndex, NewIndex, is_suspect
from kvbm.catalog.sql.database import parse_url, shown
from kvbm.catalog.sql.rows import StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.backend import Backend
from kvbm.core.codec import ScannedFrame
from kvbm.core.ids import InstanceId
from kvbm.files import read_small
from kvbm.progress import Watch
from kvbm.replay.findings import ReplayFinding, damage_finding, damage_text
from kvbm.replay.format import counted, place_text
from kvbm.replay.order import DamagedBytes
from kvbm.replay.prefetch import read_ahead
from kvbm.replay.scan import NOTED, Damage
from kvbm.replay.serve import TIMEOUT_S, OpenStream
from kvbm.replay.source import FrameSource, Located, SourceError, only
from kvbm.streams.base import (
    EventLog,
    Mark,
    StreamMessage,
    StreamState,
    events_subject,
    fence_data,
    fence_subject,
)
from kvbm.streams.fence_records import FenceRecord

REBUILT = "rebuilt"
_MESSAGE_BYTES = 256 << 10
_ROWS_BYTES = 8 << 20  # rows are stored when so many have been gathered


class Rebuilt(msgspec.Struct, kw_only=True):
    """What was made.

    Attributes:
        stream, sequence: which stream, by its name in SQL, and where in it a catalog goes on.
        anomalies: rules that events broke, counted by name.
        suspect: instances whose residencies may be wrong, because the log has holes; a catalog asks them for a
            snapshot.
    """

    source: str
    database: str
    checkpoint: str
    stream: str = REBUILT
    sequence: int = 0
    instances: int = 0
    frames: int = 0
    events: int = 0
    blocks: int = 0
    residencies: int = 0
    claims: int = 0
    digest_mismatches: int = 0
    suspect: list[InstanceId] = []
    anomalies: dict[str, int] = {}
    findings: list[ReplayFinding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"rebuilt: {counted(self.instances, 'instance')}, "
            f"{counted(self.residencies, 'residency').replace('residencys', 'residencies')}, "
            f"{counted(self.claims, 'claim')} from {counted(self.events, 'event')} in {counted(self.frames, 'frame')}"
        )
        where = (
            f"goes on after message {self.sequence:,} of {self.stream}"
            if self.stream != REBUILT
            else "belongs to no stream"
        )
        yield f"  rows in {self.database}, index in {self.checkpoint or 'no checkpoint'}; it {where}"
        if self.suspect:
            yield f"  suspect, because of holes or wrong digests: {', '.join(self.suspect)}"


class _Identity(NamedTuple):
    """Which stream the state belongs to, and how far it goes there."""

    stream: str
    sequence: int


class RebuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made, and for which stream.

    Attributes:
        database: URL of one without rows.
        checkpoint: folder of the checkpoint; None makes none.
        cluster: the one the catalog follows, and that of the instances for sources that do not name it.
        capacity: of the index.
        instance: only this one's frames; None takes all.
        archive: the folder of the source, if it is an archive.
        is_own_stream: `connect` gives the very stream that the source is.
    """

    database: str
    checkpoint: Path | None
    cluster: str
    capacity: int
    instance: str | None = None
    archive: Path | None = None
    is_own_stream: bool = False


def rebuild(
    source: FrameSource,
    options: RebuildOptions,
    backend: Backend,
    new_index: NewIndex,
    connect: OpenStream | None = None,
) -> Rebuilt:
    """Make a catalog's state from a source.

    Args:
        new_index: one that writes checkpoints, unless there is to be none.
        connect: gives the stream a catalog is to go on with.
    Raises: SourceError: the database is in use, or the stream has more than the log. CatalogError, StreamError.
    """
    return asyncio.run(_Rebuild(source, options, backend, new_index, connect).run())


class _Rebuild:
    def __init__(
        self,
        source: FrameSource,
        options: RebuildOptions,
        backend: Backend,
        new_index: NewIndex,
        connect: OpenStream | None,
    ) -> None:
        self._source, self._options, self._backend, self._connect = source, options, backend, connect
        self._index: ClusterIndex = new_index(options.capacity)
        if options.checkpoint is not None and not isinstance(self._index, Checkpointing):
            raise SourceError(
                "the Python specification of the index writes no checkpoint; leave --checkpoint or --reference out"
            )
        self._sequencer = Sequencer(self._index, backend.scan_frames)
        self._rows = RowCollector(REBUILT)
        self.report = Rebuilt(
            source=source.name,
            database=shown(parse_url(options.database)),
            checkpoint="" if options.checkpoint is None else str(options.checkpoint),
        )
        self._sequence = 0  # of the messages that are applied here
        self._read_sequence = 0  # of the last message read, where the source is a stream

    async def run(self) -> Rebuilt:
        store = await SqlStore.open(self._options.database)
        try:
            if await store.instances() or await store.namespaces():
                raise SourceError(f"{self.report.database} has rows already; give a new database")
            await self._apply(store)
            identity = await self._identity(store)
            await self._write(store, identity)
        finally:
            await store.close()
        return self.report

    # -- the log → index and rows -------------------------------------------------------------------------------------

    async def _apply(self, store: SqlStore) -> None:
        source, report, read = self._source, self.report, self._source.read(self._backend)
        waiting: list[Located] = []
        size = 0
        with Watch(source.name) as watch:
            async for batch in read_ahead(only(read, self._options.instance)):
                for located in batch:
                    found = located.found
                    watch.total, watch.done = source.total, source.done
                    if isinstance(found, Damage):
                        self._note_damage(DamagedBytes(located, found))
                        continue
                    if isinstance(found, FenceRecord):
                        if waiting:
                            await self._step(store, waiting)
                            waiting, size = [], 0
                        self._step_fence(found)
                        continue
                    if waiting and (size >= _MESSAGE_BYTES or not _is_together(waiting[-1], located)):
                        await self._step(store, waiting)
                        waiting, size = [], 0
                    waiting.append(located)
                    self._read_sequence = located.place.sequence or 0
                    size += len(located.data)
            if waiting:
                await self._step(store, waiting)
        if not self._sequencer.instances():
            raise SourceError(
                f"{source.name} has no frame of {self._options.instance or 'any instance'}; kvbm-replay stat lists the "
                "instances"
            )
        if self._sequencer.waiting():
            self._rows.take(self._sequencer.pass_holes())
        await self._store(store)
        counters, index = self._sequencer.counters, self._index
        report.frames, report.events, report.blocks = counters.frames, counters.events, counters.blocks
        report.digest_mismatches = counters.digest_mismatches
        report.instances = len(self._sequencer.instances())
        report.residencies, report.claims = index.residency_count(), sum(index.claim_counts().values())
        report.anomalies = index.anomalies()
        report.suspect = [name for name in self._sequencer.instances() if is_suspect(index, name)]

    def _step_fence(self, record: FenceRecord) -> None:
        self._sequence += 1
        data = fence_data(record.fence.epoch, record.fence.run, record.fence.log)
        subject = fence_subject(record.cluster, record.instance)
        self._rows.take(self._sequencer.step(0.0, [StreamMessage(self._sequence, subject, data)]))

    async def _step(self, store: SqlStore, frames: list[Located]) -> None:
        """Apply frames of one instance as one message."""
        first = frames[0].found
        assert not isinstance(first, Damage)
        cluster = frames[0].group.rpartition(".")[2] if frames[0].place.sequence is not None else self._options.cluster
        self._sequence += 1
        data = b"".join(located.data for located in frames)
        message = StreamMessage(self._sequence, events_subject(cluster, first.instance), data)
        self._rows.take(self._sequencer.step(0.0, [message]))
        if self._rows.waiting_bytes >= _ROWS_BYTES:
            await self._store(store)

    async def _store(self, store: SqlStore) -> None:
        batch = self._rows.take_batch(self._sequencer.safe_mark(), self._sequencer.rows)
        if batch is not None and not await store.apply(batch):
            raise SourceError(f"{self.report.database} is written by somebody else; give a new database")

    def _note_damage(self, damaged: DamagedBytes) -> None:
        if damaged.damage.kind in NOTED:
            self.report.notes.append(damage_text(damaged))
        else:
            self.report.findings.append(damage_finding(damaged))

    # -- whose state it is --------------------------------------------------------------------------------------------

    async def _identity(self, store: SqlStore) -> _Identity:
        if self._connect is not None:
            stream = await self._connect()
            try:
                return await self._identity_of(store, stream)
            finally:
                await stream.close()
        position = None if self._options.archive is None else _archive_position(self._options.archive)
        if position is None or not position.created:
            return _Identity(REBUILT, self._sequence)
        state = StreamState(1, position.sequence, 0, -1, 0.0, position.created)
        return _Identity((await numbering(store, self._options.cluster, state)).name, position.sequence)

    async def _identity_of(self, store: SqlStore, stream: EventLog) -> _Identity:
        """The stream at its end, which the log must reach: what it is, and where it stands before its tails are looked
        at.
        """
        state = await stream.state(TIMEOUT_S)
        if self._options.is_own_stream:
            return _Identity((await numbering(store, self._options.cluster, state)).name, self._read_sequence)
        for name in self._sequencer.instances():
            row = self._sequencer.instance_row(name)
            tail = await stream.tail(row.cluster if row else self._options.cluster, name, TIMEOUT_S)
            here = self._sequencer.position(name)
            if tail is not None and tail.end > here:
                raise SourceError(
                    f"the stream has instance {name} up to {place_text(*tail.end)}, the log ends at "
                    f"{place_text(*here)}; "
                    "rebuild from its archive, or from the stream itself"
                )
        return _Identity((await numbering(store, self._options.cluster, state)).name, state.last_sequence)

    async def _write(self, store: SqlStore, identity: _Identity) -> None:
        report = self.report
        report.stream, report.sequence = identity
        if identity.stream != REBUILT and identity.sequence:
            batch = StoreBatch(stream=identity.stream, previous=0, stream_sequence=identity.sequence)
            await store.apply(batch)
        if self._options.checkpoint is None:
            return
        assert isinstance(self._index, Checkpointing)
        state = msgspec.structs.replace(self._sequencer.state(), sequence=identity.sequence, fingerprint=None)
        writing = Writing(self._options.checkpoint, self._index, state, identity.stream)
        writing.write()
        writing.finish(Mark(identity.sequence))


def _is_together(a: Located, b: Located) -> bool:
    """Whether two frames may be in one message."""
    one, other = a.found, b.found
    assert isinstance(one, ScannedFrame) and isinstance(other, ScannedFrame)
    return (one.instance, one.epoch, a.group) == (other.instance, other.epoch, b.group)


def _archive_position(folder: Path) -> ArchivePosition | None:
    """What an archive's POSITION holds; None when it has none that is good."""
    try:
        body, _, checksum = read_small(folder / "POSITION").rstrip(b"\n").rpartition(b"\n")
        return msgspec.json.decode(body, type=ArchivePosition) if checksum == b"%08x" % zlib.crc32(body) else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
