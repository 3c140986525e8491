"""How much of a prompt can be restored where SGLang keeps more than one pool: each has its own rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"  # SGLang's PoolHitPolicy; its other one gates nothing


class PagesHeld(Protocol):
    """What is asked of the tiers of one pool."""

    def exists(self, keys: Sequence[str]) -> int: ...
    def present(self, keys: Sequence[str]) -> list[bool]: ...


class PoolWanted(NamedTuple):
    """A pool that a prompt needs beside its keys and values.

    Attributes:
        name: SGLang's. held: None where nothing of it is stored.
        policy: "all_pages" where every page must be there, "trailing_pages" where the last `pages` of a prefix must.
    """

    name: str
    held: PagesHeld | None
    policy: str
    pages: int = 1


class PoolHits(NamedTuple):
    """What can be restored.

    Attributes:
        pages: of the longest prefix that all pools can restore.
        by_pool: of each pool asked for, "kv" among them; those without a page are left out.
        restorable: the lengths of all such prefixes, in pages.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def pool_hits(kv: PagesHeld, keys: Sequence[str], wanted: Iterable[PoolWanted], kv_name: str = "kv") -> PoolHits:
    """The prefixes of a prompt that every pool can restore.

    Args:
        keys: of the prompt's pages.
    """
    depth = kv.exists(keys)
    by_pool, lengths = {kv_name: depth}, set(range(1, depth + 1))
    for pool in wanted:
        if pool.policy not in (ALL_PAGES, TRAILING_PAGES):
            continue
        fitting = _fitting(pool, keys[:depth])
        by_pool[pool.name] = max(fitting, default=0)
        lengths &= fitting
    restorable = sorted(lengths)
    return PoolHits(restorable[-1] if restorable else 0, {name: n for name, n in by_pool.items() if n}, restorable)


def _fitting(pool: PoolWanted, keys: Sequence[str]) -> set[int]:
    """Lengths of prefixes, in pages, of which a pool has what it needs."""
    if pool.held is None or not keys:
        return set()
    if pool.policy == ALL_PAGES:
        return set(range(1, pool.held.exists(keys) + 1))
    held, window = pool.held.present(keys), max(1, pool.pages)
    return {length for length in range(1, len(keys) + 1) if all(held[max(0, length - window) : length])}
