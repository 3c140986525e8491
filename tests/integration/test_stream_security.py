"""The stream's keys, certificates and permissions, on a real nats-server."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats
import nkeys
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import (
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
from kvbm.streams.nats.connection import BORROWED_API, JS_API
from kvbm.streams.nats.credentials import Credentials, keep_seed
from kvbm.streams.nats.permissions import (
    ServerUser,
    catalog_inbox,
    instance_inbox,
    instance_permissions,
    server_config,
)
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually_async
from tests.managers import BLOCK_BYTES, NAMESPACE, serve
from tests.nats_fixture import fresh_nats, make_frame

__all__ = ["fresh_nats"]

ROOT = Path(__file__).parents[2]
WAIT_S = 10.0
CLUSTER = "c"
A, B = InstanceId("a"), InstanceId("b")


# -- certificates ------------------------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """A certificate and its key, and the files they are in."""

    certificate: x509.Certificate
    private: ec.EllipticCurvePrivateKey
    cert: Path
    key: Path


def certify(folder: Path, name: str, issuer: Certificate | None, host: str = "127.0.0.1") -> Certificate:
    """A CA without issuer, or a certificate of one for a host."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(host))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(issuer.private if issuer else key, hashes.SHA256())
    made = Certificate(certificate, key, folder / f"{name}.pem", folder / f"{name}-key.pem")
    made.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


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
    ca, other = certify(folder, "ca", None), certify(folder, "other-ca", None)
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
        stream = await NatsStream.connect(url, WAIT_S, credentials=credentials)
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
    server = EmbeddedServer.start(tmp_path_factory.mktemp("tls"), settings=tls_lines(certificates))
    yield server.url.replace("nats://", "tls://")
    server.stop()


@pytest.fixture(scope="module")
def mutual_url(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer.start(tmp_path_factory.mktemp("mutual"), settings=tls_lines(certificates, verify=True))
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
    server = EmbeddedServer.start(tmp_path / "nats", settings=tls_lines(elsewhere))
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


# -- users and permissions ---------------------------------------------------------------------------------------------


class Secured(NamedTuple):
    """A server whose users have keys, and the credentials of each."""

    url: str
    a: Credentials
    b: Credentials
    catalog: Credentials


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    users, found = [], []
    for name, inbox, instance in (
        ("a", instance_inbox(CLUSTER, A), A),
        ("b", instance_inbox(CLUSTER, B), B),
        ("catalog", catalog_inbox(CLUSTER), None),
    ):
        seed = tmp_path / "keys" / f"{name}.nk"
        users.append(ServerUser(keep_seed(seed), instance))
        assert keep_seed(seed) == users[-1].nkey  # the second time it is read
        assert seed.stat().st_mode & 0o777 == 0o600
        found.append(Credentials(nkey_seed=str(seed), inbox=inbox))
    server = EmbeddedServer.start(tmp_path / "nats", settings=server_config(CLUSTER, users))
    yield Secured(server.url, *found)
    server.stop()


def make_streams(secured: Secured) -> None:
    async def work() -> None:
        await (await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog)).close()

    asyncio.run(work())


async def stored(secured: Secured, subjects: str) -> list[StreamMessage]:
    """All that the server keeps of events, fences or pulses, as the catalog reads it."""
    stream = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog)
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
        catalog = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.catalog)
        stream = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a)
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
            read = [message.subject for message in await reader.fetch(WAIT_S)]
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
        stream = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a)
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
            with pytest.raises(StreamError, match="permissions violation"):
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
        stream = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.a)
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
        stream = await NatsStream.connect(secured.url, WAIT_S, credentials=secured.b)
        assert await stream.tail(CLUSTER, B) is None
        assert await stream.fence(CLUSTER, B) is None
        assert await stream.last_pulse(CLUSTER, B) is None
        await stream.close()
        assert {message.data for message in await stored(secured, events_subject(CLUSTER, A))} == {forged}

    asyncio.run(work())


def test_permissions_name_an_instances_own_subjects_alone() -> None:
    def subjects(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [subject for inner in value.values() for subject in subjects(inner)]
        return [str(one) for one in value] if isinstance(value, list) else []

    for subject in subjects(instance_permissions("c", "a")):
        assert ".STREAM.INFO." in subject or ".c.a" in subject or subject.endswith(".KVBM_ERASE.kvbm.v1.erase.c")
    with pytest.raises(ConfigError, match="cannot be part"):
        instance_permissions("c", "a.>")
    assert instance_subject("x", "c", "a") == "x.c.a"


def test_the_command_prints_accounts_a_manager_and_a_catalog_live_by(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvbm", "nats-permissions", "--cluster", CLUSTER, "--keys", str(keys), *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    printed = run("--instance", "a", "--instance", "b").stdout
    assert run("--instance", "a", "--instance", "b").stdout == printed  # the same keys
    twice = run("--instance", "a", "--instance", "a")
    assert (twice.returncode, "an instance is named twice" in twice.stderr) == (2, True)
    server = EmbeddedServer.start(tmp_path / "nats", settings=printed)
    catalog = Credentials(nkey_seed=str(keys / "catalog.nk"), inbox=catalog_inbox(CLUSTER))
    flags = {
        "instance.data_dir": str(tmp_path / "data"), "instance.id": "a", "instance.cluster": CLUSTER, "pools.hbm.slots": 16,
        "pools.hbm.device": "memory", "nats.url": server.url, "nats.nkey_seed": str(keys / "instance-a.nk"),
    }  # fmt: skip

    async def ready() -> None:
        await (await NatsStream.connect(server.url, WAIT_S, credentials=catalog)).close()

    async def read() -> set[str]:
        stream = await NatsStream.connect(server.url, WAIT_S, credentials=catalog)
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
