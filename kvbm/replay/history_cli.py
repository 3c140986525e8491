"""`kvbm-replay history`, `why`, `changes`, `tenants` and `sql`: arguments in, words out.

Each takes any source and makes its history in a temporary folder; a folder that `history` made is asked as it is.
"""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from kvbm.core.backend import Backend
from kvbm.core.codec import ScannedFrame
from kvbm.core.stays import NewStayFold
from kvbm.files import opener
from kvbm.replay.format import parse_at, time_text
from kvbm.replay.history import Maker, write_history
from kvbm.replay.history_keeper import keep
from kvbm.replay.history_manifest import MANIFEST, HistoryManifest
from kvbm.replay.progress import watched
from kvbm.replay.questions import changes, tenants, why
from kvbm.replay.source import FileSource, FrameSource, Located, SourceError
from kvbm.replay.sql import MEMORY_BYTES, TIMEOUT_S, HistoryDatabase, table_lines
from kvbm.terminal import say

_MOST_MIB = 1 << 24
_LONGEST_S = 1e6
_BEGIN = datetime(1970, 1, 1)  # noqa: DTZ001 - the times of a history are in UTC, without a zone


class Write(Protocol):
    """Writes a report: JSON where that is wanted, else its lines."""

    def __call__(self, name: str | None, report: msgspec.Struct, lines: Iterable[str], /) -> None: ...


class HistoryParts(NamedTuple):
    """What these commands are made of.

    Attributes:
        backend, new_stays: native, or the readable specification of the same.
        open_source: gives the source that the arguments name.
        write: writes a report.
    """

    backend: Backend
    new_stays: NewStayFold
    open_source: Callable[[], FrameSource]
    write: Write


class SqlReport(msgspec.Struct, kw_only=True):
    """The answer to a question in SQL."""

    source: str
    question: str
    columns: list[str]
    rows: list[list[Any]]


