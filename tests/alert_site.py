"""A cluster whose parts can be broken one by one, and a Prometheus that scrapes all of it every two seconds.

A nats-server, a PostgreSQL, an S3 server, a catalog and two instances, each a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, Tier
from kvbm.locate.http import CatalogClient
from kvbm.reference.ledger import Ledger
from kvbm.workload.processes import Child, start_http
from tests.catalog_site import SPACE, Instance, is_forgotten
from tests.eventually import eventually
from tests.extras import needed
from tests.faults.processes.proxy import ProxyHub
from tests.nats_fixture import started
from tests.object_stores import s3_place
from tests.prometheus_site import RULES, Prometheus, prometheus
from tests.servers import free_port, own_postgres, s3_server
from tests.shortened_rules import shortened

asyncpg = needed("asyncpg", "catalog")

CLUSTER, WAIT_S, EVERY = "alerts", 240.0, "2s"
CAPACITY = 2000  # of the index
ENGINE = Path(__file__).parent / "alert_engine.py"
_AGAIN_S = 0.3


class Fault(NamedTuple):
    """What breaks, and the alerts that tell it.

    Attributes:
        name: in words. fires: all alerts that fire because of it. made: breaks it in a block, and mends it at its end;
            gives what the cluster's users do again and again meanwhile.
        together: they fire at once; else one after the other.
    """

    name: str
    fires: set[str]
    made: Callable[[AlertSite], AbstractContextManager[Callable[[], object]]]
    together: bool = True


class Engine:
    """An instance that runs, and is told what to do."""

    def __init__(self, child: Child, address: str) -> None:
        self.child, self.address = child, address

    def answer(self) -> dict[str, Any]:
        """Its next line. Raises ProcessError: it has ended, or says nothing in time."""
        said = self.child.process.stdout
        assert said is not None
        line = said.readline() if select.select([said], [], [], WAIT_S)[0] else b""
        if not line:
            raise self.child.failure("says nothing")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Have it close its manager and end."""
        assert self.child.process.stdin is not None
        self.child.process.stdin.close()
        self.child.process.wait(WAIT_S)

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        """Tell it a line, and give its answer."""
        assert self.child.process.stdin is not None
        self.child.process.stdin.write(json.dumps({"op": op, **more}).encode() + b"\n")
        self.child.process.stdin.flush()
        return self.answer()


