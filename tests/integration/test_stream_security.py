"""The stream's keys, certificates and permissions, on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nats
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import open_manager
from kvbm.cli import main
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.parts import part_of, part_word
from kvbm.streams.base import (
    ERASE_PREFIX,
    ERASED_PREFIX,
    EVENTS_PREFIX,
    FENCE_PREFIX,
    PULSE_PREFIX,
    ROUTES_PREFIX,
    SAMPLES_PREFIX,
    SNAPSHOTS_PREFIX,
    AwayError,
    Heartbeat,
    Position,
    StreamMessage,
    events_subject,
    fence_subject,
    instance_subject,
    is_fence,
    mark_of,
    pulse_subject,
    still_holds,
)
from kvbm.streams.nats import batch_reader
from kvbm.streams.nats.connection import BORROWED_API, JS_API
from kvbm.streams.nats.credentials import INBOX, Credentials, keep_seed
from kvbm.streams.nats.key_folder import KeyChange, print_accounts
from kvbm.streams.nats.permissions import (
    Role,
    ServerUser,
    catalog_inbox,
    erase_subject,
    instance_inbox,
    instance_permissions,
    server_config,
)
from kvbm.streams.nats.read_only import ReadOnlyStream
from kvbm.streams.nats.setup import ERASURES, PULSE, STREAM
from kvbm.streams.nats.stream import NatsStream
from kvbm.workload.probe import main as probe
from tests.certificates import Certificate, certify
from tests.eventually import eventually_async
from tests.extras import needed
from tests.managers import BLOCK_BYTES, NAMESPACE, serve
from tests.nats_fixture import WAIT_S, fetch_for_ever, fetched, fresh_nats, make_frame, patient, started
from tests.reloading import ReloadingServer

nkeys = needed("nkeys", "nkeys")
serialization = needed("cryptography.hazmat.primitives.serialization", "crypto")

__all__ = ["fresh_nats"]

ROOT = Path(__file__).parents[2]
CLUSTER = "c"
A, B = InstanceId("a"), InstanceId("b")


# -- certificates ------------------------------------------------------------------------------------------------------


class Certificates(NamedTuple):
    """Of a test."""

    ca: Certificate
    server: Certificate
    client: Certificate
    other_ca: Certificate
    other_client: Certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = certify(folder, "ca"), certify(folder, "other-ca")
    return Certificates(
        ca, certify(folder, "server", ca), certify(folder, "client", ca), other, certify(folder, "other-client", other)
    )


def tls_lines(made: Certificates, verify: bool = False) -> str:
    return (
        f"tls {{ cert_file: {json.dumps(str(made.server.cert))}, key_file: {json.dumps(str(made.server.key))}, "
        f"ca_file: {json.dumps(str(made.ca.cert))}, verify: {json.dumps(verify)} }}"
    )


def connect(url: str, credentials: Credentials | None = None) -> NatsStream:
    """Connect, publish a frame and close. Raises StreamError."""

    async def work() -> NatsStream:
        stream = patient(await NatsStream.connect(url, WAIT_S, credentials=credentials))
        try:
            assert await stream.publish(CLUSTER, A, make_frame(0).data) > 0
        finally:
            await stream.close()
        return stream

    return asyncio.run(work())


def refusal(url: str, credentials: Credentials | None = None) -> str:
    with pytest.raises(StreamError) as refused:
        connect(url, credentials)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture(scope="module")
def tls_url(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = started(tmp_path_factory.mktemp("tls"), settings=tls_lines(certificates))
    yield server.url.replace("nats://", "tls://")
    server.stop()


@pytest.fixture(scope="module")
def mutual_url(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = started(tmp_path_factory.mktemp("mutual"), settings=tls_lines(certificates, verify=True))
    yield server.url
    server.stop()


def test_a_server_is_believed_by_the_ca_that_was_named(tls_url: str, certificates: Certificates) -> None:
    connect(tls_url, Credentials(tls_ca=str(certificates.ca.cert)))
    connect(tls_url.replace("tls://", "nats://"), Credentials(tls_ca=str(certificates.ca.cert)))


def test_a_server_of_another_ca_is_refused_in_one_sentence(tls_url: str, certificates: Certificates) -> None:
    for credentials in (Credentials(tls_ca=str(certificates.other_ca.cert)), None):
        words = refusal(tls_url, credentials)
        assert "CERTIFICATE_VERIFY_FAILED" in words
        assert "check nats.tls_ca" in words


def test_a_server_with_another_hosts_certificate_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    elsewhere = certificates._replace(server=certify(tmp_path, "elsewhere", certificates.ca, host="10.1.2.3"))
    server = started(tmp_path / "nats", settings=tls_lines(elsewhere))
    try:
        assert "names this host" in refusal(server.url, Credentials(tls_ca=str(certificates.ca.cert)))
    finally:
        server.stop()


def test_a_server_without_tls_hears_nothing_where_tls_is_wanted(fresh_nats: str, certificates: Certificates) -> None:
    for url, credentials in (
        (fresh_nats, Credentials(tls_ca=str(certificates.ca.cert))),
        (fresh_nats.replace("nats://", "tls://me:secret@"), None),
    ):
        words = refusal(url, credentials)
        assert "offers no TLS" in words
        assert "secret" not in words


def test_a_client_shows_a_certificate_where_the_server_wants_one(mutual_url: str, certificates: Certificates) -> None:
    ca, client, other = str(certificates.ca.cert), certificates.client, certificates.other_client
    connect(mutual_url, Credentials(tls_ca=ca, tls_cert=str(client.cert), tls_key=str(client.key)))
    for refused in (
        Credentials(tls_ca=ca),
        Credentials(tls_ca=ca, tls_cert=str(other.cert), tls_key=str(other.key)),
    ):
        assert "no connection to NATS" in refusal(mutual_url, refused)


def test_a_clients_certificate_changes_without_a_restart_of_anybody(certificates: Certificates, tmp_path: Path) -> None:
    ca, cert, key = tmp_path / "clients.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    tls = (
        f"tls {{ cert_file: {json.dumps(str(certificates.server.cert))}, key_file: "
        f"{json.dumps(str(certificates.server.key))}, "
        f"ca_file: {json.dumps(str(ca))}, verify: true }}"
    )
    ca.write_bytes(certificates.ca.cert.read_bytes())
    server = ReloadingServer(tmp_path / "nats", tls)
    credentials = Credentials(tls_ca=str(certificates.ca.cert), tls_cert=str(cert), tls_key=str(key))

    def show(made: Certificate) -> None:
        cert.write_bytes(made.cert.read_bytes())
        key.write_bytes(made.key.read_bytes())

    async def work() -> None:
        show(certificates.client)
        stream = patient(await NatsStream.connect(server.url, WAIT_S, credentials=credentials))
        reader = await stream.pull(0, CLUSTER)
        await stream.publish(CLUSTER, A, make_frame(0).data)
        assert len(await fetched(reader, 1)) == 1
        ca.write_bytes(certificates.ca.cert.read_bytes() + certificates.other_ca.cert.read_bytes())
        await asyncio.to_thread(server.reload, tls)
        show(certificates.other_client)
        ca.write_bytes(certificates.other_ca.cert.read_bytes())
        await asyncio.to_thread(server.reload, tls)
        await stream._connections.now.client.close()
        assert await reader.fetch(0.5) == []
        await stream.publish(CLUSTER, A, make_frame(1).data)
        assert [message.sequence for message in await reader.fetch(WAIT_S)] == [2]
        show(certificates.client)
        assert "no connection to NATS" in await asyncio.to_thread(refusal, server.url, credentials)
        await stream.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()


def test_files_that_cannot_be_used_are_named_with_their_setting(certificates: Certificates, tmp_path: Path) -> None:
    ca, client, other = (str(certificates.ca.cert), certificates.client, certificates.other_client)
    garbage = tmp_path / "garbage"
    garbage.write_text("nothing of the kind\n")
    half = tmp_path / "half.creds"
    half.write_text("-----BEGIN NATS USER JWT-----\nx\n-----BEGIN USER NKEY SEED-----\n")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        client.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    account = tmp_path / "account"
    account.write_bytes(bytes(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT)))
    missing = str(tmp_path / "missing")
    for credentials, words in (
        (Credentials(tls_ca=missing), f"nats.tls_ca {missing} cannot be read"),
        (Credentials(tls_ca=str(garbage)), "nats.tls_ca .* holds no certificate"),
        (Credentials(tls_cert=str(client.cert)), "nats.tls_cert is set without nats.tls_key"),
        (Credentials(tls_key=str(client.key)), "nats.tls_key is set without nats.tls_cert"),
        (Credentials(tls_ca=ca, tls_cert=missing, tls_key=missing), "nats.tls_cert .* cannot be read"),
        (Credentials(tls_ca=ca, tls_cert=str(client.cert), tls_key=str(other.key)), "do not belong together"),
        (Credentials(tls_ca=ca, tls_cert=str(client.cert), tls_key=str(locked)), "password"),
        (Credentials(nkey_seed=missing), "nats.nkey_seed .* cannot be read"),
        (Credentials(nkey_seed=str(garbage)), "nats.nkey_seed .* holds no seed of a user"),
        (Credentials(nkey_seed=str(account)), "nats.nkey_seed .* holds no seed of a user"),
        (Credentials(credentials=missing), "nats.credentials .* cannot be read"),
        (Credentials(credentials=str(garbage)), "nats.credentials .* has no user's JWT and seed"),
        (Credentials(credentials=str(half)), "nats.credentials .* holds no seed of a user"),
        (Credentials(credentials=str(garbage), nkey_seed=str(garbage)), "keep one of them"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            credentials.connect_options("nats://127.0.0.1:4222")
        assert "\n" not in str(refused.value)
        assert "no answer" not in refusal("nats://127.0.0.1:1", credentials)  # said at once, before anything is sent


def test_files_are_read_again_for_each_connection(certificates: Certificates, tmp_path: Path) -> None:
    seed, creds, ca = tmp_path / "seed.nk", tmp_path / "user.creds", tmp_path / "ca.pem"
    credentials = [Credentials(nkey_seed=str(seed), tls_ca=str(ca)), Credentials(credentials=str(creds))]
    found = []
    for name, issuer in (("one", certificates.ca), ("two", certificates.other_ca)):
        keep_seed(tmp_path / name)
        text = (tmp_path / name).read_text()
        seed.write_text(text)
        ca.write_bytes(issuer.cert.read_bytes())
        creds.write_text(
            f"-----BEGIN NATS USER JWT-----\n{name}\n-----END\n-----BEGIN USER NKEY SEED-----\n{text}-----END\n"
        )
        first, second = (one.connect_options("tls://127.0.0.1:4222") for one in credentials)
        assert first["nkeys_seed_str"] == text.strip()
        assert text in str(second["user_credentials"])
        found.append(first["tls"].get_ca_certs()[0]["subject"])
    assert found[0] != found[1]


# -- users and permissions ---------------------------------------------------------------------------------------------


class Secured(NamedTuple):
    """A server whose users have keys, and the credentials of each."""

    url: str
    a: Credentials
    b: Credentials
    catalog: Credentials
    replay: Credentials
    operator: Credentials
    replica: Credentials


@pytest.fixture(params=["started", "reloaded"])
def secured(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Secured]:
    """Accounts that the server was started with, or that were spare until it reloaded its configuration."""
    users, found = [], []
    for name, inbox, user, role in (
        ("a", instance_inbox(CLUSTER, A), A, Role.INSTANCE),
        ("b", instance_inbox(CLUSTER, B), B, Role.INSTANCE),
        ("catalog", catalog_inbox(CLUSTER), None, Role.CATALOG),
        ("replay", INBOX, "desk", Role.REPLAY),
        ("operator", INBOX, "ops", Role.OPERATOR),
        ("replica", INBOX, "near", Role.REPLICA),
    ):
        seed = tmp_path / "keys" / f"{name}.nk"
        users.append(ServerUser(keep_seed(seed), user, role, account=f"KVBM-{name}"))
        assert keep_seed(seed) == users[-1].nkey  # the second time it is read
        assert seed.stat().st_mode & 0o777 == 0o600
        found.append(Credentials(nkey_seed=str(seed), inbox=inbox, grant=f"the words for {name}"))
    accounts = server_config(CLUSTER, users)
    if request.param == "started":
        server = ReloadingServer(tmp_path / "nats", accounts)
    else:
        spares = [user.account for user in users if user.kind is not Role.CATALOG]
        server = ReloadingServer(tmp_path / "nats", server_config(CLUSTER, [users[2]], spares))
        server.reload(accounts)
    yield Secured(server.url, *found)
    server.stop()


def make_streams(secured: Secured) -> None:
    async def work() -> None:
        await (await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog)).close()

    asyncio.run(work())


async def stored(secured: Secured, subjects: str) -> list[StreamMessage]:
    """All that the server keeps of events, fences or pulses, as the catalog reads it."""
    stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog))
    try:
        reader = await stream.pull(0, CLUSTER)
        found: list[StreamMessage] = []
        while not reader.at_end:
            found += await reader.fetch(WAIT_S)
        return [message for message in found if message.subject == subjects]
    finally:
        await stream.close()


def beat(instance: InstanceId) -> Heartbeat:
    return Heartbeat(instance=instance, cluster=CLUSTER, epoch=Epoch(1), published=Offset(0), wall_time_ns=0)


async def keep_beating(stream: NatsStream, instance: InstanceId) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await stream.send_pulse(beat(instance))
            await asyncio.sleep(0.01)


def test_users_without_a_key_or_with_another_one_are_turned_away(secured: Secured, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.nk"
    keep_seed(stranger)
    for credentials in (None, Credentials(nkey_seed=str(stranger))):
        assert "or the key" in refusal(secured.url, credentials)


def test_an_instance_and_the_catalog_can_do_all_they_need(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        catalog = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog))
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        reader = await catalog.pull(0, CLUSTER)
        assert await stream.tail(CLUSTER, A) is None
        assert await stream.fence(CLUSTER, A) is None
        fence = await stream.set_fence(CLUSTER, A, Epoch(1), "run", 0)
        assert await stream.fence(CLUSTER, A) == fence
        await stream.publish(CLUSTER, A, make_frame(0, instance="a").data, fence=fence)
        assert (await stream.tail(CLUSTER, A)) is not None
        assert (await stream.state()).last_sequence == 2
        message = await catalog.message(2)
        assert message is not None and await still_holds(catalog, mark_of(message))
        await stream.send_pulse(beat(A))
        asked = asyncio.create_task(anext(aiter(stream.watch_snapshot_asks(CLUSTER, A))))
        async with asyncio.timeout(WAIT_S):
            read = [message.subject for message in await fetched(reader, 2)]
            assert read == [fence_subject(CLUSTER, A), events_subject(CLUSTER, A)]
            assert await anext(aiter(catalog.watch_pulses(CLUSTER))) == beat(A)
            assert await stream.last_pulse(CLUSTER, A) == beat(A)
            assert await catalog.last_pulse(CLUSTER, A) == beat(A)
            await eventually_async(lambda: catalog.ask_snapshot(CLUSTER, A), "nobody hears the ask")
            await asked
        await stream.close()
        await catalog.close()

    asyncio.run(work())


def test_an_instance_cannot_write_for_another_and_is_told_so(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        for attempt in (
            stream.publish(CLUSTER, B, make_frame(0, instance="b").data),
            stream.publish("other", A, make_frame(0, instance="a").data),
            stream.set_fence(CLUSTER, B, Epoch(9), "run", 0),
            stream.tail(CLUSTER, B),
            stream.fence(CLUSTER, B),
            stream.last_pulse(CLUSTER, B),
            stream.ask_snapshot(CLUSTER, B),
            stream.pull(0, CLUSTER),
        ):
            with pytest.raises(StreamError, match=r"permissions violation.*the words for a"):
                await attempt
        await stream.send_pulse(beat(B))  # not answered; the next one is told
        with pytest.raises(StreamError, match="permissions violation"):
            await keep_beating(stream, B)
        await stream.publish(CLUSTER, A, make_frame(0, instance="a").data)  # its own subject is still its own
        await stream.close()
        assert len(await stored(secured, events_subject(CLUSTER, A))) == 1
        assert await stored(secured, events_subject(CLUSTER, B)) == []

    asyncio.run(work())


def test_an_instance_cannot_hear_what_another_is_answered_or_asked(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        with pytest.raises(StreamError, match="permissions violation"):
            async with asyncio.timeout(WAIT_S):
                await anext(aiter(stream.watch_snapshot_asks(CLUSTER, B)))
        errors: list[Exception] = []

        async def keep(error: Exception) -> None:
            errors.append(error)

        client = await nats.connect(secured.url, error_cb=keep, **secured.a.connect_options(secured.url))
        for subject in (f"{instance_inbox(CLUSTER, B)}.>", "_INBOX.>", ">", "kvbm.v1.events.>", "$JS.>"):
            await client.subscribe(subject)
        await client.flush()
        await eventually_async(lambda: len(errors) >= 5, "not all is refused", state=lambda: errors)
        assert len(errors) == 5
        await client.close()
        await stream.close()

    asyncio.run(work())


@pytest.mark.parametrize("who", ["a", "catalog"])
def test_nobody_can_purge_delete_or_rewind_the_stream(secured: Secured, who: str) -> None:
    make_streams(secured)

    async def work() -> None:
        refused: list[Exception] = []

        async def keep(error: Exception) -> None:
            refused.append(error)

        credentials: Credentials = getattr(secured, who)
        client = await nats.connect(secured.url, error_cb=keep, **credentials.connect_options(secured.url))
        calls = ["STREAM.PURGE.KVBM", "STREAM.DELETE.KVBM", "STREAM.MSG.DELETE.KVBM", "STREAM.SNAPSHOT.KVBM"]
        calls += [
            "STREAM.PURGE.KVBM_PULSE",
            "STREAM.DELETE.KVBM_PULSE",
            "STREAM.RESTORE.KVBM",
            "STREAM.CREATE.OTHER",
            "STREAM.UPDATE.KVBM",
        ]
        if who == "a":
            calls += ["STREAM.CREATE.KVBM", "CONSUMER.CREATE.KVBM", "STREAM.MSG.GET.KVBM"]
        for call in calls:
            await client.publish(f"$JS.API.{call}", b"{}", reply=client.new_inbox())
        await client.flush()
        await eventually_async(lambda: len(refused) >= len(calls), "not all is refused", state=lambda: refused)
        assert len(refused) == len(calls)
        await client.close()

    asyncio.run(work())


def test_an_instance_that_comes_before_the_catalog_says_what_is_missing(secured: Secured) -> None:
    words = refusal(secured.url, secured.a)
    assert "permissions violation" in words
    assert "STREAM.CREATE" in words.upper()


def test_a_reply_subject_is_no_way_to_write_for_another(secured: Secured) -> None:
    """The server answers where it is asked to; were that another's subject, the answer would be stored there."""
    make_streams(secured)

    async def work() -> None:
        async def ignore(error: Exception) -> None:
            pass

        client = await nats.connect(secured.url, error_cb=ignore, **secured.a.connect_options(secured.url))
        forged = make_frame(0, instance="b").data  # on its own subject it may say what it likes
        for victim in (events_subject(CLUSTER, B), fence_subject(CLUSTER, B), pulse_subject(CLUSTER, B)):
            await client.publish(events_subject(CLUSTER, A), forged, reply=victim)
            for api in (JS_API, BORROWED_API):
                await client.publish(f"{api}.DIRECT.GET.KVBM.{events_subject(CLUSTER, A)}", b"", reply=victim)
                await client.publish(f"{api}.STREAM.INFO.KVBM", b"", reply=victim)
        await client.flush()
        await client.close()

        async def is_stored() -> bool:
            return len(await stored(secured, events_subject(CLUSTER, A))) == 3

        await eventually_async(is_stored, "not all is stored that may be")
        honest = await NatsStream.connect(
            secured.url, WAIT_S, credentials=secured.a
        )  # is answered after what was asked before
        await honest.close()
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.b))
        assert await stream.tail(CLUSTER, B) is None
        assert await stream.fence(CLUSTER, B) is None
        assert await stream.last_pulse(CLUSTER, B) is None
        await stream.close()
        assert {message.data for message in await stored(secured, events_subject(CLUSTER, A))} == {forged}

    asyncio.run(work())


