"""History files: the stays of a source as Parquet, in the order of their blocks, so that any moment and the life of any
block is a question of SQL. `sql.py` asks them.

A folder has history.json (`history_manifest.py`), which says what all of it is of and names a folder beside it,
`data-…`, and the files in it that count:

    N-stays-00000.parquet …       one row a stay of a block in a tier that has ended, by block and time; claims on the
                                  cluster's pools. What one writing has ended is a run; runs of like size become one
    N-counts, N-marks             of a run: blocks gained and lost in tiers by time (`history_counts.py`)
    N-lasting-00000.parquet …     stays that last
    N-instances.parquet           one row an epoch of an instance
    N-namespaces.parquet          one row a namespace
    N-holes.parquet               one row a hole in the log
    N-state.bin                   where reading goes on from (`history_state.py`)

N is the number of the writing. A history goes on where it ended, when its source still has what was read; else it is
made anew beside the older one. Either way history.json is replaced in one step at the end. Files that are needed no
more stay for a while, for who has the history open; what a killed writer has left goes with the next writing.

Rows are spilled to files by the first byte of their block, each of which is then sorted by itself: memory is bounded by
the largest.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.errors import MissingExtraError
from kvbm.core.ids import InstanceId
from kvbm.core.stays import LASTING, NewStayFold
from kvbm.files import alone, replace_file, write_new
from kvbm.replay.format import counted, time_text
from kvbm.replay.history_counts import StayCounts, read_counts, summed, write_counts
from kvbm.replay.history_manifest import (
    DATA,
    MANIFEST,
    UNDONE,
    HistoryFile,
    HistoryManifest,
    HistoryRun,
    HistoryTail,
    Retired,
    check_files,
    read_manifest,
    written,
)
from kvbm.replay.history_state import read_state, write_state
from kvbm.replay.history_tables import LIFE_ROW, Life, StayWords, Tables
from kvbm.replay.merging import merged
from kvbm.replay.source import FileSource, FrameSource, Located, SourceChangedError, SourceError, only
from kvbm.replay.spills import Spills, joined
from kvbm.replay.stays import SourceStays, StayRows, Told

GROUP_ROWS = 16 << 10  # of a row group, which is what a question for one block reads
KEEP_RETIRED_S = 600.0  # a question to a catalog takes no longer: `limits.history_s`
_FILE_ROWS = 4 << 20  # of a Parquet file, or one spill more
_RUN_RATIO = 4  # a run takes in one before it that has at most so many times its rows
_T = TypeVar("_T")
Watch = Callable[[Iterable[Located], FrameSource], Iterable[Located]]


class Maker(NamedTuple):
    """What makes histories.

    Attributes:
        backend, new_fold: native, or the readable specification of the same.
        watch: what was read passes through it.
    """

    backend: Backend
    new_fold: NewStayFold
    watch: Watch = lambda located, source: located


def write_history(
    source: FrameSource,
    folder: Path,
    backend: Backend,
    new_fold: NewStayFold,
    instance: str | None = None,
    watch: Watch = lambda located, source: located,
    anew: bool = False,
) -> HistoryManifest:
    """Make the history of a source, or have an older one go on.

    Args:
        folder: a new or empty one, or one with an older history.
        instance: only this one.
        anew: from the beginning in any case.
    Raises: SourceError: the folder is of something else, or cannot be written; nothing of the instance is there.
        MissingExtraError.
    """
    with HistoryWriter(folder, Maker(backend, new_fold, watch), instance) as writer:
        return writer.write(source, anew)


class HistoryWriter:
    """Writes the history in a folder, which it has for itself until it is closed. Use as a context manager.

    Args:
        instance: only this one.
        beyond: take in what lies behind the settled end of a source, too; it is read again the next time.
    Raises: SourceError: the folder is of something else, or another process writes it. MissingExtraError.
    """

    def __init__(self, folder: Path, maker: Maker, instance: str | None = None, beyond: bool = True) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("the Parquet library (pyarrow)", "parquet") from None
        self._arrow: Any = pyarrow
        self._folder, self._maker, self._instance, self._beyond = folder, maker, instance, beyond
        self._stack = ExitStack()
        self._writing: _Writing | None = None

    def __enter__(self) -> HistoryWriter:
        _guarded(self._folder, lambda: _check_ours(self._folder))
        self._was_there = self._folder.exists()
        _guarded(self._folder, lambda: self._stack.enter_context(alone(self._folder)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if not self._was_there:
            with suppress(OSError):  # something is in it
                self._folder.rmdir()

    def write(self, source: FrameSource, anew: bool = False) -> HistoryManifest:
        """Have the history reach as far as its source. Raises SourceError: it does not, and is as it was."""
        history, note = None, ""
        if not anew and isinstance(source, FileSource):
            try:
                history = self._go_on(source)
            except _CannotGoOnError as error:
                note = str(error)
        if history is None:
            history = self._anew(source, note)
        self._writing = self._writing if isinstance(source, FileSource) else None
        return history

    def _go_on(self, source: FileSource) -> HistoryManifest | None:
        """None: there is no older history. Raises _CannotGoOnError: there is, and why it does not go on."""
        if self._writing is None:
            if not (self._folder / MANIFEST).exists():
                return None
            self._writing = _Writing.resumed(self._arrow, self._folder, self._maker, self._instance or "", source)
        writing, self._writing = self._writing, None
        try:
            history = writing.write(source, self._beyond)
        except SourceChangedError as error:
            raise _CannotGoOnError(str(error)) from None
        self._writing = writing
        return history

    def _anew(self, source: FrameSource, note: str) -> HistoryManifest:
        data = Path(_guarded(self._folder, lambda: tempfile.mkdtemp(prefix=DATA, dir=self._folder)))
        is_done = False
        try:
            writing = _Writing(self._arrow, self._folder, data, self._maker, self._instance or "", source)
            if note:
                writing.notes.append(f"the history was made anew: {note}")
            history = writing.write(source, self._beyond)
            is_done = True
        finally:
            if not is_done:
                shutil.rmtree(data, ignore_errors=True)
        self._writing = writing
        return history


class _CannotGoOnError(Exception):
    """Why a history is made anew."""


class _Writing:
    """What goes on from one writing to the next."""

    def __init__(self, arrow: Any, folder: Path, data: Path, maker: Maker, instance: str, source: FrameSource) -> None:
        self._arrow, self._folder, self._data, self._maker = arrow, folder, data, maker
        self._stays = SourceStays(source.is_trimmed, maker.backend, maker.new_fold)
        self._tables = Tables(arrow)
        self._lives: dict[Life, int] = {}
        self._went_back = 0  # stays of runs
        self._fresh: list[Path] = []  # of the writing under way
        self.notes: list[str] = []  # of this, not of the source
        self._history = HistoryManifest(source=source.name, instance=instance, data=data.name)

    @classmethod
    def resumed(cls, arrow: Any, folder: Path, maker: Maker, instance: str, source: FrameSource) -> _Writing:
        """One that goes on where the folder's history ended. Raises _CannotGoOnError."""
        try:
            history = read_manifest(folder)
            state = history.tail.state
            if state is None or history.source != source.name or history.instance != instance:
                raise _CannotGoOnError("it was of something else")
            check_files(folder, history, reads_all=True)
            data = folder / history.data
            made = cls(arrow, folder, data, maker, instance, source)
            kept = read_state(data / state.name)
            made._stays.resume(kept.source)
            made._went_back = kept.went_back
        except SourceError as error:
            raise _CannotGoOnError(str(error)) from None
        made._history = history
        made._lives = {
            (InstanceId(name), stream, life): number for number, (name, stream, life) in enumerate(history.lives)
        }
        made.notes = [note for note in history.notes if note.startswith("the history was made anew")]
        return made

    def write(self, source: FrameSource, beyond: bool) -> HistoryManifest:
        """Read on, write, and put the manifest in its place. Raises SourceError, and nothing but memory has changed."""
        self._fresh = []
        try:
            return self._written(source, beyond)
        except BaseException:
            for path in self._fresh:
                with suppress(OSError):
                    path.unlink()
            raise

    def _written(self, source: FrameSource, beyond: bool) -> HistoryManifest:
        before = self._history
        read = iter(self._read(source, beyond))
        first = next(read, None)
        is_new = first is not None or not isinstance(source, FileSource) or source.unsettled or before.unsettled
        if not is_new and before.serial:
            return before
        history = msgspec.structs.replace(before, serial=before.serial + 1)
        located = self._maker.watch(chain([first] if first is not None else [], read), source)
        run, rows = self._run(self._stays.kept(only(located, history.instance or None)), history.serial)
        tail, unsettled = _Part(), source.unsettled if isinstance(source, FileSource) else ()
        with Spills(self._data) as spills:
            self._gather(self._stays.tail(only(unsettled, history.instance or None)), spills, tail)
            words = self._words()
            tail_stays = self._stay_files(spills, f"{history.serial}-lasting", words, tail)
        told = self._stays.tail_told
        history.runs = [*before.runs, *([run] if rows else [])]
        while self._takes_in(history.runs):
            history.runs[-2:] = [self._one_run(history.runs[-2], history.runs[-1], history.serial)]
        files = HistoryTail(
            stays=tail_stays,
            counts=self._count_files(tail.counts.rows(), f"{history.serial}-lasting", has_marks=False)[0],
            instances=self._table("instances", self._tables.instances(told.incarnations), history.serial),
            namespaces=self._table(
                "namespaces", self._tables.namespaces(list(self._stays.namespaces), self._stays.fields), history.serial
            ),
            holes=self._table("holes", self._tables.holes(told.holes), history.serial),
            state=self._state(history.serial) if isinstance(source, FileSource) else None,
        )
        history.tail = files
        if isinstance(source, FileSource):
            history.reached, history.order = source.reached, source.order
            history.unsettled = len(source.unsettled)
        self._describe(history, told, tail)
        if history.instance and not history.instances:
            raise SourceError(
                f"no frame of instance {history.instance!r} is there; kvbm-replay stat lists the instances"
            )
        self._guarded(lambda: _take_place(self._folder, before, history))
        self._history = history
        return history

    def _read(self, source: FrameSource, beyond: bool) -> Iterator[Located]:
        if isinstance(source, FileSource):
            return source.read_on(self._maker.backend, self._history.reached, self._history.order, beyond)
        return source.read(self._maker.backend)

    def _run(self, stays: Iterable[StayRows], serial: int) -> tuple[HistoryRun, int]:
        """What has ended, and how many rows and counts that is."""
        part = _Part()
        with Spills(self._data) as spills:
            self._gather(stays, spills, part)
            for rows in self._stays.mark():
                part.counts.add(rows.stays, self._number(rows), rows.since)
            files = self._stay_files(spills, f"{serial}-stays", self._words(), part) if spills.rows else []
        self._went_back += part.went_back
        counts = part.counts.rows()
        if not part.rows and not len(counts):
            return HistoryRun(), 0
        count_file, marks = self._count_files(counts, str(serial))
        run = HistoryRun(stays=files, counts=count_file, marks=marks, rows=part.rows + len(counts))
        return run, run.rows

    def _gather(self, stays: Iterable[StayRows], spills: Spills, part: _Part) -> None:
        for rows in stays:
            number = self._number(rows)
            self._guarded(lambda rows=rows, number=number: spills.add(rows.stays, number))  # type: ignore[misc]
            part.counts.add(rows.stays, number, rows.since)

    def _number(self, rows: StayRows) -> int:
        return self._lives.setdefault((rows.instance, rows.group, rows.life), len(self._lives))

    def _words(self) -> StayWords:
        return StayWords(list(self._lives), list(self._stays.namespaces), list(self._stays.names))

    def _stay_files(self, spills: Spills, name: str, words: StayWords, part: _Part) -> list[HistoryFile]:
        def tables() -> Iterator[Any]:
            for rows in joined(spills.sorted(), GROUP_ROWS):
                stay = rows["stay"]
                lasts = stay["end"] == LASTING
                part.rows += len(rows)
                part.lasting += int(lasts.sum())
                part.went_back += int((~lasts & (stay["end_ns"] < stay["begin_ns"])).sum())
                for begin in range(0, len(rows), GROUP_ROWS):
                    yield self._tables.stays(rows[begin : begin + GROUP_ROWS], words)
            if not part.rows:  # a question wants columns
                yield self._tables.stays(np.empty(0, dtype=LIFE_ROW), words)

        return self._guarded(lambda: self._parquet(tables(), name))

    def _parquet(self, tables: Iterable[Any], name: str) -> list[HistoryFile]:
        """Files of stays. Raises OSError."""
        files: list[HistoryFile] = []
        with ExitStack() as open_file:
            writer: Any = None
            rows = 0
            path = self._data
            for table in tables:
                if writer is None or rows >= _FILE_ROWS:
                    open_file.close()
                    if writer is not None:
                        files.append(written(path))
                    path = self._new(f"{name}-{len(files):05d}.parquet")
                    writer = open_file.enter_context(self._tables.stay_writer(path))
                    rows = 0
                writer.write_table(table)
                rows += table.num_rows
            open_file.close()
            if writer is not None:
                files.append(written(path))
        return files

    def _takes_in(self, runs: Sequence[HistoryRun]) -> bool:
        """Whether the last run and the one before become one."""
        return len(runs) > 1 and runs[-2].rows <= _RUN_RATIO * runs[-1].rows

    def _one_run(self, one: HistoryRun, other: HistoryRun, serial: int) -> HistoryRun:
        """Two runs as one. Raises SourceError."""

        def join() -> HistoryRun:
            name = f"{serial}-of-{one.rows + other.rows}"
            paths = [[self._data / file.name for file in run.stays] for run in (one, other)]
            tables = merged(self._arrow, [of_run for of_run in paths if of_run], GROUP_ROWS)
            stays = self._parquet(tables, f"{name}-stays")
            parts = [read_counts(self._arrow, self._data / run.counts.name) for run in (one, other) if run.counts]
            counts = summed(np.concatenate(parts))
            count_file, marks = self._count_files(counts, name)
            rows = one.rows + other.rows - sum(map(len, parts)) + len(counts)
            return HistoryRun(stays=stays, counts=count_file, marks=marks, rows=rows)

        try:
            return self._guarded(join)
        except self._arrow.ArrowException as error:
            raise SourceError(f"{self._data} is damaged ({error}); make the history anew") from None

    def _count_files(
        self, counts: np.ndarray, name: str, has_marks: bool = True
    ) -> tuple[HistoryFile | None, HistoryFile | None]:
        if not len(counts):
            return None, None
        paths = [self._new(f"{name}-{kind}.parquet") for kind in ("counts", "marks")]
        self._guarded(lambda: write_counts(self._arrow, counts, *paths))
        if not has_marks:  # all of it is read
            self._guarded(paths.pop().unlink)
        files = [self._guarded(lambda path=path: written(path)) for path in paths]  # type: ignore[misc]
        return files[0], files[1] if has_marks else None

    def _table(self, name: str, table: Any, serial: int) -> HistoryFile:
        def write() -> HistoryFile:
            path = self._new(f"{serial}-{name}.parquet")
            write_new(path, b"")  # its owner's alone
            self._arrow.parquet.write_table(table, path, compression="zstd")
            return written(path)

        return self._guarded(write)

    def _state(self, serial: int) -> HistoryFile:
        def write() -> HistoryFile:
            path = self._new(f"{serial}-state.bin")
            write_state(path, self._stays.state(), self._went_back)
            return written(path)

        return self._guarded(write)

    def _new(self, name: str) -> Path:
        path = self._data / name
        self._fresh.append(path)
        return path

    def _describe(self, history: HistoryManifest, told: Told, tail: _Part) -> None:
        history.begin = time_text(told.first_ns) if told.first_ns else ""
        history.until = time_text(told.last_ns) if told.last_ns else ""
        history.built = time_text(time.time_ns())
        history.stays = tail.rows + sum(self._rows(file) for run in history.runs for file in run.stays)
        history.lasting = tail.lasting
        history.instances, history.namespaces = len(told.incarnations), len(self._stays.namespaces)
        history.holes, history.lives = len(told.holes), [*self._lives]
        history.notes, history.findings = [*self.notes, *told.notes], told.findings
        if went_back := self._went_back + tail.went_back:
            history.notes.append(
                f"{counted(went_back, 'stay')} ended before they began by their instance's clock, so no moment has them"
            )
        history.bytes = sum(file.bytes for file in history.files())

    def _rows(self, file: HistoryFile) -> int:
        return int(self._guarded(lambda: self._arrow.parquet.read_metadata(self._data / file.name).num_rows))

    def _guarded(self, work: Callable[[], _T]) -> _T:
        return _guarded(self._folder, work)


