"""The processes of the crash loop: nats-server, Postgres, catalogs and workers, each behind proxies of its own.

Every party can be killed, stopped (SIGSTOP), continued and started again on what it left behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.bench.postgres import readable_by_all
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, ProcessError, free_port
from tests import servers
from tests.faults.processes.disk import Disk
from tests.faults.processes.proxy import Proxy, ProxyHub
from tests.faults.processes.told import ANSWER_S, ROOT, ToldWorker

CLUSTER = "crash"
START_WAIT_S = 120.0
END_WAIT_S = 60.0  # after a kill; and of a clean end, before it becomes a harder one
DISK_BYTES = 96 << 20


class Party(ABC):
    """One process that faults happen to.

    Attributes:
        expected: whether it should be running; if it is not then, it has died by itself.
    """

    name = ""
    expected = False

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it answers."""

    @abstractmethod
    def pid(self) -> int:
        """Of the process."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once and wait for that."""

    def freeze(self) -> None:
        """SIGSTOP."""
        os.killpg(self.pid(), signal.SIGSTOP)  # `spawn` gives each a session, and so a group, of its own

    def thaw(self) -> None:
        """SIGCONT."""
        try:
            os.killpg(self.pid(), signal.SIGCONT)
        except ProcessLookupError:
            pass


class NatsParty(Party):
    """A nats-server on one store and one port for the whole run."""

    def __init__(self, folder: Path, disk: bool) -> None:
        self.name = "nats"
        self.folder = folder / "nats"
        self.disk = Disk(self.folder, 4 * DISK_BYTES) if disk else None
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._server: EmbeddedServer | None = None
        self._log = folder / "logs" / "nats.log"

    def start(self) -> None:
        deadline_s = time.monotonic() + START_WAIT_S
        while True:
            try:
                self._server = EmbeddedServer.start(self.folder, port=self.port, timeout_s=START_WAIT_S)
                break
            except Exception:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
        self.expected = True

    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def alive(self) -> bool:
        return self._server is not None and self._server._process.poll() is None

    def kill(self) -> None:
        self.expected = False
        if self._server is not None:
            self._server._process.kill()
            self._server._process.wait(END_WAIT_S)
            self._server._keeper.join(END_WAIT_S)

    def close(self) -> None:
        """End it, keep its log."""
        if self._server is not None:
            self.thaw()
            self._server.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / "nats-server.log").exists():
            shutil.copy(self.folder / "nats-server.log", self._log)
        if self.disk is not None:
            self.disk.close()


