"""`KvbmHiCache` when bytes change, files end early, a store hangs, another process comes, and SGLang's own injector
strikes: a miss each, in time, and never other bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbm.assembly import journal_folder
from kvbm.cli import replay_main
from kvbm.core.ids import Tier
from kvbm.engines.sglang.settings import read_extra
from kvbm.engines.sglang.storage import KvbmHiCache
from tests.catalog_site import Running, run_catalog
from tests.engines.sglang.harness.flips import flip_pages
from tests.engines.sglang.harness.pools import (
    backend_of,
    chain,
    extra_of,
    file_backend,
    fill,
    indices_of,
    mha_pool,
    page_bytes,
    wipe,
)
from tests.engines.sglang.harness.radix import CONFIG, RadixCache
from tests.eventually import eventually
from tests.faulty_http import Fault, faulty
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.object_stores import s3_place

PAGES, SETTLE_S, FOR_EVER_S = 128, 60.0, 3600.0
FLIPPED_PAGES = 250  # at a time
TOKENS = list(range(1000, 1000 + 40 * CONFIG.page_size))
OTHERS = [one + 5000 for one in TOKENS]
ROOT = Path(__file__).parents[3]


def ours(pool: Any, folder: Path) -> Any:
    """A storage of ours that keeps its pages in a folder."""
    return backend_of(pool, extra_of(folder, **{"pools.nvme.path": str(folder / "blocks")}))


@pytest.mark.bytes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flips", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_of_pages_with_a_flipped_bit_none_is_served(tmp_path: Path, flips: int) -> None:
    pool = mha_pool("page_first", FLIPPED_PAGES)
    found = flip_pages(pool, tmp_path, partial(ours, pool), flips, FLIPPED_PAGES, seed=flips)
    assert (found.made, found.served, found.spoilt, found.missed) == (flips, 0, 0, flips)


def test_the_file_backend_serves_pages_with_a_flipped_bit_so_that_the_test_of_ours_can_fail(tmp_path: Path) -> None:
    pool = mha_pool("page_first", FLIPPED_PAGES)
    found = flip_pages(pool, tmp_path, partial(file_backend, pool), 500, FLIPPED_PAGES, seed=500)
    assert (found.made, found.served, found.missed) == (500, 500, 0)


def test_of_a_file_that_was_cut_what_is_gone_is_a_miss_at_once_and_after_a_restart(tmp_path: Path) -> None:
    pool, keys, places = mha_pool("page_first", PAGES), chain(1, PAGES), range(PAGES)
    wanted, file = fill(pool, places, keys), tmp_path / "blocks"

    def given(backend: Any) -> list[bool]:
        """For each page whether it is given; whatever is given has its bytes."""
        wipe(pool)
        got = [backend.batch_get_v1([key], indices_of([at]))[0] for at, key in enumerate(keys)]
        for at, ok in enumerate(got):
            assert page_bytes(pool, at) == (wanted[at] if ok else bytes(len(wanted[at])))
        return got

    backend = ours(pool, tmp_path)
    assert all(backend.batch_set_v1(keys, indices_of(places)))
    assert backend._tiers.manager.settle(SETTLE_S)
    os.truncate(file, file.stat().st_size // 4)
    assert 0 < sum(given(backend)) < PAGES
    backend.close()
    for _ in range(2):
        backend = ours(pool, tmp_path)
        assert sum(given(backend)) < PAGES
        fill(pool, places, keys)
        assert all(backend.batch_set_v1(keys, indices_of(places)))
        assert backend._tiers.manager.settle(SETTLE_S)
        assert all(given(backend))
        backend.close()
        os.truncate(file, file.stat().st_size // 4)


def test_what_was_said_to_exist_is_a_miss_after_a_clear_and_its_memory_stays_as_it_was(tmp_path: Path) -> None:
    pool, keys = mha_pool("page_first", PAGES), chain(1, 40)
    fill(pool, range(40), keys)
    backend = backend_of(pool, extra_of(tmp_path))
    try:
        assert all(backend.batch_set_v1(keys, indices_of(range(40))))
        assert backend._tiers.manager.settle(SETTLE_S) and backend.batch_exists(keys) == 40
        backend.clear()
        wipe(pool)
        assert backend.batch_get_v1(keys, indices_of(range(40))) == [False] * 40
        assert not any(any(page_bytes(pool, at)) for at in range(40)) and backend.batch_exists(keys) == 0
    finally:
        backend.close()
    again = backend_of(pool, extra_of(tmp_path))
    try:
        assert again.batch_exists(keys) == 0
    finally:
        again.close()


@pytest.mark.timeout(600)
def test_a_second_process_on_one_pool_is_refused_or_left_without_it_and_the_first_stays_right(tmp_path: Path) -> None:
    """With the same folder, and with the same file alone."""
    pool, keys = mha_pool("page_first", PAGES), chain(1, PAGES)
    wanted = fill(pool, range(PAGES), keys)
    extra = extra_of(tmp_path, **{"pools.nvme.path": str(tmp_path / "blocks")})
    backend = backend_of(pool, extra)
    try:
        assert all(backend.batch_set_v1(keys, indices_of(range(PAGES))))
        assert backend._tiers.manager.settle(SETTLE_S)
        other = {**extra, "instance.data_dir": str(tmp_path / "other"), "instance.id": "other"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.engines.sglang.harness.second", json.dumps(extra), json.dumps(other)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=560,
            check=True,
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(told) == 2 and "in use by another manager" in told[0]["refused"], told
        assert told[1] == {"read": 8, "held": 0} and "pool.left_out" in done.stdout + done.stderr
        wipe(pool)
        assert all(backend.batch_get_v1(keys, indices_of(range(PAGES))))
        assert [page_bytes(pool, at) for at in range(PAGES)] == wanted
    finally:
        backend.close()
    assert replay_main(["verify", str(journal_folder(read_extra(extra, environment={}).settings))]) == 0


def test_sglangs_own_injector_of_delays_and_failures_makes_misses_and_no_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch)
    pool = mha_pool("layer_first", PAGES)
    backend = backend_of(pool, extra_of(tmp_path))
    assert not isinstance(backend, KvbmHiCache)
    hits = 0
    try:
        for turn in range(40):
            keys = chain(turn % 4, 10)
            wanted = fill(pool, range(10), keys)
            backend.batch_set_v1(keys, indices_of(range(10)))
            wipe(pool)
            depth = backend.batch_exists(keys)
            got = backend.batch_get_v1(keys[:depth], indices_of(range(50, 50 + depth)))
            hits += sum(got)
            assert [page_bytes(pool, 50 + at) for at in range(sum(got))] == wanted[: sum(got)]
        assert hits
    finally:
        backend.close()


def test_under_sglangs_injector_its_radix_cache_loads_what_was_written_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch)
    prompts = [[one + 10_000 * at for one in TOKENS] for at in range(1, 3)]
    loaded = 0
    with RadixCache() as caches:
        first = caches.opened(extra_of(tmp_path))
        written = [caches.produce(first, tokens) for tokens in prompts]
        assert first[0].cache_controller.storage_backend._backend._tiers.manager.settle(SETTLE_S)
        caches.close(first[0])
        for turn in range(6):
            again = caches.opened(extra_of(tmp_path))
            for tokens, wanted in zip(prompts, written, strict=True):
                read = caches.prefetch(again, tokens, f"{turn} {tokens[0]}")
                assert all(torch.equal(one, all_of[: len(one)]) for one, all_of in zip(read, wanted, strict=bool(read)))
                loaded += len(read[0]) if read else 0
            caches.close(again[0])
    assert loaded


def inject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SGLang's factory put its injector before a storage."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


def test_a_store_that_hangs_is_a_miss_in_time_and_sglangs_threads_go_on(
    tmp_path: Path, running: Running, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch, a backup and the end meet a store that takes requests and never answers."""
    place = s3_place(s3_endpoint)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    with faulty(s3_endpoint) as store, RadixCache() as caches:
        settings = {
            "instance.cluster": str(running.settings.cluster),
            "nats.url": running.settings.nats_url,
            "catalog.url": running.client.url,
            "pools.nvme.slots": 0,
            "pools.object.url": place.url,
            "pools.object.name": "objects",
            "pools.object.region": "us-east-1",
            "onboard.locate_s": 30.0,
        }
        writer = caches.opened(
            extra_of(tmp_path / "a", **settings, **{"pools.object.endpoint": s3_endpoint, "instance.id": "writer"})
        )
        written = caches.produce(writer, TOKENS)
        manager = writer[0].cache_controller.storage_backend._tiers.manager
        assert manager.settle(SETTLE_S) and manager.stats().offloaded_blocks[Tier.OBJECT] == 40
        late = {"pools.object.endpoint": store.url, "onboard.wait_s": 1.0, "instance.id": "reader"}
        reader = caches.opened(extra_of(tmp_path / "b", **settings, **late))
        backend, keys = reader[0].cache_controller.storage_backend, chain(1, 40)  # of the same tokens
        eventually(lambda: backend.batch_exists(keys) == 40, "the catalog hears of the objects")
        store.faults = [Fault("never")]
        assert caches.prefetch(reader, TOKENS, "hung") == []
        caches.produce(reader, OTHERS)  # its backups wait for no answer of the store
        store.faults = []

        def read() -> list[torch.Tensor]:
            return caches.prefetch(reader, TOKENS, uuid.uuid4().hex)

        found = eventually(read, "the store answers again")
        assert all(torch.equal(one, whole[: len(one)]) for one, whole in zip(found, written, strict=True))
        store.faults = [Fault("never")]
        caches.close(reader[0])
        caches.close(writer[0])
