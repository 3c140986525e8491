"""The HOST pool's memory in another process: what that writes is there, and what cannot be mapped is said in words."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvbm._native import Arena, RowCopier
from kvbm.core.errors import PoolError
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pool import HostPool
from tests.eventually import eventually

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
SLOTS, BLOCK_BYTES = 8, 5000

WORKER = """
import sys
from kvbm.pools.host.mapping import map_host
pid, fd, mapped_bytes = map(int, sys.argv[1:])
memory = map_host(pid, fd, mapped_bytes)
rows = memory[:8 * 5000].reshape(8, 5000)
print(int(rows[2, 17]), flush=True)
rows[3] = 7
sys.stdin.readline()  # until the pool is gone
print(int(rows[2, 17]), int(rows[3].sum()), "torch" in sys.modules, flush=True)
"""


def _pool() -> HostPool:
    return HostPool(SLOTS, BLOCK_BYTES, Arena, RowCopier(1), huge_pages="off")


def test_another_process_reads_and_writes_the_rows_also_after_the_pool_is_gone() -> None:
    with closing(_pool()) as pool:
        memory = pool.memory
        assert memory is not None
        memory[2, 17] = 99
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(os.getpid()), str(pool.fd), str(pool.mapped_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "99\n"
            assert worker.poll() is None
            eventually(lambda rows=memory: (rows[3] == 7).all(), "the worker does not write")  # type: ignore[misc]
            del memory
            pool.close()
            out, _ = worker.communicate("\n", timeout=WAIT_S)
            assert out == f"99 {7 * BLOCK_BYTES} False\n"
        finally:
            worker.kill()
            worker.wait(WAIT_S)


def test_this_process_maps_its_own_pool() -> None:
    with closing(_pool()) as pool:
        memory = map_host(os.getpid(), pool.fd, pool.mapped_bytes)
        assert memory.dtype == np.uint8
        assert len(memory) == pool.mapped_bytes
        memory[BLOCK_BYTES] = 5
        rows = pool.memory
        assert rows is not None
        assert rows[1, 0] == 5


def test_a_mapping_asks_for_huge_pages() -> None:
    with closing(_pool()) as pool:
        memory = map_host(os.getpid(), pool.fd, pool.mapped_bytes, pins=False)
        begin = f"{memory.ctypes.data:x}-"
        found = Path("/proc/self/smaps").read_text().splitlines()
        at = next(number for number, line in enumerate(found) if line.startswith(begin))
        flags = next(line for line in found[at:] if line.startswith("VmFlags:"))
        assert "hg" in flags.split()


def test_what_cannot_be_mapped_is_said_in_words(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait(WAIT_S)
    with closing(_pool()) as pool:
        with pytest.raises(PoolError, match="the process has ended"):
            map_host(ended.pid, pool.fd, pool.mapped_bytes)
        with pytest.raises(PoolError, match="is not there"):
            map_host(os.getpid(), 1_000_000, pool.mapped_bytes)
        with pytest.raises(PoolError, match=f"has {pool.mapped_bytes} bytes, {pool.mapped_bytes + 1} are wanted"):
            map_host(os.getpid(), pool.fd, pool.mapped_bytes + 1)
    read_only = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(PoolError, match="cannot be opened"):
            map_host(os.getpid(), read_only, 4096)
    finally:
        os.close(read_only)
