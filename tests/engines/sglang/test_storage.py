"""`KvbmHiCache` as SGLang's own factory makes it, over SGLang's own host pools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvbm.core.errors import ConfigError
from kvbm.core.ids import Tier
from kvbm.engines.sglang.storage import KvbmHiCache
from tests.engines.sglang.harness.pools import (
    backend_of,
    chain,
    config_of,
    extra_of,
    fill,
    indices_of,
    mha_pool,
    mla_pool,
    page_bytes,
    wipe,
)
from tests.eventually import eventually

PAGES = 128
SETTLE_S = 60.0
OF_MLA = ("layer_first", "page_first", "page_first_direct")  # SGLang's others are for devices of other makers
LAYOUTS = (*OF_MLA, "page_head")
POOLS = {
    **{f"mha-{layout}": partial(mha_pool, layout, PAGES) for layout in LAYOUTS},
    **{f"mla-{layout}": partial(mla_pool, layout, PAGES) for layout in OF_MLA},
}


def settled(backend: Any) -> None:
    assert backend._tiers.manager.settle(SETTLE_S)


@pytest.mark.parametrize("kind", POOLS)
def test_pages_of_every_layout_come_back_byte_by_byte_and_after_a_restart(tmp_path: Path, kind: str) -> None:
    pool, keys = POOLS[kind](), chain(1, 60)
    written, other = list(range(60)), list(range(127, 67, -1))
    wanted = fill(pool, written, keys)
    extra = extra_of(tmp_path)
    backend = backend_of(pool, extra)
    assert type(backend) is KvbmHiCache and isinstance(backend, HiCacheStorage)
    try:
        assert backend.batch_exists(keys) == 0 and not backend.exists(keys[0])
        for at in (0, 20, 40):
            info = HiCacheStorageExtraInfo(prefix_keys=keys[:at])
            assert backend.batch_set_v1(keys[at : at + 20], indices_of(written[at : at + 20]), info) == [True] * 20
        assert backend.batch_exists(keys + chain(2, 3)) == 60
        wipe(pool)
        assert backend.batch_get_v1(keys, indices_of(other)) == [True] * 60
        assert [page_bytes(pool, page) for page in other] == wanted
        settled(backend)
    finally:
        backend.close()
    wipe(pool)
    again = backend_of(pool, extra)
    try:
        assert (
            again.batch_get_v1(keys[7:31], indices_of(other[:24])) == [True] * 24
        )  # nobody has asked whether it exists
        assert [page_bytes(pool, page) for page in other[:24]] == wanted[7:31]
        assert again.batch_exists(keys) == 60
        again.clear()
        assert again.batch_exists(keys) == 0 and again.batch_get_v1(keys, indices_of(other)) == [False] * 60
    finally:
        again.close()


def test_the_other_words_of_the_interface_answer_a_miss_and_never_raise(tmp_path: Path) -> None:
    pool, keys = mha_pool("page_first", PAGES), chain(1, 2)
    with pytest.raises(ConfigError, match="interface_v1"):
        backend_of(pool, extra_of(tmp_path) | {"interface_v1": 0})
    with pytest.raises(ConfigError, match="--dcp-size 2"):
        KvbmHiCache(config_of(extra_of(tmp_path), ranks=2, is_mla=True, dcp_size=2, logical_page_size=8))
    backend = backend_of(pool, extra_of(tmp_path))
    try:
        assert backend.batch_get_v1(keys, indices_of([1])) == [False] * 2
        assert backend.batch_set_v1(keys, indices_of([1, 2]) + 1) == [False] * 2
        assert backend.batch_exists(keys) == 0
        assert backend.get(keys[0]) is None and not backend.set(keys[0]) and not backend.batch_set(keys)
    finally:
        backend.close()
    assert backend.batch_exists(keys) == 0 and backend.batch_set_v1(keys, indices_of([1, 2])) == [False] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_tensor_ranks_have_pages_of_their_own(tmp_path: Path, layout: str) -> None:
    keys = chain(1, 12)
    pools = [mha_pool(layout, PAGES) for _ in range(2)]
    folder = {"pools.nvme.folder": str(tmp_path / "pod")}
    wanted = [fill(pool, range(12), [f"{rank} {key}" for key in keys]) for rank, pool in enumerate(pools)]
    ranks = [backend_of(pool, extra_of(tmp_path, **folder), rank=at, ranks=2) for at, pool in enumerate(pools)]
    try:
        assert [rank._tiers.manager.instance for rank in ranks] == ["sglang-test-tp0", "sglang-test-tp1"]
        assert all(ranks[0].batch_set_v1(keys, indices_of(range(12)))) and ranks[1].batch_exists(keys) == 0
        assert all(ranks[1].batch_set_v1(keys, indices_of(range(12))))
        for pool, rank, bytes_of in zip(pools, ranks, wanted, strict=True):
            wipe(pool)
            assert all(rank.batch_get_v1(keys, indices_of(range(12))))
            assert [page_bytes(pool, page) for page in range(12)] == bytes_of
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("layout", OF_MLA)
def test_of_mla_one_rank_writes_and_the_others_read_it(tmp_path: Path, layout: str) -> None:
    keys = chain(1, 12)
    pools = [mla_pool(layout, PAGES) for _ in range(2)]
    wanted = fill(pools[0], range(12), keys)
    folder = {"pools.nvme.folder": str(tmp_path / "pod")}
    ranks = [
        backend_of(pool, extra_of(tmp_path, **folder), rank=at, ranks=2, is_mla=True) for at, pool in enumerate(pools)
    ]
    try:
        assert config_of({}, rank=0, ranks=2, is_mla=True).is_storage_writer
        assert all(ranks[1].batch_set_v1(keys, indices_of(range(12))))  # it leaves that to the other
        assert not ranks[1]._tiers.manager.held(Tier.HOST)
        assert all(ranks[0].batch_set_v1(keys, indices_of(range(12))))
        settled(ranks[0])
        eventually(lambda: ranks[1].batch_exists(keys) == 12, "the folder is looked at from time to time")
        assert all(ranks[1].batch_get_v1(keys, indices_of(range(12))))
        assert [page_bytes(pools[1], page) for page in range(12)] == wanted
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_pool_beside_the_keys_and_values_is_stored_by_its_own_rule(tmp_path: Path, layout: str) -> None:
    """As SGLang's controller asks it for a draft model's pages, and for states at the end of a prefix."""
    pool, draft, keys = mha_pool(layout, PAGES), mha_pool(layout, PAGES), chain(1, 8)
    backend = backend_of(pool, extra_of(tmp_path))
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    try:
        fill(pool, range(8), keys)
        wanted = fill(draft, range(5), [f"draft {key}" for key in keys[:5]])
        assert all(backend.batch_set_v1(keys, indices_of(range(8))))
        whole = PoolTransfer(PoolName.DRAFT, host_indices=indices_of(range(5)), keys=keys[:5])
        assert backend.batch_set_v2([whole]) == {PoolName.DRAFT: [True] * 5}
        asked = PoolTransfer(PoolName.DRAFT, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
        found = backend.batch_exists_v2(keys, [asked])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (5, {"kv": 8, "draft": 5})
        trailing = PoolTransfer(PoolName.DRAFT, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert backend.batch_exists_v2(keys, [trailing]).restorable_prefix_pages == [1, 2, 3, 4, 5]
        absent = PoolTransfer(PoolName.SWA, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert backend.batch_exists_v2(keys, [absent]).kv_hit_pages == 0
        wipe(draft)
        assert backend.batch_get_v2([whole]) == {PoolName.DRAFT: [True] * 5}
        assert [page_bytes(draft, page) for page in range(5)] == wanted
        short = PoolTransfer(PoolName.DRAFT, host_indices=indices_of([1]), keys=keys[:5])
        assert backend.batch_get_v2([short]) == {PoolName.DRAFT: [False] * 5}
    finally:
        backend.close()
