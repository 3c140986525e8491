"""The bridge and SGLang servers that say where their events are."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.bridge_site import Site, site
from tests.foreign_engines import MODEL, Prompt, stored_event
from tests.nats_fixture import cluster, nats_url
from tests.servers import free_port
from tests.zmq_publisher import Publisher

__all__ = ["cluster", "nats_url", "site"]

PROMPT = Prompt(tuple(range(100, 124)))
OTHER = Prompt(tuple(range(500, 512)))


class SglangServer:
    """Answers `/server_info` as an SGLang server whose events `publisher` sends."""

    def __init__(self, port: int, publisher: Publisher) -> None:
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{publisher.ports[0]}",
            "replay_endpoint": f"tcp://*:{publisher.ports[1]}",
        }
        said = {"model_path": MODEL, "page_size": 4, "dp_size": 1, "kv_events_config": json.dumps(events)}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/server_info" else 404)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *args: Any) -> None:
                """Nothing: tests say what is wrong."""

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_an_engine_is_found_at_its_server_also_when_it_starts_after_the_bridge(site: Site) -> None:
    publisher, vllm, port = Publisher(), Publisher(), free_port()
    server = None
    try:
        vllm.publish(stored_event(OTHER))
        publisher.publish(stored_event(PROMPT))
        found = {"kind": "sglang", "endpoint": f"http://127.0.0.1:{port}", "model": ""}
        bridge = site.bridge(a=found, b=vllm.settings)
        bridge.agrees(OTHER, {"b": {"HBM": 3}})
        server = SglangServer(port, publisher)
        bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    finally:
        if server is not None:
            server.close()
        publisher.close()
        vllm.close()
