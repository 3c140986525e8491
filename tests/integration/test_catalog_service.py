"""The catalog over real NATS, a real database and real HTTP: what instances publish is what it answers."""

from __future__ import annotations

import asyncio
import json
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3
from openapi_spec_validator import validate as validate_openapi
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.catalog.edge.api import MAX_BODY_BYTES
from kvbm.catalog.edge.metrics import ROWS
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql.rows import InstanceStatus, StoreBatch
from kvbm.catalog.sql.store import BatchResult, SqlStore
from kvbm.config import load_settings
from kvbm.core.answers import MAX_HASHES, FindAnswer, LookupAnswer, PositionWanted
from kvbm.core.errors import ArgumentError, CatalogError, CatalogRefusedError, ConfigError, HashSchemeError, StreamError
from kvbm.core.events import EvictReason
from kvbm.core.ids import (
    Epoch,
    Namespace,
    NamespaceId,
    Offset,
    Tier,
    pack_slots,
)
from kvbm.locate.base import FoundElsewhere
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator
from kvbm.reference.ledger import Ledger
from kvbm.streams.nats.stream import NatsStream
from tests.catalog_site import HASHES, OTHER, POOLS, SPACE, TOKENS, Instance, Running, run_catalog
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.nats_fixture import cluster, nats_url, new_cluster  # noqa: F401
from tests.servers import free_port, nats_server

text_string_to_metric_families = needed("prometheus_client.parser", "catalog").text_string_to_metric_families

FOR_EVER_S = 3600.0  # whoever was heard once is live for the whole test
SERVED_S = 5.0  # how long a catalog waits for a position at most


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


@pytest.fixture
def running_on_both(nats_url: str, cluster: str, database_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, database_url, liveness_s=FOR_EVER_S)


def lookup_at(running: Running, at_least: list[PositionWanted]) -> LookupAnswer:
    """The answer that has seen these positions, asked for again where the catalog takes longer than it waits."""
    answers: list[LookupAnswer] = []

    def is_answered() -> bool:
        try:
            answers.append(running.client.lookup(SPACE, HASHES, at_least=at_least, wait_s=SERVED_S))
        except CatalogRefusedError as error:
            if error.code != "position_not_reached":
                raise
        return bool(answers)

    eventually(is_answered, "the catalog does not reach a position")
    return answers[0]


def prepared(running: Running) -> list[PositionWanted]:
    """Two instances: `a` has blocks 0..5 in HBM, 0..2 in HOST too; `b` has 0..2 in HBM and claimed 0..7."""
    a, b = running.instance("a"), running.instance("b")
    a.create(0, 5)
    a.copy(Tier.HOST, 0, 2)
    b.create(0, 8)
    b.copy(Tier.OBJECT, 0, 8)
    b.ledger.unpin(Tier.HBM, pack_slots(range(8)))
    b.ledger.evict(Tier.HBM, HASHES[32:], EvictReason.CAPACITY)
    return [a.publish(), b.publish()]


def test_lookup_route_block_and_instances_tell_what_was_published(running_on_both: Running) -> None:
    client = running_on_both.client
    positions = prepared(running_on_both)
    found = lookup_at(running_on_both, positions)
    assert [(i.instance, i.depth, i.tiers, i.reach, i.suspect) for i in found.instances] == [
        ("a", 5, {"HBM": 5}, 8, False),
        ("b", 2, {"HBM": 2}, 8, False),
    ]
    assert [(pool.pool, pool.depth) for pool in found.pools] == [("s3://kvbm/blocks", 8)]
    assert (found.deepest, found.blocks, found.namespace) == (8, 10, SPACE.id.hex())

    routed = client.route(SPACE.id, HASHES, 43)
    assert {entry.instance for entry in routed.ranked} == {"a", "b"}
    assert routed.instance == routed.ranked[0].instance
    assert {entry.missing_tokens for entry in routed.ranked} <= {43 - 4 * 5, 43 - 4 * 2, 43 - 4 * 8}

    holders = client.block(SPACE, HASHES[:16]).holders
    assert [(h.name, h.kind, h.tier) for h in holders] == [
        ("a", "instance", "HBM"),
        ("a", "instance", "HOST"),
        ("b", "instance", "HBM"),
        ("s3://kvbm/blocks", "pool", "OBJECT"),
    ]
    assert client.block(SPACE, bytes(16)).holders == []

    a, b = client.instances()
    assert (a.instance, a.state, a.epoch, a.offset, a.suspect) == ("a", "unheard", 1, positions[0].offset, False)
    assert a.held_blocks == {"HBM": 5, "HOST": 2}
    assert (b.topology, b.engine) == (["rack-1", "b"], "test")
    assert [pool.held_blocks for pool in b.pools] == [2, 0, 8]
    assert [(space.id, space.fields) for space in client.namespaces()] == [(SPACE.id.hex(), SPACE)]


