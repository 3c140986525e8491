"""Debian's Prometheus on metrics of real parts: a catalog, two managers that lend to each other, their object store."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import urllib3
import yaml

import kvbm
from kvbm.core.ids import Tier
from kvbm.pools.stores.memory import MemoryStore
from tests.eventually import eventually
from tests.lending_pairs import DEPTH, Pair, computed
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.object_pools import memory_objects
from tests.servers import START_WAIT_S, ServerMissingError, free_port, start_process, stop_process
from tests.sites import K

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "kvbm.rules.yml"
WAIT_S = 120.0
ONLY_COMPUTED, LENT = 2, 1  # prompts


def promtool(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Debian's promtool; it comes with Prometheus."""
    command = [_binary("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=folder)


def _binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerMissingError(name, "prometheus", "apt-get install --no-install-recommends")
    return found


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._url, self._http = url, urllib3.PoolManager(timeout=WAIT_S)

    def get(self, path: str, **fields: str) -> Any:
        """The `data` of an answer of its API. Raises AssertionError: it refuses, with what it says."""
        answer = self._http.request("GET", f"{self._url}/api/v1/{path}", fields=fields).json()
        assert answer["status"] == "success", f"{fields or path}: {answer.get('error')}"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def alerts(self, state: str) -> dict[str, dict[str, Any]]:
        """The alerts in a state, by name."""
        return {one["labels"]["alertname"]: one for one in self.get("alerts")["alerts"] if one["state"] == state}

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._http.request("GET", f"{self._url}/-/ready", retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False


@contextmanager
def prometheus(targets: dict[str, list[str]], every: str = "200ms", rules: Path = RULES) -> Iterator[Prometheus]:
    """A Prometheus with rules.

    Args:
        targets: host:port, by job. every: how often to scrape and to look at the rules. rules: others than those.
    """
    with tempfile.TemporaryDirectory(prefix="kvbm-prometheus-") as name:
        folder, port = Path(name), free_port()
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": job, "scrape_timeout": every, "static_configs": [{"targets": those}]}
                        for job, those in targets.items()
                    ],
                }
            )
        )
        command = [_binary("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        process = start_process(command, folder / "log", cwd=folder)
        try:
            running = Prometheus(f"http://127.0.0.1:{port}")
            eventually(
                lambda: running.is_ready() or process.poll() is not None,
                "Prometheus does not start",
                START_WAIT_S,
                (folder / "log").read_text,
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield running
        finally:
            stop_process(process)


class MeasuredSite:
    """A catalog and two managers that have computed, stored, read from each other and from an object store.

    Attributes:
        pair: the cluster. metrics: of both managers, over HTTP. targets: what to scrape, by job.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.pair = Pair(folder, opened)
        catalog = self.pair.site.client.url
        store = MemoryStore()
        lender, reader = (self._manager(name, store) for name in ("a", "b"))
        self.pair.is_heard("a", "b")
        computed(lender, Tier.HOST, LENT)
        self.pair.has_found("a", LENT)
        serve(reader, LENT, DEPTH)
        serve(reader, ONLY_COMPUTED, DEPTH)
        assert reader.settle(WAIT_S)
        reader.evict(Tier.HBM, hashes_of(LENT, DEPTH))
        serve(reader, LENT, DEPTH)
        self.pair.site.client.route(NAMESPACE.id, hashes_of(LENT, DEPTH), 16 * DEPTH)
        self.pair.site.client.lookup(NAMESPACE, hashes_of(LENT, DEPTH))
        self.metrics = opened.enter_context(kvbm.serve_metrics(lender, reader))
        self.targets = {
            "kvbm-catalog": [catalog.removeprefix("http://")],
            "kvbm-engines": [f"{self.metrics.host}:{self.metrics.port}"],
        }

    def _manager(self, name: str, store: MemoryStore) -> kvbm.Manager:
        objects = memory_objects(BLOCK_BYTES, K, store, deadline_s=WAIT_S)
        manager = kvbm.open_manager(self.pair.settings(name), [NAMESPACE], BLOCK_BYTES, object_pool=objects)
        self.pair.closes(manager)
        return manager

    def exported(self) -> dict[str, str]:
        """What /metrics of the catalog and of the managers have: kinds of metrics by the names of their families."""
        http = urllib3.PoolManager(timeout=WAIT_S)
        found = {}
        for url in (f"{self.pair.site.client.url}/metrics", self.metrics.url):
            for line in http.request("GET", url).data.decode().splitlines():
                if line.startswith("# TYPE "):
                    name, kind = line.removeprefix("# TYPE ").split()
                    found[name] = kind
        return found


def has_rates(running: Prometheus) -> bool:
    """Whether all that a site measures was scraped often enough for rates."""
    newest = (
        "kvbm_catalog_transfer_bytes_total",
        "kvbm_catalog_object_put_bytes_total",
        "kvbm_catalog_lent_bytes_total",
        'kvbm_catalog_requests_total{outcome="passed"}',
        "kvbm_manager_peer_bytes_total",
        "process_cpu_seconds_total",
    )
    return all(
        any(float(one["value"][1]) >= 3 for one in running.query(f"count_over_time({name}[5m])")) for name in newest
    )
