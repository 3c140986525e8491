"""Child processes of a demo or a test: started on free ports with fresh stores, watched, and ended with their
parent.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvbm.assembly import catalog_client
from kvbm.core.errors import KvbmError, MissingExtraError
from kvbm.files import make_folder, opener
from kvbm.locate.http import CatalogClient
from kvbm.locate.proxies import reaching_here
from kvbm.streams.child import python, spawn

START_WAIT_S = 120.0
"""How long what should start or answer is waited for; what dies meanwhile is noticed at once."""


class ProcessError(KvbmError):
    """A child process did not start, died, or did not answer in time; the message ends with its last words."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One child process, which ends when we do. What it says goes to a file, whose end is told when it fails.

    Args:
        spoken: its standard output is for us to read, not for the file.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        spoken: bool = False,
    ) -> None:
        make_folder(folder)
        self.name = name
        self.output = folder / f"{name}.log"
        with open(self.output, "ab", opener=opener) as output:
            self.process, _ = spawn(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if spoken else output,
                stderr=output,
                environment={**os.environ, **reaching_here(), **(environment or {})},
            )

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End it at once, as `kill -9` does."""
        self.process.kill()
        self.process.wait(START_WAIT_S)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask it to end, and end it when it does not. Idempotent."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # it was gone before it read what we had written
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def failure(self, what: str) -> ProcessError:
        """An error with the process's last words."""
        code = self.process.poll()
        state = "is still running" if code is None else f"ended with {code}"
        words = self.output.read_text(errors="replace").strip().splitlines()[-3:] if self.output.exists() else []
        return ProcessError(
            f"{self.name} {what} ({state}); {' / '.join(words) or 'it said nothing'}; log: {self.output}"
        )


def start_http(name: str, command: list[str], url: str, folder: Path, timeout_s: float = START_WAIT_S) -> Child:
    """Start a process and wait until its URL answers anything. Raises ProcessError: it died, or not within the time."""
    child = Child(name, command, folder)
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it listens on this machine
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not child.alive():
            raise child.failure("did not start")
        try:
            with directly.open(url, timeout=5.0):
                return child
        except urllib.error.HTTPError:
            return child
        except OSError:
            time.sleep(0.05)
    error = child.failure(f"did not answer at {url} within {timeout_s:g} s")
    child.kill()
    raise error


CATALOG_MODULES = (
    "aiosqlite",
    "alembic",
    "httptools",
    "prometheus_client",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "uvloop",
)
STORE_MODULES = ("flask", "flask_cors", "moto")


def require_modules(who: str, modules: Sequence[str], extra: str) -> None:
    """Refuse before anything is started, in one sentence for all that is absent. Raises MissingExtraError."""
    absent = [module for module in modules if not is_installed(module)]
    if absent:
        raise MissingExtraError(f"what {who} needs ({', '.join(absent)})", extra)


def is_installed(module: str) -> bool:
    """Whether a module is there; a package above it is imported, the module is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def start_catalog(
    folder: Path, nats_url: str, opened: ExitStack, settings: Mapping[str, object] | None = None
) -> CatalogClient:
    """A catalog process with its database in a folder, ready, and a client of it; `opened` ends both.

    Raises: ProcessError, CatalogError: it does not start, or is not ready in time.
    """
    child, client = start_catalog_process(folder, nats_url, settings)
    opened.callback(child.stop)
    opened.callback(client.close)
    client.wait_ready(START_WAIT_S)
    return client


def start_catalog_process(
    folder: Path, nats_url: str, settings: Mapping[str, object] | None = None
) -> tuple[Child, CatalogClient]:
    """A catalog process with its database in a folder, which may not be ready yet, and a client of it.

    Raises: ProcessError: it does not start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {"nats.url": nats_url, "catalog.listen": f"127.0.0.1:{port}", "instance.data_dir": folder}
    sets = [f"--set={key}={value}" for key, value in {**own, **(settings or {})}.items()]
    command = python("-m", "kvbm", "catalog", "serve", *sets)
    return start_http("catalog", command, f"{url}/healthz", folder / "logs"), catalog_client(url)


def start_object_store(folder: Path) -> tuple[Child, str]:
    """A local S3 server (moto) with nothing in it, and its URL. Raises MissingExtraError, ProcessError."""
    require_modules("the local object store", STORE_MODULES, "demo")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = python("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    return start_http("object-store", command, url, folder), url


def machine() -> str:
    """The machine in words, for reports."""
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