def test_an_instance_that_tells_of_trouble_is_a_metric_until_it_does_not(running: Running) -> None:
    sick, well = running.instance("sick"), running.instance("well")
    for one in (sick, well):
        one.create(0, 2)
        one.publish()

    def troubled() -> dict[str, float]:
        text = urllib3.request("GET", f"{running.client.url}/metrics", timeout=WAIT_S).data.decode()
        (family,) = [one for one in text_string_to_metric_families(text) if one.name == "kvbm_catalog_troubled"]
        return {one.labels["instance"]: one.value for one in family.samples}

    well.beat()
    for trouble, value in (("journal full: no room", 1), ("", 0)):
        sick.beat(trouble=trouble)
        eventually(lambda value=value: troubled() == {"sick": value, "well": 0}, "trouble is not told", state=troubled)


def test_a_restarted_catalog_gives_the_same_answers(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    database_url: str,
) -> None:
    catalogs = run_catalog(nats_url, cluster, database_url, liveness_s=FOR_EVER_S)
    first = next(catalogs)
    positions = prepared(first)
    before = lookup_at(first, positions)
    instances = first.client.instances()
    next(catalogs, None)
    for _ in range(2):
        catalogs = run_catalog(nats_url, cluster, database_url, liveness_s=FOR_EVER_S)
        again = next(catalogs)
        assert again.client.lookup(SPACE, HASHES) == before
        assert again.client.instances() == instances
        next(catalogs, None)
    rows, claims = asyncio.run(stored(database_url))
    assert {row.id: (row.epoch, row.state) for row in rows} == {
        "a": (1, InstanceStatus.LIVE),
        "b": (1, InstanceStatus.LIVE),
    }
    assert claims == 8


async def stored(database: str) -> tuple[Any, int]:
    store = await SqlStore.open(database)
    try:
        return await store.instances(), await store.claim_count()
    finally:
        await store.close()


def test_a_catalog_reads_its_own_writes(running: Running) -> None:
    a = running.instance("a")
    a.publish()
    a.create(0, 3)
    wanted = PositionWanted(instance="a", epoch=1, offset=a.ledger.applied)
    with pytest.raises(CatalogRefusedError, match="not yet at offset") as caught:
        running.client.lookup(SPACE, HASHES, at_least=[wanted], wait_s=0.1)
    assert (caught.value.status, caught.value.code) == (504, "position_not_reached")
    later = threading.Timer(0.3, a.publish)
    later.start()
    found = lookup_at(running, [wanted])
    later.join()
    assert found.instances[0].depth == 3
    old = PositionWanted(instance="a", epoch=0, offset=999)
    assert running.client.lookup(SPACE, HASHES, at_least=[old]).instances[0].depth == 3


def test_a_gap_is_suspected_until_a_snapshot(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 2)
    a.publish()
    a.create(2, 4)
    a.publish(lose=True)
    a.create(4, 6)
    a.publish()

    def is_past_the_gap() -> bool:
        a.beat()
        summary = running.client.instance("a")
        return summary is not None and summary.offset == a.ledger.applied

    eventually(is_past_the_gap)
    found = running.client.lookup(SPACE, HASHES).instances[0]
    assert (found.depth, found.suspect) == (2, True)
    a.ledger.begin_snapshot()
    while a.ledger.step_snapshot():
        pass
    found = lookup_at(running, [a.publish()]).instances[0]
    assert (found.depth, found.suspect) == (6, False)
    metrics = parsed(running.client.metrics())
    assert metrics["kvbm_catalog_gaps_total"] == 1


def test_heartbeats_decide_who_is_routed_to(running: Running) -> None:
    a, b = running.instance("a"), running.instance("b")
    a.create(0, 10)
    a.publish()
    wanted = b.publish()

    def are_heard() -> bool:  # one sign of life may come before the catalog listens
        a.beat(queued_tokens=10**9)
        b.beat()
        return [i.state for i in running.client.instances()] == ["live", "live"]

    eventually(are_heard)
    lookup_at(running, [wanted])
    late = running.client.route(SPACE, HASHES, 40, deadline_s=1e-3, latency="interactive", phase="prefill")
    assert (late.instance, late.admitted) == ("b", False)
    routed = running.client.route(SPACE, HASHES, 40)
    assert routed.instance == "b"
    assert routed.ranked[1].queueing_s > 1000
    assert routed.admitted
    assert (routed.ranked[0].admitted, routed.ranked[0].ttft_s) == (True, pytest.approx(40 / 10_000))
    summary = running.client.instance("a")
    assert summary is not None
    assert (summary.queued_tokens, summary.running_requests, summary.free_slots) == (10**9, 3, {"HBM": 7})

    def is_left_to_a() -> bool:
        a.beat()
        b.beat(stopping=True)
        return running.client.route(SPACE, HASHES, 40).instance == "a"

    eventually(is_left_to_a)


