"""One instance as a process of its own, for benchmarks: it fills its HBM pool, says so, and then creates runs at a
steady rate.

    python -m kvbm.bench.instance '{"instance.id": "load-0", …}' BLOCKS RATE

Settings are flags as JSON. It prints `{"instance": …, "epoch": …, "offset": …}` once its first blocks are published,
then replaces runs of 16 blocks, RATE times a second (0: none), until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.base import Position

NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
RUN_BLOCKS = 16
BLOCK_BYTES = 16  # nobody looks at them
_PUBLISH_WAIT_S = 120.0


def create_run(manager: Manager, hashes: bytes) -> None:
    """Create some blocks and let go of them. The pool must have room once the oldest are evicted."""
    slots = manager.allocate(len(hashes) // HASH_BYTES)
    assert slots is not None
    manager.unpin(manager.create(NAMESPACE.id, NO_PARENT, 0, hashes, slots))


def fill(manager: Manager, blocks: int, rng: np.random.Generator) -> Position:
    """Create so many blocks, a thousand at a time, and wait until the stream has them; where its events end then."""
    for at in range(0, blocks, 1024):
        create_run(manager, rng.bytes(min(1024, blocks - at) * HASH_BYTES))
    end = Position(manager.epoch, manager.applied())
    deadline_s = time.monotonic() + _PUBLISH_WAIT_S
    while manager.published() < end:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{blocks} blocks were not published within {_PUBLISH_WAIT_S:g} s")
        time.sleep(0.01)
    return end


def main(flags: str, blocks: int, rate: float) -> int:
    """See the module."""
    settings = load_settings(flags=json.loads(flags))
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    rng = np.random.default_rng(abs(hash(settings.instance.id)) % 2**32)
    with open_manager(settings, [NAMESPACE], BLOCK_BYTES, engine="bench") as manager:
        end = fill(manager, blocks, rng)
        told = {"instance": manager.instance, "epoch": end.epoch, "offset": end.offset}
        print(json.dumps(told), flush=True)
        next_s = time.monotonic()
        while not ended.wait(max(0.0, next_s - time.monotonic()) if rate else None):
            create_run(manager, rng.bytes(RUN_BLOCKS * HASH_BYTES))
            next_s = max(next_s + 1 / rate, time.monotonic() - 1.0)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    except KvbmError as error:
        raise SystemExit(str(error)) from None
