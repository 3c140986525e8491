"""KV of a small transformer trained here, as bytes in a file, by hand.

    python tools/train_kv.py --steps 300 --blocks 512 --to kv.npy

The model is that of the demo's engine; it learns the bytes of kvbm's own sources for a minute or two on the CPU, then
reads text that was held out. Its keys (after RoPE) and values go to the file as bfloat16: (blocks, block_bytes) uint8.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm.bench.trained_kv import trained_kv


def main() -> int:
    """Train, compute, write."""
    parser = argparse.ArgumentParser(description="KV of a small transformer trained here.")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of training (default 300)")
    parser.add_argument("--blocks", type=int, default=512, metavar="N", help="of 16 tokens each (default 512)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of weights and windows (default 1)")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="where the blocks go, .npy")
    arguments = parser.parse_args()
    kv = trained_kv(arguments.steps, arguments.blocks, arguments.seed)
    np.save(arguments.to, kv.blocks)
    print(f"{len(kv.blocks)} blocks {list(kv.shape)} bfloat16; loss {' '.join(f'{loss:.2f}' for loss in kv.losses)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
