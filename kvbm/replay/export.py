"""Events as Parquet: one row an event, or one row a block, for whoever asks a warehouse.

Frames become columns natively and columns become Arrow arrays as they are; no event is an object on the way. At most
`_BATCH_BYTES` of frames are in memory at once.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.columns import NO_CODE, NO_ROW, NO_SLOT, FrameColumns
from kvbm.core.errors import MissingExtraError
from kvbm.core.events import EvictReason, MigrateCause, StopReason
from kvbm.core.ids import HASH_BYTES, Tier
from kvbm.files import make_folder, write_new
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.format import counted
from kvbm.replay.order import Conflict, Missing, Next, Repeat, WentBack, in_order
from kvbm.replay.source import FrameSource, Located, SourceError, only

DecodeColumns = Callable[[bytes], tuple[FrameColumns, int]]

PARQUET_SUFFIX = ".parquet"
_BATCH_BYTES = 8 << 20
_PART_ROWS = 20_000_000  # of a file in a folder
_KINDS = (
    "",
    "InstanceStarted",
    "BlocksCreated",
    "BlocksMigrated",
    "BlocksEvicted",
    "ResidenciesListed",
    "SnapshotEnded",
    "InstanceStopped",
    "UsageRecorded",
)
_CREATED, _MIGRATED, _EVICTED, _LISTED, _ENDED, _STOPPED, _USAGE = range(2, 9)
_TIERS = tuple(tier.name for tier in Tier)
_CAUSES = tuple(cause.name.lower() for cause in MigrateCause)
_EVICT_REASONS = tuple(reason.name.lower() for reason in EvictReason)
_REASONS = (
    *_EVICT_REASONS,
    *(reason.name.lower() for reason in StopReason if reason.name.lower() not in _EVICT_REASONS),
)
_STOP_CODES = np.array([_REASONS.index(reason.name.lower()) for reason in StopReason], dtype=np.uint8)


class Exported(msgspec.Struct, kw_only=True):
    """What was written.

    Attributes:
        rows: of all files. blocks: each once for each event that names it. bytes: of the files.
    """

    source: str
    files: list[str] = []
    rows: int = 0
    events: int = 0
    blocks: int = 0
    bytes: int = 0
    findings: list[ReplayFinding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        where = self.files[0] if len(self.files) == 1 else counted(len(self.files), "file")
        yield (
            f"exported: {counted(self.events, 'event')} with {counted(self.blocks, 'block')} as "
            f"{counted(self.rows, 'row')}, "
            f"{counted(self.bytes, 'byte')} in {where}"
        )


def export(
    source: FrameSource,
    target: Path,
    backend: Backend,
    decode: DecodeColumns,
    instance: str | None = None,
    by_block: bool = False,
    located: Iterable[Located] | None = None,
) -> Exported:
    """Write the events of a source, each once, in the order of each instance's offsets.

    Args:
        target: a new *.parquet file, or a folder, new or empty, for files of about 20 million rows.
        decode: takes whole frames apart, as `core.columns.decode_columns`.
        instance: only this one.
        by_block: a row a block; events without blocks are then left out.
        located: what was read from the source, where somebody watches it pass.
    Raises: SourceError: the target is there already or cannot be written. MissingExtraError.
    """
    report = Exported(source=source.name)
    left_out: dict[type, int] = {}
    read = source.read(backend) if located is None else located
    with _Writer(target, by_block, report) as writer:
        batch: list[bytes] = []
        size = 0
        for _, step in undamaged(in_order(only(read, instance), source.is_trimmed), report.notes, report.findings):
            if not isinstance(step, Next):
                left_out[type(step)] = left_out.get(type(step), 0) + 1
                continue
            batch.append(step.located.data)
            size += len(step.located.data)
            if size >= _BATCH_BYTES:
                writer.write(decode(b"".join(batch))[0])
                batch, size = [], 0
        if batch:
            writer.write(decode(b"".join(batch))[0])
    words = {
        Repeat: "repeats",
        Missing: "holes",
        Conflict: "frames that contradict earlier ones",
        WentBack: "stale frames",
    }
    for kind, what in words.items():
        if count := left_out.get(kind):
            report.notes.append(f"{count:,} {what} are not in the export; kvbm-replay verify names defects")
    return report


class _Writer:
    """Writes tables into one file, or into one after another in a folder. What an error leaves behind is removed."""

    def __init__(self, target: Path, by_block: bool, report: Exported) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("the Parquet library (pyarrow)", "parquet") from None
        self._arrow: Any = pyarrow
        self._tables = _BlockTables(pyarrow) if by_block else _EventTables(pyarrow)
        self._report = report
        self._target = target
        self._is_file = target.suffix == PARQUET_SUFFIX
        self._writer: Any = None
        self._part = Path()
        self._part_rows = 0
        self._written: list[Path] = []
        if target.is_dir() and (self._is_file or any(target.iterdir())):
            raise SourceError(
                f"{target} is a folder{'' if self._is_file else ' with files in it'}; give a new one, or a new file"
            )
        if self._is_file and target.exists():
            raise SourceError(f"{target} is there already; give another name or remove it")
        self._guard(lambda: target.parent.mkdir(exist_ok=True) if self._is_file else make_folder(target))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self._report.rows and self._writer is None:
                self._begin_part()
            self._end_part()
            return
        if self._writer is not None:
            self._writer.close()
        for path in (self._part, *self._written):
            if path.is_file():
                path.unlink()

    def write(self, columns: FrameColumns) -> None:
        """The events of some frames. Raises SourceError."""
        table = self._tables.table(columns)
        if self._writer is not None and self._part_rows >= _PART_ROWS and not self._is_file:
            self._end_part()
        if self._writer is None:
            self._begin_part()
        self._guard(lambda: self._writer.write_table(table, row_group_size=max(1, table.num_rows)))
        self._part_rows += table.num_rows
        self._report.rows += table.num_rows
        self._report.events += len(columns.events)
        self._report.blocks += len(columns.hashes)

    def _begin_part(self) -> None:
        name = self._target.name if self._is_file else f"part-{len(self._written):05d}{PARQUET_SUFFIX}"
        folder = self._target.parent if self._is_file else self._target
        self._part = folder / f".{name}.part"  # a reader of the folder never sees half a file
        self._part_rows = 0
        self._guard(lambda: write_new(self._part, b""))  # pyarrow opens it as it is: its owner's alone
        self._writer = self._guard(
            lambda: self._arrow.parquet.ParquetWriter(
                self._part,
                self._tables.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=self._tables.dictionaries,
                write_statistics=self._tables.statistics,
            )
        )

    def _end_part(self) -> None:
        def end() -> Path:
            self._writer.close()
            whole = self._part.with_name(self._part.name.removeprefix(".").removesuffix(".part"))
            os.replace(self._part, whole)
            return whole

        whole = self._guard(end)
        self._writer = None
        self._written.append(whole)
        self._report.files.append(str(whole))
        self._report.bytes += whole.stat().st_size

    def _guard(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            raise SourceError(f"{self._target} cannot be written ({error.strerror or error})") from None


class _Tables(ABC):
    """Columns of frames → an Arrow table; the columns events and blocks have in common."""

    dictionaries: Any = ("instance", "event", "tier", "source", "target", "reason", "cause", "namespace", "parent")
    statistics: Any = ("instance", "epoch", "offset", "wall_time_ns", "event", "tier", "reason", "cause", "namespace")

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow
        words = arrow.dictionary(arrow.int32(), arrow.string())
        block = arrow.binary(HASH_BYTES)
        self._hash = block
        self.schema = arrow.schema(
            [
                arrow.field("instance", words, nullable=False),
                arrow.field("epoch", arrow.uint64(), nullable=False),
                arrow.field("offset", arrow.uint64(), nullable=False),
                arrow.field("wall_time_ns", arrow.uint64(), nullable=False),
                arrow.field("event", words, nullable=False),
                arrow.field("tier", words),
                arrow.field("source", words),
                arrow.field("target", words),
                arrow.field("reason", words),
                arrow.field("cause", words),
                arrow.field("kept", arrow.bool_()),
                arrow.field("namespace", block),
                arrow.field("parent", block),
                arrow.field("start", arrow.uint32()),
                arrow.field("snapshot", arrow.uint32()),
                *self._last_fields(),
            ]
        )

    @abstractmethod
    def table(self, columns: FrameColumns) -> Any:
        """The table of some frames."""

    @abstractmethod
    def _last_fields(self) -> list[Any]:
        """The columns that the shapes differ in."""

    def _common(self, columns: FrameColumns, events: np.ndarray) -> list[Any]:
        """The columns of the schema up to `snapshot`, for these events."""
        arrow = self._arrow
        frames = columns.frames[events["frame"]]
        kinds, codes = events["kind"], events["code"]
        migrated = kinds == _MIGRATED
        has_run = np.isin(kinds, (_CREATED, _MIGRATED, _EVICTED, _LISTED))
        names = len(columns.names)
        # a source is a tier or an instance: tiers come behind the names
        sources = np.where(events["source"] == NO_CODE, events["other"], names + events["source"].astype(np.uint32))
        reasons = np.where(kinds == _STOPPED, _STOP_CODES[np.where(kinds == _STOPPED, codes, 0)], codes)
        created = kinds == _CREATED
        parents = created & events["parent"].any(axis=1)
        return [
            self._words(frames["instance"], columns.names),
            arrow.array(frames["epoch"]),
            arrow.array(events["offset"]),
            arrow.array(frames["wall_time_ns"]),
            self._words(kinds, _KINDS),
            self._words(events["tier"], _TIERS, events["tier"] != NO_CODE),
            self._words(sources, (*columns.names, *_TIERS), migrated),
            self._words(events["tier"], _TIERS, migrated),
            self._words(reasons, _REASONS, (kinds == _EVICTED) | (kinds == _STOPPED)),
            self._words(codes, _CAUSES, migrated),
            arrow.array(events["kept"].astype(bool), mask=~migrated),
            self._hashes(
                columns.namespaces[np.where(has_run, events["namespace"], 0)]
                if len(columns.namespaces)
                else np.zeros((len(events), HASH_BYTES), dtype=np.uint8),
                has_run,
            ),
            self._hashes(events["parent"], parents),
            arrow.array(events["start"], mask=~created),
            arrow.array(events["snapshot"], mask=~np.isin(kinds, (_LISTED, _ENDED))),
        ]

    def _words(self, codes: np.ndarray, words: Iterable[str], there: np.ndarray | None = None) -> Any:
        indices = codes.astype(np.int32)
        if there is not None:
            indices = np.where(there, indices, 0)
        mask = None if there is None else ~there
        arrow = self._arrow
        return arrow.DictionaryArray.from_arrays(
            arrow.array(indices, mask=mask), arrow.array(list(words), arrow.string())
        )

    def _hashes(self, rows: np.ndarray, there: np.ndarray | None = None) -> Any:
        arrow = self._arrow
        valid = None if there is None else arrow.py_buffer(np.packbits(there, bitorder="little").tobytes())
        data = arrow.py_buffer(np.ascontiguousarray(rows))
        return arrow.FixedSizeBinaryArray.from_buffers(self._hash, len(rows), [valid, data])


class _EventTables(_Tables):
    """One row an event."""

    statistics: Any = (*_Tables.statistics, "count")

    def table(self, columns: FrameColumns) -> Any:
        arrow, events = self._arrow, columns.events
        counts = np.where(events["kind"] == _ENDED, 0, events["count"]).astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        blocks = arrow.ListArray.from_arrays(arrow.array(ends), self._hashes(columns.hashes))
        has_slots = np.repeat(events["has_slots"] != 0, counts)
        slots = arrow.ListArray.from_arrays(arrow.array(ends), arrow.array(columns.slots, mask=~has_slots))
        counted = ~np.isin(events["kind"], (1, _STOPPED, _USAGE))
        last = [arrow.array(events["count"], mask=~counted), blocks, slots]
        return arrow.Table.from_arrays([*self._common(columns, events), *last], schema=self.schema)

    def _last_fields(self) -> list[Any]:
        arrow = self._arrow
        return [
            arrow.field("count", arrow.uint32()),
            arrow.field("blocks", arrow.list_(self._hash)),
            arrow.field("slots", arrow.list_(arrow.uint32())),
        ]


class _BlockTables(_Tables):
    """One row a block of an event; the position in its chain is known where it was created."""

    def table(self, columns: FrameColumns) -> Any:
        arrow, events = self._arrow, columns.events
        counts = np.where(events["kind"] == _ENDED, 0, events["count"]).astype(np.int64)
        rows = np.repeat(np.arange(len(events)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        repeated = events[rows]
        created = repeated["kind"] == _CREATED
        position = (repeated["start"] + within).astype(np.uint32)
        last = [
            self._hashes(columns.hashes),
            arrow.array(columns.slots, mask=columns.slots == NO_SLOT),
            arrow.array(position, mask=~created),
        ]
        return arrow.Table.from_arrays([*self._common(columns, repeated), *last], schema=self.schema)

    def _last_fields(self) -> list[Any]:
        arrow = self._arrow
        return [
            arrow.field("block", self._hash, nullable=False),
            arrow.field("slot", arrow.uint32()),
            arrow.field("position", arrow.uint32()),
        ]


assert NO_ROW  # rows that are not there are masked
