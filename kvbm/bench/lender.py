"""One instance that lends, as a process of its own, for `kvbm bench fetch`: it holds blocks in HOST and says where.

    python -m kvbm.bench.lender '{"instance.id": "lender", …}' BLOCKS BLOCK_BYTES SEED SOCKET

Settings are flags as JSON, and its engine owns HBM, so no torch is needed. It prints one `LenderPlace` as JSON once it
lends, and serves until its standard input ends. At SOCKET, and over TCP, it also answers over bare sockets
(`bare_sockets`); the words BUSY and IDLE say there whether its main thread computes in pure Python, as an engine's
does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np

from kvbm.assembly import NATIVE, open_engine_manager
from kvbm.bench.bare_sockets import BareServer
from kvbm.config import load_settings
from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, Tier
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.pools.host.pool import HostPool

NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
IDLE, BUSY = 0, 1
_WAIT_S = 10.0


class LenderPlace(msgspec.Struct, kw_only=True):
    """Where a lender is found.

    Attributes:
        lends: as in its heartbeats.
        fd, mapped_bytes: of HOST's memory in its process, as `map_host` takes them.
        port: of the bare sockets over TCP.
    """

    instance: str
    lends: dict[str, str]
    pid: int
    fd: int
    mapped_bytes: int
    port: int


def hashes_of(blocks: int, seed: int) -> bytes:
    """Names of blocks, packed."""
    return np.random.default_rng(seed).bytes(blocks * HASH_BYTES)


def rows_of(blocks: int, block_bytes: int, seed: int) -> np.ndarray:
    """What was computed: (blocks, block_bytes) uint8."""
    return np.random.default_rng(seed + 1).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


class MainThread:
    """What the main thread does: nothing, or Python without end. `run` is it; the others are for other threads."""

    def __init__(self) -> None:
        self._busy, self._computes, self._waits = threading.Event(), threading.Event(), threading.Event()
        self._ended = False

    def hear(self, word: int) -> None:
        """Be busy or idle from now on; returns once it is so."""
        if word == BUSY:
            self._busy.set()
            self._computes.wait(_WAIT_S)
        else:
            self._busy.clear()
            self._waits.wait(_WAIT_S)

    def end(self) -> None:
        """Let `run` return."""
        self._ended = True
        self._busy.set()

    def run(self) -> None:
        """Do what is wanted until the end."""
        while not self._ended:
            self._computes.clear()
            self._waits.set()
            self._busy.wait()
            self._waits.clear()
            while self._busy.is_set() and not self._ended:
                self._computes.set()
                sum(number * number for number in range(20_000))


def hold(manager: EngineHbmManager, blocks: int, block_bytes: int, seed: int) -> HostPool:
    """Compute blocks and bring them to HOST, as an engine's workers would; the pool they lie in."""
    host, hashes = manager.pools.slots[Tier.HOST], hashes_of(blocks, seed)
    assert isinstance(host, HostPool) and host.memory is not None
    manager.engine_stored(NAMESPACE.id, NO_PARENT, 0, hashes)
    store = manager.begin_store(NAMESPACE.id, NO_PARENT, 0, hashes, uses=2)
    assert store is not None and store.hashes == hashes, "HOST does not take all blocks"
    rows = rows_of(blocks, block_bytes, seed)
    host.memory[store.slots] = rows
    manager.end_store(store, [True] * blocks, NATIVE.checksums(rows))
    return host


def main(flags: str, blocks: int, block_bytes: int, seed: int, unix: Path) -> int:
    """See the module."""
    settings = load_settings(flags=json.loads(flags))
    work = MainThread()

    signal.signal(signal.SIGTERM, lambda *_: work.end())  # so that the manager closes, and takes its socket away

    def wait_for_end() -> None:
        sys.stdin.read()
        work.end()

    with open_engine_manager(settings, [NAMESPACE], block_bytes, engine="bench") as manager:
        host = hold(manager, blocks, block_bytes, seed)
        assert host.memory is not None
        bare = BareServer(host.memory.reshape(-1), unix, work.hear)
        told = LenderPlace(
            instance=manager.instance,
            lends=manager.lends,
            pid=os.getpid(),
            fd=host.fd,
            mapped_bytes=host.mapped_bytes,
            port=bare.address.port,
        )
        print(msgspec.json.encode(told).decode(), flush=True)
        threading.Thread(target=wait_for_end, daemon=True).start()
        work.run()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])))
    except KvbmError as error:
        raise SystemExit(str(error)) from None
