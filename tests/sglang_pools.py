"""Host pools as SGLang lays them out, in plain arrays: what `get_page_buffer_meta` of its pools gives, and no more.

Tests with SGLang's own pools are in tests/engines/sglang.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

LAYERS, HEADS, DIM = 3, 2, 8
PAGE_TOKENS = 4


class ArrayPool:
    """Keys and values of all layers, "layer_first" or "page_first"; elements of two bytes."""

    def __init__(self, layout: str, pages: int) -> None:
        self.layout, self.page_size, self.size, self.dtype = layout, PAGE_TOKENS, pages * PAGE_TOKENS, "bfloat16"
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, DIM
        shape = (2, LAYERS, self.size) if layout == "layer_first" else (2, self.size, LAYERS)
        self.memory = np.zeros((*shape, HEADS, DIM), dtype=np.uint16)

    def get_page_buffer_meta(self, indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        base, token = self.memory.ctypes.data, HEADS * DIM * 2
        firsts = indices.tolist()[::PAGE_TOKENS]
        if self.layout == "layer_first":
            layer, values = self.size * token, LAYERS * self.size * token
            parts = itertools.product(firsts, range(LAYERS), range(2))
            found = [base + kv * values + at * layer + first * token for first, at, kv in parts]
            return found, [PAGE_TOKENS * token] * len(found)
        token *= LAYERS
        found = [base + kv * self.size * token + first * token for first in firsts for kv in range(2)]
        return found, [PAGE_TOKENS * token] * len(found)

    def page(self, number: int) -> np.ndarray:
        """A view of a page's elements."""
        tokens = slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
        return self.memory[:, :, tokens] if self.layout == "layer_first" else self.memory[:, tokens]

    def fill(self, numbers: Sequence[int], keys: Sequence[str]) -> None:
        """Give pages the bytes that belong to keys."""
        for number, key in zip(numbers, keys, strict=True):
            view = self.page(number)
            seed = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)
            view[...] = np.random.default_rng(seed).integers(0, 1 << 16, view.shape, dtype=np.uint16)

    def has(self, numbers: Sequence[int], keys: Sequence[str]) -> list[bool]:
        """For each page whether its bytes are those that belong to its key."""
        wanted = ArrayPool(self.layout, 1)
        found = []
        for number, key in zip(numbers, keys, strict=True):
            wanted.fill([0], [key])
            found.append(bool(np.array_equal(self.page(number), wanted.page(0))))
        return found


def indices_of(numbers: Sequence[int], page_tokens: int = PAGE_TOKENS) -> np.ndarray:
    """The tokens of pages, as SGLang names them."""
    return (np.asarray(numbers)[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)


def chain(prompt: int, pages: int) -> list[str]:
    """SGLang's keys of a prompt's pages: hex SHA-256 over the one before and the tokens."""
    keys, before = [], b""
    for at in range(pages):
        tokens = np.arange(prompt * 1000 + at * PAGE_TOKENS, prompt * 1000 + (at + 1) * PAGE_TOKENS, dtype="<u4")
        before = hashlib.sha256(before + tokens.tobytes()).digest()
        keys.append(before.hex())
    return keys
