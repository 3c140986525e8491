"""The lossless coding part of `kvbm bench pools`: how much smaller KV becomes, and how fast one core does it both ways.

Two kinds of bfloat16 KV: that of a small transformer trained here, where torch is installed; and numbers drawn here in
the shape of a published model (32 layers, 8 KV heads of 128), distributed as published work describes KV: keys differ
in scale from channel to channel and a few channels lie far out, values differ from head to head (KIVI, KVQuant).
float8_e4m3 is the same cast, one scale for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvbm.assembly import CODER, NATIVE
from kvbm.bench.measure import Found, Row, rate
from kvbm.bench.trained_kv import trained_kv
from kvbm.core.errors import MissingExtraError
from kvbm.pools.object.coding import Coding

_GOALS = {"bf16_ratio": "≥ 1.42", "encode_gb_per_s": "≥ 1.2", "decode_gb_per_s": "≥ 2.5"}
_OBJECT_BYTES = 4 << 20  # of blocks coded in one call, as a pool does
_STREAM_BLOCKS = 32  # of the trained model's small ones, coded as one


class CodingOptions(NamedTuple):
    """How much is coded.

    Attributes:
        layers, blocks: of the published shape: 64 KiB a layer and block.
        steps: the small model is trained for.
    """

    layers: int = 32
    blocks: int = 16
    steps: int = 60


class _Kv(NamedTuple):
    """Blocks to code.

    Attributes:
        rows: (n, block_bytes) uint8.
        planes: elements of one layer's keys, or values, of one block.
    """

    name: str
    rows: np.ndarray
    planes: int


def bench_coding(samples: int, seed: int, options: CodingOptions, step: Callable[[], object] = lambda: None) -> Found:
    """Rows, and the numbers `bf16_ratio`, `encode_gb_per_s`, `decode_gb_per_s` (the least of both kinds) and
    `fp8_ratio_over_limit`.

    Args:
        step: called after each of `steps_of(options)`.
    """
    rows: list[Row] = []
    notes = [
        (
            "coding: one thread; of the published shape means numbers drawn here as published work describes KV, not a "
            "published model's"
        )
    ]
    kinds = [published_kv(options.layers, options.blocks, seed)]
    step()
    try:
        trained = trained_kv(options.steps, 16 * _STREAM_BLOCKS, seed, step=step)
        planes = trained.blocks[0].size // 4 // trained.shape[0]
        kinds.append(
            _Kv("of a model trained here", trained.blocks.reshape(-1, trained.blocks[0].size * _STREAM_BLOCKS), planes)
        )
        notes.append(
            f"coding: the model is that of the demo's engine, {list(trained.shape)} a block, trained for "
            f"{options.steps} steps on kvbm's"
            f" sources (loss {trained.losses[0]:.1f} → {trained.losses[-1]:.1f} nats a byte), its KV of text that was "
            "held out"
        )
    except MissingExtraError as error:
        notes.append(f"coding: KV of a model trained here was left out: {error}")
    found = [_measured(rows, f"bf16 KV {kind.name}", kind.rows, Coding.PLANES_16, samples) for kind in kinds]
    numbers: dict[str, float | None] = {}
    for name, values in zip(_GOALS, zip(*found, strict=True), strict=True):
        numbers[name] = min(values)
    over_limit = []
    for kind in kinds:
        eighth = kind._replace(rows=as_float8(kind))
        ratio, _, _ = _measured(rows, f"fp8 e4m3 KV {kind.name}", eighth.rows, Coding.PLANES_8, samples, goals={})
        limit = 8 / _entropy(eighth)
        over_limit.append(ratio / limit)
        rows.append(Row(what=f"fp8 e4m3 KV {kind.name}: ratio its entropy allows", unit="×", value=limit))
    numbers["fp8_ratio_over_limit"] = min(over_limit)
    rows.append(Row(what="fp8 e4m3 KV: ratio over what its entropy allows", unit="", value=min(over_limit)))
    rows += _zstd(kinds[0].rows, samples)
    return Found(rows, numbers, tuple(notes))


def steps_of(options: CodingOptions) -> int:
    """How often `bench_coding` calls its step."""
    return options.steps + 1


def published_kv(layers: int, blocks: int, seed: int) -> _Kv:
    """Blocks [layers, 2, 16 tokens, 8 heads, 128] bfloat16 of normal numbers.

    Keys: channel scales log-normal with a sigma of 0.5, in pairs as RoPE turns them; four channels a head lie eight
        times as far out and
    off zero. Values: a scale for each head, log-normal with a sigma of 0.3.
    """
    rng = np.random.default_rng(seed)
    tokens, heads, dim = 16, 8, 128
    kv = np.empty((blocks, layers, 2, tokens, heads, dim), dtype=np.uint16)
    for layer in range(layers):
        scales = np.tile(np.exp(rng.normal(0, 0.5, (heads, dim // 2))), 2).astype(np.float32)
        middles = np.zeros((heads, dim), dtype=np.float32)
        for head in range(heads):
            far = rng.choice(dim, 4, replace=False)
            scales[head, far] *= 2
            middles[head, far] = rng.choice([-8, 8], 4)
        keys = rng.standard_normal((blocks, tokens, heads, dim), dtype=np.float32) * scales + middles
        kv[:, layer, 0] = _bfloat16(keys)
        head_scales = 0.3 * np.exp(rng.normal(0, 0.3, (heads, 1))).astype(np.float32)
        kv[:, layer, 1] = _bfloat16(rng.standard_normal(keys.shape, dtype=np.float32) * head_scales)
    return _Kv("of the published shape", kv.view(np.uint8).reshape(blocks, -1), tokens * heads * dim)


def as_float8(kv: _Kv) -> np.ndarray:
    """Blocks of bfloat16 as float8_e4m3fn, (n, block_bytes / 2) uint8: each layer's keys and values by a scale that
    makes their largest 448.
    """
    halves = kv.rows.view(np.uint16).reshape(len(kv.rows), -1, kv.planes)
    positive = _e4m3_values()
    bounds = (positive[1:] + positive[:-1]) / 2
    every = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)  # the bfloat16 that are not negative
    eighths = np.empty(halves.shape, dtype=np.uint8)
    for plane in range(halves.shape[1]):
        bits = halves[:, plane]
        largest = float(every[int((bits & 0x7FFF).max())]) or 1.0
        with np.errstate(invalid="ignore", over="ignore"):  # of numbers that do not occur
            table = np.searchsorted(bounds, every * (448 / largest)).astype(np.uint8)
        eighths[:, plane] = table[bits & 0x7FFF] | (bits >> 8 & 0x80).astype(np.uint8)
    return eighths.reshape(len(kv.rows), -1)


def _e4m3_values() -> np.ndarray:
    """What the bytes 0 to 126 stand for."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, codes & 7
    return np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, as u16; of two the even one."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _entropy(kv: _Kv) -> float:
    """Bits of a byte, in the mean over planes, each of its own distribution."""
    planes = kv.rows.reshape(len(kv.rows), -1, kv.planes)
    bits = []
    for plane in range(planes.shape[1]):
        counts = np.bincount(planes[:, plane].ravel())
        shares = counts[counts > 0] / counts.sum()
        bits.append(float(-(shares * np.log2(shares)).sum()))
    return float(np.mean(bits))


