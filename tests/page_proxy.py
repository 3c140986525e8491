"""A reverse proxy before a catalog, as a site has one: the page lies below a path. A test may answer in its place."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from tests.eventually import WAIT_S

_AWAY = ("content-length", "transfer-encoding", "connection", "date", "server")
Stream = Callable[[], Iterator[bytes]]


class PageProxy:
    """See the module. Ends with `opened`.

    Args:
        upstream: the catalog's URL. path: below which it lies, as "/tools/kvbm"; "" for none.
    Attributes:
        url: where the catalog lies, without a slash at its end.
        refused: paths of the catalog that are answered with 503.
        edits: path of the catalog → what is changed in the text that it answers, from what to what; each must be there.
        streams: path of the catalog → what is sent in place of its answer, as server-sent events.
        open: paths that are being answered now.
        strays: paths that were asked for and do not lie below the path.
    """

    def __init__(self, upstream: str, opened: ExitStack, path: str = "") -> None:
        self.upstream, self.path = urlsplit(upstream), path
        self.refused: set[str] = set()
        self.edits: dict[str, tuple[str, str]] = {}
        self.streams: dict[str, Stream] = {}
        self.open: list[str] = []
        self.strays: list[str] = []
        handler = type("Handler", (_Handler,), {"proxy": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        opened.callback(server.server_close)
        opened.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}{path}"


class _Handler(http.server.BaseHTTPRequestHandler):
    proxy: PageProxy

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length") or 0)))

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, body: bytes | None) -> None:
        proxy = self.proxy
        if not self.path.startswith(proxy.path + "/"):
            proxy.strays.append(self.path)
            self.send_error(404)
            return
        path = self.path.removeprefix(proxy.path)
        name = path.partition("?")[0]
        proxy.open.append(name)
        try:
            if name in proxy.refused:
                self.send_error(503, "the proxy has nobody to ask")
            elif name in proxy.streams:
                self._stream(proxy.streams[name]())
            else:
                self._pass_on(path, name, body)
        except OSError:
            pass  # the browser has gone
        finally:
            proxy.open.remove(name)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    def _pass_on(self, path: str, name: str, body: bytes | None) -> None:
        """To the catalog, and piece by piece back; what is changed is read whole."""
        proxy = self.proxy
        ahead = http.client.HTTPConnection(proxy.upstream.hostname or "", proxy.upstream.port, timeout=WAIT_S)
        sent = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "accept-encoding")}
        try:
            ahead.request(self.command, path, body, sent)
            answer = ahead.getresponse()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in _AWAY:
                    self.send_header(key, value)
            self.end_headers()
            if name in proxy.edits:
                old, new = proxy.edits[name]
                text = answer.read().decode()
                assert text.count(old) == 1, f"{name} does not have {old!r} once"
                self.wfile.write(text.replace(old, new).encode())
                return
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()
        finally:
            ahead.close()
