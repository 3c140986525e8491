"""An erasure, proven by searching every file, table, object, message and slot for the tenant's name, namespaces, hashes
and bytes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD, NATIVE_INDEX, open_manager
from kvbm.assembly.erasure import catalog_companion, run_erase
from kvbm.assembly.history import history_options
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql.rows import ClaimRun, NamespaceRow, StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.config import Settings, load_settings
from kvbm.core.errors import ErasureError, StreamError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, SequenceHash, Tier, split_hashes
from kvbm.core.layout import pool_name
from kvbm.core.names import kept_name
from kvbm.erasure import report
from kvbm.erasure import stream as erasures
from kvbm.erasure.command import EraseOptions
from kvbm.erasure.record import decoded
from kvbm.erasure.report import CATALOG, INSTANCE, Answer, ErasedPlace, Line, Progress, answers_of, encoded
from kvbm.erasure.sql import erase_rows
from kvbm.erasure.stream import ErasureLog, record_subject
from kvbm.locate.http import CatalogClient
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects
from kvbm.pools.stores.base import Put
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.tenant_keys import add_key, keys_of_file
from kvbm.replay.opening import open_source
from kvbm.replay.source import SourceError
from kvbm.replay.sql import HistoryDatabase
from kvbm.streams.nats.api import message_at, request
from kvbm.streams.nats.connection import NatsConnection
from kvbm.streams.nats.credentials import Credentials, keep_seed
from kvbm.streams.nats.key_folder import KeyChange, print_accounts
from kvbm.streams.nats.permissions import Role, ServerUser, catalog_inbox, instance_inbox, server_config
from kvbm.streams.nats.setup import ERASURES, STREAM, STREAMS
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually
from tests.janitors import Skipping
from tests.object_pools import memory_objects
from tests.object_stores import redis_place
from tests.readable import verify
from tests.servers import free_port

BLOCK_BYTES = 4096
K = 2
DEPTH = 4
WAIT_S = 120.0
AGE_S = 3600  # of events on the stream; a test makes it shorter instead of waiting
VICTIM = Namespace(model="erasure", revision="r1", block_tokens=16, tenant="initech-payroll")
OTHER = Namespace(model="erasure", revision="r1", block_tokens=16, tenant="globex")


def hashes_of(space: Namespace, prompt: int) -> bytes:
    return b"".join(
        hashlib.sha256(f"{space.tenant}/{prompt}/{at}".encode()).digest()[:HASH_BYTES] for at in range(DEPTH)
    )


def rows_of(hashes: bytes) -> np.ndarray:
    """The bytes a block must have: 4 KiB that nothing else has."""
    rows = [hashlib.shake_256(block).digest(BLOCK_BYTES) for block in split_hashes(hashes)]
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, BLOCK_BYTES)


def serve(manager: Manager, space: Namespace, prompt: int) -> list[int]:
    """Serve a prompt as an engine does; gives its pinned slots."""
    hashes = hashes_of(space, prompt)
    prefix = manager.acquire(space.id, hashes)
    at = prefix.depth * HASH_BYTES
    slots = list(prefix.slots)
    check_bytes(manager, space, hashes[:at], slots)
    if prefix.depth < DEPTH:
        fresh: list[list[int]] = []

        def is_allocated() -> bool:
            found = manager.allocate(DEPTH - prefix.depth)
            fresh.extend([found] if found is not None else [])
            return found is not None

        eventually(is_allocated, "HBM stays short", state=manager.stats)
        rows = rows_of(hashes[at:])
        proof = Proof(space.id, Epoch(1), hashes[at:], NATIVE.checksums(rows))
        manager.pools.slots[Tier.HBM].write(fresh[0], rows, proof)
        parent = SequenceHash(hashes[at - HASH_BYTES : at]) if at else NO_PARENT
        slots += manager.create(space.id, parent, prefix.depth, hashes[at:], fresh[0])
    return slots


def check_bytes(manager: Manager, space: Namespace, hashes: bytes, slots: Sequence[int]) -> None:
    if slots:
        rows = np.empty((len(slots), BLOCK_BYTES), dtype=np.uint8)
        manager.pools.slots[Tier.HBM].read(slots, space.id, hashes, rows)
        assert np.array_equal(rows, rows_of(hashes))


class Needles:
    """What must not be found: names, ids and hashes as bytes, hex and base64, and pieces of blocks."""

    def __init__(self, space: Namespace, prompts: Iterable[int]) -> None:
        hashes = [block for prompt in prompts for block in split_hashes(hashes_of(space, prompt))]
        self.words = {space.tenant.encode(): "the tenant's name"}
        for value, what in [(bytes(space.id), "the namespace"), *((bytes(block), "a hash") for block in hashes)]:
            for form in (
                value,
                value.hex().encode(),
                value.hex().upper().encode(),
                base64.b64encode(value)[:21],
                base64.urlsafe_b64encode(value)[:21],
            ):
                self.words[form] = what
        for row in rows_of(b"".join(hashes)):
            data = row.tobytes()
            self.words |= {data[at : at + 24]: "bytes of a block" for at in (0, 1000, BLOCK_BYTES - 24)}

    def in_bytes(self, data: bytes) -> set[str]:
        return {what for word, what in self.words.items() if word in data}

    def in_folder(self, folder: Path) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for path in sorted(folder.rglob("*")):
            with suppress(FileNotFoundError):  # a checkpoint that another has replaced meanwhile
                if path.is_file() and (what := self.in_bytes(path.read_bytes())):
                    found[str(path.relative_to(folder))] = what
        return found


class World:
    """A nats-server, a catalog with SQLite, archive and checkpoints, instances with all tiers, and a store of
    objects.
    """

    def __init__(self, folder: Path, opened: ExitStack, keys: Path | None = None) -> None:
        """With `keys`, objects are sealed and NVME is encrypted."""
        self.folder, self.store, self.keys = folder, MemoryStore(), keys
        self.flags: dict[str, Any] = {}  # further ones of the command
        self._pools: list[BlockObjects] = []
        self.server = EmbeddedServer.start(folder.parent / "nats", timeout_s=WAIT_S)
        opened.callback(self.server.stop)
        asyncio.run(make_stream(self.server.url))
        self.database = folder / "catalog" / "catalog.db"
        self._opened = opened
        self.start_catalog()

    def start_catalog(self, has_history: bool = False) -> None:
        database = f"sqlite+aiosqlite:///{self.database}"
        self.catalog = self.catalog_of(self.folder, database, has_history=has_history)
        self.client = CatalogClient(self.catalog.url, WAIT_S)
        self._opened.callback(self.client.close)
        self.client.wait_ready(WAIT_S)

    def catalog_of(
        self, folder: Path, database: str, has_files: bool = True, has_history: bool = False
    ) -> CatalogThread:
        """A catalog of the cluster, with files in a folder."""
        paths = {f"catalog.{name}": str(folder / name) for name in ("archive", "history")}
        # it tries again for ever; a stream may be gone
        settings = self.settings("catalog", nats__timeout_s=2.0, instance__data_dir=str(folder))
        catalog = CatalogThread(
            ServiceSettings(
                nats_url=self.server.url,
                database_url=database,
                cluster="home",
                listen="127.0.0.1:0",
                store_every_s=0.02,
                connect_s=WAIT_S,
                liveness_s=10 * WAIT_S,
                whole_wait_s=0.2,
                checkpoints=str(folder / "checkpoints") if has_files else "",
                checkpoint_every_s=0.5,
                archive=paths["catalog.archive"] if has_files else "",
                history=history_options(load_settings(flags=paths)) if has_history else None,
                companions=(catalog_companion(settings, self.server.url, Credentials()),),
            ),
            NATIVE,
            NATIVE_INDEX,
        )
        catalog.start()
        self._opened.callback(catalog.stop)
        return catalog

    def settings(self, instance: str, **flags: Any) -> Settings:
        named = {key.replace("__", "."): value for key, value in flags.items()}
        return load_settings(
            flags={
                "instance.data_dir": str(self.folder),
                "instance.cluster": "home",
                "instance.id": instance,
                "pools.hbm.slots": 32,
                "pools.hbm.device": "memory",
                "pools.host.slots": 48,
                "pools.nvme.slots": 64,
                "nats.url": self.server.url,
                "nats.timeout_s": WAIT_S,
                "nats.heartbeat_s": 0.2,
                "snapshots.least_s": 0.3,
                "erasure.poll_s": 0.2,
                "journal.keep_s": 3600.0,
                "journal.segment_bytes": 8192,
                "journal.capacity_bytes": 1 << 20,
                "samples.rate": 1.0,
                "catalog.url": "" if instance == "catalog" else self.client.url,
                "catalog.database": f"sqlite+aiosqlite:///{self.database}",
                "pools.object.timeout_s": WAIT_S,
                "pools.object.look_s": 0.5,
                "gc.grace_s": 3 * WAIT_S,
                "gc.lease_s": WAIT_S,
                "onboard.locate_s": WAIT_S,
                "onboard.wait_s": WAIT_S,
                "pools.object.keys": "" if self.keys is None else str(self.keys),
                **named,
            }
        )

    def instance(self, name: str, spaces: Sequence[Namespace] = (VICTIM, OTHER)) -> Manager:
        sealing = Sealing(keys_of_file(str(self.keys)), K, header_bytes(K)) if self.keys is not None else None
        objects = memory_objects(
            BLOCK_BYTES,
            K,
            self.store,
            namespaces=list(spaces),
            look_s=0.5,
            deadline_s=WAIT_S,
            envelopes=sealing,
            name=pool_name(self.store.name, 0, True) if sealing is not None else "",
        )
        more = {"pools__nvme__folder": str(self.folder / "pod")} if name == "b" else {}
        if self.keys is not None:
            more |= {"pools__nvme__encrypt": True}
        manager = open_manager(self.settings(name, **more), list(spaces), BLOCK_BYTES, object_pool=objects)
        self._opened.callback(manager.close)
        self._pools.append(objects)
        return manager

    def _look(self) -> None:
        """What the grace of the janitor is for: all pools have looked at the tombstones."""
        for objects in self._pools:
            objects.look()

    def erase(self, wait_s: float = 0.0, **options: Any) -> tuple[int, int, list[Line]]:
        """Its exit code, number and table."""
        told: list[tuple[int, Sequence[Line]]] = []
        wanted = EraseOptions(wait_s=wait_s, **options)
        store: Callable[[], MemoryStore] = lambda: self.store  # noqa: E731
        settings, clocks = self.settings("catalog", **self.flags), Skipping(self._look).clocks()
        code = run_erase(settings, wanted, lambda number, lines: told.append((number, lines)), store, clocks)
        return code, told[0][0], list(told[0][1])

    def tables(self) -> bytes:
        """Every row of the database, as words."""
        with sqlite3.connect(self.database) as connection:
            names = [row[0] for row in connection.execute("select name from sqlite_master where type = 'table'")]
            rows = [list(connection.execute(f"select * from {name}")) for name in names]
        return b"".join(
            value if isinstance(value, bytes) else str(value).encode()
            for table in rows
            for row in table
            for value in row
        )

    def messages(self) -> list[bytes]:
        """Every message of every stream."""
        return asyncio.run(all_messages(self.server.url))


async def make_stream(url: str) -> None:
    """The stream of events as an operator may have made it: one that keeps them for less than a day."""
    connection = await NatsConnection.open(url, WAIT_S, Credentials())
    config = STREAMS[STREAM] | {"max_age": AGE_S * 10**9, "duplicate_window": 10**9, "num_replicas": 1}
    await request(connection, f"$JS.API.STREAM.CREATE.{STREAM}", config, dict, WAIT_S)
    await connection.close()


async def let_age(url: str) -> None:
    """What lies on the stream is too old for it from now on."""
    connection = await NatsConnection.open(url, WAIT_S, Credentials())
    config = STREAMS[STREAM] | {"max_age": 10**9, "duplicate_window": 10**9, "num_replicas": 1}
    await request(connection, f"$JS.API.STREAM.UPDATE.{STREAM}", config, dict, WAIT_S)
    await connection.close()


async def all_messages(url: str) -> list[bytes]:
    connection = await NatsConnection.open(url, WAIT_S, Credentials())
    found = []
    try:
        names = json.loads((await connection.ask("$JS.API.STREAM.NAMES", b"", WAIT_S)).data)["streams"]
        for name in names:
            state = json.loads((await connection.ask(f"$JS.API.STREAM.INFO.{name}", b"", WAIT_S)).data)["state"]
            for sequence in range(state["first_seq"], state["last_seq"] + 1):
                asked = json.dumps({"seq": sequence}).encode()
                reply = json.loads((await connection.ask(f"$JS.API.STREAM.MSG.GET.{name}", asked, WAIT_S)).data)
                if message := reply.get("message"):
                    parts = (base64.b64decode(message.get(part, "")) for part in ("data", "hdrs"))
                    found.append(message["subject"].encode() + b" " + b" ".join(parts))
    finally:
        await connection.close()
    return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path) as found:
        yield found


@contextmanager
def opened_world(tmp_path: Path, keys: Path | None = None) -> Iterator[World]:
    with ExitStack() as opened:
        (tmp_path / "data").mkdir()
        yield World(tmp_path / "data", opened, keys)


def memory_of(manager: Manager) -> bytes:
    pools = [manager.pools.slots[tier] for tier in (Tier.HBM, Tier.HOST)]
    return b"".join(pool.memory.tobytes() for pool in pools if pool.memory is not None)


def waits(lines: Sequence[Line]) -> dict[str, str]:
    return {f"{line.who} {line.place}": line.waits for line in lines if line.waits}


def depth(world: World, space: Namespace, prompt: int) -> int:
    answer = world.client.lookup(space, hashes_of(space, prompt))
    return max((pool.depth for pool in answer.pools), default=0)


def test_a_first_message_that_goes_before_it_is_read_is_not_an_empty_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an erasure would be called done while the stream still names the erased."""
    lost = 0

    async def may_be_gone(*asked: Any) -> Any:
        nonlocal lost
        lost -= 1
        return None if lost >= 0 else await message_at(*asked)

    async def work(url: str) -> list[int | None]:
        nonlocal lost
        stream = await NatsStream.connect(url, WAIT_S)
        record = await ErasureLog.open(url, "home", WAIT_S, Credentials(), 1)
        try:
            found = [(await record.events_kept()).first_ns]
            await stream.publish("home", InstanceId("a"), b"an event")
            for goes in (0, 1, 3, 1000):
                lost = goes
                found.append((await record.events_kept()).first_ns)
            return found
        finally:
            await record.close()
            await stream.close()

    monkeypatch.setattr(erasures, "message_at", may_be_gone)
    server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S)
    try:
        empty, *readable, unreadable = asyncio.run(work(server.url))
    finally:
        server.stop()
    assert (empty, unreadable) == (None, 0)
    assert len(readable) == 3 and readable[0] and len(set(readable)) == 1