def _measured(
    rows: list[Row], what: str, blocks: np.ndarray, coding: Coding, samples: int, goals: dict[str, str] = _GOALS
) -> tuple[float, float, float]:
    """Rows of one kind of blocks. Returns ratio, GB/s in and GB/s out, both of the blocks' own bytes."""
    order = np.arange(len(blocks))
    encoded = CODER.encode(blocks, order, coding)
    back = np.empty_like(blocks)
    good, sums = CODER.decode(encoded.body, encoded.lengths, encoded.codings, back, order)
    assert good.all() and np.array_equal(back, blocks) and np.array_equal(sums, NATIVE.checksums(blocks))

    in_object = max(1, _OBJECT_BYTES // blocks.shape[1])
    objects = [order[first : first + in_object] for first in range(0, len(order), in_object)]

    def encode() -> None:
        for at in objects:
            CODER.encode(blocks, at, coding)

    def decode() -> None:
        CODER.decode(encoded.body, encoded.lengths, encoded.codings, back, order)

    found = [
        Row(what=f"{what}: ratio", unit="×", value=blocks.size / encoded.body.size),
        rate(f"{what}: coded", "GB/s a core", blocks.size, [encode] * (samples + 1), 1e9),
        rate(f"{what}: decoded, checksums computed", "GB/s a core", blocks.size, [decode] * (samples + 1), 1e9),
    ]
    for row, goal in zip(found, goals.values(), strict=False):
        row.goal = goal
    rows += found
    return found[0].value, found[1].value, found[2].value


def _zstd(blocks: np.ndarray, samples: int) -> list[Row]:
    """zstd beside it, where the package is installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return []
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    plain = [block.tobytes() for block in blocks[:4]]
    packed = [compressor.compress(block) for block in plain]
    size, runs = sum(map(len, plain)), samples + 1
    what = "zstd, level 1, bf16 KV of the published shape"
    return [
        Row(what=f"{what}: ratio", unit="×", value=size / sum(map(len, packed))),
        rate(f"{what}: coded", "GB/s a core", size, [lambda: [compressor.compress(one) for one in plain]] * runs, 1e9),
        rate(
            f"{what}: decoded",
            "GB/s a core",
            size,
            [lambda: [decompressor.decompress(one) for one in packed]] * runs,
            1e9,
        ),
    ]
