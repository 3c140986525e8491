"""Managers in two racks, each a process of its own: rack_instances.py owner FOLDER ADDRESS, reader FOLDER CATALOG.

The owner has a catalog and a nats-server beside it, holds PROMPTS prompts in HOST, and says where the catalog is. The
reader is told by lines of JSON, each a `Wanted`, to serve a prompt, and answers each with a `Served`.
"""

from __future__ import annotations

import secrets
import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from kvbm.assembly import NATIVE, open_manager
from kvbm.config import load_settings
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.pools.stores.memory import MemoryStore
from kvbm.telemetry.stderr_log import to_standard_error
from kvbm.workload.processes import Child
from tests.eventually import WAIT_S, eventually
from tests.managers import NAMESPACE, hashes_of
from tests.sites import Site

PROMPTS, DEPTH = 6, 32
BLOCK_BYTES = 64 << 10
START_S = 120.0


class Wanted(msgspec.Struct, frozen=True):
    """A prompt to serve.

    Attributes:
        tokens_per_s: what the reader's engine computes.
        pause_s: by which the reader takes it to be later than after the last one.
    """

    prompt: int
    tokens_per_s: float
    pause_s: float = 0.0


class Served(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        read: blocks that were read from the owner; the others were left to be computed.
    """

    read: int


class RackReader:
    """The reader's process, started with a command before its own. `opened` ends it. Raises ProcessError."""

    def __init__(self, folder: Path, launcher: Sequence[str], catalog: str, opened: ExitStack) -> None:
        self._child = started("reader", folder, launcher, catalog, opened)

    def serve(self, wanted: Wanted) -> int:
        """How many blocks of a prompt it read. Raises ProcessError: it has died, or does not answer."""
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(msgspec.json.encode(wanted) + b"\n")
        self._child.process.stdin.flush()
        return msgspec.json.decode(line_of(self._child), type=Served).read


def started(role: str, folder: Path, launcher: Sequence[str], place: str, opened: ExitStack) -> Child:
    """A process of this module. `opened` ends it."""
    command = [*launcher, sys.executable, "-m", "tests.rack_instances", role, str(folder), place]
    child = Child(role, command, folder / "logs", {"no_proxy": "*", "NO_PROXY": "*"}, spoken=True)
    opened.callback(child.stop)
    return child


def line_of(child: Child) -> bytes:
    """What it says next. Raises ProcessError: nothing within START_S."""
    said = child.process.stdout
    assert said is not None
    line = said.readline() if select.select([said], [], [], START_S)[0] else b""
    if not line:
        raise child.failure("says nothing")
    return line


def key_of(folder: Path) -> Path:
    """The key of all instances; made by the first who asks."""
    key = folder / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
    return key


def rows_of(hashes: bytes) -> np.ndarray:
    """The bytes blocks must have: each its hash, repeated."""
    return np.tile(np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES), BLOCK_BYTES // HASH_BYTES)


def compute(manager: Manager, prompt: int) -> None:
    """Serve a prompt that nobody has, and keep it in HOST alone."""
    hashes = hashes_of(prompt, DEPTH)
    slots = eventually(lambda: manager.allocate(DEPTH), "HBM stays short")
    rows = rows_of(hashes)
    manager.pools.slots[Tier.HBM].write(slots, rows, Proof(NAMESPACE.id, Epoch(1), hashes, NATIVE.checksums(rows)))
    manager.unpin(manager.create(NAMESPACE.id, NO_PARENT, 0, hashes, slots))
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes)


def lend(folder: Path, address: str) -> None:
    """The owner, until its input ends."""
    with ExitStack() as opened:
        site = Site(folder, "racks", MemoryStore, opened, listen=f"{address}:0")
        more = {
            "instance__topology": ("rack-2", "host"),
            "pools__hbm__device": "cpu",
            "pools__host__slots": PROMPTS * DEPTH,
            "transport__listen": f"tcp://{address}:0",
            "transport__key_file": str(key_of(folder)),
        }
        manager = open_manager(site.settings("owner", **more), [NAMESPACE], BLOCK_BYTES)
        opened.callback(manager.close)
        for prompt in range(PROMPTS):
            compute(manager, prompt)
        hashes = hashes_of(PROMPTS - 1, DEPTH)
        eventually(
            lambda: [one.depth for one in site.client.find(NAMESPACE.id, hashes).peers] == [DEPTH],
            "the catalog does not hear of what is lent",
        )
        print(site.client.url, flush=True)
        sys.stdin.read()


def read(folder: Path, catalog: str) -> None:
    """The reader, until its input ends."""
    flags = {
        "instance.id": "reader",
        "instance.data_dir": str(folder),
        "instance.cluster": "racks",
        "instance.topology": ("rack-1", "host"),
        "journal.in_memory": True,
        "nats.enabled": False,
        "catalog.url": catalog,
        "pools.hbm.slots": 2 * DEPTH,
        "pools.hbm.device": "cpu",
        "pools.host.slots": 2 * DEPTH,
        "transport.fetch": True,
        "transport.key_file": str(key_of(folder)),
        "onboard.locate_s": WAIT_S,
        "onboard.wait_s": WAIT_S,
    }
    with open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES) as manager:
        peers, later_s = manager.pools.peers, 0.0
        assert peers is not None
        peers._host_id = "another machine"  # a socket of the owner's is a file that it finds here
        for line in sys.stdin.buffer:
            wanted = msgspec.json.decode(line, type=Wanted)
            later_s += wanted.pause_s
            peers._clock = lambda later_s=later_s: time.monotonic() + later_s
            manager.report_load(0, 0, prefill_tokens_per_s=wanted.tokens_per_s)
            hashes = hashes_of(wanted.prompt, DEPTH)
            prefix = manager.acquire(NAMESPACE.id, hashes)
            rows = np.empty((prefix.depth, BLOCK_BYTES), dtype=np.uint8)
            manager.pools.slots[Tier.HBM].read(prefix.slots, NAMESPACE.id, hashes[: HASH_BYTES * prefix.depth], rows)
            assert np.array_equal(rows, rows_of(hashes)[: prefix.depth]), "wrong bytes in HBM"
            manager.unpin(prefix.slots)
            print(msgspec.json.encode(Served(prefix.depth)).decode(), flush=True)


if __name__ == "__main__":
    to_standard_error()  # standard output is for answers
    {"owner": lend, "reader": read}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
