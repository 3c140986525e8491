"""Native twins against their Python specifications, side by side in one run: rates, ratios and noise.

    .venv/bin/python tools/bench_core.py [--json FILE]

Each row is measured in alternating pairs on the same input; the rate is the median, the noise half the spread between the
quartiles over the median. The specification works on a smaller piece of the same input, because it is a hundred times slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvbm import _native
from kvbm.assembly import NATIVE
from kvbm.core.codec import Frame
from kvbm.core.columns import decode_columns
from kvbm.core.events import BlocksCreated
from kvbm.core.hashing import sequence_hashes_batch
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, SequenceHash, Tier, pack_slots
from kvbm.core.kernels import REFERENCE, Kernels
from kvbm.workload.processes import machine

PAIRS = 15


def frame_of(rng: np.random.Generator, runs: int = 16, run_blocks: int = 16) -> Frame:
    """A frame of 256 blocks in runs of 16, all with slots and parents."""
    events = tuple(
        BlocksCreated(
            namespace=NamespaceId(bytes(range(16))), tier=Tier.HBM, hashes=rng.bytes(16 * run_blocks),
            slots=pack_slots(range(run * run_blocks, (run + 1) * run_blocks)), parent=SequenceHash(rng.bytes(16)),
            start=run * run_blocks,
        )
        for run in range(runs)
    )  # fmt: skip
    return Frame(
        instance=InstanceId("bench"), epoch=Epoch(1), first_offset=Offset(0), wall_time_ns=0, digest=0, events=events
    )


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Mean wall time of one call over `repeats` calls."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def measure(
    name: str, unit: str, native: tuple[Callable[[], object], float, int], spec: tuple[Callable[[], object], float, int]
) -> dict[str, object]:
    """One row: (work, units a call, calls) of each."""
    rates: dict[str, list[float]] = {"native": [], "specification": []}
    for _ in range(PAIRS):
        for label, (work, units, repeats) in (("native", native), ("specification", spec)):
            rates[label].append(units / seconds(work, repeats))
    fast, slow = (statistics.median(rates[label]) for label in ("native", "specification"))
    low, _, high = statistics.quantiles(rates["native"], n=4)
    return {
        "what": name, "unit": unit, "native": fast, "specification": slow, "ratio": fast / slow,
        "noise": (high - low) / 2 / fast,
    }  # fmt: skip


def rows() -> list[dict[str, object]]:
    """All measurements."""
    rng = np.random.default_rng(1)
    frame = frame_of(rng)
    data = NATIVE.encode_frame(frame)
    many = 64 * data
    tokens = rng.integers(0, 32000, 16 * 4096, dtype=np.uint32)
    prompts = [tokens[at : at + 16 * 256] for at in range(0, len(tokens), 16 * 256)]
    block = rng.bytes(1 << 20)
    root = bytes(16)

    def hashing(kernels: Kernels, count: int) -> Callable[[], object]:
        return lambda: kernels.sequence_hashes(tokens[: 16 * count], 16, root)

    return [
        measure(
            "sequence hashes, 16-token blocks",
            "M blocks/s",
            (hashing(NATIVE, 4096), 4096 / 1e6, 20),
            (hashing(REFERENCE, 4096), 4096 / 1e6, 2),
        ),
        measure(
            "the same, 16 prompts at once",
            "M blocks/s",
            (lambda: _native.sequence_hashes_batch(prompts, 16, root), 4096 / 1e6, 20),
            (lambda: sequence_hashes_batch(prompts, 16, root), 4096 / 1e6, 2),
        ),
        measure(
            "CRC-32C of 1 MiB",
            "GB/s",
            (lambda: NATIVE.crc32c(block), (1 << 20) / 1e9, 50),
            (lambda: REFERENCE.crc32c(block[:4096]), 4096 / 1e9, 2),
        ),
        measure(
            "encode frames of 256 blocks, runs of 16",
            "M blocks/s",
            (lambda: NATIVE.encode_frame(frame), 256 / 1e6, 500),
            (lambda: REFERENCE.encode_frame(frame), 256 / 1e6, 5),
        ),
        measure(
            "decode frames of 256 blocks, runs of 16",
            "M blocks/s",
            (lambda: NATIVE.decode_frame(data), 256 / 1e6, 500),
            (lambda: REFERENCE.decode_frame(data), 256 / 1e6, 5),
        ),
        measure(
            "decode 64 such frames into columns",
            "M blocks/s",
            (lambda: _native.decode_columns(many), 64 * 256 / 1e6, 20),
            (lambda: decode_columns(data), 256 / 1e6, 5),
        ),
        {"what": "bytes a block on the wire, slots included", "unit": "B", "native": len(data) / 256},
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON")
    arguments = parser.parse_args()
    found = rows()
    print(f"{machine()}; medians of {PAIRS} alternating pairs")
    for row in found:
        if "ratio" in row:
            print(
                f"{row['what']:45} {row['native']:8.2f} {row['unit']:11} {row['ratio']:7.0f} x the specification  ± {row['noise']:.0%}"
            )
        else:
            print(f"{row['what']:45} {row['native']:8.2f} {row['unit']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
