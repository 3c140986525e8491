"""What the page is tested against: a nats-server, a catalog over HTTP, and three instances that are real managers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import urllib3

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import load_settings
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, Namespace, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.streams.server import EmbeddedServer
from tests.eventually import WAIT_S, eventually

CLUSTER = "web"
BLOCK_BYTES = 4096
BLOCK_TOKENS = 16
SPACE = Namespace(model="llama-3-8b", revision="r1", block_tokens=BLOCK_TOKENS)
OTHER = Namespace(model="llama-3-8b", revision="r1", block_tokens=BLOCK_TOKENS, tenant="acme")
SECRETS = {"acme": "a secret"}


def tokens_of(prompt: int, blocks: int) -> list[int]:
    """Token ids of a prompt of so many full blocks."""
    return [1000 * prompt + at for at in range(blocks * BLOCK_TOKENS)]


def hashes_of(prompt: int, blocks: int, space: Namespace = SPACE) -> bytes:
    """Their packed hashes."""
    root = space.root(SECRETS.get(space.tenant, "").encode())
    return sequence_hashes(tokens_of(prompt, blocks), BLOCK_TOKENS, root)


def overview_of(url: str, token: str = "") -> Any:
    """What /v1/overview answers."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = urllib3.request("GET", f"{url}/v1/overview", headers=headers, retries=False, timeout=WAIT_S)
    assert answer.status == 200, answer.data
    return msgspec.json.decode(answer.data)


class Engine(NamedTuple):
    """One instance, and what an engine does with it."""

    manager: Manager

    def compute(self, prompt: int, blocks: int, space: Namespace = SPACE) -> bytes:
        """Serve a prompt that nobody has, and keep it."""
        hashes, manager = hashes_of(prompt, blocks, space), self.manager
        slots = eventually(lambda: manager.allocate(blocks), "HBM stays short")
        rows = np.tile(np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES), BLOCK_BYTES // HASH_BYTES)
        manager.pools.slots[Tier.HBM].write(slots, rows, Proof(space.id, Epoch(1), hashes, NATIVE.checksums(rows)))
        manager.unpin(manager.create(space.id, NO_PARENT, 0, hashes, slots))
        assert manager.settle(WAIT_S)
        return hashes


class WebSite:
    """See the module. `opened` ends it.

    Args:
        more: of the catalog's settings.
    """

    def __init__(self, folder: Path, opened: ExitStack, **more: Any) -> None:
        self.folder, self._opened = folder, opened
        self.engines: dict[str, Engine] = {}
        self.server = EmbeddedServer.start(folder / "nats", timeout_s=WAIT_S)
        opened.callback(self.server.stop)
        self.settings: dict[str, Any] = {
            "nats_url": self.server.url,
            "database_url": f"sqlite+aiosqlite:///{folder / 'catalog.db'}",
            "cluster": CLUSTER,
            "listen": "127.0.0.1:0",
            "store_every_s": 0.02,
            "connect_s": WAIT_S,
            "whole_wait_s": 0.2,
            "liveness_s": 5.0,
            "tenant_secrets": SECRETS,
            **more,
        }
        self.catalog = self._start()
        opened.callback(lambda: self.catalog.stop())

    @property
    def url(self) -> str:
        """Where the catalog answers."""
        return self.catalog.url

    def restart(self) -> None:
        """Stop the catalog and start another at the same address."""
        self.settings["listen"] = self.url.removeprefix("http://")
        self.catalog.stop()
        self.catalog = self._start()

    def instance(self, name: str, **flags: object) -> Engine:
        """A manager in this process."""
        named = {key.replace("__", "."): value for key, value in flags.items()}
        settings = load_settings(
            flags={
                "instance.data_dir": str(self.folder / "instances"),
                "instance.cluster": CLUSTER,
                "instance.id": name,
                "instance.topology": ("zone-a", f"rack-{len(name) % 3}", name),
                "pools.hbm.slots": 96,
                "pools.hbm.device": "memory",
                "pools.host.slots": 192,
                "pools.nvme.slots": 384,
                "nats.url": self.server.url,
                "nats.timeout_s": WAIT_S,
                "nats.heartbeat_s": 0.2,
                "snapshots.least_s": 0.1,
                "samples.rate": 1.0,
                **named,
            }
        )
        manager = open_manager(settings, [SPACE, OTHER], BLOCK_BYTES)
        self._opened.callback(manager.close)
        self.engines[name] = Engine(manager)
        return self.engines[name]

    def wait_for(self, instances: int, token: str = "") -> None:
        """Until so many are live and whole, and all is read that they have decided."""

        def are_whole() -> bool:
            told = overview_of(self.url, token)
            return bool(
                told["states"].get("live") == instances and not told["suspect"] and not sum(told["rows"]["unread"])
            )

        eventually(are_whole, f"not {instances} instances are live and whole")

    def _start(self) -> CatalogThread:
        return CatalogThread(ServiceSettings(**self.settings), NATIVE, NATIVE_INDEX).start()
