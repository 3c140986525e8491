"""Rings on a real GPU: graphs captured meanwhile, what a run waits for, memory registered in pieces, and a device that
is lost.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbm._native import RowCopier, checksums
from kvbm.assembly import NATIVE_ARENA, device_rings, segment_copies
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.hbm.paged import SLOTS, PagedTensor
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool
from tests.eventually import eventually
from tests.extras import needed

torch = needed("torch", "engine")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

BLOCKS, LAYERS, LAYER_BYTES = 256, 4, 16 << 10
BLOCK_BYTES = LAYERS * LAYER_BYTES
SPACE = NamespaceId(bytes(16))
LONG = 2_000_000_000  # cycles of the device: a second or so
ROOT = Path(__file__).resolve().parents[2]


class Place:
    """An engine's tensors on the GPU, a pool over them, and HOST."""

    def __init__(self, is_told: bool = False) -> None:
        copier = RowCopier(2)
        shape = (BLOCKS, LAYER_BYTES)
        self.tensors = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        layers = [[PagedTensor(tensor, (SLOTS, "bytes"))] for tensor in self.tensors]
        self.pool = HbmPool.of_layers(
            layers, checksums, segment_copies(copier), "ring", device_rings(copier), is_told=is_told
        )
        self.host = HostPool(BLOCKS, BLOCK_BYTES, NATIVE_ARENA, copier)
        assert self.host.pinned and self.host.memory is not None
        self.rows = self.host.memory
        torch.cuda.synchronize()

    def write(self, slots: list[int], at: list[int]) -> None:
        proof = Proof(SPACE, Epoch(1), bytes(len(slots) * HASH_BYTES), np.zeros(len(slots), dtype=np.uint32))
        self.pool.write(slots, self.rows, proof, at)

    def read(self, slots: list[int], at: list[int]) -> None:
        result = self.pool.read(slots, SPACE, bytes(len(slots) * HASH_BYTES), self.rows, at)
        assert set(result.outcomes) == {ReadOutcome.GOOD}
        assert (result.checksums == checksums(self.rows[at])).all()

    def block(self, slot: int) -> bytes:
        return b"".join(tensor[slot].cpu().numpy().tobytes() for tensor in self.tensors)

    def fill(self, slot: int, value: int) -> None:
        for tensor in self.tensors:
            tensor[slot] = value

    def close(self) -> None:
        self.pool.close()
        self.host.close()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture
