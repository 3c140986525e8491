"""What engines tell their events to: a nats-server and a catalog with an archive, real processes that tests kill and
start again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvbm import CatalogClient
from kvbm.cli import replay_main
from kvbm.core.errors import CatalogError
from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, start_http
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.holding import Holding, holding_of
from tests.engines.vllm.harness.words import Ask
from tests.servers import START_WAIT_S, free_port

WAIT_S = 120.0
_POLL_S = 0.1
Depths = dict[str, dict[str, int]]  # instance → tier → blocks


class Cluster:
    """Both servers on ports that stay theirs, so that engines find them again.

    Attributes:
        archive: folder where the catalog keeps all frames.
        client: asks the catalog.
    """

    def __init__(self, folder: Path) -> None:
        self.archive = folder / "archive"
        self._folder = folder
        self._nats_port, catalog_port = free_port(), free_port()
        self._listen = f"127.0.0.1:{catalog_port}"
        self._nats: EmbeddedServer | None = None
        self._catalog: Child | None = None
        self.client = CatalogClient(f"http://{self._listen}", WAIT_S / 2)
        self.start_nats()
        self.start_catalog()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_catalog()
        self.kill_nats()
        self.client.close()

    @property
    def addresses(self) -> dict[str, str]:
        """As settings of an engine that belongs to it."""
        return {"nats.url": f"nats://127.0.0.1:{self._nats_port}", "catalog.url": self.client.url}

    @property
    def settings(self) -> dict[str, Any]:
        """Those of an engine that belongs to it and is soon known to be back."""
        return self.addresses | {"nats.heartbeat_s": 0.2, "nats.timeout_s": 20.0}

    def start_nats(self) -> None:
        """Start the nats-server, over what it had."""
        self._nats = EmbeddedServer.start(self._folder / "nats", port=self._nats_port, timeout_s=START_WAIT_S)

    def kill_nats(self) -> None:
        """kill -9."""
        if self._nats is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._nats.pid, signal.SIGKILL)
            self._nats.stop()
            self._nats = None

    def start_catalog(self) -> None:
        """`kvbm-catalog serve`, over what it had."""
        settings = {
            "nats.url": self.addresses["nats.url"],
            "catalog.listen": self._listen,
            "catalog.liveness_s": 60.0,  # an engine that a busy machine holds up is no dead one
            "instance.data_dir": self._folder / "catalog",
        }
        command = [sys.executable, "-m", "kvbm", "catalog", "serve", "--archive", str(self.archive)]
        command += [f"--set={key}={value}" for key, value in settings.items()]
        self._catalog = start_http(
            "catalog", command, f"{self.client.url}/healthz", self._folder / "logs", START_WAIT_S
        )
        self.client.wait_ready(WAIT_S)

    def kill_catalog(self) -> None:
        """kill -9."""
        if self._catalog is not None:
            self._catalog.kill()
            self._catalog.stop()
            self._catalog = None

    # -- answers ------------------------------------------------------------------------------------------------------

    def depths(self, engine: Engine, ask: Ask) -> Depths:
        """How many blocks of a prompt each instance has in each tier, from the first on.

        Args:
            engine: any; it says what the prompt is looked up by.
        """
        space, packed = engine.in_core("hashes", list(ask.tokens), ask.salt)
        namespace, hashes = NamespaceId(bytes.fromhex(space)), bytes.fromhex(packed)
        holders: list[set[tuple[str, str]]] = []
        for at in range(0, len(hashes), HASH_BYTES):
            answer = self.client.block(namespace, SequenceHash(hashes[at : at + HASH_BYTES]))
            holders.append({(one.name, one.tier) for one in answer.holders})
        found: Depths = {}
        for name, tier in sorted(set().union(*holders)):
            run = next((at for at, there in enumerate(holders) if (name, tier) not in there), len(holders))
            found.setdefault(name, {})[tier] = run
        self._check_lookup(namespace, hashes, holders)
        return found

    def _check_lookup(self, namespace: NamespaceId, hashes: bytes, holders: list[set[tuple[str, str]]]) -> None:
        """A lookup must say of the whole run what is said of each block."""
        answer = self.client.lookup(namespace, hashes)
        assert answer.blocks == len(holders)
        wanted: dict[str, tuple[int, dict[str, int]]] = {}
        for name in sorted({name for there in holders for name, _ in there}):
            tiers: dict[str, int] = {}
            for there in holders:
                mine = {tier for one, tier in there if one == name}
                if not mine:
                    break
                hottest = next(tier for tier in ("HBM", "HOST", "NVME") if tier in mine)
                tiers[hottest] = tiers.get(hottest, 0) + 1
            if tiers:
                wanted[name] = sum(tiers.values()), tiers
        said = {
            one.instance: (one.depth, {tier: count for tier, count in one.tiers.items() if count})
            for one in answer.instances
        }
        assert said == wanted
        assert answer.deepest == max((depth for depth, _ in wanted.values()), default=0)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def agree(self, *engines: Engine) -> list[Holding]:
        """Wait until the catalog says of each engine what its ledger says, and the ledger of HBM what vLLM's prefix
        cache holds.
        """
        deadline_s = time.monotonic() + WAIT_S
        for engine in engines:
            engine.offload(WAIT_S)
        while True:
            said = [holding_of(engine) for engine in engines]
            differences = self._differences(said)
            if not differences:
                return said
            if time.monotonic() >= deadline_s:
                raise AssertionError(f"after {WAIT_S:.0f} s the catalog does not agree: " + "; ".join(differences))
            time.sleep(_POLL_S)

    def _differences(self, said: list[Holding]) -> list[str]:
        try:
            ready = self.client.ready()
            told = {one.instance: one for one in self.client.instances()}
        except CatalogError as error:
            return [str(error)]
        found = [] if ready.ready and not ready.degraded else [f"it is not ready, or degraded: {ready}"]
        for one in said:
            if one.tiers["HBM"] != one.prefix_cache:
                found.append(
                    f"{one.instance} holds {len(one.tiers['HBM'])} blocks in HBM, vLLM {len(one.prefix_cache)},"
                    f" of which {len(one.tiers['HBM'] & one.prefix_cache)} are the same"
                )
            its = told.get(one.instance)
            if its is None:
                found.append(f"{one.instance} is not known")
                continue
            held = {tier: count for tier, count in its.held_blocks.items() if count and tier in one.tiers}
            true = {tier: len(hashes) for tier, hashes in one.tiers.items() if hashes}
            says = (its.state, its.epoch, its.offset, its.digest, its.suspect, its.partial, held)
            wanted = ("live", one.epoch, one.offset, one.digest, False, False, true)
            if says != wanted:
                found.append(f"{one.instance} is {wanted}, it says {says}")
        return found

    def verify(self, *engines: Path) -> None:
        """`kvbm-replay verify` finds nothing in the archive, nor in the journal of each instance's folder; both hold
        events.
        """
        for source in (self.archive, *(folder / "instances" / folder.name / "journal" for folder in engines)):
            answer = replay("verify", source)
            assert answer["findings"] == [], source
            assert replay("stat", source)["instances"], f"{source} is empty"


def replay(command: str, source: Path) -> Any:
    """What `kvbm-replay` says of a source, in JSON. It must end with 0."""
    words = io.StringIO()
    out = source.parent / f"{source.name}-{command}.json"
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        code = replay_main([command, str(source), "--json", str(out)])
    assert code == 0, words.getvalue()
    return json.loads(out.read_bytes())
