"""`kvbm bench ingest`: from JetStream into the index, as the catalog does it: pull, scan, sequence, apply in runs,
compare digests.

Frames are what real ledgers of four instances wrote while their pools were churned; they lie on an embedded nats-server
before the clock runs. SQL is left out: it stores behind the reading, in its own time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvbm.assembly import NATIVE, NATIVE_INDEX, NATIVE_LEDGER
from kvbm.bench.measure import Row, Sample, row_of
from kvbm.catalog.follow.message_applier import MessageApplier
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.codec import FrameBytes
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Tier
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import shared_server

_INSTANCES = 4
_SLOTS = 65_536
RUN_BLOCKS = 16
_RUNS = 40_000  # of each instance
_CLUSTER = "bench"
_NAMESPACE = Namespace(model="bench", block_tokens=16)


def bench_ingest(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """Block events a second from the stream's first message to its last, in two sizes of message."""
    rows: list[Row] = []
    streams = {
        name: Churn(name, seed + number).frames(_RUNS)
        for number, name in enumerate(f"instance-{number}" for number in range(_INSTANCES))
    }
    for what, message_bytes in (("messages of one frame", 1), ("messages of up to 256 KiB", 256 << 10)):
        with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
            server = shared_server(Path(folder))
            try:
                rows += asyncio.run(_ingest(server.url, streams, message_bytes, what, samples))
            finally:
                server.stop()
    return rows, {"ingest_events_per_s": rows[0].value * 1e6}


class Churn:
    """One instance whose pool is filled and then replaced again and again."""

    def __init__(self, name: str, seed: int, slots: int = _SLOTS, clock: Callable[[], int] = time.time_ns) -> None:
        self.name = InstanceId(name)
        self._rng, self._clock = np.random.default_rng(seed), clock
        self._ledger = NATIVE_LEDGER([PoolStated(Tier.HBM, slots, 1 << 20)], "lru", 64 << 20, ())
        self._ledger.start(Epoch(1), [_NAMESPACE])

    def frames(self, runs: int) -> list[FrameBytes]:
        """What its ledger writes of so many runs of 16 blocks: frames of 256 block events, once the pool is full."""
        frames: list[FrameBytes] = []
        for number in range(runs):
            allocation = self._ledger.allocate(Tier.HBM, RUN_BLOCKS)
            assert allocation is not None
            hashes = self._rng.bytes(RUN_BLOCKS * HASH_BYTES)
            self._ledger.unpin(
                Tier.HBM, self._ledger.create(_NAMESPACE.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)
            )
            if number % 8 == 7:  # 128 blocks created, as many evicted
                frames += self._ledger.take_frames(self.name, self._clock())
        return frames


async def _ingest(
    url: str, streams: dict[str, list[FrameBytes]], message_bytes: int, what: str, samples: int
) -> list[Row]:
    stream = await NatsStream.connect(url, 5.0)
    try:
        sent = 0
        for name, frames in streams.items():
            for message in _messages(frames, message_bytes):
                await stream.publish(_CLUSTER, InstanceId(name), message)
                sent += 1
        rates: list[float] = []
        taken: list[Sample] = []
        fetching: list[float] = []
        for _ in range(max(3, samples // 2) + 1):
            sequencer = Sequencer(NATIVE_INDEX(1 << 24), NATIVE.scan_frames)
            sample, fetch_s = await take_in(stream, _CLUSTER, sequencer, sent)
            assert not sequencer.counters.digest_mismatches and not sequencer.counters.poison
            rates.append(sequencer.counters.blocks / sample.wall_s / 1e6)
            fetching.append(fetch_s / sample.wall_s)
            taken.append(sample)
        return [
            row_of(f"JetStream → index, {what}", "M events/s", rates[1:], taken[1:]),
            row_of("share of it spent waiting for the server and taking messages apart", "", fetching[1:]),
        ]
    finally:
        await stream.close()


async def take_in(stream: NatsStream, cluster: str, sequencer: Sequencer, last: int) -> tuple[Sample, float]:
    """Read on from where the sequencer stands until it has applied the message of sequence `last`, as the catalog
    reads.

    Returns: the sample, without the making of the reader, and the seconds of it that were spent fetching.
    """
    reader = await stream.pull(sequencer.sequence, cluster, 5.0)
    applier = MessageApplier(sequencer, asyncio.Lock(), lambda changes: None)
    wall, cpu, fetch_s = time.perf_counter(), time.process_time(), 0.0
    while sequencer.sequence < last:
        began = time.perf_counter()
        messages = await reader.fetch(5.0)
        fetch_s += time.perf_counter() - began
        await applier.apply(messages, reader.at_end)
    sample = Sample(time.perf_counter() - wall, time.process_time() - cpu)
    applier.close()
    await reader.close()
    return sample, fetch_s


def _messages(frames: list[FrameBytes], message_bytes: int) -> list[bytes]:
    messages: list[bytes] = []
    gathered: list[bytes] = []
    for frame in frames:
        gathered.append(frame.data)
        if sum(map(len, gathered)) >= message_bytes:
            messages.append(b"".join(gathered))
            gathered = []
    return [*messages, b"".join(gathered)] if gathered else messages
