"""Spans on their way to an OTLP receiver: a bounded queue and one thread, so that no request ever waits for it.

A receiver that is away is tried again, and gets what is still in the queue then; one that refuses loses what it has
refused. Either is one warning until it takes spans again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from secrets import randbits
from typing import Any
from urllib.parse import urlsplit

from kvbm.core.errors import MissingExtraError
from kvbm.safe_log import SafeLog
from kvbm.telemetry.tracing import Tracing

try:
    import requests
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
except ImportError:
    raise MissingExtraError("traces (opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http)", "traces") from None

log = SafeLog()

MOST_WAITING = 8192  # spans in the queue; the oldest go first
_BATCH = 512  # of a request
_EVERY_S = 0.5  # between two looks at the queue
_TIMEOUT_S = 5.0  # of a request
_MOST_PAUSE_S = 15.0  # before a receiver that is away is tried again; each time twice as long as before
_CLOSE_S = 2.0
_AWAY = (429, 502, 503, 504)  # what OTLP calls transient
_MOST_VALUES, _MOST_TEXT = 64, 256  # attributes of a span, characters of one
_HERE = ("localhost", "127.0.0.1", "::1")  # asked through no proxy


def exporting(endpoint: str, share: float, resource: Mapping[str, str], version: str) -> Tracing:
    """Spans that go to an OTLP receiver.

    Args:
        endpoint: its URL; /v1/traces is added where it has no path.
        share: of the traces that begin here, 0 to 1; those that began elsewhere go on as was decided there.
        resource: what all spans say of who made them.
    """
    queue = _SpanQueue(endpoint)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(share)),
        resource=Resource.create(dict(resource)),
        shutdown_on_exit=False,
        id_generator=_Ids(),
        span_limits=SpanLimits(max_span_attributes=_MOST_VALUES, max_attribute_length=_MOST_TEXT),
    )
    provider.add_span_processor(queue)
    return Tracing(provider.get_tracer("kvbm", version), queue.shutdown, queue.disown)


class _Ids(IdGenerator):
    """Ids of the system's randomness: engines seed `random`, each of their processes alike, and count on what follows
    it.
    """

    def generate_span_id(self) -> int:
        return randbits(64) or 1

    def generate_trace_id(self) -> int:
        return randbits(128) or 1


class _SpanQueue(SpanProcessor):
    """See the module. `on_end` neither waits nor takes a lock."""

    def __init__(self, endpoint: str) -> None:
        self._process = os.getpid()
        self._waiting: deque[ReadableSpan] = deque(maxlen=MOST_WAITING)
        self._endpoint = endpoint
        self._statuses: list[int] = []  # of the answers to a request
        parts = urlsplit(endpoint)
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        session = requests.Session()
        session.trust_env = parts.hostname not in _HERE
        session.hooks["response"].append(self._answered)
        self._exporter = trace_exporter.OTLPSpanExporter(url, timeout=_TIMEOUT_S, session=session)
        self._stops = threading.Event()
        self._is_away = False
        self._lost = 0  # the queue was full
        self._thread = threading.Thread(target=self._run, name="kvbm-traces", daemon=True)
        self._thread.start()

    # -- of OpenTelemetry ---------------------------------------------------------------------------------------------

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See SpanProcessor."""

    def on_end(self, span: ReadableSpan) -> None:
        """Put a span into the queue."""
        context = span.get_span_context()
        is_sampled = context is not None and context.trace_flags.sampled
        if is_sampled and not self._stops.is_set() and os.getpid() == self._process:
            self._lost += len(self._waiting) == MOST_WAITING  # roughly: several may end at once
            self._waiting.append(span)

    def shutdown(self) -> None:
        """Send what is there, for `_CLOSE_S` at most. Idempotent."""
        if self._stops.is_set():
            return
        self._stops.set()
        if os.getpid() != self._process:
            return
        self._thread.join(_CLOSE_S)
        if left := len(self._waiting) + self._lost:
            self._waiting.clear()
            log.warning("traces.closed_unsent", spans=left, endpoint=self._endpoint, notice="these spans are lost")
        with _QUIET.within():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See SpanProcessor; the thread sends them."""
        return True

    def disown(self) -> None:
        """This process is a forked child, which has no thread of ours: it sends nothing."""
        self._stops.set()
        self._waiting.clear()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _EVERY_S
        while not self._stops.wait(pause_s):
            pause_s = _EVERY_S if self._send_waiting() else min(2 * pause_s, _MOST_PAUSE_S)
        self._send_waiting()

    def _send_waiting(self) -> bool:
        """Send what waits; False where the receiver is away, and it goes on waiting."""
        while self._waiting:
            batch: list[ReadableSpan] = []
            while self._waiting and len(batch) < _BATCH:
                batch.append(self._waiting.popleft())
            why, is_away = self._send(batch)
            if not why:
                if self._is_away:
                    log.info("traces.found", endpoint=self._endpoint, lost_spans=self._lost)
                    self._lost = 0
                self._is_away = False
                continue
            if not self._is_away:
                log.warning(
                    "traces.not_sent",
                    endpoint=self._endpoint,
                    why=why,
                    notice="requests go on; it is tried again" if is_away else "requests go on; these spans are lost",
                    spans=len(batch),
                    remedy="correct traces.endpoint, or look at the receiver; traces.sample 0 makes no traces",
                )
            self._is_away = True
            if is_away:
                room = MOST_WAITING - len(self._waiting)
                self._waiting.extendleft(reversed(batch[-room:] if room else []))
                return False
        return True

    def _send(self, batch: Sequence[ReadableSpan]) -> tuple[str, bool]:
        """Why the receiver has not taken them, "" where it has; and whether it may take them later."""
        self._statuses.clear()
        with _QUIET.within():
            try:
                if self._exporter.export(batch) == SpanExportResult.SUCCESS:
                    return "", False
                why = _QUIET.said()
            except Exception as error:  # noqa: BLE001 - the thread goes on
                why = f"{type(error).__name__}: {error}"
        if self._statuses:
            return f"status {self._statuses[-1]}", self._statuses[-1] in _AWAY
        return why or "no answer", True

    def _answered(self, response: requests.Response, *arguments: Any, **more: Any) -> None:
        self._statuses.append(response.status_code)


class _Quiet(logging.Filter):
    """Keeps what the exporter logs in a thread of ours out of the engine's log: we say it once, in our own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()

    def within(self) -> _Quiet:
        self._thread.says = [""]
        return self

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        del self._thread.says

    def said(self) -> str:
        """What was logged last."""
        return str(self._thread.says[-1])

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        says: list[str] | None = getattr(self._thread, "says", None)
        if says is not None:
            says[:] = [record.getMessage()]
        return says is None


_QUIET = _Quiet()
logging.getLogger(trace_exporter.__name__).addFilter(_QUIET)
