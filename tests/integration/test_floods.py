"""A catalog that is asked too much goes on answering those who ask what they may, in bounded memory and with few words.

The long form floods it for ten minutes: FLOOD_SECONDS=600.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from structlog.testing import capture_logs

from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.api import MAX_BODY_BYTES
from kvbm.catalog.edge.connections import Connection, Connections
from kvbm.catalog.edge.listener import Listener
from kvbm.config import LimitSettings
from kvbm.core.answers import MAX_HASHES, MAX_INPUT_TOKENS, MAX_POSITIONS
from kvbm.core.prompt_batches import CONTENT_TYPE, MOST_ROUTES, ROUTE, PromptBatch, encode_batch
from tests.floods import (
    FIELDS,
    FLOODS,
    SPACE,
    CatalogProcess,
    Honest,
    Source,
    catalog_process,
    flooding,
    half_open_sockets,
    post,
    publish_instances,
    raise_file_limit,
)
from tests.nats_fixture import WAIT_S, cluster, nats_url, new_cluster  # noqa: F401

MIB = 1 << 20
FLOOD_S = float(os.environ.get("FLOOD_SECONDS") or 20)
HONEST_S = max(8.0, FLOOD_S / 10)
ROUNDS = 3 if FLOOD_S <= 60 else 1


@pytest.fixture
def catalog(nats_url: str, cluster: str, tmp_path: Path) -> Iterator[CatalogProcess]:  # noqa: F811
    publish_instances(nats_url, cluster)
    with catalog_process(tmp_path, nats_url, cluster) as process:
        yield process


def ask(catalog: CatalogProcess, path: str, body: dict[str, Any] | bytes, **options: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = urllib3.request("POST", catalog.url + path, body=data, retries=False, timeout=WAIT_S, **options)
    return reply.status, json.loads(reply.data)


GOOD = {"namespace": FIELDS, "hashes": "00" * 16, "input_tokens": 20}
WANTED = {"instance": "a", "epoch": 1, "offset": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("route", GOOD | {"input_tokens": MAX_INPUT_TOKENS + 1}),
        ("route", GOOD | {"input_tokens": 10**18}),
        ("route", json.dumps(GOOD).replace("20", "1" + "0" * 308).encode()),
        ("route", json.dumps(GOOD).replace("20", "1e308").encode()),
        ("route", json.dumps(GOOD).replace("20", "1" * 100_000).encode()),
        ("lookup", {"namespace": FIELDS, "hashes": "", "timeout_s": -1}),
        ("lookup", b'{"namespace":"%s","hashes":"","timeout_s":1e999}' % (b"00" * 16)),
        ("lookup", b'{"namespace":"%s","hashes":"","timeout_s":NaN}' % (b"00" * 16)),
        ("lookup", {"namespace": FIELDS, "hashes": "", "at_least": [WANTED] * (MAX_POSITIONS + 1)}),
        ("lookup", {"namespace": FIELDS, "hashes": "", "at_least": [WANTED | {"offset": 2**64}]}),
        ("lookup", {"namespace": FIELDS, "hashes": "", "at_least": [WANTED | {"epoch": -1}]}),
        ("lookup", {"namespace": FIELDS, "hashes": "", "at_least": [WANTED | {"instance": "a" * 129}]}),
        ("lookup", {"namespace": FIELDS, "hashes": ["00" * 16] * (MAX_HASHES + 1)}),
        ("lookup", {"namespace": FIELDS, "tokens": [1] * (1 << 21)}),
        ("lookup", {"namespace": FIELDS, "tokens": [10**300] * 100}),
        ("route", GOOD | {"namespace": FIELDS | {"block_tokens": 10**300}}),
        ("lookup", b"[" * MAX_BODY_BYTES),
        ("lookup", b'{"namespace":' * 100_000),
    ],
    ids=range(18),
)
def test_every_number_and_list_has_a_bound(asked: CatalogProcess, path: str, body: dict[str, Any] | bytes) -> None:
    status, answer = ask(asked, f"/v1/{path}", body)
    assert status in (400, 422)
    assert answer["error"]["what_to_do"]


@pytest.mark.parametrize("block_tokens", [1 << 40, 1 << 63, 1 << 64, 10**300])
def test_blocks_longer_than_any_prompt_are_none(asked: CatalogProcess, block_tokens: int) -> None:
    body = {"namespace": FIELDS | {"block_tokens": block_tokens}, "tokens": [1] * 64}
    status, answer = ask(asked, "/v1/lookup", body)
    assert (status, answer["blocks"]) == (200, 0)


def test_no_answer_redirects_to_where_the_caller_says(asked: CatalogProcess) -> None:
    for path in ("/v1/lookup/", "/v1/instances//", "//evil.example/v1/instances"):
        reply = urllib3.request(
            "GET", asked.url + path, headers={"host": "evil.example"}, redirect=False, retries=False
        )
        assert reply.status == 404
        assert "location" not in reply.headers


@pytest.fixture(scope="module")
def asked(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogProcess]:  # noqa: F811
    hosts = {"hosts": "evil.example"}  # a name of a caller's choice, which is let in
    with catalog_process(tmp_path_factory.mktemp("asked"), nats_url, new_cluster("nobody"), access=hosts) as process:
        yield process


def test_a_listener_without_files_sheds_connections_and_goes_on() -> None:
    class Short(socket.socket):
        """The first connection is one file too many."""

        left = 1

        def accept(self) -> tuple[socket.socket, Any]:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    async def made() -> tuple[int, list[object]]:
        connections, opened = Connections(LimitSettings()), asyncio.Event()

        def make(connection: Connection) -> asyncio.Protocol:
            opened.set()
            return asyncio.Protocol()

        with Short(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(8)
            with socket.create_connection(sock.getsockname()) as first, socket.create_connection(sock.getsockname()):
                listener = Listener(sock, connections, make)
                with capture_logs() as logs:
                    listener.start()
                    await asyncio.wait_for(opened.wait(), WAIT_S)
                first.settimeout(WAIT_S)
                with pytest.raises(ConnectionResetError):
                    first.recv(1)
                listener.close()
                await listener.wait_closed()
            return len(connections), [entry["why"] for entry in logs]

    assert asyncio.run(made()) == (1, [os.strerror(errno.EMFILE)])


def test_a_body_that_is_too_large_gets_an_answer_its_caller_can_read(asked: CatalogProcess) -> None:
    for headers in ({}, {"connection": "close"}, {"expect": "100-continue"}):
        status, answer = ask(asked, "/v1/lookup", b" " * (MAX_BODY_BYTES + MIB), headers=headers)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
    host, _, port = asked.url.removeprefix("http://").partition(":")
    for path in ("/v1/lookup", "/nowhere"):  # whoever sends all of it first, and reads then
        with socket.create_connection((host, int(port)), WAIT_S) as sock:
            sock.sendall(post(path, b"", 40 * MIB))
            for _ in range(40):
                sock.sendall(bytes(MIB))
            assert sock.recv(64).startswith(b"HTTP/1.1 4")


@pytest.mark.nightly
def test_half_open_connections_in_thousands_leave_others_served(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    raise_file_limit()
    with catalog_process(tmp_path, nats_url, cluster, files=1024) as catalog:
        logged, rss = catalog.log.stat().st_size, catalog.rss_bytes()
        sockets = half_open_sockets(catalog.url, 1500)
        try:
            for _ in range(20):
                assert urllib3.request("GET", catalog.url + "/healthz", timeout=60, retries=False).status == 200
            assert catalog.log.stat().st_size - logged < 10_000
            assert catalog.rss_bytes() - rss < 64 * MIB
        finally:
            for one in sockets:
                one.close()


@pytest.mark.nightly
def test_long_routes_take_a_bounded_table(catalog: CatalogProcess) -> None:
    pick = random.Random(1)
    rss = catalog.rss_bytes()
    for _ in range(60):
        body = GOOD | {"hashes": pick.randbytes(16 * MAX_HASHES).hex(), "input_tokens": MAX_INPUT_TOKENS}
        assert ask(catalog, "/v1/route", body)[0] == 200
    assert catalog.rss_bytes() - rss < 64 * MIB


@pytest.fixture(scope="module")
def strict(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogProcess]:  # noqa: F811
    """It takes ten requests from each address, and then one in ten seconds."""
    limits: dict[str, object] = {"requests_per_s": 0.1, "burst": 10, "loopback": True}
    with catalog_process(tmp_path_factory.mktemp("strict"), nats_url, new_cluster("nobody"), **limits) as process:
        yield process


def asking_from(address: str, catalog: CatalogProcess) -> urllib3.HTTPConnectionPool:
    return urllib3.connectionpool.connection_from_url(
        catalog.url, retries=False, timeout=WAIT_S, source_address=(address, 0)
    )


def test_who_asks_too_often_is_told_when_to_ask_again(strict: CatalogProcess) -> None:
    pool = asking_from("127.0.0.8", strict)
    replies = [pool.request("GET", "/v1/namespaces") for _ in range(14)]
    refused = [reply for reply in replies if reply.status == 429]
    assert {reply.status for reply in replies} == {200, 429}
    assert json.loads(refused[0].data)["error"]["code"] == "too_many_requests"
    assert int(refused[0].headers["retry-after"]) >= 1
    assert asking_from("127.0.0.9", strict).request("GET", "/v1/namespaces").status == 200


def test_a_header_does_not_say_who_asks(strict: CatalogProcess) -> None:
    """Else whoever is on the machine has as many addresses, and so limits, as it likes."""
    pool = asking_from("127.0.0.10", strict)
    replies = [pool.request("GET", "/v1/namespaces", headers={"X-Forwarded-For": f"192.0.2.{at}"}) for at in range(14)]
    assert {reply.status for reply in replies} == {200, 429}


def test_waits_are_bounded_for_each_caller_and_leave_others_served(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def crowd(url: str) -> list[int]:
        source = Source(url, "127.0.0.2")
        body = json.dumps({"namespace": FIELDS, "hashes": "", "at_least": [WANTED], "timeout_s": 3}).encode()
        return await asyncio.gather(*(source.ask(post("/v1/lookup", body)) for _ in range(40)))

    with catalog_process(tmp_path, nats_url, cluster, waits=40) as catalog:
        for _ in range(5):
            statuses = asyncio.run(crowd(catalog.url))
            assert sorted(set(statuses)) == [429, 504]
            if statuses.count(504) == 10:
                break  # else this machine was so busy that the first were over before the last had come
        assert statuses.count(504) == 10
        assert (
            ask(catalog, "/v1/lookup", {"namespace": FIELDS, "hashes": "", "at_least": [WANTED], "timeout_s": 0})[0]
            == 504
        )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["batches", "bodies"])
def test_one_caller_that_asks_for_much_leaves_others_half_of_the_time(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    """One connection of batches of 64 long routes, or three of bodies of 8.3 MB; no number of requests is over any
    limit.
    """
    publish_instances(nats_url, cluster, [f"instance-{number:03}" for number in range(100)])
    pick = random.Random(3)
    if kind == "batches":
        prompts = [(pick.randbytes(16 * 512), 16 * 512) for _ in range(MOST_ROUTES)]
        path, body = "/v1/route", encode_batch(PromptBatch(ROUTE, 8, SPACE.id, prompts))
        headers, connections = {"content-type": CONTENT_TYPE}, 1
    else:
        tokens = ",".join(str(pick.randrange(10**6, 10**7)) for _ in range(1_030_000))
        path, body = "/v1/lookup", b'{"namespace":%b,"tokens":[%b]}' % (json.dumps(FIELDS).encode(), tokens.encode())
        headers, connections = {}, 3
    limits: dict[str, object] = {"loopback": True, "requests_per_s": 1e6, "burst": 10**6}
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def ask(url: str) -> None:
        pool = urllib3.connectionpool.connection_from_url(url, retries=False, source_address=("127.0.4.1", 0))
        while not over.is_set():
            statuses[pool.request("POST", path, body=body, headers=headers, timeout=WAIT_S).status] += 1

    with catalog_process(tmp_path, nats_url, cluster, **limits) as catalog, Honest(catalog.url, 1, 0.0) as honest:
        quiet_rate = honest.rate(HONEST_S)
        greedy = [threading.Thread(target=ask, args=(catalog.url,), daemon=True) for _ in range(connections)]
        for one in greedy:
            one.start()
        try:
            for _ in range(ROUNDS):
                honest.took_s.clear()
                rate = honest.rate(HONEST_S)
                took_s = sorted(honest.took_s)
                facts = {
                    "rates": (quiet_rate, rate),
                    "p99_s": took_s[len(took_s) * 99 // 100],
                    "statuses": dict(statuses),
                }
                print(json.dumps(facts))
                if rate >= 0.5 * quiet_rate and facts["p99_s"] <= 0.05:
                    break
            else:
                pytest.fail(f"an honest caller was not served: {facts}")
        finally:
            over.set()
            for one in greedy:
                one.join(WAIT_S)
        assert statuses[200] > 0 and not honest.failed, facts


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FLOODS)
def test_one_flood_leaves_an_honest_caller_half_of_its_rate(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    """No number of requests is over any limit. Strangers have no token, and all others one."""
    publish_instances(
        nats_url, cluster, [f"instance-{number}" for number in range(5)], namespaces=4000 if kind == "namespaces" else 1
    )
    limits: dict[str, object] = {"loopback": True, "requests_per_s": 1e6, "burst": 10**6}
    token, access = "", {}
    if kind == "strangers":
        token = add_token(tmp_path / "access.toml", NewToken("router", "router"), time.time())
        access = {"access": tmp_path / "access.toml"}
    with (
        catalog_process(tmp_path, nats_url, cluster, access=access, **limits) as catalog,
        Honest(catalog.url, token=token) as honest,
    ):
        quiet_rate = honest.rate(HONEST_S)
        for _ in range(ROUNDS):
            with flooding(catalog.url, 4 + HONEST_S, [f"{kind}@127.0.5.1"], tmp_path) as ended:
                time.sleep(2)  # the flood begins
                honest.took_s.clear()
                rate, took_s = honest.rate(HONEST_S), sorted(honest.took_s)
                found = ended()
            facts = {
                "rates": (quiet_rate, rate),
                "p99_s": took_s[len(took_s) * 99 // 100],
                "floods": found,
                "failed": dict(honest.failed),
            }
            print(kind, json.dumps(facts))
            if rate >= 0.5 * quiet_rate and facts["p99_s"] <= 0.05:
                break
        else:
            pytest.fail(f"an honest caller was not served: {facts}")
        assert sum(found[f"{kind}@127.0.5.1"].values()) > 0 and not honest.failed, facts


@pytest.mark.nightly
@pytest.mark.timeout(ROUNDS * (FLOOD_S + 2 * HONEST_S + 60) + 120)
def test_floods_from_many_addresses_leave_memory_and_honest_callers_alone(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Against the same catalog without a flood, and against a twin beside it that nobody floods: so a busy machine
    slows both.
    """
    publish_instances(nats_url, cluster)
    twin_folder = tmp_path / "twin"
    twin_folder.mkdir()
    names = [f"{name}@127.0.1.{number}" for number, name in enumerate(FLOODS, 1)]
    with (
        catalog_process(tmp_path, nats_url, cluster, requests_per_s=200, burst=400, loopback=True) as catalog,
        catalog_process(twin_folder, nats_url, cluster, requests_per_s=200, burst=400, loopback=True) as twin,
        Honest(catalog.url) as honest,
        Honest(twin.url) as honest_beside,
    ):
        pick = random.Random(2)
        for number in range(8):  # routing's table is in use, as it is in any catalog that has run for a while
            body = GOOD | {"hashes": pick.randbytes(16 * MAX_HASHES).hex(), "input_tokens": MAX_INPUT_TOKENS}
            request = post("/v1/route", json.dumps(body).encode())
            assert asyncio.run(Source(catalog.url, f"127.0.2.{number + 1}").ask(request)) == 200
        quiet_rate = honest.rate(HONEST_S)
        quiet_rss, logged = catalog.rss_bytes(), catalog.log.stat().st_size
        for _ in range(ROUNDS):
            with flooding(catalog.url, FLOOD_S, names, tmp_path) as ended:
                beside, begin_s = honest_beside.answered, time.monotonic()
                flooded_rate = honest.rate(FLOOD_S)
                rate_beside = (honest_beside.answered - beside) / (time.monotonic() - begin_s)
                found = ended()
            facts = {
                "rates: quiet, flooded, beside": (quiet_rate, flooded_rate, rate_beside),
                "quiet RSS": quiet_rss / MIB,
                "RSS": catalog.rss_bytes() / MIB,
                "most RSS": catalog.rss_bytes("VmHWM") / MIB,
                "logged": catalog.log.stat().st_size - logged,
                "failed": dict(honest.failed),
                "floods": found,
            }
            print(json.dumps(facts))
            assert catalog.rss_bytes("VmHWM") - quiet_rss <= 64 * MIB, facts
            assert catalog.log.stat().st_size - logged < 100_000, facts
            if flooded_rate >= 0.8 * min(quiet_rate, rate_beside):
                break
        else:
            pytest.fail(f"honest callers were not served: {facts}")
        assert all(sum(seen.values()) > 0 for seen in found.values()), facts  # each flood has flooded
        assert ask(catalog, "/v1/route", GOOD)[0] == 200