def wait_in(victim: Needles, folder: Path, place: str) -> None:
    """Wait until a place below a folder has something of the victim."""
    eventually(lambda: place in str(victim.in_folder(folder)), f"{place} below {folder} has nothing")


class Served(NamedTuple):
    """Three instances that have served prompts of both tenants.

    Attributes:
        prompts: of each instance.
    """

    managers: dict[str, Manager]
    prompts: dict[str, list[int]]


def serve_both(world: World, victim: Needles) -> Served:
    """Have instances serve prompts, until each place of theirs and of the catalog has something of the victim."""
    prompts = {"a": [1, 2], "b": [2, 3], "c": [4]}
    managers = {name: world.instance(name) for name in prompts}
    for name, manager in managers.items():
        for prompt in prompts[name]:
            for space in (VICTIM, OTHER):
                manager.unpin(serve(manager, space, prompt))
        assert manager.settle(WAIT_S)
    eventually(lambda: all(depth(world, s, 3) == DEPTH for s in (VICTIM, OTHER)), "the catalog has not all claims")
    checkpoints, archive = world.folder / "checkpoints", world.folder / "archive"
    eventually(lambda: "a hash" in str(victim.in_folder(checkpoints)), "no checkpoint has the blocks")
    eventually(lambda: "a hash" in str(victim.in_folder(archive)), "the archive has not the blocks")
    return Served(managers, prompts)


