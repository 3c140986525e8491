"""`kvbm bench ledger`: the whole life of a block, as an engine's scheduler step asks for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvbm.assembly import NATIVE_LEDGER
from kvbm.bench.measure import Row, Sample, row_of, timed
from kvbm.core.backend import LedgerProtocol
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, SequenceHash, Tier

_NAMESPACE = Namespace(model="bench", block_tokens=16)
_LIVES = 2048  # runs in one timed piece of work


class LedgerPool:
    """A full HBM pool: every allocation evicts. Give `event_bytes` of waiting events room."""

    def __init__(
        self, eviction: str, slots: int, run_blocks: int, rng: np.random.Generator, event_bytes: int = 64 << 20
    ) -> None:
        self.ledger: LedgerProtocol = NATIVE_LEDGER([PoolStated(Tier.HBM, slots, 1 << 20)], eviction, event_bytes, ())
        self.ledger.start(Epoch(1), [_NAMESPACE])
        self._run_blocks, self._rng = run_blocks, rng
        self._recent: list[bytes] = []
        for hashes in self._fresh(slots // run_blocks):
            self._live(hashes[:0], hashes)
        self.drain()

    def _fresh(self, runs: int) -> list[bytes]:
        run_bytes = self._run_blocks * HASH_BYTES
        data = self._rng.bytes(runs * run_bytes)
        return [data[at : at + run_bytes] for at in range(0, len(data), run_bytes)]

    def _live(self, matched: bytes, created: bytes) -> None:
        ledger = self.ledger
        found = ledger.match(matched, True)
        allocation = ledger.allocate(Tier.HBM, self._run_blocks)
        assert allocation is not None
        slots = ledger.create(_NAMESPACE.id, Tier.HBM, NO_PARENT, 0, created, allocation.slots)
        ledger.unpin(Tier.HBM, found.slots + slots)

    def lives(self) -> tuple[Callable[[], None], int]:
        """A piece of work: each life matches and pins a run created lately, then allocates, creates and unpins
        another.
        """
        created = self._fresh(_LIVES)
        matched = (self._recent or created)[-_LIVES:]
        pairs = list(zip(matched, created, strict=True))
        self._recent = created
        ledger, space, count, hbm = self.ledger, _NAMESPACE.id, self._run_blocks, Tier.HBM
        parent = SequenceHash(NO_PARENT)

        def work() -> None:
            for old, new in pairs:
                found = ledger.match(old, True)
                allocation = ledger.allocate(hbm, count)
                slots = ledger.create(space, hbm, parent, 0, new, allocation.slots)  # type: ignore[union-attr]
                ledger.unpin(hbm, found.slots + slots)

        return work, _LIVES * self._run_blocks

    def drain(self) -> None:
        """Take the frames, as the writer's thread does."""
        self.ledger.take_frames(InstanceId("bench"), 0)


def bench_ledger(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """match (pinned), allocate (evicting), create, unpin: four calls, in runs of 16 and of 1."""
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for eviction in ("lru", "s3fifo"):
        for run_blocks in (16, 1):
            pool = LedgerPool(eviction, 65_536, run_blocks, np.random.default_rng(seed))
            values: list[float] = []
            taken: list[Sample] = []
            drained: list[float] = []
            for number in range(4 * samples + 2):
                work, blocks = pool.lives()
                sample = timed(work)
                drain = timed(pool.drain)
                if number > 1:
                    values.append(sample.wall_s / blocks * 1e9)
                    taken.append(sample)
                    drained.append(2 * blocks / drain.wall_s / 1e6)  # each was created, and one evicted for it
            what = f"life of a block, {eviction}, 65,536 slots, runs of {run_blocks}, four calls"
            rows.append(row_of(what, "ns/block", values, taken))
            if eviction == "lru" and run_blocks == 16:
                numbers["ledger_ns_per_block_run16"] = rows[-1].value
                rows.append(row_of("cut and encode what it recorded (not in the life)", "M blocks/s", drained))
    return rows, numbers