async def _fill(secured: Secured) -> None:
    stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
    for at in range(3):
        await stream.publish(CLUSTER, A, make_frame(at, instance="a").data)
    await stream.close()


def test_a_user_of_replay_reads_all_and_in_order(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        await _fill(secured)
        expected = await stored(secured, events_subject(CLUSTER, A))
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.replay, makes=False))
        reader = await stream.pull(0, CLUSTER, WAIT_S)
        found = await fetched(reader, len(expected))
        assert found == expected  # with time and fence, as a consumer has them
        while not reader.at_end:  # the word that ends a batch comes after its last message
            assert await reader.fetch(0.1) == []
        assert reader.reached == 3
        assert await reader.fetch(0.3) == []
        await _fill(secured)
        assert [message.sequence for message in await fetched(reader, 3)] == [4, 5, 6]
        assert (await (await stream.pull(2, CLUSTER, WAIT_S)).fetch(WAIT_S))[0].sequence == 3
        assert await still_holds(stream, mark_of(found[2]))
        await stream.close()

    asyncio.run(work())


def test_a_user_of_replay_reads_many_messages_over_a_lost_connection(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_streams(secured)
    monkeypatch.setattr(batch_reader, "BATCH_MESSAGES", 300)
    monkeypatch.setattr(batch_reader, "BATCH_BYTES", 20_000)

    async def work() -> None:
        writer = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        for first in range(0, 2000, 500):
            await asyncio.gather(
                *(writer.publish(CLUSTER, A, make_frame(at, instance="a").data) for at in range(first, first + 500))
            )
        await writer.close()
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.replay, makes=False))
        reader = await stream.pull(0, CLUSTER, WAIT_S)
        found: list[int] = []
        while not reader.at_end:
            found += [message.sequence for message in await reader.fetch(WAIT_S)]
            if len(found) > 500 and reader.begun == 1:
                await stream._connections.now.client.close()
        assert found == list(range(1, 2001))
        assert reader.begun == 2
        await stream.close()

    asyncio.run(work())


