"""An engine that owns HBM, scripted: its workers are this process, and copy between nothing and the rows of HOST."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.assembly import NATIVE, open_engine_manager
from kvbm.config import load_settings
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Tier
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.pools.base import ObjectPool
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pool import HostPool
from tests.cores import CORES
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, rows_of

WAIT_S = 60.0


def opened(folder: Path, objects: ObjectPool | None = None, core: str = "native", **flags: Any) -> EngineHbmManager:
    """A manager of an engine with 64 blocks in HBM, 32 in HOST, 64 in NVME; `__` stands for a dot in settings."""
    settings = load_settings(
        flags={
            "instance.data_dir": str(folder),
            "nats.enabled": False,
            "pools.hbm.owner": "engine",
            "pools.hbm.slots": 64,
            "pools.host.slots": 32,
            "pools.nvme.slots": 64,
            "pools.nvme.direct": "auto",
            "onboard.wait_s": WAIT_S,
        }
        | {key.replace("__", "."): value for key, value in flags.items()}
    )
    return open_engine_manager(settings, [NAMESPACE], BLOCK_BYTES, "test", objects, core=CORES[core])


def mapped_rows(manager: EngineHbmManager) -> np.ndarray:
    """The rows of HOST as a worker has them."""
    host = manager.pools.slots[Tier.HOST]
    assert isinstance(host, HostPool)
    memory = map_host(os.getpid(), host.fd, host.mapped_bytes)
    return memory[: host.slots * BLOCK_BYTES].reshape(host.slots, BLOCK_BYTES)


def parent_of(hashes: bytes, start: int) -> bytes:
    return hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else NO_PARENT


class OwningEngine:
    """Drives a manager as an engine with its own HBM would."""

    def __init__(self, manager: EngineHbmManager) -> None:
        self.manager, self.rows = manager, mapped_rows(manager)

    def compute(self, prompt: int, depth: int, start: int = 0) -> int:
        """Blocks start … depth - 1 of a prompt are in HBM now; how many were already."""
        chain = hashes_of(prompt, depth)
        return self.manager.engine_stored(NAMESPACE.id, parent_of(chain, start), start, chain[start * HASH_BYTES :])

    def begin_store(self, prompt: int, depth: int, start: int = 0, uses: int = 1) -> Store | None:
        chain = hashes_of(prompt, depth)
        return self.manager.begin_store(NAMESPACE.id, parent_of(chain, start), start, chain[start * HASH_BYTES :], uses)

    def fill(self, store: Store) -> np.ndarray:
        """What workers do: the bytes; the checksums they answer."""
        rows = rows_of(store.hashes)
        self.rows[store.slots] = rows
        return NATIVE.checksums(rows)

    def store(self, prompt: int, depth: int, start: int = 0, uses: int = 1) -> int:
        """Compute, and bring to HOST what it wants; how many blocks that were."""
        self.compute(prompt, depth, start)
        store = self.begin_store(prompt, depth, start, uses)
        if store is None:
            return 0
        self.manager.end_store(store, [True] * len(store.slots), self.fill(store))
        return len(store.slots)

    def acquired(self, prompt: int, depth: int, first: int = 0, **more: Any) -> Acquiring:
        """A finished acquiring whose bytes are those of the prompt."""
        acquiring = self.manager.begin_acquire(NAMESPACE.id, hashes_of(prompt, depth), first=first, **more)
        return self.awaited(acquiring, prompt, first)

    def awaited(self, acquiring: Acquiring, prompt: int, first: int = 0) -> Acquiring:
        eventually(acquiring.poll, "an acquiring is not done")
        assert len(acquiring.slots) == acquiring.depth == sum(acquiring.hits.values())
        wanted = rows_of(hashes_of(prompt, first + acquiring.depth, start=first))
        assert np.array_equal(self.rows[acquiring.slots], wanted), "wrong bytes in HOST"
        return acquiring

    def hits(self, prompt: int, depth: int, first: int = 0) -> dict[Tier, int]:
        """Where a prompt was found; it is released again."""
        acquiring = self.acquired(prompt, depth, first)
        hits = acquiring.hits
        acquiring.release()
        return hits

    def empty_host(self) -> None:
        """Withdraw what HOST holds once it has gone to NVME."""
        assert self.manager.settle(WAIT_S)
        self.manager.evict(Tier.HOST, b"".join(self.manager.held(Tier.HOST)))
