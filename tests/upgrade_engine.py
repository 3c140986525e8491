"""An instance of any version, in a process of its own: upgrade_engine.py FLAGS, which are JSON.

It uses the public names of kvbm alone, and nothing of this checkout. It is told by lines of JSON what to do, answers
each with a line, and closes its manager when its input ends. Each block that it reads is checked.

    {"serve": 7, "depth": 5, "space": 0}    serve prompt 7 of 5 blocks, and wait until its copies have ended
        {"depth": 3, "namespace": "…", "hashes": "…"}    so many of them were held; both in hex
    {"place": true}                         wait until all is published
        {"epoch": 1, "offset": 42}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

import torch

import kvbm

BLOCK_TOKENS, BLOCK_BYTES, WAIT_S = 4, 256, 120.0
FIELDS: dict[str, Any] = {"model": "upgrade", "revision": "1", "block_tokens": BLOCK_TOKENS}


def tokens_of(prompt: int, depth: int) -> list[int]:
    return list(range(1000 * prompt, 1000 * prompt + depth * BLOCK_TOKENS))


def spaces(has_variant: bool) -> list[kvbm.Namespace]:
    """The namespaces; the second one only a version with the field can name."""
    return [kvbm.Namespace(**FIELDS), *([kvbm.Namespace(**FIELDS, variant="v2")] if has_variant else [])]


def kv_of(block: bytes, block_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8).repeat(block_bytes // kvbm.HASH_BYTES)


class Served(NamedTuple):
    """Whether there was room for a prompt, and how many of its blocks were held."""

    has_room: bool
    depth: int


def serve_blocks(manager: kvbm.Manager, space: kvbm.Namespace, hashes: bytes, size: int, wait_s: float) -> Served:
    """Serve a prompt of blocks of this size: those that are not held are computed, and each byte is checked."""
    blocks = [hashes[at : at + kvbm.HASH_BYTES] for at in range(0, len(hashes), kvbm.HASH_BYTES)]
    prefix = manager.acquire(space.id, hashes, wait_s=wait_s)
    missing, slots = blocks[prefix.depth :], prefix.slots
    if missing:
        fresh = manager.allocate(len(missing))
        if fresh is None:
            manager.unpin(slots)
            return Served(False, prefix.depth)
        for block, slot in zip(missing, fresh, strict=True):
            manager.hbm.tensor[slot] = kv_of(block, size)
        parent = blocks[prefix.depth - 1] if prefix.depth else kvbm.NO_PARENT
        slots = slots + manager.create(space.id, parent, prefix.depth, b"".join(missing), fresh)
    for block, slot in zip(blocks, slots, strict=True):
        if not torch.equal(manager.hbm.tensor[slot], kv_of(block, size)):
            raise SystemExit(f"block {block.hex()} has wrong bytes")
    manager.unpin(slots)
    return Served(True, prefix.depth)


def serve(manager: kvbm.Manager, space: kvbm.Namespace, prompt: int, depth: int) -> dict[str, Any]:
    """How many blocks of a prompt were held, and what they are; the others are computed."""
    hashes = manager.hash_tokens(tokens_of(prompt, depth), space.root(), BLOCK_TOKENS)
    served = serve_blocks(manager, space, hashes, BLOCK_BYTES, WAIT_S)
    if not served.has_room:
        raise SystemExit(f"HBM has no room for prompt {prompt}")
    if not manager.settle(WAIT_S):
        raise SystemExit("copies do not end")
    return {"depth": served.depth, "namespace": space.id.hex(), "hashes": hashes.hex()}


def place(manager: kvbm.Manager) -> dict[str, int]:
    """Where its events stand, all of them published."""
    until_s, epoch, offset = time.monotonic() + WAIT_S, int(manager.epoch), int(manager.applied())
    while tuple(manager.published()) < (epoch, offset):
        if time.monotonic() > until_s:
            raise SystemExit(f"events are not published: {manager.trouble()}")
        time.sleep(0.005)
    return {"epoch": epoch, "offset": offset}


def main() -> None:
    flags = json.loads(sys.argv[1])
    used = spaces(flags.pop("variant", False))
    with kvbm.open_manager(kvbm.load_settings(flags=flags), used, BLOCK_BYTES, engine="upgrade") as manager:
        print(json.dumps(place(manager)), flush=True)
        for line in sys.stdin:
            wanted = json.loads(line)
            if "serve" in wanted:
                found = serve(manager, used[wanted["space"]], wanted["serve"], wanted["depth"])
                print(json.dumps(found), flush=True)
            else:
                print(json.dumps(place(manager)), flush=True)


if __name__ == "__main__":
    main()
