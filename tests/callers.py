"""Callers of a catalog: certificates, a ledger that publishes for several tenants, and requests to a catalog without a socket."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvbm.core.events import PoolStated
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Tier
from kvbm.core.ledger import Ledger
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream

SECRETS = {"acme": "secret of acme", "beta": "secret of beta"}
ACME = Namespace(model="m", block_tokens=4, tenant="acme")
BETA = Namespace(model="m", block_tokens=4, tenant="beta")
TOKENS = list(range(40))


def hashes_in(namespace: Namespace) -> bytes:
    """Packed hashes of `TOKENS`."""
    return sequence_hashes(TOKENS, namespace.block_tokens, namespace.root(SECRETS.get(namespace.tenant, "").encode()))


async def publish(server: str, cluster: str, name: str, namespace: Namespace) -> int:
    """An instance that serves a namespace and holds all blocks of `TOKENS` in it. Returns its offset."""
    ledger = Ledger((PoolStated(Tier.HBM, 64, 1024),))
    ledger.start(Epoch(1), [namespace], ["rack-1", name], "test", "0")
    packed = hashes_in(namespace)
    allocation = ledger.allocate(Tier.HBM, len(packed) // HASH_BYTES)
    assert allocation is not None
    ledger.create(namespace.id, Tier.HBM, NO_PARENT, 0, packed, allocation.slots)
    stream = await NatsStream.connect(server)
    try:
        for frame in ledger.take_frames(InstanceId(name), time.time_ns()):
            await stream.publish(cluster, InstanceId(name), frame.data)
        await beat(stream, cluster, name, ledger.applied)
    finally:
        await stream.close()
    return int(ledger.applied)


async def beat(stream: NatsStream, cluster: str, name: str, published: Any) -> None:
    """A heartbeat of an instance that has work queued."""
    await stream.send_pulse(
        Heartbeat(
            instance=InstanceId(name), cluster=cluster, epoch=Epoch(1), published=published, wall_time_ns=time.time_ns(),
            queued_tokens=5000, running_requests=3, free_slots={Tier.HBM: 7},
        )
    )  # fmt: skip


class Answered(NamedTuple):
    """Status and body of an answer, and how long it took."""

    status: int
    body: bytes
    elapsed_ns: int


async def ask(app: Any, method: str, path: str, body: Any = None, token: str = "") -> Answered:
    """Ask an ASGI application, without a socket."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if token:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "scheme": "http", "headers": headers, "client": ("192.0.2.1", 1), "server": ("c", 80),
        "state": {},
    }  # fmt: skip
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()  # nothing comes after the body
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    begin_ns = time.perf_counter_ns()
    await app(scope, receive, send)
    elapsed_ns = time.perf_counter_ns() - begin_ns
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], content, elapsed_ns)


# -- certificates -----------------------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """A certificate and its key, and the files they are in."""

    certificate: x509.Certificate
    private: ec.EllipticCurvePrivateKey
    cert: Path
    key: Path


def certify(folder: Path, name: str, issuer: Certificate | None = None) -> Certificate:
    """A CA without issuer, or a certificate of one, for 127.0.0.1 and for its name."""
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
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(name)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(issuer.private if issuer else key, hashes.SHA256())
    made = Certificate(certificate, key, folder / f"{name}.pem", folder / f"{name}-key.pem")
    made.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made
