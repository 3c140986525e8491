"""Faults the catalog and its neighbours must survive: damaged words, repeated pulses, forgotten claims, dead children."""

from __future__ import annotations

import asyncio
import http.server
import io
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.catalog.lag import Backlog
from kvbm.catalog.liveness import Heard, LifeState, Liveness, OwnPulse, Ticked
from kvbm.catalog.service import CatalogService
from kvbm.catalog.store import InstanceRow
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.errors import CatalogError
from kvbm.core.events import BlocksEvicted, EvictReason, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Reach, Tier
from kvbm.locate.http import CatalogClient, HttpLocator
from kvbm.streams.base import Heartbeat, StreamMessage
from kvbm.streams.memory import MemoryLog, MemoryStream
from kvbm.streams.nats import _heartbeat_in
from kvbm.streams.publisher import PublisherThread
from kvbm.workload.processes import Child, EngineProcess
from tests.indexes import NATIVE, Twin, each_twin, frame_bytes
from tests.nats_fixture import PlainOwner

ONE = InstanceId("one")
SPACE = Namespace(model="m", block_tokens=16).id
BLOCK = bytes(range(16))


def heartbeat(wall_time_ns: int = 1, instance: InstanceId = ONE) -> Heartbeat:
    return Heartbeat(instance=instance, cluster="c", epoch=Epoch(1), published=Offset(1), wall_time_ns=wall_time_ns)


@pytest.mark.parametrize("kind", ["utf-8", "depth", "name"])
def test_a_damaged_pulse_is_refused_and_not_fatal(kind: str) -> None:
    data = msgspec.msgpack.encode(heartbeat())
    if kind == "utf-8":
        data = data.replace(b"\xa3one", b"\xa3\xff\xfe\xfd")
    elif kind == "depth":
        data = bytes([data[0] + 1]) + data[1:] + b"\xa1z" + b"\x91" * 100_000 + b"\xc0"
    else:
        data = msgspec.msgpack.encode(heartbeat(instance=InstanceId("two")))
    assert _heartbeat_in(StreamMessage(1, "kvbm.v1.pulse.c.one", data)) is None


def test_a_pulse_that_is_delivered_again_brings_nobody_back_to_life() -> None:
    class Repeating:
        async def watch_pulses(self, cluster: str | None = None) -> Any:
            yield said
            yield said  # a reader that begins anew gets the last pulse of everyone again

    said = heartbeat(time.time_ns())
    service = object.__new__(CatalogService)
    service.settings = type("S", (), {"cluster": None})()
    service._stream = Repeating()  # type: ignore[assignment]
    service._index = NATIVE.index()
    service._projector = NATIVE.projector(service._index)
    service._own_name = InstanceId("own")
    service._liveness = Liveness()
    service._backlog = Backlog(3.5)
    service._heard_after_s, service._sent_pulses = 0.0, {}
    service._live(OwnPulse())
    asyncio.run(service._hear())
    last = service._liveness.last(ONE)
    assert last is not None and service._liveness.state(ONE) is LifeState.LIVE
    for second in range(1, 6):
        service._liveness.step(last.at_s + second, OwnPulse())
        service._liveness.step(last.at_s + second, Heard(said))
    service._liveness.step(last.at_s + 5, Ticked())
    assert service._liveness.state(ONE) is LifeState.SILENT


@each_twin
def test_a_claim_loaded_from_sql_is_withdrawn_whatever_tier_the_pool_is_in(twin: Twin) -> None:
    index = twin.index()
    index.claim("shared", SPACE, BLOCK)
    pools = (PoolStated(Tier.NVME, 8, 64, Reach.CLUSTER, "shared"),)
    evicted = BlocksEvicted(namespace=SPACE, tier=Tier.NVME, reason=EvictReason.CORRUPT, hashes=BLOCK)
    index.apply(frame_bytes(ONE, InstanceStarted(epoch=Epoch(1), pools=pools), evicted))
    assert not index.holders(SPACE, BLOCK)
    assert index.claim_counts() == {"shared": 0}


@each_twin
def test_claims_of_an_older_blind_epoch_go_to_the_pool_that_sql_knows(twin: Twin) -> None:
    pools = (PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, "shared"),)
    known = InstanceRow(id=ONE, cluster="c", epoch=Epoch(2), first_seen_ns=1, last_frame_ns=1, pools=pools)
    index = twin.index()
    index.claim("shared", SPACE, BLOCK)
    projector = twin.projector(index, stored=9, known=[known])
    event = BlocksEvicted(namespace=SPACE, tier=Tier.OBJECT, reason=EvictReason.CORRUPT, hashes=BLOCK)
    frame = Frame(
        instance=ONE, epoch=Epoch(1), first_offset=Offset(5), wall_time_ns=1, events=(event,), digest=0
    )  # fmt: skip
    projector.step(0.0, [StreamMessage(1, "kvbm.v1.events.c.one", encode_frame(frame))])
    assert not index.anomalies()
    assert not index.holders(SPACE, BLOCK)


def test_a_publisher_whose_connection_fails_in_an_unforeseen_way_tries_again() -> None:
    stream: list[MemoryStream] = []
    tries: list[int] = []

    async def connect(url: str, timeout_s: float) -> MemoryStream:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a fault of the library")
        stream.append(MemoryStream())
        return stream[0]

    thread = PublisherThread(MemoryLog(), "nats://127.0.0.1:1", "c", ONE, PlainOwner("c"), 0.05, connect)
    thread.start()
    try:
        deadline = time.monotonic() + 5
        while not stream and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stream
    finally:
        thread.stop(1.0)


class _Answers(http.server.BaseHTTPRequestHandler):
    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.mark.parametrize("body", [b'{"namespace":"\xff"}', b'{"z":' + b"[" * 100_000])
def test_a_damaged_answer_is_no_answer_and_no_error_of_the_engine(body: bytes) -> None:
    handler = type("Handler", (_Answers,), {"body": body})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        locator = HttpLocator(f"http://127.0.0.1:{server.server_port}")
        try:
            assert locator.claimed_depth("pool", SPACE, BLOCK, 2.0) == 0
        finally:
            locator.close()
            server.shutdown()


def test_a_second_try_has_only_the_time_that_the_first_has_left() -> None:
    class Slow(_Answers):
        def do_POST(self) -> None:
            time.sleep(0.4)
            self.connection.close()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = CatalogClient(f"http://127.0.0.1:{server.server_port}")
        began = time.monotonic()
        with pytest.raises(CatalogError):
            client.lookup(SPACE, BLOCK, timeout_s=0.5)
        assert time.monotonic() - began < 0.7
        client.close()
        server.shutdown()


def test_a_request_to_an_engine_that_has_died_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Process:
        stdin = io.BytesIO()
        stdout = io.BytesIO()

    monkeypatch.setattr(Child, "__init__", lambda self, *_, **__: setattr(self, "process", Process()))
    engine = EngineProcess("e", {}, tmp_path, {})
    assert engine.events.get(timeout=5) == {"event": "died"}
    told: list[dict[str, Any]] = []
    engine.submit("r", [1], 1, True, told.append)
    assert [answer["failed"] for answer in told] == ["engine died"]
