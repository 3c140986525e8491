"""Pages of SGLang in an object store: another instance finds them through the catalog; a damaged one is a miss."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
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


def opened(folder: Path, name: str, running: Running, store: Any, pool: ArrayPool) -> PageTiers:
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
