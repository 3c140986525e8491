"""A receiver of traces: OTLP over HTTP, of OpenTelemetry's own messages, which can be made to fail."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from tests.eventually import WAIT_S, eventually
from tests.extras import needed

needed("opentelemetry.proto.collector.trace.v1.trace_service_pb2", "traces")


class Received(NamedTuple):
    """A span as it came.

    Attributes:
        trace, id, parent: in hex; parent "" for a root.
        values: its attributes, without `kvbm.` before them.
        resource: of who made it. failure: "" for none.
        begin_ns, end_ns: on the wall clock.
    """

    name: str
    trace: str
    id: str
    parent: str
    values: dict[str, Any]
    resource: dict[str, Any]
    failure: str
    kind: int
    begin_ns: int
    end_ns: int


class OtlpReceiver:
    """Takes spans at `url` while it is entered. Any thread may look.

    Args:
        port: 0 for a free one.

    Attributes:
        status: that it answers with; what it refuses it does not keep. paths: that it was asked at.
        asked: requests so far. bodies: of those it took, as they came.
        hangs: while it is set, requests get no answer.
    """

    def __init__(self, port: int = 0) -> None:
        self.status, self.asked, self.hangs = 200, 0, threading.Event()
        self.paths: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self._let_go = threading.Event()
        self._spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self)

            def log_message(self, *words: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Received]:
        """All that came, in the order it came."""
        return list(self._spans)

    def named(self, name: str, **values: Any) -> list[Received]:
        """Spans of a name that have these values."""
        return [
            one
            for one in self.spans
            if one.name == name and all(one.values.get(key) == value for key, value in values.items())
        ]

    def one(self, name: str, **values: Any) -> Received:
        """The only span of a name with these values, once it has come."""
        eventually(lambda: self.named(name, **values), f"no span {name} {values} comes", state=self._names)
        (found,) = self.named(name, **values)
        return found

    def forget(self) -> None:
        """What came counts no more."""
        self._spans.clear()

    def wait_asked(self, more_than: int = 0) -> None:
        """Until somebody has sent something."""
        eventually(lambda: self.asked > more_than, "nobody sends spans", WAIT_S)

    def _names(self) -> list[str]:
        return [one.name for one in self.spans]

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.asked += 1
        self.paths.add(handler.path)
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        if self.hangs.is_set():
            self._let_go.wait(WAIT_S)
            return
        if self.status == 200:
            if handler.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            self.bodies.append(body)
            self._spans += spans_in(body)
        handler.send_response(self.status)
        handler.send_header("content-length", "0")
        handler.end_headers()


def spans_in(body: bytes) -> list[Received]:
    """The spans of a request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    asked = ExportTraceServiceRequest()
    asked.ParseFromString(body)
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            {key.removeprefix("kvbm."): value for key, value in _values(span.attributes).items()},
            _values(of.resource.attributes),
            span.status.message,
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
        )
        for of in asked.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