def check_that_it_is_everywhere(world: World, victim: Needles, managers: Mapping[str, Manager]) -> None:
    """What the search of an erased tenant must be able to find."""
    files = ("nvme.pool", "pod/home.b.pool", ".slots", "journal", "catalog.db", "archive", "checkpoints", "samples")
    for place in files:
        wait_in(victim, world.folder, place)
    assert victim.in_bytes(b"".join(world.messages())) >= {"the tenant's name", "the namespace", "a hash"}
    assert victim.in_bytes(world.tables()) >= {"the tenant's name", "the namespace", "a hash"}
    assert any(str(VICTIM.id.hex()) in name for name in world.store.objects)
    assert all("bytes of a block" in victim.in_bytes(memory_of(manager)) for manager in managers.values())


def check_that_instances_have_nothing(world: World, victim: Needles, managers: Mapping[str, Manager]) -> None:
    assert not any(str(VICTIM.id.hex()) in name for name in world.store.objects)
    for name, manager in managers.items():
        assert not victim.in_folder(world.folder / "instances" / name)
        assert not victim.in_bytes(memory_of(manager))
    assert not victim.in_folder(world.folder / "pod")


def check_that_nothing_is_left(world: World, victim: Needles, managers: Mapping[str, Manager]) -> None:
    assert victim.in_folder(world.folder) == {}
    assert victim.in_bytes(world.tables()) == set()
    assert [message for message in world.messages() if victim.in_bytes(message)] == []
    assert [name for name, body in world.store.objects.items() if victim.in_bytes(name.encode() + bytes(body[0]))] == []
    for manager in managers.values():
        assert not victim.in_bytes(memory_of(manager))


def check_the_archive(world: World, number: int) -> None:
    """It is whole but for what it says an erasure took."""
    archive = verify(open_source(str(world.folder / "archive")), NATIVE, NATIVE_FOLD)
    assert archive.findings == []
    assert any(f"erased by erasure {number}" in note for note in archive.notes), archive.notes


def check_that_others_keep_all(world: World, served: Served) -> None:
    other = Needles(OTHER, range(1, 5))
    assert other.in_bytes(world.tables()) >= {"the tenant's name", "the namespace", "a hash"}
    for name, manager in served.managers.items():
        for prompt in served.prompts[name]:
            assert manager.acquire(OTHER.id, hashes_of(OTHER, prompt)).depth == DEPTH
    assert all(depth(world, OTHER, prompt) == DEPTH for prompt in range(1, 5))