class _Part:
    """Rows of one part of a history as they are written."""

    def __init__(self) -> None:
        self.counts = StayCounts()
        self.rows = self.lasting = self.went_back = 0


def _guarded(folder: Path, work: Callable[[], _T]) -> _T:
    """Say of an error of the file system which folder it is about. Raises SourceError."""
    try:
        return work()
    except OSError as error:
        raise SourceError(f"{folder} cannot be written ({error.strerror or error})") from None


def _check_ours(folder: Path) -> None:
    """Raises SourceError: a folder has something and no history. OSError."""
    if not folder.exists() or (folder / MANIFEST).exists():
        return
    if not all(path.name.startswith((DATA, UNDONE)) for path in folder.iterdir()):  # some were being written
        raise SourceError(f"{folder} has files of something else; give a new folder")


def _take_place(folder: Path, before: HistoryManifest, history: HistoryManifest) -> None:
    """Have a folder's history be this one, and remove what nobody reads any more. Raises OSError."""
    try:
        older = read_manifest(folder)
    except SourceError:  # none, or one that nobody can read
        older = None
    now_s = time.time()
    history.before, history.retired = "", []
    if older is not None and older.data != history.data:
        history.before = older.data
    elif older is not None:
        history.before = older.before
        needed = {file.name for file in history.files()}
        gone = Retired(names=[file.name for file in older.files() if file.name not in needed], at_s=now_s)
        kept = [one for one in older.retired if one.at_s > now_s - KEEP_RETIRED_S]
        history.retired = [*kept, *([gone] if gone.names else [])]
    replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(history)))
    names = {*(file.name for file in history.files()), *(name for one in history.retired for name in one.names)}
    for path in (folder / history.data).iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)
    for path in folder.glob(f"{UNDONE}*"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{DATA}*"):
        if path.name not in (history.data, history.before):
            shutil.rmtree(path, ignore_errors=True)
