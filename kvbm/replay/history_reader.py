"""A process that answers questions to a history, one at a time: `catalog/history/readers.py` starts it.

Questions come from standard input, answers go to standard output (`catalog/history/wire.py`). What another process
writes anew is taken up with the next question. It ends when its input does.
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvbm.catalog.follow.archive import settled_end
from kvbm.catalog.history.wire import (
    ASK,
    BODY,
    CANCEL,
    END,
    HEAD,
    MOST_BYTES,
    PREFIX,
    REFUSAL,
    HistoryAsk,
    HistoryHead,
    HistoryRefusal,
    packed,
)
from kvbm.core.errors import KvbmError
from kvbm.core.history_answers import HistoryColumn, HistoryHole, HistoryRows, HistoryStatus
from kvbm.files import stamp
from kvbm.replay.history_answers import AnswerError, HistoryAnswers
from kvbm.replay.history_manifest import MANIFEST, HistoryManifest
from kvbm.replay.source import ARCHIVE_SUFFIX, SourceError, SourceFile
from kvbm.replay.sql import BrokenDatabaseError, DamagedHistoryError, LargeQuestionError, SlowQuestionError

ARROW = "application/vnd.apache.arrow.stream"
MOST_ANSWER_BYTES = 64 << 20  # of JSON
LAGS_S = 60.0
_PIECE_BYTES = 1 << 20
_NICE = 5  # the catalog's own answers come first
_MOST_THREADS = 4
_AGAIN_S = 0.02  # between two interrupts
_REST_BYTES = 1 << 30  # that the process takes beside what a question may
_ANSWERS = frozenset({"overview", "timeline", "block", "changes", "tenants", "instance", "pools", "prompt"})
Send = Callable[[int, bytes], None]


def serve(folder: Path, archive: Path | None, memory_bytes: int) -> None:
    """Answer until standard input ends.

    Args:
        archive: that the history is of, to say how far it is behind.
        memory_bytes: for each question.
    """
    os.nice(_NICE)
    with suppress(ValueError, OSError):  # a smaller limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (2 * memory_bytes + _REST_BYTES,) * 2)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    source = os.fdopen(os.dup(0), "rb")
    OpenHistory(folder, archive, memory_bytes).serve(source, out)
    os._exit(0)  # also where a question is under way


class OpenHistory:
    """The process's one history, and its one question."""

    def __init__(self, folder: Path, archive: Path | None, memory_bytes: int) -> None:
        self._folder, self._archive, self._memory_bytes = folder, archive, memory_bytes
        self._answers: HistoryAnswers | None = None
        self._stamp: tuple[int, ...] | None = None
        self._asked: queue.SimpleQueue[HistoryAsk] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def serve(self, source: BinaryIO, out: BinaryIO) -> None:
        """Answer until the source ends."""

        def send(kind: int, part: bytes) -> None:
            try:
                for begin in range(0, max(1, len(part)), MOST_BYTES // 2):
                    _write_all(out, packed(kind, part[begin : begin + MOST_BYTES // 2]))
            except OSError:
                raise _NobodyThereError from None

        threading.Thread(target=self._work, args=(send,), daemon=True).start()
        for kind, part in _parts(source):
            if kind == ASK:
                self._is_idle.clear()
                self._asked.put(msgspec.json.decode(part, type=HistoryAsk))
            elif kind == CANCEL:
                while not self._is_idle.wait(_AGAIN_S):  # an interrupt counts for nothing before its question runs
                    if (answers := self._answers) is not None:
                        answers.database.cancel()

    def _work(self, send: Send) -> None:
        while True:
            asked = self._asked.get()
            try:
                self.answer(asked, send)
            except OSError:
                os._exit(0)  # nobody is there any more

    def answer(self, asked: HistoryAsk, send: Send) -> None:
        """Answer one question. Raises OSError: nobody takes it."""
        try:
            if asked.kind == "status":
                send(HEAD, msgspec.json.encode(HistoryHead()))
                send(BODY, msgspec.json.encode(self._status(**asked.arguments)))
            else:
                opened = self._opened()
                opened.database.timeout_s = asked.within_s
                if asked.kind == "sql":
                    _Question(opened, asked, send).answer(**asked.arguments)
                elif asked.kind in _ANSWERS:
                    body = msgspec.json.encode(getattr(opened, asked.kind)(**asked.arguments))
                    send(HEAD, msgspec.json.encode(HistoryHead()))
                    for begin in range(0, len(body), _PIECE_BYTES):
                        send(BODY, body[begin : begin + _PIECE_BYTES])
                else:
                    raise AnswerError(404, "not_found", f"no such question: {asked.kind}", "see /openapi.json")
            self._is_idle.set()  # first: the next question follows at once
            send(END, b"")
        except (AnswerError, KvbmError, MemoryError, KeyboardInterrupt) as error:
            self._is_idle.set()
            send(REFUSAL, msgspec.json.encode(_refusal(error, asked)))
            if isinstance(error, DamagedHistoryError | BrokenDatabaseError):
                self._close()
        except _NobodyThereError:
            raise
        except Exception as error:  # noqa: BLE001  # the next question is answered all the same
            traceback.print_exc()
            self._is_idle.set()
            what = f"{type(error).__name__} in {asked.kind}"
            fault = AnswerError(500, "internal", what, "report it with the catalog's log")
            send(REFUSAL, msgspec.json.encode(_refusal(fault, asked)))

    def _opened(self) -> HistoryAnswers:
        """The history as it is now. Raises AnswerError: there is none. SourceError."""
        now = stamp(self._folder / MANIFEST)
        if now is None:
            self._close()
            raise AnswerError(
                503, "history_building", "there is no history yet: it is being made", "ask again; /v1/history says so"
            )
        if now != self._stamp or self._answers is None:
            self._close()
            threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
            try:
                self._answers, self._stamp = HistoryAnswers(self._folder, self._memory_bytes, threads), now
            except SourceError as error:  # whatever was asked
                words = "ask again: the catalog makes its history anew where it is damaged"
                raise AnswerError(503, "history_failed", str(error), words) from None
        return self._answers

    def _close(self) -> None:
        if self._answers is not None:
            self._answers.close()
        self._answers, self._stamp = None, None

    def _status(self, read_s: float = 0.0, trouble: str = "") -> HistoryStatus:
        try:
            opened = self._opened()
        except (AnswerError, KvbmError) as error:
            return HistoryStatus(ready=False, reason=trouble or str(error), lags=True)
        status = opened.status()
        status.reason = trouble
        status.lag_bytes = _unread(self._archive, opened.manifest)
        built_s = datetime.fromisoformat(status.built).timestamp() if status.built else 0.0
        status.lag_s = max(0.0, time.time() - max(read_s, built_s)) if status.lag_bytes else 0.0
        status.lags = status.lag_s > LAGS_S or bool(trouble)
        return status


class _Question:
    """A question in SQL."""

    def __init__(self, opened: HistoryAnswers, asked: HistoryAsk, send: Send) -> None:
        self._opened, self._asked, self._send = opened, asked, send

    def answer(self, question: str, rows: int | None, arrow: bool) -> None:
        """Send the rows. Raises AnswerError, SourceError, OSError."""
        holes, until = self._opened.holes(), self._opened.manifest.until or None
        if arrow:
            self._opened.database.arrow(question, lambda reader: self._stream(reader, rows, len(holes), until))
        else:
            self._opened.database.arrow(question, lambda reader: self._json(reader, rows or 0, holes, until))

    def _json(self, reader: Any, rows: int, holes: list[HistoryHole], until: str | None) -> None:
        columns = [HistoryColumn(name=field.name, type=str(field.type)) for field in reader.schema]
        made: list[bytes] = []
        count = size = 0
        is_more = False
        for batch in reader:
            is_more = len(batch) > rows - count
            taken = batch.slice(0, rows - count)
            values = [_values(column, one.name) for column, one in zip(taken.columns, columns, strict=True)]
            for row in zip(*values, strict=True):
                made.append(msgspec.json.encode(row))
                size += len(made[-1])
            count += len(taken)
            if size > MOST_ANSWER_BYTES:
                raise LargeQuestionError(f"the answer has more than {MOST_ANSWER_BYTES >> 20} MiB")
            if is_more:
                break
        head = HistoryRows(columns=columns, rows=[], more=is_more, until=until, holes=holes)
        before, _, after = msgspec.json.encode(head).partition(b'"rows":[]')
        self._send(HEAD, msgspec.json.encode(HistoryHead()))
        self._send(BODY, before + b'"rows":[')
        for begin in range(0, len(made), 1000):
            part = b",".join(made[begin : begin + 1000])
            self._send(BODY, b"," + part if begin else part)
        self._send(BODY, b"]" + after)

    def _stream(self, reader: Any, rows: int | None, holes: int, until: str | None) -> None:
        import pyarrow

        first = next(iter(reader), None)  # what is wrong shows before an answer begins
        headers = {"kvbm-history-holes": str(holes), "kvbm-history-until": until or ""}
        self._send(HEAD, msgspec.json.encode(HistoryHead(content_type=ARROW, headers=headers)))
        left = rows
        with pyarrow.ipc.new_stream(pyarrow.PythonFile(_Sink(self._send), mode="w"), reader.schema) as stream:
            batch = first
            while batch is not None and (left is None or left > 0):
                batch = batch if left is None else batch.slice(0, left)
                left = None if left is None else left - len(batch)
                stream.write_batch(batch)
                batch = next(iter(reader), None)


class _NobodyThereError(OSError):
    """Who asked is gone."""


class _Sink:
    """A file that sends what is written."""

    closed = False

    def __init__(self, send: Send) -> None:
        self._send = send

    def write(self, data: Any) -> int:
        part = bytes(data)
        if part:
            self._send(BODY, part)
        return len(part)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _refusal(error: BaseException, asked: HistoryAsk) -> HistoryRefusal:
    match error:
        case AnswerError():
            return HistoryRefusal(status=error.status, code=error.code, message=str(error), what_to_do=error.what_to_do)
        case SlowQuestionError():
            words = f"the question took longer than {asked.within_s:g} s"
            what_to_do = "ask for less, or give within_s (limits.history_s)"
            return HistoryRefusal(status=504, code="too_slow", message=words, what_to_do=what_to_do)
        case LargeQuestionError():
            return HistoryRefusal(
                status=422, code="too_much", message=str(error), what_to_do="ask for less: LIMIT, or a narrower WHERE"
            )
        case MemoryError():
            words = "the question needs more memory than the process may take"
            return HistoryRefusal(status=422, code="too_much", message=words, what_to_do="ask for less")
        case DamagedHistoryError():
            words = "ask again: the catalog makes its history anew where it is damaged"
            return HistoryRefusal(status=503, code="history_failed", message=str(error), what_to_do=words)
        case SourceError() if asked.kind == "sql":
            words = "see docs/replay.md for the tables"
            return HistoryRefusal(status=422, code="bad_question", message=str(error), what_to_do=words)
        case KeyboardInterrupt():
            return HistoryRefusal(
                status=503, code="cancelled", message="the question was cancelled", what_to_do="ask again"
            )
        case _:
            return HistoryRefusal(status=503, code="history_failed", message=str(error), what_to_do="ask again")


def _unread(archive: Path | None, history: HistoryManifest) -> int:
    """How many bytes of an archive its history has not."""
    if archive is None:
        return 0
    settled = settled_end(archive)
    reached = {one.name: one.bytes for one in history.reached}
    unread = 0
    for path in archive.glob(f"*{ARCHIVE_SUFFIX}"):
        with suppress(OSError):
            size = 0
            if settled is None or path.name < settled[0]:
                size = path.stat().st_size
            elif path.name == settled[0]:
                size = settled[1]
            unread += max(0, size - reached.get(SourceFile(path, "", may_tear=True).key, 0))
    return unread


def _values(column: Any, name: str) -> list[object]:
    """Of a column, for JSON. Raises AnswerError: one is outside of what Python has, such as the year 20000."""
    try:
        return [_plain(value) for value in column.to_pylist()]
    except (ValueError, OverflowError) as error:
        why = f"column {name[:80]!r} has a value that JSON cannot say: {error}"
        raise AnswerError(422, "bad_question", why, "cast it to VARCHAR, or ask for Arrow") from None


def _plain(value: object) -> object:
    """A value for JSON: times as ISO 8601 in UTC, whole decimals as integers, also within lists and structs."""
    match value:
        case datetime():
            moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
            return f"{moment.isoformat(timespec='microseconds')}Z"
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case bytes():
            return value.hex()
        case str() | int() | float() | bool() | None:
            return value
        case _:
            return str(value)


def _parts(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while len(prefix := source.read(PREFIX.size)) == PREFIX.size:
        size, kind = PREFIX.unpack(prefix)
        yield kind, source.read(size - 1)


def _write_all(out: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) or 0 :]


def main(arguments: Sequence[str]) -> None:
    """`python -m kvbm.replay.history_reader FOLDER ARCHIVE MEMORY_BYTES`; ARCHIVE may be empty."""
    folder, archive, memory_bytes = arguments
    serve(Path(folder), Path(archive) if archive else None, int(memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1:])
