"""Replay a log, cell by cell as in a notebook: what was held at a moment, why a block left, is the log sound, what if
HBM were larger.

The log is an instance's journal here. `kvbm.open_log` also takes an archive, a capture file, or a live stream
(`nats://host:4222`); the command `kvbm-replay` does the same from a shell.

    python examples/replay_log.py

Nothing runs but an instance that makes the log, without a nats-server and without torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import kvbm

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
HBM_SLOTS = 8


def make_log(folder: Path) -> tuple[kvbm.Settings, list[bytes]]:
    """An instance serves dialogues that share a beginning.

    Returns its settings, which say where its journal is, and the prompts' hashes.
    """
    flags = {
        "instance.id": "engine-a",
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": HBM_SLOTS,
    }
    settings = kvbm.load_settings(flags=flags)
    prompts: list[bytes] = []
    with kvbm.open_manager(settings, [NAMESPACE], block_bytes=64, engine="example") as manager:
        for turn in range(12):
            tokens = [*range(48), *range(1000 * (turn % 3), 1000 * (turn % 3) + 32 + 16 * (turn // 6))]
            hashes = manager.hash_tokens(tokens, NAMESPACE.root(), NAMESPACE.block_tokens)
            blocks = kvbm.split_hashes(hashes)
            prefix = manager.acquire(NAMESPACE.id, hashes)
            fresh = manager.allocate(len(blocks) - prefix.depth)
            assert fresh is not None
            parent = blocks[prefix.depth - 1] if prefix.depth else kvbm.NO_PARENT
            missing = b"".join(blocks[prefix.depth :])
            manager.unpin(prefix.slots + manager.create(NAMESPACE.id, parent, prefix.depth, missing, fresh))
            prompts.append(hashes)
    return settings, prompts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings, prompts = make_log(Path(folder))
        log = kvbm.open_log(settings)

        print("# What was held at a moment? Here before offset 6 of epoch 1; a time such as 12:30:00 does as well.")
        for state in log.states("e1+6"):
            print("\n".join(state.lines()))

        print("\n# Why did the last block of the first prompt leave?")
        block = kvbm.split_hashes(prompts[0])[-1]
        for found in log.events():
            if isinstance(found.event, kvbm.BlocksEvicted) and block in kvbm.split_hashes(found.event.hashes):
                print(f"{block.hex()[:8]} left: {found}")

        print("\n# Is the log sound? Every event is folded and checked.")
        verified = log.verify()
        print(verified.verdict())

        print("\n# What if HBM were larger, or evicted by another policy?")
        tried = kvbm.what_if(prompts, NAMESPACE.block_tokens, ["lru", "s3fifo", "cost"], [HBM_SLOTS, 2 * HBM_SLOTS])
        print("\n".join(tried.lines()))
    sys.exit(1 if verified.findings else 0)


if __name__ == "__main__":
    main()