def test_a_heartbeat_the_stream_has_kept_is_no_sign_of_life(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    a = Instance(nats_url, cluster, "a")
    a.beat(queued_tokens=5)
    for running in run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S):
        eventually(lambda: running.client.instance("a") is not None)  # noqa: B023
        summary = running.client.instance("a")
        assert summary is not None
        assert (summary.state, summary.queued_tokens) == ("unheard", 5)

        def is_live() -> bool:
            a.beat(age_s=3600)  # a clock that is an hour late, but alive
            return running.client.instances()[0].state == "live"  # noqa: B023 - called now

        eventually(is_live)


def test_a_catalog_that_ends_says_so(nats_url: str, cluster: str, sqlite_url: str) -> None:  # noqa: F811
    with capture_logs() as logs:
        for running in run_catalog(nats_url, cluster, sqlite_url):
            a = running.instance("a")
            a.create(0, 5)
            lookup_at(running, [a.publish()])
    (said,) = [one for one in logs if one["event"] == "catalog.stopped"]
    assert said["read"] == said["stored"] > 0


@pytest.fixture
def listening(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    """A catalog that soon takes those for silent whom it does not hear."""
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=1.0)


def test_an_instance_whose_heartbeats_nobody_can_read_says_so_itself(
    listening: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = listening
    flags = {
        "instance.data_dir": str(tmp_path),
        "instance.cluster": running.settings.cluster,
        "instance.id": "a",
        "nats.url": running.settings.nats_url,
        "nats.heartbeat_s": 0.1,
        "pools.hbm.slots": 4,
        "pools.hbm.device": "memory",
    }

    def state() -> str:
        found = running.client.instance("a")
        return "" if found is None else found.state

    with capture_logs() as logs, open_manager(load_settings(flags=flags), [SPACE], 64) as manager:
        eventually(lambda: state() == "live")
        assert manager.trouble() == ""
        good = manager.heartbeat
        for fields, word in (({"namespaces": (SPACE,)}, "namespaces"), ({"applied": object()}, "object")):
            with monkeypatch.context() as faulty:
                faulty.setattr(
                    manager.publisher_port,
                    "heartbeat",
                    lambda position, fields=fields: msgspec.structs.replace(good(position), **fields),
                )
                eventually(lambda: "heartbeat: it cannot be read" in manager.trouble())
                assert word in manager.trouble()
                eventually(lambda: state() != "live")  # the catalog hears nothing it could read
            eventually(lambda: manager.trouble() == "" and state() == "live")
        said = [log for log in logs if log["event"] == "heartbeat.unreadable"]
        assert len(said) == 2  # once for as long as it lasts
        assert all(log["log_level"] == "warning" and log["instance"] == "a" for log in said)


def test_a_stopped_instance_is_left_out_of_answers_until_it_is_heard_in_its_next_epoch(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 10)
    wanted = a.publish()
    a.beat()
    assert lookup_at(running, [wanted]).deepest == 10
    a.ledger.stop()
    wanted = a.publish()
    answer = lookup_at(running, [wanted])
    assert (answer.deepest, answer.instances, answer.excluded) == (0, [], ["a"])
    again = running.instance("a", epoch=2)
    again.create(0, 5)
    wanted = again.publish()
    a.beat()
    assert lookup_at(running, [wanted]).excluded == ["a"]

    def is_heard() -> bool:
        again.beat()
        return running.client.lookup(SPACE, HASHES).deepest == 5

    eventually(is_heard)


def test_an_instance_of_another_model_is_not_routed_to(running: Running) -> None:
    a = running.instance("a")
    wanted = a.publish()
    lookup_at(running, [wanted])
    assert running.client.route(OTHER, HASHES, 40).instance == "a"  # another tenant of the same model
    with pytest.raises(CatalogRefusedError, match="no live instance serves this namespace") as caught:
        running.client.route(Namespace(model="another", block_tokens=4), HASHES, 40)
    assert (caught.value.status, caught.value.code) == (503, "no_instance")


def test_tokens_are_hashed_where_the_secret_is_known(running: Running) -> None:
    positions = prepared(running)
    lookup_at(running, positions)
    assert running.client.lookup_tokens(SPACE, b"", TOKENS).deepest == 8
    assert running.client.lookup_tokens(SPACE, b"wrong", TOKENS).deepest == 0
    by_fields = {"namespace": msgspec.to_builtins(SPACE), "tokens": TOKENS}
    assert post(running, "/v1/lookup", by_fields)[1]["deepest"] == 8
    by_id = {"namespace": SPACE.id.hex(), "tokens": TOKENS}
    assert post(running, "/v1/lookup", by_id)[1]["deepest"] == 8
    assert post(running, "/v1/route", by_id)[1]["blocks"] == 10
    configured = {"namespace": msgspec.to_builtins(OTHER), "tokens": TOKENS}
    assert post(running, "/v1/lookup", configured)[0] == 200
    assert running.client.route_tokens(SPACE, b"", TOKENS).blocks == 10


def test_tokens_of_another_hash_scheme_are_refused_instead_of_found_nowhere(running: Running) -> None:
    vllm = Namespace(model="m", block_tokens=4, scheme="vllm-sha256_cbor+0123", scheme_seed=7)
    for ask in (running.client.lookup_tokens, running.client.route_tokens):
        with pytest.raises(HashSchemeError, match="vllm-sha256_cbor") as caught:
            ask(vllm, b"", TOKENS)
        assert caught.value.scheme == vllm.scheme
    for path in ("lookup", "route"):
        status, answer = post(running, f"/v1/{path}", {"namespace": msgspec.to_builtins(vllm), "tokens": TOKENS})
        assert (status, answer["error"]["code"]) == (422, "scheme_not_hashable")
        assert vllm.scheme in answer["error"]["message"] and "engine" in answer["error"]["what_to_do"]


def post(running: Running, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = urllib3.request(
        "POST", running.client.url + path, body=data, headers=headers, timeout=WAIT_S, retries=False
    )
    return answer.status, json.loads(answer.data)


GOOD = {"namespace": SPACE.id.hex(), "hashes": HASHES.hex()}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("lookup", b"{", 400, "not_json"),
        ("lookup", b"\xff", 400, "not_json"),
        ("lookup", [], 422, "invalid_request"),
        ("lookup", {}, 422, "hashes_or_tokens"),
        ("lookup", {"hashes": HASHES.hex()}, 422, "namespace_missing"),
        ("presence", {"tokens": [1], "model": "m"}, 422, "namespace_missing"),
        ("lookup", GOOD | {"surprise": 1}, 422, "invalid_request"),
        ("lookup", GOOD | {"namespace": "zz"}, 422, "invalid_request"),
        ("lookup", GOOD | {"timeout_s": 6}, 422, "invalid_request"),
        ("lookup", GOOD | {"at_least": [{"instance": "a"}]}, 422, "invalid_request"),
        ("lookup", GOOD | {"tokens": [1]}, 422, "hashes_or_tokens"),
        ("lookup", {"namespace": SPACE.id.hex()}, 422, "hashes_or_tokens"),
        ("lookup", GOOD | {"hashes": "abc"}, 422, "bad_hash"),
        ("lookup", GOOD | {"hashes": "g" * 32}, 422, "bad_hash"),
        ("lookup", GOOD | {"hashes": "ab " * 32}, 422, "bad_hash"),
        ("lookup", GOOD | {"hashes": ["ab"]}, 422, "bad_hash"),
        ("lookup", GOOD | {"hashes": "0" * 32 * (MAX_HASHES + 1)}, 422, "too_many_hashes"),
        ("lookup", {"namespace": "0" * 32, "tokens": [1]}, 422, "namespace_unknown"),
        (
            "lookup",
            {"namespace": {"model": "m", "block_tokens": 4, "tenant": "x"}, "tokens": [1]},
            422,
            "tokens_not_hashable",
        ),
        (
            "lookup",
            {"namespace": {"model": "m", "block_tokens": 4, "tenant": "x", "scheme": "vllm-xxhash"}, "tokens": [1]},
            422,
            "scheme_not_hashable",
        ),
        ("lookup", {"namespace": {"model": "m", "block_tokens": 4}, "tokens": [-1] * 4}, 422, "bad_tokens"),
        ("lookup", {"namespace": {"model": "m", "block_tokens": 4}, "tokens": [2**70] * 4}, 422, "bad_tokens"),
        ("lookup", {"namespace": {"model": "m", "block_tokens": 0}, "tokens": [1] * 4}, 422, "invalid_request"),
        ("lookup", b" " * (MAX_BODY_BYTES + 1), 413, "body_too_large"),
        ("route", GOOD, 422, "input_tokens_missing"),
        ("route", GOOD | {"input_tokens": -1}, 422, "invalid_request"),
        (
            "route",
            {"namespace": msgspec.to_builtins(SPACE), "hashes": HASHES.hex(), "input_tokens": 3},
            422,
            "too_many_hashes",
        ),
        ("route", GOOD | {"input_tokens": 40}, 503, "no_instance"),
        ("nothing", GOOD, 404, "not_found"),
    ],
)
def test_bad_requests_are_refused_in_words(asked: Running, path: str, body: Any, status: int, code: str) -> None:
    found, answer = post(asked, f"/v1/{path}", body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]
    assert answer["error"]["what_to_do"]


