"""SGLang's UnifiedRadixCache over `KvbmHiCache`: written, emptied, prefetched; every byte compared."""

from __future__ import annotations

from pathlib import Path

import torch

from kvbm.assembly import journal_folder
from kvbm.cli import replay_main
from kvbm.core.ids import Tier
from kvbm.engines.sglang.settings import read_extra
from tests.engines.sglang.harness.pools import extra_of
from tests.engines.sglang.harness.radix import CONFIG, RadixCache

TOKENS = list(range(1000, 1000 + 40 * CONFIG.page_size))


def test_a_prompt_is_read_from_the_storage_by_a_cache_that_is_empty_and_after_a_restart(tmp_path: Path) -> None:
    extra = extra_of(tmp_path)
    with RadixCache() as caches:
        first = caches.opened(extra)
        written = caches.produce(first, TOKENS)
        backend = first[0].cache_controller.storage_backend
        assert backend._tiers.manager.settle(60.0)
        held = set(backend._tiers.manager.held(Tier.NVME))
        assert len(held) == 40
        caches.close(first[0])
        second = caches.opened(extra)
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
