"""A database URL → an engine on a database at this kvbm's newest schema.

Two catalogs that start at once migrate one after the other: an advisory lock on Postgres, the write lock on SQLite.
Every wait is bounded, so a database that does not answer becomes one sentence.

Nothing here lasts on a Postgres connection for longer than a transaction, neither a setting nor a prepared statement,
so a pooler such as PgBouncer may give each transaction another connection. An answer that the server takes no writes
any more ends all connections: the next one looks for the new primary.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvbm.core.errors import CatalogError, MissingExtraError
from kvbm.files import make_folder, make_plain, narrow, warn_exposed
from kvbm.safe_log import SafeLog

try:
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError
    from sqlalchemy import URL, Connection, ExceptionContext, event, insert, make_url
    from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
    from sqlalchemy.pool import NullPool
except ImportError:
    raise MissingExtraError("the catalog's database library (sqlalchemy[asyncio], alembic)", "catalog") from None

from kvbm.catalog.sql.tables import VERSION_TABLE, positions

STATEMENT_TIMEOUT_S = 30.0  # a batch takes milliseconds; what takes this long is a dead server or a stuck lock
MIGRATION_TIMEOUT_S = 600.0
LOCK_TIMEOUT_S = 10.0
_WAL_BYTES = 8 << 20  # what SQLite keeps of its log once the log is in the database
_MIGRATION_LOCK = 0x6B76626D_00000001  # "kvbm" in the high half; advisory locks are per database
_ALEMBIC = threading.Lock()  # `alembic.context` is one a process: two migrations at once would mix their connections
_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}
log = SafeLog()

_FORMS = "give sqlite:///path/catalog.db or postgresql://user:password@host:5432/database"
_ESCAPES = "in a user or password write @ as %40, / as %2F, : as %3A and % as %25"
_PORT = 5432
# SQLSTATE of a server that is no primary (any more), or not for long: read_only_sql_transaction, admin_shutdown,
# crash_shutdown, cannot_connect_now
_NO_PRIMARY = ("25006", "57P01", "57P02", "57P03")


def parse_url(url: str | Path) -> URL:
    """The URL with the driver kvbm uses; libpq's `sslmode` becomes asyncpg's `ssl`.

    Several hosts may stand with commas between, as libpq has them: the first that fits `target_session_attrs` is taken,
    by default one that can be written to.

    Args:
        url: a path is that of an SQLite file, whatever characters it has; in a text they would mean something.
    Raises: CatalogError: it is malformed, or names a database kvbm cannot use. The message never shows a password.
    """
    if isinstance(url, Path):
        return URL.create(_DRIVERS["sqlite"], database=str(url))
    try:
        parsed = _with_hosts(url)
    except (ArgumentError, ValueError):
        raise CatalogError(f"the database URL cannot be read; {_FORMS}; {_ESCAPES}") from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise CatalogError(f"a database of kind {parsed.drivername!r} cannot hold the catalog; {_FORMS}")
    parsed = parsed.set(drivername=driver)
    if is_sqlite(parsed):
        if not parsed.database or parsed.database == ":memory:" or parsed.host:
            raise CatalogError(f"{shown(parsed)} names no file; give sqlite:///path, or sqlite:////path from the root")
    elif (
        "@" in url.partition("@")[2].partition("?")[0]
    ):  # the host, and what messages show, would be half of the password
        raise CatalogError(f"the database URL has more than one @; {_ESCAPES}")
    elif not parsed.database:
        raise CatalogError(f"{shown(parsed)} names no database; {_FORMS}")
    if "sslmode" in parsed.query:
        mode = parsed.query["sslmode"]
        parsed = parsed.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return parsed


def _with_hosts(url: str) -> URL:
    """`make_url`, for libpq's several hosts, too: postgresql://user:password@one:5432,two:5432/database.

    Raises ArgumentError, ValueError.
    """
    parts = urlsplit(url)
    who, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return make_url(url)
    query = f"?{parts.query}" if parts.query else ""
    parsed = make_url(f"{parts.scheme}://{who}{at}{parts.path}{query}")
    places = [urlsplit(f"//{one}") for one in hosts.split(",")]
    if not all(place.hostname for place in places):
        raise ValueError(hosts)
    named = {
        "host": ",".join(str(place.hostname) for place in places),
        "port": ",".join(str(place.port or _PORT) for place in places),
    }
    return parsed.update_query_dict({"target_session_attrs": "read-write", **parsed.query, **named})


def is_sqlite(url: URL) -> bool:
    """Whether the URL names an SQLite file; else it is Postgres."""
    return url.get_backend_name() == "sqlite"


def shown(url: URL) -> str:
    """The URL for messages: no password, no driver."""
    bare = url.set(drivername=url.get_backend_name(), query={}).render_as_string(hide_password=True)
    hosts, ports = (_listed(url, key) for key in ("host", "port"))
    if not hosts:
        return bare
    with_ports = map(":".join, zip(hosts, ports, strict=True)) if len(hosts) == len(ports) else hosts
    return f"{bare} on {', '.join(with_ports)}"


def _listed(url: URL, key: str) -> list[str]:
    """What a URL's query says of its hosts."""
    said = url.query.get(key, ())
    return [part for one in ((said,) if isinstance(said, str) else said) for part in one.split(",")]


