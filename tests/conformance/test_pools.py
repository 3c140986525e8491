"""What every pool promises, asked of each one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm._native import Arena, BlockIo, RowCopier, checksums
from kvbm.assembly import device_rings
from kvbm.core.errors import LayoutError, PoolError
from kvbm.core.ids import InstanceId, Namespace, Tier
from kvbm.pools.base import ObjectPool, ReadOutcome, SlotPool
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool
from kvbm.pools.memory import MemoryPool
from kvbm.pools.nvme.block_io import BlockIoOptions
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.stores.cache_tier import CachedStore
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.tenant_keys import add_key, keys_of_file
from tests.extras import needed
from tests.object_pools import memory_objects
from tests.object_stores import OBJECT_STORES, place_in
from tests.pool_runs import SHAPE, Run, part, random_run

SLOTS = 64
BLOCK_BYTES = 4000  # no multiple of any page
OTHER_NAMESPACE = Namespace(model="tiny", revision="r1", block_tokens=16, tenant="somebody else")
VERIFYING = {"memory", "memory-host", "nvme", "nvme-encrypted"}
IN_PLACE = [
    "memory-hbm",
    "memory-host",
    "hbm-cpu",
    "host",
]  # pools with `memory`: others may fill and empty their slots
KEEPING = {"memory-host", "host"}  # pools with `memory` whose checksums are those that were kept, not computed


def _hbm(device: str) -> HbmPool:
    torch = needed("torch", "engine")
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        return HbmPool(SLOTS, BLOCK_BYTES, checksums, "cuda", rings=device_rings(RowCopier(2)))
    return HbmPool(SLOTS, BLOCK_BYTES, checksums, "cpu")


def _encrypted(folder: Path) -> NvmePool:
    for tenant in ("", "somebody else"):
        add_key(folder / "keys.toml", tenant, "1")
    keys = SlotKeys(keys_of_file(str(folder / "keys.toml")), [SHAPE, OTHER_NAMESPACE])
    return NvmePool(
        (folder / "pool",),
        SLOTS,
        BLOCK_BYTES,
        SHAPE,
        InstanceId("a"),
        checksums,
        keys.opening(BlockIo, checksums),
        BlockIoOptions(encrypted=True),
    )


SLOT_POOLS: dict[str, Callable[[Path], SlotPool]] = {
    "memory": lambda folder: MemoryPool(Tier.NVME, SLOTS, BLOCK_BYTES, checksums),
    "memory-hbm": lambda folder: MemoryPool(Tier.HBM, SLOTS, BLOCK_BYTES, checksums),
    "hbm-cpu": lambda folder: _hbm("cpu"),
    "hbm-cuda": lambda folder: _hbm("cuda"),
    "host": lambda folder: HostPool(SLOTS, BLOCK_BYTES, Arena, RowCopier(2)),
    "memory-host": lambda folder: MemoryPool(Tier.HOST, SLOTS, BLOCK_BYTES, checksums),
    "nvme": lambda folder: NvmePool((folder / "pool",), SLOTS, BLOCK_BYTES, SHAPE, InstanceId("a"), checksums, BlockIo),
    "nvme-encrypted": _encrypted,
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if "cuda" in name else ()) for name in SLOT_POOLS])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotPool]:
    made = SLOT_POOLS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture(params=sorted(VERIFYING))
def verifying_pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotPool]:
    made = SLOT_POOLS[request.param](tmp_path)
    yield made
    made.close()


KINDS = [(1, False, False), (4, False, False), (4, True, False), (2, True, True)]  # k, sealed, fronted


def _object_pools() -> Iterator[Any]:
    """Every store with k = 4 and sealed; a store in memory with everything else."""
    for store in OBJECT_STORES:
        name, marks = (store, ()) if isinstance(store, str) else (store.values[0], store.marks)
        for k, sealed, fronted in KINDS if name == "memory" else [(4, True, False)]:
            words = [str(name), str(k), *["sealed"] * sealed, *["fronted"] * fronted]
            yield pytest.param((name, k, sealed, fronted), id="-".join(words), marks=marks)


def _smoked() -> list[Any]:
    """The same; those of stores that need packages are asked so much in CI, too."""
    return [
        pytest.param(*one.values, id=one.id, marks=[*one.marks, *[pytest.mark.smoke] * bool(one.marks)])
        for one in _object_pools()
    ]


@pytest.fixture(params=_object_pools())
def object_pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectPool]:
    name, k, sealed, fronted = request.param
    place = place_in(name, request)
    store = place.open()
    if fronted:
        store = CachedStore(MemoryStore("memory://front"), store)
    sealing = None
    if sealed:
        for tenant in ("", "somebody else"):
            add_key(tmp_path / "keys.toml", tenant, "1")
        sealing = Sealing(keys_of_file(str(tmp_path / "keys.toml")), k, header_bytes(k))
    made: ObjectPool = memory_objects(
        BLOCK_BYTES,
        k,
        store,
        envelopes=sealing,
        namespaces=[SHAPE, OTHER_NAMESPACE],
        threads=1 if name == "memory" else 8,
        deadline_s=60.0,
    )
    yield made
    made.close()


in_place = pytest.mark.parametrize("pool", IN_PLACE, indirect=True)


def memory_of(pool: SlotPool) -> np.ndarray:
    memory = pool.memory
    assert memory is not None
    return memory


def _scattered() -> list[int]:
    """A row of a buffer for each slot, none twice, in no order."""
    rows: list[int] = np.random.default_rng(3).permutation(3 * SLOTS)[:SLOTS].tolist()
    return rows


# -- slot pools -------------------------------------------------------------------------------------------------------


def test_blocks_come_back_from_their_slots_in_any_order(pool: SlotPool) -> None:
    run = random_run(SLOTS, BLOCK_BYTES)
    slots = np.random.default_rng(1).permutation(SLOTS).tolist()
    pool.write(slots, run.rows, run.proof)
    order = np.random.default_rng(2).permutation(SLOTS).tolist()
    asked = part(run, order)
    rows = asked.room()
    result = pool.read([slots[at] for at in order], asked.namespace, asked.hashes, rows)
    assert result.outcomes == [ReadOutcome.GOOD] * SLOTS
    assert (rows == asked.rows).all()
    assert (result.checksums == asked.proof.checksums).all()


def test_an_empty_run_is_no_trouble(pool: SlotPool) -> None:
    run = random_run(0, BLOCK_BYTES)
    pool.write([], run.rows, run.proof)
    assert pool.read([], run.namespace, b"", run.room()).outcomes == []


def test_rows_that_nobody_may_write_to_can_be_written_to_a_pool(pool: SlotPool) -> None:
    run = random_run(3, BLOCK_BYTES)
    run.rows.flags.writeable = False
    pool.write([5, 4, 9], run.rows, run.proof)
    rows = np.zeros_like(run.rows)
    pool.read([5, 4, 9], run.namespace, run.hashes, rows)
    assert (rows == run.rows).all()


def test_a_block_can_be_read_again_and_again(pool: SlotPool) -> None:
    run = random_run(4, BLOCK_BYTES)
    pool.write([0, 1, 62, 63], run.rows, run.proof)
    for _ in range(3):
        rows = run.room()
        assert pool.read([0, 1, 62, 63], run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 4
        assert (rows == run.rows).all()


def test_a_slot_holds_what_was_written_last(pool: SlotPool) -> None:
    first, second = random_run(8, BLOCK_BYTES, seed=1), random_run(8, BLOCK_BYTES, seed=2)
    pool.write(range(8), first.rows, first.proof)
    pool.write(range(4, 8), second.rows[:4], part(second, [0, 1, 2, 3]).proof)
    rows = first.room()
    kept = pool.read(range(4), first.namespace, part(first, [0, 1, 2, 3]).hashes, rows[:4])
    fresh = pool.read(range(4, 8), second.namespace, part(second, [0, 1, 2, 3]).hashes, rows[4:])
    assert kept.outcomes + fresh.outcomes == [ReadOutcome.GOOD] * 8
    assert (rows[:4] == first.rows[:4]).all()
    assert (rows[4:] == second.rows[:4]).all()


def test_threads_do_not_disturb_each_other_in_other_slots(pool: SlotPool) -> None:
    wrong: list[str] = []

    def work(worker: int) -> None:
        slots = list(range(worker, SLOTS, 4))
        for turn in range(20):
            run = random_run(len(slots), BLOCK_BYTES, seed=100 * worker + turn)
            pool.write(slots, run.rows, run.proof)
            rows = run.room()
            result = pool.read(slots, run.namespace, run.hashes, rows)
            if set(result.outcomes) != {ReadOutcome.GOOD} or not (rows == run.rows).all():
                wrong.append(f"worker {worker}, turn {turn}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_contradictory_call_is_refused_before_a_byte_moves(pool: SlotPool) -> None:
    run = random_run(2, BLOCK_BYTES)
    pool.write([0, 1], run.rows, run.proof)
    with pytest.raises(LayoutError, match=f"0 to {SLOTS - 1}"):
        pool.write([0, SLOTS], run.rows[::-1].copy(), run.proof)
    with pytest.raises(LayoutError, match="2 blocks come with 1 slots"):
        pool.read([0], run.namespace, run.hashes, run.room())
    with pytest.raises(LayoutError, match="shape"):
        pool.read([0, 1], run.namespace, run.hashes, np.zeros((2, BLOCK_BYTES - 1), dtype=np.uint8))
    rows = run.room()
    pool.read([0, 1], run.namespace, run.hashes, rows)
    assert (rows == run.rows).all()


def test_rows_elsewhere_in_a_buffer_are_written(pool: SlotPool) -> None:
    run, at = random_run(SLOTS, BLOCK_BYTES), _scattered()
    buffer = np.full((3 * SLOTS, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    buffer[at] = run.rows
    slots = np.random.default_rng(4).permutation(SLOTS).tolist()
    pool.write(slots, buffer, run.proof, at)
    rows = run.room()
    assert pool.read(slots, run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * SLOTS
    assert (rows == run.rows).all()


def test_rows_elsewhere_in_a_buffer_are_filled_and_no_others(pool: SlotPool) -> None:
    run, at = random_run(SLOTS, BLOCK_BYTES), _scattered()
    slots = np.random.default_rng(5).permutation(SLOTS).tolist()
    pool.write(slots, run.rows, run.proof)
    buffer = np.full((3 * SLOTS, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    result = pool.read(slots, run.namespace, run.hashes, buffer, at)
    assert result.outcomes == [ReadOutcome.GOOD] * SLOTS
    assert (result.checksums == run.proof.checksums).all()
    assert (buffer[at] == run.rows).all()
    assert (np.delete(buffer, at, axis=0) == 0x5A).all()


def test_one_row_may_be_written_to_several_slots(pool: SlotPool) -> None:
    run = random_run(3, BLOCK_BYTES)
    proof = run.proof._replace(checksums=run.proof.checksums[[1, 1, 1]])
    pool.write([7, 3, 5], run.rows, proof, [1, 1, 1])
    rows = run.room()
    assert pool.read([7, 3, 5], run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 3
    assert (rows == run.rows[1]).all()


def test_an_empty_run_of_a_buffers_rows_is_no_trouble(pool: SlotPool) -> None:
    run = random_run(0, BLOCK_BYTES)
    buffer = np.full((4, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    pool.write([], buffer, run.proof, [])
    assert pool.read([], run.namespace, b"", buffer, []).outcomes == []
    assert (buffer == 0x5A).all()


def test_rows_outside_their_buffer_are_refused_before_a_byte_moves(pool: SlotPool) -> None:
    run, other = random_run(3, BLOCK_BYTES), random_run(3, BLOCK_BYTES, seed=1)
    pool.write([0, 1, 2], run.rows, run.proof)
    for at in ([0, 1, 3], [-1, 0, 1], [0, 1], [0, 1, 2, 2]):
        with pytest.raises(LayoutError):
            pool.write([0, 1, 2], other.rows, other.proof, at)
        rows = run.room()
        with pytest.raises(LayoutError):
            pool.read([0, 1, 2], run.namespace, run.hashes, rows, at)
        assert (rows == 0xA5).all()
    rows = run.room()
    assert pool.read([0, 1, 2], run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 3
    assert (rows == run.rows).all()


def test_an_outcome_is_that_of_its_block_wherever_its_row_lies(verifying_pool: SlotPool) -> None:
    run, other = random_run(3, BLOCK_BYTES), random_run(1, BLOCK_BYTES, seed=9)
    verifying_pool.write([0, 1, 2], run.rows, run.proof)
    asked = run.hashes[:16] + other.hashes + run.hashes[32:]
    buffer = np.full((9, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    result = verifying_pool.read([0, 1, 2], run.namespace, asked, buffer, [8, 0, 4])
    assert result.outcomes == [ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.GOOD]
    assert (buffer[[8, 4]] == run.rows[[0, 2]]).all()
    assert (result.checksums[[0, 2]] == run.proof.checksums[[0, 2]]).all()


@in_place
def test_memory_is_the_slots_themselves(pool: SlotPool) -> None:
    memory = memory_of(pool)
    assert memory.dtype == np.uint8
    assert memory.shape == (SLOTS, BLOCK_BYTES)
    assert memory.flags.c_contiguous
    run, slots = random_run(5, BLOCK_BYTES), [9, 0, 63, 2, 31]
    pool.write(slots, run.rows, run.proof)
    assert (memory[slots] == run.rows).all()
    assert (pool.checksums(slots) == run.proof.checksums).all()


@in_place
def test_blocks_that_were_put_into_memory_can_be_read_once_sealed(pool: SlotPool) -> None:
    memory = memory_of(pool)
    run, slots = random_run(5, BLOCK_BYTES), [9, 0, 63, 2, 31]
    memory[slots] = run.rows
    pool.seal(slots, run.proof)
    assert (pool.checksums(slots) == run.proof.checksums).all()
    rows = run.room()
    result = pool.read(slots, run.namespace, run.hashes, rows)
    assert result.outcomes == [ReadOutcome.GOOD] * 5
    assert (result.checksums == run.proof.checksums).all()
    assert (rows == run.rows).all()


@in_place
def test_one_pool_reads_into_the_memory_of_another_and_that_one_writes_from_it(pool: SlotPool) -> None:
    memory = memory_of(pool)
    run, slots = random_run(6, BLOCK_BYTES), [3, 60, 5, 22, 41, 0]
    with closing(MemoryPool(Tier.NVME, SLOTS, BLOCK_BYTES, checksums)) as elsewhere:
        elsewhere.write(range(6), run.rows, run.proof)
        result = elsewhere.read(range(6), run.namespace, run.hashes, memory, slots)
        assert result.outcomes == [ReadOutcome.GOOD] * 6
        pool.seal(slots, run.proof._replace(checksums=result.checksums))
        elsewhere.write(range(10, 16), memory, run.proof._replace(checksums=pool.checksums(slots)), slots)
        rows = run.room()
        assert elsewhere.read(range(10, 16), run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 6
        assert (rows == run.rows).all()


@in_place
def test_checksums_and_seals_outside_the_pool_are_refused(pool: SlotPool) -> None:
    run = random_run(2, BLOCK_BYTES)
    with pytest.raises(LayoutError, match=f"0 to {SLOTS - 1}"):
        pool.checksums([0, SLOTS])
    with pytest.raises(LayoutError, match=f"0 to {SLOTS - 1}"):
        pool.seal([-1, 0], run.proof)
    with pytest.raises(LayoutError, match="2 blocks come with 1 slots"):
        pool.seal([0], run.proof)


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_a_checksum_is_as_it_was_when_the_block_left_hbm(name: str, tmp_path: Path) -> None:
    run = random_run(2, BLOCK_BYTES)
    with closing(SLOT_POOLS[name](tmp_path)) as pool:
        pool.write([4, 8], run.rows, run.proof)
        assert pool.memory is not None
        pool.memory[8, 17] ^= 1  # what becomes of a block here is found where it is read for good
        assert (pool.checksums([4, 8]) == run.proof.checksums).all()


@in_place
def test_a_closed_pool_has_no_memory_and_seals_nothing(pool: SlotPool) -> None:
    run = random_run(2, BLOCK_BYTES)
    pool.close()
    assert pool.memory is None
    with pytest.raises(PoolError, match="closed"):
        pool.seal([0, 1], run.proof)
    with pytest.raises(PoolError, match="closed"):
        pool.checksums([0, 1])


def test_a_closed_pool_refuses_writes_and_fails_reads(pool: SlotPool) -> None:
    run = random_run(2, BLOCK_BYTES)
    pool.close()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.write([0, 1], run.rows, run.proof)
    result = pool.read([0, 1], run.namespace, run.hashes, run.room())
    assert result.outcomes == [ReadOutcome.FAILED] * 2


def test_another_hash_or_namespace_than_the_slots_is_corrupt(verifying_pool: SlotPool) -> None:
    run, other = random_run(3, BLOCK_BYTES), random_run(3, BLOCK_BYTES, seed=9)
    verifying_pool.write([0, 1, 2], run.rows, run.proof)
    asked = part(run, [0, 1, 2]).hashes[:16] + other.hashes[16:32] + run.hashes[32:]
    outcomes = verifying_pool.read([0, 1, 2], run.namespace, asked, run.room()).outcomes
    assert outcomes == [ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.GOOD]
    elsewhere = verifying_pool.read([0, 1, 2], OTHER_NAMESPACE.id, run.hashes, run.room()).outcomes
    assert elsewhere == [ReadOutcome.CORRUPT] * 3


def test_a_slot_that_was_never_written_is_corrupt(verifying_pool: SlotPool) -> None:
    run = random_run(1, BLOCK_BYTES)
    assert verifying_pool.read([7], run.namespace, run.hashes, run.room()).outcomes == [ReadOutcome.CORRUPT]


def test_a_checksum_that_never_fitted_is_corrupt(verifying_pool: SlotPool) -> None:
    run = random_run(2, BLOCK_BYTES)
    verifying_pool.write([0, 1], run.rows, run.proof._replace(checksums=run.proof.checksums ^ np.uint32(1)))
    outcomes = verifying_pool.read([0, 1], run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [ReadOutcome.CORRUPT] * 2


def test_millions_of_memory_slots_cost_nothing_until_used() -> None:
    pool = MemoryPool(Tier.OBJECT, 1 << 22, 65536, checksums)
    run = random_run(2, 65536)
    pool.write([0, (1 << 22) - 1], run.rows, run.proof)
    rows = run.room()
    assert pool.read([0, (1 << 22) - 1], run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * 2
    assert (rows == run.rows).all()
    pool.close()


# -- object pools -----------------------------------------------------------------------------------------------------


def objects_of(pool: ObjectPool, count: int, seed: int = 0) -> Run:
    """A run of so many whole objects."""
    return random_run(count * pool.blocks, BLOCK_BYTES, seed)


def each(pool: ObjectPool, outcomes: list[ReadOutcome]) -> list[ReadOutcome]:
    """An outcome for each object as outcomes of blocks."""
    return [outcome for outcome in outcomes for _ in range(pool.blocks)]


@pytest.mark.parametrize("object_pool", _smoked(), indirect=True)
def test_what_was_put_can_be_got_in_any_order(object_pool: ObjectPool) -> None:
    run, k = objects_of(object_pool, 20), object_pool.blocks
    assert object_pool.put(run.rows, run.proof) == [True] * 20 * k
    asked = part(run, [number * k + at for number in reversed(range(20)) for at in range(k)])
    rows = asked.room()
    result = object_pool.get(asked.namespace, asked.hashes, rows)
    assert result.outcomes == [ReadOutcome.GOOD] * 20 * k
    assert (rows == asked.rows).all()
    assert (result.checksums == asked.proof.checksums).all()


def test_objects_are_put_from_and_got_into_rows_elsewhere_in_a_buffer(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 5)
    count = len(run.rows)
    at: list[int] = np.random.default_rng(4).permutation(2 * count + 2)[:count].tolist()
    buffer = np.full((2 * count + 2, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    buffer[at] = run.rows
    assert object_pool.put(buffer, run.proof, at) == [True] * count
    buffer[:] = 0x5A
    result = object_pool.get(run.namespace, run.hashes, buffer, at[::-1])
    assert result.outcomes == [ReadOutcome.GOOD] * count
    assert (result.checksums == run.proof.checksums).all()
    assert (buffer[at[::-1]] == run.rows).all()
    assert (np.delete(buffer, at, axis=0) == 0x5A).all()
    for outside in ([len(buffer)], [-1]):
        with pytest.raises(LayoutError):
            object_pool.put(buffer, run.proof, at[:-1] + outside)
        with pytest.raises(LayoutError):
            object_pool.get(run.namespace, run.hashes, buffer, at[:-1] + outside)
    with pytest.raises(LayoutError):
        object_pool.put(buffer, run.proof, at[:-1])


def test_any_stretch_of_a_chain_of_objects_can_be_got(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 4)
    object_pool.put(run.rows, run.proof)
    for first in range(len(run.rows)):
        for count in range(1, len(run.rows) - first + 1):
            buffer = np.full((count + 2, BLOCK_BYTES), 0x5A, dtype=np.uint8)
            at = [*range(count, 0, -1)]
            result = object_pool.get(run.namespace, run.hashes, buffer, at, first)
            assert result.outcomes == [ReadOutcome.GOOD] * count
            assert (buffer[at] == run.rows[first : first + count]).all()
            assert (result.checksums == run.proof.checksums[first : first + count]).all()
            assert (buffer[[0, -1]] == 0x5A).all()


def test_blocks_beyond_a_chain_and_parts_of_objects_are_refused(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 2)
    for first, count in ((-1, 1), (len(run.rows), 1), (1, len(run.rows))):
        with pytest.raises(LayoutError):
            object_pool.get(run.namespace, run.hashes, run.rows[:count], None, first)
    if object_pool.blocks > 1:
        shorter = part(run, [*range(len(run.rows) - 1)])
        with pytest.raises(LayoutError, match=f"no whole objects of {object_pool.blocks}"):
            object_pool.put(shorter.rows, shorter.proof)
        with pytest.raises(LayoutError, match=f"no whole objects of {object_pool.blocks}"):
            object_pool.get(shorter.namespace, shorter.hashes, shorter.room())


def test_an_outcome_is_that_of_its_object_wherever_its_row_lies(object_pool: ObjectPool) -> None:
    run, other, k = objects_of(object_pool, 3), objects_of(object_pool, 1, seed=9), object_pool.blocks
    flipped = np.zeros(3 * k, dtype=np.uint32)
    flipped[2 * k - 1] = 1  # of the last block of the second object
    object_pool.put(run.rows, run.proof._replace(checksums=run.proof.checksums ^ flipped))
    at: list[int] = np.random.default_rng(5).permutation(8 * k)[: 4 * k].tolist()
    buffer = np.full((8 * k, BLOCK_BYTES), 0x5A, dtype=np.uint8)
    outcomes = object_pool.get(run.namespace, run.hashes + other.hashes, buffer, at).outcomes
    expected = each(object_pool, [ReadOutcome.GOOD, ReadOutcome.GOOD, ReadOutcome.GOOD, ReadOutcome.MISSING])
    expected[2 * k - 1] = ReadOutcome.CORRUPT
    assert outcomes == expected
    good = [index for index, outcome in enumerate(outcomes) if outcome is ReadOutcome.GOOD]
    assert (buffer[np.array(at)[good]] == run.rows[good]).all()


def test_an_empty_run_of_objects_is_no_trouble(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 0)
    assert object_pool.put(run.rows, run.proof) == []
    assert object_pool.get(run.namespace, b"", run.room()).outcomes == []


def test_putting_twice_is_a_success_and_keeps_the_first(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 3)
    computed_again = objects_of(object_pool, 3, seed=5).rows  # the same tokens, other last bits
    assert object_pool.put(run.rows, run.proof) == [True] * len(run.rows)
    again = run.proof._replace(checksums=checksums(computed_again))
    assert object_pool.put(computed_again, again) == [True] * len(run.rows)
    rows = run.room()
    assert object_pool.get(run.namespace, run.hashes, rows).outcomes == [ReadOutcome.GOOD] * len(run.rows)
    assert (rows == run.rows).all()


def test_what_was_never_put_or_lies_in_another_namespace_is_missing(object_pool: ObjectPool) -> None:
    run, other = objects_of(object_pool, 1), objects_of(object_pool, 1, seed=3)
    object_pool.put(run.rows, run.proof)
    rows = np.empty((2 * object_pool.blocks, BLOCK_BYTES), dtype=np.uint8)
    outcomes = object_pool.get(run.namespace, run.hashes + other.hashes, rows).outcomes
    assert outcomes == each(object_pool, [ReadOutcome.GOOD, ReadOutcome.MISSING])
    elsewhere = object_pool.get(OTHER_NAMESPACE.id, run.hashes, run.room())
    assert elsewhere.outcomes == each(object_pool, [ReadOutcome.MISSING])


def test_an_object_whose_checksum_never_fitted_is_corrupt(object_pool: ObjectPool) -> None:
    run = objects_of(object_pool, 2)
    object_pool.put(run.rows, run.proof._replace(checksums=run.proof.checksums ^ np.uint32(1)))
    outcomes = object_pool.get(run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [ReadOutcome.CORRUPT] * len(run.rows)


def test_threads_put_and_get_side_by_side(object_pool: ObjectPool) -> None:
    wrong: list[int] = []

    def work(worker: int) -> None:
        run = objects_of(object_pool, 6, seed=worker % 2)  # two of the threads put the same blocks
        rows = run.room()
        held = object_pool.put(run.rows, run.proof)
        outcomes = object_pool.get(run.namespace, run.hashes, rows).outcomes
        if not all(held) or set(outcomes) != {ReadOutcome.GOOD} or not (rows == run.rows).all():
            wrong.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_object_pool_can_be_closed_twice(object_pool: ObjectPool) -> None:
    object_pool.close()
    object_pool.close()
    run = objects_of(object_pool, 2)
    assert object_pool.put(run.rows, run.proof) == [False] * len(run.rows)
    assert object_pool.get(run.namespace, run.hashes, run.room()).outcomes == [ReadOutcome.FAILED] * len(run.rows)
