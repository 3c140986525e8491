"""Bits flipped in what a storage has kept, and what it gives for it afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from tests.engines.sglang.harness.pools import chain, fill, get_pages, page_bytes, set_pages, wipe

SLOT_MAGIC, SLOT_HEADER_BYTES = b"KVBS", 64


class Flips(NamedTuple):
    """What came of them.

    Attributes:
        made: bits, one in each page.
        served: pages that were given with other bytes than had been stored.
        spoilt: pages that were not given, and are not as they were before they were asked for.
        missed: pages that were not given.
    """

    made: int
    served: int
    spoilt: int
    missed: int


def flip_pages(
    pool: Any, folder: Path, open_storage: Callable[[Path], HiCacheStorage], count: int, pages: int, seed: int
) -> Flips:
    """Store pages, close the storage, flip one bit of each, open it again and ask for each by itself; until `count`
    bits are flipped.

    A bit is drawn from all bits of the page and, where the storage keeps one, of the header before it.

    Args:
        pool: in a layout in which a page's parts lie in the order in which they are stored.
        open_storage: a storage that keeps all it has in a folder.
        pages: at a time.
    """
    draw, found = random.Random(seed), Flips(0, 0, 0, 0)
    while found.made < count:
        here = folder / str(found.made)
        keys = chain(found.made, min(pages, count - found.made))
        places = range(len(keys))
        wanted = fill(pool, places, keys)
        storage = open_storage(here)
        assert set_pages(storage, pool, keys, places)
        close(storage)
        for file, first, end in kept(here, wanted):
            flip(file, draw.randrange(first * 8, end * 8))
        wipe(pool)
        storage = open_storage(here)
        given = [get_pages(storage, pool, [key], [at])[0] for at, key in enumerate(keys)]
        close(storage)
        now = [page_bytes(pool, at) for at in places]
        found = Flips(
            found.made + len(keys),
            found.served + sum(ok and was != page for ok, was, page in zip(given, wanted, now, strict=True)),
            found.spoilt + sum(not ok and any(page) for ok, page in zip(given, now, strict=True)),
            found.missed + given.count(False),
        )
    return found


def kept(folder: Path, pages: list[bytes]) -> list[tuple[Path, int, int]]:
    """Where each page lies: a file, and the half-open range of its bytes there."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = []
    for page in pages:
        (path, at) = next((path, at) for path, raw in files.items() if (at := raw.find(page)) >= 0)
        header = files[path].rfind(SLOT_MAGIC, max(0, at - SLOT_HEADER_BYTES), at)
        found.append((path, at if header < 0 else header, at + len(page)))
    return found


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def close(storage: HiCacheStorage) -> None:
    """Close a storage once all that it was given has gone where it belongs."""
    tiers = getattr(storage, "_tiers", None)
    if tiers is not None:
        assert tiers.manager.settle(60.0)
        storage.close()
