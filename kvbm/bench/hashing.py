"""`kvbm bench hash`: tokens → sequence hashes, and checksums."""

from __future__ import annotations

import numpy as np

from kvbm.assembly import NATIVE, hash_prompts
from kvbm.bench.measure import Row, rate

_BLOCK_TOKENS = 16


def bench_hash(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """Chains of one long prompt and of several at once; CRC-32C."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 128_000, _BLOCK_TOKENS * 4096, dtype=np.uint32)
    listed = tokens[: _BLOCK_TOKENS * 512].tolist()
    prompts = list(rng.integers(0, 128_000, (16, _BLOCK_TOKENS * 256), dtype=np.uint32))
    root = rng.bytes(16)
    data = rng.bytes(1 << 20)

    def one() -> None:
        for _ in range(20):
            NATIVE.sequence_hashes(tokens, _BLOCK_TOKENS, root)

    def one_list() -> None:
        for _ in range(100):
            NATIVE.sequence_hashes(listed, _BLOCK_TOKENS, root)

    def several() -> None:
        for _ in range(20):
            hash_prompts(prompts, _BLOCK_TOKENS, root)

    def checksum() -> None:
        for _ in range(100):
            NATIVE.crc32c(data)

    runs = samples + 1
    rows = [
        rate("hash 16-token blocks, a prompt of 4,096 blocks, u32 array", "M blocks/s", 20 * 4096, [one] * runs, 1e6),
        rate("the same, 16 prompts of 256 blocks in one call", "M blocks/s", 20 * 16 * 256, [several] * runs, 1e6),
        rate("the same, a prompt of 512 blocks as a list of int", "M blocks/s", 100 * 512, [one_list] * runs, 1e6),
        rate("CRC-32C of 1 MiB", "GB/s", 100 * (1 << 20), [checksum] * runs, 1e9),
    ]
    return rows, {"hash_blocks_per_s": rows[0].value * 1e6}
