"""A manager process of the crash loop: serves random prompts and checks every byte it is given. JSON lines in and out.

    python -m tests.faults.processes.worker SEED RATE KEY=VALUE…

With RATE 0 it serves nothing before it is told to.

In:
    {"op": "pause"} {"op": "resume"}          stop and go on serving prompts; a pause is answered when nothing moves
    {"op": "status"}                          offsets, digest, counters
    {"op": "state"}                           the same, and what each tier holds
    {"op": "clock", "offset_s": 3600}         step the wall clock that frames and heartbeats are stamped with
    {"op": "take_snapshot"}                   a snapshot
    {"op": "serve", "family": 1, "branch": 2} one prompt; answered with its depth, by tier, before anything was computed
    {"op": "burst", "blocks": 100000}         create so many blocks as fast as it goes
    {"op": "stop"}                            a clean end; so is the end of the input
Out: {"event": "ready" | "done" | "status" | "wrong_bytes" | "stopped" | "error", …}.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvbm.assembly import open_manager
from kvbm.command_line import configure_logs
from kvbm.config import load_settings
from kvbm.core.errors import KvbmError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NO_PARENT, SequenceHash, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.memory import MemoryPool
from tests.faults.processes.content import (
    BLOCK_BYTES,
    BRANCHES,
    FAMILIES,
    LEAF_BLOCKS,
    NAMESPACE,
    STEM_BLOCKS,
    prompt_hashes,
    rows_of,
)

RUN_BLOCKS = 16
BURST_SNAPSHOT = 64  # runs between two looks at the commands


class Worker:
    """One manager, and the prompts it serves."""

    def __init__(self, seed: int, rate: float, flags: dict[str, str]) -> None:
        self._random = random.Random(seed)
        self._pause_s = 1.0 / (rate or 1.0)
        self._paused = rate == 0
        self._clock_offset_ns = 0
        self._served = self._wrong = self._short = 0
        self._burst_left = 0
        self.manager: Manager = open_manager(
            load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES, engine="crash-loop", wall_clock_ns=self._wall_ns
        )
        one_life = random.Random(f"{seed} {self.manager.instance} {self.manager.epoch}")  # no two lives create the same
        self._burst_names = itertools.count(one_life.getrandbits(60) << 32)
        hbm = self.manager.pools.slots[Tier.HBM]
        assert isinstance(hbm, MemoryPool)
        self._rows = hbm.rows
        say(event="ready", epoch=self.manager.epoch, recovered=len(self.manager.held(Tier.NVME)))

    def _wall_ns(self) -> int:
        return time.time_ns() + self._clock_offset_ns

    def run(self, commands: queue.SimpleQueue[bytes | None]) -> None:
        """Serve until told to stop."""
        next_s = time.monotonic()
        while True:
            try:
                wait_s = 1.0 if self._paused else max(0.0, next_s - time.monotonic())
                line = commands.get(timeout=0.0001 if self._burst_left else wait_s)
            except queue.Empty:
                if self._burst_left:
                    self._burst()
                elif not self._paused:
                    self._serve()
                    next_s = time.monotonic() + self._pause_s * self._random.uniform(0.5, 1.5)
                continue
            if line is None or not self._obey(msgspec.json.decode(line)):
                break
        self.manager.close()
        say(event="stopped", applied=self.manager.applied())

    def _obey(self, command: dict[str, Any]) -> bool:
        match command["op"]:
            case "pause":
                self._paused = True
                say(event="done", op="pause", settled=self.manager.settle(60.0))
            case "resume":
                self._paused = False
                say(event="done", op="resume")
            case "status":
                say(event="status", **self._status())
            case "state":
                held = {tier.name: b"".join(self.manager.held(tier)).hex() for tier in self.manager.pools.slots}
                say(event="status", held=held, **self._status())
            case "clock":
                self._clock_offset_ns = int(command["offset_s"] * 1e9)
                say(event="done", op="clock")
            case "take_snapshot":
                self.manager.take_snapshot()
                say(event="done", op="take_snapshot")
            case "serve":
                hits = self._serve_one(prompt_hashes(command["family"], command["branch"]))
                say(event="done", op="serve", hits={tier.name: count for tier, count in hits.items() if count})
            case "burst":
                self._burst_left = int(command["blocks"])
            case "stop":
                return False
        return True

    def _status(self) -> dict[str, Any]:
        manager = self.manager
        offset, digest = manager.digest()
        stats, published = manager.stats(), manager.published()
        return {
            "epoch": manager.epoch,
            "applied": offset,
            "digest": f"{digest:016x}",
            "durable": manager.durable(),
            "published": [published.epoch, published.offset],
            "served": self._served,
            "wrong": self._wrong,
            "short": self._short,
            "corrupt": stats.corrupt_blocks,
            "trouble": stats.trouble,
            "verified": stats.verified_reads,
            "counts": {tier.name: counts.held for tier, counts in stats.pools.items()},
            "hits": {tier.name: count for tier, count in stats.hit_blocks.items()},
        }

    def _serve(self) -> None:
        """One prompt, as an engine serves it; now and then something is cleared instead."""
        dice = self._random
        if dice.random() < 0.02:
            tier = dice.choice(list(self.manager.pools.slots))
            held = self.manager.held(tier)
            if held:
                self.manager.evict(tier, b"".join(dice.sample(held, min(8, len(held)))), EvictReason.CLEARED)
            return
        depth = dice.randrange(1, STEM_BLOCKS + LEAF_BLOCKS + 1)
        self._serve_one(prompt_hashes(dice.randrange(FAMILIES), dice.randrange(BRANCHES), depth))

    def _serve_one(self, hashes: bytes) -> Mapping[Tier, int]:
        """Acquire, check, compute the rest. Returns how many blocks came from where."""
        depth = len(hashes) // HASH_BYTES
        prefix = self.manager.acquire(NAMESPACE.id, hashes)
        at = prefix.depth * HASH_BYTES
        self._check(hashes[:at], prefix.slots)
        slots = prefix.slots
        if at < len(hashes):
            fresh = self.manager.allocate(depth - prefix.depth)
            if fresh is None:
                self._short += 1
            else:
                self._rows[fresh] = rows_of(hashes[at:])
                parent = SequenceHash(hashes[at - HASH_BYTES : at]) if at else NO_PARENT
                slots = slots + self.manager.create(NAMESPACE.id, parent, prefix.depth, hashes[at:], fresh)
        self.manager.unpin(slots)
        self._served += 1
        return prefix.hits

    def _check(self, hashes: bytes, slots: Sequence[int]) -> None:
        if not slots:
            return
        wrong = np.flatnonzero((self._rows[list(slots)] != rows_of(hashes)).any(axis=1))
        if len(wrong):
            self._wrong += len(wrong)
            first = hashes[wrong[0] * HASH_BYTES : (wrong[0] + 1) * HASH_BYTES]
            say(event="wrong_bytes", blocks=len(wrong), first=first.hex(), slot=slots[wrong[0]])

    def _burst(self) -> None:
        for _ in range(BURST_SNAPSHOT):
            count = min(RUN_BLOCKS, self._burst_left)
            slots = self.manager.allocate(count)
            if slots is None:
                time.sleep(0.001)  # offloads have everything pinned
                return
            hashes = b"".join(next(self._burst_names).to_bytes(HASH_BYTES, "big") for _ in range(count))
            self._rows[slots] = rows_of(hashes)
            self.manager.unpin(self.manager.create(NAMESPACE.id, NO_PARENT, 0, hashes, slots))
            self._burst_left -= count
            if not self._burst_left:
                say(event="done", op="burst", applied=self.manager.applied())
                return


def say(**fields: Any) -> None:
    """One line to whoever started us."""
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    sys.stdout.flush()


def _listen(commands: queue.SimpleQueue[bytes | None]) -> None:
    """Lines as they come, then None. Reads the descriptor: a thread inside sys.stdin aborts the process at its end."""
    rest = b""
    while piece := os.read(0, 1 << 16):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            commands.put(line)
    commands.put(None)


def main() -> int:
    """Serve until told to stop. Returns 2 with one sentence on standard error when it cannot start."""
    configure_logs()
    flags = dict(pair.split("=", 1) for pair in sys.argv[3:])
    try:
        worker = Worker(int(sys.argv[1]), float(sys.argv[2]), flags)
    except KvbmError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    worker.run(commands)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
