"""A proxy in the environment: what is on this machine is asked itself, and another's catalog through the proxy, unless
no_proxy names it.
"""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.config import load_settings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import CatalogError
from kvbm.locate.asynchronous import AsyncCatalogClient
from kvbm.locate.http import CatalogClient
from kvbm.workload.probe import ask as probe
from kvbm.workload.processes import Child, start_http
from tests.nats_fixture import WAIT_S

READY = msgspec.json.encode(ReadyAnswer(ready=True, reason="", degraded="", stream_sequence=0, lag_messages=0))


class Proxy(http.server.BaseHTTPRequestHandler):
    """Answers for whomever it is asked to reach, but makes no tunnel."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(READY)))
        self.end_headers()
        self.wfile.write(READY)

    def do_CONNECT(self) -> None:
        self.asked.append((self.command, self.path))
        self.send_error(403)

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def served() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Its address, and what it was asked."""
    asked: list[tuple[str, str]] = []
    handler = type("Handler", (Proxy,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What the environment's proxy was asked."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with served() as (url, asked):
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("https_proxy", url)
        yield asked


def test_a_catalog_elsewhere_is_asked_through_the_proxy(proxy: list[tuple[str, str]]) -> None:
    with closing(CatalogClient("http://catalog.invalid:7700", timeout_s=WAIT_S)) as client:
        assert client.ready().ready
    assert proxy == [("GET", "http://catalog.invalid:7700/readyz")]
    assert probe("http://catalog.invalid:7700/readyz", load_settings()).is_well
    with (
        closing(CatalogClient("https://catalog.invalid:7700", timeout_s=WAIT_S)) as client,
        pytest.raises(CatalogError) as refused,
    ):
        client.ready()
    assert proxy[2:] == [("CONNECT", "catalog.invalid:7700")]
    assert "through the proxy http://127.0.0.1:" in str(refused.value)
    assert "no_proxy" in str(refused.value)


def test_a_loop_of_asyncio_asks_through_the_proxy_as_well(proxy: list[tuple[str, str]]) -> None:
    async def ask(url: str) -> bool:
        async with AsyncCatalogClient(url, timeout_s=WAIT_S) as client:
            return (await client.ready()).ready

    assert asyncio.run(ask("http://catalog.invalid:7700"))
    assert proxy == [("GET", "http://catalog.invalid:7700/readyz")]
    with pytest.raises(CatalogError, match=r"through the proxy http://127\.0\.0\.1:"):
        asyncio.run(ask("https://catalog.invalid:7700"))
    assert proxy[1:] == [("CONNECT", "catalog.invalid:7700")]


def test_what_no_proxy_names_is_asked_itself(proxy: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", ".invalid")
    with (
        closing(CatalogClient("http://catalog.invalid:7700", timeout_s=WAIT_S)) as client,
        pytest.raises(CatalogError, match="does not answer") as away,
    ):
        client.ready()
    assert "proxy" not in str(away.value)
    assert not probe("http://catalog.invalid:7700/readyz", load_settings()).is_well
    assert proxy == []


def test_what_is_on_this_machine_is_never_asked_through_the_proxy(proxy: list[tuple[str, str]], tmp_path: Path) -> None:
    with served() as (url, asked), ExitStack() as opened:
        for place in (url, url.replace("127.0.0.1", "localhost")):
            with closing(CatalogClient(place, timeout_s=WAIT_S)) as client:
                assert client.ready().ready
            assert probe(f"{place}/readyz", load_settings()).is_well
        with (
            closing(CatalogClient(f"unix:{tmp_path}/catalog.sock", timeout_s=WAIT_S)) as client,
            pytest.raises(CatalogError),
        ):
            client.ready()
        opened.callback(start_http("sleeper", [sys.executable, "-c", "input()"], url, tmp_path).stop)
        assert len(asked) == 5
    assert proxy == []


def test_children_are_told_to_reach_this_machine_themselves(proxy: list[tuple[str, str]], tmp_path: Path) -> None:
    """The demo's engines ask an object store on the loopback, with libraries that heed the environment."""
    child = Child(
        "child",
        [sys.executable, "-c", "import os; print(os.environ['no_proxy'], os.environ['NO_PROXY'], flush=True); input()"],
        tmp_path,
        spoken=True,
    )
    try:
        assert child.process.stdout is not None
        here = "localhost,127.0.0.1,::1"
        assert child.process.stdout.readline().decode() == f"{here} {here}\n"
    finally:
        child.stop()
