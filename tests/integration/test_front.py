"""A store that forgets before one that keeps, under a pool that holds every object to its proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvbm.pools.base import ReadOutcome
from kvbm.pools.object.pool import BlockObjects
from kvbm.pools.stores.base import Get, Got, Put, Refusal, StoreTrouble
from kvbm.pools.stores.cache_tier import CachedStore
from kvbm.pools.stores.memory import MemoryStore
from tests.eventually import WAIT_S
from tests.object_pools import memory_objects
from tests.pool_runs import Run, random_run

BLOCK_BYTES, K = 96, 2
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.FAILED


class Watched(MemoryStore):
    """A store that knows what it was asked, and that can refuse everything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got: list[str] = []
        self.refusal: Refusal | None = None

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        self.got += [get.name for get in gets]
        return [self.refusal] * len(gets) if self.refusal else super().get(gets, deadline_s)

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        return [self.refusal] * len(puts) if self.refusal else super().put(puts, deadline_s)


class Pair:
    """Two stores under one pool."""

    def __init__(self) -> None:
        self.cache, self.backing = Watched("memory://front"), Watched("memory://behind")
        self.troubles: list[str] = []
        self.now_s = 100.0
        self.store = CachedStore(self.cache, self.backing, self.troubles.append, lambda: self.now_s)
        self.pool: BlockObjects = memory_objects(BLOCK_BYTES, K, self.store, on_trouble=self.troubles.append)

    def outcomes(self, run: Run) -> list[ReadOutcome]:
        """How a read ends; what is good is what was put."""
        self.cache.got.clear()
        self.backing.got.clear()
        rows = run.room()
        outcomes = self.pool.get(run.namespace, run.hashes, rows).outcomes
        good = [index for index, outcome in enumerate(outcomes) if outcome is GOOD]
        assert (rows[good] == run.rows[good]).all()
        assert self.store.settle(WAIT_S)
        return outcomes


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.pool.close()


def test_a_put_reaches_both_and_a_get_asks_the_front_alone(pair: Pair) -> None:
    run = random_run(6 * K, BLOCK_BYTES)
    assert pair.pool.put(run.rows, run.proof) == [True] * 6 * K
    assert pair.store.settle(WAIT_S)
    assert pair.pool.name == "memory://behind"
    assert {name: body for name, (body, _) in pair.cache.objects.items()} == {
        name: body for name, (body, _) in pair.backing.objects.items()
    }
    assert pair.outcomes(run) == [GOOD] * 6 * K
    assert pair.backing.got == []


def test_what_the_front_forgot_is_read_behind_it_and_fills_it_again(pair: Pair) -> None:
    run = random_run(6 * K, BLOCK_BYTES)
    pair.pool.put(run.rows, run.proof)
    assert pair.store.settle(WAIT_S)
    forgotten = list(pair.cache.objects)[::2]
    pair.cache.delete(forgotten, 1.0)
    assert pair.outcomes(run) == [GOOD] * 6 * K
    assert sorted(pair.backing.got) == sorted(forgotten)
    assert pair.outcomes(run) == [GOOD] * 6 * K
    assert pair.backing.got == []


def test_wrong_bytes_in_the_front_are_replaced_by_those_behind_it(pair: Pair) -> None:
    run = random_run(3 * K, BLOCK_BYTES)
    pair.pool.put(run.rows, run.proof)
    assert pair.store.settle(WAIT_S)
    first, second, third = pair.cache.objects
    body = bytearray(pair.cache.objects[first][0])
    body[-1] ^= 1
    pair.cache.objects[first] = (bytes(body), 0)
    pair.cache.objects[second] = pair.cache.objects[third]
    assert pair.outcomes(run) == [GOOD] * 3 * K
    assert sorted(pair.backing.got) == sorted([first, second])
    pair.outcomes(run)
    assert pair.cache.objects[first][0] == pair.backing.objects[first][0]
    assert pair.outcomes(run) == [GOOD] * 3 * K
    assert pair.backing.got == []


def test_what_the_store_behind_refuses_is_not_put(pair: Pair) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    pair.backing.refusal = Refusal(StoreTrouble.DENIED, "403 AccessDenied")
    assert pair.pool.put(run.rows, run.proof) == [False] * 2 * K
    assert pair.store.settle(WAIT_S)
    assert pair.cache.objects == {}


def test_a_name_that_is_taken_is_settled_by_what_is_behind(pair: Pair) -> None:
    run = random_run(K, BLOCK_BYTES)
    pair.pool.put(run.rows, run.proof)
    assert pair.store.settle(WAIT_S)
    [name] = pair.backing.objects
    pair.backing.objects[name] = (b"something else", 0)
    assert pair.pool.put(run.rows, run.proof) == [False] * K


def test_a_front_in_trouble_is_left_alone_for_a_while_with_one_remark(pair: Pair) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    pair.pool.put(run.rows, run.proof)
    assert pair.store.settle(WAIT_S)
    pair.cache.refusal = Refusal(StoreTrouble.SILENT, "no answer within 0.5 s")
    for _ in range(3):
        assert pair.outcomes(run) == [GOOD] * 2 * K
    assert pair.cache.got == []
    assert len(pair.troubles) == 1
    assert "front of the object pool memory://front: no answer within 0.5 s" in pair.troubles[0]
    pair.cache.refusal = None
    pair.now_s += 6
    assert pair.outcomes(run) == [GOOD] * 2 * K
    assert pair.backing.got == []


def test_a_delete_is_one_of_both(pair: Pair) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    pair.pool.put(run.rows, run.proof)
    assert pair.store.settle(WAIT_S)
    [first, _] = list(pair.backing.objects)
    assert pair.pool.delete([first]) == [True]
    assert sorted(pair.outcomes(run)) == [GOOD] * K + [MISSING] * K
    assert first not in pair.cache.objects
