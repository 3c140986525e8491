"""Spans on their way to an OTLP receiver: a bounded queue and one thread, so that no request ever waits for it.

A receiver that is away is tried again, and gets what is still in the queue then; one that refuses loses what it has
refused. Either is one warning until it takes spans again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from secrets import randbits
from urllib.parse import urlsplit

from kvbm.core.errors import MissingExtraError
from kvbm.safe_log import SafeLog
from kvbm.telemetry.tracing import Tracing

try:
    import requests
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.util.re import parse_env_headers
except ImportError:
    raise MissingExtraError("traces (opentelemetry-sdk, opentelemetry-exporter-otlp-proto-common)", "traces") from None

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
        share: of the traces that begin here, 0 to 1; those that began elsewhere go on as was decided there, where who
            began them is believed.
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
    bound = TraceIdRatioBased.get_bound_for_rate(share)
    return Tracing(
        provider.get_tracer("kvbm", version),
        queue.shutdown,
        queue.disown,
        lambda trace_id: trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound,
    )


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
        self._receiver = _Receiver(endpoint)
        self._stops = threading.Event()
        self._is_away = False
        self._lost = 0  # the queue was full, or the receiver has refused them
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
        self._receiver.close()

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
            why, is_away = self._receiver.send(batch)
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
                kept = batch[-room:] if room else []
                self._lost += len(batch) - len(kept)
                self._waiting.extendleft(reversed(kept))
                return False
            self._lost += len(batch)
        return True


class _Receiver:
    """An OTLP receiver, over HTTP. One thread sends; any may close.

    OpenTelemetry's own exporter is not used: it draws from `random`, whose numbers an engine counts on, waits where it
    tries again, and writes of each failure into the engine's log.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._session = requests.Session()
        self._session.trust_env = parts.hostname not in _HERE
        self._session.headers.update(parse_env_headers(_variable("HEADERS"), liberal=True))
        self._session.headers["content-type"] = "application/x-protobuf"
        self._session.verify = _variable("CERTIFICATE") or True
        proof = _variable("CLIENT_CERTIFICATE"), _variable("CLIENT_KEY")
        self._session.cert = proof if all(proof) else proof[0] or None

    def send(self, batch: Sequence[ReadableSpan]) -> tuple[str, bool]:
        """Why it has not taken them, "" where it has; and whether it may take them later."""
        try:
            body = encode_spans(batch).SerializeToString()
        except Exception as error:  # noqa: BLE001 - the thread goes on
            return f"{type(error).__name__}: {error}", False
        try:
            answer = self._session.post(self._url, body, timeout=_TIMEOUT_S, allow_redirects=False)
        except (requests.ConnectionError, requests.Timeout) as error:
            return _words(error), True
        except Exception as error:  # noqa: BLE001 - a file of certificates that is none, for one
            return f"{type(error).__name__}: {error}", False
        return (
            "" if answer.ok and not answer.is_redirect else f"status {answer.status_code}",
            answer.status_code in _AWAY,
        )

    def close(self) -> None:
        """Give the connection back."""
        self._session.close()


def _variable(name: str) -> str:
    """What OpenTelemetry's variables say of a receiver of traces; "" for nothing."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _words(error: Exception) -> str:
    """What failed, without the objects that requests puts into its messages."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    reason = getattr(error, "reason", None)
    return str(reason or error).rpartition(": ")[2] or type(error).__name__
