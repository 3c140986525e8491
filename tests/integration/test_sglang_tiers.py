"""Pages of a host pool that lies as SGLang's do, through real managers: HOST, NVME and a restart; bytes and keys."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import journal_folder
from kvbm.cli import replay_main
from kvbm.core.errors import ConfigError, LayoutError
from kvbm.core.ids import Tier
from kvbm.engines.sglang.identity import Place
from kvbm.engines.sglang.opening import open_tiers
from kvbm.engines.sglang.settings import ExtraConfig, read_extra
from kvbm.engines.sglang.tiers import PageTiers
from tests.eventually import eventually
from tests.sglang_pools import ArrayPool, chain, indices_of

PAGES = 64
SETTLE_S = 60.0


def read(folder: Path, rank: str = "", **extra: Any) -> ExtraConfig:
    given = {
        "interface_v1": 1,
        "instance.data_dir": str(folder),
        "pools.host.slots": 16,
        "pools.nvme.slots": 128,
        "onboard.wait_s": 30.0,
        "model": "m",
        "revision": "r1",
    }
    return read_extra(given | extra, environment={}, rank=rank, host="test")


def opened(folder: Path, pool: ArrayPool, place: Place | None = None, **extra: Any) -> PageTiers:
    place = place or Place()
    args = SimpleNamespace(dtype="bfloat16", model_path="m", kv_cache_dtype="auto")
    return open_tiers(
        read(folder, place.suffix, **extra), pool, place, name="kv", server_args=args, machine="sglang on a test"
    )


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_as_they_were_from_host_from_nvme_and_after_a_restart(tmp_path: Path, layout: str) -> None:
    pool, keys = ArrayPool(layout, PAGES), chain(1, 40)
    written, other = list(range(40)), list(range(63, 23, -1))
    pool.fill(written, keys)
    tiers = opened(tmp_path, pool)
    try:
        assert tiers.exists(keys) == 0
        assert tiers.set(keys, indices_of(written)) == [True] * 40  # HOST has 16 rows: most go on to NVME meanwhile
        assert tiers.exists(keys) == 40 and tiers.exists(chain(2, 3)) == 0
        pool.memory[...] = 0
        assert tiers.get(keys, indices_of(other)) == [True] * 40
        assert all(pool.has(other, keys))
        assert tiers.manager.settle(SETTLE_S)
        assert not tiers.manager.held(Tier.HBM) and tiers.manager.stats().engine_surplus == 0
        assert len(tiers.manager.held(Tier.NVME)) == 40
    finally:
        tiers.close()
    pool.memory[...] = 0
    again = opened(tmp_path, pool)
    try:
        assert again.exists(keys) == 40
        assert again.get(keys, indices_of(other)) == [True] * 40  # without asking first it would be the same
        assert all(pool.has(other, keys))
    finally:
        again.close()
    assert replay_main(["verify", str(journal_folder(read(tmp_path).settings))]) == 0


def test_a_page_that_was_changed_on_its_device_is_a_miss_and_no_byte_of_it_is_served(tmp_path: Path) -> None:
    pool, keys = ArrayPool("page_first", PAGES), chain(1, 8)
    file = tmp_path / "blocks"
    nvme = {"pools.nvme.path": str(file)}
    pool.fill(range(8), keys)
    tiers = opened(tmp_path, pool, **nvme)
    tiers.set(keys, indices_of(range(8)))
    assert tiers.manager.settle(SETTLE_S)
    tiers.close()
    wanted = pool.page(5).tobytes()
    held = file.read_bytes()
    where = held.index(pool.page(5)[0].tobytes())
    with file.open("r+b") as opened_file:
        opened_file.seek(where + 17)
        opened_file.write(bytes([held[where + 17] ^ 1]))
    pool.memory[...] = 0
    tiers = opened(tmp_path, pool, **nvme)
    try:
        assert tiers.exists(keys) == 8
        assert tiers.get(keys, indices_of(range(8))) == [True] * 5 + [False] * 3
        assert all(pool.has(range(5), keys[:5])) and not pool.page(5).any()
        assert tiers.manager.stats().corrupt_blocks == 1
        assert tiers.exists(keys) == 5
        pool.page(5)[...] = np.frombuffer(wanted, dtype=np.uint16).reshape(pool.page(5).shape)
        assert tiers.set(keys[5:6], indices_of([5]), keys[:5]) == [True]
        assert tiers.exists(keys) == 8
    finally:
        tiers.close()


def test_a_row_that_changed_in_host_memory_is_a_miss_too(tmp_path: Path) -> None:
    pool, keys = ArrayPool("layer_first", PAGES), chain(1, 3)
    pool.fill(range(3), keys)
    tiers = opened(tmp_path, pool, **{"pools.nvme.slots": 0})
    try:
        tiers.set(keys, indices_of(range(3)))
        match = tiers.manager.begin_acquire(tiers.namespace.id, tiers.hashes(keys))
        slot = match.slots[1]
        match.release()
        tiers.manager.pools.memory(Tier.HOST)[slot, 9] ^= 1  # type: ignore[index]
        pool.memory[...] = 0
        with capture_logs() as logs:
            assert tiers.get(keys, indices_of(range(3))) == [True, False, False]
        assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["page.corrupt"]
        assert tiers.corrupt_pages == 1 and not pool.page(1).any()
        assert tiers.exists(keys) == 1
    finally:
        tiers.close()


def test_a_page_that_comes_twice_is_stored_once(tmp_path: Path) -> None:
    pool, keys = ArrayPool("page_first", PAGES), chain(1, 6)
    pool.fill(range(6), keys)
    tiers = opened(tmp_path, pool)
    try:
        assert tiers.set(keys, indices_of(range(6))) == [True] * 6
        assert tiers.manager.settle(SETTLE_S)
        stores, applied = tiers.manager.stats().engine_stores, tiers.manager.applied()
        assert tiers.set(keys, indices_of(range(6))) == [True] * 6
        assert (tiers.manager.stats().engine_stores, tiers.manager.applied()) == (stores, applied)
        pool.fill([10], ["other bytes"])
        assert tiers.set(keys[:1], indices_of([10])) == [True]  # what is held stays as it is
        assert tiers.get(keys, indices_of(range(20, 26))) == [True] * 6 and all(pool.has(range(20, 26), keys))
    finally:
        tiers.close()


def test_after_a_clear_nothing_is_there_and_what_is_stored_again_is(tmp_path: Path) -> None:
    pool, keys = ArrayPool("page_first", PAGES), chain(1, 6)
    pool.fill(range(6), keys)
    tiers = opened(tmp_path, pool)
    try:
        tiers.set(keys, indices_of(range(6)))
        assert tiers.clear() >= 6
        assert tiers.exists(keys) == 0 and tiers.get(keys, indices_of(range(6))) == [False] * 6
        assert tiers.set(keys, indices_of(range(6))) == [True] * 6 and tiers.exists(keys) == 6
    finally:
        tiers.close()


def test_a_reader_a_writer_and_clears_at_once_never_give_wrong_bytes(tmp_path: Path) -> None:
    """SGLang's three threads at once over a HOST of 16 rows; each page that is said to be there has its bytes."""
    pool, prompts = ArrayPool("page_first", 2 * PAGES), [chain(one, 12) for one in range(5)]
    tiers = opened(tmp_path, pool)
    wrong: list[str] = []
    ended = threading.Event()

    def write() -> None:
        for turn in range(15):
            keys = prompts[turn % 5]
            pool.fill(range(12), keys)
            tiers.set(keys, indices_of(range(12)))
            if turn == 7:
                tiers.clear()
        ended.set()

    def ask(first: int) -> None:
        turn = 0
        while not ended.is_set() or turn < 5:
            keys = prompts[(turn + first) % 5]
            where = range(first, first + 12)
            depth = tiers.exists(keys)
            got = tiers.get(keys[:depth], indices_of(where[:depth])) if depth else []
            good = sum(got)
            wrong.extend(key for key, ok in zip(keys, pool.has(where[:good], keys[:good]), strict=False) if not ok)
            turn += 1

    threads = [threading.Thread(target=write), *(threading.Thread(target=ask, args=(at,)) for at in (40, 80))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SETTLE_S)
        assert not any(thread.is_alive() for thread in threads) and wrong == []
        assert tiers.manager.stats().hit_blocks
    finally:
        tiers.close()


