"""What an instance's key draws by heartbeats and frames: no prompt of a tenant that it does not name, and no sight of
it.

The instance that lies has an account of its own on a real server, and sends on its own subjects, each message with
other fields forged.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.config import load_settings
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, NamespaceId, Offset, Tier
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.credentials import Credentials, keep_seed
from kvbm.streams.nats.permissions import ServerUser, catalog_inbox, instance_inbox, server_config
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually

WAIT_S = 120.0
LIAR = InstanceId("liar")
ACME = Namespace(model="m", revision="r", block_tokens=16, tenant="acme")
BETA = Namespace(model="m", revision="r", block_tokens=16, tenant="beta")
FORGED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the quickest of all": {
        "prefill_tokens_per_s": 1e12,
        "queue_tokens_per_s": 1e12,
        "queued_tokens": 0,
        "running_requests": 0,
    },
    "numbers below nothing": {"queued_tokens": -(1 << 40), "running_requests": -5, "prefill_tokens_per_s": -1.0},
    "much room": {"free_slots": dict.fromkeys(Tier, 1 << 40)},
    "much that was decided": {"published": Offset(1 << 40), "applied": Offset(1 << 50)},
    "a namespace of nobody": {"namespaces": (NamespaceId(secrets.token_bytes(16)),)},
    "fields that are none": {"told": (b"", b"{}", b"\xff" * 100, ACME.canonical()[:-1], b" " + ACME.canonical())},
    "another tenant's fields": {
        "told": (Namespace(model="m", revision="r", block_tokens=16, tenant="liar's").canonical(),)
    },
    "a place to read from": {"lends": {"tcp": "127.0.0.1:1", "zone": "z"}},
    "what it has put": {"put_bytes": {ACME.id: (1 << 40, 1 << 40)}},
    "how large objects are": {"object_blocks": 1 << 40},
    "another run": {"run": "f" * 16},
    "words": {"trouble": "x" * 10_000},
    "a later epoch": {"epoch": Epoch(1 << 40)},
}


class World:
    """A server with accounts, a catalog with callers, an instance of acme's, and one that has a key and no manager."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        seeds = {name: keep_seed(folder / "keys" / f"{name}.nk") for name in ("a", LIAR, "catalog")}
        users = [ServerUser(seeds["a"], "a"), ServerUser(seeds[LIAR], LIAR), ServerUser(seeds["catalog"])]
        self.server = EmbeddedServer.start(folder / "nats", timeout_s=WAIT_S, settings=server_config("home", users))
        opened.callback(self.server.stop)
        self.folder = folder
        access = folder / "access.toml"
        tokens = {
            name: add_token(access, NewToken(name, "router", tenants), time.time())
            for name, tenants in (("acme", ["acme"]), ("beta", ["beta"]), ("all", None))
        }
        service = ServiceSettings(
            nats_url=self.server.url,
            credentials=self.credentials("catalog", catalog_inbox("home")),
            database_url=f"sqlite+aiosqlite:///{folder / 'catalog.db'}",
            cluster="home",
            listen="127.0.0.1:0",
            connect_s=WAIT_S,
            liveness_s=10 * WAIT_S,
            whole_wait_s=0.2,
            access=AccessOptions(file=str(access)),
            companions=(("look", self._look),),
        )
        self.service: CatalogService | None = None
        catalog = CatalogThread(service, NATIVE, NATIVE_INDEX).start()
        opened.callback(catalog.stop)
        self.clients: dict[str, CatalogClient] = {}
        for name, token in tokens.items():
            path = folder / f"{name}.token"
            path.write_text(token)
            client = CatalogClient(catalog.url, credentials=CatalogCredentials(token=str(path)), timeout_s=WAIT_S)
            self.clients[name] = opened.enter_context(closing(client))
        settings = load_settings(
            flags={
                "instance.data_dir": str(folder),
                "instance.cluster": "home",
                "instance.id": "a",
                "nats.url": self.server.url,
                "nats.timeout_s": WAIT_S,
                "nats.nkey_seed": str(folder / "keys" / "a.nk"),
                "nats.heartbeat_s": 0.2,
                "pools.hbm.slots": 32,
                "pools.hbm.device": "memory",
            }
        )
        opened.enter_context(open_manager(settings, [ACME], 4096))
        eventually(lambda: self.seen("all") == {"a"}, "the instance is not there")
        eventually(lambda: self.route("acme", ACME) == "a", "it serves nobody")

    async def _look(self, service: CatalogService) -> None:
        self.service = service

    def credentials(self, name: str, inbox: str) -> Credentials:
        return Credentials(nkey_seed=str(self.folder / "keys" / f"{name}.nk"), inbox=inbox)

    def lie(self, **forged: Any) -> None:
        """Send a heartbeat with these fields, and wait until the catalog has heard it."""
        said = {"epoch": Epoch(1), "published": Offset(0), "wall_time_ns": time.time_ns()} | forged
        heartbeat = Heartbeat(instance=LIAR, cluster="home", **said)

        async def send(stream: NatsStream) -> None:
            await stream.send_pulse(heartbeat)
            await stream.last_pulse("home", LIAR, WAIT_S)  # so it is sent

        assert self.service is not None
        liveness = self.service.heartbeats.liveness
        refused = liveness.double_ids
        asyncio.run(self._as_liar(send))

        def is_heard() -> bool:
            last = liveness.last(LIAR)
            is_believed = last is not None and last.heartbeat.wall_time_ns == heartbeat.wall_time_ns
            return is_believed or liveness.double_ids > refused

        eventually(is_heard, "the catalog has not heard it")

    async def _as_liar(self, work: Callable[[NatsStream], Awaitable[None]]) -> None:
        credentials = self.credentials(LIAR, instance_inbox("home", LIAR))
        stream = await NatsStream.connect(self.server.url, WAIT_S, credentials=credentials)
        try:
            await work(stream)
        finally:
            await stream.close()

    def publish(self, spaces: Sequence[Namespace], held: Namespace, hashes: bytes) -> None:
        """Begin an epoch that names these namespaces, and say that blocks of another are held; wait until the catalog
        has read it.
        """
        ledger = Ledger((PoolStated(Tier.HBM, 64, 1024),))
        ledger.start(Epoch(1), spaces, [], "engine", "0")
        taken = ledger.allocate(Tier.HBM, len(hashes) // HASH_BYTES)
        assert taken is not None
        ledger.create(held.id, Tier.HBM, NO_PARENT, 0, hashes, taken.slots)

        async def send(stream: NatsStream) -> None:
            for frame in ledger.take_frames(LIAR, time.time_ns()):
                await stream.publish("home", LIAR, frame.data)

        asyncio.run(self._as_liar(send))
        service = self.service
        assert service is not None
        eventually(lambda: service.sequencer.position(LIAR) == (1, ledger.applied), "the catalog has not read it")

    def seen(self, caller: str) -> set[str]:
        return {one.instance for one in self.clients[caller].instances()}

    def route(self, caller: str, space: Namespace, hashes: bytes = b"") -> str:
        """Where a prompt of a namespace goes, by default one that nobody has a block of; "" when nobody serves it."""
        hashes = hashes or secrets.token_bytes(4 * HASH_BYTES)
        try:
            return str(self.clients[caller].route(space, hashes, len(hashes)).instance)
        except CatalogRefusedError as error:
            if error.code != "no_instance":
                raise
            return ""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as opened:
        yield World(tmp_path, opened)


def test_heartbeats_that_name_no_namespace_of_a_tenant_draw_none_of_its_prompts_and_are_not_seen_by_it(
    world: World,
) -> None:
    for what, forged in FORGED.items():
        world.lie(**forged)
        assert world.seen("all") == {"a", LIAR}, what
        assert world.seen("acme") == {"a"}, what
        assert world.seen("beta") == set(), what
        assert [world.route("acme", ACME) for _ in range(12)] == ["a"] * 12, what
        assert world.route("beta", BETA) == "", what


def test_a_start_that_names_no_namespace_of_a_tenant_draws_none_of_its_prompts_also_with_their_blocks(
    world: World,
) -> None:
    hashes = secrets.token_bytes(8 * HASH_BYTES)
    world.publish([], ACME, hashes)
    world.lie()
    for caller, space, goes in (("acme", ACME, "a"), ("beta", BETA, "")):
        assert [world.route(caller, space, hashes) for _ in range(12)] == [goes] * 12
        assert LIAR not in world.seen(caller)


def test_heartbeats_that_name_a_tenants_namespace_are_seen_by_that_tenant_and_by_no_other(world: World) -> None:
    """What a leaked key of an instance draws: docs/threats.md."""
    world.lie(told=(BETA.canonical(),))
    assert (world.route("beta", BETA), world.seen("beta")) == (LIAR, {LIAR})
    assert world.seen("acme") == {"a"}
    assert [world.route("acme", ACME) for _ in range(12)] == ["a"] * 12
