"""The sides of `kvbm bench fetch`: the lender's process, the reader, and CPU time."""

from __future__ import annotations

import json
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.assembly import NATIVE_ARENA, RowCopier
from kvbm.assembly.peers import open_peers, roots_of
from kvbm.bench.bare_sockets import BareAddress
from kvbm.bench.lender import NAMESPACE, LenderPlace, hashes_of, rows_of
from kvbm.config import load_settings
from kvbm.core.answers import PeerHolding
from kvbm.core.ids import HASH_BYTES, InstanceId
from kvbm.core.reads import ReadOutcome
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pool import HostPool
from kvbm.streams.child import python
from kvbm.workload.processes import Child, ProcessError

_START_S = 60.0
_READ_S = 30.0
_KEY_FILE = "key"
_SERVING = "kvbm-lend"  # what the native server calls its threads


class Lender(NamedTuple):
    """A lender's process.

    Attributes:
        bare: where it answers over bare sockets.
        bytes: of the blocks it lends.
    """

    lent: LenderPlace
    bare: BareAddress
    bytes: int

    @property
    def pid(self) -> int:
        """Its process."""
        return self.lent.pid

    @property
    def memory_path(self) -> str:
        """Where a process of the same user opens the memory its blocks lie in."""
        return f"/proc/{self.lent.pid}/fd/{self.lent.fd}"

    def memory(self) -> np.ndarray:
        """The memory its blocks lie in, as a process of the same user has it: flat, uint8."""
        return map_host(self.lent.pid, self.lent.fd, self.lent.mapped_bytes, pins=False)[: self.bytes]


class ProcessPlace(NamedTuple):
    """Where a process runs.

    Attributes:
        address: of its own, that it listens at.
        launcher: what a command is given to as its last arguments, to be run there; () for here.
    """

    address: str = "127.0.0.1"
    launcher: tuple[str, ...] = ()


_HERE = ProcessPlace()


def start_lender(
    folder: Path, blocks: int, block_bytes: int, seed: int, opened: ExitStack, place: ProcessPlace = _HERE
) -> Lender:
    """An instance that lends so many blocks, and nothing else of the cluster. `opened` ends it. Raises ProcessError."""
    key, unix = folder / _KEY_FILE, folder / "bare.sock"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    flags = {
        "instance.id": "lender",
        "instance.data_dir": str(folder),
        "journal.in_memory": True,
        "nats.enabled": False,
        "pools.hbm.owner": "engine",
        "pools.hbm.slots": blocks,
        "pools.host.slots": blocks,
        "transport.listen": f"tcp://{place.address}:0",
        "transport.key_file": str(key),
    }
    arguments = [json.dumps(flags), str(blocks), str(block_bytes), str(seed), str(unix)]
    command = [*place.launcher, *python("-m", "kvbm.bench.lender", *arguments)]
    child = Child("lender", command, folder / "logs", spoken=True)
    opened.callback(child.stop)
    said = child.process.stdout
    assert said is not None
    line = said.readline() if select.select([said], [], [], _START_S)[0] else b""
    if not line:
        raise child.failure("did not lend anything")
    lent = msgspec.json.decode(line, type=LenderPlace)
    return Lender(lent, BareAddress(lent.port, str(unix)), blocks * block_bytes)


