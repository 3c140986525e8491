"""LMCache's storage backends on one machine: `LocalCPUBackend`, `LocalDiskBackend`, and `RemoteBackend` over its fs
connector.

Runs in that package's own environment. Each is made as `storage_backend.CreateStorageBackends` makes it and called as
`StorageManager` calls it. With the CPU backend a put is an allocation of its memory, a copy of the block into it and
the submit; a get is a look-up and a copy out. With disk and fs the blocks lie in its CPU memory before the clock runs,
as they do once they were put there, and come back to that memory; both go past the page cache (`use_odirect`, and for
fs without the chunk's metadata in the file, which rules that out). Nothing of it checks bytes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from importlib.metadata import version
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from peers.measure import serve
from peers.workload import block_rows

_PATIENCE_S = 120.0
_DTYPE = torch.uint8


class LmcacheStore:
    """A Store over one backend.

    Args:
        backend: "cpu", "disk" or "fs".
        folder: where disk and fs keep their files.
    """

    def __init__(self, backend: str, folder: str, blocks: int, block_bytes: int) -> None:
        self._backend_name, self._blocks = backend, blocks
        self._files = tempfile.mkdtemp(prefix=f"lmcache-{backend}-", dir=os.path.abspath(folder))
        self._rows = torch.from_numpy(block_rows(blocks, block_bytes))
        self._back = torch.zeros_like(self._rows)
        self._got: dict[int, Any] = {}
        self._waiting = threading.Semaphore(0)
        self._put_blocks = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        pool_gib = (3 * blocks * block_bytes + (64 << 20)) / (1 << 30)
        shape = (1, 1, block_bytes, 1, 1)
        self._metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=_DTYPE,
            kv_shape=shape,
            chunk_size=block_bytes,
        )
        self._shape = self._metadata.get_shapes()[0]
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=block_bytes,
            local_cpu=True,
            max_local_cpu_size=pool_gib,
            local_disk=self._files if backend == "disk" else None,
            max_local_disk_size=2 * pool_gib,
            remote_url=f"fs://local:0{self._files}" if backend == "fs" else None,
            remote_serde="naive",
            extra_config={
                "use_odirect": True,
                "fs_connector_use_odirect": True,
                "save_chunk_meta": False,
                "local_cpu.pinned_align_bytes": 4096,
            },
        )
        self._cpu = LocalCPUBackend(config, self._metadata, "cpu")
        self._colder: Any = None
        if backend == "disk":
            self._colder = LocalDiskBackend(config, self._loop, self._cpu, "cpu", None, self._metadata)
        elif backend == "fs":
            self._colder = RemoteBackend(config, self._metadata, self._loop, self._cpu, "cpu")
            if self._colder.connection is None:
                raise ConnectionError("Error: the fs connector was not made")
        self._filled = [] if self._colder is None else [self._filled_object(block) for block in range(blocks)]
        self._put_keys: list[CacheEngineKey] = []

    def keys(self, blocks: list[int], generation: int) -> list[CacheEngineKey]:
        """A key a block."""
        return [CacheEngineKey("m", 1, 0, (generation << 32) + block, _DTYPE) for block in blocks]

    def put(self, keys: list[CacheEngineKey], blocks: list[int]) -> None:
        """See the module."""
        self._put_keys += keys
        if self._colder is None:
            objects = self._cpu.batched_allocate(self._shape, _DTYPE, len(keys))
            for held, block in zip(objects, blocks, strict=True):
                held.tensor.view(-1).copy_(self._rows[block])
            self._cpu.batched_submit_put_task(keys, objects)
            for held in objects:
                held.ref_count_down()
            return
        self._put_blocks += len(keys)
        self._colder.batched_submit_put_task(
            keys, [self._filled[block] for block in blocks], on_complete_callback=lambda _: self._waiting.release()
        )

    def settle(self) -> None:
        """Wait for the last completion."""
        for _ in range(self._put_blocks):
            if not self._waiting.acquire(timeout=_PATIENCE_S):
                raise TimeoutError("Error: a put was not complete in time")
        self._put_blocks = 0

    def get(self, keys: list[CacheEngineKey], blocks: list[int]) -> None:
        """See the module."""
        if self._colder is None:
            for key, block in zip(keys, blocks, strict=True):
                held = self._cpu.get_blocking(key)
                if held is None:
                    raise LookupError(f"block {block} is gone")
                self._back[block].copy_(held.tensor.view(-1))
                held.ref_count_down()
            return
        for held, block in zip(self._colder.batched_get_blocking(keys), blocks, strict=True):
            if held is None:
                raise LookupError(f"block {block} is gone")
            self._got[block] = held

    def wrong(self) -> int:
        """Compare all that came back."""
        if self._colder is None:
            wrong = int((self._back != self._rows).any(dim=1).sum())
            self._back.zero_()
            return wrong
        wrong = self._blocks - len(self._got)
        for block, held in self._got.items():
            wrong += not torch.equal(held.tensor.view(-1), self._rows[block])
            held.ref_count_down()
        self._got.clear()
        return wrong

    def clear(self) -> None:
        """Remove every key."""
        for key in self._put_keys:
            if self._backend_name == "fs":
                self._colder.remove(key)
            else:
                (self._colder or self._cpu).remove(key)
        if self._backend_name == "disk":
            self._colder.current_cache_size = 0.0  # a forced removal leaves it, and the disk would pass for full
        self._put_keys.clear()

    def cpu_s(self) -> float:
        """Nobody else works for it."""
        return 0.0

    def close(self) -> None:
        """Remove its files."""
        shutil.rmtree(self._files, ignore_errors=True)
        os._exit(0)  # its threads and loops have no common end

    def _filled_object(self, block: int) -> Any:
        held = self._cpu.allocate(self._shape, _DTYPE)
        held.tensor.view(-1).copy_(self._rows[block])
        return held


if __name__ == "__main__":
    serve("LMCache", version("lmcache"), LmcacheStore)