@pytest.fixture(scope="module")
def asked(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:  # noqa: F811
    """One empty catalog for all requests that go wrong."""
    yield from run_catalog(
        nats_url,
        new_cluster("nobody"),
        f"sqlite:///{tmp_path_factory.mktemp('catalog') / 'catalog.db'}",
        liveness_s=FOR_EVER_S,
    )


def test_other_paths_answer_in_words_too(asked: Running) -> None:
    pool = urllib3.connectionpool.connection_from_url(asked.client.url, retries=False, timeout=WAIT_S)
    assert json.loads(pool.request("GET", "/v1/lookup").data)["error"]["code"] == "method_not_allowed"
    assert json.loads(pool.request("GET", "/v1/blocks/zz/00").data)["error"]["code"] == "bad_hash"
    assert pool.request("GET", "/healthz").data == b"ok\n"
    status = json.loads(pool.request("GET", "/").data)
    assert (status["service"], status["ready"], status["instances"]) == ("kvbm-catalog", True, 0)
    pool.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", "/healthz", 200, None),
        ("POST", "/healthz", 405, {"GET", "HEAD"}),
        ("HEAD", "/v1/checkpoint", 405, {"GET"}),  # it is long
        ("OPTIONS", "/v1/lookup", 405, {"POST"}),
        ("GET", "/healthz/", 404, None),
        ("POST", "/v1/lookup/", 404, None),
        ("GET", "/docs", 404, None),
    ],
)
def test_a_path_answers_its_own_methods_and_no_other_spelling(
    asked: Running, method: str, path: str, status: int, allow: set[str] | None
) -> None:
    answer = urllib3.request(method, asked.client.url + path, redirect=False, retries=False, timeout=WAIT_S)
    assert answer.status == status
    assert (set(answer.headers["allow"].split(", ")) if "allow" in answer.headers else None) == allow


