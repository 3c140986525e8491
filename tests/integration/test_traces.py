"""Traces of requests: from `acquire` over every tier, a peer, an object store and the catalog to an OTLP receiver."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from kvbm.assembly import open_engine_manager, open_manager
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.config import TracesSettings, load_settings
from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.core.ids import HASH_BYTES, Namespace, Tier, split_hashes
from kvbm.locate.asynchronous import AsyncCatalogClient
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.manager.owned_hbm import Manager
from kvbm.telemetry import span_export
from kvbm.telemetry.tracing import Tracing
from tests import vllm_script
from tests.catalog_site import HASHES, OTHER, SPACE, run_catalog
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.floods import CatalogProcess, catalog_process
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.nats_fixture import cluster, nats_url
from tests.object_stores import Place, s3_place
from tests.otlp import OtlpReceiver, Received
from tests.owning_engines import OwningEngine
from tests.owning_engines import opened as engine_opened
from tests.vllm_script import BLOCK_TOKENS, FULL, Engine, Request, engine_settings

needed("opentelemetry.exporter.otlp.proto.common", "traces")
needed("torch", "engine")

__all__ = ["cluster", "nats_url"]  # fixtures
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "a-secret-of-nobody-else"


@pytest.fixture(autouse=True)
def sent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of this process go at once."""
    monkeypatch.setattr(span_export, "_EVERY_S", 0.01)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def manager_at(folder: Path, endpoint: str, **flags: Any) -> Manager:
    """A manager with 64 blocks in HBM, 64 in HOST and 64 in NVMe, which sends its spans there."""
    settings = load_settings(
        flags={
            "instance.data_dir": str(folder),
            "nats.enabled": False,
            "pools.hbm.slots": 64,
            "pools.hbm.device": "memory",
            "pools.host.slots": 64,
            "pools.nvme.slots": 64,
            "pools.nvme.direct": "auto",
            "onboard.wait_s": WAIT_S,
            "traces.endpoint": endpoint,
        }
        | {key.replace("__", "."): value for key, value in flags.items()}
    )
    return open_manager(settings, [NAMESPACE], BLOCK_BYTES)


def only_in(manager: Manager | EngineHbmManager, tier: Tier, hashes: bytes) -> None:
    """Of these blocks leave no other copy than that tier's."""
    assert manager.settle(WAIT_S)
    for other in {Tier.HBM, Tier.HOST, Tier.NVME} - {tier}:
        manager.evict(other, hashes)


def blocks(prompt: int, first: int, end: int) -> bytes:
    return hashes_of(prompt, end, first)


# -- a whole trace ----------------------------------------------------------------------------------------------------


class Cluster:
    """A catalog in a process of its own, and instances that send their spans where it does."""

    def __init__(
        self, folder: Path, nats_url: str, name: str, catalog: CatalogProcess, place: Place, receiver: OtlpReceiver
    ) -> None:
        key = folder / "key"
        key.write_text("k" * 64)
        key.chmod(0o600)
        self._flags: dict[str, object] = {
            "instance.data_dir": str(folder),
            "instance.cluster": name,
            "nats.url": nats_url,
            "nats.heartbeat_s": 0.2,
            "nats.timeout_s": WAIT_S,
            "catalog.url": catalog.url,
            "pools.hbm.slots": 64,
            "pools.hbm.device": "cpu",
            "pools.host.slots": 64,
            "onboard.locate_s": WAIT_S,
            "onboard.wait_s": WAIT_S,
            "traces.endpoint": receiver.url,
        }
        self.lending = {"transport.listen": "tcp://127.0.0.1:0", "transport.key_file": str(key)}
        self.reading = {"transport.fetch": True, "transport.key_file": str(key)}
        self.objects = {
            "pools.object.url": place.url,
            "pools.object.endpoint": place.endpoint,
            "pools.object.blocks": 1,
        }
        self.client = CatalogClient(catalog.url, WAIT_S)

    def settings(self, instance: str, *flags: Mapping[str, object]) -> Any:
        named = {key: value for one in flags for key, value in one.items()}
        return load_settings(flags={**self._flags, "instance.id": instance, **named})