def test_nothing_of_an_erased_tenant_is_left_anywhere_and_the_others_keep_all(world: World) -> None:
    victim = Needles(VICTIM, range(1, 5))
    served = serve_both(world, victim)
    managers = served.managers
    check_that_it_is_everywhere(world, victim, managers)
    managers.pop("c").close()
    pinned = serve(managers["a"], VICTIM, 1)
    code, number, _ = world.erase(tenant=VICTIM.tenant)
    assert code == 1
    eventually(lambda: "a HBM" in waits(world.erase(status=number)[2]), "nobody waits for the request")
    check_bytes(managers["a"], VICTIM, hashes_of(VICTIM, 1), pinned)  # the request goes on with its bytes
    assert managers["a"].match(hashes_of(VICTIM, 1)).depth == 0
    managers["a"].unpin(pinned)
    left = {"c all", "NATS events on the stream"}

    def others_wait() -> bool:
        found = waits(world.erase(status=number)[2])
        return left <= set(found) and all(name in left or name.startswith("catalog:") for name in found)

    eventually(
        others_wait, "a and b are not done", state=lambda: waits(world.erase(status=number)[2]), timeout_s=WAIT_S
    )
    check_that_instances_have_nothing(world, victim, managers)

    # One that was away erases before it serves; its engine does not name the tenant any more.
    managers["c"] = world.instance("c", [OTHER])
    assert set(managers["c"].held(Tier.NVME)) == set(split_hashes(hashes_of(OTHER, 4)))
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) <= {"NATS events on the stream"},
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    asyncio.run(let_age(world.server.url))
    eventually(lambda: world.erase(status=number)[0] == 0, "the stream keeps it", timeout_s=WAIT_S)

    check_that_nothing_is_left(world, victim, managers)
    world.catalog.stop()
    check_the_archive(world, number)
    world.start_catalog()
    check_that_others_keep_all(world, served)


@pytest.mark.nightly
def test_a_history_goes_with_the_archive_and_is_made_anew_of_what_is_left(world: World) -> None:
    world.catalog.stop()
    world.start_catalog(has_history=True)
    manager, victim, history = world.instance("a"), Needles(VICTIM, [1]), world.folder / "history"
    for space in (VICTIM, OTHER):
        manager.unpin(serve(manager, space, 1))
    assert manager.settle(WAIT_S)
    wait_in(victim, world.folder, "history")

    def namespaces() -> set[str]:
        try:
            with HistoryDatabase(history) as opened:
                return {row[0] for row in opened.ask("SELECT DISTINCT namespace FROM history").rows}
        except SourceError:
            return set()  # it is being made

    both = {VICTIM.id.hex(), OTHER.id.hex()}
    eventually(lambda: namespaces() == both, "the history has not the blocks")
    number = world.erase(tenant=VICTIM.tenant)[1]
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) <= {"NATS events on the stream"},
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=2 * WAIT_S,
    )
    eventually(lambda: namespaces() == {OTHER.id.hex()}, "the history has not what is left")
    assert victim.in_folder(history) == {}


def test_the_blocks_of_one_prompt_go_and_the_tenants_other_prompts_stay(world: World, tmp_path: Path) -> None:
    manager = world.instance("a")
    for prompt in (1, 2):
        for space in (VICTIM, OTHER):
            manager.unpin(serve(manager, space, prompt))
    assert manager.settle(WAIT_S)
    eventually(lambda: depth(world, VICTIM, 2) == DEPTH, "the catalog has not all claims")
    hashes = hashes_of(VICTIM, 1)
    gone, stays = Needles(VICTIM, [1]), Needles(VICTIM, [2])
    for needles in (gone, stays):  # of the tenant itself all stays
        needles.words = {word: what for word, what in needles.words.items() if what in ("a hash", "bytes of a block")}
    code, number, _ = world.erase(namespace=VICTIM.id, hashes=hashes)
    assert code == 1
    only_age = {"NATS events on the stream"}
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) <= only_age,
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    assert gone.in_folder(world.folder) == {}
    assert gone.in_bytes(world.tables()) == set()
    assert not any(gone.in_bytes(name.encode() + bytes(body[0])) for name, body in world.store.objects.items())
    assert not gone.in_bytes(memory_of(manager))
    assert {"nvme.pool", "catalog.db"} <= {Path(name).name for name in stays.in_folder(world.folder)}
    for space, prompt in ((VICTIM, 2), (OTHER, 1), (OTHER, 2)):
        assert manager.acquire(space.id, hashes_of(space, prompt)).depth == DEPTH
    assert manager.acquire(VICTIM.id, hashes).depth == 0
    # The tenant uses it anew: that is new, and stays.
    manager.unpin(serve(manager, VICTIM, 1))
    assert manager.settle(WAIT_S)
    eventually(lambda: depth(world, VICTIM, 1) == DEPTH, "new use is not claimed")
    assert manager.match(hashes).depth == DEPTH
    assert world.erase(lift=number)[1] == number
    with pytest.raises(ErasureError, match=r"in force: none"):
        world.erase(status=number)


def serve_two(world: World, manager: Manager) -> None:
    """Two prompts of each of the two tenants, until the catalog has all claims."""
    for prompt in (1, 2):
        for space in (VICTIM, OTHER):
            manager.unpin(serve(manager, space, prompt))
    assert manager.settle(WAIT_S)
    eventually(lambda: all(depth(world, s, 2) == DEPTH for s in (VICTIM, OTHER)), "the catalog has not all claims")


def test_sealed_objects_and_encrypted_blocks_of_an_erased_tenant_go_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    for space in (VICTIM, OTHER):
        add_key(keys, space.tenant, "1")
    folders = {space.tenant: f"/e/{keys_of_file(str(keys)).load()[space.tenant].tag}/" for space in (VICTIM, OTHER)}
    with opened_world(tmp_path, keys) as world:
        manager = world.instance("a")
        serve_two(world, manager)
        victim = Needles(VICTIM, (1, 2))
        assert "bytes of a block" not in str(victim.in_folder(world.folder)), "NVME is not encrypted"
        assert "a hash" in str(victim.in_folder(world.folder / "instances"))
        assert {
            name[: name.index("/e/")] + folder
            for name in world.store.objects
            for folder in folders.values()
            if folder in name
        } == {f"{K}{folder}" for folder in folders.values()}
        code, number, _ = world.erase(tenant=VICTIM.tenant)
        assert code == 1
        only_age = {"NATS events on the stream"}
        eventually(
            lambda: set(waits(world.erase(status=number)[2])) <= only_age,
            "not all are done",
            state=lambda: waits(world.erase(status=number)[2]),
            timeout_s=WAIT_S,
        )
        assert not any(folders[VICTIM.tenant] in name for name in world.store.objects)
        assert any(folders[OTHER.tenant] in name for name in world.store.objects)
        assert victim.in_folder(world.folder) == {}
        assert not victim.in_bytes(memory_of(manager))
        for prompt in (1, 2):
            assert manager.acquire(OTHER.id, hashes_of(OTHER, prompt)).depth == DEPTH
            assert manager.match(hashes_of(VICTIM, prompt), VICTIM.id).depth == 0


