"""Objects over a store in memory: what proves them, what is there already, what is damaged."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvbm._native import checksums
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.object.coding import ELEMENT_CODINGS
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.reader import Described
from kvbm.pools.object.tombstones import WITHDRAWN_PREFIX, Tombstones, encode_list
from kvbm.pools.stores.base import Get, Got, Listed, Put, Refusal, StoreTrouble
from kvbm.pools.stores.memory import MemoryStore
from tests.eventually import WAIT_S, eventually
from tests.object_pools import memory_objects
from tests.pool_runs import Run, random_run

BLOCK_BYTES = 160
K = 4
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.FAILED


class Shop:
    """A pool with its store and what it complained about."""

    def __init__(self, blocks: int = K) -> None:
        self.store = MemoryStore()
        self.troubles: list[str] = []
        self.pool = memory_objects(BLOCK_BYTES, blocks, self.store, on_trouble=self.troubles.append)

    def names(self, run: Run) -> list[str]:
        """Of a run's objects."""
        step = self.pool.blocks * HASH_BYTES
        ends = range(step, len(run.hashes) + 1, step)
        return self.pool.names(run.namespace, [run.hashes[end - HASH_BYTES : end] for end in ends])

    def change(self, name: str, body: bytes) -> None:
        """Put something else where an object lies."""
        self.store.objects[name] = (body, 0)

    def outcomes(self, run: Run) -> list[ReadOutcome]:
        """How a read of a whole run ends."""
        return self.pool.get(run.namespace, run.hashes, run.room()).outcomes


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_objects_of_two_sizes_never_meet(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    other = memory_objects(BLOCK_BYTES, 2, shop.store)
    assert shop.pool.put(run.rows, run.proof) == [True] * K
    assert other.get(run.namespace, run.hashes, run.room()).outcomes == [MISSING] * K
    assert other.put(run.rows, run.proof) == [True] * K
    assert len(shop.store.objects) == 1 + 2


def test_every_flipped_bit_is_found(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    [name] = shop.names(run)
    body = shop.store.objects[name][0]
    for at in range(len(body)):
        for bit in range(8):
            changed = bytearray(body)
            changed[at] ^= 1 << bit
            shop.change(name, bytes(changed))
            rows = run.room()
            outcomes = shop.pool.get(run.namespace, run.hashes, rows).outcomes
            block = (at - header_bytes(K)) // BLOCK_BYTES
            assert outcomes == [CORRUPT if block in (-1, index) or block < 0 else GOOD for index in range(K)]
            good = [index for index, outcome in enumerate(outcomes) if outcome is GOOD]
            assert (rows[good] == run.rows[good]).all()


def test_an_object_of_any_other_length_is_corrupt(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    [name] = shop.names(run)
    body = shop.store.objects[name][0]
    for length in range(len(body)):
        shop.change(name, body[:length])
        assert shop.outcomes(run) == [CORRUPT] * K
    shop.change(name, body + b"\0")
    assert shop.outcomes(run) == [CORRUPT] * K


def test_objects_under_each_others_names_are_corrupt(shop: Shop) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    first, second = shop.names(run)
    shop.change(first, shop.store.objects[second][0])
    assert shop.outcomes(run) == [CORRUPT] * K + [GOOD] * K


def test_an_object_that_ends_as_another_chain_does_is_corrupt(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    asked = bytes(HASH_BYTES) + run.hashes[HASH_BYTES:]
    assert shop.pool.get(run.namespace, asked, run.room()).outcomes == [CORRUPT] * K


def test_what_is_there_and_is_something_else_is_no_success(shop: Shop) -> None:
    run, other = random_run(4 * K, BLOCK_BYTES), random_run(K, BLOCK_BYTES, seed=7)
    names = shop.names(run)
    shop.pool.put(other.rows, other.proof)
    shop.change(names[0], b"something else")
    shop.change(names[2], shop.store.objects[shop.names(other)[0]][0])
    shop.change(names[3], bytes(header_bytes(K) + K * BLOCK_BYTES))
    assert shop.pool.put(run.rows, run.proof) == [False] * K + [True] * K + [False] * 2 * K
    [trouble] = shop.troubles
    assert "put of 3 of 4 objects failed" in trouble
    assert f"{names[0]} is there with 14 bytes that are no whole object; delete it" in trouble
    assert shop.store.objects[names[0]][0] == b"something else"
    assert shop.outcomes(run) == [CORRUPT] * K + [GOOD] * K + [CORRUPT] * 2 * K
    assert (
        shop.pool.put(
            run.rows[2 * K : 3 * K],
            run.proof._replace(
                hashes=run.hashes[2 * K * HASH_BYTES : 3 * K * HASH_BYTES], checksums=run.proof.checksums[2 * K : 3 * K]
            ),
        )
        == [False] * K
    )
    assert "is there and holds other blocks; delete it" in shop.troubles[1]


def test_an_object_that_was_cut_short_is_no_success(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    [name] = shop.names(run)
    shop.change(name, shop.store.objects[name][0][:-1])
    assert shop.pool.put(run.rows, run.proof) == [False] * K
    assert f"with {header_bytes(K) + K * BLOCK_BYTES - 1} bytes" in shop.troubles[0]


def test_objects_describe_themselves(shop: Shop) -> None:
    run = random_run(3 * K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    first, second, third = shop.names(run)
    step = K * HASH_BYTES
    size_bytes = header_bytes(K) + K * BLOCK_BYTES
    absent = f"{K}/{run.namespace.hex()}/{bytes(16).hex()}"
    shop.change(second, shop.store.objects[third][0])
    shop.store.put([Put(f"{K}/readme.txt", b"hello")], 1.0)
    found = shop.pool.describe([first, second, third, absent, f"{K}/readme.txt"])
    assert found[0] == Described(run.namespace, run.hashes[:step], run.proof.epoch, size_bytes)
    assert found[2] == Described(run.namespace, run.hashes[2 * step :], run.proof.epoch, size_bytes)
    assert found[1] is None
    assert isinstance(found[3], Refusal) and found[3].trouble is StoreTrouble.ABSENT
    assert found[4] is None
    assert shop.pool.describe(["5/elsewhere"]) == [None]
    assert shop.pool.describe([]) == []


def test_a_listing_has_the_objects_of_the_pool_alone_and_what_was_deleted_is_gone(shop: Shop) -> None:
    run, other = random_run(3 * K, BLOCK_BYTES), random_run(2, BLOCK_BYTES, seed=2)
    shop.pool.put(run.rows, run.proof)
    memory_objects(BLOCK_BYTES, 2, shop.store).put(other.rows, other.proof)
    shop.store.put([Put(".kvbm/janitor", b"somebody")], 1.0)
    names = sorted(shop.names(run))
    assert [listed.name for listed in shop.pool.listed()] == names
    assert [listed.name for listed in shop.pool.listed(after=names[0])] == names[1:]
    gone = shop.names(run)[1:2]
    assert shop.pool.delete([*gone, "4/nothing/of/this/name"]) == [True, True]
    assert shop.outcomes(run) == [GOOD] * K + [MISSING] * K + [GOOD] * K


def test_what_a_pool_did_is_counted(shop: Shop) -> None:
    run, other = random_run(2 * K, BLOCK_BYTES), random_run(K, BLOCK_BYTES, seed=3)
    shop.pool.put(run.rows, run.proof)
    shop.pool.put(run.rows, run.proof)
    shop.change(shop.names(run)[0], b"")
    shop.outcomes(run)
    shop.outcomes(other)
    stats = shop.pool.stats()
    assert (stats.put_objects, stats.found_objects, stats.refused_objects) == (2, 2, 0)
    assert (stats.got_objects, stats.missing_objects, stats.corrupt_objects, stats.failed_objects) == (1, 1, 1, 0)
    put = stats.namespaces[run.namespace]
    assert put.raw_bytes == 2 * K * BLOCK_BYTES
    assert put.stored_bytes == 2 * (header_bytes(K) + K * BLOCK_BYTES)


def test_a_call_of_many_objects_has_them_all(shop: Shop) -> None:
    run = random_run(37 * K, BLOCK_BYTES)
    at = np.random.default_rng(1).permutation(40 * K)[: 37 * K].tolist()
    buffer = np.zeros((40 * K, BLOCK_BYTES), dtype=np.uint8)
    buffer[at] = run.rows
    pool = memory_objects(BLOCK_BYTES, K, shop.store, threads=3)
    assert pool.put(buffer, run.proof, at) == [True] * 37 * K
    rows = run.room()
    assert pool.get(run.namespace, run.hashes, rows).outcomes == [GOOD] * 37 * K
    assert (rows == run.rows).all()
    pool.close()


def test_what_is_withdrawn_is_missing_and_is_not_put(shop: Shop) -> None:
    run = random_run(3 * K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    first, second, _ = shop.names(run)
    pool = memory_objects(BLOCK_BYTES, K, shop.store, look_s=1000.0)
    pool.look()
    assert pool.put(run.rows, run.proof) == [True] * 3 * K
    shop.store.put(
        [Put(f"{WITHDRAWN_PREFIX}7", encode_list([second])), Put(f"{WITHDRAWN_PREFIX}8", b"\xff no list")], 1.0
    )
    pool.look()
    assert pool.get(run.namespace, run.hashes, run.room()).outcomes == [GOOD] * K + [MISSING] * K + [GOOD] * K
    shop.store.delete([first, second], 1.0)
    assert pool.put(run.rows, run.proof) == [True] * K + [False] * K + [True] * K
    assert first in shop.store.objects
    assert second not in shop.store.objects
    shop.store.delete([f"{WITHDRAWN_PREFIX}7"], 1.0)
    pool.look()
    assert pool.put(run.rows, run.proof) == [True] * 3 * K
    pool.close()


def test_a_pool_looks_for_what_is_withdrawn_by_itself(shop: Shop) -> None:
    run = random_run(K, BLOCK_BYTES)
    shop.pool.put(run.rows, run.proof)
    pool = memory_objects(BLOCK_BYTES, K, shop.store, look_s=0.02)
    shop.store.put([Put(f"{WITHDRAWN_PREFIX}1", encode_list(shop.names(run)))], 1.0)
    eventually(lambda: pool.get(run.namespace, run.hashes, run.room()).outcomes == [MISSING] * K, "it does not look")
    pool.close()


class Overtaken(MemoryStore):
    """A store of which the first listing is given out after the second, as it was when it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        found = list(super().listed(prefix, deadline_s, after))
        if not self.begun.is_set():
            self.begun.set()
            assert self.may_end.wait(WAIT_S)
        return iter(found)


def test_of_two_looks_at_a_time_the_one_that_began_last_counts() -> None:
    store = Overtaken()
    tombstones = Tombstones(store, 1000.0, WAIT_S)
    looking = threading.Thread(target=tombstones.look)
    looking.start()
    assert store.begun.wait(WAIT_S)
    store.put([Put(f"{WITHDRAWN_PREFIX}1", encode_list(["gone"]))], WAIT_S)
    tombstones.look()
    assert tombstones.among(["gone", "here"]) == {"gone"}
    store.may_end.set()
    looking.join(WAIT_S)
    assert tombstones.among(["gone", "here"]) == {"gone"}


class Late(MemoryStore):
    """A store that answers when it is told to, whatever the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        self.may_answer.wait(WAIT_S)
        return super().get(gets, deadline_s)

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        self.may_answer.wait(WAIT_S)
        return super().put(puts, deadline_s)


def test_an_answer_after_the_deadline_touches_nothing() -> None:
    store, troubles = Late(), []
    pool = memory_objects(BLOCK_BYTES, K, store, threads=4, deadline_s=0.05, on_trouble=troubles.append)
    run = random_run(8 * K, BLOCK_BYTES)
    held = run.rows.copy()
    assert pool.put(run.rows, run.proof) == [False] * 8 * K
    run.rows[:] = 0
    rows = run.room()
    assert pool.get(run.namespace, run.hashes, rows).outcomes == [FAILED] * 8 * K
    assert len(troubles) == 2
    assert "no answer within 0.05 s" in troubles[0]
    store.may_answer.set()
    pool.close()
    assert (rows == run.room()).all()
    late = memory_objects(BLOCK_BYTES, K, store).get(run.namespace, run.hashes, rows)
    good = [index for index, outcome in enumerate(late.outcomes) if outcome is GOOD]
    assert good and (rows[good] == held[good]).all()  # what was late is what was to be put, not what the rows became


@pytest.mark.parametrize("kv_dtype", sorted(ELEMENT_CODINGS))
def test_blocks_are_coded_by_their_elements_and_come_back(kv_dtype: str) -> None:
    namespace = Namespace(model="tiny", block_tokens=16, kv_dtype=kv_dtype)
    values = np.random.default_rng(1).standard_normal((12, 4096)).astype(np.float32)
    rows = {"float32": values, "float16": values.astype(np.float16)}.get(kv_dtype)
    if rows is None:
        rows = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, or any pairs of bytes with few high ones
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(12, -1)
    if kv_dtype.startswith("float8"):
        rows = np.ascontiguousarray(rows[:, 1::2])
    proof = Proof(namespace.id, Epoch(3), bytes(range(12 * HASH_BYTES)), checksums(rows))
    store = MemoryStore()
    pool = memory_objects(rows.shape[1], K, store, namespaces=[namespace])
    reader = memory_objects(rows.shape[1], K, store)  # which does not know the namespace
    assert pool.put(rows, proof) == [True] * 12
    put = pool.stats().namespaces[namespace.id]
    assert put.raw_bytes == rows.size
    assert put.stored_bytes == sum(len(body) for body, _ in store.objects.values()) < rows.size
    read = np.zeros_like(rows)
    assert reader.get(namespace.id, proof.hashes, read).outcomes == [GOOD] * 12
    assert (read == rows).all()
    plain = memory_objects(rows.shape[1], K, namespaces=[namespace], compressed=False)
    plain.put(rows, proof)
    assert plain.stats().namespaces[namespace.id].stored_bytes > rows.size


def test_what_was_put_is_counted_for_the_namespaces_put_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.pools.object.pool._MOST_COUNTED", 2)  # clients choose namespaces
    pool = memory_objects(BLOCK_BYTES, 1)
    rows = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
    names = [Namespace(model="m", block_tokens=16, tenant=tenant).id for tenant in "abac"]
    for at, name in enumerate(names):
        assert pool.put(rows, Proof(name, Epoch(1), bytes([at]) * HASH_BYTES, checksums(rows))) == [True]
    put = pool.stats().namespaces
    assert list(put) == [names[0], names[3]] and put[names[0]].raw_bytes == 2 * BLOCK_BYTES
    assert pool.stats().put_bytes.raw_bytes == 4 * BLOCK_BYTES