def test_indices_that_are_no_pages_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    pool, keys = ArrayPool("page_first", PAGES), chain(1, 2)
    tiers = opened(tmp_path, pool)
    try:
        for bad in (indices_of([1]), indices_of([1, 2]) + 1, indices_of([1, PAGES]), indices_of([1, 2])[::-1]):
            with pytest.raises(LayoutError):
                tiers.get(keys, bad)
            with pytest.raises(LayoutError):
                tiers.set(keys, bad)
        assert tiers.exists(keys) == 0 and tiers.manager.applied() >= 0
    finally:
        tiers.close()


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "r2"},
        {"model": "n"},
        {"layout": "layer_first"},
        {"place": Place((1, 2))},
        {"place": Place((0, 1), (1, 2))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_pages_of_other_weights_layouts_and_ranks_are_not_found(tmp_path: Path, other: dict[str, Any]) -> None:
    """Both write to one folder of a pod, where each reads what the other has."""
    folder = {"pools.nvme.folder": str(tmp_path / "pod")}
    pool, keys = ArrayPool("page_first", PAGES), chain(1, 4)
    pool.fill(range(4), keys)
    tiers = opened(tmp_path / "a", pool, **folder)
    tiers.set(keys, indices_of(range(4)))
    assert tiers.manager.settle(SETTLE_S)
    given = {"layout": "page_first", "place": Place(), **other}
    layout, place = given.pop("layout"), given.pop("place")
    second = opened(tmp_path / "b", ArrayPool(layout, PAGES), place, **folder, **{"instance.id": "second"}, **given)
    try:
        assert second.namespace.id != tiers.namespace.id
        assert second.exists(keys) == 0 and second.get(keys, indices_of(range(4))) == [False] * 4
    finally:
        second.close()
        tiers.close()


def test_what_one_rank_of_mla_stores_the_others_read_through_the_pods_folder(tmp_path: Path) -> None:
    folder = {"pools.nvme.folder": str(tmp_path / "pod")}
    pools = [ArrayPool("page_first", PAGES) for _ in range(2)]
    keys = chain(1, 12)
    pools[0].fill(range(12), keys)
    ranks = [
        opened(tmp_path / str(rank), pools[rank], Place((rank, 2), has_copies=True), **folder) for rank in range(2)
    ]
    try:
        assert ranks[0].namespace.id == ranks[1].namespace.id and ranks[0].manager.instance != ranks[1].manager.instance
        ranks[0].set(keys, indices_of(range(12)))
        assert ranks[0].manager.settle(SETTLE_S)
        eventually(lambda: ranks[1].exists(keys) == 12, "the folder is looked at from time to time")
        assert ranks[1].get(keys, indices_of(range(12))) == [True] * 12
        assert all(pools[1].has(range(12), keys))
    finally:
        for rank in ranks:
            rank.close()


def test_a_pool_whose_pages_have_no_constant_distance_is_refused(tmp_path: Path) -> None:
    class Crooked(ArrayPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            found, sizes = super().get_page_buffer_meta(indices)
            return [one + int(indices[0]) ** 2 for one in found], sizes

    class Silent(ArrayPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError(f"Unsupported layout: {self.layout}")

    for kind, words in ((Crooked, "constant distance"), (Silent, "no addresses")):
        with pytest.raises(ConfigError, match=words):
            opened(tmp_path, kind("page_first", PAGES))
