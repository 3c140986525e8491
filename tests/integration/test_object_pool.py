"""The object pool on real servers: answers that are wrong, late or none, two writers at once, and settings that cannot
be used.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import CODER, NATIVE, open_objects
from kvbm.assembly.native import NEW_OBJECT_RECEIVER
from kvbm.config import load_settings
from kvbm.core.checksum import crc32c
from kvbm.core.errors import ConfigError, PoolError
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.pools.base import ReadOutcome
from kvbm.pools.object.header import OBJECT_VERSION, header_bytes
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores import cache_tier
from kvbm.pools.stores.base import Get, Got, ObjectStore, Put, Refusal
from kvbm.pools.tenant_keys import add_key
from tests.faulty_http import Fault, FaultyServer, faulty
from tests.object_pools import memory_objects
from tests.object_stores import WAIT_S, Place, azure_place, s3_place
from tests.pool_runs import SHAPE, Run, random_run
from tests.servers import free_port

BLOCK_BYTES, K = 4000, 4
OBJECT_BYTES = header_bytes(K) + K * BLOCK_BYTES
SHORT_S = 0.5  # of calls that nobody answers
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.FAILED


class Shop:
    """A pool, opened while all is well, on a store behind a server that can be told to fail."""

    def __init__(self, server: FaultyServer, place: Place) -> None:
        self.server = server
        self.place = place
        self.troubles: list[str] = []
        self.direct: ObjectStore = place.open()
        self.pool = self.open(endpoint=server.url)

    def open(self, deadline_s: float = WAIT_S, **options: Any) -> BlockObjects:
        """Another pool at the same place."""
        way = ObjectPoolOptions(
            blocks=K, deadline_s=deadline_s, new_receiver=NEW_OBJECT_RECEIVER, on_trouble=self.troubles.append
        )
        return BlockObjects(self.place.open(**options), BLOCK_BYTES, NATIVE.checksums, CODER, way)

    def breaks(self, *faults: Fault) -> None:
        """From now on."""
        self.server.faults[:] = faults

    def names(self, run: Run) -> list[str]:
        """Of a run's objects."""
        ends = range(K * HASH_BYTES, len(run.hashes) + 1, K * HASH_BYTES)
        return self.pool.names(run.namespace, [run.hashes[end - HASH_BYTES : end] for end in ends])

    def put(self, run: Run, pool: BlockObjects | None = None) -> list[bool]:
        """Whether each object of a run is held."""
        held = (pool or self.pool).put(run.rows, run.proof)
        assert held == [held[at] for at in range(0, len(held), K) for _ in range(K)]
        return held[::K]

    def get(self, run: Run, pool: BlockObjects | None = None) -> list[ReadOutcome]:
        """How the read of each object ended. Bytes that count as good are those that were put."""
        rows = run.room()
        outcomes = (pool or self.pool).get(run.namespace, run.hashes, rows).outcomes
        good = [index for index, outcome in enumerate(outcomes) if outcome is GOOD]
        assert (rows[good] == run.rows[good]).all()
        assert outcomes == [outcomes[at] for at in range(0, len(outcomes), K) for _ in range(K)]
        return outcomes[::K]


@pytest.fixture(params=["s3", "azure"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    endpoint = request.getfixturevalue({"s3": "s3_endpoint", "azure": "azurite_endpoint"}[request.param])
    with faulty(endpoint) as server:
        made = Shop(server, (s3_place if request.param == "s3" else azure_place)(endpoint))
        yield made
        made.breaks()
        made.pool.close()
        made.direct.close()


def run_of(objects: int, seed: int = 0) -> Run:
    return random_run(objects * K, BLOCK_BYTES, seed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("status", 500, "InternalError"), "500 InternalError"),
        (Fault("status", 403, "AccessDenied"), "403 AccessDenied"),
        (Fault("status", 404, "NoSuchBucket"), "404 NoSuchBucket"),
        (Fault("never"), "no answer within 0."),
        (Fault("reset"), ""),
    ],
)
def test_a_store_in_trouble_is_a_miss_with_one_remark_within_the_deadline(shop: Shop, fault: Fault, words: str) -> None:
    there, new = run_of(3), run_of(3, seed=1)
    assert shop.put(there) == [True] * 3
    with closing(shop.open(SHORT_S if fault.kind == "never" else WAIT_S, endpoint=shop.server.url)) as pool:
        shop.breaks(fault)
        assert shop.get(there, pool) == [FAILED] * 3
        assert shop.put(new, pool) == [False] * 3
        assert len(shop.troubles) == 2
        assert "get of 3 of 3 objects failed" in shop.troubles[0]
        assert "put of 3 of 3 objects failed" in shop.troubles[1]
        assert words in shop.troubles[0] and words in shop.troubles[1]
        shop.breaks()
    assert shop.get(there) == [GOOD] * 3
    assert shop.put(new) == [True] * 3


def test_answers_that_only_drip_are_misses_within_the_deadline(shop: Shop) -> None:
    run = run_of(3)
    shop.put(run)
    with closing(shop.open(SHORT_S, endpoint=shop.server.url)) as pool:
        shop.breaks(Fault("slow", method="GET"))
        assert shop.get(run, pool) == [FAILED] * 3
        shop.breaks()
    assert "no answer within 0." in shop.troubles[0]


