"""Questions to a history in SQL: DuckDB over its files, which it reads and nothing else.

    history                     every stay of a block in a tier, and every claim on a pool of the cluster
    residencies                 what is held at the end;  residencies_at(TIMESTAMP '…') at a moment
    claimed_objects             what pools of the cluster have at the end;  claimed_objects_at(TIMESTAMP '…')
    events                      a row a block of an event
    block_life('…')             the events of blocks whose hash begins so
    changes(TIMESTAMP '…', TIMESTAMP '…')    the events of a stretch of time, its end not counted
    instances, pools, namespaces, holes
    tenants                     blocks and bytes of each tenant by tier;  tenants_at(TIMESTAMP '…')

Times are those of the instances' clocks, in UTC. Hashes and namespaces are 32 hexadecimal digits. Two streams of one
instance's name differ in `stream`, two lives of it in `life`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from kvbm.core.errors import MissingExtraError
from kvbm.replay.history_manifest import HistoryFile, check_files, read_manifest
from kvbm.replay.source import SourceError

MEMORY_BYTES = 1 << 30
TIMEOUT_S = 60.0
MOST_ROWS = 100_000
_BATCH_ROWS = 10_000
_AGAIN_S = 0.05  # between two interrupts: one that comes before a question runs counts for nothing
_SPECIAL = "[*?"  # in a path that DuckDB is given they stand for other files
_Result = TypeVar("_Result")
_WHO = "instance, stream, life, epoch"
_VIEWS = (
    # a stay has two events, its begin and its end; what moved begins and ends in one
    """
    CREATE VIEW events AS
    SELECT began AS time, instance, stream, life, epoch, begin_offset AS "offset",
        CASE kind WHEN 'claim' THEN 'claimed' ELSE 'began' END AS event, tier, block, namespace, begin AS cause,
        source, NULL AS target, position, slot
        FROM history WHERE kind <> 'claim_end'
    UNION ALL BY NAME
    SELECT ended AS time, instance, stream, life, end_epoch AS epoch, end_offset AS "offset",
        CASE kind WHEN 'claim_end' THEN 'unclaimed' ELSE 'ended' END AS event, tier, block, namespace, "end" AS cause,
        NULL AS source, target, position, slot
        FROM history WHERE ended IS NOT NULL
    """,
    f"""
    CREATE VIEW pools AS
    SELECT {_WHO}, tier, max(slots) AS slots, max(block_bytes) AS block_bytes, max(name) AS name
        FROM (SELECT {_WHO}, unnest(pools, recursive := true) FROM instances) GROUP BY ALL
    """,
    """
    CREATE MACRO residencies_at(moment) AS TABLE
    SELECT * EXCLUDE (kind, ended, "end", target, end_epoch, end_offset) FROM history
        WHERE kind = 'residency' AND began <= moment AND (ended IS NULL OR ended > moment)
    """,
    "CREATE VIEW residencies AS FROM residencies_at(TIMESTAMP 'infinity')",
    f"""
    CREATE MACRO claimed_objects_at(moment) AS TABLE
    SELECT name AS pool, tier, block, namespace, max(began) FILTER (kind = 'claim') AS claimed,
        arg_max(instance, (began, epoch, begin_offset)) FILTER (kind = 'claim') AS claimed_by
        FROM history LEFT JOIN (SELECT {_WHO}, tier, name FROM pools) USING ({_WHO}, tier)
        WHERE kind <> 'residency' AND began <= moment GROUP BY ALL
        HAVING arg_max(kind, (began, epoch, begin_offset)) = 'claim'
    """,
    "CREATE VIEW claimed_objects AS FROM claimed_objects_at(TIMESTAMP 'infinity')",
    """
    CREATE MACRO block_life(digits) AS TABLE
    SELECT * FROM events WHERE block >= lower(digits) AND block <= lower(digits) || 'g'
        ORDER BY time, instance, stream, life, epoch, "offset"
    """,
    "CREATE MACRO changes(since, until) AS TABLE SELECT * FROM events WHERE time >= since AND time < until",
    f"""
    CREATE MACRO tenants_at(moment) AS TABLE
    SELECT tenant, tier, count(*) AS blocks, sum(block_bytes) AS bytes, count(DISTINCT (instance, stream)) AS instances
        FROM residencies_at(moment) LEFT JOIN namespaces USING (namespace)
        LEFT JOIN (SELECT {_WHO}, tier, block_bytes FROM pools) USING ({_WHO}, tier)
        GROUP BY ALL ORDER BY bytes DESC, tenant, tier
    """,
    "CREATE VIEW tenants AS FROM tenants_at(TIMESTAMP 'infinity')",
)


class SlowQuestionError(SourceError):
    """A question took longer than it may."""


class LargeQuestionError(SourceError):
    """A question takes more memory than it may, or has too many rows."""


class DamagedHistoryError(SourceError):
    """A file of the history is not there, or no good."""


class BrokenDatabaseError(SourceError):
    """A question has met a fault of DuckDB's, after which that answers nothing more; open the history again."""


