"""Ask the catalog as a router does: who holds how much of a prompt, and where to send it. Sync, then from asyncio.

The program starts what it needs: an embedded nats-server, a catalog in a process of its own, two instances. A real router makes only
the client, `kvbm.CatalogClient("http://catalog:7700")`; `kvbm-catalog serve` starts a catalog.

    python examples/ask_catalog.py

Needs the extra `catalog`. The instances hold no real KV (`pools.hbm.device = "memory"`), so torch is not needed.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

import kvbm
from kvbm.streams.server import shared_server
from kvbm.telemetry.remarks import to_standard_error
from kvbm.workload.catalog_view import wait_live
from kvbm.workload.processes import start_catalog

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
WAIT_S = 60.0


def open_instance(name: str, folder: Path, nats_url: str) -> kvbm.Manager:
    flags = {
        "instance.id": name,
        "instance.data_dir": str(folder),
        "nats.url": nats_url,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 64,
    }
    return kvbm.open_manager(kvbm.load_settings(flags=flags), [NAMESPACE], block_bytes=64, engine="example")


def hold(manager: kvbm.Manager, tokens: list[int]) -> kvbm.PositionWanted:
    """Make an instance hold a prompt; returns the place in its stream after which it is known there."""
    hashes = manager.hash_tokens(tokens, NAMESPACE.root(), NAMESPACE.block_tokens)
    slots = manager.allocate(len(hashes) // 16)
    assert slots is not None
    manager.unpin(manager.create(NAMESPACE.id, kvbm.NO_PARENT, 0, hashes, slots))
    return kvbm.PositionWanted(instance=manager.instance, epoch=manager.epoch, offset=manager.applied())


def ask(client: kvbm.CatalogClient, tokens: list[int], seen: list[kvbm.PositionWanted]) -> None:
    """Sync: any thread may ask; connections are kept."""
    hashes = client.hashes(NAMESPACE, b"", tokens)  # made here: the catalog sees hashes, never tokens
    answer = client.lookup(NAMESPACE, hashes, at_least=seen, wait_s=5.0)  # waits until it has read that far
    print(f"a prompt of {len(tokens)} tokens, {answer.blocks} full blocks:")
    for holding in answer.instances:
        print(f"  {holding.instance} holds {holding.depth}: {holding.tiers}")
    route = client.route(NAMESPACE, hashes, len(tokens))
    for ranked in route.ranked:
        print(f"  {ranked.instance} would compute {ranked.missing_tokens} tokens, cost {ranked.cost_s * 1e3:.1f} ms")
    print(f"  → {route.instance}")


async def ask_many(client: kvbm.CatalogClient, prompts: list[list[int]]) -> list[kvbm.RouteAnswer]:
    """From asyncio: the client blocks, so each call goes to a thread. They run side by side."""
    asked = (asyncio.to_thread(client.route_tokens, NAMESPACE, b"", prompt, timeout_s=WAIT_S) for prompt in prompts)
    return await asyncio.gather(*asked)


def main() -> None:
    system, essay = list(range(160)), list(range(1000, 1160))
    to_standard_error()  # where logs go
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        server = shared_server(folder / "nats")
        opened.callback(server.stop)
        client = start_catalog(folder / "catalog", server.url, opened)
        engines = [opened.enter_context(open_instance(name, folder, server.url)) for name in ("engine-a", "engine-b")]
        seen = [hold(engines[0], system), hold(engines[1], essay), hold(engines[1], system[:64])]
        wait_live(client, [engine.instance for engine in engines], WAIT_S)

        ask(client, [*system, 7, 8, 9], seen)
        prompts = [[*system, 1], [*essay, 2], [*essay[:80], 3]]
        for prompt, route in zip(prompts, asyncio.run(ask_many(client, prompts)), strict=True):
            print(f"asyncio: a prompt of {len(prompt)} tokens goes to {route.instance}")


if __name__ == "__main__":
    main()
