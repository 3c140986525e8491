"""The pages of SGLang's host pool: where the bytes of each lie, and copies between them and rows of our HOST pool.

A page is what `page_size` consecutive tokens have in a pool. SGLang says where the parts of a page lie
(`get_page_buffer_meta`): keys and values, in some layouts for each layer. Every part of page p lies a constant number
of bytes behind that of page p - 1, so a table of segments describes the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.errors import ConfigError, LayoutError
from kvbm.pools.hbm.paged import NewSegmentCopies, SegmentCopies


class SglangPool(Protocol):
    """What is asked of a host pool of SGLang's."""

    size: int
    page_size: int
    layout: str
    dtype: Any

    def get_page_buffer_meta(self, indices: Any) -> tuple[Sequence[int], Sequence[int]]: ...


class PageParts(NamedTuple):
    """Where the parts of a page lie, each an int64 array of one entry a part.

    Attributes:
        addresses: of page 0's part.
        strides: bytes from a page's part to that of the next page.
        sizes: bytes of the part.
    """

    addresses: np.ndarray
    strides: np.ndarray
    sizes: np.ndarray


class HostPages:
    """The pages of one pool, which outlives it. Any thread; two calls at once name different pages.

    Attributes:
        pages: of the pool.
        page_bytes: of one page, all its parts.
        words: what the bytes of a page are, and in which order.
    """

    def __init__(self, pool: SglangPool, new_copies: NewSegmentCopies) -> None:
        """Raises: ConfigError: a layout whose pages have no constant distance, or that SGLang gives no addresses of."""
        self._page_tokens = int(pool.page_size)
        self.pages = int(pool.size) // self._page_tokens
        if self.pages < 1:
            raise ConfigError(f"SGLang's host pool has {pool.size} tokens, less than a page of {self._page_tokens}")
        parts = _parts(pool, self._page_tokens, self.pages)
        self.page_bytes = int(parts.sizes.sum())
        self.words = _words(pool, parts)
        self._copies: SegmentCopies = new_copies(parts.addresses, parts.strides, parts.sizes, self.pages)

    def numbers(self, host_indices: Any, count: int) -> np.ndarray:
        """The pages that SGLang names by an index for each of their tokens.

        Args:
            host_indices: `count` times `page_size` whole numbers, as a tensor on a CPU or an array.
        Returns: `count` numbers of pages, int64.
        Raises: LayoutError: they are not whole pages of the pool.
        """
        indices = np.ascontiguousarray(host_indices, dtype=np.int64)
        if indices.size != count * self._page_tokens:
            raise LayoutError(
                f"{indices.size} indices of SGLang's host pool for {count} pages of {self._page_tokens} tokens"
            )
        by_page = indices.reshape(count, self._page_tokens)
        first = by_page[:, 0]
        if np.any(first % self._page_tokens) or np.any(by_page - first[:, None] != np.arange(self._page_tokens)):
            raise LayoutError("indices of SGLang's host pool that are no whole pages")
        pages: np.ndarray = first // self._page_tokens
        if count and (int(pages.min()) < 0 or int(pages.max()) >= self.pages):
            raise LayoutError(f"pages {pages.min()} to {pages.max()} of a host pool that has {self.pages}")
        return pages

    def gather(self, pages: np.ndarray, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Fill row at[i] from pages[i]; the CRC-32C of each, u32."""
        return self._copies.gather(np.ascontiguousarray(pages), rows, at)

    def scatter(self, pages: np.ndarray, rows: np.ndarray, at: np.ndarray) -> None:
        """Fill pages[i] from row at[i]."""
        self._copies.scatter(np.ascontiguousarray(pages), rows, at)


def _parts(pool: SglangPool, page_tokens: int, pages: int) -> PageParts:
    addresses, sizes = _of_page(pool, page_tokens, 0)
    following, last = (_of_page(pool, page_tokens, page) for page in (min(1, pages - 1), pages - 1))
    strides = following[0] - addresses if pages > 1 else sizes
    for page, (there, there_sizes) in ((min(1, pages - 1), following), (pages - 1, last)):
        if not (np.array_equal(there, addresses + page * strides) and np.array_equal(there_sizes, sizes)):
            raise ConfigError(
                f"SGLang's host pool in layout {pool.layout!r} has pages at no constant distance; start it with"
                " --hicache-mem-layout page_first"
            )
    return PageParts(addresses, strides, sizes)


def _of_page(pool: SglangPool, page_tokens: int, page: int) -> tuple[np.ndarray, np.ndarray]:
    begin = page * page_tokens
    try:
        addresses, sizes = pool.get_page_buffer_meta(np.arange(begin, begin + page_tokens))
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"SGLang gives no addresses of a {type(pool).__name__} in layout {getattr(pool, 'layout', '')!r} ({error});"
            " start it with --hicache-mem-layout page_first"
        ) from error
    return np.asarray(addresses, dtype=np.int64), np.asarray(sizes, dtype=np.int64)


def _words(pool: SglangPool, parts: PageParts) -> str:
    shape = " ".join(
        f"{name}={getattr(pool, name)}"
        for name in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
        if isinstance(getattr(pool, name, None), int)
    )
    sizes = sorted(set(parts.sizes.tolist()))
    return f"{type(pool).__name__} {pool.layout} {shape} parts={len(parts.sizes)} bytes={sizes}"
