"""Mooncake's store (`mooncake.store.MooncakeDistributedStore`) on one machine: its master, and one client whose memory
is the store.

Runs in that package's own environment. A put is `batch_put_from` out of a registered buffer, a get `batch_get_into`
another; client and master are processes of their own that speak over loopback, and the bytes are copied within the
client (`MC_STORE_MEMCPY`), which is what one machine has. `register` is a put session's start and end, which reserve
and commit without a byte, and `batch_is_exist`. Nothing of it checks bytes.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

os.environ.setdefault("MC_STORE_MEMCPY", "1")
os.environ.setdefault("GLOG_minloglevel", "2")

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from peers.measure import serve
from peers.process import Program, free_port
from peers.workload import block_rows

_START_S = 30.0
_REGISTERED_BYTES = 4096


class MooncakeStore:
    """A Store over one client."""

    def __init__(self, folder: str, blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._rows = block_rows(blocks, block_bytes)
        self._back = np.zeros_like(self._rows)
        port, metrics = free_port(), free_port()
        master = os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master")
        self._master = Program(
            [
                master,
                f"-rpc_port={port}",
                "-rpc_address=127.0.0.1",
                f"-metrics_port={metrics}",
                "-metrics_host=127.0.0.1",
                "-eviction_high_watermark_ratio=1.0",
            ]
        )
        self._store = MooncakeDistributedStore()
        deadline_s = time.monotonic() + _START_S
        room = blocks * block_bytes * 2 + (256 << 20)
        while self._store.setup("127.0.0.1", "P2PHANDSHAKE", room, 64 << 20, "tcp", "", f"127.0.0.1:{port}"):
            self._master.require_running()
            if time.monotonic() > deadline_s:
                raise ConnectionError("Error: the client found no master in time")
            time.sleep(0.2)
        for rows in (self._rows, self._back):
            if self._store.register_buffer(rows.ctypes.data, rows.nbytes):
                raise MemoryError("Error: a buffer was not registered")

    def keys(self, blocks: list[int], generation: int) -> list[str]:
        """A text a block."""
        return [f"{generation}-{block}" for block in blocks]

    def put(self, keys: list[str], blocks: list[int]) -> None:
        """See the module."""
        said = self._store.batch_put_from(keys, self._places(self._rows, blocks), [self._block_bytes] * len(keys))
        if any(said):
            raise MemoryError(f"Error: a put was refused with {min(said)}")

    def settle(self) -> None:
        """A put is stored when it returns."""

    def get(self, keys: list[str], blocks: list[int]) -> None:
        """See the module."""
        said = self._store.batch_get_into(keys, self._places(self._back, blocks), [self._block_bytes] * len(keys))
        if any(size != self._block_bytes for size in said):
            raise LookupError(f"Error: a get ended with {min(said)}")

    def wrong(self) -> int:
        """Compare all that came back."""
        wrong = int((self._back != self._rows).any(axis=1).sum())
        self._back[:] = 0
        return wrong

    def clear(self) -> None:
        """Remove every key, also those that were just read, which hold a lease."""
        self._store.remove_all(True)

    def register(self, keys: list[str]) -> None:
        """See the module."""
        if any(self._store.batch_put_session_start(keys, [_REGISTERED_BYTES] * len(keys))):
            raise MemoryError("Error: a session was refused")
        if any(self._store.batch_put_session_end(keys)) or not all(self._store.batch_is_exist(keys)):
            raise LookupError("Error: a block is not there after its session")

    def cpu_s(self) -> float:
        """The master's."""
        return self._master.cpu_s()

    def close(self) -> None:
        """End client and master."""
        self._store.close()
        self._master.close()

    def _places(self, rows: np.ndarray, blocks: list[int]) -> list[int]:
        return [rows.ctypes.data + block * self._block_bytes for block in blocks]


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("Error: Mooncake has wheels for Linux alone")
    serve("Mooncake store", version("mooncake-transfer-engine-non-cuda"), MooncakeStore)
