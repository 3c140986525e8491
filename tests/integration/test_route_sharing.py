"""Two catalogs of one cluster, on a real nats-server: what one has routed, the other counts as load."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.routing.router import RoutingTask
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.core.ids import InstanceId
from kvbm.streams.nats.stream import NatsStream
from tests.catalog_metrics import metrics_of
from tests.eventually import eventually_async
from tests.held_time import HeldTime, hold_catalogs
from tests.nats_fixture import WAIT_S, cluster, nats_url, patient  # noqa: F401
from tests.snapshot_instances import SPACE, Instance

INSTANCES = 4
PROMPTS = 40
BLOCKS = 64
SEED = 7


class Site:
    """Catalogs and instances of one cluster."""

    def __init__(self, url: str, within: str, folder: Path) -> None:
        self._url, self._within, self._folder = url, within, folder
        self.opened = contextlib.AsyncExitStack()
        self._dice = random.Random(SEED)
        self.stream: NatsStream

    async def __aenter__(self) -> Site:
        self.stream = patient(await NatsStream.connect(self._url, WAIT_S))
        self.opened.push_async_callback(self.stream.close)
        for number in range(INSTANCES):
            one = Instance(self.stream, self._within, f"i-{number}")
            await one.snapshot()
            await self.opened.enter_async_context(one.alive(1.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.opened.aclose()

    @contextlib.asynccontextmanager
    async def catalog(self, name: str) -> AsyncIterator[CatalogService]:
        settings = ServiceSettings(
            nats_url=self._url,
            database_url=f"sqlite+aiosqlite:///{self._folder / name}.db",
            cluster=self._within,
        )
        service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        try:
            await eventually_async(
                lambda: service.is_ready and len(service.heartbeats.liveness.instances()) == INSTANCES,
                "it does not hear all",
            )
            yield service
        finally:
            await service.close()

    def task(self, hashes: bytes = b"") -> RoutingTask:
        hashes = hashes or self._dice.randbytes(BLOCKS * 16)
        return RoutingTask(
            SPACE.id, hashes, len(hashes) // 16 * SPACE.block_tokens, SPACE.block_tokens, caller="router"
        )


@pytest.fixture(autouse=True)
def held_time(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    """What was routed fades in it, and who is silent is gone in it."""
    return hold_catalogs(monkeypatch)


async def both_hear(one: CatalogService, other: CatalogService, held_time: HeldTime) -> None:
    await eventually_async(
        lambda: min(one.heartbeats.peer_until_s, other.heartbeats.peer_until_s) > held_time.monotonic(),
        "they do not hear each other's pulses",
    )


def chosen(catalog: CatalogService, task: RoutingTask) -> str:
    return catalog.queries.route(task, SPACE).best[0].instance


def spread(chosen_ones: list[str]) -> list[int]:
    return sorted(Counter(chosen_ones).values())


def test_two_catalogs_spread_prompts_as_one_does(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    held_time: HeldTime,
) -> None:
    async def work() -> None:
        async with Site(nats_url, cluster, tmp_path) as site, site.catalog("a") as a:
            with held_time.held():
                alone = spread([chosen(a, site.task()) for _ in range(PROMPTS)])
            assert metrics_of(a).routes_shared == 0  # there is nobody to tell
        async with Site(nats_url, f"{cluster}-2", tmp_path) as site, site.catalog("c") as c, site.catalog("d") as d:
            site.opened.enter_context(held_time.held())
            await both_hear(c, d, held_time)
            together = []
            for number in range(PROMPTS):
                asked, other = (c, d) if number % 2 else (d, c)
                before = other.queries.shared.received
                together.append(chosen(asked, site.task()))
                await eventually_async(
                    lambda other=other, before=before: other.queries.shared.received > before,  # type: ignore[misc]
                    "the other has not heard of the route",
                )
            even = PROMPTS // INSTANCES
            assert all(abs(count - even) <= 1 for count in spread(together) + alone)
            assert len(alone) == len(set(together)) == INSTANCES
            numbers = metrics_of(c), metrics_of(d)
            assert [one.routes_shared for one in numbers] == [PROMPTS // 2] * 2
            assert [one.routes_received for one in numbers] == [PROMPTS // 2] * 2
            assert [one.routes_refused for one in numbers] == [0, 0]

    asyncio.run(work())


def test_a_prompt_follows_its_prefix_to_where_the_other_catalog_has_sent_it(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    held_time: HeldTime,
) -> None:
    async def work() -> None:
        async with Site(nats_url, cluster, tmp_path) as site, site.catalog("a") as a, site.catalog("b") as b:
            site.opened.enter_context(held_time.held())
            await both_hear(a, b, held_time)
            task = site.task()
            first = a.queries.route(task, SPACE).best[0]
            await eventually_async(lambda: b.queries.shared.received)
            again = b.queries.route(task, SPACE).best
            found = {one.instance: one.depth for one in again}
            assert found == dict.fromkeys(found, 0) | {first.instance: BLOCKS}
            others = b.queries.route(task._replace(caller="another"), SPACE).best
            assert {one.depth for one in others} == {0}  # what was routed for one caller counts for no other

    asyncio.run(work())


def test_a_catalog_that_dies_changes_nothing(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    held_time: HeldTime,
) -> None:
    async def work() -> None:
        async with Site(nats_url, cluster, tmp_path) as site, site.catalog("a") as a:
            hold = site.opened.enter_context(held_time.held())
            async with site.catalog("b") as b:
                await both_hear(a, b, held_time)
                routed = [chosen(a, site.task())]
                await eventually_async(lambda: b.queries.shared.received)
            routed.append(chosen(a, site.task()))  # b is gone, and a does not know it yet
            hold.pass_on(0.0)

            def is_gone() -> bool:
                hold.pass_on(0.1)
                return a.heartbeats.peer_until_s < held_time.monotonic()

            await eventually_async(is_gone, "b still counts as there")
            told = metrics_of(a).routes_shared
            together = spread(routed + [chosen(a, site.task()) for _ in range(PROMPTS)])
            assert len(together) == INSTANCES and together[-1] - together[0] <= 1
            assert metrics_of(a).routes_shared == told and not a.queries.shared.is_waiting.is_set()
            assert a.failure is None and not a.degraded

    asyncio.run(work())


ROUTE = ("router", False, "i-0", 1000, 1000, SPACE.id, 0, 1, b"h" * 16, 0.0)


@pytest.mark.parametrize(
    ("sender", "data"),
    [
        ("_catalog-x", b"\xc1"),
        ("_catalog-x", msgspec.msgpack.encode([2, [ROUTE]])),
        ("_catalog-x", b"\x00" * 1_040_000),
        ("i-0", msgspec.msgpack.encode([1, [ROUTE]])),  # an instance tells no routes
        ("_catalog-x", msgspec.msgpack.encode([1, [("router", False, "nobody", *ROUTE[3:])]])),
        ("_catalog-x", msgspec.msgpack.encode([1, [(*ROUTE[:8], b"h" * 15, 0.0)]])),
    ],
    ids=["no MessagePack", "another version", "far too long", "an instance's", "of nobody", "half a hash"],
)
def test_what_is_no_route_of_a_catalog_is_refused_and_counted(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    sender: str,
    data: bytes,
) -> None:
    async def work() -> None:
        async with Site(nats_url, cluster, tmp_path) as site, site.catalog("a") as a:
            before = a.queries.route(site.task(b"h" * 16), SPACE).best

            async def refused() -> bool:
                await site.stream.send_routes(cluster, InstanceId(sender), data)
                return bool(metrics_of(a).routes_refused)

            await eventually_async(refused, "it is not refused")
            assert metrics_of(a).routes_received == 0 and a.failure is None
            after = a.queries.route(site.task(b"h" * 16)._replace(caller="new"), SPACE).best
            assert {one.instance for one in after} == {one.instance for one in before}
            assert {one.depth for one in after} == {0}

    asyncio.run(work())
