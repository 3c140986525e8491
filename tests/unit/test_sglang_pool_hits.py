"""Which prefixes of a prompt several pools of SGLang's can restore together."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.engines.sglang.pool_hits import ALL_PAGES, TRAILING_PAGES, PoolHits, PoolWanted, pool_hits

KEYS = list("abcdef")


class Held:
    """A pool that holds these pages."""

    def __init__(self, pages: str) -> None:
        self.pages = pages

    def present(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.pages for key in keys]

    def exists(self, keys: Sequence[str]) -> int:
        return (*self.present(keys), False).index(False)


def test_without_other_pools_it_is_what_the_keys_and_values_have() -> None:
    assert pool_hits(Held("abcdef"), KEYS, []) == PoolHits(6, {"kv": 6}, [1, 2, 3, 4, 5, 6])
    assert pool_hits(Held("acdef"), KEYS, []) == PoolHits(1, {"kv": 1}, [1])
    assert pool_hits(Held("bcdef"), KEYS, []) == PoolHits(0, {}, [])


def test_a_pool_that_needs_every_page_cuts_the_prefix() -> None:
    wanted = [PoolWanted("indexer", Held("abcef"), ALL_PAGES)]
    assert pool_hits(Held("abcdef"), KEYS, wanted) == PoolHits(3, {"kv": 6, "indexer": 3}, [1, 2, 3])


def test_a_pool_that_needs_the_last_pages_allows_some_prefixes_and_not_shorter_ones() -> None:
    state = PoolWanted("mamba", Held("bd"), TRAILING_PAGES)
    assert pool_hits(Held("abcdef"), KEYS, [state]) == PoolHits(4, {"kv": 6, "mamba": 4}, [2, 4])
    window = PoolWanted("swa", Held("abde"), TRAILING_PAGES, 2)
    assert pool_hits(Held("abcdef"), KEYS, [window]) == PoolHits(5, {"kv": 6, "swa": 5}, [1, 2, 5])
    assert pool_hits(Held("abcdef"), KEYS, [window, state]) == PoolHits(2, {"kv": 6, "swa": 5, "mamba": 4}, [2])
    assert pool_hits(Held("abc"), KEYS, [window]) == PoolHits(2, {"kv": 3, "swa": 2}, [1, 2])


def test_what_is_not_stored_restores_nothing_and_what_gates_nothing_is_left_out() -> None:
    assert pool_hits(Held("abcdef"), KEYS, [PoolWanted("draft", None, ALL_PAGES)]) == PoolHits(0, {"kv": 6}, [])
    assert pool_hits(Held("ab"), KEYS, [PoolWanted("blocks", None, "block_groups")]) == PoolHits(2, {"kv": 2}, [1, 2])
