"""Model shape → bytes of a block; capacities → slots; blocks of an object, also as a pool's name says it.

The one place that multiplies dimensions.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from kvbm.core.checks import check_plain_int, check_text
from kvbm.core.errors import LayoutError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

_OBJECT_BYTES, _OBJECT_TOKENS = 4 << 20, 128  # of one object, at most
_BLOCKS_MARK, _MOST_DIGITS = "blocks=", 7


class _KvDims(NamedTuple):
    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"


class KvShape(_KvDims):
    """One block of KV cache: [layers, 2 (keys, values), block_tokens, kv_heads, head_dim] of `dtype`, contiguous.

    Attributes:
        layers, block_tokens, kv_heads, head_dim: at least 1 each.
        dtype: element type, one of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8.
    Raises: ArgumentTypeError: a dimension that is no whole number, a dtype that is no text. LayoutError: a dimension
        below 1, or a dtype that is not known.
    """

    __slots__ = ()

    def __new__(cls, layers: int, block_tokens: int, kv_heads: int, head_dim: int, dtype: str = "float32") -> KvShape:
        shape = super().__new__(cls, layers, block_tokens, kv_heads, head_dim, dtype)
        for name, size in zip(cls._fields, shape[:4], strict=False):
            check_plain_int(size, name, least=-sys.maxsize)
        check_text(dtype, "dtype")
        if min(shape[:4]) < 1:
            raise LayoutError(f"every dimension of a KV block must be at least 1; got {shape}")
        if dtype not in DTYPE_BYTES:
            raise LayoutError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
        return shape

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """The dimensions of one block, slowest first."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.dims) * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """The layout as a namespace's `layout` field states it."""
        return f"layers={self.layers} kv=2 tokens={self.block_tokens} heads={self.kv_heads} dim={self.head_dim}"


def pool_name(store: str, blocks: int, is_sealed: bool) -> str:
    """What a pool over a store is called; `blocks`: 0 where k is what the shape gives."""
    marks = [f"{_BLOCKS_MARK}{blocks}"] if blocks else []
    marks += ["sealed"] if is_sealed else []
    return f"{store}#{','.join(marks)}" if marks else store


def named_blocks(pool: str) -> int:
    """k as the name of a pool says it, see `pool_name`; 0: it does not. The native index reads names alike."""
    _, _, marks = pool.rpartition("#") if "#" in pool else ("", "", "")
    for mark in marks.split(","):
        digits = mark.removeprefix(_BLOCKS_MARK)
        if (
            digits != mark
            and digits.isascii()
            and digits.isdigit()
            and len(digits) <= _MOST_DIGITS
            and digits[0] != "0"
        ):
            return int(digits)
    return 0


def slots_in(capacity_bytes: int, block_bytes: int, pool: str) -> int:
    """How many blocks fit a pool. Raises LayoutError when not even one does."""
    slots = capacity_bytes // block_bytes
    if slots < 1:
        raise LayoutError(
            f"{pool} pool: {capacity_bytes} bytes hold no block of {block_bytes} bytes; raise its capacity"
        )
    return slots


def blocks_of_object(block_bytes: int, block_tokens: int) -> int:
    """k: how many consecutive blocks an object holds, for blocks of one shape, where nobody has said otherwise.

    Large enough for a store's throughput (4 MiB), and few enough tokens (128) that the tail of a prompt, which no
    object holds, is short. A power of two.
    """
    most = max(1, min(_OBJECT_BYTES // block_bytes, _OBJECT_TOKENS // block_tokens))
    return 1 << (most.bit_length() - 1)