def test_an_object_that_is_not_there_is_missing_without_a_word(shop: Shop) -> None:
    run = run_of(2)
    assert shop.get(run) == [MISSING] * 2
    assert shop.troubles == []


def test_an_answer_that_is_cut_is_asked_again_and_never_believed(shop: Shop) -> None:
    run = run_of(2)
    shop.put(run)
    shop.breaks(Fault("cut", method="GET", times=1))
    assert shop.get(run) == [GOOD] * 2
    shop.breaks(Fault("cut", method="GET"))
    assert shop.get(run) == [FAILED] * 2


def test_another_objects_bytes_are_corrupt(shop: Shop) -> None:
    run = run_of(2)
    shop.put(run)
    first, second = shop.names(run)
    [body, other] = [got.body for got in shop.direct.get([Get(first), Get(second)], WAIT_S) if isinstance(got, Got)]
    assert shop.direct.delete([first], WAIT_S) == [None]
    assert shop.direct.put([Put(first, bytes(other))], WAIT_S) == [None]
    assert shop.get(run) == [CORRUPT, GOOD]
    assert shop.put(run) == [False, True]
    assert "is there and holds other blocks; delete it" in shop.troubles[-1]
    assert bytes(body) != bytes(other)


def test_an_object_that_was_cut_short_is_corrupt_and_no_success(shop: Shop) -> None:
    run = run_of(1)
    shop.put(run)
    [name] = shop.names(run)
    [got] = shop.direct.get([Get(name)], WAIT_S)
    assert isinstance(got, Got)
    assert got.size_bytes == OBJECT_BYTES
    shop.direct.delete([name], WAIT_S)
    shop.direct.put([Put(name, bytes(got.body)[:-1])], WAIT_S)
    assert shop.get(run) == [CORRUPT]
    assert shop.put(run) == [False]
    assert f"is there with {OBJECT_BYTES - 1} bytes that are no whole object; delete it" in shop.troubles[-1]


def test_an_object_of_a_newer_kvbm_is_a_miss_that_says_so_and_is_left_alone(shop: Shop) -> None:
    run = run_of(1)
    shop.put(run)
    [name] = shop.names(run)
    [got] = shop.direct.get([Get(name)], WAIT_S)
    assert isinstance(got, Got)
    body = bytearray(got.body)
    body[4] = OBJECT_VERSION + 1
    end = int.from_bytes(body[52:56], "little") - 4
    damaged = bytes(body)
    body[end : end + 4] = crc32c(bytes(body[:end])).to_bytes(4, "little")
    for newer, outcome in ((bytes(body), FAILED), (damaged, CORRUPT)):  # not corrupt, which would withdraw its claim
        shop.direct.delete([name], WAIT_S)
        shop.direct.put([Put(name, newer)], WAIT_S)
        assert shop.get(run) == [outcome]
        if outcome is FAILED:
            assert f"{name} was put by a newer kvbm, as version {OBJECT_VERSION + 1}" in shop.troubles[-1]
            assert shop.put(run) == [False]
            [described] = shop.pool.describe([name])
            assert isinstance(described, Refusal) and "upgrade it" in described.words
            [kept] = shop.direct.get([Get(name)], WAIT_S)
            assert isinstance(kept, Got) and bytes(kept.body) == newer


def test_a_put_whose_answer_was_lost_is_a_success(shop: Shop) -> None:
    run = run_of(1)
    shop.breaks(Fault("deaf", 500, "InternalError", method="PUT", times=1))
    assert shop.put(run) == [True]
    assert shop.troubles == []
    assert shop.get(run) == [GOOD]