@pytest.fixture
def site(
    tmp_path: Path,
    nats_url: str,
    cluster: str,
    s3_endpoint: str,
    receiver: OtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    place = s3_place(s3_endpoint)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "catalog"
    folder.mkdir()
    traced = {"traces.endpoint": receiver.url}
    with catalog_process(folder, nats_url, cluster, more=traced) as catalog:
        made = Cluster(tmp_path, nats_url, cluster, catalog, place, receiver)
        yield made
        made.client.close()


def test_a_prompt_over_all_tiers_is_one_trace_of_two_processes(
    site: Cluster, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    """Blocks 0 and 1 lie in the reader's HOST, 2 and 3 in its NVMe, 4 and 5 in the object store, 6 and 7 at a peer."""
    prompt, depth = 1, 8
    putter = open_manager(site.settings("putter", site.objects), [NAMESPACE], BLOCK_BYTES)
    opened.callback(putter.close)
    serve(putter, prompt, 6)
    assert putter.settle(WAIT_S)
    putter.close()
    owner = open_manager(site.settings("owner", site.lending), [NAMESPACE], BLOCK_BYTES)
    opened.callback(owner.close)
    serve(owner, prompt, depth)
    for tier in (Tier.HBM, Tier.HOST):
        owner.settle(WAIT_S)
        owner.evict(tier, blocks(prompt, 4, 6))
    owned = {"pools.hbm.owner": "engine", "pools.nvme.slots": 64, "pools.nvme.direct": "auto"}
    flags = (site.objects, site.reading, owned, {"offload.object": "never"})
    reader = open_engine_manager(site.settings("reader", *flags), [NAMESPACE], BLOCK_BYTES)
    opened.callback(reader.close)
    engine = OwningEngine(reader)
    engine.store(prompt, 4)
    only_in(reader, Tier.NVME, blocks(prompt, 2, 4))

    def is_heard() -> bool:
        found = site.client.find(NAMESPACE.id, hashes_of(prompt, depth), 6)
        return [one.instance for one in found.peers] == ["owner"] and max(
            (p.depth for p in found.pools), default=0
        ) == 6

    eventually(is_heard, "the catalog does not hear of all")
    acquiring = engine.acquired(prompt, depth, is_whole=True, trace=SAMPLED)
    assert (acquiring.depth, acquiring.why) == (depth, "")
    acquiring.release()

    request = receiver.one("kvbm.acquire", outcome="hit", blocks=depth)
    assert (request.trace, request.parent) == (TRACE, PARENT)
    assert {key: count for key, count in request.values.items() if key.startswith("hits.")} == {
        "hits.host": 4,  # two of them the peer's
        "hits.nvme": 2,
        "hits.object": 2,
    }
    copies = {
        name: receiver.one(name, outcome="arrived", target="HOST")
        for name in ("kvbm.nvme.read", "kvbm.object.get", "kvbm.peer.fetch")
    }
    for span in copies.values():
        assert (span.trace, span.parent) == (TRACE, request.id)
        assert (span.values["blocks"], span.values["bytes"], span.values["arrived"]) == (2, 2 * BLOCK_BYTES, 2)
        assert request.begin_ns <= span.begin_ns <= span.end_ns
    assert copies["kvbm.peer.fetch"].values["owner"] == "owner"
    assert copies["kvbm.object.get"].values["source"] == "OBJECT"
    asked = [one for one in receiver.named("kvbm.locate") if one.trace == TRACE]
    assert asked and {one.parent for one in asked} == {request.id}
    assert ["owner"] in [one.values["owners"] for one in asked]

    def answers() -> list[Received]:
        return [one for one in receiver.named("kvbm.catalog.find") if one.trace == TRACE]

    eventually(lambda: len(answers()) == len(asked), "the catalog's spans do not come")
    assert {one.parent for one in answers()} == {one.id for one in asked}
    for one in answers():
        assert one.resource["service.name"] == "kvbm-catalog"
        assert 0 <= one.values["index_s"] <= (one.end_ns - one.begin_ns) / 1e9 + 0.001
    assert {one.resource["service.instance.id"] for one in receiver.spans if one.name == "kvbm.acquire"} == {
        "putter",
        "owner",
        "reader",
    }
    holds_no_secret(receiver, hashes_of(prompt, depth))


def holds_no_secret(receiver: OtlpReceiver, hashes: bytes) -> None:
    """Neither a root, nor a whole hash, nor a key is in what was sent, in any writing."""
    sent = b"".join(receiver.bodies)
    assert sent
    secrets = [NAMESPACE.root(), NAMESPACE.root(SECRET.encode()), *split_hashes(hashes)]
    for secret in secrets:
        assert secret not in sent
        assert secret.hex().encode() not in sent
    assert b"k" * 64 not in sent
    assert SECRET.encode() not in sent


# -- what spans say ---------------------------------------------------------------------------------------------------


def test_copies_between_own_tiers_say_why_a_block_became_a_miss(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    manager = manager_at(tmp_path, receiver.url)
    opened.callback(manager.close)
    serve(manager, 1, 4)
    only_in(manager, Tier.HOST, hashes_of(1, 4))
    serve(manager, 1, 4)
    read = receiver.one("kvbm.onboard", source="HOST", target="HBM")
    assert (read.values["outcome"], read.values["arrived"], read.failure) == ("arrived", 4, "")
    missed, found = receiver.one("kvbm.acquire", outcome="miss"), receiver.one("kvbm.acquire", outcome="hit")
    assert (missed.values["depth"], missed.parent, missed.values["predicted"]) == (0, "", 0)
    assert (found.values["hits.host"], found.values["depth"]) == (4, 4)
    assert found.values["wait_s"] >= 0
    assert (read.trace, read.parent) == (found.trace, found.id)

    only_in(manager, Tier.NVME, hashes_of(1, 4))
    (file,) = tmp_path.rglob("*.pool") if list(tmp_path.rglob("*.pool")) else [nvme_file(tmp_path)]
    data = np.fromfile(file, dtype=np.uint8)
    wanted = np.frombuffer(hashes_of(1, 4)[2 * HASH_BYTES : 3 * HASH_BYTES], dtype=np.uint8)
    places = [
        at for at in range(0, len(data) - HASH_BYTES, HASH_BYTES) if np.array_equal(data[at : at + HASH_BYTES], wanted)
    ]
    data[places] ^= 1
    data.tofile(file)
    served = serve(manager, 1, 4)
    assert served.prefix.depth == 2
    bad = receiver.one("kvbm.nvme.read", outcome="part")
    assert (bad.values["arrived"], bad.values["why"], bad.failure) == (3, "corrupt", "corrupt")
    assert bad.values["corrupt"] == 1
    assert receiver.one("kvbm.acquire", outcome="part").values["why"] == "unread"
    wrote = receiver.named("kvbm.offload", target="NVME", outcome="arrived")
    assert wrote and all(one.parent == "" and one.values["source"] in ("HOST", "HBM") for one in wrote)
    holds_no_secret(receiver, hashes_of(1, 4))


def nvme_file(folder: Path) -> Path:
    """The largest file below a folder that is no journal's."""
    return max(
        (one for one in folder.rglob("*") if one.is_file() and "journal" not in one.parts),
        key=lambda one: one.stat().st_size,
    )


def test_stores_of_an_engine_that_owns_hbm_are_spans_of_their_request(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    manager = engine_opened(tmp_path, traces__endpoint=receiver.url)
    opened.callback(manager.close)
    engine = OwningEngine(manager)
    engine.compute(1, 4)
    store = manager.begin_store(NAMESPACE.id, bytes(HASH_BYTES), 0, hashes_of(1, 4), trace=SAMPLED)
    assert store is not None
    manager.end_store(store, [True, True, True, False], engine.fill(store))
    span = receiver.one("kvbm.store")
    assert (span.trace, span.parent, span.values["arrived"], span.values["outcome"]) == (TRACE, PARENT, 3, "part")
    assert span.failure == "a worker failed"
    given_up = manager.begin_acquire(NAMESPACE.id, hashes_of(2, 4) + hashes_of(3, 1), trace="")
    given_up.release()
    assert receiver.one("kvbm.acquire").parent == ""


def test_two_managers_of_one_process_speak_for_themselves(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    with OtlpReceiver() as other:
        managers = [
            manager_at(tmp_path / name, at.url, instance__id=name) for name, at in (("a", receiver), ("b", other))
        ]
        for manager in managers:
            opened.callback(manager.close)
            serve(manager, 1, 2)
        for name, at in (("a", receiver), ("b", other)):
            span = at.one("kvbm.acquire")
            assert span.resource["service.instance.id"] == name
            assert (span.resource["service.name"], span.resource["service.namespace"]) == ("kvbm", "local")
        managers[0].close()
        serve(managers[1], 2, 2)
        eventually(lambda: len(other.named("kvbm.acquire")) == 2, "one manager's close has ended the other's traces")


# -- the catalog, and engines -----------------------------------------------------------------------------------------


def test_routers_are_answered_in_their_own_traces_over_every_way_in(
    nats_url: str, cluster: str, sqlite_url: str, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    """JSON, the binary form, the long way of a wait, NATS and asyncio."""
    trace = needed("opentelemetry.trace", "traces")
    tracing = span_export.exporting(receiver.url, 1e-12, {"service.name": "kvbm-catalog"}, "1")
    opened.callback(tracing.close)
    catalog = contextmanager(run_catalog)(nats_url, cluster, sqlite_url, tracing=tracing)
    running = opened.enter_context(catalog)
    instance = running.instance("a")
    instance.create(0, 4)
    at = instance.publish()
    instance.beat()
    http = running.client
    over_nats = opened.enter_context(CatalogClient(f"{nats_url}/{cluster}/any", WAIT_S))
    eventually(lambda: http.instances() and http.instances()[0].state == "live", "the instance is not heard of")
    asked = 0

    def traced(name: str, ask: Callable[[], object], blocks: int = 4) -> None:
        nonlocal asked
        asked += 1
        context = trace.SpanContext(asked, asked, is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(context)):
            ask()
        span = receiver.one(f"kvbm.catalog.{name}", blocks=blocks, namespace=SPACE.id.hex(), prompts=blocks // 4)
        assert (span.trace, span.parent, span.kind) == (f"{asked:032x}", f"{asked:016x}", 2)
        assert span.values["index_s"] >= 0
        receiver.forget()

    prompt = HASHES[: 4 * HASH_BYTES]

    async def ask_async() -> None:
        async with AsyncCatalogClient(http.url, WAIT_S) as client:
            await client.lookup(SPACE, prompt)

    traced("lookup", lambda: http.lookup(SPACE, prompt))
    traced("lookup", lambda: http.lookup(SPACE, prompt, at_least=[at]))
    traced("route", lambda: http.route(SPACE, prompt, 20))
    traced("presence", lambda: http.presence(SPACE, prompt))
    traced("find", lambda: http.find(SPACE, prompt))
    traced("lookup", lambda: http.lookup_many(SPACE, [prompt, prompt]), 8)
    traced("route", lambda: http.route_many(SPACE, [prompt, prompt], [20, 20]), 8)
    traced("lookup", lambda: over_nats.lookup(SPACE, prompt))
    traced("route", lambda: over_nats.route_many(SPACE, [prompt, prompt], [20, 20]), 8)
    traced("lookup", lambda: asyncio.run(ask_async()))
    http.lookup(SPACE, prompt)  # nobody has decided that it is traced, and hardly any is
    tracing.close()
    assert not receiver.spans


def test_vllms_requests_bring_the_trace_that_their_clients_have_begun(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    settings = replace(engine_settings(tmp_path, 64, 0), traces=TracesSettings(endpoint=receiver.url))
    space = Namespace(model="m", revision="r1", block_tokens=BLOCK_TOKENS)
    manager = opened.enter_context(open_engine_manager(settings, [space], vllm_script.BLOCK_BYTES, "vllm"))
    engine = Engine(manager, FULL, [space])
    tokens = list(range(1_000_003, 1_000_003 + 4 * BLOCK_TOKENS + 1))
    engine.run(tokens)
    request = Request(tokens)
    request.trace_headers = {"traceparent": SAMPLED, "tracestate": f"secret={SECRET}"}  # type: ignore[attr-defined]
    assert engine.ask(request) == 4 * BLOCK_TOKENS
    span = receiver.one("kvbm.acquire", outcome="hit")
    assert (span.trace, span.parent, span.values["hits.host"]) == (TRACE, PARENT, 4)
    store = receiver.named("kvbm.store")
    assert store and all(one.parent == "" for one in store)
    engine.admit(request, 0, 4 * BLOCK_TOKENS)
    engine.step()
    engine.end(request)
    manager.close()
    sent = b"".join(receiver.bodies)
    assert SECRET.encode() not in sent
    assert not any(str(token).encode() in sent for token in tokens)


# -- which requests are traced ----------------------------------------------------------------------------------------


def test_a_share_is_sampled_and_who_asks_decides_before(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    manager = manager_at(tmp_path, receiver.url, traces__sample=1e-12)
    opened.callback(manager.close)
    hashes = hashes_of(1, 2)
    for trace in (
        UNSAMPLED,
        "",
        None,
        "no header",
        "x" * 100_000,
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "\n\x00é",
    ):
        manager.acquire(NAMESPACE.id, hashes, trace=trace)
    manager.acquire(NAMESPACE.id, hashes, trace=SAMPLED)
    manager.close()
    assert [(one.name, one.trace, one.parent) for one in receiver.spans] == [("kvbm.acquire", TRACE, PARENT)]


def test_a_caller_of_some_tenants_does_not_decide_for_the_catalog(
    nats_url: str, cluster: str, sqlite_url: str, tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack
) -> None:
    trace = needed("opentelemetry.trace", "traces")
    file = tmp_path / "access.toml"
    tokens = {
        "ops": add_token(file, NewToken("ops", "operator"), time.time()),
        "acme": add_token(file, NewToken("acme", "router", ["acme"]), time.time()),
    }
    tracing = span_export.exporting(receiver.url, 0.5, {"service.name": "kvbm-catalog"}, "1")
    opened.callback(tracing.close)
    catalog = contextmanager(run_catalog)(
        nats_url, cluster, sqlite_url, tracing=tracing, access=AccessOptions(file=str(file))
    )
    url = opened.enter_context(catalog).client.url
    few, many = 1, (1 << 64) - 1  # of ids, half are below the middle

    def ask(caller: str, trace_id: int) -> None:
        kept = tmp_path / caller
        kept.write_text(tokens[caller])
        context = trace.SpanContext(trace_id, 1, is_remote=False, trace_flags=trace.TraceFlags(1))
        client = CatalogClient(url, WAIT_S, credentials=CatalogCredentials(token=str(kept)))
        with client, trace.use_span(trace.NonRecordingSpan(context)):
            client.lookup(OTHER, HASHES[:HASH_BYTES])

    for caller in tokens:
        for trace_id in (few, many):
            ask(caller, trace_id)
    tracing.close()
    found = {(one.values["caller"], int(one.trace, 16)) for one in receiver.named("kvbm.catalog.lookup")}
    assert found == {("ops", few), ("ops", many), ("acme", few)}


def test_no_sample_makes_no_thread_and_asks_nobody(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with manager_at(tmp_path, receiver.url, traces__sample=0) as manager:
        serve(manager, 1, 2)
        manager.acquire(NAMESPACE.id, hashes_of(1, 2), trace=SAMPLED)
    assert receiver.asked == 0


def test_the_callers_current_span_is_the_parent(tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack) -> None:
    trace = needed("opentelemetry.trace", "traces")
    manager = manager_at(tmp_path, receiver.url)
    opened.callback(manager.close)
    context = trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        manager.acquire(NAMESPACE.id, hashes_of(1, 2))
    span = receiver.one("kvbm.acquire")
    assert (span.trace, span.parent) == (TRACE, PARENT)


# -- receivers that fail ----------------------------------------------------------------------------------------------


def warnings_in(logs: list[Any], word: str) -> list[Any]:
    return [one for one in logs if one["event"] == word]


def closes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close waits hardly at all for a receiver that does not answer."""
    monkeypatch.setattr(span_export, "_CLOSE_S", 0.1)


def test_a_receiver_that_hangs_holds_up_neither_requests_nor_the_close(
    tmp_path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes_soon(monkeypatch)
    receiver.hangs.set()
    with capture_logs() as logs:
        manager = manager_at(tmp_path, receiver.url)
        serve(manager, 1, 2)
        receiver.wait_asked()
        serve(manager, 1, 2)
        manager.close()
    assert receiver.hangs.is_set() and not receiver.spans
    assert [one["spans"] for one in warnings_in(logs, "traces.closed_unsent")]


def test_a_receiver_that_refuses_is_one_warning_and_gets_later_spans(
    tmp_path: Path, receiver: OtlpReceiver, opened: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 500
    with capture_logs() as logs:
        manager = manager_at(tmp_path, receiver.url)
        opened.callback(manager.close)
        for prompt in range(3):
            serve(manager, prompt, 2)
            receiver.wait_asked(prompt)
        eventually(lambda: warnings_in(logs, "traces.not_sent"), "nobody is told")
        receiver.status = 200
        serve(manager, 9, 2)
        eventually(lambda: receiver.spans, "spans do not come after all")
        eventually(lambda: warnings_in(logs, "traces.found"), "nobody is told")
    (said,) = warnings_in(logs, "traces.not_sent")
    assert (said["why"], said["log_level"]) == ("status 500", "warning")
    (found,) = warnings_in(logs, "traces.found")
    assert found["lost_spans"] >= 2 + said["spans"]  # and not those of the first refusal alone
    assert "opentelemetry" not in capfd.readouterr().err.lower()


@pytest.mark.parametrize("status", [0, 503])
def test_a_receiver_that_is_away_gets_what_waits_when_it_comes(tmp_path: Path, opened: ExitStack, status: int) -> None:
    with OtlpReceiver() as first:
        port = first.port
        first.status = status or 200
        if status:
            with capture_logs() as logs:
                manager = manager_at(tmp_path, first.url)
                opened.callback(manager.close)
                serve(manager, 1, 2)
                eventually(lambda: warnings_in(logs, "traces.not_sent"), "nobody is told")
            first.status = 200
            assert first.one("kvbm.acquire").values["outcome"] == "miss"
    if not status:
        with capture_logs() as logs:
            manager = manager_at(tmp_path, f"http://127.0.0.1:{port}")
            opened.callback(manager.close)
            serve(manager, 1, 2)
            eventually(lambda: warnings_in(logs, "traces.not_sent"), "nobody is told")
        with OtlpReceiver(port) as late:
            assert late.one("kvbm.acquire").values["outcome"] == "miss"
    assert len(warnings_in(logs, "traces.not_sent")) == 1


def test_a_full_queue_loses_the_oldest_and_says_how_many(
    tmp_path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes_soon(monkeypatch)
    monkeypatch.setattr(span_export, "MOST_WAITING", 4)
    receiver.hangs.set()
    with capture_logs() as logs:
        manager = manager_at(tmp_path, receiver.url)
        serve(manager, 1, 2)
        receiver.wait_asked()
        for prompt in range(20):
            manager.acquire(NAMESPACE.id, hashes_of(prompt + 5, 2))
        manager.close()
    assert sum(one["spans"] for one in warnings_in(logs, "traces.closed_unsent")) >= 20


def test_spans_that_find_no_room_again_are_lost_and_counted(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    monkeypatch.setattr(span_export, "MOST_WAITING", 4)
    queue = span_export._SpanQueue(receiver.url)
    opened.callback(queue.shutdown)
    queue._stops.set()
    queue._thread.join(WAIT_S)
    spans = [str(number) for number in range(7)]
    queue._waiting.extend(spans[:4])  # type: ignore[arg-type]

    def send(batch: list[object]) -> tuple[str, bool]:
        queue._waiting.extend(spans[4:])  # type: ignore[arg-type]  # what ends meanwhile
        return "status 503", True

    monkeypatch.setattr(queue._receiver, "send", send)
    assert not queue._send_waiting()
    assert list(queue._waiting) == spans[3:] and queue._lost == 3


def test_a_provider_that_raises_fails_no_question() -> None:
    trace = needed("opentelemetry.trace", "traces")

    class Broken(trace.NonRecordingSpan):  # type: ignore[name-defined,misc]
        asked = 0

        def is_recording(self) -> bool:
            type(self).asked += 1
            if type(self).asked > 1:
                raise RuntimeError("broken")
            return True

    class Provider:
        def start_span(self, *arguments: object) -> object:
            return Broken(trace.SpanContext(1, 1, is_remote=False, trace_flags=trace.TraceFlags(1)))

    with capture_logs() as logs:
        tracing = Tracing(Provider())  # type: ignore[arg-type]
        span = tracing.begin("kvbm.acquire", "")
        assert span.is_recording
        with pytest.raises(KeyError), span.current():
            raise KeyError(trace.get_current_span().get_span_context().trace_id)  # of the question, and no other
        assert not trace.get_current_span().get_span_context().is_valid
        assert not tracing.begin("kvbm.acquire", "").is_recording  # it raises already when it is asked
    assert len(warnings_in(logs, "traces.broke")) == 1


# -- who has not asked for it -----------------------------------------------------------------------------------------


def program(text: str, folder: Path) -> str:
    """What a program prints, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), str(folder)],
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


OPEN = """
    import os, sys
    from kvbm.assembly import open_manager
    from kvbm.config import load_settings
    from kvbm.core.ids import Namespace
    def opened(**more):
        flags = {"instance.data_dir": sys.argv[1], "nats.enabled": False, "pools.hbm.slots": 8,
                 "pools.hbm.device": "memory", "journal.in_memory": True} | more
        return open_manager(load_settings(flags=flags), [space], 64)
    space = Namespace(model="m", block_tokens=16)
"""


def test_without_the_setting_nothing_is_imported_and_an_engines_own_provider_is_used(tmp_path: Path) -> None:
    text = """
    with opened() as manager:
        manager.acquire(space.id, bytes(32))
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
    from opentelemetry import trace
    with opened() as manager:
        assert manager._tracing is None  # who has no provider has no traces
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    class Ended(SpanProcessor):
        names = []
        def on_end(self, span):
            self.names.append(span.name)
            if len(self.names) > 1:
                raise RuntimeError("an engine's own processor is broken")
    provider = TracerProvider()
    provider.add_span_processor(Ended())
    trace.set_tracer_provider(provider)
    with opened() as manager:
        for _ in range(3):
            assert manager.acquire(space.id, bytes(32)).depth == 0
    with opened(**{"traces.sample": 0.0}) as manager:
        manager.acquire(space.id, bytes(32))
    print(Ended.names)
    """
    assert program(OPEN + text, tmp_path) == str(["kvbm.acquire"] * 3)


def test_a_forked_child_sends_nothing_and_ends(tmp_path: Path, receiver: OtlpReceiver) -> None:
    text = f"""
    manager = opened(**{{"traces.endpoint": "{receiver.url}"}})
    manager.acquire(space.id, bytes(32))
    child = os.fork()
    if not child:
        manager.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    manager.acquire(space.id, bytes(16))
    """  # nobody closes it: the interpreter's end does
    program(OPEN + text, tmp_path)
    assert sorted(one.values["blocks"] for one in receiver.named("kvbm.acquire")) == [1, 2]


def test_an_engine_that_has_seeded_random_gets_the_numbers_it_counts_on(
    tmp_path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the ids of all its processes would be the same ones, too."""
    before = random.getstate()
    try:
        for name in ("a", "b"):
            random.seed(0)
            seeded = random.getstate()
            with manager_at(tmp_path / name, receiver.url) as manager:
                manager.acquire(NAMESPACE.id, hashes_of(1, 2))
            assert random.getstate() == seeded
    finally:
        random.setstate(before)
    assert len({one.trace for one in receiver.named("kvbm.acquire")}) == 2


@pytest.mark.parametrize(
    "module", ["opentelemetry", "opentelemetry.exporter.otlp.proto.common.trace_encoder", "opentelemetry.sdk.trace"]
)
def test_a_manager_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in ("kvbm.telemetry.tracing", "kvbm.telemetry.span_export"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"traces \(.*pip install 'kvbm-ledger\[traces\]'"):
        manager_at(tmp_path, "http://127.0.0.1:4318")
    manager_at(tmp_path, "").close()  # its files are free


def test_an_endpoint_that_is_none_is_refused_and_no_password_is_shown(tmp_path: Path) -> None:
    for endpoint, word in (("127.0.0.1:4318", "write http://host:port"), ("grpc://h:4317", "write http://host:port")):
        with pytest.raises(ConfigError, match=f"traces.endpoint is '{endpoint}'; {word}"):
            manager_at(tmp_path, endpoint)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        manager_at(tmp_path, f"http://me:{SECRET}@127.0.0.1:4318")
    assert SECRET not in str(refused.value)


def test_headers_come_from_opentelemetrys_variables_and_a_path_stays_as_it_is(
    tmp_path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for what is on this machine
    with manager_at(tmp_path, f"{receiver.url}/otlp/traces") as manager:
        serve(manager, 1, 2)
    assert receiver.named("kvbm.acquire")
    assert receiver.paths == {"/otlp/traces"}
    assert {one["api-key"] for one in receiver.headers} == {SECRET}