def test_a_replica_reads_events_and_hears_everybody_and_its_own_echo(secured: Secured) -> None:
    make_streams(secured)
    own = Heartbeat(
        instance=InstanceId("_catalog-1"), cluster="_catalogs", epoch=Epoch(1), published=Offset(0), wall_time_ns=7
    )

    async def work() -> tuple[list[str], list[str]]:
        writer = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        stream = await ReadOnlyStream.follow(secured.url, WAIT_S, secured.replica)
        heard: list[str] = []
        try:
            await writer.publish(CLUSTER, A, make_frame(0, instance=A).data)
            await writer.send_pulse(beat(A))
            reader = await stream.pull(0, CLUSTER)
            found = [message.subject for message in await fetched(reader, 1)]
            async with asyncio.timeout(WAIT_S):
                echoes = asyncio.create_task(keep_asking(stream, own))
                async for heartbeat in stream.watch_pulses(CLUSTER):
                    heard.append(heartbeat.instance)
                    if heartbeat.instance == own.instance:
                        break
                echoes.cancel()
            assert await stream.ask_snapshot(CLUSTER, A) is False
            return found, heard
        finally:
            await writer.close()
            await stream.close()

    found, heard = asyncio.run(work())
    assert found == [events_subject(CLUSTER, A)]
    assert heard[0] == A  # before the echo: what was stored before the question
    assert heard[-1] == own.instance


