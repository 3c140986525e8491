"""Embed kvbm in an engine, with HBM that kvbm owns.

The engine asks what is held (`acquire`), takes slots for the rest (`allocate`), computes them, says so (`create`), and
lets go (`unpin`). A second prompt finds what it shares with the first in HBM. What HBM had to give up comes back from
HOST, and after a restart from NVME.

    python examples/embed.py

HBM is a torch tensor on the CPU here: torch is needed (extra `engine`), a GPU is not. The "model" writes made-up bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import kvbm

SHAPE = kvbm.KvShape(layers=2, block_tokens=16, kv_heads=2, head_dim=8, dtype="bfloat16")
NAMESPACE = kvbm.Namespace(
    model="toy",
    revision="1",  # without a revision, blocks stay out of NVME and OBJECT
    block_tokens=SHAPE.block_tokens,
    kv_dtype=SHAPE.dtype,
    layout=SHAPE.describe(),
)
WAIT_S = 60.0


def open_manager(folder: Path) -> kvbm.Manager:
    flags = {
        "instance.data_dir": str(folder),
        "nats.enabled": False,  # events stay in the journal; nobody else listens in this example
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 10,
        "pools.host.slots": 64,
        "pools.nvme.slots": 64,
    }
    return kvbm.open_manager(kvbm.load_settings(flags=flags), [NAMESPACE], SHAPE.block_bytes, engine="example")


def kv_of(block: bytes) -> torch.Tensor:
    """The made-up KV of one block: bytes that only this block has."""
    return torch.frombuffer(bytearray(block), dtype=torch.uint8).repeat(SHAPE.block_bytes // kvbm.HASH_BYTES)


def prefill(manager: kvbm.Manager, name: str, tokens: list[int]) -> None:
    """Serve one prompt: reuse what is held, compute what is not."""
    hashes = manager.hash_tokens(tokens, NAMESPACE.root(), NAMESPACE.block_tokens)  # of full blocks only, packed
    blocks = [hashes[at : at + kvbm.HASH_BYTES] for at in range(0, len(hashes), kvbm.HASH_BYTES)]

    prefix = manager.acquire(NAMESPACE.id, hashes, wait_s=WAIT_S)  # the longest held run, now in HBM and pinned
    missing = blocks[prefix.depth :]
    fresh = manager.allocate(len(missing))
    if fresh is None:  # too much is pinned by other requests: an engine would let this one wait
        manager.unpin(prefix.slots)
        raise SystemExit(f"HBM has no room for {len(missing)} blocks")
    for block, slot in zip(missing, fresh, strict=True):
        manager.hbm.tensor[slot] = kv_of(block)  # the engine computes here
    parent = blocks[prefix.depth - 1] if prefix.depth else kvbm.NO_PARENT
    slots = prefix.slots + manager.create(NAMESPACE.id, parent, prefix.depth, b"".join(missing), fresh)

    if not all(torch.equal(manager.hbm.tensor[slot], kv_of(block)) for block, slot in zip(blocks, slots, strict=True)):
        raise SystemExit("a block has other bytes than it was computed with")
    found = ", ".join(f"{count} from {tier.name}" for tier, count in prefix.hits.items() if count) or "nothing held"
    print(f"{name:<28} {len(blocks)} blocks: {found}; {len(missing)} computed")
    manager.unpin(slots)  # the request is over; the blocks stay until room is needed
    manager.settle(WAIT_S)  # copies go on beside; waits only so that the output is always the same


def main() -> None:
    system, question, other = list(range(64)), list(range(100, 132)), list(range(200, 232))
    with tempfile.TemporaryDirectory() as name:
        with open_manager(Path(name)) as manager:
            prefill(manager, "first prompt", system + question)
            prefill(manager, "second, same beginning", system + other)
            prefill(manager, "a long one, HBM is full now", list(range(1000, 1160)))
            prefill(manager, "first prompt again", system + question)
        with open_manager(Path(name)) as manager:
            prefill(manager, "… and after a restart", system + question)
            stats = manager.stats()
            print(
                f"{stats.verified_reads} blocks were read from NVME and verified, {stats.corrupt_blocks} were corrupt"
            )


if __name__ == "__main__":
    main()
