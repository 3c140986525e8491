"""The command of docs/sglang.md: what it gives SGLang opens a backend through SGLang's own parser and factory."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from tests.engines.sglang.harness.pools import backend_of, chain, fill, indices_of, mha_pool, page_bytes, wipe

PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"


def test_the_command_of_the_page_opens_a_backend_that_gives_a_hit(tmp_path: Path) -> None:
    command = shlex.split(re.findall(r"```sh\n(python -m sglang.*?)```", PAGE.read_text(), re.DOTALL)[0])
    given = {name: value for name, value in pairwise(command) if name.startswith("--")}
    assert given["--hicache-storage-backend"] == "dynamic"
    parsed = HybridCacheController.parse_storage_backend_extra_config(given["--hicache-storage-backend-extra-config"])
    extra, passes_prefix_keys = parsed[0], parsed[-1]
    assert passes_prefix_keys
    extra |= {"instance.data_dir": str(tmp_path), "revision": "r1", "onboard.wait_s": 30.0}
    extra |= {key: "4MiB" for key in extra if key.endswith("capacity_bytes")}
    pool, keys = mha_pool(given["--hicache-mem-layout"], 32), chain(1, 4)
    backend = backend_of(pool, extra)
    try:
        wanted = fill(pool, range(4), keys)
        assert all(backend.batch_set_v1(keys, indices_of(range(4))))
        wipe(pool)
        assert all(backend.batch_get_v1(keys, indices_of(range(4))))
        assert [page_bytes(pool, page) for page in range(4)] == wanted
    finally:
        backend.close()
