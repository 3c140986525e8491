"""Thousands of instances in one process, for whoever looks at the catalog: each with three tiers full of blocks, what
replaced them over an hour, and a heartbeat a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import numpy as np

from kvbm.assembly import NATIVE_LEDGER
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.streams.base import Heartbeat
from kvbm.streams.child import python
from kvbm.streams.nats.stream import NatsStream

CLUSTER = "local"
SPACES = tuple(Namespace(model="bench", revision="r1", block_tokens=16, tenant=name) for name in ("", "acme", "beta"))
PAST_S = 3600.0  # over which the blocks have come
_PARTS = ((Tier.HBM, 0.2), (Tier.HOST, 0.3), (Tier.NVME, 0.5))
_BLOCK_BYTES = 1 << 20
_RUN_BLOCKS = 256
_AT_ONCE = 32  # messages on their way to the stream
_TICKS_PER_S = 100


class Fleet(NamedTuple):
    """How large it is.

    Attributes:
        live: residencies of all together. events: blocks named in events, at least `live`.
    """

    instances: int
    live: int
    events: int
    seed: int = 1


def name_of(number: int) -> InstanceId:
    """The instances' names, in order."""
    return InstanceId(f"instance-{number:05}")


async def publish(url: str, fleet: Fleet) -> tuple[list[int], bytes]:
    """Put all of it on the stream, as of the last hour.

    Returns: how far each instance has decided, and the hash of a block that the first one holds.
    """
    rng, now_ns = np.random.default_rng(fleet.seed), time.time_ns()
    stream = await NatsStream.connect(url, 30.0)
    offsets: list[int] = []
    some = b""
    try:
        sends: list[asyncio.Task[object]] = []
        for number in range(fleet.instances):
            offset, frames, last = _instance(fleet, number, rng, now_ns)
            offsets.append(offset)
            some = some or last
            for at in range(0, len(frames), 16):
                data = b"".join(frames[at : at + 16])
                if len(sends) >= _AT_ONCE:
                    await sends.pop(0)
                sends.append(asyncio.create_task(stream.publish(CLUSTER, name_of(number), data, timeout_s=60.0)))
        for send in sends:
            await send
    finally:
        await stream.close()
    return offsets, some


def _instance(fleet: Fleet, number: int, rng: np.random.Generator, now_ns: int) -> tuple[int, list[bytes], bytes]:
    live = max(len(_PARTS), fleet.live // fleet.instances)
    sizes = [max(1, round(live * part)) for _, part in _PARTS]
    churn = max(0, (fleet.events // fleet.instances - sum(sizes)) // 2)
    pools = [PoolStated(tier, size, _BLOCK_BYTES) for (tier, _), size in zip(_PARTS, sizes, strict=True)]
    ledger = NATIVE_LEDGER(pools, "lru", _BLOCK_BYTES, ())
    place = [f"zone-{number % 3}", f"rack-{number % 60:02}"]
    ledger.start(Epoch(1), list(SPACES), place, "bench", "1.0")
    begin_ns = now_ns - round(PAST_S * 1e9)
    frames = [frame.data for frame in ledger.take_frames(name_of(number), begin_ns)]
    todo: list[tuple[Tier, int]] = []
    for (tier, part), size in zip(_PARTS, sizes, strict=True):
        wanted = size + round(churn * part)
        todo += [(tier, min(_RUN_BLOCKS, size, wanted - at)) for at in range(0, wanted, min(_RUN_BLOCKS, size))]
    some = b""
    for step, (tier, count) in enumerate(todo, 1):
        hashes, space = rng.bytes(count * HASH_BYTES), SPACES[int(rng.integers(len(SPACES)))]
        allocation = ledger.allocate(tier, count)
        assert allocation is not None
        ledger.unpin(tier, ledger.create(space.id, tier, NO_PARENT, 0, hashes, allocation.slots))
        wall_ns = begin_ns + round((now_ns - begin_ns) * step / len(todo))
        frames += [frame.data for frame in ledger.take_frames(name_of(number), wall_ns)]
        some = hashes[:HASH_BYTES]
    return int(ledger.applied), frames, some


_BEAT = "import sys; from kvbm.bench.fleet import send_heartbeats; send_heartbeats(sys.argv[1], int(sys.argv[2]))"


def heartbeats(url: str, offsets: list[int]) -> tuple[list[str], str]:
    """A command that sends them for ever, and what it reads first."""
    return python("-c", _BEAT, url, str(len(offsets))), " ".join(map(str, offsets)) + "\n"


def send_heartbeats(url: str, instances: int) -> None:
    """One a second of each instance, for ever; how far each has decided stands in the first line of the input."""
    offsets = [int(word) for word in input().split()]

    async def run() -> None:
        stream = await NatsStream.connect(url, 30.0)
        began_s, sent, each = time.monotonic(), 0, max(1, instances // _TICKS_PER_S)
        while True:
            for _ in range(each):
                number = sent % instances
                await stream.send_pulse(
                    Heartbeat(
                        instance=name_of(number),
                        cluster=CLUSTER,
                        epoch=Epoch(1),
                        published=Offset(offsets[number]),
                        applied=Offset(offsets[number]),
                        wall_time_ns=time.time_ns(),
                        run="bench",
                        namespaces=tuple(space.id for space in SPACES),
                        queued_tokens=sent * 7919 % 5000,
                        running_requests=number % 40,
                        free_slots={Tier.HBM: number % 64},
                    )
                )
                sent += 1
            await asyncio.sleep(max(0.0, began_s + sent / instances - time.monotonic()))

    asyncio.run(run())
