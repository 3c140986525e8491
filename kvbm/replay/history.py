"""History files: the stays of a source as Parquet, in the order of their blocks, so that any moment and the life of any
block is a question of SQL. `sql.py` asks them.

A folder has history.json, which says what all of it is of and names a folder beside it, `data-…`, with

    residencies-00000.parquet …   one row a stay of a block in a tier, by block and time; claims on the cluster's pools
    instances.parquet             one row an epoch of an instance
    namespaces.parquet            one row a namespace
    holes.parquet                 one row a hole in the log

A newer history is written beside an older one and takes its place in one step; who reads the older one goes on with it,
for it is removed only by the one after the next.

Rows are spilled to files by the first byte of their block, each of which is then sorted by itself: memory is bounded by
the largest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.columns import NO_CODE, NO_ROW, NO_SLOT
from kvbm.core.errors import MissingExtraError
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Tier
from kvbm.core.stays import BEGINS, CLAIMED, ENDS, LASTING, STAY_ROW, NewStayFold
from kvbm.files import alone, make_folder, replace_file, write_new
from kvbm.replay.findings import ReplayFinding
from kvbm.replay.format import counted, time_text
from kvbm.replay.source import FrameSource, Located, SourceError
from kvbm.replay.stays import EventHole, Incarnation, SourceStays, StayRows

VERSION = 1
MANIFEST = "history.json"
RESIDENCIES = "residencies"
_DATA = "data-"
_FILE_ROWS = 4 << 20  # of a Parquet file, or one spill more
_GROUP_ROWS = 16 << 10  # of a row group, which is what a question for one block reads
_MANY_WORDS = 64  # of a dictionary, which each row group has anew: from here on only those it uses
_INT64 = (1 << 63) - 1
_TIERS = tuple(tier.name for tier in Tier)
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint8).reshape(256, 2)
_Result = TypeVar("_Result")


class HistoryManifest(msgspec.Struct, kw_only=True):
    """What was written.

    Attributes:
        source: as the user gave it.
        version: of the files.
        data: the folder they are in, below the one given. before: that of the history this one has taken the place of.
        until: the latest time in it, ISO 8601; "" where there is none.
        stays: rows of residencies, those that last and claims among them. lasting: of those.
        bytes: of the files.
    """

    source: str
    version: int = VERSION
    data: str = ""
    before: str = ""
    until: str = ""
    stays: int = 0
    lasting: int = 0
    instances: int = 0
    namespaces: int = 0
    holes: int = 0
    bytes: int = 0
    findings: list[ReplayFinding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"history: {counted(self.stays, 'stay')} of blocks, {self.lasting:,} of which last, in "
            f"{counted(self.instances, 'epoch')} of instances, {counted(self.holes, 'hole')}, "
            f"{counted(self.bytes, 'byte')}; up to {self.until or 'nothing'}"
        )


def write_history(
    source: FrameSource,
    folder: Path,
    backend: Backend,
    new_fold: NewStayFold,
    instance: str | None = None,
    located: Iterable[Located] | None = None,
) -> HistoryManifest:
    """Make the history of a source.

    Args:
        folder: a new or empty one, or one with an older history.
        instance: only this one.
        located: what was read from the source, where somebody watches it pass.
    Raises: SourceError: the folder is of something else, or cannot be written; nothing of the instance is there.
        MissingExtraError.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("the Parquet library (pyarrow)", "parquet") from None
    guarded = _Guard(folder)
    guarded(lambda: _check_ours(folder))
    is_new = not folder.exists()
    guarded(lambda: make_folder(folder))
    data = Path(guarded(lambda: tempfile.mkdtemp(prefix=_DATA, dir=folder)))
    is_done = False
    try:
        history = _Writer(pyarrow, data, guarded).write(source, backend, new_fold, instance, located)
        if instance is not None and not history.instances:
            raise SourceError(f"no frame of instance {instance!r} is there; kvbm-replay stat lists the instances")
        history.data = data.name
        guarded(lambda: _take_place(folder, history))
        is_done = True
    finally:
        if not is_done:
            shutil.rmtree(data, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
    return history


def read_manifest(folder: Path) -> HistoryManifest:
    """What a folder's history is of. Raises SourceError: there is none, or of a newer version."""
    try:
        data = (folder / MANIFEST).read_bytes()
        version = msgspec.json.decode(data, type=_Version).version
        if version > VERSION:
            raise SourceError(f"{folder} was made by a newer kvbm (history {version}, not {VERSION}); make it anew")
        found = msgspec.json.decode(data, type=HistoryManifest)
        if Path(found.data).name != found.data or not found.data.startswith(_DATA):
            raise SourceError(f"{folder / MANIFEST} names no folder of a history; make the history anew")
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{folder} has no history: make one with kvbm-replay history SOURCE {folder}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise SourceError(f"{folder / MANIFEST} cannot be read ({error}); make the history anew") from None


class _Version(msgspec.Struct):
    version: int


class _Guard:
    """Says of an error of the file system which folder it is about."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except OSError as error:
            raise SourceError(f"{self._folder} cannot be written ({error.strerror or error})") from None


class _Writer:
    """Writes all files of a history but its manifest."""

    def __init__(self, arrow: Any, folder: Path, guarded: _Guard) -> None:
        self._arrow, self._folder, self._guarded = arrow, folder, guarded
        self._tables = _Tables(arrow)
        self._went_back = 0

    def write(
        self,
        source: FrameSource,
        backend: Backend,
        new_fold: NewStayFold,
        instance: str | None,
        located: Iterable[Located] | None,
    ) -> HistoryManifest:
        stays = SourceStays(source, backend, new_fold)
        history = HistoryManifest(source=source.name)
        lives: dict[tuple[InstanceId, str, int], int] = {}
        spills = _Spills(self._folder)
        try:
            for rows in stays.rows(instance, located):
                number = lives.setdefault((rows.instance, rows.group, rows.life), len(lives))
                self._guarded(lambda rows=rows, number=number: spills.add(rows, number))  # type: ignore[misc]
            self._guarded(lambda: self._write_residencies(spills, stays, list(lives), history))
        finally:
            spills.close()
        for name, table in (
            ("instances", self._tables.instances(stays.incarnations)),
            ("namespaces", self._tables.namespaces(list(stays.namespaces), stays.fields)),
            ("holes", self._tables.holes(stays.holes)),
        ):
            self._guarded(lambda name=name, table=table: self._write_table(name, table))  # type: ignore[misc]
        history.until = time_text(stays.last_ns) if stays.last_ns else ""
        history.instances, history.namespaces = len(stays.incarnations), len(stays.namespaces)
        history.holes = len(stays.holes)
        if went_back := self._went_back:
            stays.notes.append(
                f"{counted(went_back, 'stay')} ended before they began by their instance's clock, so no moment has them"
            )
        history.notes, history.findings = stays.notes, stays.findings
        history.bytes = sum(path.stat().st_size for path in self._folder.iterdir())
        return history

    def _write_residencies(
        self, spills: _Spills, stays: SourceStays, lives: Sequence[_Life], history: HistoryManifest
    ) -> None:
        words = _Words(lives, list(stays.namespaces), list(stays.names))
        parquet = self._arrow.parquet
        with ExitStack() as open_file:
            writer: Any = None
            files = rows = 0
            for spilled in _joined(spills.sorted()):
                if writer is None or rows >= _FILE_ROWS:
                    open_file.close()
                    path = self._folder / f"{RESIDENCIES}-{files:05d}.parquet"
                    write_new(path, b"")  # its owner's alone
                    writer = open_file.enter_context(
                        parquet.ParquetWriter(
                            path,
                            self._tables.stays_schema,
                            compression="zstd",
                            compression_level=1,
                            use_dictionary=_DICTIONARIES,
                        )
                    )
                    files, rows = files + 1, 0
                for begin in range(0, len(spilled), _GROUP_ROWS):
                    writer.write_table(self._tables.stays(spilled[begin : begin + _GROUP_ROWS], words))
                rows += len(spilled)
                stay = spilled["stay"]
                lasts = stay["end"] == LASTING
                history.stays += len(spilled)
                history.lasting += int(lasts.sum())
                self._went_back += int((~lasts & (stay["end_ns"] < stay["begin_ns"])).sum())
            if writer is None:
                self._write_table(f"{RESIDENCIES}-00000", self._tables.stays(np.empty(0, dtype=_SPILLED), words))

    def _write_table(self, name: str, table: Any) -> None:
        path = self._folder / f"{name}.parquet"
        write_new(path, b"")
        self._arrow.parquet.write_table(table, path, compression="zstd")


_Life = tuple[InstanceId, str, int]
_SPILLED = np.dtype([("stay", STAY_ROW), ("life", "<u4")])
_DICTIONARIES = ["instance", "stream", "namespace", "tier", "kind", "begin", "source", "end", "target"]


class _Spills:
    """Rows in files by the first byte of their block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def add(self, rows: StayRows, life: int) -> None:
        """Append stays of a life of an instance. Raises OSError."""
        if not len(rows.stays):
            return
        spilled = np.empty(len(rows.stays), dtype=_SPILLED)
        spilled["stay"], spilled["life"] = rows.stays, life
        first = rows.stays["hash"][:, 0]
        order = np.argsort(first, kind="stable")
        bytes_there, begins = np.unique(first[order], return_index=True)
        for byte, begin, end in zip(bytes_there, begins, [*begins[1:], len(order)], strict=True):
            self._file(int(byte)).write(spilled[order[begin:end]].tobytes())

    def sorted(self) -> Iterator[np.ndarray]:
        """The rows of one file after the other, each by block, then by begin. Raises OSError."""
        for byte in sorted(self._files):
            file = self._files.pop(byte)
            file.flush()
            path = Path(file.name)
            rows = np.fromfile(path, dtype=_SPILLED)
            file.close()
            path.unlink()
            blocks = np.ascontiguousarray(rows["stay"]["hash"]).view(">u8").reshape(-1, 2)
            stay = rows["stay"]
            keys = (stay["begin_offset"], stay["epoch"], stay["begin_ns"], blocks[:, 1], blocks[:, 0])
            yield rows[np.lexsort(keys)]

    def close(self) -> None:
        """Remove what is left."""
        for file in self._files.values():
            with suppress(OSError):  # a full device: what is not written yet is not wanted any more
                file.close()
            Path(file.name).unlink(missing_ok=True)
        self._files.clear()

    def _file(self, byte: int) -> BinaryIO:
        file = self._files.get(byte)
        if file is None:
            path = self._folder / f".spill-{byte:02x}"
            write_new(path, b"")
            file = self._files[byte] = path.open("ab")
        return file


def _joined(spills: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same rows in fewer pieces: a row group has its own dictionaries, so it should not be small."""
    held: list[np.ndarray] = []
    for spilled in spills:
        held.append(spilled)
        if sum(map(len, held)) >= _GROUP_ROWS:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


class _Words:
    """What numbers in rows stand for."""

    def __init__(self, lives: Sequence[_Life], namespaces: list[NamespaceId], names: list[InstanceId]) -> None:
        self.instances = [str(name) for name, _, _ in lives]
        self.streams = [stream for _, stream, _ in lives]
        self.lives = np.array([life for _, _, life in lives] or [0], dtype=np.uint32)
        self.namespaces = [one.hex() for one in namespaces]
        self.sources = [*_TIERS, *(str(name) for name in names)]


class _Tables:
    """Rows → Arrow tables."""

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow
        words, time = arrow.dictionary(arrow.int32(), arrow.string()), arrow.timestamp("us")
        self._time = time
        self.stays_schema = arrow.schema(
            [
                arrow.field("block", arrow.string(), nullable=False),
                arrow.field("instance", words, nullable=False),
                arrow.field("stream", words, nullable=False),
                arrow.field("life", arrow.uint32(), nullable=False),
                arrow.field("epoch", arrow.uint64(), nullable=False),
                arrow.field("tier", words, nullable=False),
                arrow.field("kind", words, nullable=False),
                arrow.field("began", time, nullable=False),
                arrow.field("begin", words),
                arrow.field("source", words),
                arrow.field("ended", time),
                arrow.field("end", words),
                arrow.field("target", words),
                arrow.field("namespace", words, nullable=False),
                arrow.field("position", arrow.uint32()),
                arrow.field("slot", arrow.uint32()),
                arrow.field("begin_offset", arrow.uint64(), nullable=False),
                arrow.field("end_epoch", arrow.uint64()),
                arrow.field("end_offset", arrow.uint64()),
            ]
        )

    def stays(self, rows: np.ndarray, words: _Words) -> Any:
        """Of residencies and claims."""
        arrow, stay = self._arrow, rows["stay"]
        lasts, is_end = stay["end"] == LASTING, stay["begin"] == NO_CODE
        is_claim = stay["end"] == CLAIMED
        kinds = np.where(is_end, 2, np.where(is_claim, 1, 0))
        from_tier = stay["source"] != NO_CODE
        sources = np.where(from_tier, stay["source"], len(_TIERS) + stay["from"].astype(np.int64))
        has_source = from_tier | (stay["from"] != NO_ROW)
        columns = [
            self._hex(stay["hash"]),
            self._words(rows["life"], words.instances),
            self._words(rows["life"], words.streams),
            arrow.array(words.lives[rows["life"]]),
            arrow.array(stay["epoch"]),
            self._words(stay["tier"], _TIERS),
            self._words(kinds, ("residency", "claim", "claim_end")),
            self._times(stay["begin_ns"]),
            self._words(stay["begin"], BEGINS, ~is_end),
            self._words(sources, words.sources, has_source),
            self._times(stay["end_ns"], ~lasts & ~is_claim),
            self._words(stay["end"], ENDS, ~lasts & ~is_claim),
            self._words(stay["target"], _TIERS, stay["target"] != NO_CODE),
            self._words(stay["namespace"], words.namespaces),
            arrow.array(stay["position"], mask=stay["position"] == NO_ROW),
            arrow.array(stay["slot"], mask=stay["slot"] == NO_SLOT),
            arrow.array(stay["begin_offset"]),
            arrow.array(stay["end_epoch"], mask=lasts | is_claim),
            arrow.array(stay["end_offset"], mask=lasts | is_claim),
        ]
        return arrow.Table.from_arrays(columns, schema=self.stays_schema)

    def instances(self, rows: Sequence[Incarnation]) -> Any:
        """Of epochs."""
        arrow = self._arrow
        text, number, time = arrow.string(), arrow.uint64(), self._time
        size = arrow.int64()
        pool = arrow.struct([("tier", text), ("slots", size), ("block_bytes", size), ("name", text)])
        return self._listed(
            rows,
            [
                ("instance", text, lambda one: str(one.instance)),
                ("stream", text, lambda one: one.group),
                ("life", arrow.uint32(), lambda one: one.life),
                ("epoch", number, lambda one: one.epoch),
                ("began", time, lambda one: one.began_ns // 1000),
                ("last_frame", time, lambda one: one.ended_ns // 1000),
                ("stopped", text, lambda one: one.stopped or None),
                ("engine", text, lambda one: one.engine),
                ("version", text, lambda one: one.version),
                ("topology", arrow.list_(text), lambda one: list(one.topology)),
                ("pools", arrow.list_(pool), lambda one: [_pool_row(pool) for pool in one.pools]),
            ],
        )

    def namespaces(self, ids: Sequence[NamespaceId], fields: dict[NamespaceId, Namespace]) -> Any:
        """Of namespaces; fields that no start has told are null."""
        arrow = self._arrow
        text = arrow.string()
        columns: list[tuple[str, Any, Callable[[NamespaceId], object]]] = [("namespace", text, lambda one: one.hex())]
        for name in Namespace.__struct_fields__:
            kind = text if Namespace.__annotations__[name] == "str" else arrow.int64()
            columns.append((name, kind, partial(_field_of, fields, name)))
        return self._listed(ids, columns)

    def holes(self, rows: Sequence[EventHole]) -> Any:
        """Of holes."""
        text, number, time = self._arrow.string(), self._arrow.uint64(), self._time
        return self._listed(
            rows,
            [
                ("instance", text, lambda one: str(one.instance)),
                ("epoch", number, lambda one: one.epoch),
                ("first_offset", number, lambda one: one.first),
                ("next_offset", number, lambda one: one.next),
                ("since", time, lambda one: one.since_ns // 1000 or None),
                ("until", time, lambda one: one.until_ns // 1000),
                ("stream", text, lambda one: one.group),
            ],
        )

    def _listed(self, rows: Sequence[Any], columns: Sequence[tuple[str, Any, Callable[[Any], object]]]) -> Any:
        arrow = self._arrow
        return arrow.table({name: arrow.array([get(row) for row in rows], kind) for name, kind, get in columns})

    def _words(self, codes: np.ndarray, words: Sequence[str], there: np.ndarray | None = None) -> Any:
        arrow = self._arrow
        indices = codes.astype(np.int32) if there is None else np.where(there, codes, 0).astype(np.int32)
        mask = None if there is None else ~there
        if len(words) >= _MANY_WORDS:
            used, places = np.unique(indices, return_inverse=True)
            words, indices = [words[at] for at in used], places.astype(np.int32)
        return arrow.DictionaryArray.from_arrays(
            arrow.array(indices, mask=mask), arrow.array(list(words), arrow.string())
        )

    def _times(self, wall_time_ns: np.ndarray, there: np.ndarray | None = None) -> Any:
        arrow = self._arrow
        micros = (wall_time_ns // 1000).astype(np.int64)
        return arrow.array(micros, mask=None if there is None else ~there).cast(self._time)

    def _hex(self, hashes: np.ndarray) -> Any:
        """(n, 16) uint8 → n texts of 32 digits."""
        arrow, width = self._arrow, 2 * HASH_BYTES
        text = np.ascontiguousarray(_HEX[hashes]).reshape(-1)
        ends = np.arange(len(hashes) + 1, dtype=np.int32) * width
        return arrow.StringArray.from_buffers(len(hashes), arrow.py_buffer(ends), arrow.py_buffer(text))


def _pool_row(pool: PoolStated) -> dict[str, object]:
    """A start may say anything at all of its sizes."""
    slots, block_bytes = (max(-_INT64, min(size, _INT64)) for size in (pool.slots, pool.block_bytes))
    return {"tier": pool.tier.name, "slots": slots, "block_bytes": block_bytes, "name": pool.name}


def _field_of(fields: dict[NamespaceId, Namespace], name: str, namespace: NamespaceId) -> object:
    value = getattr(fields.get(namespace), name, None)
    return max(-_INT64, min(value, _INT64)) if isinstance(value, int) else value


def _check_ours(folder: Path) -> None:
    """Raises SourceError: a folder has something and no history. OSError."""
    if not folder.exists() or (folder / MANIFEST).exists():
        return
    if not all(path.name.startswith(_DATA) for path in folder.iterdir()):  # some are being written
        raise SourceError(f"{folder} has files of something else; give a new folder")


def _take_place(folder: Path, history: HistoryManifest) -> None:
    """Have a folder's history be this one. Raises OSError."""
    with alone(folder):
        try:
            older = read_manifest(folder)
            history.before = older.data
        except SourceError:  # none, or one that nobody can read
            older = None
        replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(history)))
        if older is not None and older.before:
            shutil.rmtree(folder / Path(older.before).name, ignore_errors=True)
