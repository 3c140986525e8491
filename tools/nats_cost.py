"""What kvbm costs nats-server itself: bytes, memory and CPU time, for as many instances as you say.

    python tools/nats_cost.py --instances 100 --instances 10000
    python tools/nats_cost.py --instances 100 --flood 10

For each number a fresh nats-server, into which so many instances write a fence each, frames of 256 blocks, and
heartbeats, which `--readers` follow as catalogs do. Memory and CPU time are those of the server's process. `--flood`:
then the instances write as fast as the stream takes it, in messages as large as publishers make of frames that wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm.bench.measure import processor_s, resident_mib
from kvbm.command_line import configure_logs
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher.machine import MESSAGE_BYTES
from kvbm.streams.server import EmbeddedServer

CLUSTER = "cost"
BLOCKS = 256
_AT_ONCE = 200  # messages on their way
_WAIT_S = 120.0
_MOST_FLOOD_S = 60.0
_DICE = random.Random(1)


def frame(instance: str, number: int) -> bytes:
    """256 created blocks, as an instance says them: hashes, slots and where their chain begins."""
    event = BlocksCreated(
        namespace=NamespaceId(bytes(HASH_BYTES)),
        tier=Tier.HBM,
        hashes=_DICE.randbytes(BLOCKS * HASH_BYTES),
        slots=b"".join(at.to_bytes(4, "little") for at in range(BLOCKS)),
    )
    made = Frame(
        instance=InstanceId(instance),
        epoch=Epoch(1),
        first_offset=Offset(number),
        wall_time_ns=time.time_ns(),
        digest=_DICE.getrandbits(64),
        events=(event,),
    )
    return encode_frame(made)


async def each(work: Callable[[str, int], Awaitable[object]], names: Iterable[tuple[str, int]]) -> None:
    """Do it for each, many at once."""
    waiting: set[asyncio.Future[object]] = set()
    for name, number in names:
        waiting.add(asyncio.ensure_future(work(name, number)))
        if len(waiting) >= _AT_ONCE:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
    await asyncio.gather(*waiting)


async def follow(stream: NatsStream) -> None:
    """Read heartbeats, as a catalog does."""
    async for _ in stream.watch_pulses(CLUSTER):
        pass


async def measure(server: EmbeddedServer, count: int, frames: int, rounds: int, readers: int) -> dict[str, float]:
    """The numbers for so many instances, `frames` of each and `rounds` of heartbeats."""
    pid = server.pid
    stream = await NatsStream.connect(server.url, _WAIT_S)
    following = [await NatsStream.connect(server.url, _WAIT_S) for _ in range(readers)]
    names = [f"gpu-{at}" for at in range(count)]
    before_mib = resident_mib(pid)

    async def fence(name: str, number: int) -> object:
        return await stream.set_fence(CLUSTER, InstanceId(name), Epoch(1), "run", 0, _WAIT_S)

    async def publish(name: str, number: int) -> object:
        return await stream.publish(CLUSTER, InstanceId(name), frame(name, number), _WAIT_S)

    async def beat(name: str, number: int) -> object:
        heartbeat = Heartbeat(
            instance=InstanceId(name),
            cluster=CLUSTER,
            epoch=Epoch(1),
            published=Offset(frames),
            wall_time_ns=time.time_ns(),
            free_slots={Tier.HBM: 7, Tier.HOST: 7},
        )
        return await stream.send_pulse(heartbeat)

    await each(fence, ((name, 0) for name in names))
    fenced_mib, fenced = resident_mib(pid), await stream.state(_WAIT_S)
    began_s = processor_s(pid)
    await each(publish, ((name, at) for at in range(frames) for name in names))
    frames_s, framed = processor_s(pid) - began_s, await stream.state(_WAIT_S)
    tasks = [asyncio.create_task(follow(one)) for one in following]
    began_s = processor_s(pid)
    for _ in range(rounds):
        await each(beat, ((name, 0) for name in names))
    await stream.last_pulse(CLUSTER, InstanceId(names[-1]), _WAIT_S)  # behind all of them on this connection
    beats_s, after_mib = processor_s(pid) - began_s, resident_mib(pid)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    for one in [*following, stream]:
        await one.close()
    sent = count * frames
    return {
        "instances": count,
        "frame_bytes": len(frame(names[0], 0)),
        "stored_bytes_a_frame": (framed.bytes - fenced.bytes) / sent,
        "stored_bytes_a_fence": fenced.bytes / count,
        "memory_mib_empty": before_mib,
        "memory_kib_an_instance": (fenced_mib - before_mib) * 1024 / count,
        "memory_mib_after_all": after_mib,
        "cpu_us_a_frame": frames_s / sent * 1e6,
        "cpu_us_a_heartbeat": beats_s / (count * rounds) * 1e6,
    }


async def flood(server: EmbeddedServer, count: int, seconds: float) -> dict[str, float]:
    """What the stream takes of so many instances together, over one connection."""
    stream = await NatsStream.connect(server.url, _WAIT_S)
    one = frame("gpu-0", 0)
    data = one * (MESSAGE_BYTES // len(one))
    end_s = time.monotonic() + seconds

    async def publish(name: str, number: int) -> object:
        return await stream.publish(CLUSTER, InstanceId(name), data, _WAIT_S)

    def wanted() -> Iterable[tuple[str, int]]:
        at = 0
        while time.monotonic() < end_s:
            yield f"gpu-{at % count}", at
            at += 1

    before, began_s, cpu_s = await stream.state(_WAIT_S), time.monotonic(), processor_s(server.pid)
    await each(publish, wanted())
    took_s = time.monotonic() - began_s
    cpu_s, after = processor_s(server.pid) - cpu_s, await stream.state(_WAIT_S)
    await stream.close()
    taken = after.bytes - before.bytes
    return {"flood_mb_s": taken / took_s / 1e6, "flood_cpu_s_a_gb": cpu_s / taken * 1e9}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What kvbm's events and heartbeats cost a nats-server.")
    parser.add_argument("--instances", type=int, action="append", metavar="N", help="how many (default 100 and 1000)")
    parser.add_argument("--frames", type=int, default=4, metavar="N", help="of each instance (default 4)")
    parser.add_argument("--heartbeats", type=int, default=10, metavar="N", help="of each instance (default 10)")
    parser.add_argument("--readers", type=int, default=2, metavar="N", help="who follow heartbeats (default 2)")
    parser.add_argument("--flood", type=float, default=0.0, metavar="SECONDS", help="for so long (default: not)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    arguments = parser.parse_args()
    counts = arguments.instances or [100, 1000]
    if min(*counts, arguments.frames, arguments.heartbeats) < 1 or arguments.readers < 0:
        parser.error("give numbers of 1 or more (--readers: 0 or more)")
    if not 0 <= arguments.flood <= _MOST_FLOOD_S:
        parser.error(f"--flood takes seconds from 0 to {_MOST_FLOOD_S:g}: all of it lies on the disk meanwhile")
    configure_logs(logging.WARNING)
    rows: list[dict[str, float]] = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="kvbm-nats-cost-") as folder:
            server = EmbeddedServer.start(Path(folder), timeout_s=_WAIT_S)
            try:
                work = measure(server, count, arguments.frames, arguments.heartbeats, arguments.readers)
                rows.append(asyncio.run(work))
                if arguments.flood:
                    rows[-1] |= asyncio.run(flood(server, count, arguments.flood))
                rows[-1]["disk_mib"] = sum(path.stat().st_size for path in Path(folder).rglob("*.blk")) / 2**20
            finally:
                server.stop()
    for name in rows[0]:
        print(f"{name:24}", *(f"{row[name]:>12,.1f}".removesuffix(".0") for row in rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