def migrations_folder() -> Path:
    """Where the migrations are: in the installed package, or beside the package in a checkout.

    Raises: CatalogError: in neither.
    """
    package = Path(str(files("kvbm.catalog"))).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError(f"no migrations in {package} or beside it; install kvbm again")


@contextmanager
def database_errors(where: str, remedy: str = "") -> Iterator[None]:
    """Turn what drivers raise into a CatalogError that begins with `where` and ends with `remedy`."""
    try:
        yield
    except DBAPIError as error:
        raise CatalogError(f"{where}: {_first_line(error.orig or error)}{remedy}") from error
    except TimeoutError as error:
        raise CatalogError(f"{where}: no answer in time{remedy}") from error
    except (
        SQLAlchemyError,
        CommandError,
        OSError,
        EOFError,
        UnicodeError,
    ) as error:  # the last two: a cut connection, a host that is none
        raise CatalogError(f"{where}: {_first_line(error)}{remedy}") from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise CatalogError(f"{where}: {error}{remedy}") from error  # SQLite's driver begins one for each connection


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error  # SQLAlchemy's asyncpg errors carry the driver's own, without its class name
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


async def open_database(url: str | Path, connect_timeout_s: float) -> AsyncEngine:
    """An engine on the database, migrated to the newest schema.

    Raises:
        CatalogError: the URL is malformed, nothing answers within `connect_timeout_s`, or the schema is newer than
            this kvbm's.
        MissingExtraError: the driver is not installed.
    """
    parsed = parse_url(url)
    engine = _engine(parsed, connect_timeout_s, STATEMENT_TIMEOUT_S)
    if is_sqlite(parsed):
        await asyncio.to_thread(_close_to_others, Path(parsed.database or ""))
    try:
        with database_errors(f"{shown(parsed)} cannot be opened", "; start the database, or correct catalog.database"):
            try:
                async with asyncio.timeout(connect_timeout_s), engine.connect():
                    pass
            except TypeError as error:  # asyncpg's, for an option it does not know
                raise CatalogError(f"{shown(parsed)} has an option that cannot be used: {error}") from None
            except TimeoutError:
                raise CatalogError(
                    f"{shown(parsed)} does not answer within {connect_timeout_s:g} s; start the database, or correct "
                    "catalog.database"
                ) from None
        await asyncio.to_thread(_migrate, parsed, connect_timeout_s)
    except BaseException:
        await engine.dispose()
        raise
    return engine


