"""Replay a log, cell by cell as in a notebook: what was held at a moment, why a block left, is the log sound, what if HBM were larger.

The log is an instance's journal here. `open_source` also takes an archive, a capture file, or a live stream (`nats://host:4222`); the
command `kvbm-replay` does the same from a shell.

    python examples/replay_log.py

Nothing runs but an instance that makes the log, without a nats-server and without torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import kvbm
from kvbm.assembly import NATIVE, NATIVE_FOLD, journal_folder
from kvbm.core.codec import ScannedFrame
from kvbm.core.events import BlocksEvicted
from kvbm.core.ids import short, split_hashes
from kvbm.replay.format import event_text, parse_at, place_text, time_text
from kvbm.replay.opening import open_source
from kvbm.replay.state import states_at
from kvbm.replay.verify import verify
from kvbm.replay.whatif import Accesses, what_if

NAMESPACE = kvbm.Namespace(model="toy", block_tokens=16)
HBM_SLOTS = 8


def make_log(folder: Path) -> tuple[str, list[list[kvbm.SequenceHash]]]:
    """An instance serves dialogues that share a beginning. Returns where its journal is, and the prompts that were asked."""
    flags = {
        "instance.id": "engine-a",
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": HBM_SLOTS,
    }
    settings = kvbm.load_settings(flags=flags)
    prompts: list[list[kvbm.SequenceHash]] = []
    with kvbm.open_manager(settings, [NAMESPACE], block_bytes=64, engine="example") as manager:
        for turn in range(12):
            tokens = [*range(48), *range(1000 * (turn % 3), 1000 * (turn % 3) + 32 + 16 * (turn // 6))]
            hashes = manager.hash_tokens(tokens, NAMESPACE.root(), NAMESPACE.block_tokens)
            blocks = split_hashes(hashes)
            prefix = manager.acquire(NAMESPACE.id, hashes)
            fresh = manager.allocate(len(blocks) - prefix.depth)
            assert fresh is not None
            parent = blocks[prefix.depth - 1] if prefix.depth else kvbm.NO_PARENT
            missing = b"".join(blocks[prefix.depth :])
            manager.unpin(prefix.slots + manager.create(NAMESPACE.id, parent, prefix.depth, missing, fresh))
            prompts.append(blocks)
    return str(journal_folder(settings)), prompts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, prompts = make_log(Path(folder))

        print("# What was held at a moment? Here before offset 6 of epoch 1; a time such as 12:30:00 does as well.")
        for state in states_at(open_source(log), parse_at("e1+6"), NATIVE, NATIVE_FOLD).instances:
            print("\n".join(state.lines()))

        print("\n# Why did the last block of the first prompt leave?")
        block = prompts[0][-1]
        for located in open_source(log).read(NATIVE):
            if not isinstance(located.found, ScannedFrame):
                continue  # damage, or whose frames follow
            frame, _ = NATIVE.decode_frame(located.data)
            for offset, event in enumerate(frame.events, frame.first_offset):
                if isinstance(event, BlocksEvicted) and block in split_hashes(event.hashes):
                    place, when = place_text(frame.epoch, offset), time_text(frame.wall_time_ns)
                    print(f"{short(block)} left at {place}, {when}: {event_text(event)}")

        print("\n# Is the log sound? Every event is folded and checked.")
        verified = verify(open_source(log), NATIVE, NATIVE_FOLD)
        print(verified.verdict())

        print("\n# What if HBM were larger, or evicted by another policy?")
        asked = Accesses("this program", [(0, prompt) for prompt in prompts], 1, NAMESPACE.block_tokens, 1.0, [])
        print("\n".join(what_if(asked, ["lru", "s3fifo", "cost"], [HBM_SLOTS, 2 * HBM_SLOTS]).lines()))
    sys.exit(1 if verified.findings else 0)


if __name__ == "__main__":
    main()