class SqlAnswer(NamedTuple):
    """What a question gave.

    Attributes:
        columns: their names.
        rows: values as Python has them; times are datetimes in UTC without a zone.
    """

    columns: list[str]
    rows: list[tuple[Any, ...]]


class HistoryDatabase:
    """An open history. One thread at a time asks; another may `cancel`.

    Who has opened one goes on with it while a newer one takes its place.

    Args:
        folder: what `write_history` made.
        memory_bytes: what DuckDB may take for a question; a larger one fails.
        threads: of DuckDB; None: one a core.

    Attributes:
        timeout_s: what a question takes at most, unless it is said with it.
    Raises: SourceError: there is no history, or it is damaged. MissingExtraError.
    """

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES, threads: int | None = None) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingExtraError("DuckDB (duckdb)", "sql") from None
        self.manifest = read_manifest(folder)
        self._duckdb: Any = duckdb
        self._connection: Any = duckdb.connect(":memory:")
        data = (folder / self.manifest.data).resolve()
        if not set(_SPECIAL).isdisjoint(str(data)):
            raise SourceError(
                f"{data}: DuckDB reads no folder that has one of {_SPECIAL} in its path; give it another name"
            )
        try:
            check_files(folder, self.manifest)
        except SourceError as error:
            raise DamagedHistoryError(str(error)) from None
        tail = self.manifest.tail
        told: dict[str, Sequence[HistoryFile | None]] = {
            "instances": [tail.instances],
            "namespaces": [tail.namespaces],
            "holes": [tail.holes],
            "history": [*(file for run in self.manifest.runs for file in run.stays), *tail.stays],
        }
        files = {name: [data / one.name for one in found if one is not None] for name, found in told.items()}
        self._data = data
        self._guard = threading.Lock()  # held while a question ends, is interrupted, or all of it is closed
        self._is_closed = False
        self.timeout_s = TIMEOUT_S
        try:
            for statement in (
                f"SET memory_limit = '{memory_bytes >> 20}MiB'",
                "SET temp_directory = ''",
                *([] if threads is None else [f"SET threads = {threads}"]),
                *(f"CREATE VIEW {name} AS FROM read_parquet({_listed(paths)})" for name, paths in files.items()),
                *_VIEWS,
                f"SET allowed_directories = ['{_quoted(data)}']",
                "SET enable_external_access = false",
                "SET lock_configuration = true",
            ):
                self._connection.execute(statement)
        except duckdb.Error as error:
            self.close()
            why = str(error).strip().splitlines()[0]
            raise DamagedHistoryError(f"{folder} cannot be read ({why}); make the history anew") from None

    def ask(self, question: str, values: Sequence[object] = (), timeout_s: float | None = None) -> SqlAnswer:
        """The rows of a question, MOST_ROWS at most.

        Args:
            values: for its `?`.
        Raises: SourceError: it is no question, takes more memory than it may, or longer, or has more rows.
        """

        def answer() -> SqlAnswer:
            asked = self._connection.execute(question, list(values))
            rows = asked.fetchmany(MOST_ROWS + 1)
            if len(rows) > MOST_ROWS:
                raise LargeQuestionError(
                    f"the answer has more than {MOST_ROWS:,} rows; add LIMIT, or take --csv or --arrow"
                )
            return SqlAnswer([column[0] for column in asked.description or ()], rows)

        return self._within(question, answer, timeout_s)

    def batches(
        self, question: str, take: Callable[[list[str], list[tuple[Any, ...]]], object], timeout_s: float | None = None
    ) -> None:
        """Hand all rows of a question on, some at a time; the first time maybe none. Raises SourceError as `ask`."""

        def hand_on() -> None:
            asked = self._connection.execute(question)
            columns = [column[0] for column in asked.description or ()]
            rows = asked.fetchmany(_BATCH_ROWS)
            take(columns, rows)
            while rows := asked.fetchmany(_BATCH_ROWS):
                take(columns, rows)

        self._within(question, hand_on, timeout_s)

    def arrow(self, question: str, take: Callable[[Any], object], timeout_s: float | None = None) -> None:
        """Hand a question's rows on as pyarrow.RecordBatch: an iterator with their `schema`. Raises SourceError as
        `ask`.
        """

        def hand_on() -> None:
            take(_Batches(self._connection.sql(question).to_arrow_reader(_BATCH_ROWS)))

        self._within(question, hand_on, timeout_s)

    def cancel(self) -> None:
        """End the question under way. Any thread."""
        with self._guard:
            if not self._is_closed:
                self._connection.interrupt()

    def close(self) -> None:
        """Give back all of it. Idempotent."""
        with self._guard:
            self._is_closed = True
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _within(self, question: str, run: Callable[[], _Result], timeout_s: float | None) -> _Result:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._check(question)
        over, has_ended = threading.Event(), threading.Event()

        def stop() -> None:
            over.set()
            while not has_ended.wait(_AGAIN_S):
                with self._guard:
                    if not (has_ended.is_set() or self._is_closed):  # the next question has its own time
                        self._connection.interrupt()

        timer = threading.Timer(timeout_s, stop)
        timer.daemon = True
        timer.start()
        try:
            return run()
        except (self._duckdb.Error, RuntimeError) as error:
            if over.is_set():
                late = f"the question took longer than {timeout_s:g} s; ask for less, or give --within"
                raise SlowQuestionError(late) from None
            self._raise(error)
        finally:
            timer.cancel()
            with self._guard:
                has_ended.set()

    def _raise(self, error: Exception) -> NoReturn:
        """Say what DuckDB says as an error of ours. Raises SourceError, KeyboardInterrupt."""
        duckdb, said = self._duckdb, str(error).strip()
        # While rows are read, an error comes with its kind in words alone
        is_late = isinstance(error, _RowsError)
        kind, first = said.partition(" Error")[0] if is_late else "", said.partition("\n")[0]
        is_signal = isinstance(error, RuntimeError) and not is_late and "interrupted" in said.lower()
        if isinstance(error, duckdb.OutOfMemoryException) or kind == "Out of Memory":
            raise LargeQuestionError(f"the question needs more memory than it may take: {first}") from None
        if isinstance(error, duckdb.InterruptException) or kind == "INTERRUPT" or is_signal:
            raise KeyboardInterrupt from None
        if isinstance(error, duckdb.FatalException | duckdb.InternalException) or kind in ("FATAL", "INTERNAL"):
            raise BrokenDatabaseError(first) from None
        if isinstance(error, duckdb.IOException) or kind == "IO" or str(self._data) in said:
            raise DamagedHistoryError(f"{said}; make the history anew") from None
        raise SourceError(said) from None

    def _check(self, question: str) -> None:
        """Raises SourceError: it is not one question, but a command, or several."""
        try:
            statements = self._connection.extract_statements(question)
        except self._duckdb.Error as error:
            raise SourceError(str(error).strip()) from None
        if len(statements) != 1 or statements[0].type != self._duckdb.StatementType.SELECT:
            raise SourceError("give one question that only reads: SELECT, FROM, WITH, DESCRIBE or SHOW")


class _RowsError(RuntimeError):
    """What went wrong while rows were read."""


class _Batches:
    """Rows as they come. What goes wrong then is told apart from what befalls who takes them: both are OSErrors."""

    def __init__(self, reader: Any) -> None:
        self.schema = reader.schema
        self._reader = reader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._reader.read_next_batch()
        except StopIteration:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # as the library has it, by the number it was given
            raise _RowsError(str(error)) from None


def _listed(paths: Sequence[Path]) -> str:
    return "[" + ", ".join(f"'{_quoted(path)}'" for path in paths) + "]"


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def table_lines(answer: SqlAnswer) -> Iterator[str]:
    """An answer as a table for people."""
    texts = [[_text(value) for value in row] for row in answer.rows]
    widths = [max([len(name), *(len(row[at]) for row in texts)]) for at, name in enumerate(answer.columns)]
    numbers = [
        any(row[at] is not None for row in answer.rows)
        and all(isinstance(row[at], int | float | None) for row in answer.rows)
        for at in range(len(answer.columns))
    ]
    for row in ([*answer.columns], *texts):
        cells = [
            one.rjust(width) if is_number else one.ljust(width)
            for one, width, is_number in zip(row, widths, numbers, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
