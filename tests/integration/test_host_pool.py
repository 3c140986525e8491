"""The HOST pool's memory: shared, placed as it was asked for, or refused in words."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm.pools.host.pool as host
from kvbm._native import Arena, RowCopier
from kvbm.core.errors import ConfigError, LayoutError, PoolError, PoolFullError
from kvbm.pools.base import ReadOutcome
from kvbm.pools.host.pool import HostPool
from tests.pool_runs import random_run

SLOTS, BLOCK_BYTES = 16, 4000
MIB = 1 << 20


def _pool(slots: int = SLOTS, block_bytes: int = BLOCK_BYTES, **wishes: Any) -> HostPool:
    return HostPool(slots, block_bytes, wishes.pop("new_arena", Arena), RowCopier(2), **wishes)


class Arenas:
    """Makes arenas as the system of a test would, and remembers what was asked of it."""

    def __init__(self, refuses_huge: int = 0, refuses_node: int = 0) -> None:
        self.asked: list[tuple[str, bool, bool, int]] = []
        self._refuses_huge, self._refuses_node = refuses_huge, refuses_node

    def __call__(
        self,
        name: str,
        bytes: int,
        huge_pages: bool = False,
        advise: bool = True,
        numa_node: int = -1,
        threads: int = 1,
    ) -> Arena:
        self.asked.append((name, huge_pages, advise, numa_node))
        for error in (self._refuses_huge if huge_pages else 0, self._refuses_node if numa_node >= 0 else 0):
            if error:
                raise OSError(error, "refused")
        return Arena(name, bytes, threads=threads)  # what the machine of the test has


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


class Machine:
    """Files in which the kernel of some machine says what it has."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        for name, path in (("_MEMINFO", "meminfo"), ("_NODES", "node"), ("_CORES", "cpu"), ("_CGROUP", "cgroup")):
            monkeypatch.setattr(host, name, folder / path)
        self.has()

    def has(
        self, available_bytes: int = 1 << 40, huge_pages: int = 0, free_huge_pages: int = 0, promised: int = 0
    ) -> None:
        """Memory of the whole machine."""
        (self._folder / "meminfo").write_text(
            f"MemAvailable: {available_bytes // 1024} kB\nHugePages_Total: {huge_pages}\n"
            f"HugePages_Free: {free_huge_pages}\nHugePages_Rsvd: {promised}\nHugepagesize: 2048 kB\n"
        )

    def has_nodes(self, online: str, free_bytes: dict[int, int], own: int = 0) -> None:
        """NUMA nodes, what is free on each, and the one that every core belongs to."""
        for node, free in free_bytes.items():
            folder = self._folder / "node" / f"node{node}"
            folder.mkdir(parents=True)
            (folder / "meminfo").write_text(
                f"Node {node} MemTotal: 999999999 kB\nNode {node} MemFree: {free // 2048} kB\n"
                f"Node {node} Active(file): 0 kB\nNode {node} Inactive(file): {free // 2048} kB\nNode {node} "
                "HugePages_Free: 7\n"
            )
        (self._folder / "node" / "online").write_text(online + "\n")
        for core in range(1024):
            (self._folder / "cpu" / f"cpu{core}" / f"node{own}").mkdir(parents=True)


def test_another_process_maps_the_slots_by_their_descriptor_and_sees_the_bytes() -> None:
    run = random_run(3, BLOCK_BYTES)
    program = (
        "import mmap, sys\n"
        "fd, size, begin, end = map(int, sys.argv[1:])\n"
        "memory = mmap.mmap(fd, size)\n"
        "memory[:5] = b'child'\n"
        "print(memory[begin:end].hex())\n"
    )
    with closing(_pool()) as pool:
        pool.write([3, 4, 5], run.rows, run.proof)
        where = (pool.fd, pool.mapped_bytes, 4 * BLOCK_BYTES, 5 * BLOCK_BYTES)
        child = subprocess.run(
            [sys.executable, "-c", program, *map(str, where)],
            pass_fds=[pool.fd],
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
        )
        assert bytes.fromhex(child.stdout) == run.rows[1].tobytes()
        assert pool.memory is not None
        assert pool.memory[0, :5].tobytes() == b"child"
        assert pool.mapped_bytes >= SLOTS * BLOCK_BYTES
        assert pool.mapped_bytes % pool.page_bytes == 0
        assert pool.memory.ctypes.data % 4096 == 0