class PostgresParty(Party):
    """A Postgres server that loses no commit when it is killed, with one database."""

    def __init__(self, folder: Path) -> None:
        self.name = "postgres"
        self.port = free_port()
        self._folder = folder / "postgres"
        self._log = folder / "logs" / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._options: dict[str, Any] = {}
        self._binaries = Path()

    def url(self, port: int = 0) -> str:
        """Of the database, directly or through a proxy's port."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{port or self.port}/postgres"

    def prepare(self) -> None:
        """initdb."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(parents=True)
        self._binaries = servers._postgres_binaries()
        options = servers._ordinary_user()
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        if options:  # Postgres refuses to run as root
            for folder in (self._folder, *self._folder.parents[:2]):
                if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
                    folder.chmod(folder.stat().st_mode | 0o011)
            self._binaries = readable_by_all(self._binaries, self._folder)
            os.chown(data, options["user"], options["group"])
        self._options = options | {"cwd": self._folder, "env": servers._postgres_environment(self._binaries)}
        command = [str(self._binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=utf8"]
        made = servers.start_process([*command, "--no-sync"], self._log, **self._options)
        if made.wait(START_WAIT_S):
            raise AssertionError(f"initdb failed:\n{self._log.read_text()}")

    def start(self) -> None:
        data = self._folder / "data"
        command = servers._postgres_command(self._binaries, data, self.port, durable=False)
        command += [
            "-c",
            "synchronous_commit=on",
            "-c",
            "full_page_writes=on",
        ]  # what a killed server had committed stays
        deadline_s = time.monotonic() + START_WAIT_S
        while True:
            # the children of a killed server need a moment to notice; until then a new one refuses to start
            (data / "postmaster.pid").unlink(missing_ok=True)
            self._process = servers.start_process(command, self._log, start_new_session=True, **self._options)
            try:
                servers._wait_until_ready(self._process, data, self._log)
                break
            except AssertionError:
                if time.monotonic() > deadline_s:
                    raise
                self.kill()
                time.sleep(0.3)
        self.expected = True

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def freeze(self) -> None:
        """SIGSTOP for the server and all its backends."""
        for process_id in self._family():
            _signal(process_id, signal.SIGSTOP)

    def thaw(self) -> None:
        for process_id in self._family():
            _signal(process_id, signal.SIGCONT)

    def _family(self) -> list[int]:
        """The server and its children, which it puts into sessions of their own."""
        children = Path(f"/proc/{self.pid()}/task/{self.pid()}/children")
        try:
            return [self.pid(), *map(int, children.read_text().split())]
        except OSError:
            return [self.pid()]

    def kill(self) -> None:
        self.expected = False
        if self._process is not None:
            for process_id in self._family():
                _signal(process_id, signal.SIGKILL)
            self._process.wait(END_WAIT_S)

    def close(self) -> None:
        """End it."""
        self.kill()

    def rows(self, *queries: str) -> list[list[dict[str, Any]]]:
        """The rows of queries, in one transaction, without a proxy in between."""
        return asyncio.run(self._rows(queries))

    async def _rows(self, queries: tuple[str, ...]) -> list[list[dict[str, Any]]]:
        import asyncpg

        connection = await asyncpg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/postgres", timeout=END_WAIT_S)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                return [[dict(row) for row in await connection.fetch(query)] for query in queries]
        finally:
            await connection.close()


class CatalogParty(Party):
    """A `kvbm-catalog serve`, with its own folder for checkpoints and archive."""

    def __init__(
        self,
        name: str,
        folder: Path,
        hub: ProxyHub,
        nats: NatsParty,
        postgres: PostgresParty,
        disk: bool,
        settings: Mapping[str, object],
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.disk = Disk(self.folder, 4 * DISK_BYTES) if disk else None
        self.to_nats = hub.open(nats.port)
        self.to_sql = hub.open(postgres.port)
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clock = self.folder / "clock"
        self.archive = self.folder / "archive"
        self._logs = folder / "logs"
        self._flags = {
            "nats.url": f"nats://127.0.0.1:{self.to_nats.port}",
            "catalog.database": postgres.url(self.to_sql.port),
            "catalog.listen": f"127.0.0.1:{port}",
            "catalog.archive": self.archive,
            "catalog.checkpoints": self.folder / "checkpoints",
            "instance.data_dir": self.folder,
            **settings,
        }
        self._child: Child | None = None

    def start(self) -> None:
        """Start it, again when something it needs is not there yet, and wait until it answers."""
        module = "tests.faults.processes.clocked"
        sets = [f"--set={key}={value}" for key, value in self._flags.items()]
        command = [sys.executable, "-m", module, str(self._clock), "catalog", "serve", *sets]
        deadline_s = time.monotonic() + START_WAIT_S
        while True:
            self._child = Child(self.name, command, self._logs, {"PYTHONPATH": str(ROOT)})
            while self._child.alive() and time.monotonic() < deadline_s:
                if self.get("/healthz") is not None:
                    self.expected = True
                    return
                time.sleep(0.1)
            if time.monotonic() >= deadline_s:
                raise self._child.failure("did not start")
            time.sleep(0.3)

    def pid(self) -> int:
        assert self._child is not None
        return self._child.process.pid

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def kill(self) -> None:
        self.expected = False
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """A clean end."""
        self.expected = False
        if self._child is not None:
            self._child.stop(END_WAIT_S)

    def close(self) -> None:
        """End it."""
        if self._child is not None and self._child.alive():
            self.thaw()
            self.stop()
        if self.disk is not None:
            self.disk.close()

    def step_clock(self, offset_s: float) -> None:
        """Step its wall clock."""
        self._clock.write_text(str(offset_s))

    def get(self, path: str, body: object = None) -> Any:
        """The answer to a request; None when there is none, or no success."""
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(f"{self.url}{path}", data)
        if data is not None:
            request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=10.0) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except OSError:
            return None
        return msgspec.json.decode(text) if text[:1] in b"{[" else text.decode()


class WorkerParty(Party):
    """A manager process."""

    def __init__(
        self,
        name: str,
        instance: str,
        folder: Path,
        hub: ProxyHub,
        nats: NatsParty,
        disk: bool,
        seed: int,
        rate: float,
        settings: Mapping[str, object],
    ) -> None:
        self.name, self.instance = name, instance
        self.folder = folder / name
        self.disk = Disk(self.folder, DISK_BYTES) if disk else None
        self.to_nats: Proxy = hub.open(nats.port)
        self.wrong: list[dict[str, Any]] = []
        self._logs = folder / "logs"
        self._seed, self._rate = seed, rate
        self._flags = {
            "instance.id": instance,
            "instance.cluster": CLUSTER,
            "instance.data_dir": self.folder,
            "nats.url": f"nats://127.0.0.1:{self.to_nats.port}",
            "pools.hbm.device": "memory",
            **settings,
        }
        self._child: ToldWorker | None = None

    @property
    def journal(self) -> Path:
        """Its journal's folder."""
        return self.folder / "instances" / self.instance / "journal"

    @property
    def pool_file(self) -> Path:
        """Its NVMe pool."""
        return self.folder / "instances" / self.instance / "nvme.pool"

    def start(self, **settings: object) -> None:
        """Start it and wait until it serves."""
        self._seed += 1
        flags = self._flags | {key.replace("__", "."): value for key, value in settings.items()}
        self._child = ToldWorker(self.name, self._logs, self._seed, self._rate, flags, self.wrong)
        self._child.expect(START_WAIT_S, "start")
        self.expected = True

    def pid(self) -> int:
        assert self._child is not None
        return self._child.process.pid

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def kill(self) -> None:
        self.expected = False
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """A clean end; harder when it takes too long."""
        self.expected = False
        if self._child is None or not self._child.alive():
            return
        self.send(op="stop")
        try:
            self._child.expect(END_WAIT_S, "stop")
            self._child.process.wait(END_WAIT_S)
        except (ProcessError, subprocess.TimeoutExpired):
            pass
        self._child.stop(5.0)

    def close(self) -> None:
        """End it."""
        if self.alive():
            self.thaw()
            self.kill()
        if self.disk is not None:
            self.disk.close()

    def send(self, **command: object) -> None:
        """One command."""
        assert self._child is not None
        self._child.send(**command)

    def ask(self, wait_s: float = ANSWER_S, **command: object) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises ProcessError."""
        assert self._child is not None
        return self._child.ask(wait_s, **command)


def _signal(process_id: int, which: int) -> None:
    try:
        os.kill(process_id, which)
    except ProcessLookupError:
        pass