class AlertSite:
    """The cluster.

    Attributes:
        folder: of all. nats, postgres: servers. s3: the process of the object store. engines: by name. prometheus: what
            scrapes all; from `watch` on. peer_link: what lies between the instance that lends and who reads from it.

    Args:
        whole: with PostgreSQL and the object store; else with SQLite and without one.
    """

    prometheus: Prometheus

    def __init__(self, folder: Path, opened: ExitStack, whole: bool = True) -> None:
        self.folder, self._opened = folder, opened
        self.nats_port = free_port()
        self.start_nats()
        opened.callback(lambda: self.nats.stop())
        if whole:
            self.postgres = opened.enter_context(own_postgres())
        self._database = self.postgres.url if whole else f"sqlite:///{folder / 'catalog.db'}"
        self.catalog_port = free_port()
        self.client = CatalogClient(f"http://127.0.0.1:{self.catalog_port}", WAIT_S)
        opened.callback(self.client.close)
        opened.callback(lambda: self.catalog.stop())
        self.start_catalog()
        self._store: dict[str, Any] = {}
        if whole:
            place = s3_place(opened.enter_context(s3_server(on_start=self._keep_store)))
            os.environ |= place.environment
            self._store = {
                "pools.object.url": place.url,
                "pools.object.endpoint": place.endpoint,
                "pools.object.timeout_s": 4.0,
                "pools.object.blocks": 4,
            }
        self.key = folder / "key"
        self.key.touch(0o600)
        self.key.write_text("k" * 64)
        if whole:
            hub = ProxyHub()
            opened.callback(hub.close)
            self._lends_at = free_port()
            self.peer_link = hub.open(self._lends_at)
        self.engines: dict[str, Engine] = {}
        self._usual: dict[str, dict[str, Any]] = {}
        self._engine_ports: dict[str, int] = {}
        self.prompts = itertools.count(1)

    # -- parts --------------------------------------------------------------------------------------------------------

    def start_nats(self) -> None:
        """The nats-server, on what it had."""
        self.nats = started(self.folder / "nats", self.nats_port)

    def kill_nats(self) -> None:
        """As `kill -9` does."""
        self.nats._process.kill()
        self.nats.stop()

    def start_catalog(self, wait: bool = True) -> None:
        """The catalog, where it was. Waits until it is ready, or else until it answers at all."""
        sets = {
            "instance.cluster": CLUSTER,
            "instance.data_dir": self.folder / "catalog",
            "nats.url": self.nats.url,
            "nats.timeout_s": 5,
            "catalog.listen": f"127.0.0.1:{self.catalog_port}",
            "catalog.database": self._database,
            "catalog.archive": self.archive,
            "catalog.checkpoints": self.checkpoints,
            "catalog.history": self.folder / "history",
            "catalog.checkpoint_every_s": 2,
            "catalog.liveness_s": 6,
            "catalog.capacity": CAPACITY,
        }
        command = [sys.executable, "-m", "kvbm", "catalog", "serve", *(f"--set={key}={sets[key]}" for key in sets)]
        url = f"{self.client.url}/healthz"
        self.catalog = start_http("catalog", command, url, self.folder / "logs", WAIT_S)
        if wait:
            self.client.wait_ready(WAIT_S)

    @property
    def archive(self) -> Path:
        """The folder of the archive."""
        return self.folder / "archive"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def launch(self, name: str, label: str = "", version: str = "", **more: Any) -> Engine:
        """An instance of a name in a process, in a folder of its own.

        Args:
            label: of the process and its folder; the name. version: of kvbm, as if that were installed.
        """
        label = label or name
        port = self._engine_ports.setdefault(label, free_port())
        flags: dict[str, Any] = {
            "instance.id": name,
            "instance.cluster": CLUSTER,
            "instance.data_dir": str(self.folder / label),
            "pools.hbm.slots": 24,
            "pools.hbm.device": "cpu",
            "pools.host.slots": 32,
            "pools.nvme.slots": 64,
            "pools.nvme.direct": "auto",
            "nats.url": f"nats://127.0.0.1:{self.nats_port}",
            "nats.heartbeat_s": 0.5,
            "catalog.url": self.client.url,
            "onboard.locate_s": 5.0,
            "transport.listen": "tcp://127.0.0.1:0",
            "transport.key_file": str(self.key),
            "samples.rate": 1.0,
            "metrics_port": port,
        }
        command = [sys.executable, str(ENGINE), json.dumps(flags | self._store | self._usual.get(label, {}) | more)]
        paths = [str(ENGINE.parents[1])]
        if version:
            installed = self.folder / f"kvbm_ledger-{version}.dist-info"
            installed.mkdir(exist_ok=True)
            (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvbm-ledger\nVersion: {version}\n")
            paths.insert(0, str(self.folder))
        environment = {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
        child = Child(label, command, self.folder / "logs", environment, spoken=True)
        self._opened.callback(child.stop)
        return Engine(child, f"127.0.0.1:{port}")

    def start_reader_and_lender(self) -> None:
        """The instances `a`, which reads from `b` over TCP alone, and `b`, whose blocks are in no object store."""
        address = f"tcp://127.0.0.1:{self._lends_at}"
        self._usual["a"] = {"only_transport": "tcp"}
        self._usual["b"] = {
            "transport.listen": address,
            "transport.advertise": f"127.0.0.1:{self.peer_link.port}",
            "offload.object": "never",
        }
        self.start_engines(a={}, b={})

    def start_engines(self, **flags: dict[str, Any]) -> None:
        """Instances that belong to the cluster, by name, and that the catalog has heard; all begin at once."""
        self.engines |= {name: self.launch(name, **more) for name, more in flags.items()}
        for name in flags:
            self.engines[name].answer()
        eventually(
            lambda: flags.keys() <= {one.instance for one in self.client.instances() if one.state == "live"},
            f"nobody hears of {[*flags]}",
            WAIT_S,
        )

    @contextmanager
    def stranger(self, name: str, slots: int = 64) -> Iterator[Instance]:
        """One that publishes what a test has it publish, and of which heartbeats come.

        It ends cleanly, and is forgotten.
        """
        made = Instance(self.nats.url, CLUSTER, name)
        made.ledger = Ledger([PoolStated(Tier.HBM, slots, 1024)])
        made.ledger.start(Epoch(1), [SPACE], [name], "test", "0")
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(1.0):
                made.beat()

        beats = threading.Thread(target=beat)
        made.beat()
        beats.start()
        try:
            yield made
            made.ledger.stop()
            made.publish()
        finally:
            is_over.set()
            beats.join(WAIT_S)
        eventually(lambda: is_forgotten(self.client, made), f"{name} is not forgotten", WAIT_S)

    def pool_of(self, name: str) -> Path:
        """The file of an instance's NVMe pool."""
        return self.folder / name / "instances" / name / "nvme.pool"

    def signal_store(self, number: int) -> None:
        """Stop the object store, or have it go on."""
        os.kill(self._store_pid, number)

    def _keep_store(self, pid: int) -> None:
        self._store_pid = pid

    def sql(self, statement: str) -> None:
        """Have the database do something."""

        async def work() -> None:
            connection = await asyncpg.connect(self._database.replace("+asyncpg", ""), timeout=WAIT_S)
            try:
                await connection.execute(statement)
            finally:
                await connection.close()

        asyncio.run(work())

    def entries(self) -> int:
        """How full the index is."""
        (found,) = self.prometheus.query("kvbm_catalog_index_entries")
        return int(found["value"][1])

    # -- alerts -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to scrape, and wait until no alert waits or fires."""
        rules = self.folder / "kvbm.rules.yml"
        rules.write_text(shortened(RULES.read_text()))
        targets = {
            "kvbm-catalog": [f"127.0.0.1:{self.catalog_port}"],
            "kvbm-engines": [one.address for one in self.engines.values()],
        }
        self.prometheus = self._opened.enter_context(prometheus(targets, EVERY, rules))
        several = f"min(count_over_time(up[1m])) >= 5 and count(up == 1) == {1 + len(self.engines)}"
        eventually(lambda: self.prometheus.query(several), "not all is scraped", WAIT_S)
        self.is_well()

    def is_well(self) -> None:
        """Wait until no alert waits or fires, twice in a row."""
        for _ in range(2):
            eventually(lambda: not self.alerts(), "alerts do not end", 2 * WAIT_S, self.alerts)
            time.sleep(1)

    def alerts(self) -> dict[str, str]:
        """What waits or fires now: states by name."""
        return {one["labels"]["alertname"]: one["state"] for one in self.prometheus.get("alerts")["alerts"]}

    def firing(self) -> set[str]:
        """Names of alerts that fire now."""
        return {name for name, state in self.alerts().items() if state == "firing"}

    def fired_since(self, begin_s: float) -> set[str]:
        """Names of the alerts that have fired since then, also for a moment."""
        lasted_s = max(1, int(time.time() - begin_s))
        fired = f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{lasted_s}s]))'
        return {one["metric"]["alertname"] for one in self.prometheus.query(fired)}

    def proves(self, fault: Fault) -> None:
        """Make a fault, and end it.

        The alerts that fire become exactly those it names, and afterwards none waits or fires. Nothing else has fired
        in between, also for a moment.
        """
        begin_s = time.time()
        with fault.made(self) as meanwhile:
            self.comes(fault, meanwhile, begin_s)
        self.is_well()
        assert self.fired_since(begin_s) == fault.fires, fault.name

    def comes(self, fault: Fault, meanwhile: Callable[[], object], begin_s: float) -> None:
        """Wait until the alerts of a fault fire, and no others."""
        until_s = time.monotonic() + WAIT_S
        while (firing := self.firing() if fault.together else self.fired_since(begin_s)) != fault.fires:
            assert time.monotonic() < until_s, f"{fault.name}: {firing} fire, and {fault.fires} were to"
            meanwhile()
            time.sleep(_AGAIN_S)
