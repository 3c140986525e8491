"""Instances of a catalog's tests: a ledger that publishes what it decides, without journal and pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvbm.core.events import EvictReason, MigrateCause, PoolStated, StopReason
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Reach, Tier, pack_slots
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from tests.nats_fixture import WAIT_S, patient

SPACE = Namespace(model="m", block_tokens=4)
POOL = "s3://kvbm/blocks"
POOLS = (
    PoolStated(Tier.HBM, 64, 1024),
    PoolStated(Tier.HOST, 64, 1024),
    PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, POOL),
)
HASHES = sequence_hashes(list(range(40)), 4, SPACE.root())


class LedgerInstance:
    """One instance. It says nothing but what it is told to."""

    def __init__(
        self,
        server: str,
        within: str,
        name: str,
        epoch: int = 1,
        space: Namespace = SPACE,
        more: Sequence[Namespace] = (),
    ) -> None:
        """Args: space, more: what it declares."""
        self.server, self.cluster, self.name, self.epoch = server, within, InstanceId(name), Epoch(epoch)
        self.ledger = Ledger(POOLS)
        self.ledger.start(self.epoch, [space, *more], ["rack-1", name], "test", "0")

    def create(self, end: int) -> None:
        """The first blocks of the prompt, in HBM."""
        allocation = self.ledger.allocate(Tier.HBM, end)
        assert allocation is not None
        self.ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, HASHES[: 16 * end], allocation.slots)

    def fill(self) -> None:
        """Blocks 0 and 1 in HBM, and a claim on eight."""
        self.create(8)
        copy = self.ledger.begin_copy(SPACE.id, Tier.HBM, Tier.OBJECT, HASHES[: 16 * 8])
        assert copy is not None
        self.ledger.end_copy(copy, [True] * 8, MigrateCause.OFFLOAD)
        self.ledger.unpin(Tier.HBM, pack_slots(range(8)))
        self.ledger.evict(Tier.HBM, HASHES[32:], EvictReason.CAPACITY)

    def snapshot(self) -> None:
        """State again what it holds."""
        self.ledger.begin_snapshot()
        while self.ledger.step_snapshot():
            pass

    def stop(self) -> None:
        """Stop cleanly, and say so."""
        self.ledger.stop(StopReason.SHUTDOWN)
        self.publish()

    def publish(self) -> None:
        """Send what was not sent yet."""
        frames = [frame.data for frame in self.ledger.take_frames(self.name, time.time_ns())]

        async def send(stream: NatsStream) -> None:
            for data in frames:
                await stream.publish(self.cluster, self.name, data)

        self._run(send)

    def beat(self, told: Sequence[Namespace] = (), trouble: str = "") -> None:
        """One sign of life, which tells what namespaces are."""
        heartbeat = Heartbeat(
            instance=self.name,
            cluster=self.cluster,
            epoch=self.epoch,
            published=self.ledger.applied,
            wall_time_ns=time.time_ns(),
            told=tuple(one.canonical() for one in told),
            trouble=trouble,
        )
        self._run(lambda stream: stream.send_pulse(heartbeat))

    def _run(self, work: Callable[[NatsStream], Awaitable[Any]]) -> None:
        async def connected() -> None:
            stream = patient(await NatsStream.connect(self.server, WAIT_S))
            try:
                await work(stream)
            finally:
                await stream.close()

        asyncio.run(connected())