def test_what_a_tenant_used_after_an_erasure_goes_with_the_next_one(world: World) -> None:
    manager, victim = world.instance("a"), Needles(VICTIM, [1])
    only_age = {"NATS events on the stream"}
    numbers = []
    for _ in range(2):
        manager.unpin(serve(manager, VICTIM, 1))
        assert manager.settle(WAIT_S)
        eventually(lambda: depth(world, VICTIM, 1) == DEPTH, "the catalog has not all claims")
        eventually(lambda: bytes(VICTIM.id) in world.tables(), "SQL has none of its claims")  # which the command reads
        number = world.erase(tenant=VICTIM.tenant)[1]
        numbers.append(number)
        eventually(
            lambda: set(waits(world.erase(status=numbers[-1])[2])) <= only_age,
            "not all are done",
            state=lambda: waits(world.erase(status=numbers[-1])[2]),
            timeout_s=WAIT_S,
        )
        assert manager.match(hashes_of(VICTIM, 1)).depth == 0
        assert not victim.in_folder(world.folder) and not victim.in_bytes(memory_of(manager))
    assert numbers[0] < numbers[1]


async def answer_falsely(url: str, name: str, number: int, victims: Sequence[Namespace]) -> None:
    """Say in an instance's name that it is done, and that others' namespaces are the erased tenant's."""
    log = await ErasureLog.open(url, "home", WAIT_S, Credentials(), 1)
    try:
        found = await log.record()
        assert found is not None
        erasure = decoded(found.data).find(number)
        assert erasure is not None
        named = tuple(erasure.namespace_digest(space.id) for space in victims)
        done = Progress(
            places=(ErasedPlace(name="all", erased="everything"),), done_ns=time.time_ns(), namespaces=named
        )
        answer = Answer(name=name, kind=INSTANCE, at_ns=time.time_ns(), progress={number: done})
        await log.put_answer(name, encoded(answer))
    finally:
        await log.close()


@pytest.mark.parametrize("is_known", [False, True], ids=["of nobody", "of an instance"])
def test_an_answer_that_names_another_tenants_namespaces_has_nothing_of_that_tenant_erased(
    world: World, is_known: bool
) -> None:
    """Neither by the erasure that it answers, nor by the next one of the same tenant."""
    if is_known:
        world.instance("liar", [OTHER]).close()
    manager = world.instance("a")
    serve_two(world, manager)
    other, only_age = Needles(OTHER, (1, 2)), {"NATS events on the stream"}

    def erase() -> None:
        number = world.erase(tenant=VICTIM.tenant)[1]
        asyncio.run(answer_falsely(world.server.url, "liar", number, [OTHER]))
        eventually(
            lambda: set(waits(world.erase(status=number)[2])) <= only_age,
            "not all are done",
            state=lambda: waits(world.erase(status=number)[2]),
            timeout_s=WAIT_S,
        )

    def check(prompts: Iterable[int]) -> None:
        names = {summary.id for summary in world.client.namespaces()}
        assert bytes(OTHER.id).hex() in names and bytes(VICTIM.id).hex() not in names
        assert [depth(world, OTHER, prompt) for prompt in prompts] == [DEPTH for _ in prompts]
        assert all(manager.match(hashes_of(OTHER, prompt)).depth == DEPTH for prompt in prompts)
        assert other.in_bytes(world.tables()) >= {"the tenant's name", "the namespace", "a hash"}
        assert "a hash" in str(other.in_folder(world.folder / "archive"))
        assert sum(OTHER.id.hex() in name for name in world.store.objects) == DEPTH // K * len(list(prompts))

    erase()
    check([1, 2])
    manager.unpin(serve(manager, OTHER, 3))  # what comes later is seen, too
    assert manager.settle(WAIT_S)
    eventually(lambda: depth(world, OTHER, 3) == DEPTH, "the catalog does not see the other's new blocks")
    erase()
    check([1, 2, 3])


def test_claims_of_a_namespace_that_nobody_has_told_of_are_erased_on_the_operators_word_alone(world: World) -> None:
    untold = Namespace(model="untold", revision="r", block_tokens=16, tenant="initrode")
    manager = world.instance("a")
    for space in (VICTIM, OTHER):
        manager.unpin(serve(manager, space, 1))
    assert manager.settle(WAIT_S)
    eventually(lambda: all(depth(world, s, 1) == DEPTH for s in (VICTIM, OTHER)), "the catalog has not all claims")
    eventually(lambda: bytes(OTHER.id) in world.tables(), "SQL has none of its claims")
    with closing(sqlite3.connect(world.database, timeout=WAIT_S)) as connection, connection:
        connection.execute(
            "insert into object_claims values (?, ?, ?, 'b', 1, 1)",
            ("another pool", bytes(untold.id), hashes_of(untold, 1)[:HASH_BYTES]),
        )
    number = world.erase(tenant=VICTIM.tenant)[1]
    asyncio.run(answer_falsely(world.server.url, "liar", number, [untold]))  # nobody knows an instance of that name
    word = f"SQL claims of {untold.id.hex()}"
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) == {word, "NATS events on the stream"},
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    said = waits(world.erase(status=number)[2])[word]
    assert f"--namespace {untold.id.hex()}" in said and f"--spare {untold.id.hex()}" in said and "liar" not in said
    assert bytes(untold.id) in world.tables()
    assert word not in waits(world.erase(status=number, spare=frozenset([untold.id]))[2])
    assert bytes(untold.id) in world.tables()


