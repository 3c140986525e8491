"""An instance whose metrics are scraped, in a process of its own: alert_engine.py FLAGS, which are JSON.

Blocks are large, so that a read of them from another instance measures the way and not the asking. It is told by lines
of JSON what to do, and answers each with a line. It closes its manager when its input ends.

    {"op": "serve", "prompt": 7, "wait_s": 60, "settle": true}    {"depth": 3}: so many blocks were held
    {"op": "evict", "prompt": 7, "tiers": ["HBM", "HOST"]}        {"evicted": 6}
    {"op": "trouble"}                                             {"trouble": "…"}: what the manager says of itself
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvbm
from kvbm.core.ids import Tier
from tests.lending_pairs import reads_by
from tests.upgrade_engine import serve_blocks

BLOCK_TOKENS, BLOCK_BYTES, DEPTH, WAIT_S = 4, 1 << 18, 8, 120.0
SPACE = kvbm.Namespace(model="alerts", revision="1", block_tokens=BLOCK_TOKENS)


def tokens_of(prompt: int) -> list[int]:
    return list(range(1000 * prompt, 1000 * prompt + DEPTH * BLOCK_TOKENS))


class Engine:
    """A manager, and what is done with it."""

    def __init__(self, manager: kvbm.Manager) -> None:
        self._manager = manager

    def hashes_of(self, prompt: int) -> bytes:
        return self._manager.hash_tokens(tokens_of(prompt), SPACE.root(), BLOCK_TOKENS)

    def serve(self, prompt: int, wait_s: float = WAIT_S, settle: bool = True) -> dict[str, Any]:
        """How many blocks of a prompt were held; the others are computed. Each byte is checked."""
        served = serve_blocks(self._manager, SPACE, self.hashes_of(prompt), BLOCK_BYTES, wait_s)
        if served.has_room and settle and not self._manager.settle(WAIT_S):
            raise SystemExit("copies do not end")
        return {"depth": served.depth}

    def evict(self, prompt: int, tiers: list[str]) -> dict[str, Any]:
        """Have tiers hold nothing of a prompt."""
        hashes = self.hashes_of(prompt)
        return {"evicted": sum(int(self._manager.evict(Tier[one], hashes) or 0) for one in tiers)}

    def trouble(self) -> dict[str, Any]:
        """What the manager says of itself."""
        return {"trouble": str(self._manager.trouble())}


def main() -> None:
    flags = json.loads(sys.argv[1])
    only, port = flags.pop("only_transport", ""), flags.pop("metrics_port")
    settings = kvbm.load_settings(flags=flags)
    with kvbm.open_manager(settings, [SPACE], BLOCK_BYTES, engine="alerts") as manager:
        if only:
            reads_by(manager, only)
        engine = Engine(manager)
        with kvbm.serve_metrics(manager, port=port):
            print(json.dumps({"epoch": int(manager.epoch)}), flush=True)
            for line in sys.stdin:
                wanted = json.loads(line)
                print(json.dumps(getattr(engine, wanted.pop("op"))(**wanted)), flush=True)


if __name__ == "__main__":
    main()