def add_arguments(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Declare what the five take beside a source."""
    commands["history"].add_argument(
        "folder", type=Path, metavar="DIR", help="a new folder, or one with an older history, which goes on"
    )
    commands["history"].add_argument(
        "--anew", action="store_true", help="read the source from its beginning in any case"
    )
    commands["history"].add_argument(
        "--follow", action="store_true", help="go on until it is interrupted, with a line for each writing"
    )
    time = "ISO 8601, Unix seconds or a clock time such as 13:19 (UTC, the last one the log reaches)"
    commands["changes"].add_argument("--from", required=True, dest="since", metavar="TIME", help=time)
    commands["changes"].add_argument(
        "--to",
        dest="until",
        metavar="TIME",
        help="as --from, a clock time being the first one after --from; what happens then counts no more (default the "
        "end)",
    )
    commands["changes"].add_argument(
        "--hash", metavar="HASH", help="only of blocks whose hash begins so (8 digits or more), event by event, too"
    )
    commands["tenants"].add_argument("--at", metavar="TIME", help=f"{time} (default the end)")
    asked = commands["sql"]
    asked.add_argument("question", metavar="QUESTION", help="one SELECT, quoted; - reads it from standard input")
    asked.add_argument("--csv", action="store_true", help="rows with commas instead of a table")
    asked.add_argument(
        "--arrow", type=Path, metavar="FILE", help="the rows as an Arrow IPC stream, in a new file, instead"
    )
    asked.add_argument(
        "--memory",
        type=_mebibytes,
        default=MEMORY_BYTES >> 20,
        metavar="MIB",
        help=f"what the question may take (default {MEMORY_BYTES >> 20})",
    )
    asked.add_argument(
        "--within",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"a question that takes longer is given up (default {TIMEOUT_S:g})",
    )


def _mebibytes(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not text.isdecimal() or not 16 <= int(text) <= _MOST_MIB:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give whole MiB, 16 to {_MOST_MIB:,}")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0; argparse names the option. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds; give a number above 0")
    return value


def run_history(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    """`kvbm-replay history`."""
    if arguments.follow:
        return _followed(arguments, parts)
    history = _made(arguments, parts, arguments.folder)
    parts.write(arguments.json, history, history.lines())
    return history


def run_why(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    """`kvbm-replay why`."""
    with _opened(arguments, parts) as history:
        lives = why(history, arguments.hash, arguments.instance)
        parts.write(arguments.json, lives, lives.lines())
        return history.manifest


def run_changes(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    """`kvbm-replay changes`."""
    with _opened(arguments, parts) as history:
        since = _moment(arguments.since, "--from", history)
        until = _moment(arguments.until, "--to", history, since) if arguments.until else _behind_all(history)
        if since >= until:
            raise SourceError(f"--from {since.isoformat()} does not lie before --to {until.isoformat()}")
        found = changes(history, since, until, arguments.instance, arguments.hash)
        parts.write(arguments.json, found, found.lines())
        return history.manifest


def run_tenants(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    """`kvbm-replay tenants`."""
    _check_whole(arguments, "make one with `kvbm-replay history --instance`")
    with _opened(arguments, parts) as history:
        found = tenants(history, _moment(arguments.at, "--at", history) if arguments.at else None)
        parts.write(arguments.json, found, found.lines())
        return history.manifest


def run_sql(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    """`kvbm-replay sql`."""
    forms = {"--json": arguments.json is not None, "--csv": arguments.csv, "--arrow": arguments.arrow is not None}
    if sum(forms.values()) > 1:
        raise SourceError(f"{' and '.join(form for form, is_asked in forms.items() if is_asked)}: give one of them")
    _check_whole(arguments, "write WHERE instance = '…'")
    question = sys.stdin.read() if arguments.question == "-" else arguments.question
    with _opened(arguments, parts) as history:
        if arguments.arrow is not None:
            history.arrow(question, partial(_write_arrow, arguments.arrow), arguments.within)
        elif arguments.csv:
            history.batches(question, _CsvRows().take, arguments.within)
        else:
            answer = history.ask(question, timeout_s=arguments.within)
            report = SqlReport(
                source=history.manifest.source,
                question=question,
                columns=answer.columns,
                rows=[[_plain(value) for value in row] for row in answer.rows],
            )
            parts.write(arguments.json, report, table_lines(answer))
        return history.manifest


class _CsvRows:
    """Writes rows to standard output, their columns' names first."""

    def __init__(self) -> None:
        self._out = csv.writer(sys.stdout, lineterminator="\n")
        self._has_begun = False

    def take(self, columns: list[str], rows: list[tuple[Any, ...]]) -> None:
        """The next rows."""
        if not self._has_begun:
            self._out.writerow(columns)
            self._has_begun = True
        self._out.writerows(rows)


class _LogEnd:
    """Notes when the last frame of a log was cut, of whichever instance, while a history is made of it."""

    def __init__(self) -> None:
        self.last_ns = 0

    def watched(self, located: Iterable[Located], source: FrameSource) -> Iterator[Located]:
        """See `progress.watched`."""
        for one in watched(located, source):
            if isinstance(one.found, ScannedFrame):
                self.last_ns = max(self.last_ns, one.found.wall_time_ns)
            yield one


def _made(
    arguments: argparse.Namespace, parts: HistoryParts, folder: Path, end: _LogEnd | None = None
) -> HistoryManifest:
    anew = getattr(arguments, "anew", False)
    watch = watched if end is None else end.watched
    return write_history(parts.open_source(), folder, parts.backend, parts.new_stays, arguments.instance, watch, anew)


def _followed(arguments: argparse.Namespace, parts: HistoryParts) -> HistoryManifest:
    if arguments.anew:
        raise SourceError("--anew and --follow: give one of them")
    last = HistoryManifest(source=arguments.source)
    if not isinstance(parts.open_source(), FileSource):
        raise SourceError("--follow: a stream keeps events for a day; follow a catalog's archive, or a journal")

    def written(history: HistoryManifest) -> None:
        nonlocal last
        if history.serial != last.serial:
            parts.write(arguments.json, history, history.lines())
        last = history

    def trouble(words: str) -> None:
        say(f"kvbm-replay: {words}", to=sys.stderr)

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    maker = Maker(parts.backend, parts.new_stays)
    keep(parts.open_source, arguments.folder, maker, written, trouble, wait, arguments.instance)
    return last


@contextmanager
def _opened(arguments: argparse.Namespace, parts: HistoryParts) -> Iterator[HistoryDatabase]:
    memory_bytes = getattr(arguments, "memory", MEMORY_BYTES >> 20) << 20
    folder = Path(arguments.source)
    if (folder / MANIFEST).is_file():
        with HistoryDatabase(folder, memory_bytes) as history:
            _check_instance(arguments.instance, history)
            yield history
        return
    with _until_terminated(), tempfile.TemporaryDirectory(prefix="kvbm-history-") as above:
        folder = Path(above) / "history"
        end = _LogEnd()
        _made(arguments, parts, folder, end)
        with HistoryDatabase(folder, memory_bytes) as history:
            if end.last_ns and history.manifest.until:  # the log goes on where one instance of it does not
                history.manifest.until = max(history.manifest.until, time_text(end.last_ns))
            yield history


@contextmanager
def _until_terminated() -> Iterator[None]:
    """SIGTERM ends this as an error would, so that what it has made is removed."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_whole(arguments: argparse.Namespace, instead: str) -> None:
    """Raises SourceError: one instance of a history is asked for by an option that only narrows what is read."""
    if arguments.instance is not None and (Path(arguments.source) / MANIFEST).is_file():
        raise SourceError(f"--instance: {arguments.source} is a history, and is asked as it is; {instead}")


def _check_instance(instance: str | None, history: HistoryDatabase) -> None:
    """Raises SourceError: a history knows nothing of an instance."""
    if instance is None:
        return
    if not history.ask("SELECT 1 FROM instances WHERE instance = ? LIMIT 1", [instance]).rows:
        raise SourceError(f"no frame of instance {instance!r} is there")


def _moment(text: str, option: str, history: HistoryDatabase, after: datetime | None = None) -> datetime:
    """A time, in UTC without a zone; a time of day is the last one the log reaches, or the first one after another
    time. Raises SourceError: it is an offset. ConfigError: it is none at all.
    """
    try:
        at = parse_at(text, option)
        at = at.on_last_day(_us(_behind_all(history))) if after is None else at.first_after(_us(after))
        if at.time_us is None:
            raise SourceError(f"{option} {text}: offsets are of one instance; give a time")
        return _BEGIN + timedelta(microseconds=at.time_us)
    except OverflowError:
        raise SourceError(f"{option} {text}: no calendar has this time") from None


def _behind_all(history: HistoryDatabase) -> datetime:
    """A moment after the last event."""
    until = history.manifest.until
    last = datetime.fromisoformat(until).replace(tzinfo=None) if until else _BEGIN
    return last + timedelta(microseconds=1)


def _us(moment: datetime) -> int:
    return (moment - _BEGIN) // timedelta(microseconds=1)


def _plain(value: object) -> object:
    """A value for JSON: times as ISO 8601 in UTC, also within lists and structs."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return f"{moment.isoformat(timespec='microseconds')}Z"
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _write_arrow(path: Path, reader: Any) -> None:
    import pyarrow

    is_made = is_whole = False
    try:
        with open(path, "xb", opener=opener) as file:
            is_made = True
            with pyarrow.ipc.new_stream(file, reader.schema) as stream:
                for batch in reader:
                    stream.write_batch(batch)
        is_whole = True
    except OSError as error:
        raise SourceError(f"--arrow {path} cannot be written ({error.strerror or error}); give a new file") from None
    finally:
        if is_made and not is_whole:
            path.unlink(missing_ok=True)
