"""SGLang's UnifiedRadixCache over `KvbmHiCache`: written, emptied, prefetched, every byte compared; what the catalog
and the journal say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvbm.assembly import journal_folder
from kvbm.cli import replay_main
from kvbm.core.ids import NamespaceId, SequenceHash, Tier
from kvbm.engines.sglang.settings import read_extra
from tests.catalog_site import Running, run_catalog
from tests.engines.sglang.harness.pools import extra_of
from tests.engines.sglang.harness.radix import CONFIG, RadixCache
from tests.eventually import eventually
from tests.nats_fixture import cluster, nats_url  # noqa: F401

PROMPT_PAGES, SETTLE_S, FOR_EVER_S = 40, 60.0, 3600.0
TOKENS = list(range(1000, 1000 + PROMPT_PAGES * CONFIG.page_size))


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_prompt_is_read_from_the_storage_by_a_cache_that_is_empty_and_after_a_restart(
    tmp_path: Path, layout: str
) -> None:
    extra = extra_of(tmp_path)
    with RadixCache() as caches:
        first = caches.opened(extra, layout)
        assert first[0].cache_controller.mem_pool_host.layout == layout
        written = caches.produce(first, TOKENS)
        backend = first[0].cache_controller.storage_backend
        assert backend._tiers.manager.settle(SETTLE_S)
        held = set(backend._tiers.manager.held(Tier.NVME))
        assert len(held) == PROMPT_PAGES
        caches.close(first[0])
        second = caches.opened(extra, layout)
        try:
            assert set(second[0].cache_controller.storage_backend._tiers.manager.held(Tier.NVME)) == held
            for buffer in caches.buffers(second[1]):
                assert not buffer.any()
            read = caches.prefetch(second, TOKENS, "again")
            assert len(read) == len(written) == 2 * CONFIG.num_layers
            assert all(torch.equal(one, other) for one, other in zip(read, written, strict=True))
            assert caches.prefetch(second, [one + 5000 for one in TOKENS], "other") == []
        finally:
            caches.close(second[0])
    assert replay_main(["verify", str(journal_folder(read_extra(extra, environment={}).settings))]) == 0


def test_the_catalog_says_what_the_storage_holds_and_the_journal_agrees(tmp_path: Path, running: Running) -> None:
    """After a write, after a restart, after a read, and after a clear; the catalog hears only the stream."""
    extra = extra_of(
        tmp_path,
        **{
            "instance.cluster": str(running.settings.cluster),
            "nats.url": running.settings.nats_url,
            "catalog.url": running.client.url,
        },
    )

    def told(namespace: NamespaceId, blocks: set[SequenceHash]) -> list[set[str]]:
        """The tiers in which the catalog has each block."""
        found = (running.client.block(namespace, block).holders for block in blocks)
        return [{one.tier for one in holders if one.name == "sglang-test"} for holders in found]

    with RadixCache() as caches:
        cache = caches.opened(extra)
        caches.produce(cache, TOKENS)
        tiers = cache[0].cache_controller.storage_backend._tiers
        assert tiers.manager.settle(SETTLE_S)
        space, held = tiers.namespace.id, set(tiers.manager.held(Tier.NVME))
        assert len(held) == PROMPT_PAGES
        eventually(lambda: all("NVME" in one and "HBM" not in one for one in told(space, held)), "all was written")
        caches.close(cache[0])
        cache = caches.opened(extra)
        tiers = cache[0].cache_controller.storage_backend._tiers
        eventually(lambda: told(space, held) == [{"NVME"}] * PROMPT_PAGES, "a restart leaves what lies in NVME")
        assert caches.prefetch(cache, TOKENS, "again")
        both = {block: {"NVME"} for block in held}
        for block in tiers.manager.held(Tier.HOST):
            both[block].add("HOST")
        eventually(lambda: told(space, held) == [both[block] for block in held], "some were read")
        cache[0].cache_controller.storage_backend.clear()
        eventually(lambda: told(space, held) == [set()] * PROMPT_PAGES, "all were cleared")
        caches.close(cache[0])
    assert replay_main(["verify", str(journal_folder(read_extra(extra, environment={}).settings))]) == 0