def test_memory_lasts_as_long_as_a_view_of_it_and_its_descriptor_no_longer() -> None:
    pool = _pool()
    view, fd = pool.memory, pool.fd
    assert view is not None
    view[2] = 7
    pool.close()
    assert (pool.fd, pool.mapped_bytes, pool.page_bytes) == (-1, 0, 0)
    assert (view[2] == 7).all()
    assert Path(f"/proc/self/fd/{fd}").exists()
    del view
    assert not Path(f"/proc/self/fd/{fd}").exists()


def test_more_than_the_machine_has_is_refused_with_numbers(machine: Machine) -> None:
    machine.has(available_bytes=MIB)
    arenas = Arenas()
    with pytest.raises(
        PoolFullError, match=r"2097152 bytes wanted, 1048576 bytes of memory available; lower pools\.host"
    ) as full:
        _pool(2, MIB, new_arena=arenas)
    assert (full.value.wanted_bytes, full.value.free_bytes) == (2 * MIB, MIB)
    assert arenas.asked == []
    with pytest.raises(PoolFullError):
        _pool(1 << 40, 1 << 40)


def test_what_the_system_refuses_is_a_pool_error_with_its_words(machine: Machine) -> None:
    machine.has(available_bytes=1 << 62)
    with pytest.raises(PoolFullError, match=r"the system refuses them .*lower pools\.host\.slots"):
        _pool(1 << 20, 1 << 41)


def test_a_pool_without_room_or_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        _pool(0, BLOCK_BYTES)
    with pytest.raises(ConfigError, match="use one of auto, on, off"):
        _pool(huge_pages="yes")


def test_huge_pages_that_must_be_and_are_not_set_aside_are_refused_with_the_remedy(machine: Machine) -> None:
    machine.has(huge_pages=4, free_huge_pages=3, promised=2)
    with pytest.raises(
        PoolError, match=r"3 huge pages of 2097152 bytes wanted, 1 of 4 free; set sysctl vm\.nr_hugepages=6"
    ):
        _pool(3, 2 * MIB, huge_pages="on")


def test_huge_pages_are_taken_where_there_are_enough(machine: Machine) -> None:
    machine.has(available_bytes=0, huge_pages=4, free_huge_pages=4)  # theirs is not available memory
    for word in ("auto", "on"):
        arenas = Arenas()
        with closing(_pool(4, 2 * MIB, huge_pages=word, new_arena=arenas)) as pool:
            assert arenas.asked == [("kvbm-host", True, False, -1)]
            assert pool.notice == ""


def test_huge_pages_that_the_system_refuses_all_the_same_become_plain_ones_and_a_notice(machine: Machine) -> None:
    machine.has(huge_pages=4, free_huge_pages=4)
    arenas = Arenas(refuses_huge=12)
    with closing(_pool(4, 2 * MIB, new_arena=arenas)) as pool:
        assert [asked[1:3] for asked in arenas.asked] == [(True, False), (False, True)]
        assert "4 huge pages of 2097152 bytes wanted, the system refuses them" in pool.notice
    with pytest.raises(PoolError, match="the system refuses them"):
        _pool(4, 2 * MIB, huge_pages="on", new_arena=Arenas(refuses_huge=12))


def test_too_few_huge_pages_are_told_where_somebody_has_set_some_aside(machine: Machine) -> None:
    machine.has(huge_pages=2, free_huge_pages=2)
    with closing(_pool(4, 2 * MIB)) as pool:
        assert "set sysctl vm.nr_hugepages=4" in pool.notice
    machine.has()
    with closing(_pool(4, 2 * MIB)) as pool:
        assert pool.notice == ""


def test_no_huge_pages_are_asked_for_where_they_are_off(machine: Machine) -> None:
    machine.has(huge_pages=9, free_huge_pages=9)
    arenas = Arenas()
    with closing(_pool(4, 2 * MIB, huge_pages="off", new_arena=arenas)):
        assert arenas.asked == [("kvbm-host", False, False, -1)]


