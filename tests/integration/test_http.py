"""The client of a catalog's HTTP interface, against servers that answer wrongly or late."""

from __future__ import annotations

import http.server
import threading
import types
from typing import Any

import pytest

from kvbm.core.errors import CatalogError
from kvbm.core.ids import Namespace
from kvbm.locate.base import NOTHING_FOUND
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator

SPACE = Namespace(model="m", block_tokens=16).id
BLOCK = bytes(range(16))


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
            assert locator.find("pool", SPACE, BLOCK, 0, 60.0) == NOTHING_FOUND
        finally:
            locator.close()
            server.shutdown()


def test_a_second_try_has_only_the_time_that_the_first_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends without an answer, as on a connection that the other side has closed meanwhile."""
    now_s = [100.0]

    class Slow(_Answers):
        def do_POST(self) -> None:
            now_s[0] += 0.4
            self.close_connection = True

    for module in ("transport", "requests"):
        monkeypatch.setattr(f"kvbm.locate.{module}.time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = CatalogClient(f"http://127.0.0.1:{server.server_port}")
        pool = client._transport.places[0].pool
        request, given_s = pool.request, []

        def asked(*words: Any, timeout: Any, **more: Any) -> Any:
            given_s.append(timeout.total)
            return request(*words, timeout=60.0, **more)

        monkeypatch.setattr(pool, "request", asked)
        with pytest.raises(CatalogError):
            client.lookup(SPACE, BLOCK, timeout_s=0.5)
        assert given_s == pytest.approx([0.5, 0.1])
        client.close()
        server.shutdown()
