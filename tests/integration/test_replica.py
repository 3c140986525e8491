"""A replica in the caller's process answers as the service does, of the same age, and begins with the service's
checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import kvbm
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.index.cluster_index import NewIndex
from kvbm.catalog.replica import CatalogReplica, ReplicaSettings
from kvbm.catalog.service import ServiceSettings
from kvbm.core.answers import LookupAnswer, PositionWanted, PresenceAnswer, RouteAnswer
from kvbm.core.backend import REFERENCE, Backend
from kvbm.core.errors import CatalogError, CatalogRefusedError, ConfigError, StreamError
from kvbm.core.ids import Namespace, NamespaceId
from kvbm.locate.asynchronous import AsyncCatalog
from kvbm.locate.base import Catalog
from kvbm.locate.http import CatalogClient
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.streams.nats.connection import NatsConnection
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.read_only import ReadOnlyStream
from kvbm.streams.nats.setup import PULSE
from kvbm.streams.nats.stream import NatsStream
from tests.catalog_site import HASHES, SPACE, TOKENS, Instance
from tests.eventually import eventually
from tests.held_time import HeldTime, hold_catalogs
from tests.members import UNIVERSE, Member, step
from tests.nats_fixture import WAIT_S, cluster, fresh_nats, nats_url  # noqa: F401
from tests.servers import nats_server

LIVENESS_S = 1.5  # in time that is held
FOR_EVER_S = 600.0  # of liveness, where nobody is to fall silent
STEPS = 80


class Site(NamedTuple):
    """A catalog with checkpoints, how to ask it, and how to follow what it follows."""

    settings: ServiceSettings
    client: CatalogClient

    @contextmanager
    def replica(
        self, fetch: Callable[[Path], bool] | None = None, backend: Backend = NATIVE, new_index: NewIndex = NATIVE_INDEX
    ) -> Iterator[CatalogReplica]:
        url = self.settings.nats_url
        replica = CatalogReplica(
            ReplicaSettings(cluster=self.settings.cluster, liveness_s=self.settings.liveness_s, whole_wait_s=0.2),
            lambda: ReadOnlyStream.follow(url, WAIT_S, Credentials()),
            fetch,
            backend,
            new_index,
        )
        replica.start(WAIT_S)
        try:
            replica.wait_ready(WAIT_S)
            yield replica
        finally:
            replica.close()


def settings_of(
    url: str, within: str, database: str, folder: Path | None, liveness_s: float = FOR_EVER_S
) -> ServiceSettings:
    return ServiceSettings(
        nats_url=url,
        database_url=database,
        cluster=within,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        liveness_s=liveness_s,
        ask_again_s=0.5,
        whole_wait_s=0.2,
        checkpoints="" if folder is None else str(folder),
        checkpoint_every_s=0.2,
    )


@contextmanager
def running(settings: ServiceSettings) -> Iterator[Site]:
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        client = CatalogClient(thread.url, timeout_s=WAIT_S)
        client.wait_ready(WAIT_S)
        yield Site(settings, client)
        client.close()


@pytest.fixture(autouse=True)
def held_time(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    """Silence of services and replicas counts in it."""
    monkeypatch.setattr(kvbm.core.questions, "MAX_WAIT_S", WAIT_S)
    return hold_catalogs(monkeypatch)


@pytest.fixture
def site(nats_url: str, cluster: str, sqlite_url: str, tmp_path: Path) -> Iterator[Site]:  # noqa: F811
    with running(settings_of(nats_url, cluster, sqlite_url, tmp_path / "checkpoints")) as found:
        yield found


@pytest.fixture
def short_lived(nats_url: str, cluster: str, sqlite_url: str, tmp_path: Path) -> Iterator[Site]:  # noqa: F811
    """A site where silence is death after `LIVENESS_S`."""
    with running(settings_of(nats_url, cluster, sqlite_url, tmp_path / "checkpoints", LIVENESS_S)) as found:
        yield found


def without_age(answer: LookupAnswer | RouteAnswer) -> object:
    return msgspec.to_builtins(msgspec.structs.replace(answer, view_age_s=0.0))


def held_by(answer: PresenceAnswer) -> object:
    """Who holds what; those with as many blocks come in no order."""
    return sorted((one.name, one.kind, one.tier, one.suspect, one.held) for one in answer.holders)


def differences(site: Site, replica: Catalog, chance: random.Random) -> list[str]:
    """What the two answer differently: lookups, blocks, instances and the order of a route, at the same positions."""
    found = []
    for _ in range(8):
        prompt = b"".join(chance.sample(UNIVERSE, chance.randint(1, 12)))
        limit = chance.choice([1, 2, 8])
        there, here = (without_age(one.lookup(SPACE, prompt, limit=limit)) for one in (site.client, replica))
        if there != here:
            found.append(f"lookup: service {there}, replica {here}")
        there, here = (held_by(one.presence(SPACE, prompt, limit=100)) for one in (site.client, replica))
        if there != here:
            found.append(f"presence: service {there}, replica {here}")
    found += [
        f"block {block.hex()[:4]}: service {there}, replica {here}"
        for block in UNIVERSE
        if (there := site.client.block(SPACE, block)) != (here := replica.block(SPACE, block))
    ]
    rows: list[list[object]] = []
    for one in (site.client, replica):
        rows.append(
            [
                (row.instance, row.state, row.epoch, row.offset, row.digest, row.suspect, row.excluded, row.held_blocks)
                for row in one.instances()
            ]
        )
    return found + ([f"instances: service {rows[0]}, replica {rows[1]}"] if rows[0] != rows[1] else [])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_at_the_same_positions_a_replica_answers_as_the_service(
    short_lived: Site, seed: int, native: bool, held_time: HeldTime
) -> None:
    """Blocks come and go, events are lost, instances restart, stop and die; a second replica begins in the middle, with
    a checkpoint.
    """
    site, chance = short_lived, random.Random(seed)
    backend, new_index = (NATIVE, NATIVE_INDEX) if native else (REFERENCE, ReferenceIndex)
    members = [Member(site.settings.nats_url, str(site.settings.cluster), f"i{at}") for at in range(3)]
    dead: set[str] = set()
    for member in members:
        member.act(chance)
        member.publish()
    with ExitStack() as opened:
        replicas = [opened.enter_context(site.replica(None, backend, new_index))]
        for at in range(STEPS):
            step(chance, members, dead, site.client)
            if at == STEPS // 2:
                eventually(lambda: site.client.fetch_checkpoint(site_folder(site)), "no checkpoint")
                replicas.append(opened.enter_context(site.replica(site.client.fetch_checkpoint, backend, new_index)))
        said: list[str] = []
        hold = opened.enter_context(held_time.held())

        def agree() -> bool:
            hold.pass_on(0.2)  # those that live are heard however long it takes to ask
            for member in members:
                if member.name not in dead:
                    member.beat()
            said[:] = [why for replica in replicas for why in differences(site, replica, chance)]
            return not said

        eventually(agree, "the two differ", state=lambda: said[:3])


def site_folder(site: Site) -> Path:
    folder = Path(site.settings.checkpoints).parent / "fetched"
    folder.mkdir(exist_ok=True)
    return folder


def test_a_route_has_the_order_of_the_services(site: Site) -> None:
    first, second, third = (instance(site, name) for name in ("a", "b", "c"))
    first.create(0, 8)
    second.create(0, 4)
    for one, queued in ((first, 0), (second, 100), (third, 50)):
        one.publish()
        one.beat(queued_tokens=queued)
    with site.replica() as replica:

        def ranked(one: Catalog) -> list[tuple[str, int]]:
            for each in (first, second, third):
                each.beat(queued_tokens=10)
            answer = one.route(SPACE, HASHES, len(TOKENS))
            return [(each.instance, each.depth) for each in answer.ranked]

        eventually(lambda: len(ranked(site.client)) == len(ranked(replica)) == 3, "not all are candidates")
        assert ranked(replica) == ranked(site.client)
        assert ranked(replica)[0][0] == "a"
        assert replica.route_tokens(SPACE, b"", TOKENS).instance == "a"
        assert [one.instance for one in replica.route_many(SPACE, [HASHES, HASHES], [40, 40])] == ["a", "a"]
        with pytest.raises(CatalogRefusedError, match="more than 3 tokens") as refused:
            replica.route(SPACE, HASHES, 3)
        assert (refused.value.status, refused.value.code) == (422, "too_many_hashes")
        with pytest.raises(CatalogRefusedError, match="no live instance"):
            replica.route(SPACE, HASHES, 40, instances=["nobody"])


def instance(site: Site, name: str) -> Instance:
    return Instance(site.settings.nats_url, str(site.settings.cluster), name)


def test_an_answer_waits_for_the_position_it_must_have_seen(site: Site) -> None:
    writer = instance(site, "a")
    with site.replica() as replica:
        writer.create(0, 4)
        reached = writer.publish()
        assert replica.lookup(SPACE, HASHES, at_least=[reached], wait_s=WAIT_S).instances[0].depth == 4
        never = PositionWanted(instance="a", epoch=1, offset=reached.offset + 1)
        with pytest.raises(CatalogRefusedError, match="not yet at offset") as refused:
            replica.lookup(SPACE, HASHES, at_least=[never], wait_s=0.05)
        assert refused.value.code == "position_not_reached"


def test_a_replica_begins_with_a_checkpoint_and_goes_on(site: Site) -> None:
    writer = instance(site, "a")
    writer.create(0, 6)
    writer.publish()
    eventually(lambda: site.client.lookup(SPACE, HASHES).instances, "the catalog has not read it")
    end, fetched = site.client.ready().stream_sequence, site_folder(site)
    eventually(
        lambda: site.client.fetch_checkpoint(fetched) and sequence_in(fetched) >= end, "no checkpoint has the blocks"
    )
    with site.replica(site.client.fetch_checkpoint) as replica:
        view = replica._following()
        assert view.sequencer.counters.messages <= 1  # what the checkpoint has was not read again
        assert replica.lookup(SPACE, HASHES).instances[0].depth == 6
        writer.create(6, 8)
        reached = writer.publish()
        assert replica.lookup(SPACE, HASHES, at_least=[reached], wait_s=WAIT_S).instances[0].depth == 8


def sequence_in(folder: Path) -> int:
    line = (folder / "checkpoint.json").read_bytes().splitlines()[0]
    return int(msgspec.json.decode(line)["sequence"])


def test_a_damaged_checkpoint_is_left_out(site: Site) -> None:
    writer = instance(site, "a")
    writer.create(0, 6)
    writer.publish()
    eventually(lambda: site.client.lookup(SPACE, HASHES).instances, "the catalog has not read it")
    eventually(lambda: site.client.fetch_checkpoint(site_folder(site)), "no checkpoint")
    chance = random.Random(5)

    def damaged(folder: Path) -> bool:
        found = site.client.fetch_checkpoint(folder)
        path = folder / chance.choice(["checkpoint.index", "checkpoint.json"])
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        return found

    for _ in range(8):
        with site.replica(damaged) as replica:
            assert replica.lookup(SPACE, HASHES).instances[0].depth == 6


def test_without_a_checkpoint_or_a_catalog_the_stream_is_read_from_its_first_message(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    with running(settings_of(nats_url, cluster, sqlite_url, None)) as site:
        writer = instance(site, "a")
        writer.create(0, 6)
        writer.publish()
        assert site.client.fetch_checkpoint(Path("/nowhere")) is False  # this catalog writes none

        def nobody(folder: Path) -> bool:
            raise CatalogError("nobody answers")

        for fetch in (site.client.fetch_checkpoint, nobody):
            with site.replica(fetch) as replica:
                assert replica.lookup(SPACE, HASHES).instances[0].depth == 6


def test_a_view_that_nobody_confirms_grows_old_and_is_fresh_again(
    cluster: str,  # noqa: F811
    sqlite_url: str,
    held_time: HeldTime,
) -> None:
    with nats_server() as server, running(settings_of(server.url, cluster, sqlite_url, None, LIVENESS_S)) as site:
        writer = instance(site, "a")
        writer.create(0, 6)
        writer.publish()
        with site.replica() as replica:

            def is_fresh() -> bool:
                writer.beat()
                found = replica.lookup(SPACE, HASHES)
                return bool(found.instances) and not found.view_age_s

            with held_time.held():
                eventually(is_fresh, "it is old at once")
                os.kill(server.pid, signal.SIGSTOP)
            try:
                eventually(lambda: replica.lookup(SPACE, HASHES).view_age_s > 2 * LIVENESS_S, "it does not grow old")
                answer = replica.lookup(SPACE, HASHES)
                assert answer.instances[0].depth == 6  # whoever is cut off has found nobody dead
                assert "old" in replica.ready().degraded
            finally:
                os.kill(server.pid, signal.SIGCONT)

            with held_time.held() as hold:

                def is_fresh_again() -> bool:
                    hold.pass_on(0.1)
                    return is_fresh()

                eventually(is_fresh_again, "it stays old")
                writer.create(6, 8)
                reached = writer.publish()
                assert replica.lookup(SPACE, HASHES, at_least=[reached], wait_s=WAIT_S).instances[0].depth == 8


def test_one_that_falls_silent_is_left_out_and_returns(short_lived: Site, held_time: HeldTime) -> None:
    site = short_lived
    quiet, others = instance(site, "quiet"), [instance(site, name) for name in ("b", "c", "d")]
    quiet.create(0, 6)
    for one in (quiet, *others):
        one.publish()

    with site.replica() as replica, held_time.held() as hold:

        def beat(*ones: Instance) -> LookupAnswer:
            for one in ones:
                one.beat()
            hold.pass_on(0.3)
            return replica.lookup(SPACE, HASHES)

        eventually(lambda: beat(quiet, *others).instances, "it is not heard")
        eventually(lambda: not beat(*others).instances, "it is not left out")
        assert replica.lookup(SPACE, HASHES).excluded == ["quiet"]
        eventually(lambda: beat(quiet, *others).instances, "it does not return")


def test_a_stream_of_heartbeats_that_is_made_anew_is_read_anew(
    sqlite_url: str,
    cluster: str,  # noqa: F811
    held_time: HeldTime,
) -> None:
    with nats_server() as server, running(settings_of(server.url, cluster, sqlite_url, None, LIVENESS_S)) as site:
        writers = [instance(site, name) for name in ("a", "b")]
        for one in writers:
            one.create(0, 6)
            one.publish()
        with site.replica() as replica, held_time.held() as hold:

            def heard() -> int:
                hold.pass_on(0.5)
                for one in writers:
                    for _ in range(5):
                        one.beat()
                return sum(one.state == "live" for one in replica.instances())

            eventually(lambda: heard() == 2, "they are not heard")
            asyncio.run(remake_pulses(server.url))
            is_over = held_time.monotonic() + 3 * LIVENESS_S
            while held_time.monotonic() < is_over:
                heard()
                assert not replica.lookup(SPACE, HASHES).excluded  # they beat all the time
            eventually(lambda: heard() == 2, "they are heard no more")


async def remake_pulses(url: str) -> None:
    connection = await NatsConnection.open(url, WAIT_S, Credentials())
    await connection.ask(f"$JS.API.STREAM.DELETE.{PULSE}", b"", WAIT_S)
    await connection.close()
    await (await NatsStream.connect(url, WAIT_S)).close()


def test_many_threads_ask_while_events_come(site: Site) -> None:
    chance = random.Random(3)
    members = [Member(site.settings.nats_url, str(site.settings.cluster), f"i{at}") for at in range(2)]
    failures: list[BaseException] = []
    is_over = threading.Event()
    for member in members:
        member.act(chance)
        member.publish()
        member.beat()
    with site.replica() as replica:

        def ask(number: int) -> None:
            own = random.Random(number)
            try:
                while not is_over.is_set():
                    prompt = b"".join(own.sample(UNIVERSE, 8))
                    assert replica.lookup(SPACE, prompt).blocks == 8
                    assert replica.route(SPACE, prompt, 40).blocks == 8
                    assert replica.instances()
                    replica.ready()
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            for member in members:
                member.act(chance)
                member.publish()
                member.beat()
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert failures == []


def test_one_that_cannot_go_on_refuses_and_says_why(short_lived: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("nobody has thought of this")

    with short_lived.replica() as replica:
        assert replica.lookup(SPACE, HASHES).instances == []
        monkeypatch.setattr(ReadOnlyStream, "send_pulse", fail)
        eventually(lambda: not replica.ready().ready)
        assert replica.ready().reason == "the replica cannot go on: nobody has thought of this"
        for ask in (
            lambda: replica.lookup(SPACE, HASHES),
            lambda: replica.route(SPACE, HASHES, len(TOKENS)),
            lambda: replica.block(SPACE, HASHES[:16]),
        ):
            with pytest.raises(CatalogRefusedError, match="nobody has thought of this"):
                ask()


def test_what_is_closed_says_so_and_takes_nothing_with_it(site: Site) -> None:
    with site.replica() as replica:
        pass
    replica.close()
    with pytest.raises(CatalogError, match="is closed"):
        replica.lookup(SPACE, HASHES)
    eventually(lambda: "kvbm-replica" not in {thread.name for thread in threading.enumerate()}, "its thread goes on")


def test_a_replica_is_opened_from_settings(site: Site, tmp_path: Path) -> None:
    writer = instance(site, "a")
    writer.create(0, 6)
    writer.publish()
    flags = {
        "nats.url": site.settings.nats_url,
        "instance.cluster": site.settings.cluster,
        "catalog.url": site.client.url,
        "instance.data_dir": str(tmp_path / "data"),
        "catalog.liveness_s": FOR_EVER_S,
    }
    replica = kvbm.open_replica(kvbm.load_settings(flags=flags))
    asked: Catalog = replica  # as the client is
    asked.wait_ready(WAIT_S)
    assert asked.lookup_tokens(SPACE, b"", TOKENS).instances[0].depth == 6
    assert [one.instance for one in asked.instances()] == ["a"]

    async def ask(catalog: AsyncCatalog) -> int:
        async with catalog:
            await catalog.wait_ready(WAIT_S)
            assert (await catalog.instance("a")) is not None
            assert (await catalog.lookup_many(SPACE, [HASHES]))[0].instances
            assert (await catalog.presence(SPACE, HASHES)) == (await catalog.presence_many(SPACE, [HASHES]))[0]
            return (await catalog.lookup(SPACE, HASHES)).instances[0].depth

    client: Catalog = CatalogClient(site.client.url, timeout_s=WAIT_S)
    assert asyncio.run(ask(AsyncCatalog(replica, at_once=True))) == asyncio.run(ask(AsyncCatalog(client))) == 6
    with pytest.raises(ConfigError, match=r"nats\.url is empty"):
        kvbm.open_replica(kvbm.load_settings(flags={"instance.data_dir": str(tmp_path)}))
    with pytest.raises(StreamError, match="no connection to NATS"):
        kvbm.open_replica(kvbm.load_settings(flags=flags | {"nats.url": "nats://127.0.0.1:9", "nats.timeout_s": 1}))


def test_bad_arguments_are_refused_before_anything_is_asked(site: Site) -> None:
    with site.replica() as replica:
        for ask in (
            lambda: replica.lookup(SPACE, b"123"),
            lambda: replica.lookup(SPACE, HASHES, limit=0),
            lambda: replica.lookup(NamespaceId(b"short"), HASHES),
            lambda: replica.route(SPACE, HASHES, -1),
            lambda: replica.route_many(SPACE, [HASHES], []),
            lambda: replica.lookup(SPACE, HASHES, instances="a"),
        ):
            with pytest.raises(kvbm.ArgumentError):
                ask()
    assert isinstance(SPACE, Namespace)