async def keep_asking(stream: ReadOnlyStream, pulse: Heartbeat) -> None:
    while True:
        with contextlib.suppress(StreamError):
            await stream.send_pulse(pulse)
        await asyncio.sleep(0.05)


def test_a_user_of_replay_can_change_nothing(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        await _fill(secured)
        before = await stored(secured, events_subject(CLUSTER, A))
        refused: list[Exception] = []

        async def keep(error: Exception) -> None:
            refused.append(error)

        client = await nats.connect(secured.url, error_cb=keep, **secured.replay.connect_options(secured.url))
        subjects = [subject(CLUSTER, A) for subject in (events_subject, fence_subject, pulse_subject)]
        calls = [
            "CONSUMER.CREATE.KVBM",
            "CONSUMER.CREATE.KVBM.name",
            "CONSUMER.DURABLE.CREATE.KVBM.name",
            "STREAM.PURGE.KVBM",
        ]
        calls += ["STREAM.CREATE.KVBM", "STREAM.UPDATE.KVBM", "STREAM.MSG.DELETE.KVBM", "STREAM.DELETE.KVBM"]
        subjects += [f"{api}.{call}" for call in calls for api in (JS_API, BORROWED_API)]
        subjects += [erase_subject(CLUSTER), instance_subject(ERASED_PREFIX, CLUSTER, A)]
        for subject in subjects:
            await client.publish(subject, b"{}", reply=client.new_inbox())
        for victim in (events_subject(CLUSTER, A), fence_subject(CLUSTER, A), pulse_subject(CLUSTER, A)):
            for call, asked in (
                ("DIRECT.GET.KVBM", b'{"seq":1,"batch":2}'),
                ("STREAM.MSG.GET.KVBM", b'{"seq":1}'),
                ("STREAM.INFO.KVBM", b""),
            ):
                await client.publish(f"{BORROWED_API}.{call}", asked, reply=victim)
        await client.flush()
        await eventually_async(lambda: len(refused) >= len(subjects), "not all is refused", state=lambda: refused)
        assert len(refused) == len(subjects)
        await client.close()
        reader = await NatsStream.connect(
            secured.url, WAIT_S, credentials=secured.replay, makes=False
        )  # is answered after all that
        await reader.close()
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a))
        assert await stored(secured, events_subject(CLUSTER, A)) == before
        assert await stream.last_pulse(CLUSTER, A) is None
        assert await stream.fence(CLUSTER, A) is None
        await stream.close()

    asyncio.run(work())