class BenchReader:
    """Reads from a lender as a manager does, into rows of a HOST pool. `close` ends it.

    Attributes:
        rows: (blocks, block_bytes) uint8.
        threads: that copy from the lender's memory.
    """

    def __init__(self, lender: Lender, folder: Path, blocks: int, block_bytes: int, seed: int) -> None:
        settings = load_settings(
            flags={
                "instance.id": "reader",
                "instance.data_dir": str(folder),
                "pools.hbm.slots": 1,
                "transport.fetch": True,
                "transport.key_file": str(folder / _KEY_FILE),
                "catalog.url": "http://127.0.0.1:1",  # nobody asks it
            }
        )
        peers = open_peers(settings, InstanceId("reader"), [NAMESPACE], roots_of(settings))
        assert peers is not None
        held = PeerHolding(
            instance=lender.lent.instance, depth=blocks, tiers={}, distance=0, suspect=False, lends=lender.lent.lends
        )
        self._peers, [self._source] = peers, peers.sources(NAMESPACE.id, [held])
        self._hashes, self._wanted = hashes_of(blocks, seed), rows_of(blocks, block_bytes, seed)
        copier = RowCopier(settings.pools.host.copy_threads)
        self.threads = copier.threads
        self._pool = HostPool(blocks, block_bytes, NATIVE_ARENA, copier, pins=False)
        assert self._pool.memory is not None
        self.rows = self._pool.memory

    def close(self) -> None:
        """Give back connections and memory."""
        self._peers.close()
        self._pool.close()

    def read_s(self, transport: str) -> float:
        """Seconds to read all blocks. Raises ProcessError: they are not what the lender computed."""
        return self._read_s(transport, 0, len(self.rows))

    def read_one_s(self, transport: str, block: int) -> float:
        """The same of one block."""
        return self._read_s(transport, block, block + 1)

    def timed(self, work: Callable[[np.ndarray], object], wanted: np.ndarray) -> float:
        """Seconds of another work that fills all rows, which it finds as a read finds them.

        Raises ProcessError: not with those bytes.

        Args:
            wanted: flat, uint8.
        """
        return timed_s(work, self.rows, wanted)

    def timed_one(self, work: Callable[[np.ndarray, int], object], slot: int, there: np.ndarray) -> float:
        """The same of one row, which is to be as the lender's memory there is from a byte on that the work is given.

        Args:
            there: all of that memory, flat.
        """
        row = self.rows[slot : slot + 1]
        first = slot * row.nbytes
        return timed_s(lambda rows: work(rows, first), row, there[first : first + row.nbytes])

    def _read_s(self, transport: str, begin: int, end: int) -> float:
        rows, source = self.rows[begin:end], self._source._replace(transport=transport)
        rows.fill(0)
        hashes = self._hashes[begin * HASH_BYTES : end * HASH_BYTES]
        began_s = time.perf_counter()
        result = self._peers.read(source, NAMESPACE.id, hashes, rows, None, _READ_S)
        took_s = time.perf_counter() - began_s
        good = result.outcomes.count(ReadOutcome.GOOD)
        if good != end - begin:
            raise ProcessError(f"of {end - begin} blocks, {good} came from the lender over {transport}")
        if not np.array_equal(rows, self._wanted[begin:end]):
            raise ProcessError(f"blocks that were read over {transport} have other bytes than the lender computed")
        return took_s


def timed_s(work: Callable[[np.ndarray], object], rows: np.ndarray, wanted: np.ndarray) -> float:
    """Seconds of a work that fills rows, which are overwritten before. Raises ProcessError: not with those bytes."""
    rows.fill(0)
    began_s = time.perf_counter()
    work(rows)
    took_s = time.perf_counter() - began_s
    if not np.array_equal(rows.reshape(-1), wanted):
        raise ProcessError("what blocks are compared with has moved other bytes than there were")
    return took_s


class CpuTimes(NamedTuple):
    """Threads, and the CPU time they have had."""

    threads: int
    cpu_s: float

    @staticmethod
    def of_lender(pid: int) -> CpuTimes | None:
        """Of the threads of its server: one for each connection, and those that listen.

        None: the system does not say.
        """
        return _cpu_times(pid, lambda _, name: name == _SERVING)

    @staticmethod
    def of_reader() -> CpuTimes | None:
        """Of all threads of this process but the one that asks, which has used CPU time in order to ask."""
        own = threading.get_native_id()
        return _cpu_times(os.getpid(), lambda thread, _: thread != own)


def _cpu_times(pid: int, counts: Callable[[int, str], bool]) -> CpuTimes | None:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        Path(f"/proc/{pid}/schedstat").read_text()
    except OSError:
        return None
    threads, cpu_ns = 0, 0
    for task in tasks:
        try:
            if counts(int(task.name), (task / "comm").read_text().strip()):
                threads, cpu_ns = threads + 1, cpu_ns + int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # it has ended
    return CpuTimes(threads, cpu_ns / 1e9)