def test_two_instances_that_put_the_same_blocks_at_once_both_succeed(shop: Shop) -> None:
    pools = [shop.pool, shop.open()]
    barrier = threading.Barrier(2)
    held: dict[int, list[bool]] = {}
    for seed in range(3):
        run = run_of(8, seed)

        def put(number: int, run: Run = run) -> None:
            barrier.wait(WAIT_S)
            held[number] = pools[number].put(run.rows, run.proof)

        threads = [threading.Thread(target=put, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert held == {0: [True] * 8 * K, 1: [True] * 8 * K}
        counted = [pool.stats() for pool in pools]
        assert sum(stats.put_objects for stats in counted) == 8 * (seed + 1)
        assert sum(stats.found_objects for stats in counted) == 8 * (seed + 1)
        assert shop.get(run) == [GOOD] * 8
    assert shop.troubles == []
    pools[1].close()


# -- pools by their settings ------------------------------------------------------------------------------------------


def opened(flags: Mapping[str, str], namespaces: tuple[Namespace, ...] = (SHAPE,)) -> BlockObjects:
    """The pool that settings name, for blocks of 4,000 bytes."""
    said = {"timeout_s": WAIT_S, **flags}
    settings = load_settings(flags={f"pools.object.{key}": value for key, value in said.items()})
    return open_objects(settings, namespaces, BLOCK_BYTES, waits=False)


def at_place(place: Place, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Flags and environment of a place."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    return {"url": place.url, "endpoint": place.endpoint}


@pytest.mark.parametrize("place", ["s3", "azure"], indirect=True)
def test_pools_that_do_not_meet_have_different_names(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = at_place(place, monkeypatch)
    add_key(tmp_path / "keys.toml", "", "1")
    keys = {"keys": str(tmp_path / "keys.toml")}
    usual, same, other, sealed = (opened(flags | more) for more in ({}, {"blocks": "8"}, {"blocks": "2"}, keys))
    both = opened(flags | keys | {"blocks": "2"})
    assert usual.blocks == 8  # of 16 tokens each: 128
    assert same.name == usual.name
    assert other.name == f"{usual.name}#blocks=2"
    assert sealed.name == f"{usual.name}#sealed"
    assert both.name == f"{usual.name}#blocks=2,sealed"
    run = random_run(8, BLOCK_BYTES)
    assert usual.put(run.rows, run.proof) == [True] * 8
    found = [pool.get(run.namespace, run.hashes, run.room()).outcomes[0] for pool in (same, other, sealed, both)]
    assert found == [GOOD, MISSING, MISSING, MISSING]
    for pool in (usual, same, other, sealed, both):
        pool.close()


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_keys_that_a_tenant_lacks_are_named_when_a_pool_opens(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = at_place(place, monkeypatch) | {"keys": str(tmp_path / "keys.toml")}
    with pytest.raises(ConfigError, match=r"keys\.toml cannot be read .* make one with: kvbm keys"):
        opened(flags)
    add_key(tmp_path / "keys.toml", "acme", "1")
    with pytest.raises(ConfigError, match=r"keys\.toml has no keys of tenant ''; write a table \[tenants\.\"\"\]"):
        opened(flags)
    opened(flags, (Namespace(model="tiny", revision="r1", block_tokens=16, tenant="acme"),)).close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"url": "bucket/x"}, "names no store"),
        ({"url": "http://bucket"}, "names no store"),
        ({"url": "s3://UPPER/x"}, "s3://"),
        ({"blocks": "-1"}, r"pools\.object\.blocks is -1"),
        ({"blocks": "5000"}, r"pools\.object\.blocks is 5000; give 1 to 4096"),
        ({"requests": "0"}, r"pools\.object\.requests is 0"),
        ({"ttl_s": "-5"}, r"pools\.object\.ttl_s is -5"),
        ({"look_s": "0"}, r"pools\.object\.look_s is 0"),
        ({"compression": "zip"}, "use one of auto, off"),
        ({"keys": "a", "keys_command": "b"}, "keep one of them"),
        ({"front": "redis://x"}, "without pools.object.url"),
        ({"url": "s3://bbb/x", "front": "s3://ccc"}, "is no Redis"),
    ],
)
def test_settings_that_cannot_be_used_are_named(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(flags)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_bucket_or_a_front_that_is_not_there_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = at_place(place, monkeypatch)
    with pytest.raises(PoolError, match="nowhere"):
        opened(flags | {"url": "s3://nowhere/x"})
    with pytest.raises(PoolError, match="redis"):
        opened(flags | {"front": f"redis://127.0.0.1:{free_port()}/0"})
    with pytest.raises(PoolError, match="does not answer"):
        opened(flags | {"endpoint": f"http://127.0.0.1:{free_port()}"})


@pytest.mark.objects
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_redis_in_front_answers_and_may_forget(place: Place, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_tier, "_CACHE_WAIT_S", WAIT_S)  # a busy machine rests no front
    monkeypatch.setattr(cache_tier, "_FILL_WAIT_S", WAIT_S)
    flags = at_place(place, monkeypatch)
    pool = opened(flags | {"front": f"{redis_url}?prefix=front-{uuid.uuid4().hex}", "blocks": "4"})
    run = run_of(5)
    assert pool.put(run.rows, run.proof) == [True] * 5 * K
    assert pool.store.settle(WAIT_S)  # type: ignore[attr-defined]
    names = [listed.name for listed in pool.listed()]
    pool.store.backing.delete(names, WAIT_S)  # type: ignore[attr-defined]
    assert pool.get(run.namespace, run.hashes, run.room()).outcomes == [GOOD] * 5 * K
    assert pool.put(run.rows, run.proof) == [True] * 5 * K
    assert pool.store.settle(WAIT_S)  # type: ignore[attr-defined]
    assert pool.store.cache.delete(names, WAIT_S) == [None] * 5  # type: ignore[attr-defined]
    assert pool.get(run.namespace, run.hashes, run.room()).outcomes == [GOOD] * 5 * K
    pool.close()


def test_what_a_store_in_memory_refuses_is_refused_in_the_same_words() -> None:
    """The pool adds nothing to a store's words but its own name and how much of a call failed."""
    troubles: list[str] = []
    pool = memory_objects(BLOCK_BYTES, K, on_trouble=troubles.append)
    pool.close()
    run = run_of(2)
    assert pool.put(run.rows, run.proof) == [False] * 2 * K
    assert troubles == ["OBJECT pool memory://objects: put of 2 of 2 objects failed; first: the pool is closed"]