def _close_to_others(file: Path) -> None:
    """Make an SQLite file its owner's alone, before SQLite makes it; the files beside it take its mode.

    Raises CatalogError.
    """
    try:
        make_plain(file)
    except PermissionError:
        return  # SQLite's own words say what of it cannot be used
    except OSError as error:
        raise CatalogError(
            f"{file} cannot be used as a database ({error.strerror}); correct catalog.database"
        ) from None
    for path in (file, *(file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm", "-journal"))):
        try:
            mode = narrow(path)
        except OSError:
            warn_exposed("database", path)
        else:
            if mode:
                log.warning("database.narrowed", path=str(path), was=f"{mode:04o}", now="0600")


class DatabaseView(NamedTuple):
    """A database as it is.

    Attributes:
        shown: its URL, without password.
        server: kind and version.
        is_there: false for an SQLite file that a catalog would make, in `folder`.
        schema: its revision, "" for an empty database. `head`: the newest this kvbm knows. `is_newer`: it does not know
            the schema.
        unwritable: "" when a row could be written (it was taken back), else why not.
        round_trip_s: of the smallest question.
    """

    shown: str
    server: str
    is_there: bool
    folder: str
    schema: str
    head: str
    is_newer: bool
    unwritable: str
    round_trip_s: float


async def look(url: str | Path, timeout_s: float) -> DatabaseView:
    """What a database is, without migrating or making it.

    Raises CatalogError, MissingExtraError: as `open_database`.
    """
    parsed = parse_url(url)
    scripts = _scripts()
    head = scripts.get_current_head() or ""
    file = Path(parsed.database or "") if is_sqlite(parsed) else None
    if file is not None and not file.exists():
        return DatabaseView(shown(parsed), "SQLite", False, str(file.parent), "", head, False, "", 0.0)
    engine = _engine(parsed, timeout_s, timeout_s, poolclass=NullPool, lock_timeout_s=timeout_s / 2)
    known = {script.revision for script in scripts.walk_revisions()}
    try:
        with database_errors(f"{shown(parsed)} cannot be opened", "; start the database, or correct catalog.database"):
            async with asyncio.timeout(timeout_s), engine.connect() as connection:
                begin_s = time.perf_counter()
                await connection.exec_driver_sql("SELECT 1")
                round_trip_s = time.perf_counter() - begin_s
                asked = "SELECT 'SQLite ' || sqlite_version()" if file is not None else "SHOW server_version"
                version = str((await connection.exec_driver_sql(asked)).scalar())
                schema = await connection.run_sync(_schema) or ""
                await connection.rollback()
                unwritable = await _try_row(connection, file is not None, schema == head)
    except TypeError as error:  # asyncpg's, for an option it does not know
        raise CatalogError(f"{shown(parsed)} has an option that cannot be used: {error}") from None
    finally:
        await engine.dispose()
    server = version if file is not None else f"PostgreSQL {version.split(maxsplit=1)[0]}"
    is_newer = bool(schema) and schema not in known
    folder = str(file.parent) if file is not None else ""
    return DatabaseView(shown(parsed), server, True, folder, schema, head, is_newer, unwritable, round_trip_s)


def _schema(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


async def _try_row(connection: AsyncConnection, sqlite: bool, at_head: bool) -> str:
    """Write a row of a name nobody else has, or a table where there is none yet, and take it back."""
    name = f"kvbm_doctor_{secrets.token_hex(8)}"
    try:
        if sqlite:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins none before a CREATE TABLE
        if at_head:
            await connection.execute(insert(positions).values(stream=name, stream_sequence=0))
        else:
            await connection.exec_driver_sql(f"CREATE TABLE {name} (at integer)")
    except DBAPIError as error:
        return _first_line(error.orig or error)
    finally:
        await connection.rollback()
    return ""


def _engine(
    url: URL,
    connect_timeout_s: float,
    statement_timeout_s: float,
    lock_timeout_s: float | None = None,
    **options: Any,
) -> AsyncEngine:
    arguments: dict[str, Any]
    lock_timeout_s = LOCK_TIMEOUT_S if lock_timeout_s is None else lock_timeout_s
    if is_sqlite(url):
        path = Path(url.database or "")
        try:
            make_folder(path.parent)
        except OSError as error:
            raise CatalogError(
                f"the folder {path.parent} cannot be made ({error.strerror}); correct catalog.database"
            ) from None
        arguments = {"timeout": lock_timeout_s}
    else:
        arguments = {
            "timeout": connect_timeout_s,
            "command_timeout": statement_timeout_s,
            "server_settings": {"application_name": "kvbm-catalog"},  # poolers know it, and none of the others
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": str,  # none: the next one takes its place
            "async_creator_fn": _connect_in_turn,
        }
    try:
        engine = create_async_engine(url, connect_args=arguments, **options)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the database driver {error.name}", "catalog") from None
    if is_sqlite(url):
        event.listen(engine.sync_engine, "connect", _set_sqlite_sync)
    else:
        event.listen(engine.sync_engine, "begin", partial(_bound_waits, lock_timeout_s, statement_timeout_s))
        event.listen(engine.sync_engine, "handle_error", _leave_no_primary)
    return engine


async def _connect_in_turn(*, host: Any = None, port: Any = None, **options: Any) -> Any:
    """A connection to the first of several hosts that fits, each with its part of the time: a host that is silent
    leaves some to the next.
    """
    import asyncpg

    many = list(zip(host, port, strict=True)) if isinstance(host, list) and isinstance(port, list) else []
    if len(many) < 2 or options.get("target_session_attrs") == "prefer-standby":  # which compares them all
        where = {"host": host, "port": port}
        named = {name: value for name, value in where.items() if value is not None}
        return await asyncpg.connect(**named, **options)
    unfit = (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
    options["timeout"] /= len(many)
    for one, its_port in many[:-1]:
        with suppress(*unfit):
            return await asyncpg.connect(host=one, port=its_port, **options)
    one, its_port = many[-1]
    return await asyncpg.connect(host=one, port=its_port, **options)


def _bound_waits(lock_timeout_s: float, statement_timeout_s: float, connection: Connection) -> None:
    """Bound a transaction's waits, for this transaction alone: the connection may be another one's next.

    A replica that dies behind a silent network must not keep the position's row for good.
    """
    lock_ms, idle_ms = f"{lock_timeout_s * 1000:.0f}", f"{statement_timeout_s * 1000:.0f}"
    connection.exec_driver_sql(
        f"SELECT set_config('lock_timeout', '{lock_ms}', true),"
        f" set_config('idle_in_transaction_session_timeout', '{idle_ms}', true)"
    )


def _leave_no_primary(context: ExceptionContext) -> None:
    """End every connection once a server says that it is no primary, or says nothing: nobody else cuts them for
    long.
    """
    error = context.original_exception
    if isinstance(error, TimeoutError) or getattr(error, "sqlstate", None) in _NO_PRIMARY:
        context.is_disconnect = True


def _set_sqlite_sync(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    cursor.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last batches, each whole with its position
    cursor.close()


def _migrate(url: URL, connect_timeout_s: float) -> None:
    """Runs in a thread with its own loop: Alembic is synchronous and reads files."""
    asyncio.run(_migrate_here(url, connect_timeout_s))


async def _migrate_here(url: URL, connect_timeout_s: float) -> None:
    engine = _engine(url, connect_timeout_s, MIGRATION_TIMEOUT_S, poolclass=NullPool)
    try:
        with database_errors(f"{shown(url)} cannot be migrated"):
            if is_sqlite(url):
                await _enter_wal(engine)
            async with engine.begin() as connection:
                await connection.run_sync(_upgrade, url)
    finally:
        await engine.dispose()


async def _enter_wal(engine: AsyncEngine) -> None:
    """Make the file's journal a write-ahead log, so that readers and the writer are not in each other's way.

    The mode stays with the file. SQLite's own waiting does not cover the switch, and two that open a new file may meet.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            async with engine.connect() as connection:
                await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
                return
        except OperationalError as error:
            if "locked" not in str(error.orig) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.02)


def _upgrade(connection: Connection, url: URL) -> None:
    if is_sqlite(url):
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins none before a CREATE TABLE
    else:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
    scripts = _scripts()
    known = {script.revision for script in scripts.walk_revisions()}
    head = scripts.get_current_head()
    current = _schema(connection)
    if current is not None and current not in known:
        raise CatalogError(
            f"{shown(url)} has schema {current}, which is newer than {head}, the newest this kvbm knows; upgrade kvbm"
        )
    if current != head:
        config = _configuration()
        config.attributes["connection"] = connection
        with _ALEMBIC:  # after the database's own lock, always in this order
            command.upgrade(config, "head")


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_configuration())


def _configuration() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