def told() -> Iterator[Place]:
    made = Place(is_told=True)
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_graphs_are_captured_while_blocks_are_copied(place: Place, is_pinned: bool) -> None:
    if not is_pinned:
        place.rows = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    stop, failed, runs = threading.Event(), [], [0]
    slots, at = list(range(64)), list(range(64, 128))
    aside = torch.cuda.Stream()
    values = torch.randn(256, 256, device="cuda")
    _ = values @ values  # cuBLAS opens itself at the first product

    def copy() -> None:
        try:
            with torch.cuda.stream(aside):
                while not stop.is_set():
                    place.read(slots, at)
                    place.write(slots, at)
                    runs[0] += 1
        except Exception as error:  # noqa: BLE001  it is looked at below
            failed.append(error)

    copies = threading.Thread(target=copy)
    copies.start()
    eventually(lambda: runs[0] or failed, "nothing is copied")
    for _ in range(10):
        before = runs[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # of mode "global"
            result = values
            for _ in range(200):
                result = result @ values
            eventually(
                lambda before=before: runs[0] >= before + 2 or failed, "nothing is copied while a graph is captured"
            )
        graph.replay()
    stop.set()
    copies.join(60)
    assert not failed and runs[0] > 20


def test_a_load_waits_for_what_touched_its_slots_and_not_for_what_else_is_queued(told: Place) -> None:
    side = torch.cuda.Stream()
    told.pool.touched([1, 2], told.pool.recorded(side))
    told.rows[5] = 7
    torch.cuda._sleep(LONG)
    told.write([1, 2], [5, 5])
    assert not torch.cuda.default_stream().query()  # it is computing still
    torch.cuda.synchronize()
    assert set(told.block(1)) == {7}
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 8)
        kept = told.tensors[0][3].clone()  # a reader
    told.pool.touched([3], told.pool.recorded(side))
    before = told.tensors[0][3].clone()
    told.write([3], [5])
    assert side.query()
    assert torch.equal(kept, before)
    torch.cuda._sleep(LONG // 8)
    told.fill(9, 42)
    told.pool.touched([9], told.pool.recorded(None))
    told.read([9], [0])
    assert set(told.rows[0].tolist()) == {42}


def test_slots_that_nobody_spoke_of_are_read_behind_the_current_stream(place: Place) -> None:
    torch.cuda._sleep(LONG // 8)
    place.fill(4, 9)
    place.read([4], [1])
    assert set(place.rows[1].tolist()) == {9}


def test_memory_registered_in_pieces_is_copied_in_as_many(place: Place) -> None:
    memory = np.zeros((64, BLOCK_BYTES), dtype=np.uint8)
    begin = -(-memory.ctypes.data // 4096) * 4096 - memory.ctypes.data
    flat = memory.reshape(-1)[begin : begin + 60 * BLOCK_BYTES]
    runtime, half = torch.cuda.cudart(), 30 * BLOCK_BYTES
    for offset in (0, half):
        assert int(runtime.cudaHostRegister(flat.ctypes.data + offset, half, 0)) == 0
    try:
        place.rows = flat.reshape(60, BLOCK_BYTES)
        slots, at = list(range(60)), list(range(60))
        place.read(slots, at)  # as one stretch it would be refused
        assert place.rows[31].tobytes() == place.block(31)
        place.write(list(range(100, 160)), at)
        assert place.block(131) == place.block(31)
    finally:
        for offset in (0, half):
            runtime.cudaHostUnregister(flat.ctypes.data + offset)


def test_many_runs_at_once_are_right(place: Place) -> None:
    kept = [place.block(slot) for slot in range(BLOCKS)]
    wrong: list[int] = []

    def work(worker: int) -> None:
        chance = np.random.default_rng(worker)
        mine = np.arange(worker * 32, worker * 32 + 32)
        for _ in range(20):
            slots = chance.permutation(mine)[: int(chance.integers(1, 33))].tolist()
            at = chance.permutation(mine)[: len(slots)].tolist()
            with torch.cuda.stream(torch.cuda.Stream()):
                place.read(slots, at)
                place.write(slots, at)
            wrong.extend(s for s, row in zip(slots, at, strict=True) if place.rows[row].tobytes() != kept[s])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and [place.block(slot) for slot in range(BLOCKS)] == kept


LOST = """
import sys, torch
sys.path[:0] = [{root!r}]
from tests.integration.test_rings_on_gpu import Place
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, NamespaceId
place = Place()
place.read([1, 2], [1, 2])
kept = place.rows[1].tobytes()
try:
    torch.zeros(4, device="cuda")[torch.tensor([2**20], device="cuda")].cpu()
except Exception as error:
    print("engine:", type(error).__name__)
for turn in range(2):
    result = place.pool.read([1, 2], NamespaceId(bytes(16)), bytes(2 * HASH_BYTES), place.rows, [3, 4])
    print("read:", *(outcome.name for outcome in result.outcomes))
    try:
        place.write([1], [1])
    except PoolError as error:
        print("write:", error)
assert place.rows[1].tobytes() == kept
place.close()
print("closed", flush=True)
sys.exit(7)
"""


def test_a_lost_device_is_misses_and_the_process_ends_with_its_own_code(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOST.format(root=str(ROOT))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    words = ran.stdout.splitlines()
    assert ran.returncode == 7, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr[-2000:]}"
    assert words.count("read: FAILED FAILED") == 2 and words[-1] == "closed"
    assert sum(word.startswith("write: ") and "lost" in word for word in words) == 2
