"""Two instances or more that lend to each other, beside a catalog and a nats-server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvbm.assembly import open_manager
from kvbm.config import Settings
from kvbm.core.ids import Namespace, Tier
from kvbm.manager.base import BlockManager
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.memory import MemoryStore
from tests.certificates import certify
from tests.eventually import WAIT_S, eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.sites import Site

DEPTH = 8


class Pair:
    """A cluster whose instances lend to each other."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.site = Site(folder, "lend", MemoryStore, opened)
        self.key = folder / "key"
        self.key.write_text("k" * 64)
        self.key.chmod(0o600)
        self._opened = opened

    def certificates(self, *names: str) -> dict[str, dict[str, Any]]:
        """Settings of instances that have a certificate each, and no key."""
        folder = self.key.parent
        ca = certify(folder, "ca")
        made = {name: certify(folder, name, ca) for name in names}
        return {
            name: {
                "transport__key_file": "",
                "transport__tls_cert": str(one.cert),
                "transport__tls_key": str(one.key),
                "transport__tls_ca": str(ca.cert),
            }
            for name, one in made.items()
        }

    def settings(self, name: str, **flags: Any) -> Settings:
        usual: dict[str, Any] = {
            "pools__hbm__device": "cpu",
            "pools__nvme__slots": 64,
            "journal__in_memory": False,
            "pools__nvme__direct": "auto",
            "transport__listen": "tcp://127.0.0.1:0",
            "transport__key_file": str(self.key),
        }
        return self.site.settings(name, **usual | flags)

    def instance(self, name: str, namespaces: tuple[Namespace, ...] = (NAMESPACE,), **flags: Any) -> Manager:
        manager = open_manager(self.settings(name, **flags), list(namespaces), BLOCK_BYTES)
        self.closes(manager)
        return manager

    def closes(self, manager: BlockManager) -> None:
        """Close a manager at the end."""
        self._opened.callback(manager.close)

    def is_heard(self, *names: str) -> None:
        """Wait until the catalog has heard of instances: what the first heartbeat of one tells of reads does
        not count.
        """
        eventually(
            lambda: {one.instance for one in self.site.client.instances() if one.state == "live"} >= {*names},
            f"nobody hears of {names}",
        )

    def has_found(self, name: str, prompt: int = 1, depth: int = DEPTH) -> None:
        """Wait until the catalog tells of what an instance lends."""
        eventually(
            lambda: (
                [(name, depth)]
                == [
                    (one.instance, one.depth)
                    for one in self.site.client.find(NAMESPACE.id, hashes_of(prompt, depth)).peers
                ]
            ),
            f"nobody hears of what {name} lends",
        )


def computed(owner: Manager, tier: Tier, prompt: int = 1, depth: int = DEPTH) -> bytes:
    """A prompt that an instance has computed, and holds in one tier."""
    hashes = hashes_of(prompt, depth)
    serve(owner, prompt, depth)
    assert owner.settle(WAIT_S)
    for other in {Tier.HBM, Tier.HOST, Tier.NVME} - {tier}:
        owner.evict(other, hashes)
    return hashes


def reads_by(reader: BlockManager, transport: str) -> None:
    """From now on it reads by one transport alone."""
    peers = reader.pools.peers
    assert peers is not None
    peers._transports = frozenset({transport})