def test_a_machine_of_one_node_binds_nothing(machine: Machine) -> None:
    machine.has_nodes("0", {0: 0})
    for node in (-1, 0):
        arenas = Arenas()
        with closing(_pool(numa_node=node, new_arena=arenas)) as pool:
            assert [asked[3] for asked in arenas.asked] == [-1]
            assert pool.notice == ""


def test_memory_lies_on_the_node_that_was_named_or_that_the_manager_runs_on(machine: Machine) -> None:
    machine.has_nodes("0-1,4", {0: MIB, 1: MIB, 4: MIB}, own=4)
    for node, bound in ((1, 1), (-1, 4)):
        arenas = Arenas()
        with closing(_pool(numa_node=node, new_arena=arenas)) as pool:
            assert arenas.asked[-1] == ("kvbm-host", False, True, bound)
            assert pool.notice == ""


def test_a_node_that_is_not_there_is_refused(machine: Machine) -> None:
    machine.has_nodes("0-1", {0: MIB, 1: MIB})
    with pytest.raises(PoolError, match=r"NUMA node 7 wanted, this machine has 0, 1; set pools\.host\.numa_node"):
        _pool(numa_node=7)


def test_a_node_without_room_is_refused_when_named_and_told_when_not(machine: Machine) -> None:
    machine.has_nodes("0-1", {0: 1 << 40, 1: 32 * 1024}, own=1)
    with pytest.raises(PoolFullError, match="64000 bytes wanted of NUMA node 1, which has 32768 available"):
        _pool(numa_node=1, new_arena=Arenas())
    arenas = Arenas()
    with closing(_pool(new_arena=arenas)) as pool:
        assert arenas.asked[-1][3] == -1
        assert "NUMA node 1 has 32768 available, so it lies on other nodes too" in pool.notice


def test_a_system_that_lets_nobody_choose_nodes_is_told_and_lived_with(machine: Machine) -> None:
    machine.has_nodes("0-1", {0: MIB, 1: MIB})
    arenas = Arenas(refuses_node=1)
    with closing(_pool(numa_node=1, new_arena=arenas)) as pool:
        assert arenas.asked[-1] == ("kvbm-host", False, True, -1)
        assert "does not let it choose NUMA node 1" in pool.notice
        assert "CAP_SYS_NICE" in pool.notice


def test_this_machines_own_words_are_understood() -> None:
    assert host.numa_nodes()
    assert host.huge_page_pool().page_bytes >= 4096
    assert host._own_node() in [-1, *host.numa_nodes()]
    assert all(host._node_memory_bytes(node) >= 0 for node in host.numa_nodes())


class FakeCuda:
    """The part of torch that pins memory, which answers as it is told."""

    def __init__(self, answer: int = 0) -> None:
        self.cuda = self
        self.registered: list[int] = []
        self.backend = 0
        self._answer = answer

    def is_available(self) -> bool:
        return True

    def init(self) -> None:
        return

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.append(address)
        return self._answer

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def zeros(self, count: int, device: str) -> None:
        self.backend += 1
        raise RuntimeError("CUDA error: the one that was left")


def test_memory_is_pinned_while_the_pool_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", cuda)
    pool = _pool()
    assert pool.memory is not None
    assert (pool.pinned, cuda.registered, pool.notice) == (True, [pool.memory.ctypes.data], "")
    pool.close()
    assert (pool.pinned, cuda.registered) == (False, [])


def test_memory_that_cannot_be_pinned_works_all_the_same_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(answer=2)
    monkeypatch.setitem(sys.modules, "torch", cuda)
    with closing(_pool()) as pool:
        assert not pool.pinned
        assert "not pinned (cudaHostRegister answers 2)" in pool.notice
        assert cuda.backend == 1  # or the engine's next kernel would be told of it
        run = random_run(2, BLOCK_BYTES)
        pool.write([0, 1], run.rows, run.proof)
        rows = run.room()
        assert pool.read([0, 1], run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 2
        assert np.array_equal(rows, run.rows)