def test_after_an_erasure_prompts_of_others_stay_with_their_engines_and_new_use_is_known_without_a_restart(
    world: World,
) -> None:
    other = Namespace(model="globex's", revision="r1", block_tokens=16, tenant=OTHER.tenant)
    erased, stays = world.instance("a", [VICTIM]), world.instance("b", [other])
    for manager, space in ((erased, VICTIM), (stays, other)):
        manager.unpin(serve(manager, space, 1))
        assert manager.settle(WAIT_S)
    eventually(lambda: all(depth(world, s, 1) == DEPTH for s in (VICTIM, other)), "the catalog has not all claims")
    number = world.erase(tenant=VICTIM.tenant)[1]
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) == {"NATS events on the stream"},
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    sent = [world.client.route(other, hashes_of(other, prompt), DEPTH * 16).instance for prompt in range(60)]
    assert sent == ["b"] * 60
    known = {summary.id for summary in world.client.namespaces()}
    assert known == {other.id.hex()}
    # A prompt of the tenant that comes after it all is new use.
    erased.unpin(serve(erased, VICTIM, 2))
    assert erased.settle(WAIT_S)
    eventually(
        lambda: VICTIM.id.hex() in {summary.id for summary in world.client.namespaces()},
        "its fields are not known again",
    )
    assert world.client.route(VICTIM, hashes_of(VICTIM, 3), DEPTH * 16).instance == "a"
    eventually(lambda: depth(world, VICTIM, 2) == DEPTH, "its new claims are not known")
    erased.unpin(serve(erased, VICTIM, 3))  # SQL gets the fields with the next events
    eventually(lambda: VICTIM.tenant.encode() in world.tables(), "SQL has not its fields")
    again = world.erase(tenant=VICTIM.tenant)[1]
    eventually(
        lambda: set(waits(world.erase(status=again)[2])) == {"NATS events on the stream"},
        "not all are done again",
        state=lambda: waits(world.erase(status=again)[2]),
        timeout_s=WAIT_S,
    )
    assert not Needles(VICTIM, (1, 2, 3)).in_bytes(world.tables())


def test_a_namespace_that_came_after_the_start_is_erased_with_its_tenant_by_its_own_fields(world: World) -> None:
    late = Namespace(model="erasure", revision="r1", block_tokens=16, tenant=VICTIM.tenant, lora="late")
    manager = world.instance("a", [OTHER])
    manager.declare([late])
    manager.unpin(serve(manager, late, 1))
    assert manager.settle(WAIT_S)
    eventually(lambda: depth(world, late, 1) == DEPTH, "the catalog has not all claims")
    eventually(
        lambda: late.id.hex() in {summary.id for summary in world.client.namespaces()}, "the catalog has not its fields"
    )
    manager.unpin(serve(manager, OTHER, 1))
    eventually(lambda: late.lora.encode() in world.tables(), "SQL has not its fields")
    number = world.erase(tenant=VICTIM.tenant)[1]
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) == {"NATS events on the stream"},
        "not all are done",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    gone = Needles(late, [1])
    assert gone.in_folder(world.folder) == {} and gone.in_bytes(world.tables()) == set()
    assert not any(late.id.hex() in name for name in world.store.objects)


async def answered_catalogs(url: str) -> dict[str, Answer]:
    log = await ErasureLog.open(url, "home", WAIT_S, Credentials(), 1)
    try:
        return {one.name: one for one in answers_of(await log.answers()) if one.kind == CATALOG}
    finally:
        await log.close()


def test_a_catalog_that_is_down_is_waited_for_by_name_until_it_returns_or_is_forgotten(world: World) -> None:
    first = set(eventually(lambda: asyncio.run(answered_catalogs(world.server.url)), "the catalog is not there"))
    folder = world.folder.parent / "two"
    folder.mkdir()
    database = f"sqlite+aiosqlite:///{folder / 'catalog.db'}"
    away = world.catalog_of(folder, database)
    eventually(lambda: len(asyncio.run(answered_catalogs(world.server.url))) == 2, "the second catalog says nothing")
    (name,) = asyncio.run(answered_catalogs(world.server.url)).keys() - first
    manager, victim = world.instance("a"), Needles(VICTIM, [1])
    manager.unpin(serve(manager, VICTIM, 1))
    assert manager.settle(WAIT_S)
    for place in ("catalog.db", "archive", "checkpoints"):
        wait_in(victim, folder, place)
    away.stop()
    number = world.erase(tenant=VICTIM.tenant)[1]
    place, age = f"{name} SQL, index, files", "NATS events on the stream"
    eventually(
        lambda: set(waits(world.erase(status=number)[2])) == {place, age},
        "it is not the second catalog alone",
        state=lambda: waits(world.erase(status=number)[2]),
        timeout_s=WAIT_S,
    )
    code, _, lines = world.erase(status=number)
    assert code == 1 and f"--forget-catalog {name}" in waits(lines)[place]
    assert victim.in_folder(folder)  # it has everything still
    with pytest.raises(ErasureError, match=f"there are: .*{name}"):
        world.erase(forget_catalog="catalog-none")
    world.erase(forget_catalog=name)
    assert set(waits(world.erase(status=number)[2])) == {age}
    back = world.catalog_of(folder, database)  # it does not know that it was forgotten
    eventually(lambda: not victim.in_folder(folder), "it has not erased", timeout_s=WAIT_S)
    eventually(
        lambda: not asyncio.run(answered_catalogs(world.server.url))[name].gone, "it has not said so", timeout_s=WAIT_S
    )
    asyncio.run(let_age(world.server.url))
    eventually(lambda: world.erase(status=number)[0] == 0, "the stream keeps it", timeout_s=WAIT_S)
    back.stop()
    assert not asyncio.run(answered_catalogs(world.server.url))[name].gone  # its files may come back


def test_a_catalog_that_leaves_nothing_behind_says_so_when_it_stops(world: World, postgres_url: str) -> None:
    first = set(eventually(lambda: asyncio.run(answered_catalogs(world.server.url)), "the catalog is not there"))
    folder = world.folder.parent / "two"
    folder.mkdir()
    bare = world.catalog_of(folder, postgres_url, has_files=False)
    eventually(lambda: len(asyncio.run(answered_catalogs(world.server.url))) == 2, "the second catalog says nothing")
    bare.stop()
    said = asyncio.run(answered_catalogs(world.server.url))
    assert {name: one.gone for name, one in said.items()} == dict.fromkeys(said, True) | dict.fromkeys(first, False)
    world.instance("a").close()
    number = world.erase(tenant=VICTIM.tenant)[1]
    (name,) = said.keys() - first
    assert not any(line.who == name for line in world.erase(status=number)[2])


