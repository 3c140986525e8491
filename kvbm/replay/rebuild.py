"""From the log, the state of a catalog: its SQL rows and a checkpoint of its index, by the projector that a catalog runs itself.

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
from urllib.parse import urlsplit

import msgspec

from kvbm.catalog.archive import ArchivePosition
from kvbm.catalog.checkpoints import Checkpointing, Writing
from kvbm.catalog.index import ClusterIndex, NewIndex, is_doubtful
from kvbm.catalog.sequencer import Projector
from kvbm.catalog.sql_store import Store, StoreBatch
from kvbm.catalog.sql_writer import numbering
from kvbm.core.backend import Kernels
from kvbm.core.codec import ScannedFrame
from kvbm.core.ids import InstanceId
from kvbm.replay.findings import Finding, damage_finding, damage_words
from kvbm.replay.format import counted, place_text
from kvbm.replay.order import Damaged
from kvbm.replay.prefetch import read_ahead
from kvbm.replay.progress import Watch
from kvbm.replay.scan import TORN, Damage
from kvbm.replay.serve import TIMEOUT_S, Connect
from kvbm.replay.source import Located, Source, SourceError, only
from kvbm.streams.base import (
    EventStream,
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
        doubtful: instances whose residencies may be wrong, because the log has holes; a catalog asks them for a round.
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
    doubtful: list[InstanceId] = []
    anomalies: dict[str, int] = {}
    findings: list[Finding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"rebuilt: {counted(self.instances, 'instance')}, {counted(self.residencies, 'residency').replace('residencys', 'residencies')}, "
            f"{counted(self.claims, 'claim')} from {counted(self.events, 'event')} in {counted(self.frames, 'frame')}"
        )
        where = (
            f"goes on after message {self.sequence:,} of {self.stream}"
            if self.stream != REBUILT
            else "belongs to no stream"
        )
        yield f"  rows in {self.database}, index in {self.checkpoint or 'no checkpoint'}; it {where}"
        if self.doubtful:
            yield f"  in doubt, because of holes or wrong digests: {', '.join(self.doubtful)}"


class _Identity(NamedTuple):
    """Which stream the state belongs to, and how far it goes there."""

    stream: str
    sequence: int


def rebuild(
    source: Source,
    database: str,
    checkpoint: Path | None,
    cluster: str,
    kernels: Kernels,
    new_index: NewIndex,
    capacity: int,
    connect: Connect | None = None,
    instance: str | None = None,
    archive: Path | None = None,
    is_own_stream: bool = False,
) -> Rebuilt:
    """Make a catalog's state from a source.

    Args:
        database: URL of one without rows.
        cluster: the one the catalog follows, and that of the instances for sources that do not say.
        new_index: one that writes checkpoints, unless there is to be none.
        connect: gives the stream a catalog is to go on with.
        archive: the folder of the source, if it is an archive.
        is_own_stream: `connect` gives the very stream that the source is.
    Raises: SourceError: the database is in use, or the stream has more than the log. CatalogError, StreamError.
    """
    return asyncio.run(
        _Rebuild(
            source,
            database,
            checkpoint,
            cluster,
            kernels,
            new_index,
            capacity,
            connect,
            instance,
            archive,
            is_own_stream,
        ).run()
    )


class _Rebuild:
    def __init__(
        self, source: Source, database: str, checkpoint: Path | None, cluster: str, kernels: Kernels, new_index: NewIndex,
        capacity: int, connect: Connect | None, instance: str | None, archive: Path | None, is_own_stream: bool,
    ) -> None:  # fmt: skip
        self._is_own_stream = is_own_stream
        self._source, self._database, self._checkpoint = source, database, checkpoint
        self._cluster, self._kernels, self._connect = cluster, kernels, connect
        self._instance, self._archive = instance, archive
        self._index: ClusterIndex = new_index(capacity)
        if checkpoint is not None and not isinstance(self._index, Checkpointing):
            raise SourceError(
                "the Python specification of the index writes no checkpoint; leave --checkpoint or --reference out"
            )
        self._projector = Projector(self._index, kernels.scan_frames, REBUILT)
        self.report = Rebuilt(
            source=source.name, database=_shown(database), checkpoint="" if checkpoint is None else str(checkpoint)
        )
        self._sequence = 0  # of the messages that are projected here
        self._read_sequence = 0  # of the last message read, where the source is a stream

    async def run(self) -> Rebuilt:
        store = await Store.open(self._database)
        try:
            if await store.instances() or await store.namespaces():
                raise SourceError(f"{self.report.database} has rows already; give a new database")
            await self._project(store)
            identity = await self._identity(store)
            await self._write(store, identity)
        finally:
            await store.close()
        return self.report

    # -- the log → index and rows -------------------------------------------------------------------------------------

    async def _project(self, store: Store) -> None:
        source, report, read = self._source, self.report, self._source.read(self._kernels)
        waiting: list[Located] = []
        size = 0
        with Watch(source.name) as watch:
            async for batch in read_ahead(only(read, self._instance)):
                for located in batch:
                    found = located.found
                    watch.total, watch.done = source.total, source.done
                    if isinstance(found, Damage):
                        self._note_damage(Damaged(located, found))
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
        if not self._projector.instances():
            raise SourceError(
                f"{source.name} has no frame of {self._instance or 'any instance'}; kvbm-replay stat lists the instances"
            )
        if self._projector.waiting():
            self._projector.pass_holes()
        await self._store(store)
        counters, index = self._projector.counters, self._index
        report.frames, report.events, report.blocks = counters.frames, counters.events, counters.blocks
        report.digest_mismatches = counters.digest_mismatches
        report.instances = len(self._projector.instances())
        report.residencies, report.claims = index.residency_count(), sum(index.claim_counts().values())
        report.anomalies = index.anomalies()
        report.doubtful = [name for name in self._projector.instances() if is_doubtful(index, name)]

    def _step_fence(self, record: FenceRecord) -> None:
        self._sequence += 1
        data = fence_data(record.fence.epoch, record.fence.run, record.fence.log)
        subject = fence_subject(record.cluster, record.instance)
        self._projector.step(0.0, [StreamMessage(self._sequence, subject, data)])

    async def _step(self, store: Store, frames: list[Located]) -> None:
        """Project frames of one instance as one message."""
        first = frames[0].found
        assert not isinstance(first, Damage)
        cluster = frames[0].group.rpartition(".")[2] if frames[0].place.sequence is not None else self._cluster
        self._sequence += 1
        data = b"".join(located.data for located in frames)
        self._projector.step(0.0, [StreamMessage(self._sequence, events_subject(cluster, first.instance), data)])
        if self._projector.waiting_bytes >= _ROWS_BYTES:
            await self._store(store)

    async def _store(self, store: Store) -> None:
        batch = self._projector.take_batch()
        if batch is not None and not await store.apply(batch):
            raise SourceError(f"{self.report.database} is written by somebody else; give a new database")

    def _note_damage(self, damaged: Damaged) -> None:
        if damaged.damage.kind == TORN:
            self.report.notes.append(damage_words(damaged))
        else:
            self.report.findings.append(damage_finding(damaged))

    # -- whose state it is --------------------------------------------------------------------------------------------

    async def _identity(self, store: Store) -> _Identity:
        if self._connect is not None:
            stream = await self._connect()
            try:
                return await self._identity_of(store, stream)
            finally:
                await stream.close()
        position = None if self._archive is None else _archive_position(self._archive)
        if position is None or not position.created:
            return _Identity(REBUILT, self._sequence)
        state = StreamState(1, position.sequence, 0, -1, 0.0, position.created)
        return _Identity((await numbering(store, self._cluster, state)).name, position.sequence)

    async def _identity_of(self, store: Store, stream: EventStream) -> _Identity:
        """The stream at its end, which the log must reach: what it is, and where it stands before its tails are looked at."""
        state = await stream.state(TIMEOUT_S)
        if self._is_own_stream:
            return _Identity((await numbering(store, self._cluster, state)).name, self._read_sequence)
        for name in self._projector.instances():
            row = self._projector.instance_row(name)
            tail = await stream.tail(row.cluster if row else self._cluster, name, TIMEOUT_S)
            here = self._projector.position(name)
            if tail is not None and tail.end > here:
                raise SourceError(
                    f"the stream has instance {name} up to {place_text(*tail.end)}, the log ends at {place_text(*here)}; "
                    "rebuild from its archive, or from the stream itself"
                )
        return _Identity((await numbering(store, self._cluster, state)).name, state.last_sequence)

    async def _write(self, store: Store, identity: _Identity) -> None:
        report = self.report
        report.stream, report.sequence = identity
        if identity.stream != REBUILT and identity.sequence:
            batch = StoreBatch(stream=identity.stream, previous=0, stream_sequence=identity.sequence)
            await store.apply(batch)
        if self._checkpoint is None:
            return
        assert isinstance(self._index, Checkpointing)
        state = msgspec.structs.replace(self._projector.state(), sequence=identity.sequence, fingerprint=None)
        writing = Writing(self._checkpoint, self._index, state, identity.stream)
        writing.write()
        writing.finish(Mark(identity.sequence))


def _is_together(a: Located, b: Located) -> bool:
    """Whether two frames may be in one message."""
    one, other = a.found, b.found
    assert isinstance(one, ScannedFrame) and isinstance(other, ScannedFrame)
    return (one.instance, one.epoch, a.group) == (other.instance, other.epoch, b.group)


def _archive_position(folder: Path) -> ArchivePosition | None:
    """What an archive's POSITION says; None when it has none that is good."""
    try:
        body, _, checksum = (folder / "POSITION").read_bytes().rstrip(b"\n").rpartition(b"\n")
        return msgspec.json.decode(body, type=ArchivePosition) if checksum == b"%08x" % zlib.crc32(body) else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _shown(database: str) -> str:
    """A database's URL without its password."""
    parts = urlsplit(database)
    return database.replace(f":{parts.password}@", ":***@") if parts.password else database
