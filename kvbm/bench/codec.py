"""`kvbm bench codec`: frames of 256 blocks in runs of 16, with slots and parents."""

from __future__ import annotations

import numpy as np

from kvbm.assembly import NATIVE, decode_columns
from kvbm.bench.measure import Row, rate
from kvbm.core.codec import Frame
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, Offset, SequenceHash, Tier, pack_slots

_RUNS, _RUN_BLOCKS = 16, 16
_FRAMES = 64  # in one buffer, as a message of the stream or a piece of a journal has them


def bench_codec(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """Encode and decode from Python, through every road there is."""
    rng = np.random.default_rng(seed)
    space = Namespace(model="bench", block_tokens=16).id

    def frame(number: int) -> Frame:
        events = tuple(
            BlocksCreated(
                namespace=space,
                tier=Tier.HBM,
                hashes=rng.bytes(HASH_BYTES * _RUN_BLOCKS),
                slots=pack_slots(range(run * _RUN_BLOCKS, (run + 1) * _RUN_BLOCKS)),
                parent=SequenceHash(rng.bytes(16)),
                start=run * _RUN_BLOCKS,
            )
            for run in range(_RUNS)
        )
        return Frame(
            instance=InstanceId("bench"),
            epoch=Epoch(1),
            first_offset=Offset(1 + number * _RUNS),
            wall_time_ns=0,
            digest=0,
            events=events,
        )

    frames = [frame(number) for number in range(_FRAMES)]
    encoded = [NATIVE.encode_frame(one) for one in frames]
    buffer = b"".join(encoded)
    blocks = _FRAMES * _RUNS * _RUN_BLOCKS

    def encode() -> None:
        for _ in range(10):
            for one in frames:
                NATIVE.encode_frame(one)

    def scan() -> None:
        for _ in range(20):
            NATIVE.scan_frames(buffer)

    def columns() -> None:
        for _ in range(20):
            decode_columns(buffer)

    def objects() -> None:
        for _ in range(10):
            for one in encoded:
                NATIVE.decode_frame(one)

    runs = samples + 1
    rows = [
        rate("encode, events as Python objects → bytes", "M blocks/s", 10 * blocks, [encode] * runs, 1e6),
        rate("decode, 64 frames → columns (arrays)", "M blocks/s", 20 * blocks, [columns] * runs, 1e6),
        rate("scan, 64 frames proven good, headers out", "M blocks/s", 20 * blocks, [scan] * runs, 1e6),
        rate("decode, frame by frame → Python objects", "M blocks/s", 10 * blocks, [objects] * runs, 1e6),
        Row(what="bytes a block on the wire, slots and parents included", unit="B", value=len(buffer) / blocks),
    ]
    return rows, {"encode_blocks_per_s": rows[0].value * 1e6, "decode_blocks_per_s": rows[1].value * 1e6}
