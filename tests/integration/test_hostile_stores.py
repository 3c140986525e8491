"""What others put under an object's name costs a bounded read, one warning and one miss: bytes without end, keys of
another type.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvbm.pools.base import ReadOutcome
from kvbm.pools.stores import cache_tier
from kvbm.pools.stores.base import Get, Got, Refusal, StoreTrouble
from kvbm.pools.stores.cache_tier import CachedStore
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.stores.redis import open_redis_store
from tests.extras import needed
from tests.object_pools import memory_objects
from tests.object_stores import PATIENT, WAIT_S
from tests.pool_runs import random_run
from tests.servers import redis_server

BLOCK_BYTES, K = 96, 2
HUGE_BYTES = 8 << 20
GOOD, CORRUPT = ReadOutcome.GOOD, ReadOutcome.CORRUPT


def test_an_object_larger_than_any_may_be_is_a_miss_with_one_warning_and_is_not_handed_on() -> None:
    store, troubles = MemoryStore("memory://x"), list[str]()
    pool = memory_objects(BLOCK_BYTES, K, store, on_trouble=troubles.append)
    run = random_run(4 * K, BLOCK_BYTES)
    assert pool.put(run.rows, run.proof) == [True] * 4 * K
    names = sorted(store.objects)
    for name in names[:3]:
        store.objects[name] = (bytes(HUGE_BYTES), 0)
    outcomes = pool.get(run.namespace, run.hashes, run.room()).outcomes
    assert sorted(map(int, outcomes)) == sorted([int(CORRUPT)] * 3 * K + [int(GOOD)] * K)
    assert len(troubles) == 1, troubles
    assert str(HUGE_BYTES) in troubles[0]
    pool.close()


@pytest.mark.objects
def test_redis_hands_over_no_more_of_a_key_than_an_object_may_have() -> None:
    redis = needed("redis", "redis")
    with redis_server() as url:
        store = open_redis_store(f"{url}?prefix=p", limits=PATIENT, open_wait_s=WAIT_S)
        client = redis.Redis.from_url(url)
        client.set("p/huge", bytes(HUGE_BYTES))
        client.set("p/good", b"12345678")
        client.rpush("p/list", "x")
        before = client.info("stats")["total_net_output_bytes"]
        gets = [Get(name, most_bytes=1024) for name in ("huge", "good", "list", "none")]
        huge, good, other, none = store.get(gets, WAIT_S)
        sent_bytes = client.info("stats")["total_net_output_bytes"] - before
        assert isinstance(huge, Refusal) and huge.trouble is StoreTrouble.UNUSABLE
        assert isinstance(good, Got) and bytes(good.body) == b"12345678"
        assert isinstance(other, Refusal) and other.trouble is StoreTrouble.UNUSABLE
        assert isinstance(none, Refusal) and none.trouble is StoreTrouble.ABSENT
        assert sent_bytes < HUGE_BYTES // 8
        store.close()
        client.close()


@pytest.mark.objects
def test_one_key_of_another_type_does_not_rest_the_front_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_tier, "_CACHE_WAIT_S", WAIT_S)  # a busy machine rests no front either
    monkeypatch.setattr(cache_tier, "_FILL_WAIT_S", WAIT_S)
    redis = needed("redis", "redis")
    with redis_server() as url:
        troubles = list[str]()
        backing = MemoryStore("memory://behind")
        store = CachedStore(
            open_redis_store(f"{url}?prefix=p", limits=PATIENT, open_wait_s=WAIT_S), backing, troubles.append
        )
        pool = memory_objects(BLOCK_BYTES, K, store, on_trouble=troubles.append)
        run = random_run(4 * K, BLOCK_BYTES)
        assert pool.put(run.rows, run.proof) == [True] * 4 * K
        assert store.settle(WAIT_S)
        client = redis.Redis.from_url(url)
        names = sorted(backing.objects)
        client.delete(f"p/{names[0]}", f"p/{names[1]}")
        client.rpush(f"p/{names[0]}", "x")
        client.set(f"p/{names[1]}", bytes(HUGE_BYTES))
        for _ in range(2):
            room = run.room()
            assert pool.get(run.namespace, run.hashes, room).outcomes == [GOOD] * 4 * K
            assert np.array_equal(room[: 4 * K], run.rows)
            assert store.settle(WAIT_S)
        assert len(troubles) == 1, troubles
        assert client.type(f"p/{names[0]}") == b"string"
        assert client.strlen(f"p/{names[1]}") < HUGE_BYTES
        backing.objects.clear()  # the front alone answers: it was not left alone
        assert pool.get(run.namespace, run.hashes, run.room()).outcomes == [GOOD] * 4 * K
        pool.close()
        client.close()
