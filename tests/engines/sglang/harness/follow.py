"""What `sglang.launch_server` would do with its arguments, as far as a CPU can: SGLang's own parser reads them, and its
radix cache uses the storage they name. A prompt is written; a cache that is empty reads it after a restart.

python -m tests.engines.sglang.harness.follow ARGUMENT …

It prints in JSON: {"kvbm": where it was imported from, "asked": tokens of the prompt, "read": those that came from the
storage as they had been written}.
"""

from __future__ import annotations

import argparse
import json
import sys

import kvbm
from tests.engines.sglang.harness.cpu import prepare

prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from tests.engines.sglang.harness.radix import CONFIG, RadixCache  # noqa: E402

TOKENS = list(range(1000, 1000 + 40 * CONFIG.page_size))


def main() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(sys.argv[1:])
    assert given.enable_hierarchical_cache and given.hicache_storage_backend == "dynamic"
    read = HybridCacheController.parse_storage_backend_extra_config(given.hicache_storage_backend_extra_config)
    extra = {**read[0], "onboard.wait_s": 60.0, "hicache_storage_pass_prefix_keys": read[-1]}
    with RadixCache() as caches:
        first = caches.opened(extra, given.hicache_mem_layout, revision=given.revision)
        written = caches.produce(first, TOKENS)
        assert first[0].cache_controller.storage_backend._tiers.manager.settle(60.0)
        caches.close(first[0])
        second = caches.opened(extra, given.hicache_mem_layout, revision=given.revision)
        found = caches.prefetch(second, TOKENS, "again")
        caches.close(second[0])
    same = all(torch.equal(one, other) for one, other in zip(found, written, strict=True))
    print(json.dumps({"kvbm": kvbm.__file__, "asked": len(TOKENS), "read": len(found[0]) if same else 0}))


if __name__ == "__main__":
    main()
