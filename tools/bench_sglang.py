"""Sets and gets of pages through `KvbmHiCache` beside SGLang's own file backend, on one disk, as SGLang's controller
calls each.

    make bench-sglang [BENCH_ARGS="--folder DIR --layout layer_first --layers 1 --json FILE"]

It runs in the environment of `make test-sglang`. Each pair is of one run, in turn first one and then the other; a row
is the median of the ratios of seven pairs behind a warm-up. After each get all bytes are compared, which is not timed.

Ours has a checksum computed at each set and compared at each get, and writes to NVME behind the call, past the page
cache. The file backend has no checksums, and its files are written to the page cache. "cold": its pages are written
out, and dropped from the page cache before they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engines.sglang.harness.cpu import prepare

prepare()

import torch  # noqa: E402  SGLang can be imported now

from kvbm.core.ids import Tier  # noqa: E402
from tests.engines.sglang.harness import pools  # noqa: E402

PAGES, PAIRS = 128, 7  # SGLang's controller has 128 pages a call at most
HEADS, DIM, PAGE_TOKENS = 4, 128, 32  # of a page 64 KiB a layer
LAYERS = 16
GOAL = 0.9
SETTLE_S = 120.0


class Row(NamedTuple):
    """One comparison: GB/s of both as medians, and the ratios of all pairs."""

    what: str
    ours: float
    file: float
    ratios: list[float]
    goal: float | None

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


class Sides:
    """Both backends over one host pool."""

    def __init__(self, folder: Path, layout: str, layers: int) -> None:
        pools.LAYERS, pools.HEADS, pools.DIM, pools.PAGE_TOKENS = layers, HEADS, DIM, PAGE_TOKENS
        self.pool = pools.mha_pool(layout, PAGES)
        self.kept = folder / "file"
        slots = {"pools.host.slots": 4 * PAGES, "pools.nvme.slots": 4 * PAGES}
        self.ours = pools.backend_of(self.pool, pools.extra_of(folder / "kvbm", **slots))
        self.file = pools.file_backend(self.pool, self.kept)
        self.bytes = PAGES * PAGE_TOKENS * int(self.pool.get_size_per_token())

    def set(self, backend: Any, keys: list[str]) -> float:
        """Seconds of a set."""
        return _timed(lambda: pools.set_pages(backend, self.pool, keys, range(PAGES)))

    def set_and_settle(self, backend: Any, keys: list[str]) -> float:
        """Seconds of a set, until ours lies in NVME."""
        return _timed(lambda: pools.set_pages(backend, self.pool, keys, range(PAGES)) and self.settle(backend))

    def settle(self, backend: Any) -> bool:
        """Wait until ours lies in NVME."""
        return backend is self.file or bool(backend._tiers.manager.settle(SETTLE_S))

    def get(self, backend: Any, keys: list[str], wanted: torch.Tensor) -> float:
        """Seconds of a get, whose bytes are compared."""
        pools.wipe(self.pool)
        took_s = _timed(lambda: all(pools.get_pages(backend, self.pool, keys, range(PAGES))))
        assert torch.equal(self.memory, wanted), "other bytes"
        return took_s

    @property
    def memory(self) -> torch.Tensor:
        """All pages, as whole numbers."""
        by_page = self.pool.layout in ("page_first_direct", "page_head")
        axis = 2 if self.pool.layout == "layer_first" else 1
        view: torch.Tensor = self.pool.kv_buffer.view(torch.int16)
        return view.narrow(axis, 0, PAGES if by_page else PAGES * PAGE_TOKENS)

    def fill(self) -> torch.Tensor:
        """Give all pages other bytes; them."""
        return self.memory.random_(-(1 << 15), 1 << 15).clone()

    def cool(self, keys: list[str]) -> None:
        """Have these pages in NVME alone, and the files' in no page cache."""
        manager, hashes = self.ours._tiers.manager, self.ours._tiers.hashes(keys)
        manager.evict(Tier.HOST, hashes)
        for path in self.kept.glob("*.bin"):
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, layout: str, layers: int, pairs: int) -> list[Row]:
    """All rows of one layout."""
    sides = Sides(folder, layout, layers)
    seconds: dict[str, list[tuple[float, float]]] = {}

    def pair(what: str, turn: int, ours: Callable[[], float], file: Callable[[], float]) -> None:
        if turn % 2:
            second, first = file(), ours()
        else:
            first, second = ours(), file()
        if turn:
            seconds.setdefault(what, []).append((first, second))

    try:
        for turn in range(pairs + 1):
            keys, again = pools.chain(turn, PAGES), pools.chain(100 + turn, PAGES)
            wanted = sides.fill()
            both = [partial(sides.set, backend, keys) for backend in (sides.ours, sides.file)]
            pair("set", turn, *both)
            sides.settle(sides.ours)
            both = [partial(sides.get, backend, keys, wanted) for backend in (sides.ours, sides.file)]
            pair("get, from HOST; from the page cache", turn, *both)
            sides.ours._tiers.manager.evict(Tier.HOST, sides.ours._tiers.hashes(keys))
            pair("get, from NVME; from the page cache", turn, *both)
            sides.cool(keys)
            pair("get, from NVME; cold", turn, *both)
            sides.fill()
            both = [partial(sides.set_and_settle, backend, again) for backend in (sides.ours, sides.file)]
            pair("set, until it lies in NVME; in the page cache", turn, *both)
            sides.ours.clear()
    finally:
        sides.ours.close()
    goals = {"set": GOAL, "get, from HOST; from the page cache": GOAL, "get, from NVME; cold": GOAL}
    return [
        Row(
            f"{layout}: {what}",
            sides.bytes / statistics.median(ours for ours, _ in found) / 1e9,
            sides.bytes / statistics.median(file for _, file in found) / 1e9,
            [file / ours for ours, file in found],
            goals.get(what),
        )
        for what, found in seconds.items()
    ]


def _timed(call: Callable[[], bool]) -> float:
    began_s = time.perf_counter()
    done = call()
    took_s = time.perf_counter() - began_s
    assert done, "a backend has failed"
    return took_s


def main() -> int:
    """Print the table; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="of both; by default a temporary one")
    parser.add_argument("--layout", action="append", help="of the host pool; by default page_first and layer_first")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the host pool; a page has 64 KiB of each")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of each row")
    parser.add_argument("--json", type=Path, help="a report is written there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as SGLang does beside a GPU; with more, the file backend's copies wait for a busy core
    rows: list[Row] = []
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {PAGES} pages a call")
    for layout in arguments.layout or ["page_first", "layer_first"]:
        with tempfile.TemporaryDirectory(prefix="bench-sglang-", dir=arguments.folder) as folder:
            rows += measure(Path(folder), layout, arguments.layers, arguments.pairs)
    for row in rows:
        goal = "" if row.goal is None else f"goal {row.goal}" + ("" if row.ratio >= row.goal else ", MISSED")
        print(
            f"{row.what:60} ours {row.ours:5.2f} GB/s, file {row.file:5.2f} GB/s: {row.ratio:5.2f}"
            f" ({min(row.ratios):.2f} to {max(row.ratios):.2f}) {goal}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() | {"ratio": row.ratio} for row in rows], indent=1))
    return int(any(row.goal is not None and row.ratio < row.goal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