def test_the_openapi_description_is_valid_and_names_every_path(asked: Running) -> None:
    described = json.loads(urllib3.request("GET", asked.client.url + "/openapi.json", timeout=WAIT_S).data)
    validate_openapi(described)
    assert set(described["paths"]) == {
        *("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/watch", "/v1/checkpoint"),
        *(
            "/v1/lookup",
            "/v1/route",
            "/v1/presence",
            "/v1/find",
            "/v1/blocks/{namespace}/{hash}",
            "/v1/instances",
            "/v1/namespaces",
            "/v1/usage",
        ),
        "/v1/instances/{instance}/snapshot",
        "/v1/instances/{instance}",
        "/v1/history",
        *(f"/v1/history/{name}" for name in ("overview", "timeline", "changes", "tenants", "pools")),
        *(f"/v1/history/{name}" for name in ("prompt", "route", "sql")),
        "/v1/history/block/{hash}",
        "/v1/history/instances/{instance}",
        *("/v1/overview", "/v1/overview/feed", "/v1/overview/instances/{instance}", "/ui", "/ui/{file}"),
    }
    operation = described["paths"]["/v1/lookup"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "403", "408", "413", "422", "429", "503", "504"}
    for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
        assert post(asked, "/v1/lookup", example["value"])[0] in (200, 504)


