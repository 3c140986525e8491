"""Sets and gets of 128 pages, in turn through `KvbmHiCache` and through SGLang's file backend, as its controller calls
each.

python -m tests.engines.sglang.harness.measure [FOLDER]    in the environment of `make test-sglang`

Ours verifies every byte that it reads, and writes past the page cache beside the call; the file backend verifies
nothing, and its files are in the page cache when they are read.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.sglang.harness.cpu import prepare

prepare()

from tests.engines.sglang.harness import pools  # noqa: E402  SGLang can be imported now

PAGES, ROUNDS = 128, 7
pools.LAYERS, pools.HEADS, pools.DIM, pools.PAGE_TOKENS = 16, 4, 128, 32  # pages of 1 MiB


def timed(call: Callable[[list[str]], Any], keys: list[str]) -> float:
    began_s = time.perf_counter()
    call(keys)
    return time.perf_counter() - began_s


def measure(folder: Path, layout: str) -> None:
    """Print GB/s of both, and how ours compares, as medians over rounds."""
    pool = pools.mha_pool(layout, PAGES)
    settings = {"pools.host.slots": 4 * PAGES, "pools.nvme.slots": 16 * PAGES}
    ours = pools.backend_of(pool, pools.extra_of(folder / layout, **settings))
    plain = pools.file_backend(pool, folder / f"plain-{layout}")
    indices = pools.indices_of(range(PAGES))
    firsts = [page * pools.PAGE_TOKENS for page in range(PAGES)]

    def set_plain(keys: list[str]) -> None:
        assert plain.batch_set(keys, [pool.get_data_page(first) for first in firsts])

    def get_plain(keys: list[str]) -> None:
        found = plain.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for first, page in zip(firsts, found, strict=True):
            pool.set_from_flat_data_page(first, page)

    def set_ours(keys: list[str]) -> None:
        assert all(ours.batch_set_v1(keys, indices))

    def get_ours(keys: list[str]) -> None:
        assert all(ours.batch_get_v1(keys, indices))

    calls = {"set ours": set_ours, "set file": set_plain, "get ours, from HOST": get_ours, "get file": get_plain}
    seconds: dict[str, list[float]] = {}
    for one in range(ROUNDS):
        keys = pools.chain(one, PAGES)
        pools.fill(pool, range(PAGES), keys)
        for name, call in calls.items():
            seconds.setdefault(name, []).append(timed(call, keys))
        ours._tiers.manager.settle(60.0)
    far = [pools.chain(one, PAGES) for one in range(ROUNDS - 4)]  # pushed out of HOST by now
    seconds["get ours, from NVME"] = [timed(get_ours, keys) for keys in far]
    ours.close()
    size = PAGES * ours.mem_pool_host.get_size_per_token() * pools.PAGE_TOKENS
    median = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found_s in median.items():
        other = median["set file" if name.startswith("set") else "get file"]
        print(f"{layout:12} {name:20} {size / found_s / 1e9:6.2f} GB/s  {other / found_s:5.2f} of the file backend")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        for one in ("page_first", "layer_first"):
            measure(Path(made), one)