@pytest.mark.parametrize("others", [0, 30], ids=["nobody is left", "others are left"])
def test_postgres_has_an_erased_tenant_neither_in_its_statistics_nor_in_the_files_with_names(
    postgres_url: str, others: int
) -> None:
    def spaces(tenant: str, count: int) -> list[Namespace]:
        return [Namespace(model="m", block_tokens=16, tenant=tenant, lora=f"{tenant}/{at}") for at in range(count)]

    mine, their = spaces("initech-payroll", 60), spaces("globex", others)
    files = (
        "select pg_read_binary_file(pg_relation_filepath(c.oid)) from pg_class c left join pg_index i on i.indexrelid "
        "= c.oid"
        " where coalesce(i.indrelid, c.oid) in ('namespaces'::regclass, 'tenants'::regclass)"
    )
    statistics = (
        "select concat_ws(' ', most_common_vals::text, histogram_bounds::text) from pg_stats where tablename in"
        " ('namespaces', 'tenants', 'object_claims')"
    )
    needles = [b"initech", *(bytes(space.id) for space in mine)]

    async def work() -> None:
        store = await SqlStore.open(postgres_url)
        try:

            async def every(asked: str) -> bytes:
                async with store.engine.connect() as connection:
                    alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
                    await alone.exec_driver_sql("CHECKPOINT")
                    rows = [row[0] for row in await alone.exec_driver_sql(asked)]
                return b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows)

            rows = tuple(NamespaceRow(id=one.id, fields=one, first_seen_ns=1) for one in [*mine, *their])
            claims = tuple(
                ClaimRun(pool="pool", namespace=one.id, hashes=hashes_of(one, 1), instance=InstanceId("a"), at_ns=1)
                for one in [*mine, *their]
            )
            await store.apply(StoreBatch(stream="s@1", previous=0, stream_sequence=1, namespaces=rows, claims=claims))
            async with store.engine.begin() as connection:
                for tenant in ("initech-payroll", *(["globex"] if others else [])):
                    await connection.exec_driver_sql(f"insert into tenants values ('{tenant}', 1)")
            async with store.engine.begin() as connection:
                await connection.exec_driver_sql("analyze")
            before, on_disk = await every(statistics), await every(files)
            assert b"initech" in before and all(needle in on_disk for needle in needles)
            await erase_rows(store.engine, [one.id for one in mine], ["initech-payroll"])
            after, on_disk = await every(statistics), await every(files)
            for needle in needles:
                assert needle not in on_disk and needle not in after and needle.hex().encode() not in after
            assert (b"globex" in after) == (b"globex" in on_disk) == bool(others)
            assert [row.fields for row in await store.namespaces()] == sorted(their, key=lambda one: one.id)
            assert await store.claim_count() == others * DEPTH
            await store.apply(  # it can be written as before
                StoreBatch(stream="s@1", previous=1, stream_sequence=2, namespaces=rows[:1], claims=claims[:1])
            )
            assert await store.claim_count() == (others + 1) * DEPTH
        finally:
            await store.close()

    asyncio.run(work())


async def lose_erasures(url: str, garbage: bytes) -> None:
    """Delete the stream of erasures; or, with garbage, put that in the place of the record."""
    connection = await NatsConnection.open(url, WAIT_S, Credentials())
    if garbage:
        await connection.ask(record_subject("home"), garbage, WAIT_S)
    else:
        await request(connection, f"$JS.API.STREAM.DELETE.{ERASURES}", {}, dict, WAIT_S)
    await connection.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1"], ids=["lost", "damaged"])
def test_a_record_that_was_lost_or_damaged_is_put_back_by_a_catalog(world: World, garbage: bytes) -> None:
    number = world.erase(tenant=VICTIM.tenant)[1]
    asyncio.run(let_age(world.server.url))
    eventually(lambda: not waits(world.erase(status=number)[2]), "the catalog is not done", timeout_s=WAIT_S)
    asyncio.run(lose_erasures(world.server.url, garbage))

    def is_back() -> bool:
        try:
            return not waits(world.erase(status=number)[2])
        except ErasureError:
            return False

    eventually(is_back, "the record is lost", timeout_s=WAIT_S)


def test_sealed_objects_in_front_of_the_pool_go_too(tmp_path: Path, redis_url: str) -> None:
    keys = tmp_path / "keys.toml"
    for space in (VICTIM, OTHER):
        add_key(keys, space.tenant, "1")
    folders = {space.tenant: f"/e/{keys_of_file(str(keys)).load()[space.tenant].tag}/" for space in (VICTIM, OTHER)}
    front = redis_place(redis_url)
    with opened_world(tmp_path, keys) as world, closing(front.open()) as store:
        manager = world.instance("a")
        for space in (VICTIM, OTHER):
            manager.unpin(serve(manager, space, 1))
        assert manager.settle(WAIT_S)
        eventually(lambda: all(depth(world, s, 1) == DEPTH for s in (VICTIM, OTHER)), "the catalog has not all claims")
        puts = [Put(name, bytes(body[0])) for name, body in world.store.objects.items()]
        assert store.put(puts, WAIT_S) == [None] * len(puts)

        def in_front(space: Namespace) -> list[str]:
            return [one.name for one in store.listed("", WAIT_S) if folders[space.tenant] in one.name]

        assert in_front(VICTIM) and in_front(OTHER)
        before = in_front(OTHER)
        world.flags = {"pools__object__front": front.url, "pools__object__url": "s3://objects/blocks"}
        world.erase(tenant=VICTIM.tenant)
        assert in_front(VICTIM) == [] and in_front(OTHER) == before
        # With keys that do not have the tenant nobody can tell which objects are the tenant's: that is said, and names
        # nobody.
        keys.unlink()
        add_key(keys, OTHER.tenant, "1")
        _, number, _ = world.erase(tenant=VICTIM.tenant)
        assert "keys which are not here" in str(waits(world.erase(status=number)[2]))
        assert not any(VICTIM.tenant.encode() in one for one in world.messages() if b".erase" in one)


@contextmanager
def lonely(folder: Path, url: str, hold_s: float) -> Iterator[Manager]:
    """A manager that does not wait, when it is closed, for a server that is not there."""
    flags = {
        "instance.data_dir": str(folder),
        "instance.id": "a",
        "pools.hbm.slots": 32,
        "pools.hbm.device": "memory",
        "pools.nvme.slots": 32,
        "nats.url": url,
        "nats.timeout_s": 2.0,
        "erasure.hold_s": hold_s,
        "erasure.poll_s": 0.1,
    }
    with open_manager(load_settings(flags=flags), [OTHER], BLOCK_BYTES) as manager:
        yield manager
        eventually(lambda: manager.durable() == manager.applied(), "the journal has not all")
        manager.close(0.1)


