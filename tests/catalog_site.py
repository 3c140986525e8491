"""Instances that publish and a catalog that follows them, for tests over real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.core.answers import PositionWanted
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.events import MigrateCause, PoolStated
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Reach, SequenceHash, Tier
from kvbm.locate.http import CatalogClient
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from tests.nats_fixture import WAIT_S, patient

SPACE = Namespace(model="m", block_tokens=4)
OTHER = Namespace(model="m", block_tokens=4, tenant="acme")
POOLS = (
    PoolStated(Tier.HBM, 64, 1024),
    PoolStated(Tier.HOST, 64, 1024),
    PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "s3://kvbm/blocks"),
)
TOKENS = list(range(40))
HASHES = sequence_hashes(TOKENS, 4, SPACE.root())


class Instance:
    """A ledger that publishes."""

    def __init__(self, server: str, within: str, name: str, epoch: int = 1) -> None:
        self.server, self.cluster, self.name, self.epoch = server, within, InstanceId(name), Epoch(epoch)
        self.ledger = Ledger(POOLS)
        self.ledger.start(self.epoch, [SPACE], ["rack-1", name], "test", "0")

    def create(self, first: int, end: int) -> None:
        allocation = self.ledger.allocate(Tier.HBM, end - first)
        assert allocation is not None
        parent = SequenceHash(HASHES[16 * (first - 1) : 16 * first]) if first else NO_PARENT
        self.ledger.create(SPACE.id, Tier.HBM, parent, first, HASHES[16 * first : 16 * end], allocation.slots)

    def copy(self, target: Tier, first: int, end: int) -> None:
        copy = self.ledger.begin_copy(SPACE.id, Tier.HBM, target, HASHES[16 * first : 16 * end])
        assert copy is not None
        self.ledger.end_copy(copy, [True] * (end - first), MigrateCause.OFFLOAD)

    def publish(self, lose: bool = False) -> PositionWanted:
        """Send what was not sent yet; gives the position it reaches."""
        frames = [frame.data for frame in self.ledger.take_frames(self.name, time.time_ns())]
        if not lose:
            self.run(lambda stream: self._send(stream, frames))
        return PositionWanted(instance=self.name, epoch=self.epoch, offset=self.ledger.applied)

    async def _send(self, stream: NatsStream, frames: list[bytes]) -> None:
        for data in frames:
            await stream.publish(self.cluster, self.name, data)

    def beat(self, queued_tokens: int = 0, age_s: float = 0.0, **more: Any) -> None:
        heartbeat = Heartbeat(
            instance=self.name,
            cluster=self.cluster,
            epoch=self.epoch,
            published=self.ledger.applied,
            wall_time_ns=time.time_ns() - int(age_s * 1e9),
            queued_tokens=queued_tokens,
            running_requests=3,
            free_slots={Tier.HBM: 7},
            **more,
        )
        self.run(lambda stream: stream.send_pulse(heartbeat))

    def run(self, work: Callable[[NatsStream], Any]) -> None:
        async def connected() -> None:
            stream = patient(await NatsStream.connect(self.server, WAIT_S))
            try:
                await work(stream)
            finally:
                await stream.close()

        asyncio.run(connected())


class Running(NamedTuple):
    """A ready catalog, how to ask it, and how to make another like it."""

    settings: ServiceSettings
    client: CatalogClient

    def instance(self, name: str, epoch: int = 1) -> Instance:
        return Instance(self.settings.nats_url, str(self.settings.cluster), name, epoch)


def run_catalog(server: str, name: str, database: str, **more: Any) -> Iterator[Running]:
    settings = ServiceSettings(
        nats_url=server,
        database_url=database,
        cluster=name,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        tenant_secrets={"acme": "secret"},
        **{"connect_s": WAIT_S, **more},
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        client = CatalogClient(thread.url, timeout_s=WAIT_S)
        client.wait_ready(WAIT_S)
        yield Running(settings, client)
        client.close()


def is_forgotten(client: CatalogClient, instance: Instance) -> bool:
    """Have an instance forgotten; whether it is."""
    try:
        client.forget(instance.name)
    except CatalogRefusedError:
        return False
    return True
