"""A server of KV cache events that does as trtllm-serve: numbered events, handed out once."""

from __future__ import annotations

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TrtllmServer:
    """Serves from its making to `close`.

    Args:
        port: 0 for a fresh one.
        buffered: events kept for who asks; the oldest go.

    Attributes:
        breaks: while set, an answer ends before its end.
        says: what it answers instead of events, while set.
    """

    def __init__(self, port: int = 0, buffered: int = 1024) -> None:
        self.breaks = threading.Event()
        self.says: bytes | None = None
        self._numbers: dict[int, int] = {}
        self._waiting: deque[dict[str, Any]] = deque(maxlen=buffered)
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server._answer(self)

            def log_message(self, *args: Any) -> None:
                """Nothing: tests say what is wrong."""

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "trtllm", "endpoint": f"http://127.0.0.1:{self.port}", "block_tokens": 4}

    def publish(self, data: dict[str, Any], rank: int = 0, is_lost: bool = False) -> None:
        with self._lock:
            number = self._numbers.get(rank, 0)
            self._numbers[rank] = number + 1
            if not is_lost:
                event = {"event_id": number, "data": data, "window_size": 4096}
                self._waiting.append(event | ({"attention_dp_rank": rank} if rank else {}))

    def _answer(self, asked: BaseHTTPRequestHandler) -> None:
        with self._lock:
            body = json.dumps(list(self._waiting)).encode() if self.says is None else self.says
            self._waiting.clear()
        if asked.path != "/kv_cache_events":
            asked.send_error(404)
            return
        asked.send_response(200)
        asked.send_header("Content-Length", str(len(body)))
        asked.end_headers()
        asked.wfile.write(body[: len(body) // 2] if self.breaks.is_set() else body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