def test_what_an_earlier_run_left_is_held_back_until_the_record_is_known(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"

    def depth_of(manager: Manager) -> int:
        prefix = manager.acquire(OTHER.id, hashes_of(OTHER, 1))
        manager.unpin(prefix.slots)
        return prefix.depth

    with lonely(tmp_path, url, 0.0) as manager:
        manager.unpin(serve(manager, OTHER, 1))
        assert manager.settle(WAIT_S)
    with lonely(tmp_path, url, 0.0) as manager:  # nothing is held back
        assert depth_of(manager) == DEPTH
    with lonely(tmp_path, url, 0.2) as manager:  # for a moment
        eventually(lambda: depth_of(manager) == DEPTH, "it is held back for ever")
    with lonely(tmp_path, url, -1.0) as manager:
        assert depth_of(manager) == 0
        assert len(manager.held(Tier.NVME)) == DEPTH
        server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S, port=int(url.rpartition(":")[2]))
        try:
            eventually(lambda: depth_of(manager) == DEPTH, "the record was read, and it is held back")
        finally:
            manager.close()
            server.stop()


async def ready(url: str, credentials: Credentials) -> None:
    """The streams of events are there, as a catalog of before would have made them."""
    await (await NatsStream.connect(url, WAIT_S, credentials=credentials)).close()


async def record_of(url: str, credentials: Credentials) -> object:
    erasures = await ErasureLog.open(url, "home", WAIT_S, credentials, 1)
    try:
        return await erasures.record()
    finally:
        await erasures.close()


def test_instances_and_catalogs_with_accounts_of_their_own_can_erase(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    users = [ServerUser(keep_seed(keys / "instance-a.nk"), "a"), ServerUser(keep_seed(keys / "catalog.nk"))]
    server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S, settings=server_config("home", users))
    seed = str(keys / "catalog.nk")
    flags = {
        "instance.data_dir": str(tmp_path),
        "instance.cluster": "home",
        "nats.url": server.url,
        "nats.timeout_s": WAIT_S,
        "erasure.poll_s": 0.2,
        "snapshots.least_s": 0.3,
        "pools.hbm.slots": 32,
        "pools.hbm.device": "memory",
    }
    mine = load_settings(flags=flags | {"instance.id": "a", "nats.nkey_seed": str(keys / "instance-a.nk")})
    of_catalog = load_settings(flags=flags | {"nats.nkey_seed": seed, "instance.id": "catalog"})
    credentials = Credentials(nkey_seed=seed, inbox=catalog_inbox("home"))
    told: list[tuple[int, Sequence[Line]]] = []

    def erase(**options: Any) -> Sequence[Line]:
        run_erase(of_catalog, EraseOptions(wait_s=0.0, **options), lambda number, lines: told.append((number, lines)))
        return told[-1][1]

    service = ServiceSettings(
        nats_url=server.url,
        credentials=credentials,
        database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
        cluster="home",
        listen="127.0.0.1:0",
        store_every_s=0.02,
        connect_s=WAIT_S,
        liveness_s=10 * WAIT_S,
        companions=(catalog_companion(of_catalog, server.url, credentials),),
    )
    try:
        # Before a catalog has made the stream of erasures there are none.
        asyncio.run(ready(server.url, credentials))
        with open_manager(mine, [VICTIM, OTHER], BLOCK_BYTES):
            record = asyncio.run(
                record_of(server.url, Credentials(nkey_seed=mine.nats.nkey_seed, inbox=instance_inbox("home", "a")))
            )
            assert record is None
        with CatalogThread(service, NATIVE, NATIVE_INDEX), open_manager(mine, [VICTIM, OTHER], BLOCK_BYTES) as manager:
            for space in (VICTIM, OTHER):
                manager.unpin(serve(manager, space, 1))
            eventually(lambda: b"initech" in (tmp_path / "catalog.db-wal").read_bytes(), "SQL does not know the tenant")
            erase(tenant=VICTIM.tenant)
            number = told[-1][0]
            eventually(
                lambda: set(waits(erase(status=number))) == {"NATS events on the stream"},
                "not all are done",
                state=lambda: waits(erase(status=number)),
                timeout_s=WAIT_S,
            )
            assert set(manager.held(Tier.HBM)) == set(split_hashes(hashes_of(OTHER, 1)))
    finally:
        server.stop()


def test_an_instance_called_like_a_catalog_or_a_pool_answers_for_itself_alone(tmp_path: Path) -> None:
    keys, names = tmp_path / "keys", ["catalog-1", "objects-1"]
    wanted = [(Role.INSTANCE, name) for name in names]
    accounts = print_accounts(keys, "home", wanted, KeyChange(), time.time()).text
    server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S, settings=accounts)

    async def open_as(stem: str, inbox: str) -> ErasureLog:
        credentials = Credentials(nkey_seed=str(keys / f"{stem}.nk"), inbox=inbox)
        return await ErasureLog.open(server.url, "home", WAIT_S, credentials, 1)

    async def work() -> None:
        catalog = await open_as("catalog", catalog_inbox("home"))
        instances = [await open_as(f"instance-{name}", instance_inbox("home", name)) for name in names]
        try:
            await catalog.make()
            for name, log in zip(names, instances, strict=True):
                for kind in (report.CATALOG, report.OBJECTS, report.INSTANCE):
                    said = {7: Progress(done_ns=1)}
                    answer = report.encoded(Answer(name=name, kind=kind, at_ns=1, progress=said))
                    await log.put_answer(name, answer)
                    believed = report.answers_of(await catalog.answers())
                    assert [one.kind for one in believed if one.name == name] == (
                        [kind] if kind == report.INSTANCE else []
                    )
                    if kind != report.INSTANCE:
                        kept = kept_name(kind, "1")
                        with pytest.raises(StreamError, match=r"(?i)permission"):
                            await log.put_answer(
                                kept, report.encoded(Answer(name=kept, kind=kind, at_ns=1, progress=said))
                            )
            assert {one.kind for one in report.answers_of(await catalog.answers())} == {report.INSTANCE}
        finally:
            for log in (catalog, *instances):
                await log.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()
