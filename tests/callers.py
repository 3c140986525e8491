"""Callers of a catalog: a ledger that publishes for several tenants, and requests to a catalog without a socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvbm.core.events import PoolStated
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Tier
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from tests.eventually import WAIT_S

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
    stream = await NatsStream.connect(server, WAIT_S)
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
            instance=InstanceId(name),
            cluster=cluster,
            epoch=Epoch(1),
            published=published,
            wall_time_ns=time.time_ns(),
            queued_tokens=5000,
            running_requests=3,
            free_slots={Tier.HBM: 7},
        )
    )


class Answered(NamedTuple):
    """Status and body of an answer, and how long it took."""

    status: int
    body: bytes
    elapsed_ns: int


async def ask(
    app: Any, method: str, path: str, body: Any = None, token: str = "", before_body: Callable[[], None] | None = None
) -> Answered:
    """Ask an ASGI application, without a socket.

    Args:
        before_body: what happens between the header and the body.
    """
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if token:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "headers": headers,
        "client": ("192.0.2.1", 1),
        "server": ("c", 80),
        "state": {},
    }
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()  # nothing comes after the body
        if before_body is not None:
            before_body()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    begin_ns = time.perf_counter_ns()
    await app(scope, receive, send)
    elapsed_ns = time.perf_counter_ns() - begin_ns
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], content, elapsed_ns)