def test_an_operator_says_what_to_erase_and_every_instance_reads_and_answers_it(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        owner = await nats.connect(secured.url, **secured.catalog.connect_options(secured.url))
        config = {"name": ERASURES, "subjects": ["kvbm.v1.erase.>", "kvbm.v1.erased.>"], "allow_direct": True}
        await owner.request(f"{JS_API}.STREAM.CREATE.{ERASURES}", json.dumps(config).encode())
        client = await nats.connect(secured.url, **secured.b.connect_options(secured.url))
        operator = await nats.connect(secured.url, **secured.operator.connect_options(secured.url))
        answer = json.loads((await operator.request(erase_subject(CLUSTER), b"tenant acme")).data)
        assert answer["stream"] == ERASURES
        for call, user in (
            (f"DIRECT.GET.{ERASURES}.{erase_subject(CLUSTER)}", client),
            ("STREAM.INFO.KVBM_ERASE", operator),
        ):
            assert (await user.request(f"{BORROWED_API}.{call}", b"")).data
        done = instance_subject(ERASED_PREFIX, CLUSTER, B)
        assert json.loads((await client.request(done, b"done")).data)["stream"] == ERASURES
        pool = instance_subject(ERASED_PREFIX, CLUSTER, "objects-1")
        assert json.loads((await operator.request(pool, b"done")).data)["stream"] == ERASURES
        said = await operator.request(f"{BORROWED_API}.DIRECT.GET.{ERASURES}.{done}", b"")
        assert said.data == b"done"
        for one in (owner, client, operator):
            await one.close()

    asyncio.run(work())


def test_an_operator_cannot_write_events(secured: Secured) -> None:
    make_streams(secured)

    async def work() -> None:
        refused: list[Exception] = []

        async def keep(error: Exception) -> None:
            refused.append(error)

        client = await nats.connect(secured.url, error_cb=keep, **secured.operator.connect_options(secured.url))
        subjects = [events_subject(CLUSTER, A), fence_subject(CLUSTER, A), pulse_subject(CLUSTER, A)]
        subjects += [
            f"{BORROWED_API}.{call}" for call in ("STREAM.PURGE.KVBM", "CONSUMER.CREATE.KVBM", "DIRECT.GET.KVBM")
        ]
        for subject in subjects:
            await client.publish(subject, b"{}", reply=client.new_inbox())
            await client.publish(erase_subject(CLUSTER), b"{}", reply=subject)
            await client.publish(f"{BORROWED_API}.STREAM.INFO.{PULSE}", b"", reply=subject)
        await client.flush()
        await eventually_async(lambda: len(refused) >= len(subjects), "not all is refused", state=lambda: refused)
        await client.close()
        await (await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a)).close()
        assert await stored(secured, events_subject(CLUSTER, A)) == []
        assert len(refused) == len(subjects)

    asyncio.run(work())


def test_a_reload_that_adds_somebody_ends_no_connection(tmp_path: Path) -> None:
    def user(name: str, instance: InstanceId | None) -> ServerUser:
        return ServerUser(keep_seed(tmp_path / name), instance, account=f"KVBM-{name}")

    users = [user("catalog", None), user("a", A)]
    server = ReloadingServer(tmp_path / "nats", server_config(CLUSTER, users, ["KVBM-b"]))

    def of(name: str, inbox: str) -> Credentials:
        return Credentials(nkey_seed=str(tmp_path / name), inbox=inbox)

    async def work() -> None:
        catalog = patient(
            await NatsStream.connect(server.url, WAIT_S, credentials=of("catalog", catalog_inbox(CLUSTER)))
        )
        stream = patient(await NatsStream.connect(server.url, WAIT_S, credentials=of("a", instance_inbox(CLUSTER, A))))
        reader = await catalog.pull(0, CLUSTER)
        await stream.publish(CLUSTER, A, make_frame(0, instance="a").data)
        await asyncio.to_thread(server.reload, server_config(CLUSTER, [*users, user("b", B)]))
        added = patient(await NatsStream.connect(server.url, WAIT_S, credentials=of("b", instance_inbox(CLUSTER, B))))
        await added.publish(CLUSTER, B, make_frame(0, instance="b").data)
        await stream.publish(CLUSTER, A, make_frame(1, instance="a").data)  # a lost connection would fail it
        found: list[StreamMessage] = []
        while len(found) < 3:
            found += await reader.fetch(WAIT_S)
        assert (reader.begun, stream.is_connected, catalog.is_connected) == (1, True, True)
        for one in (added, stream, catalog):
            await one.close()

    try:
        asyncio.run(work())
    finally:
        server.stop()


