"""Spans of requests, by OpenTelemetry. Imported only where somebody wants them: `kvbm.assembly.traces` says who does.

A span never fails what it is about: trouble of OpenTelemetry's, or of an engine's own provider, is one warning. Spans
begin and end outside of locks, because a provider of an engine may do anything then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kvbm.core.errors import MissingExtraError
from kvbm.safe_log import SafeLog

try:
    from opentelemetry import trace
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise MissingExtraError("traces (opentelemetry-api)", "traces") from None

log = SafeLog()

_HEADER = "traceparent"
_MOST_HEADER = 512  # characters; a version of the future may have more than the 55 of today's
Value = str | int | float | bool | list[str]

_read = TraceContextTextMapPropagator()


class TraceSpan:
    """One span that has begun. Any thread may end it; what comes after the end does nothing.

    Attributes:
        is_recording: somebody wants what is put in it; else its children are not made either.
    """

    __slots__ = ("_inner", "_is_ended", "_tracing", "is_recording")

    def __init__(self, inner: trace.Span, tracing: Tracing) -> None:
        self._inner, self._tracing, self._is_ended = inner, tracing, False
        self.is_recording = False
        with tracing.guarded():
            self.is_recording = inner.is_recording()

    def put(self, values: Mapping[str, Value]) -> None:
        """Say more of it; names without `kvbm.` before them."""
        if self.is_recording and not self._is_ended:
            with self._tracing.guarded():
                self._inner.set_attributes({f"kvbm.{name}": value for name, value in values.items()})

    def child(self, name: str, values: Mapping[str, Value] | None = None) -> TraceSpan:
        """A span within it."""
        return self._tracing.begin(name, self, values) if self.is_recording else self

    def child_question(self, name: str, values: Mapping[str, Value]) -> TraceSpan:
        """A span within it, of a question to another process."""
        return self._tracing.begin(name, self, values, trace.SpanKind.CLIENT) if self.is_recording else self

    def end(self, values: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """It is over.

        Args:
            failure: what went wrong; "" for nothing: a miss is no failure.
        """
        if not self.is_recording or self._is_ended:
            return
        self.put(values or {})
        self._is_ended = True
        with self._tracing.guarded():
            if failure:
                self._inner.set_status(trace.Status(trace.StatusCode.ERROR, failure))
            self._inner.end()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, it is the caller's current span: questions to the catalog name it."""
        token = None
        with self._tracing.guarded():
            token = attach(trace.set_span_in_context(self._inner))
        try:
            yield
        finally:
            if token is not None:
                with self._tracing.guarded():
                    detach(token)


class Tracing:
    """Begins spans. Any thread may.

    Args:
        close: ends what exports them, in a bounded time. disown: this process is a forked child.
        chooses: whether a trace of this id is among the share that begins here.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        close: Callable[[], None] = lambda: None,
        disown: Callable[[], None] = lambda: None,
        chooses: Callable[[int], bool] = lambda trace_id: True,
    ) -> None:
        self._tracer, self.close, self.disown, self._chooses = tracer, close, disown, chooses
        self._guard, self._is_broken = threading.Lock(), False

    def begin(
        self,
        name: str,
        parent: TraceSpan | str | None = None,
        values: Mapping[str, Value] | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> TraceSpan:
        """A span that begins now.

        Args:
            parent: or a `traceparent` header; what is none begins a trace, as "" does. None: the caller's current span.
            values: what is known of it; names without `kvbm.` before them.
        """
        inner: trace.Span = trace.INVALID_SPAN
        with self.guarded():
            context = None
            if isinstance(parent, TraceSpan):
                context = trace.set_span_in_context(parent._inner)
            elif parent is not None:
                context = trace.set_span_in_context(trace.NonRecordingSpan(_context_of(parent)))
            named = {f"kvbm.{one}": value for one, value in (values or {}).items()}
            inner = self._tracer.start_span(name, context, kind, named)
        return TraceSpan(inner, self)

    def begin_answer(self, name: str, parent: str, values: Mapping[str, Value], is_believed: bool = True) -> TraceSpan:
        """A span of an answer to somebody else's question, which has come with this `traceparent`.

        Args:
            is_believed: who asks decides whether the trace is made; else it is made where it would be made here, too.
        """
        if not is_believed and parent:
            with self.guarded():
                context = _context_of(parent)
                if context.trace_flags.sampled and not self._chooses(context.trace_id):
                    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-00"
        return self.begin(name, parent, values, trace.SpanKind.SERVER)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Trouble within is one warning."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - an engine's provider may raise anything
            with self._guard:
                is_first, self._is_broken = not self._is_broken, True
            if is_first:
                log.warning(
                    "traces.broke",
                    why=f"{type(error).__name__}: {error}",
                    notice="requests go on, their traces have holes; this is said once",
                )


def _context_of(header: str) -> trace.SpanContext:
    """What a `traceparent` names; nothing where it is none."""
    carried = {_HEADER: header} if len(header) <= _MOST_HEADER else {}
    found = _read.extract(carried, context=trace.set_span_in_context(trace.INVALID_SPAN))
    return trace.get_current_span(found).get_span_context()


def tracing_of_engine(version: str) -> Tracing | None:
    """Spans by the provider that the embedding program has set; None: it has set none."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracing(provider.get_tracer("kvbm", version))
