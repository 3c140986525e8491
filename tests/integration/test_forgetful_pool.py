"""A real Redis as the object pool: it forgets, and claims, SQL and the log stay as large as what it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvbm.core.ids import HASH_BYTES, Tier, split_hashes
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.base import ObjectStore
from kvbm.pools.stores.redis import open_redis_store
from tests.eventually import eventually
from tests.janitors import HOUR_S
from tests.managers import NAMESPACE, hashes_of, serve
from tests.object_stores import OPEN_WAIT_S
from tests.servers import redis_server
from tests.sites import DEPTH, WAIT_S, K, Site, site

pytestmark = pytest.mark.objects

PROMPTS = 1500  # of two objects each, several times what the server has room for


class Forgetful:
    """A Redis with room for little, and a client that looks into it."""

    def __init__(self, url: str) -> None:
        from redis import Redis

        self.url = f"{url}?prefix=kvbm"
        self.client = Redis.from_url(url)

    def open(self, **options: Any) -> ObjectStore:
        return open_redis_store(self.url, open_wait_s=OPEN_WAIT_S, **options)

    def objects(self) -> int:
        return sum(1 for key in self.client.scan_iter(match=f"kvbm/{K}/*", count=1000))


@pytest.fixture
def redis() -> Iterator[Forgetful]:
    with redis_server("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru") as url:
        server = Forgetful(url)
        yield server
        server.client.close()


def claimed(running: Site, pool: str) -> int:
    """Rows of SQL: one a block."""
    return sum(map(len, running.claims(pool).values()))


def fill(manager: Manager, prompts: range) -> None:
    for prompt in prompts:
        serve(manager, prompt, DEPTH)
        if prompt % 4 == 0:
            assert manager.settle(WAIT_S)
    assert manager.settle(WAIT_S)


def test_claims_sql_and_log_stay_as_large_as_what_redis_has(redis: Forgetful, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs, site(tmp_path, "one", redis.open) as running:
        manager = running.instance("engine")
        pool = manager.pools.object
        assert pool is not None and pool.forgets
        fill(manager, range(PROMPTS))
        for prompt in range(0, PROMPTS, 100):  # most are gone; what others would read is asked for as well
            serve(manager, prompt, DEPTH)
        stats = manager.stats()
        assert stats.objects is not None and stats.objects.put_objects > 2 * redis.objects()
        eventually(lambda: claimed(running, pool.name) <= 2 * K * redis.objects(), "claims outlive their objects")
        assert not [entry for entry in logs if entry["log_level"] in ("warning", "error")]

        redis.client.flushall()
        eventually(lambda: not claimed(running, pool.name), "claims outlive a server that was emptied")
        eventually(lambda: not running.depth(PROMPTS - 1), "lookup goes by what is gone")
        serve(manager, PROMPTS, DEPTH)  # and it goes on
        assert manager.settle(WAIT_S)
        eventually(lambda: claimed(running, pool.name) == DEPTH, "nothing is claimed any more")


def test_what_expires_is_claimed_no_more(redis: Forgetful, tmp_path: Path) -> None:
    with site(tmp_path, "one", lambda: redis.open(ttl_s=3600)) as running:
        manager = running.instance("engine")
        fill(manager, range(4))
        pool = manager.pools.object
        assert pool is not None
        eventually(lambda: claimed(running, pool.name) == 4 * DEPTH, "nothing was claimed")
        for key in redis.client.scan_iter(match=f"kvbm/{K}/*", count=1000):
            assert 0 < redis.client.ttl(key) <= 3600
            redis.client.pexpire(key, 1)  # as if the hour was over
        eventually(lambda: not claimed(running, pool.name), "claims outlive the time of their objects")


def closed(running: Site, prompts: range) -> str:
    """Fill the pool by an instance that ends then; the pool's name."""
    manager = running.instance("engine")
    fill(manager, prompts)
    pool = manager.pools.object
    assert pool is not None
    eventually(lambda: claimed(running, pool.name) == len(prompts) * DEPTH, "not all is claimed")
    manager.close()
    return pool.name


def test_the_janitor_holds_claims_of_an_instance_that_is_gone_to_what_redis_has(
    redis: Forgetful, tmp_path: Path
) -> None:
    with site(tmp_path, "one", redis.open) as running:
        pool = closed(running, range(20))
        kept = hashes_of(3, DEPTH)[: K * HASH_BYTES]
        name = f"kvbm/{K}/{NAMESPACE.id.hex()}/{kept[-HASH_BYTES:].hex()}"
        assert redis.client.exists(name)
        redis.client.delete(*(key for key in redis.client.scan_iter(count=1000) if key != name.encode()))
        report = running.gc()
        assert (report.missing_blocks, report.deleted) == (0, 0)  # too young to judge, by clocks that may be apart
        running.age(HOUR_S)
        since_s = time.time() - HOUR_S / 4
        manager = running.instance("another")
        manager.claim(NAMESPACE.id, hashes_of(3, DEPTH))  # a claim of today does not make the others younger
        eventually(lambda: running.claimed(since_s) == DEPTH, "SQL does not know that they were claimed again")
        assert running.gc().missing_blocks == 19 * DEPTH
        eventually(lambda: claimed(running, pool) == DEPTH, "claims stay")
        running.age(HOUR_S)
        running.gc()
        eventually(lambda: claimed(running, pool) == K, "claims stay")
        assert set(*running.claims(pool).values()) == set(split_hashes(kept))
        assert running.depth(3) == K and running.depth(4) == 0


def test_the_janitor_claims_what_redis_has_and_nobody_claims(redis: Forgetful, tmp_path: Path) -> None:
    with site(tmp_path / "a", "one", redis.open) as running:
        pool = closed(running, range(8))
    with site(tmp_path / "b", "one", redis.open) as fresh:  # all else is gone
        # a Redis tells times in seconds, and what seems to be of this moment is left to the next run
        eventually(lambda: fresh.gc() and claimed(fresh, pool) == 8 * DEPTH, "what is there is not claimed")
        manager = fresh.instance("engine")
        assert serve(manager, 5, DEPTH).prefix.hits == {Tier.OBJECT: DEPTH}


def test_the_janitor_deletes_from_redis_what_stands_above_a_quota(redis: Forgetful, tmp_path: Path) -> None:
    with site(tmp_path, "one", redis.open) as running:
        pool = closed(running, range(4))
        report = running.gc(quota_bytes=1)
        assert (report.deleted, redis.objects(), report.lists) == (8, 0, 0)
        eventually(lambda: not claimed(running, pool), "claims of deleted objects stay")


@pytest.mark.parametrize("policy", ["allkeys-lfu", "noeviction"])
def test_a_redis_of_another_policy_is_listed_too(policy: str) -> None:
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", policy) as url:
        server = Forgetful(url)
        store = server.open()
        try:
            from kvbm.pools.stores.base import Put

            assert store.put([Put(f"1/{at:04}", b"x" * 50) for at in range(2500)], WAIT_S) == [None] * 2500
            listed = [one.name for one in store.listed("1/", WAIT_S)]
            assert listed == [f"1/{at:04}" for at in range(2500)]
        finally:
            store.close()
            server.client.close()
