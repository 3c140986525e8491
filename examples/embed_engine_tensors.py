"""Embed kvbm in an engine that owns its HBM: its own tensors, its own block table, its own prefix cache.

The engine says what it holds (`engine_stored`, `engine_removed`). Blocks come and go through HOST: `begin_store` gives
rows to fill, `begin_acquire` gives rows to read. `paged_layout` finds a block's bytes in tensors of any stride order,
so the engine changes nothing.

    python examples/embed_engine_tensors.py

The tensors are torch tensors on the CPU: torch is needed (extra `engine`), a GPU is not.
`kvbm/engines/vllm` does the same inside vLLM, where scheduler and workers are processes of their own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict

import numpy as np
import torch

import kvbm

BLOCKS, BLOCK_TOKENS, LAYERS = 8, 16, 2
WAIT_S = 60.0


class Engine:
    def __init__(self, folder: str) -> None:
        self.kv = [torch.zeros(2, BLOCKS, BLOCK_TOKENS, 2, 8, dtype=torch.bfloat16) for _ in range(LAYERS)]
        dims = ("kv", "slots", "tokens", "heads", "dim")
        layout = kvbm.paged_layout([[kvbm.PagedTensor(tensor, dims)] for tensor in self.kv])
        self.namespace = kvbm.Namespace(model="toy", revision="1", block_tokens=BLOCK_TOKENS, layout=layout.layout)
        flags = {
            "instance.data_dir": folder,
            "nats.enabled": False,
            "pools.hbm.owner": "engine",
            "pools.hbm.slots": BLOCKS,
            "pools.host.slots": 64,
        }
        settings = kvbm.load_settings(flags=flags)
        self.manager = kvbm.open_engine_manager(settings, [self.namespace], layout.block_bytes, engine="example")
        host = self.manager.pools.slots[kvbm.Tier.HOST]
        assert isinstance(host, kvbm.HostPool)
        memory = kvbm.map_host(os.getpid(), host.fd, host.mapped_bytes)  # a worker process does the same, with our pid
        self.rows = memory[: host.slots * layout.block_bytes].reshape(host.slots, layout.block_bytes)
        self.copies = kvbm.copy_queue(layout)
        self.cache: OrderedDict[bytes, int] = OrderedDict()  # the engine's prefix cache: hash → its block, oldest first

    def take_block(self) -> int:
        if len(self.cache) < BLOCKS:
            return len(self.cache)
        oldest, block = self.cache.popitem(last=False)
        self.manager.engine_removed(oldest)  # said before the block is overwritten
        return block

    def copied(self, begin: str, blocks: list[int], rows: list[int]) -> np.ndarray:
        """Copy between blocks and rows of HOST, in a thread that needs no GIL. A gather gives the rows' checksums."""
        getattr(self.copies, begin)(0, np.array(blocks, dtype=np.int64), self.rows, np.array(rows, dtype=np.int64))
        if not self.copies.wait(WAIT_S):
            raise SystemExit("a copy did not end")
        ((_, checksums, _, why),) = self.copies.ended()
        if why:
            raise SystemExit(f"a copy failed: {why}")
        return np.zeros(0, dtype=np.uint32) if checksums is None else checksums

    def serve(self, name: str, tokens: list[int]) -> None:
        manager, namespace = self.manager, self.namespace
        hashes = kvbm.split_hashes(manager.hash_tokens(tokens, namespace.root(), BLOCK_TOKENS))
        held = next((at for at, block in enumerate(hashes) if block not in self.cache), len(hashes))

        for block in hashes[:held]:
            self.cache.move_to_end(block)  # used, so it leaves last
        acquiring = manager.begin_acquire(namespace.id, b"".join(hashes), WAIT_S, first=held)  # what follows our own
        while not acquiring.poll():  # never waits: an engine's scheduler asks again at its next step
            time.sleep(0.001)
        loaded = hashes[held : held + acquiring.depth]
        for block in hashes[held:]:
            self.cache[block] = self.take_block()
        if loaded:
            self.copied("scatter", [self.cache[block] for block in loaded], acquiring.slots)
        acquiring.release()

        begin = held + len(loaded)
        for block in hashes[begin:]:  # compute: numbers that only this block has
            for layer in self.kv:
                layer[:, self.cache[block]] = block[0]
        print(f"{name:<20} {held} in its own HBM, {len(loaded)} from kvbm, {len(hashes) - begin} computed")
        if any(bool((layer[:, self.cache[block]] != block[0]).any()) for block in hashes for layer in self.kv):
            raise SystemExit("a block has other KV than it was computed with")

        parent = hashes[held - 1] if held else kvbm.NO_PARENT
        fresh = b"".join(hashes[held:])
        manager.engine_stored(namespace.id, parent, held, fresh)
        store = manager.begin_store(namespace.id, parent, held, fresh)  # None: HOST has all of it
        if store is not None:
            sums = self.copied("gather", [self.cache[hashes[held + at]] for at in store.at], store.slots)
            manager.end_store(store, [True] * len(store.slots), sums)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder)
        with engine.manager:
            engine.serve("first prompt", list(range(96)))
            engine.serve("the same again", list(range(96)))
            engine.serve("another, HBM is full", list(range(1000, 1128)))
            engine.serve("first prompt again", list(range(96)))
            engine.copies.close()


if __name__ == "__main__":
    main()
