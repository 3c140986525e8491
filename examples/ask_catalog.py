"""Ask the catalog as a router does: who holds how much of a prompt, and where to send it. Sync, then from asyncio.

The program starts what it needs: an embedded nats-server, a catalog in a process of its own, two instances. A real
router makes only the client, `kvbm.CatalogClient("http://catalog:7700")`; `kvbm-catalog serve` starts a catalog.

    python examples/ask_catalog.py

Needs the extra `catalog`. The instances hold no real KV (`pools.hbm.device = "memory"`), so torch is not needed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import kvbm

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
WAIT_S = 60.0


def start_catalog(folder: Path, opened: ExitStack) -> str:
    """A catalog in a process of its own, as `kvbm-catalog serve` starts one; gives its URL. `opened` ends it."""
    sets = {
        "instance.data_dir": folder,
        "catalog.listen": "127.0.0.1:0",  # a free port: asked are we through a socket of the same user
        "catalog.unix_socket": folder / "catalog.sock",
    }
    command = [
        sys.executable,
        "-m",
        "kvbm",
        "catalog",
        "serve",
        *(f"--set={key}={value}" for key, value in sets.items()),
    ]
    catalog = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    opened.callback(catalog.wait)
    opened.callback(catalog.terminate)
    return f"unix:{folder / 'catalog.sock'}"


def wait_live(client: kvbm.CatalogClient, names: list[str]) -> None:
    """Wait until the catalog has heard of these instances, and knows how busy they are."""
    until_s = time.monotonic() + WAIT_S
    while not set(names) <= {one.instance for one in client.instances() if one.state == "live"}:
        if time.monotonic() > until_s:
            raise SystemExit("the catalog has not heard of the instances")
        time.sleep(0.02)


def open_instance(name: str, folder: Path) -> kvbm.Manager:
    flags = {
        "instance.id": name,
        "instance.data_dir": str(folder),  # of all: where the catalog has started a nats-server
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


async def ask_many(url: str, prompts: list[list[int]]) -> list[kvbm.RouteAnswer]:
    """From asyncio: a client of its own, without threads.

    Questions run side by side, and one that is cancelled ends.
    """
    async with kvbm.AsyncCatalogClient(url) as client:
        asked = (client.route_tokens(NAMESPACE, b"", prompt, timeout_s=WAIT_S) for prompt in prompts)
        return await asyncio.gather(*asked)


def main() -> None:
    system, essay = list(range(160)), list(range(1000, 1160))
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        url = start_catalog(folder, opened)
        client = opened.enter_context(kvbm.CatalogClient(url))
        client.wait_ready(WAIT_S)
        engines = [opened.enter_context(open_instance(name, folder)) for name in ("engine-a", "engine-b")]
        seen = [hold(engines[0], system), hold(engines[1], essay), hold(engines[1], system[:64])]
        wait_live(client, [engine.instance for engine in engines])

        ask(client, [*system, 7, 8, 9], seen)
        prompts = [[*system, 1], [*essay, 2], [*essay[:80], 3]]
        for prompt, route in zip(prompts, asyncio.run(ask_many(url, prompts)), strict=True):
            print(f"asyncio: a prompt of {len(prompt)} tokens goes to {route.instance}")


if __name__ == "__main__":
    main()