def test_two_keys_of_one_instance_overlap_and_then_the_old_one_is_turned_away(tmp_path: Path) -> None:
    keys, wanted = tmp_path / "keys", [(Role.INSTANCE, "a")]

    def accounts(change: KeyChange) -> str:
        return print_accounts(keys, CLUSTER, wanted, change, time.time()).text

    server = ReloadingServer(tmp_path / "nats", accounts(KeyChange()))
    old, new = tmp_path / "old.nk", tmp_path / "new.nk"
    shutil.copy(keys / "instance-a.nk", old)

    def of(seed: Path) -> Credentials:
        return Credentials(nkey_seed=str(seed), inbox=instance_inbox(CLUSTER, A))

    catalog = Credentials(nkey_seed=str(keys / "catalog.nk"), inbox=catalog_inbox(CLUSTER))
    try:
        asyncio.run(_connect_and_close(server.url, catalog))
        connect(server.url, of(old))
        renewed = accounts(KeyChange(renew=["instance-a"]))
        shutil.copy(keys / "instance-a.next.nk", new)
        assert "or the key" in refusal(server.url, of(new))  # not yet
        connect(server.url, of(keys / "instance-a.nk"))
        server.reload(renewed)
        for seed in (old, new):
            connect(server.url, of(seed))
        retired = accounts(KeyChange(retire=["instance-a"]))
        for seed in (old, new, keys / "instance-a.nk"):  # moved, not reloaded: nobody is without a key that works
            connect(server.url, of(seed))
        server.reload(retired)
        for seed in (new, keys / "instance-a.nk"):
            connect(server.url, of(seed))
        assert "or the key" in refusal(server.url, of(old))
    finally:
        server.stop()


async def _connect_and_close(url: str, credentials: Credentials) -> None:
    await (await NatsStream.connect(url, WAIT_S, credentials=credentials)).close()


def test_commands_at_the_same_time_give_nobody_the_key_or_the_account_of_another(tmp_path: Path) -> None:
    keys, wanted = tmp_path / "keys", [(Role.INSTANCE, "a"), (Role.INSTANCE, "b"), (Role.REPLAY, "desk")]
    with ThreadPoolExecutor(12) as pool:
        found = set(pool.map(lambda _: print_accounts(keys, CLUSTER, wanted, KeyChange(), 0.0).text, range(24)))
    assert found == {print_accounts(keys, CLUSTER, wanted, KeyChange(), 0.0).text}
    put: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        stems = ("instance-a", "instance-b", "replay-desk")
        list(pool.map(lambda stem: print_accounts(keys, CLUSTER, wanted, KeyChange([stem]), 0.0, put.append), stems))
    assert put[-1] == print_accounts(keys, CLUSTER, wanted, KeyChange(), 0.0).text
    assert all((keys / f"{stem}.next.nk").exists() for stem in stems)


def test_a_seed_that_is_away_for_a_moment_is_asked_for_again(secured: Secured, tmp_path: Path) -> None:
    make_streams(secured)
    seed, away = Path(secured.catalog.nkey_seed), tmp_path / "away"

    async def work() -> None:
        await _fill(secured)
        stream = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog))
        reader = await stream.pull(0, CLUSTER)
        assert len(await fetched(reader, 3)) == 3
        os.rename(seed, away)
        await stream._connections.now.client.close()
        with pytest.raises(StreamError, match=r"nats\.nkey_seed .* cannot be read"):
            await fetch_for_ever(reader)
        os.rename(away, seed)
        await _fill(secured)
        assert [message.sequence for message in await fetched(reader, 3)] == [4, 5, 6]
        await stream.close()

    asyncio.run(work())


def test_permissions_name_an_instances_own_subjects_alone() -> None:
    def subjects(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [subject for inner in value.values() for subject in subjects(inner)]
        return [str(one) for one in value] if isinstance(value, list) else []

    for_all = f"{BORROWED_API}.DIRECT.GET.{ERASURES}.{erase_subject('c')}"
    for subject in set(subjects(instance_permissions("c", "a"))) - {for_all}:
        assert ".STREAM.INFO." in subject or f".c.{part_word(part_of('a'))}.a" in subject or ".c.a" in subject
    with pytest.raises(ConfigError, match="cannot be part"):
        instance_permissions("c", "a.>")
    assert instance_subject("x", "c", "a") == "x.c.a"


def test_the_command_prints_accounts_a_manager_and_a_catalog_live_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"

    def printed_for(*more: str) -> str:
        assert main(["nats-permissions", "--cluster", CLUSTER, "--keys", str(keys), *more]) == 0
        return capsys.readouterr().out

    printed = printed_for("--instance", "a", "--instance", "b")
    assert printed_for("--instance", "a", "--instance", "b") == printed  # the same keys
    assert (
        main(["nats-permissions", "--cluster", CLUSTER, "--keys", str(keys), "--instance", "a", "--instance", "a"]) == 2
    )
    assert "an instance is named twice" in capsys.readouterr().err
    server = started(tmp_path / "nats", settings=printed)
    catalog = Credentials(nkey_seed=str(keys / "catalog.nk"), inbox=catalog_inbox(CLUSTER))
    flags = {
        "instance.data_dir": str(tmp_path / "data"),
        "instance.id": "a",
        "instance.cluster": CLUSTER,
        "pools.hbm.slots": 16,
        "pools.hbm.device": "memory",
        "nats.url": server.url,
        "nats.nkey_seed": str(keys / "instance-a.nk"),
    }

    async def ready() -> None:
        await (await NatsStream.connect(server.url, WAIT_S, credentials=catalog)).close()

    async def read() -> set[str]:
        stream = patient(await NatsStream.connect(server.url, WAIT_S, credentials=catalog))
        reader = await stream.pull(0, CLUSTER)
        found: set[str] = set()
        while not reader.at_end:
            found |= {one.subject for one in await reader.fetch(WAIT_S) if not is_fence(one.subject)}
        await stream.close()
        return found

    try:
        asyncio.run(ready())
        for epoch in (1, 2):
            with open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES) as manager:
                assert manager.epoch == epoch
                serve(manager, epoch, 3)
            assert manager.published() == Position(manager.epoch, manager.applied())
        assert asyncio.run(read()) == {events_subject(CLUSTER, A)}
        with pytest.raises(ConfigError, match=r"nats.nkey_seed .* cannot be read"):
            open_manager(load_settings(flags=flags | {"nats.nkey_seed": "missing"}), [NAMESPACE], BLOCK_BYTES)
    finally:
        server.stop()


# -- every subject, as everybody ---------------------------------------------------------------------------------------

PREFIXES = (EVENTS_PREFIX, FENCE_PREFIX, PULSE_PREFIX, SNAPSHOTS_PREFIX, SAMPLES_PREFIX, ERASED_PREFIX)
PLACES = ((CLUSTER, "a"), (CLUSTER, "b"), ("other", "a"), ("other", "b"))


