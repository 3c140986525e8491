"""Prefill and decode as two engines: P computes a prompt's KV, D decodes with it and computes none of its blocks again.

P keeps its KV in HOST, which it lends to others (`transport.listen`). The catalog reads P's stream. D's manager asks
the catalog, reads the blocks from P's memory, and verifies them. A router hands over only tokens, and how far P's
stream had come.

    python examples/prefill_decode.py

On one machine blocks are read through shared memory; between machines it would be `transport.listen =
"tcp://0.0.0.0:7701"`, and each engine a process of its own. Needs torch and the extra `catalog`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import kvbm

BLOCK_TOKENS, BLOCK_BYTES = 16, 512
NAMESPACE = kvbm.Namespace(model="toy", revision="1", block_tokens=BLOCK_TOKENS, kv_dtype="uint8")
WAIT_S = 60.0


class Engine:
    """A toy engine. The KV of a token depends on all tokens before it; the next token depends on all KV."""

    def __init__(self, name: str, folder: Path, catalog_url: str) -> None:
        flags = {
            "instance.id": name,
            "instance.data_dir": str(folder),  # where the first starts a nats-server, and the others find it
            "catalog.url": catalog_url,
            "transport.listen": "host",
            "pools.hbm.device": "cpu",
            "pools.hbm.slots": 32,
            "pools.host.slots": 32,
            "onboard.locate_s": WAIT_S,  # wait so long for the catalog; less where computing is quicker
        }
        self.manager = kvbm.open_manager(kvbm.load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES, engine="example")
        self.name, self.computed_blocks = name, 0

    def kv_of(self, tokens: list[int]) -> torch.Tensor:
        """Compute the KV of the last block of these tokens."""
        self.computed_blocks += 1
        kv = hashlib.shake_256(repr(tokens).encode()).digest(BLOCK_BYTES)
        return torch.frombuffer(bytearray(kv), dtype=torch.uint8)

    def prefill(self, tokens: list[int]) -> tuple[list[int], dict[kvbm.Tier, int]]:
        """KV of a prompt's full blocks, in pinned slots; and where those lay that were not computed."""
        manager = self.manager
        hashes = kvbm.split_hashes(manager.hash_tokens(tokens, NAMESPACE.root(), BLOCK_TOKENS))
        prefix = manager.acquire(NAMESPACE.id, b"".join(hashes), wait_s=WAIT_S)
        fresh = manager.allocate(len(hashes) - prefix.depth)
        assert fresh is not None
        for at, slot in enumerate(fresh, prefix.depth):
            manager.hbm.tensor[slot] = self.kv_of(tokens[: (at + 1) * BLOCK_TOKENS])
        parent = hashes[prefix.depth - 1] if prefix.depth else kvbm.NO_PARENT
        slots = manager.create(NAMESPACE.id, parent, prefix.depth, b"".join(hashes[prefix.depth :]), fresh)
        return prefix.slots + slots, {tier: count for tier, count in prefix.hits.items() if count}

    def decode(self, tokens: list[int], slots: list[int], count: int) -> list[int]:
        """The next tokens. What is behind the last full block has no block yet: it is computed here in any case."""
        kv = self.manager.hbm.tensor[slots].to(torch.int64).sum()
        for _ in range(count):
            tokens = [*tokens, int(kv + sum(tokens)) % 50_000]
        return tokens[-count:]


def start_catalog(folder: Path, opened: ExitStack) -> kvbm.CatalogClient:
    """A catalog in a process of its own, as `kvbm-catalog serve` starts one, and a client of it."""
    socket = folder / "catalog.sock"
    sets = {"instance.data_dir": folder, "catalog.listen": "127.0.0.1:0", "catalog.unix_socket": socket}
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
    client = opened.enter_context(kvbm.CatalogClient(f"unix:{socket}"))
    client.wait_ready(WAIT_S)
    return client


def main() -> None:
    prompt = [7 * token % 1000 for token in range(8 * BLOCK_TOKENS + 5)]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        catalog = start_catalog(folder, opened)
        p, d = (Engine(name, folder, catalog.url) for name in ("prefill", "decode"))
        for engine in (p, d):
            opened.enter_context(engine.manager)

        slots, _ = p.prefill(prompt)
        p.manager.settle(WAIT_S)  # until its copies are in HOST
        print(f"{p.name}: computed {p.computed_blocks} blocks")

        seen = kvbm.PositionWanted(instance=p.manager.instance, epoch=p.manager.epoch, offset=p.manager.applied())
        hashes = catalog.hashes(NAMESPACE, b"", prompt)
        answer = catalog.lookup(NAMESPACE, hashes, at_least=[seen], wait_s=5.0)
        print("catalog: " + ", ".join(f"{one.depth} blocks at {one.instance}" for one in answer.instances))
        until_s = time.monotonic() + WAIT_S
        while not catalog.find(NAMESPACE, hashes, asker=d.manager.instance).peers:
            if time.monotonic() > until_s:
                raise SystemExit(f"the catalog has not heard within {WAIT_S:g} s where P lends")
            time.sleep(0.1)  # P's heartbeats, one a second, say where it lends

        d_slots, hits = d.prefill(prompt)
        tokens = d.decode(prompt, d_slots, 4)
        found = ", ".join(f"{count} from {tier.name}" for tier, count in hits.items())
        print(f"{d.name}: found {found}, computed {d.computed_blocks} blocks, next tokens {tokens}")
        if d.computed_blocks or tokens != p.decode(prompt, slots, 4):
            raise SystemExit("D should have found all blocks of P, and decoded the same tokens")
        print("the same tokens as P would have decoded")


if __name__ == "__main__":
    main()