def parsed(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_parse_and_count(running: Running) -> None:
    positions = prepared(running)
    lookup_at(running, positions)
    running.client.route(SPACE, HASHES, 40)
    eventually(lambda: parsed(running.client.metrics())["kvbm_catalog_lag_messages"] == 0)
    found = parsed(running.client.metrics())
    assert found["kvbm_catalog_frames_total"] == 2
    assert found["kvbm_catalog_events_total"] == sum(position.offset for position in positions)
    assert found["kvbm_catalog_claims"] == 8
    assert found["kvbm_catalog_lookup_seconds_count"] == found["kvbm_catalog_route_seconds_count"] == 1
    assert found["kvbm_catalog_ready"] == 1
    assert found["kvbm_catalog_degraded"] == found["kvbm_catalog_digest_mismatches_total"] == 0
    lines = running.client.metrics().splitlines()
    assert [row.scraped for row in ROWS if f"# HELP {row.scraped} {row.help}" not in lines] == []


def labelled(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric, by the values of their labels."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def test_metrics_say_what_runs_how_its_answers_ended_and_how_instances_are(running: Running) -> None:
    prepared(running)
    url = running.client.url
    statuses = "kvbm_catalog_answers_total"
    before = labelled(running.client.metrics(), statuses)
    assert urllib3.request("GET", f"{url}/nothing", timeout=WAIT_S).status == 404
    body = json.dumps({"namespace": SPACE.id.hex(), "hashes": ["short"]})  # refused on the fast path
    assert urllib3.request("POST", f"{url}/v1/lookup", body=body, timeout=WAIT_S).status in (400, 422)
    running.client.lookup(SPACE, HASHES)
    text = running.client.metrics()
    gained = {status: count - before.get(status, 0) for status, count in labelled(text, statuses).items()}
    assert gained[("404",)] == 1
    assert gained[("200",)] >= 2
    assert sum(gained.values()) >= 4
    states = labelled(text, "kvbm_catalog_instances")
    assert {state for (state,) in states} == {"live", "stopping", "stopped", "silent", "unheard"}
    shown = [one.state for one in running.client.instances()]
    assert {state: shown.count(state) for (state,) in states} == {state: count for (state,), count in states.items()}
    assert labelled(text, "process_resident_memory_bytes")[()] > 1 << 20
    (build,) = labelled(text, "kvbm_catalog_build_info")
    version = urllib3.request("GET", f"{url}/", timeout=WAIT_S).json()["version"]
    assert set(build) == {version, platform.python_version()}


def test_no_number_is_named_after_a_tenant(running: Running) -> None:
    a = running.instance("a")
    a.ledger = Ledger(POOLS)
    a.ledger.start(Epoch(1), [SPACE, OTHER], ["rack-1", "a"], "test", "0")
    a.create(0, 2)
    a.publish()
    a.beat(put_bytes={OTHER.id: (3, 2)})
    running.client.lookup(OTHER, HASHES)
    eventually(lambda: parsed(running.client.metrics())["kvbm_catalog_frames_total"] == 1)
    assert OTHER.tenant == "acme" and OTHER.tenant not in running.client.metrics()


def test_who_has_the_stream_can_invent_an_instances_events_and_hide_them(running: Running) -> None:
    """There is no process of that name: docs/threats.md says what it costs."""
    invented = running.instance("a")
    invented.create(0, 2)
    reached = invented.publish()
    assert running.client.lookup(SPACE, HASHES, at_least=[reached]).deepest == 2
    invented.create(2, 4)
    invented.publish(lose=True)
    reached = running.instance("b").publish()
    assert running.client.lookup(SPACE, HASHES, at_least=[reached]).deepest == 2


def test_metrics_tell_how_much_smaller_a_namespace_became(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 5)
    a.publish()
    a.beat(put_bytes={SPACE.id: (3000, 2000)}, put_total=(5000, 4000))

    def sizes(name: str, label: str) -> dict[str, dict[str, float]]:
        families = text_string_to_metric_families(running.client.metrics())
        found: dict[str, dict[str, float]] = {}
        for sample in (s for f in families for s in f.samples if s.name == name):
            found.setdefault(sample.labels[label], {})[sample.labels["form"]] = sample.value
        return found

    def total() -> dict[str, dict[str, float]]:
        return sizes("kvbm_catalog_object_put_bytes_total", "instance")

    def by_namespace() -> dict[str, dict[str, float]]:
        return sizes("kvbm_catalog_object_namespace_put_bytes", "namespace")

    eventually(lambda: total() == {"a": {"raw": 5000, "stored": 4000}})
    assert by_namespace() == {SPACE.id.hex(): {"raw": 3000, "stored": 2000}}
    many = {NamespaceId(b"%016d" % at): (at, at) for at in range(300)}  # clients choose them
    a.beat(put_bytes=many, put_total=(5300, 4300))
    eventually(lambda: total() == {"a": {"raw": 5300, "stored": 4300}})
    assert set(by_namespace()) == {one.hex() for one in list(many)[-64:]}


def test_a_locator_asks_for_claims_and_backs_off_while_the_catalog_is_away(running: Running) -> None:
    positions = prepared(running)
    lookup_at(running, positions)
    locator = HttpLocator(running.client.url)
    assert locator.find("s3://kvbm/blocks", SPACE.id, HASHES, 99, WAIT_S).claimed == 8
    assert locator.find("s3://kvbm/blocks", SPACE.id, HASHES[16:], 99, WAIT_S).claimed == 7
    assert locator.find("another", SPACE.id, HASHES, 99, WAIT_S).claimed == 0
    assert locator.find("s3://kvbm/blocks", NamespaceId(bytes(16)), HASHES, 99, WAIT_S).claimed == 0
    mixed = bytes(16) + HASHES[16:32] + bytes(16) + HASHES[:16] * 6  # each by itself, whatever lies before
    assert locator.claimed("s3://kvbm/blocks", SPACE.id, mixed, WAIT_S) == bytes([0b11111010, 0b1])
    assert locator.claimed("another", SPACE.id, HASHES, WAIT_S) == b""
    locator.close()


def test_a_locator_answers_zero_without_waiting_while_nobody_is_there() -> None:
    now_s = [0.0]
    port = free_port()
    locator = HttpLocator(f"http://127.0.0.1:{port}", clock=lambda: now_s[0])
    with capture_logs() as logs:
        _ask_nobody(locator, port, now_s)
    locator.close()
    assert [entry["event"] for entry in logs] == ["catalog.lost"]


def _ask_nobody(locator: HttpLocator, port: int, now_s: list[float]) -> None:
    assert locator.find("pool", SPACE.id, HASHES, 99, 0.5).claimed == 0
    with _silent_listener(port) as listener:  # would make every request wait
        listener.setblocking(False)
        for _ in range(100):
            assert locator.find("pool", SPACE.id, HASHES, 99, 0.5).claimed == 0
            assert locator.claimed("pool", SPACE.id, HASHES, 0.5) == b""
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody has come

        def is_asked() -> bool:
            now_s[0] += 10.0
            assert locator.find("pool", SPACE.id, HASHES, 99, 0.1).claimed == 0
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                return False  # it had no time to connect
            return True

        eventually(is_asked, "nobody comes")


def _silent_listener(port: int) -> Any:
    import socket

    return socket.create_server(("127.0.0.1", port))


def test_errors_at_the_start_are_one_sentence(nats_url: str, sqlite_url: str) -> None:  # noqa: F811
    good = ServiceSettings(nats_url=nats_url, database_url=sqlite_url, listen="127.0.0.1:0", connect_s=WAIT_S)
    for changed, kind, words in (
        ({"nats_url": f"nats://127.0.0.1:{free_port()}", "connect_s": 1.0}, StreamError, "no connection to NATS"),
        ({"database_url": "mysql://x/y"}, CatalogError, "cannot hold the catalog"),
        (
            {"database_url": f"postgresql://u:p@127.0.0.1:{free_port()}/d", "connect_s": 1.0},
            CatalogError,
            "cannot be opened",
        ),
        ({"listen": "7700"}, ConfigError, "write host:port"),
        ({"listen": nats_url.removeprefix("nats://")}, CatalogError, "choose another port"),
    ):
        with pytest.raises(kind, match=words):
            CatalogThread(msgspec.structs.replace(good, **changed), NATIVE, NATIVE_INDEX).start()


def test_the_index_answers_while_nats_is_away_and_goes_on_when_it_is_back(
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    with nats_server() as server:
        archive = str(tmp_path / "archive")
        catalogs = run_catalog(server.url, cluster, sqlite_url, liveness_s=FOR_EVER_S, archive=archive)
        running = next(catalogs)
        positions = prepared(running)
        before = lookup_at(running, positions)
        server.stop()
        eventually(lambda: "NATS: " in (told := running.client.ready().degraded) and "archive stream: " in told)
        metrics = running.client.metrics()  # no folder refuses anything
        assert 'degraded_parts{part="NATS"} 1.0' in metrics and 'degraded_parts{part="archive"} 0.0' in metrics
        assert running.client.ready().ready
        assert running.client.lookup(SPACE, HASHES) == before
        again = type(server).start(server.folder, port=int(server.url.rpartition(":")[2]), timeout_s=WAIT_S)
        try:
            eventually(lambda: not running.client.ready().degraded)
            c = running.instance("c")
            c.create(0, 9)
            assert lookup_at(running, [c.publish()]).deepest == 9
        finally:
            next(catalogs, None)
            again.stop()


def test_the_index_goes_on_while_the_database_is_away_and_nothing_is_lost(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: SqlStore, batch: StoreBatch) -> BatchResult:
        raise CatalogError("the database does not answer")

    with monkeypatch.context() as away:
        away.setattr(SqlStore, "apply", refuse)
        positions = prepared(running)
        assert lookup_at(running, positions).deepest == 8
        eventually(lambda: running.client.ready().degraded == "SQL: the database does not answer")
        assert running.client.ready().ready
        assert parsed(running.client.metrics())["kvbm_catalog_degraded"] == 1
    eventually(lambda: not running.client.ready().degraded)
    eventually(lambda: asyncio.run(stored(running.settings.database_url))[1] == 8)


def test_a_replaced_stream_is_followed_from_its_beginning(cluster: str, sqlite_url: str) -> None:  # noqa: F811
    with nats_server() as first:
        catalogs = run_catalog(first.url, cluster, sqlite_url, liveness_s=FOR_EVER_S)
        running = next(catalogs)
        for _ in range(3):
            lookup_at(running, prepared(running))
        next(catalogs, None)
    with nats_server() as second:
        catalogs = run_catalog(second.url, cluster, sqlite_url, liveness_s=FOR_EVER_S)
        running = next(catalogs)
        assert running.client.lookup(SPACE, HASHES).pools[0].depth == 8  # claims outlive the stream
        a = running.instance("a", epoch=2)
        a.create(0, 10)
        a.copy(Tier.OBJECT, 8, 10)
        assert lookup_at(running, [a.publish()]).pools[0].depth == 10
        next(catalogs, None)
    assert asyncio.run(stored(sqlite_url))[1] == 10


def test_a_snapshot_can_be_asked_for_by_hand(running: Running) -> None:
    a = running.instance("a")
    lookup_at(running, [a.publish()])
    assert running.client.ask_snapshot("a") is False  # it is there, and nobody serves snapshots
    for unknown in ("nobody", "no/body"):
        with pytest.raises(CatalogRefusedError) as caught:
            running.client.ask_snapshot(unknown)
        assert caught.value.status == 404
    asked: list[None] = []

    async def serve(stream: NatsStream) -> None:
        async for _ in stream.watch_snapshot_asks(a.cluster, a.name):
            asked.append(None)
            return

    serving = threading.Thread(target=a.run, args=(serve,))
    serving.start()
    eventually(lambda: running.client.ask_snapshot("a"))
    serving.join(WAIT_S)
    assert asked


def test_positions_of_many_waiters_are_all_told(running: Running) -> None:
    a = running.instance("a")
    a.publish()
    a.create(0, 4)
    wanted = PositionWanted(instance="a", epoch=1, offset=Offset(a.ledger.applied))
    depths: list[int] = []

    def ask() -> None:
        depths.append(lookup_at(running, [wanted]).deepest)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    a.publish()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert depths == [4] * 20


LENDS = {"host": "machine", "unix": "/run/kvbm.sock", "tcp": "10.0.0.1:9000"}


def test_who_lends_blocks_is_found_in_every_form(running: Running) -> None:
    positions = prepared(running)
    lookup_at(running, positions)
    lender = running.instance("a")
    lender.beat(lends={**LENDS, "later": "unknown here"})
    eventually(lambda: bool(running.client.find(SPACE, HASHES).peers), "nobody lends")
    found = running.client.find(SPACE, HASHES, 1, "me", ["rack-2", "me"])
    (peer,) = found.peers
    assert (peer.instance, peer.lends, found.blocks) == ("a", LENDS, 10)
    assert (peer.depth, peer.tiers, peer.distance) == (1, {"HOST": 1}, 2)
    assert [(one.pool, one.depth) for one in found.pools] == [("s3://kvbm/blocks", 8)]
    (again,) = running.client.find_many(SPACE, [HASHES], [1], "me", ["rack-2", "me"])
    assert again.peers == found.peers and again.pools == found.pools
    assert running.client.find(SPACE, HASHES, 1, "a").peers == []
    assert running.client.find(SPACE, HASHES, instances=["b"]).peers == []
    locator = HttpLocator(running.client.url, asker="me", topology=["rack-2", "me"])
    assert locator.find("s3://kvbm/blocks", SPACE.id, HASHES, 1, WAIT_S) == FoundElsewhere(8, tuple(again.peers))
    locator.close()
    with capture_logs() as logs:  # settings have always taken such a place
        locator = HttpLocator(running.client.url, asker="me", topology=["z"] * 17)
    assert [(one["event"], "17 labels" in one["why"]) for one in logs] == [("catalog.place_unsaid", True)]
    assert len(locator.find("s3://kvbm/blocks", SPACE.id, HASHES, 1, WAIT_S).peers) == 1
    locator.close()
    lender.beat()
    eventually(lambda: not running.client.find(SPACE, HASHES).peers, "it lends for ever")
    for wrong in ({"limit": 5}, {"limit": 0}, {"first": -1}, {"topology": ["z"] * 17}, {"asker": "x" * 129}):
        with pytest.raises(ArgumentError):
            running.client.find(SPACE, HASHES, **wrong)  # type: ignore[arg-type]
    assert post(running, "/v1/find", {"namespace": SPACE.id.hex(), "hashes": HASHES.hex(), "limit": 5})[0] == 422


class Older(CatalogClient):
    """A catalog that does not know the question."""

    def find_many(self, *asked: Any, **more: Any) -> list[FindAnswer]:
        self.refused = getattr(self, "refused", 0) + 1
        raise CatalogRefusedError("no such path", 404, "not_found")


def test_a_catalog_of_an_older_kvbm_is_asked_as_before(running: Running) -> None:
    positions = prepared(running)
    lookup_at(running, positions)
    locator = HttpLocator(running.client.url)
    locator._client.close()
    locator._client = older = Older(running.client.url)
    for _ in range(3):
        assert locator.find("s3://kvbm/blocks", SPACE.id, HASHES, 1, WAIT_S) == FoundElsewhere(8)
    assert older.refused == 1
    locator.close()
