"""Pages of SGLang in an object store: another instance finds them through the catalog; a damaged one is a miss, and so
is one of a store that hangs.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.core.ids import SequenceHash, Tier, split_hashes
from kvbm.engines.sglang.identity import Place
from kvbm.engines.sglang.opening import open_tiers
from kvbm.engines.sglang.settings import read_extra
from kvbm.engines.sglang.tiers import PageTiers
from tests.catalog_site import Running, run_catalog
from tests.eventually import eventually
from tests.faulty_http import Fault, faulty
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.object_stores import boto3_client
from tests.sglang_pools import ArrayPool, chain, indices_of

PAGES, SETTLE_S, FOR_EVER_S = 64, 60.0, 3600.0


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


@pytest.fixture
def store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket: its name, the server, and a client."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    client, bucket = boto3_client(s3_endpoint, "test", "test"), f"kvbm-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    return SimpleNamespace(client=client, bucket=bucket, endpoint=s3_endpoint)


def opened(folder: Path, name: str, running: Running, store: Any, pool: ArrayPool, **more: Any) -> PageTiers:
    extra = {
        "interface_v1": 1,
        "instance.id": name,
        "instance.cluster": str(running.settings.cluster),
        "instance.data_dir": str(folder / name),
        "pools.host.slots": 32,
        "pools.object.url": f"s3://{store.bucket}/blocks",
        "pools.object.endpoint": store.endpoint,
        "pools.object.region": "us-east-1",
        "nats.url": running.settings.nats_url,
        "catalog.url": running.client.url,
        "onboard.wait_s": 30.0,
        "onboard.locate_s": 30.0,
        "model": "m",
        "revision": "r1",
        **more,
    }
    read = read_extra(extra, environment={}, host="test")
    return open_tiers(read, pool, Place(), name="kv", server_args=None, machine="sglang on a test", served_name="m")


def test_what_one_engine_put_another_finds_through_the_catalog_and_a_damaged_object_is_a_miss(
    tmp_path: Path, running: Running, store: Any
) -> None:
    keys = chain(1, 10)
    pools = [ArrayPool("page_first", PAGES) for _ in range(2)]
    pools[0].fill(range(10), keys)
    first = opened(tmp_path, "first", running, store, pools[0])
    second = opened(tmp_path, "second", running, store, pools[1])
    try:
        assert all(first.set(keys, indices_of(range(10)), chain(9, 3)))  # in the middle of a chain
        assert first.manager.settle(SETTLE_S) and first.manager.stats().offloaded_blocks[Tier.OBJECT] == 10
        eventually(lambda: second.exists(keys) == 10)
        holders = running.client.block(first.namespace.id, SequenceHash(split_hashes(first.hashes(keys))[4])).holders
        assert {(one.name, one.tier) for one in holders} >= {("first", "HOST")}
        listed = store.client.list_objects_v2(Bucket=store.bucket)["Contents"]
        damaged = first.hashes(keys)[5 * 16 : 6 * 16].hex()
        (name,) = [one["Key"] for one in listed if damaged in one["Key"]]
        body = bytearray(store.client.get_object(Bucket=store.bucket, Key=name)["Body"].read())
        body[-9] ^= 4
        store.client.put_object(Bucket=store.bucket, Key=name, Body=bytes(body))
        assert second.get(keys, indices_of(range(20, 30))) == [True] * 5 + [False] * 5
        assert all(pools[1].has(range(20, 25), keys[:5])) and not pools[1].page(25).any()
        assert second.manager.stats().corrupt_blocks == 1
    finally:
        second.close()
        first.close()


@pytest.mark.bytes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.nightly)])
def test_of_objects_with_a_flipped_bit_none_is_served(tmp_path: Path, running: Running, store: Any, flips: int) -> None:
    """One bit of each object, drawn from all of its bits."""
    draw, pool = random.Random(flips), ArrayPool("page_first", PAGES)
    writer = opened(tmp_path, "writer", running, store, pool)
    reader = opened(tmp_path, "reader", running, store, pool)
    names: dict[str, str] = {}
    made = 0

    def are_known(keys: list[str]) -> bool:
        return reader.exists(keys) == len(keys)

    try:
        while made < flips:
            count = min(PAGES // 2, flips - made)
            keys = chain(10 + made, count)
            pool.fill(range(count), keys)
            assert all(writer.set(keys, indices_of(range(count))))
            assert writer.manager.settle(SETTLE_S)
            eventually(partial(are_known, keys), "the catalog hears of them")
            pages = store.client.get_paginator("list_objects_v2").paginate(Bucket=store.bucket)
            names |= {one["Key"]: "" for page in pages for one in page["Contents"] if one["Key"] not in names}
            fresh = [name for name, state in names.items() if not state]
            assert len(fresh) == count
            for name in fresh:
                body = bytearray(store.client.get_object(Bucket=store.bucket, Key=name)["Body"].read())
                bit = draw.randrange(8 * len(body))
                body[bit // 8] ^= 1 << bit % 8
                store.client.put_object(Bucket=store.bucket, Key=name, Body=bytes(body))
                names[name] = "flipped"
            pool.memory[...] = 0
            assert [reader.get([key], indices_of([at])) for at, key in enumerate(keys)] == [[False]] * count
            assert not pool.memory.any()
            made += count
        assert made == flips
    finally:
        reader.close()
        writer.close()


def test_of_a_store_that_hangs_reads_and_writes_end_in_time_and_it_is_used_again_once_it_answers(
    tmp_path: Path, running: Running, store: Any
) -> None:
    """It takes requests and never answers. NVME beside it goes on, and so does the end."""
    keys, others = chain(1, 20), chain(2, 60)
    pool = ArrayPool("page_first", PAGES)
    pool.fill(range(20), keys)
    one_name = {"pools.object.name": "objects"}  # whatever the address
    writer = opened(tmp_path, "writer", running, store, pool, **one_name)
    assert all(writer.set(keys, indices_of(range(20)))) and writer.manager.settle(SETTLE_S)
    with faulty(store.endpoint) as front:
        late = opened(
            tmp_path,
            "late",
            running,
            store,
            pool,
            **one_name,
            **{
                "pools.object.endpoint": front.url,
                "pools.object.timeout_s": 2.0,
                "onboard.wait_s": 1.0,
                "pools.nvme.slots": 128,
            },
        )

        def takes(part: list[str], before: list[str]) -> bool:
            return all(late.set(part, indices_of(range(10)), before))

        try:
            eventually(lambda: late.exists(keys) == 20)
            front.faults = [Fault("never")]
            pool.memory[...] = 0
            assert late.get(keys, indices_of(range(20))) == [False] * 20 and not pool.memory.any()
            for at in range(0, 60, 10):
                part = others[at : at + 10]
                pool.fill(range(10), part)
                eventually(partial(takes, part, others[:at]), "NVME takes what the store does not")
            front.faults = []
            eventually(lambda: late.get(keys, indices_of(range(20))) == [True] * 20, "the store answers again")
            assert all(pool.has(range(20), keys))
            assert late.manager.settle(SETTLE_S)
            front.faults = [Fault("never")]
            pool.fill(range(10), chain(3, 10))
            late.set(chain(3, 10), indices_of(range(10)))
        finally:
            late.close()
            writer.close()