def subject_of(prefix: str, cluster: str, name: str) -> str:
    parted = {EVENTS_PREFIX: events_subject, FENCE_PREFIX: fence_subject, PULSE_PREFIX: pulse_subject}
    return parted.get(prefix, partial(instance_subject, prefix))(cluster, name)


SUBJECTS = [subject_of(prefix, *place) for prefix in (*PREFIXES, ROUTES_PREFIX) for place in PLACES]
SUBJECTS += [  # no instance is in another's part, nor in none
    f"{prefix}.{CLUSTER}.{part}a"
    for prefix in (EVENTS_PREFIX, FENCE_PREFIX)
    for part in (f"{part_word(part_of('b'))}.", "")
]
SUBJECTS += [f"{ERASE_PREFIX}.{cluster}" for cluster in (CLUSTER, "other")]
CALLS = [
    f"{api}.{call}"
    for stream in (STREAM, PULSE, ERASURES, "OTHER")
    for call in (
        *(f"STREAM.{what}.{stream}" for what in ("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "SNAPSHOT", "RESTORE")),
        *(f"STREAM.MSG.{what}.{stream}" for what in ("GET", "DELETE")),
        *(f"CONSUMER.{what}.{stream}" for what in ("CREATE", "NAMES", "LIST")),
        *(f"CONSUMER.{what}.{stream}.one" for what in ("CREATE", "INFO", "DELETE", "DURABLE.CREATE", "MSG.NEXT")),
        *(
            f"DIRECT.GET.{stream}{more}"
            for more in ("", f".{events_subject('c', 'a')}", f".{events_subject('c', 'b')}")
        ),
    )
    for api in (JS_API, BORROWED_API)
] + [f"{JS_API}.{call}" for call in ("INFO", "STREAM.NAMES", "STREAM.LIST", "ACCOUNT.PURGE.KVBM", "SERVER.REMOVE")]
WIDE = [
    ">",
    "kvbm.>",
    "kvbm.v1.*.c.>",
    "$JS.>",
    "$JS.API.>",
    "$JS.EVENT.>",
    "$SYS.>",
    "$SYS.ACCOUNT.>",
    "_R_.>",
    "_GR_.>",
]

MAY_WRITE = {
    "a": {subject_of(prefix, "c", "a") for prefix in PREFIXES} - {f"{SNAPSHOTS_PREFIX}.c.a"},
    "catalog": {
        subject_of(prefix, "c", name)
        for prefix in (PULSE_PREFIX, SNAPSHOTS_PREFIX, ERASED_PREFIX, ROUTES_PREFIX)
        for name in "ab"
    }
    | {f"{ERASE_PREFIX}.c"},
    "replay": set(),
    "operator": {f"{ERASED_PREFIX}.c.{name}" for name in "ab"} | {f"{ERASE_PREFIX}.c"},
    "replica": set(),
}
MAY_CALL = {
    "a": {f"{JS_API}.STREAM.INFO.KVBM"}
    | {
        f"{BORROWED_API}.{call}"
        for call in ("STREAM.INFO.KVBM", "STREAM.INFO.KVBM_PULSE", f"DIRECT.GET.KVBM.{events_subject('c', 'a')}")
    },
    "catalog": {f"{JS_API}.INFO"}
    | {
        f"{JS_API}.{call}"
        for stream in (STREAM, PULSE, ERASURES)
        for call in (
            *(f"STREAM.{what}.{stream}" for what in ("INFO", "CREATE", "MSG.GET")),
            f"CONSUMER.CREATE.{stream}",
            *(f"CONSUMER.{what}.{stream}.one" for what in ("DELETE", "MSG.NEXT")),
            *(f"DIRECT.GET.{stream}.{events_subject('c', name)}" for name in "ab"),
        )
    },
    "replay": {f"{JS_API}.STREAM.INFO.KVBM"}
    | {
        f"{BORROWED_API}.{call}"
        for call in ("STREAM.INFO.KVBM", "STREAM.INFO.KVBM_PULSE", "STREAM.MSG.GET.KVBM", "DIRECT.GET.KVBM")
    },
    "replica": {f"{JS_API}.STREAM.INFO.KVBM"}
    | {
        f"{BORROWED_API}.{call}.{stream}"
        for call in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
        for stream in (STREAM, PULSE)
    },
    "operator": {f"{JS_API}.STREAM.INFO.KVBM", f"{BORROWED_API}.STREAM.MSG.GET.KVBM"}
    | {f"{BORROWED_API}.STREAM.INFO.{stream}" for stream in (STREAM, PULSE, ERASURES)},
}
MAY_HEAR = {
    "a": {f"{SNAPSHOTS_PREFIX}.c.a"},
    "catalog": {f"{prefix}.c.{name}" for prefix in (SAMPLES_PREFIX, ROUTES_PREFIX) for name in "ab"},
    "replay": set(),
    "operator": set(),
    "replica": set(),
}


@pytest.mark.parametrize("who", ["a", "catalog", "replay", "operator", "replica"])
def test_of_all_subjects_a_user_may_write_call_and_hear_those_of_its_role(secured: Secured, who: str) -> None:
    make_streams(secured)

    async def work() -> tuple[set[str], set[str]]:
        refused: list[str] = []

        async def keep(error: Exception) -> None:
            refused.append(str(error))

        credentials: Credentials = getattr(secured, who)
        client = await nats.connect(secured.url, error_cb=keep, **credentials.connect_options(secured.url))
        end = "the.end"
        for subject in [*SUBJECTS, *CALLS, end]:
            await client.publish(subject, b"no JSON")
        for subject in [*SUBJECTS, *WIDE, end]:
            await client.subscribe(subject)
        await client.flush()
        await eventually_async(lambda: sum(f'"{end}"' in one for one in refused) == 2, "not all is answered", WAIT_S)
        await client.close()
        found = re.findall(r'violation for (publish|subscription) to "([^"]+)"', "\n".join(refused))
        written, heard = (
            {subject for kind, subject in found if kind == wanted} for wanted in ("publish", "subscription")
        )
        lower = {subject.lower(): subject for subject in [*SUBJECTS, *CALLS, *WIDE, end]}  # as nats-py tells of them
        return {lower[one] for one in written}, {lower[one] for one in heard}

    written, heard = asyncio.run(work())
    assert {*SUBJECTS, *CALLS} - written == MAY_WRITE[who] | MAY_CALL[who]
    assert {*SUBJECTS, *WIDE} - heard == MAY_HEAR[who]


@pytest.mark.parametrize("who", ["a", "catalog", "replay", "operator", "replica"])
def test_a_probe_answers_whoever_has_a_key(
    secured: Secured, who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a health check of an engine would need the catalog's key."""
    make_streams(secured)
    credentials: Credentials = getattr(secured, who)
    given = {"nats.nkey_seed": credentials.nkey_seed, "instance.cluster": CLUSTER, "instance.id": "a"}
    with capture_logs() as logs:
        assert probe(secured.url, 0.0, load_settings(flags=given)) == 0
    assert "with JetStream" in capsys.readouterr().out
    assert [one for one in logs if who == "catalog" and "js.api" in one.get("why", "")] == []
    assert probe(secured.url, 0.0, load_settings(flags=given | {"instance.cluster": "other"})) == (
        who in ("a", "catalog")
    )
    said = capsys.readouterr()
    assert who in ("replay", "operator", "replica") or "instance.id" in said.out + said.err


def test_headers_reach_no_other_subject(secured: Secured) -> None:
    """Traces and schedules name subjects that the server writes to; a rollup and a batch act on more than one
    message.
    """
    make_streams(secured)

    async def work() -> None:
        async def ignore(error: Exception) -> None:
            pass

        honest = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.b))
        await honest.publish(CLUSTER, B, make_frame(0, instance="b").data)
        await honest.send_pulse(beat(B))
        before = await stored(secured, events_subject(CLUSTER, B))
        client = await nats.connect(secured.url, error_cb=ignore, **secured.a.connect_options(secured.url))
        for own in (events_subject(CLUSTER, A), fence_subject(CLUSTER, A), pulse_subject(CLUSTER, A)):
            for headers in (
                {"Nats-Trace-Dest": events_subject(CLUSTER, B)},
                {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": events_subject(CLUSTER, B)},
                {"Nats-Rollup": "all"},
                {"Nats-TTL": "1s"},
                {"Nats-Batch-Id": "one", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
            ):
                await client.publish(own, b"x", headers=headers)
        answer = await client.request(fence_subject(CLUSTER, A), b"the last")
        assert json.loads(answer.data)["stream"] == STREAM
        assert await stored(secured, events_subject(CLUSTER, B)) == before
        assert await honest.last_pulse(CLUSTER, B) == beat(B)
        await client.close()
        await honest.close()

    asyncio.run(work())


def test_what_threats_says_of_an_instances_and_of_the_catalogs_key_is_so(secured: Secured) -> None:
    """An instance may count others' messages; whoever has the catalog's key can speak in others' names, by a reply."""
    make_streams(secured)

    async def work() -> None:
        honest = patient(await NatsStream.connect(secured.url, WAIT_S, credentials=secured.b))
        await honest.publish(CLUSTER, B, make_frame(0, instance="b").data)
        await honest.close()
        client = await nats.connect(secured.url, **secured.a.connect_options(secured.url))
        answer = await client.request(f"{BORROWED_API}.STREAM.INFO.{STREAM}", b'{"subjects_filter":">"}')
        assert json.loads(answer.data)["state"]["subjects"] == {events_subject(CLUSTER, B): 1}
        await client.close()
        forged, own = make_frame(1, instance="b").data, pulse_subject(CLUSTER, InstanceId("a-pulse-of-mine"))
        client = await nats.connect(secured.url, **secured.catalog.connect_options(secured.url))
        await client.request(own, forged)
        await client.publish(f"{JS_API}.DIRECT.GET.{PULSE}.{own}", b"", reply=events_subject(CLUSTER, B))

        async def is_stored() -> bool:
            return forged in {message.data for message in await stored(secured, events_subject(CLUSTER, B))}

        await eventually_async(is_stored, "the catalog's key cannot do it: say so in docs/threats.md", WAIT_S)
        await client.close()

    asyncio.run(work())


# -- a server that refuses what a reader asks for ----------------------------------------------------------------------


async def _begun_in_vain(stream: NatsStream) -> int:
    """How often a reader begins anew in every two seconds in which it gets nothing."""
    reader = await stream.pull(0, CLUSTER, WAIT_S)
    begun = 0
    original = reader.begin

    async def begin(timeout_s: float) -> None:
        nonlocal begun
        begun += 1
        await original(timeout_s)

    reader.begin = begin  # type: ignore[method-assign]
    fetches = 0
    while begun < 2:  # on a busy machine once in such a time
        fetches += 1
        with contextlib.suppress(AwayError):
            assert await reader.fetch(2.0) == []
    await stream.close()
    return begun // fetches


def test_a_reader_whose_requests_are_refused_asks_again_but_not_without_end(tmp_path: Path) -> None:
    limits = f"jetstream {{ store_dir: {json.dumps(str(tmp_path / 'js'))}, limits {{ max_request_batch: 100 }} }}"
    server = started(tmp_path / "nats", settings=limits)

    async def work() -> int:
        return await _begun_in_vain(await NatsStream.connect(server.url, WAIT_S))

    try:
        assert asyncio.run(work()) <= 20
    finally:
        server.stop()


def test_a_reader_of_replay_whom_nobody_answers_asks_again_but_not_without_end(tmp_path: Path) -> None:
    users = [ServerUser(keep_seed(tmp_path / "catalog")), ServerUser(keep_seed(tmp_path / "desk"), "desk", Role.REPLAY)]
    accounts = json.loads(server_config(CLUSTER, users).removeprefix("accounts "))
    own = accounts["KVBM-replay-desk"]
    own["imports"] = [
        one for one in own["imports"] if "DIRECT.GET" not in one["to"]
    ]  # as after a reload, to a new account
    server = started(tmp_path / "nats", settings=f"accounts {json.dumps(accounts)}\n")

    async def work() -> int:
        catalog = Credentials(nkey_seed=str(tmp_path / "catalog"), inbox=catalog_inbox(CLUSTER))
        await (await NatsStream.connect(server.url, WAIT_S, credentials=catalog)).close()
        desk = Credentials(nkey_seed=str(tmp_path / "desk"))
        return await _begun_in_vain(await NatsStream.connect(server.url, WAIT_S, credentials=desk, makes=False))

    try:
        assert asyncio.run(work()) <= 20
    finally:
        server.stop()
