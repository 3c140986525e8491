"""Instances of a catalog's tests: a native ledger that publishes, sends heartbeats and serves the snapshots it is asked
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from kvbm import _native
from kvbm.catalog.service import CatalogService
from kvbm.core.events import MigrateCause, PoolStated
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Offset, Reach, Tier
from kvbm.streams.base import Heartbeat, Position

SPACE = Namespace(model="m", block_tokens=4)
POOLS = (PoolStated(Tier.HBM, 100_000, 1024), PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "pool"))


def block_hashes(first: int, end: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in range(first, end))


class Instance:
    """A native ledger on a stream, that serves snapshots and sends heartbeats while it runs."""

    def __init__(self, stream: Any, within: str, name: str, epoch: int = 1) -> None:
        self.stream, self.cluster, self.name, self.epoch = stream, within, InstanceId(name), Epoch(epoch)
        self.ledger = _native.Ledger(POOLS)
        self.ledger.start(self.epoch, [SPACE], ["rack-1", name], "test", "0")
        self.snapshots = 0
        self.published = Offset(0)

    def create(self, first: int, end: int) -> None:
        for at in range(first, end, 1000):
            hashes = block_hashes(at, min(end, at + 1000))
            allocation = self.ledger.allocate(Tier.HBM, len(hashes) // 16)
            assert allocation is not None
            self.ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)

    def offload(self, first: int, end: int) -> None:
        copy = self.ledger.begin_copy(SPACE.id, Tier.HBM, Tier.OBJECT, block_hashes(first, end))
        assert copy is not None
        self.ledger.end_copy(copy, [True] * (end - first), MigrateCause.OFFLOAD)

    async def publish(self, lose: bool = False) -> Position:
        for frame in self.ledger.take_frames(self.name, time.time_ns()):
            if not lose:
                await self.stream.publish(self.cluster, self.name, frame.data)
        self.published = self.ledger.applied
        return Position(self.epoch, self.published)

    async def beat(self, applied: int = 0) -> None:
        """A sign of life; with an offset it says how far it has decided."""
        await self.stream.send_pulse(
            Heartbeat(
                instance=self.name,
                cluster=self.cluster,
                epoch=self.epoch,
                published=self.published,
                applied=Offset(applied),
                wall_time_ns=time.time_ns(),
                run="r1",
                trouble="journal full: 3 of 4 bytes",
            )
        )

    async def snapshot(self) -> None:
        self.ledger.begin_snapshot()
        while self.ledger.step_snapshot():
            pass
        self.snapshots += 1
        await self.publish()

    @contextlib.asynccontextmanager
    async def alive(self, beat_s: float = 0.1) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                await self.beat()
                await asyncio.sleep(beat_s)

        async def serve() -> None:
            async for _ in self.stream.watch_snapshot_asks(self.cluster, self.name):
                await self.snapshot()

        tasks = [asyncio.create_task(beat()), asyncio.create_task(serve())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def is_whole_in(self, catalog: CatalogService) -> bool:
        view = catalog.index.view(self.name)
        is_there = catalog.sequencer.position(self.name) == (self.epoch, self.ledger.applied)
        return is_there and view is not None and not view.suspect and view.digest == self.ledger.digest
