"""Questions to the catalog over NATS: answered as over HTTP, by any catalog that is ready, to those whom the server
lets ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest

import kvbm.catalog.access.callers
import kvbm.locate.nats
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import Access, AccessOptions
from kvbm.catalog.access.file import hashed
from kvbm.catalog.edge.api import create_surface
from kvbm.catalog.edge.server import CatalogThread, listen_to_asks
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.cli import main
from kvbm.config import LimitSettings
from kvbm.core.answers import LookupAnswer, PositionWanted
from kvbm.core.asks import STATUS_HEADER
from kvbm.core.errors import CatalogError, CatalogRefusedError, ConfigError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.locate.base import NOTHING_FOUND
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator
from kvbm.locate.nats_proof import NatsCredentials
from kvbm.streams.nats.credentials import Credentials, keep_seed
from kvbm.streams.nats.permissions import Role, ServerUser, catalog_inbox, server_config
from kvbm.streams.nats.stream import NatsStream
from tests.callers import ACME, BETA, TOKENS, ask, beat, hashes_in, publish
from tests.certificates import certify
from tests.eventually import eventually, eventually_async
from tests.nats_fixture import WAIT_S, cluster, fresh_nats, nats_url, patient, started
from tests.servers import free_port, start_process, stop_process
from tests.snapshot_instances import SPACE, Instance, block_hashes

__all__ = ["cluster", "fresh_nats", "nats_url"]


@contextmanager
def served(url: str, cluster: str, database: str, **more: Any) -> Iterator[str]:
    """A catalog that is ready; gives its URL of HTTP. It leaves out nobody for a busy machine's late heartbeats, and
    refuses nobody for the time that such a machine has taken to answer.
    """
    more.setdefault("limits", LimitSettings(loop_share=1.0))
    settings = ServiceSettings(
        nats_url=url, database_url=database, cluster=cluster, listen="127.0.0.1:0", liveness_s=600.0, **more
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        yield thread.url


@contextmanager
def living(url: str, cluster: str, offsets: dict[str, int], credentials: Credentials | None = None) -> Iterator[None]:
    """Heartbeats of instances, by name, that have published up to these offsets."""
    ended = threading.Event()

    async def live() -> None:
        stream = await NatsStream.connect(url, WAIT_S, credentials=credentials)
        while not ended.is_set():
            for name, offset in offsets.items():
                await beat(stream, cluster, name, offset)
            await asyncio.to_thread(ended.wait, 0.3)
        await stream.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(WAIT_S)


def published(url: str, cluster: str, **namespaces: Namespace) -> dict[str, int]:
    """Instances that each hold the prompt in a namespace; their offsets."""
    return {name: asyncio.run(publish(url, cluster, name, namespace)) for name, namespace in namespaces.items()}


def over_nats(url: str, cluster: str, caller: str = "any", **options: Any) -> CatalogClient:
    return CatalogClient(f"{url}/{cluster}/{caller}", **({"timeout_s": WAIT_S} | options))


def wait_held(client: CatalogClient, count: int) -> None:
    client.wait_ready(WAIT_S)
    eventually(lambda: sum(one.state == "live" for one in client.instances()) == count, "instances are not all live")


@pytest.fixture
def asked(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[tuple[CatalogClient, CatalogClient]]:
    """A catalog of two instances; a client over HTTP and one over NATS."""
    with (
        living(nats_url, cluster, published(nats_url, cluster, one=ACME, two=BETA)),
        served(nats_url, cluster, sqlite_url) as url,
        closing(CatalogClient(url, timeout_s=WAIT_S)) as http,
        closing(over_nats(nats_url, cluster)) as client,
    ):
        wait_held(http, 2)
        client.wait_ready(WAIT_S)
        eventually(lambda: not _is_away(client), "nobody takes questions")
        yield http, client


def outcome(ask: Callable[[], Any]) -> Any:
    """What a question comes to: its answer, or how it is refused."""
    try:
        answer = ask()
    except CatalogRefusedError as error:
        return error.status, error.code, str(error).partition("refuses: ")[2]
    return msgspec.json.decode(msgspec.json.encode(answer))


def untimed(value: Any) -> Any:
    """Without what changes from one answer to the next."""
    if isinstance(value, dict):
        changing = ("heartbeat_age_s", "view_age_s", "queueing_s", "balance_s", "cost_s", "ttft_s", "recompute_s")
        return {key: untimed(one) for key, one in value.items() if key not in changing}
    return [untimed(one) for one in value] if isinstance(value, list) else value


# -- as over HTTP -----------------------------------------------------------------------------------------------------


def test_every_question_has_the_answer_that_it_has_over_http(asked: tuple[CatalogClient, CatalogClient]) -> None:
    hashes, unknown = hashes_in(ACME), bytes(range(16))
    at = PositionWanted(instance="one", epoch=1, offset=1)
    never = PositionWanted(instance="one", epoch=9, offset=1)
    questions: list[Callable[[CatalogClient], Any]] = [
        lambda one: one.lookup(ACME, hashes),
        lambda one: one.lookup(ACME.id, hashes[:32], limit=1),
        lambda one: one.lookup(ACME, hashes, instances=["two"]),
        lambda one: one.lookup(ACME, hashes, at_least=[at]),
        lambda one: one.lookup(ACME, hashes, at_least=[never], wait_s=0.05),
        lambda one: one.lookup(ACME, unknown * 20_000),  # a long body
        lambda one: one.presence(ACME, hashes[32:] + unknown),
        lambda one: one.presence(ACME, hashes, limit=1),
        lambda one: one.presence(ACME, hashes, instances=["two"], at_least=[at]),
        lambda one: one.presence(ACME, hashes, at_least=[never], wait_s=0.05),
        lambda one: one.presence(ACME, unknown * 20_000),
        lambda one: one.presence_many(ACME, [hashes, hashes[16:48], unknown]),
        lambda one: one.presence_many(ACME, [unknown * 20_000, hashes]),
        lambda one: one.find(ACME, hashes),
        lambda one: one.find(ACME.id, hashes, 1, "two", ["zone"], limit=1),
        lambda one: one.find(ACME, hashes, at_least=[never], wait_s=0.05),
        lambda one: one.find_many(ACME, [hashes, unknown], [0, 1], "two", ["zone"]),
        lambda one: one.route(ACME, hashes, len(TOKENS)).instance,
        lambda one: one.route(ACME, hashes, 1),
        lambda one: one.route(ACME, hashes, len(TOKENS), instances=["none"]),
        lambda one: one.lookup_many(ACME, [hashes, hashes[:16], unknown]),
        lambda one: one.lookup_many(ACME, [unknown * 20_000, hashes]),
        lambda one: one.route_many(ACME, [hashes], [len(TOKENS)])[0].instance,
        lambda one: one.block(ACME, hashes[:16]),
        lambda one: one.block(BETA, hashes[:16]),
        lambda one: one.block(ACME, unknown),
        lambda one: one.block(NamespaceId(unknown), unknown),
        lambda one: one.instances(),
        lambda one: one.instance("two"),
        lambda one: one.instance("none"),
        lambda one: one.namespaces(),
        lambda one: one.ready(),
    ]
    http, client = asked
    for number, question in enumerate(questions):
        expected, found = (untimed(outcome(partial(question, one))) for one in (http, client))
        assert found == expected, number


def test_what_is_not_asked_over_nats_is_said_before_anybody_is_asked(
    asked: tuple[CatalogClient, CatalogClient],
) -> None:
    _, client = asked
    for question in (client.metrics, lambda: client.forget(InstanceId("one")), lambda: client.ask_snapshot("one")):
        with pytest.raises(CatalogError, match="is not answered over NATS; ask the catalog over HTTP"):
            question()


def test_threads_share_a_client_and_each_has_its_own_answers(asked: tuple[CatalogClient, CatalogClient]) -> None:
    _, client = asked
    hashes = hashes_in(ACME)

    def ask(number: int) -> bool:
        blocks = 1 + number % 10
        return client.lookup(ACME, hashes[: blocks * HASH_BYTES]).blocks == blocks

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(400)))


def test_a_manager_finds_claims_through_nats(nats_url: str, cluster: str, sqlite_url: str) -> None:
    with served(nats_url, cluster, sqlite_url), closing(HttpLocator(f"{nats_url}/{cluster}/any")) as locator:
        assert locator.find("pool", ACME.id, hashes_in(ACME), 0, WAIT_S) == NOTHING_FOUND


# -- whoever writes messages by hand -----------------------------------------------------------------------------------


async def by_hand(url: str, subject: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and body of the answer to a message."""
    client = await nats.connect(url)
    try:
        message = await client.request(subject, body, WAIT_S, headers=headers)
        return int((message.headers or {})[STATUS_HEADER]), json.loads(message.data)
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("verb", "body", "status", "code"),
    [
        ("lookup", b"", 400, "not_json"),
        ("lookup", b"{", 400, "not_json"),
        ("lookup", b"[" * 100_000, 422, "invalid_request"),
        ("lookup", b"{" * 100_000, 400, "not_json"),
        ("lookup", b'{"namespace": 3}', 422, "invalid_request"),
        ("lookup", b'{"namespace":"' + b"0" * 32 + b'","hashes":"zz"}', 422, "bad_hash"),
        ("route", b'{"namespace":"' + b"0" * 32 + b'","hashes":""}', 422, "input_tokens_missing"),
        ("blocks", b"", 404, "not_found"),
        ("blocks", b"00/11", 422, "bad_hash"),
        ("blocks", b"../../metrics", 404, "not_found"),
        ("blocks", b"\xff/\x00", 404, "not_found"),
        ("blocks", b"a" * 100_000, 404, "not_found"),
        ("instances", b"limit=0", 422, "bad_page"),
        ("instances", b"limit=%ff&after=%00", 422, "bad_page"),
        ("metrics", b"", 404, "not_found"),
        ("forget", b"one", 404, "not_found"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_as_over_http(
    asked: tuple[CatalogClient, CatalogClient],
    nats_url: str,
    cluster: str,
    verb: str,
    body: bytes,
    status: int,
    code: str,
) -> None:
    found = asyncio.run(by_hand(nats_url, f"kvbm.v1.ask.{cluster}.any.{verb}", body))
    assert (found[0], found[1]["error"]["code"]) == (status, code)


def test_a_batch_that_is_none_is_refused(
    asked: tuple[CatalogClient, CatalogClient], nats_url: str, cluster: str
) -> None:
    kind = {"Content-Type": "application/vnd.kvbm.prompts"}
    for body in (b"", b"KVB1", b"\x00" * 100_000):
        found = asyncio.run(by_hand(nats_url, f"kvbm.v1.ask.{cluster}.any.lookup", body, kind))
        assert (found[0], found[1]["error"]["code"]) == (422, "bad_batch")


def test_an_answer_goes_to_an_inbox_and_nowhere_else(
    asked: tuple[CatalogClient, CatalogClient], nats_url: str, cluster: str
) -> None:
    http, over = asked
    before = http.ready().stream_sequence

    async def forge() -> None:
        client = await nats.connect(nats_url)
        heard: list[str] = []

        async def hear(message: Any) -> None:
            heard.append(message.subject)

        await client.subscribe("somewhere.else", cb=hear)
        subject = f"kvbm.v1.ask.{cluster}.any.ready"
        for reply in (f"kvbm.v1.events.{cluster}.one", "somewhere.else", ""):
            await client.publish(subject, b"", reply=reply)
        answer = await client.request(subject, b"", WAIT_S)  # behind these, on the same connection
        assert json.loads(answer.data)["ready"]
        await client.flush()
        assert heard == []
        await client.close()

    asyncio.run(forge())
    assert http.ready().stream_sequence == before
    assert over.lookup(ACME, hashes_in(ACME)).instances[0].suspect is False


def test_an_answer_that_nats_does_not_take_is_an_error_that_says_so(
    tmp_path: Path, cluster: str, sqlite_url: str
) -> None:
    server = started(tmp_path / "nats", settings="max_payload: 4096\n")
    try:
        names = {f"instance-{number}": ACME for number in range(12)}
        with (
            living(server.url, cluster, published(server.url, cluster, **names)),
            served(server.url, cluster, sqlite_url) as url,
            closing(CatalogClient(url, timeout_s=WAIT_S)) as http,
            closing(over_nats(server.url, cluster)) as client,
        ):
            wait_held(http, 12)
            client.wait_ready(WAIT_S)
            with pytest.raises(
                CatalogRefusedError, match=r"the answer has \d+ bytes; NATS takes 3840; ask for less"
            ) as refused:
                client.instances()
            assert (refused.value.status, refused.value.code) == (413, "answer_too_large")
            with pytest.raises(CatalogError, match=r"a question of \d+ bytes; NATS at .* takes 4096: ask over HTTP"):
                client.lookup(ACME, bytes(HASH_BYTES) * 1000)
            assert client.lookup(ACME, hashes_in(ACME)).instances[0].depth == 10
    finally:
        server.stop()


# -- limits -----------------------------------------------------------------------------------------------------------


ENTRY = '[[nats]]\nname = "{name}"\nrole = "{role}"\n{tenants}\n'


def access_file(folder: Path, *callers: tuple[str, str, list[str] | None]) -> Path:
    """A file of callers over NATS, and an operator's token `token` over HTTP."""
    path = folder / "access.toml"
    text = f'[[token]]\nname = "ops"\nrole = "operator"\nsha256 = "{hashed("token")}"\n'
    for name, role, tenants in callers:
        words = f"tenants = {json.dumps(tenants)}" if tenants is not None else ""
        text += ENTRY.format(name=name, role=role, tenants=words)
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_who_floods_is_refused_then_not_listened_to_and_others_go_on(
    tmp_path: Path, nats_url: str, cluster: str, sqlite_url: str
) -> None:
    path = access_file(tmp_path, ("flood", "router", ["acme"]), ("calm", "router", ["acme"]))
    limits = LimitSettings(requests_per_s=50, burst=100)
    body = msgspec.json.encode({"namespace": ACME.id.hex(), "hashes": hashes_in(ACME).hex()})
    statuses: dict[str, int] = {}

    async def flood(ended: threading.Event) -> None:
        client = await nats.connect(nats_url)
        inbox = client.new_inbox()

        async def hear(message: Any) -> None:
            headers = message.headers or {}
            status = headers.get(STATUS_HEADER) or headers.get("Status", "?")
            statuses[status] = statuses.get(status, 0) + 1

        await client.subscribe(inbox, cb=hear)
        while not ended.is_set():
            for _ in range(200):
                await client.publish(f"kvbm.v1.ask.{cluster}.flood.lookup", body, reply=inbox)
            await client.flush()
            await asyncio.sleep(0)
        await client.close()

    with (
        living(nats_url, cluster, published(nats_url, cluster, one=ACME)),
        served(nats_url, cluster, sqlite_url, access=AccessOptions(file=str(path)), limits=limits),
        closing(over_nats(nats_url, cluster, "calm")) as calm,
    ):
        calm.wait_ready(WAIT_S)
        eventually(lambda: not _is_away(calm), "nobody answers")
        eventually(lambda: calm.lookup(ACME, hashes_in(ACME)).instances, "the instance is not live")
        ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(flood(ended)))
        thread.start()
        try:
            eventually(
                lambda: statuses.get("503", 0) > 1000 and "429" in statuses, "it is listened to", state=lambda: statuses
            )
            for _ in range(60):
                assert calm.lookup(ACME, hashes_in(ACME)).instances[0].depth == 10
                time.sleep(0.02)
        finally:
            ended.set()
            thread.join(WAIT_S)
        assert statuses["200"] >= 100
        with closing(over_nats(nats_url, cluster, "flood")) as flooding:
            eventually(lambda: not _is_away(flooding), "it is never listened to again")


def test_a_catalog_that_is_back_in_a_moment_is_waited_for(
    nats_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its connection was lost; and who is not there for longer is told of."""
    begun = threading.Event()

    async def answer_late(ended: threading.Event) -> None:
        client = await nats.connect(nats_url)
        await asyncio.to_thread(begun.wait, WAIT_S)
        await asyncio.sleep(0.2)  # it is asked meanwhile

        async def hear(message: Any) -> None:
            found = LookupAnswer(namespace=ACME.id.hex(), blocks=0, deepest=7, instances=[], pools=[], excluded=[])
            await client.publish(message.reply, msgspec.json.encode(found), headers={STATUS_HEADER: "200"})

        await client.subscribe(f"kvbm.v1.ask.{cluster}.*.lookup", cb=hear)
        await asyncio.to_thread(ended.wait, WAIT_S)
        await client.close()

    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(answer_late(ended)))
    thread.start()
    try:
        with closing(over_nats(nats_url, cluster, "late")) as client:
            assert _is_away(client)
            with monkeypatch.context() as busy:
                busy.setattr(kvbm.locate.nats, "_NOBODY_S", WAIT_S)  # a moment of a busy machine
                begun.set()
                assert client.lookup(ACME, hashes_in(ACME)).deepest == 7
            with pytest.raises(CatalogError, match="nobody listens"):
                client.route(ACME, hashes_in(ACME), 40)
    finally:
        begun.set()
        ended.set()
        thread.join(WAIT_S)


# -- who asks ---------------------------------------------------------------------------------------------------------


class Secured:
    """A server with accounts, the keys of its users, and a file of callers."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self.folder = folder
        self._seeds = {name: folder / f"{name}.nk" for name in ("catalog", "acme", "beta", "ops", "ghost")}
        users = [ServerUser(keep_seed(self._seeds["catalog"]))]
        users += [
            ServerUser(keep_seed(self._seeds[name]), name, Role.ROUTER) for name in ("acme", "beta", "ops", "ghost")
        ]
        self.server = started(folder / "nats", settings=server_config(cluster, users))
        self.access = access_file(
            folder, ("acme", "router", ["acme"]), ("beta", "router", ["beta"]), ("ops", "operator", None)
        )
        self.catalog = Credentials(nkey_seed=str(self._seeds["catalog"]), inbox=catalog_inbox(cluster))

    def credentials(self, key: str) -> CatalogCredentials:
        return CatalogCredentials(nats=NatsCredentials(nkey_seed=str(self._seeds[key])))


@pytest.fixture
def secured(tmp_path: Path, cluster: str) -> Iterator[Secured]:
    made = Secured(tmp_path, cluster)
    yield made
    made.server.stop()


def test_a_caller_sees_its_tenants_alone_and_asks_under_no_other_name(
    secured: Secured, cluster: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvbm.catalog.access.callers, "LOOK_S", 0.0)
    url = secured.server.url
    access = AccessOptions(file=str(secured.access))
    with contextlib.ExitStack() as opened:
        opened.enter_context(served(url, cluster, sqlite_url, access=access, credentials=secured.catalog))

        def asker(name: str, key: str, **options: Any) -> CatalogClient:
            return opened.enter_context(
                closing(over_nats(url, cluster, name, credentials=secured.credentials(key), **options))
            )

        def is_answered(client: CatalogClient) -> bool:
            return _asked(client.instances) is not None

        acme, beta, ops = (asker(name, name) for name in ("acme", "beta", "ops"))
        for one in (acme, beta, ops):
            eventually(partial(is_answered, one), "nobody takes questions")

        opened.enter_context(living(url, cluster, {"one": 0}, secured.catalog))
        eventually(
            lambda: [one.instance for one in ops.instances()] == ["one"], "the operator does not see the instance"
        )
        assert ops.instances()[0].queued_tokens == 5000
        assert all(one.queued_tokens is None for one in acme.instances())
        for one in (acme, beta):
            assert one.ready().stream_sequence is None
        assert outcome(lambda: acme.block(BETA, hashes_in(BETA)[:16]))["holders"] == []
        for other in ("beta", "ops"):
            with pytest.raises(CatalogError, match=r"[Pp]ermissions [Vv]iolation.*nats-permissions --router"):
                asker(other, "acme").lookup(BETA, hashes_in(BETA))
        with pytest.raises(CatalogError, match=r"its file of callers has no .*'ghost'"):
            asker("ghost", "ghost").lookup(ACME, hashes_in(ACME))
        with pytest.raises(CatalogError, match=r"[Aa]uthorization"):
            over_nats(url, cluster, "acme").lookup(ACME, hashes_in(ACME))
        text = secured.access.read_text()
        secured.access.write_text(text.replace('name = "acme"', 'name = "ghost"'))
        eventually(lambda: _is_away(acme), "who is taken out of the file goes on")
        ghost = asker("ghost", "ghost")
        eventually(lambda: not _is_away(ghost), "who is put into the file is not answered")


def _asked(ask: Callable[[], Any]) -> Any:
    """The answer; None where there is none."""
    try:
        return ask()
    except CatalogError:
        return None


def _is_away(client: CatalogClient) -> bool:
    """Asked again and again: a question that gets lost is not waited for."""
    return _asked(lambda: client.lookup(ACME, hashes_in(ACME), timeout_s=5.0)) is None


def test_rights_over_nats_are_those_of_the_same_caller_over_http(
    tmp_path: Path, nats_url: str, cluster: str, sqlite_url: str
) -> None:
    offsets = published(nats_url, cluster, one=ACME, two=BETA)
    path = access_file(tmp_path, ("acme", "router", ["acme"]), ("gauge", "metrics", None))
    token = tmp_path / "acme.token"
    token.write_text("acme-token")
    path.write_text(
        path.read_text()
        + f'[[token]]\nname = "acme"\nrole = "router"\ntenants = ["acme"]\nsha256 = "{hashed("acme-token")}"\n'
    )
    with (
        living(nats_url, cluster, offsets),
        served(nats_url, cluster, sqlite_url, access=AccessOptions(file=str(path))) as url,
        closing(CatalogClient(url, credentials=CatalogCredentials(token=str(token)), timeout_s=WAIT_S)) as http,
        closing(over_nats(nats_url, cluster, "acme")) as client,
        closing(over_nats(nats_url, cluster, "gauge")) as gauge,
    ):
        http.wait_ready(WAIT_S)
        client.wait_ready(WAIT_S)
        eventually(lambda: [one.state for one in http.instances()] == ["live"], "the instance is not live")
        questions: list[Callable[[CatalogClient], Any]] = [
            lambda one: one.lookup(ACME, hashes_in(ACME)),
            lambda one: one.lookup(BETA, hashes_in(BETA)),
            lambda one: one.lookup(BETA.id, hashes_in(BETA)),
            lambda one: one.route(BETA, hashes_in(BETA), len(TOKENS)),
            lambda one: one.route(ACME, hashes_in(ACME), len(TOKENS)),
            lambda one: one.lookup_many(BETA, [hashes_in(BETA)]),
            lambda one: one.presence(ACME, hashes_in(ACME)),
            lambda one: one.presence(BETA, hashes_in(BETA)),
            lambda one: one.presence_many(BETA.id, [hashes_in(BETA)]),
            lambda one: one.find(BETA, hashes_in(BETA)),
            lambda one: one.find_many(BETA.id, [hashes_in(BETA)]),
            lambda one: one.block(BETA, hashes_in(BETA)[:16]),
            lambda one: one.namespaces(),
            lambda one: one.instances(),
            lambda one: one.ready(),
        ]
        for question in questions:
            expected, found = (untimed(outcome(partial(question, one))) for one in (http, client))
            assert found == expected
        assert client.lookup(BETA, hashes_in(BETA)).instances == []
        assert client.presence(BETA, hashes_in(BETA)).holders == []
        assert client.presence_many(BETA, [hashes_in(BETA)])[0].holders == []
        with pytest.raises(CatalogRefusedError, match="the caller's role may not ask this"):
            gauge.lookup(ACME, hashes_in(ACME))


def test_the_command_prints_a_router_that_may_ask_under_its_name_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nats-permissions", "--cluster", "c", "--keys", str(tmp_path), "--router", "r"]) == 0
    found = capsys.readouterr().out
    accounts = json.loads(found.removeprefix("accounts "))
    own = next(one for one in accounts.values() if one.get("imports") and one is not accounts["KVBM"])
    assert own["users"][0]["permissions"] == {
        "publish": {"allow": ["kvbm.v1.ask.c.r.*"]},
        "subscribe": {"allow": ["_INBOX.>"]},
    }
    assert [one["service"] for one in accounts["KVBM"]["exports"]] == ["kvbm.v1.ask.c.r.*"]
    assert (tmp_path / "router-r.nk").exists()


# -- several catalogs, and connections that end ------------------------------------------------------------------------


def test_a_catalog_that_is_not_ready_says_why_and_leaves_questions_to_others(
    nats_url: str, cluster: str, sqlite_url: str, tmp_path: Path
) -> None:
    settings = ServiceSettings(nats_url=nats_url, database_url=sqlite_url, cluster=cluster)
    lookup = {"namespace": ACME.id.hex(), "hashes": hashes_in(ACME).hex()}

    async def work() -> None:
        service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        service.failure = CatalogError("of a reason")
        surface = create_surface(service)
        listening = listen_to_asks(service, surface, Access())
        assert listening is not None
        client = over_nats(nats_url, cluster)
        try:
            over_http = msgspec.json.decode((await ask(surface.app, "POST", "/v1/lookup", lookup)).body)["error"]
            await eventually_async(
                lambda: asyncio.to_thread(_asked, client.ready), "it does not say whether it is ready"
            )
            found = await asyncio.to_thread(outcome, partial(client.lookup, ACME, hashes_in(ACME)))
            words = f"{over_http['message']}; {over_http['what_to_do']}"
            assert found == (503, "not_ready", words) == (503, over_http["code"], words)
            await asyncio.to_thread(ask_another, client)
            assert not service.is_ready
        finally:
            client.close()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await service.close()

    def ask_another(client: CatalogClient) -> None:
        """Each question finds the catalog that is ready."""
        with served(nats_url, cluster, f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"):
            eventually(lambda: not _is_away(client), "nobody takes questions")
            for _ in range(50):
                assert client.lookup(ACME, hashes_in(ACME)).blocks == 10

    asyncio.run(work())


class Process:
    """A catalog as a process."""

    def __init__(self, folder: Path, url: str, cluster: str) -> None:
        flags = {
            "nats.url": url,
            "instance.cluster": cluster,
            "instance.data_dir": folder / "data",
            "catalog.listen": "127.0.0.1:0",
            "catalog.checkpoint_every_s": 1,
            "catalog.liveness_s": 600,
        }
        self._folder = folder
        words = [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
        self._command = [sys.executable, "-m", "kvbm", "catalog", "serve", *words]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._process = start_process(self._command, self._folder / "catalog.log")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(WAIT_S)

    def stop(self) -> None:
        if self._process is not None:
            stop_process(self._process)


@contextmanager
def whole_instance(url: str, cluster: str) -> Iterator[None]:
    """An instance that holds a prompt, is heard, and takes a snapshot when it is asked."""
    ended, ready = threading.Event(), threading.Event()

    async def live() -> None:
        stream = patient(await NatsStream.connect(url, WAIT_S))
        one = Instance(stream, cluster, "one")
        one.create(0, 40)
        await one.snapshot()
        async with one.alive():
            ready.set()
            await asyncio.to_thread(ended.wait)
        await stream.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield
    finally:
        ended.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize("turns", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_one_of_two_catalogs_is_killed_under_load_and_no_question_fails(
    fresh_nats: str, cluster: str, tmp_path: Path, turns: int
) -> None:
    catalogs = [Process(tmp_path / name, fresh_nats, cluster) for name in ("a", "b")]
    hashes, ended = block_hashes(0, 40), threading.Event()
    failed: list[str] = []
    answers = [0] * 4

    def ask(number: int) -> None:
        with closing(over_nats(fresh_nats, cluster, timeout_s=20.0)) as client:
            while not ended.is_set():
                try:
                    answer = client.lookup(SPACE.id, hashes)
                except CatalogError as error:
                    failed.append(str(error))
                    continue
                if not answer.view_age_s and [one.depth for one in answer.instances] != [40]:
                    failed.append(repr(answer))
                answers[number] += 1

    def is_shared() -> bool:
        """Whether both take questions."""
        return all("asks.listening" in (tmp_path / name / "catalog.log").read_text() for name in ("a", "b"))

    opened = contextlib.ExitStack()
    opened.enter_context(whole_instance(fresh_nats, cluster))
    try:
        for one in catalogs:
            one.start()
        eventually(is_shared, "a catalog does not take questions", 2 * WAIT_S)
        with closing(over_nats(fresh_nats, cluster)) as client:
            wait_held(client, 1)
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(turns):
            before = sum(answers)
            eventually(lambda before=before: sum(answers) > before + 100, "nobody answers")  # type: ignore[misc]
            victim = catalogs[turn % 2]
            victim.kill()
            before = sum(answers)
            eventually(lambda before=before: sum(answers) > before + 100, "nobody answers")  # type: ignore[misc]
            if turn + 1 < turns:
                (tmp_path / "ab"[turn % 2] / "catalog.log").unlink()
                victim.start()
                eventually(is_shared, "a catalog does not take questions", 2 * WAIT_S)
        ended.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert failed == []
    finally:
        ended.set()
        for one in catalogs:
            one.stop()
        opened.close()


def test_a_connection_that_is_lost_is_made_again_for_the_next_question(
    tmp_path: Path, cluster: str, sqlite_url: str
) -> None:
    port = free_port()
    server = started(tmp_path / "nats", port)
    other = ""
    try:
        with served(server.url, cluster, sqlite_url), closing(over_nats(server.url, cluster)) as client:
            client.wait_ready(WAIT_S)
            eventually(lambda: not _is_away(client), "nobody takes questions")
            server.stop()
            with pytest.raises(CatalogError, match=r"NATS at nats://127.0.0.1") as failed:
                client.lookup(ACME, hashes_in(ACME))
            assert "\n" not in str(failed.value)
            server = started(tmp_path / "nats", port)
            eventually(lambda: not _is_away(client), "it does not answer again")
            other = client.url
    finally:
        server.stop()
    assert other.startswith("nats://127.0.0.1:")


def test_of_several_servers_one_that_answers_is_enough(
    asked: tuple[CatalogClient, CatalogClient], cluster: str, nats_url: str
) -> None:
    with closing(CatalogClient(f"nats://127.0.0.1:9,{nats_url}/{cluster}/any", timeout_s=WAIT_S)) as client:
        assert client.lookup(ACME, hashes_in(ACME)).blocks == 10
        assert client.url.startswith(nats_url)


@pytest.mark.parametrize(
    "url",
    [
        "nats://",
        "nats://host:99999",
        "nats://a/b/c/d",
        "nats://a/x.y/z",
        "nats://a/b/*",
        "nats://a/b/c,nats://d/e/f",
        "nats://a?x=1",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(CatalogError):
        CatalogClient(url, timeout_s=WAIT_S)


def test_credentials_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    bad = tmp_path / "bad.nk"
    bad.write_text("no seed\n")
    for credentials in (
        NatsCredentials(nkey_seed=str(bad)),
        NatsCredentials(nkey_seed=str(tmp_path / "none")),
        NatsCredentials(credentials=str(bad)),
        NatsCredentials(credentials=str(bad), nkey_seed=str(bad)),
        NatsCredentials(tls_cert=str(bad)),
    ):
        with pytest.raises(ConfigError):
            CatalogClient("nats://127.0.0.1:9", credentials=CatalogCredentials(nats=credentials))


# -- the connection ----------------------------------------------------------------------------------------------------


@contextmanager
def talking(answers: Sequence[bytes], goes_on: bytes = b"") -> Iterator[str]:
    """A server that says one thing after each it hears, and then one thing again and again; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        ended = threading.Event()

        def talk(peer: socket.socket) -> None:
            with peer, contextlib.suppress(OSError):
                peer.settimeout(WAIT_S)
                for answer in answers:
                    peer.sendall(answer)
                    peer.recv(1 << 16)
                while goes_on and not ended.is_set():
                    peer.sendall(goes_on)
                ended.wait(WAIT_S)

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        yield f"nats://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()


GREETING = b'INFO {"headers":true,"max_payload":1024}\r\n'


@pytest.mark.parametrize(
    ("answers", "goes_on", "why"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], b"", "says what NATS does not"),
        ([b"INFO [\r\n"], b"", "does not greet as NATS does"),
        ([b"+OK\r\n"], b"", "does not greet as NATS does"),
        ([b'INFO {"max_payload":5}\r\n'], b"", "the server has no headers"),
        ([], b"x" * 65536, "a line of more than"),
        ([], b"INFO " + b"x" * 65536, "a line of more than"),
        ([], b"", "no answer in time"),
        ([GREETING], b"", "no answer in time"),
        ([GREETING, b"-ERR 'Authorization Violation'\r\n"], b"", "Authorization Violation"),
        ([GREETING, b"PONG\r\n"], b"", "no answer to /readyz within"),
        ([GREETING, b"PONG\r\n"], b"MSG other 1 5\r\nhello\r\n" * 1000, "no answer to /readyz within"),
        ([GREETING, b"PONG\r\n"], b"PING\r\n" * 100, "no answer to /readyz within|takes no more bytes|is lost"),
        ([GREETING, b"PONG\r\n"], b"MSG other 1 99999999\r\n", "says what NATS does not"),
        ([GREETING, b"PONG\r\n"], b"HMSG other 1 9 4\r\n", "says what NATS does not"),
        ([GREETING, b"PONG\r\n"], b"+OK\r\n-ERR 'Maximum Connections Exceeded'\r\n", "Maximum Connections Exceeded"),
    ],
)
def test_a_server_that_says_something_else_is_an_error_in_one_sentence(
    answers: Sequence[bytes], goes_on: bytes, why: str
) -> None:
    with (
        talking(answers, goes_on) as url,
        closing(CatalogClient(url, timeout_s=1.0 if "within" in why or "in time" in why else WAIT_S)) as client,
        pytest.raises(CatalogError, match=why) as failed,
    ):
        client.ready()
    assert "\n" not in str(failed.value)


def test_a_server_with_tls_and_a_password_is_asked_and_one_without_tls_is_not(
    tmp_path: Path, cluster: str, sqlite_url: str
) -> None:
    ca = certify(tmp_path, "ca")
    made = certify(tmp_path, "server", ca)
    lines = f"tls {{ cert_file: {json.dumps(str(made.cert))}, key_file: {json.dumps(str(made.key))} }}\n"
    server = started(
        tmp_path / "nats", settings=lines + 'authorization { users: [{user: "me", password: "secret"}] }\n'
    )
    plain = started(tmp_path / "plain")
    port = server.url.rpartition(":")[2]
    trusted = CatalogCredentials(nats=NatsCredentials(tls_ca=str(ca.cert)))
    try:
        url = f"tls://me:secret@127.0.0.1:{port}"
        with (
            served(url, cluster, sqlite_url, credentials=Credentials(tls_ca=str(ca.cert))),
            closing(over_nats(url, cluster, credentials=trusted)) as client,
        ):
            eventually(lambda: not _is_away(client), "nobody answers", state=lambda: _why(client))
            assert "cret" not in client.url
            with (
                closing(over_nats(url, cluster)) as stranger,
                pytest.raises(CatalogError, match=r"check nats\.tls_ca") as failed,
            ):
                stranger.ready()
            assert "cret" not in str(failed.value)
            wrong = url.replace("secret", "other")
            with (
                closing(over_nats(wrong, cluster, credentials=trusted)) as guessing,
                pytest.raises(CatalogError, match=r"[Aa]uthorization"),
            ):
                guessing.ready()
        with (
            closing(over_nats(plain.url, cluster, credentials=trusted)) as client,
            pytest.raises(CatalogError, match="the server offers no TLS, and the settings want it"),
        ):
            client.ready()
    finally:
        server.stop()
        plain.stop()


def _why(client: CatalogClient) -> str:
    try:
        return str(client.ready())
    except CatalogError as error:
        return str(error)
