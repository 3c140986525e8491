"""Answers about a prompt, or about blocks, encoded: the same for every way in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from prometheus_client import Histogram

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.groups_together import lookup_together
from kvbm.catalog.answers.prompts import ApiError, asked_namespace, decode_prompt, id_of, packed_hashes
from kvbm.catalog.answers.routed import routed, routing_task
from kvbm.catalog.answers.token_prompts import PromptBlocks, TokenPrompts
from kvbm.catalog.service import CatalogService
from kvbm.core import prompt_batches
from kvbm.core.answers import LIMIT, FindRequest, LookupRequest, PresenceRequest, RouteRequest
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.core.plain_questions import PlainQuestion
from kvbm.core.prompt_batches import PromptBatch
from kvbm.telemetry.metrics import CatalogMetrics

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan, Tracing, Value

NOT_TOLD = "not ready; ask with an operator's token for the reason"  # names and offsets are not for everybody
_NO_SECRET = secrets.token_hex(16)  # of no tenant
_LOOKUPS_OF_A_REQUEST = 8  # in a batch, that cost as much as a request
_LOOKUPS_AT_ONCE, _HASHES_AT_ONCE = 64, 8192  # of a batch, in one step
_KINDS: dict[type[LookupRequest], int] = {
    LookupRequest: prompt_batches.LOOKUP,
    RouteRequest: prompt_batches.ROUTE,
    PresenceRequest: prompt_batches.PRESENCE,
    FindRequest: prompt_batches.FIND,
}
_NAMES = {
    prompt_batches.LOOKUP: "lookup",
    prompt_batches.ROUTE: "route",
    prompt_batches.PRESENCE: "presence",
    prompt_batches.FIND: "find",
}
_encode = msgspec.json.Encoder().encode
R = TypeVar("R", bound=LookupRequest)


class BatchAnswers(NamedTuple):
    """The answers to a batch: its parts, each made when it is taken, and as how many more requests they count."""

    parts: Iterator[bytes]
    cost: int


class PromptAnswers:
    """Lookups, routes, questions of presence and of what can be read, of one running service.

    Belongs to its loop; every method raises ApiError.
    """

    def __init__(self, service: CatalogService, metrics: CatalogMetrics) -> None:
        self._service, self._metrics = service, metrics
        self._visible = service.queries.visibility
        self._tokens = TokenPrompts(service.queries, self._secret_of, service.backend)
        self._tracing = service.settings.tracing

    def check_ready(self, caller: Caller) -> None:
        """Refuse while the stream is not read to where it ended at the start."""
        if not self._service.is_ready:
            reason = self._service.readiness().reason if caller.sees_all else NOT_TOLD
            raise ApiError(503, "not_ready", reason, "ask again soon; /readyz says when it is ready")

    def decoded(self, body: bytes | bytearray, kind: type[R]) -> R:
        """The request in a body; it may be called in another thread. Raises ApiError, LimitError: there is none."""
        return decode_prompt(body, kind, self._service.backend.read_number_list)

    def hashing(self, caller: Caller, asked: LookupRequest) -> Callable[[], PromptBlocks]:
        """What makes the hashes of the prompt; it may be called in another thread."""
        if (asked.hashes is None) == (asked.tokens is None):
            raise ApiError(
                422, "hashes_or_tokens", "give either hashes or tokens", "hashes need no secret: prefer them"
            )
        if asked.tokens is not None:
            if isinstance(asked, PresenceRequest | FindRequest) and asked.namespace is None:
                raise ApiError(422, "namespace_missing", "no namespace is given", "give its id or its fields")
            return self._tokens.hashing(caller, asked, asked.tokens)
        if asked.model or asked.salt or asked.lora or asked.lora_path or asked.media:
            raise ApiError(
                422,
                "tokens_missing",
                "model, salt, lora, lora_path and media go with tokens, and hashes are given",
                "leave them out: hashes have them already",
            )
        given, namespace = asked.hashes or "", asked_namespace(asked)
        return lambda: PromptBlocks(namespace, packed_hashes(given))

    def lookup(
        self,
        caller: Caller,
        asked: LookupRequest,
        prompt: PromptBlocks,
        trace: str = "",
    ) -> bytes:
        """Who has how much of a prompt; where presence is asked for, who has which of its blocks, and of a find, what
        can be read from where.

        Args:
            asked: its hashes and tokens are not looked at.
            trace: the question's `traceparent`; "" for none.
        """
        with self._traced(type(asked), trace, caller, prompt.namespace, prompt.hashes):
            return self._lookup(caller, asked, prompt)

    def _lookup(self, caller: Caller, asked: LookupRequest, prompt: PromptBlocks) -> bytes:
        begin_s, queries = time.perf_counter(), self._service.queries
        question = (prompt.namespace, prompt.hashes, caller, asked.limit, _only(asked))
        if isinstance(asked, FindRequest):
            answer = _encode(queries.find(*question, asked.first, asked.asker, asked.topology))
        elif isinstance(asked, PresenceRequest):
            answer = _encode(queries.presence(*question))
        elif prompt.groups:
            answer = _encode(lookup_together(queries, prompt, caller, asked.limit, _only(asked)))
        else:
            answer = _encode(queries.lookup(*question))
        self._metrics.lookup_s.observe(time.perf_counter() - begin_s)
        return answer

    def route(
        self,
        caller: Caller,
        key: str,
        asked: RouteRequest,
        prompt: PromptBlocks,
        trace: str = "",
    ) -> bytes:
        """Where to send a prompt. Arguments as `lookup`.

        Args:
            key: of the caller, whose routes are remembered together.
        """
        with self._traced(RouteRequest, trace, caller, prompt.namespace, prompt.hashes):
            return self._route(caller, key, asked, prompt)

    def _route(self, caller: Caller, key: str, asked: RouteRequest, prompt: PromptBlocks) -> bytes:
        begin_s = time.perf_counter()
        if asked.input_tokens is None:
            raise ApiError(
                422, "input_tokens_missing", "input_tokens is not given", "say how long the prompt is, in tokens"
            )
        queries, namespace, only = self._service.queries, prompt.namespace, _only(asked)
        fields = self._fields(caller, namespace)
        task = routing_task(
            namespace, fields, prompt.hashes, asked.input_tokens, key, asked.latency, asked.deadline_s, asked.phase
        )
        answer = _encode(
            routed(queries, task, fields, namespace, caller, asked.limit, only, asked.remember, asked.elsewhere, prompt)
        )
        self._metrics.route_s.observe(time.perf_counter() - begin_s)
        return answer

    def may_be_plain(self) -> bool:
        """Whether plain questions may be answered by `plain_lookup` and `plain_route` now."""
        return self._tracing is None and self._service.is_ready

    def plain_lookup(self, caller: Caller, asked: PlainQuestion) -> bytes | None:
        """As `lookup` of the same; None: ask that."""
        begin_s = time.perf_counter()
        answer = self._service.queries.lookup_json(asked.namespace, asked.hashes, caller, asked.limit or LIMIT)
        if answer is not None:
            self._metrics.lookup_s.observe(time.perf_counter() - begin_s)
        return answer

    def plain_route(self, caller: Caller, key: str, asked: PlainQuestion) -> bytes:
        """As `route` of the same."""
        begin_s = time.perf_counter()
        namespace = asked.namespace
        fields = self._visible.fields(caller, namespace)
        task = routing_task(namespace, fields, asked.hashes, asked.input_tokens, key)
        answer = _encode(routed(self._service.queries, task, fields, namespace, caller, asked.limit or LIMIT))
        self._metrics.route_s.observe(time.perf_counter() - begin_s)
        return answer

    def batch(
        self, caller: Caller, key: str, kind: type[LookupRequest], body: bytes | bytearray, trace: str = ""
    ) -> tuple[bytes, int]:
        """`begin_batch`, with all answers at once. Returns: the answers, and as how many more requests they count."""
        batch = self.begin_batch(caller, key, kind, body, trace)
        return b"".join(batch.parts), batch.cost

    def begin_batch(
        self, caller: Caller, key: str, kind: type[LookupRequest], body: bytes | bytearray, trace: str = ""
    ) -> BatchAnswers:
        """Several prompts in the binary form, answered while the parts of the answer are taken.

        Args:
            kind: of request that the path is for.
            trace: as in `lookup`.
        """
        try:
            asked = prompt_batches.decode_batch(body)
            if asked.kind != _KINDS[kind]:
                raise LayoutError(
                    "lookups go to /v1/lookup, routes to /v1/route, questions of presence to /v1/presence, and what "
                    "can be read to /v1/find"
                )
        except LayoutError as error:
            raise ApiError(422, "bad_batch", str(error), "see docs/route.md for the binary form") from None
        self.check_ready(caller)
        count = len(asked.prompts)
        head = prompt_batches.answers_head(asked.kind, count, self._service.queries.view_age_s())
        if asked.kind != prompt_batches.ROUTE:
            parts, observed, cost = self._found(asked, caller), self._metrics.lookup_s, count // _LOOKUPS_OF_A_REQUEST
        else:
            parts, observed, cost = self._routes(asked, caller, key), self._metrics.route_s, count - 1
        span = None
        if self._tracing is not None:
            prompts = [hashes for hashes, _ in asked.prompts]
            span = self._begin_span(self._tracing, kind, trace, caller, asked.namespace, prompts)
        return BatchAnswers(chain((head,), _timed(parts, observed, span)), cost)

    def _begin_span(
        self,
        tracing: Tracing,
        kind: type[LookupRequest],
        trace: str,
        caller: Caller,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
    ) -> TraceSpan:
        """The span of what the index does for a question; it lasts as long as that."""
        values: dict[str, Value] = {
            "caller": caller.name,
            "namespace": id_of(namespace).hex(),
            "prompts": len(prompts),
            "blocks": sum(map(len, prompts)) // HASH_BYTES,
        }
        return tracing.begin_answer(f"kvbm.catalog.{_NAMES[_KINDS[kind]]}", trace, values, caller.sees_all)

    @contextmanager
    def _traced(
        self,
        kind: type[LookupRequest],
        trace: str,
        caller: Caller,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
    ) -> Iterator[None]:
        """Within, one prompt is answered: a span of that, where traces are made."""
        if self._tracing is None:
            yield
            return
        span = self._begin_span(self._tracing, kind, trace, caller, namespace, [hashes])
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            span.end({"index_s": round(time.perf_counter() - begin_s, 6)})

    def _found(self, asked: PromptBatch, caller: Caller) -> Iterator[bytes]:
        queries = self._service.queries
        answers = {
            prompt_batches.LOOKUP: queries.lookups_encoded,
            prompt_batches.PRESENCE: queries.presences_encoded,
            prompt_batches.FIND: queries.finds_encoded,
        }[asked.kind]
        most = _LOOKUPS_AT_ONCE if asked.kind == prompt_batches.LOOKUP else 1
        begin = hashes = 0
        for end, (prompt, _) in enumerate(asked.prompts, 1):
            hashes += len(prompt) // HASH_BYTES
            if end - begin >= most or hashes >= _HASHES_AT_ONCE or end == len(asked.prompts):
                yield answers(asked._replace(prompts=asked.prompts[begin:end]), caller)
                begin, hashes = end, 0

    def _routes(self, asked: PromptBatch, caller: Caller, key: str) -> Iterator[bytes]:
        fields = self._fields(caller, asked.namespace)
        for hashes, tokens in asked.prompts:
            task = routing_task(asked.namespace, fields, hashes, tokens, key)
            yield prompt_batches.encode_route(
                routed(self._service.queries, task, fields, asked.namespace, caller, asked.limit)
            )

    def _fields(self, caller: Caller, namespace: Namespace | NamespaceId) -> Namespace | None:
        """The fields of the namespace that is asked for: as they are given, or as an instance has told them to this
        caller's tenants.
        """
        return namespace if isinstance(namespace, Namespace) else self._visible.fields(caller, namespace)

    def _secret_of(self, caller: Caller, namespace: Namespace) -> str | None:
        """A tenant's secret; None: it is not known."""
        if caller.sees_all or namespace.tenant in (caller.tenants or ()):
            return self._service.secrets.get(namespace.tenant, None if namespace.tenant else "")
        return _NO_SECRET  # hashed as others are, and found nowhere: whose secrets are known here is not told


def _timed(parts: Iterator[bytes], observed: Histogram, span: TraceSpan | None) -> Iterator[bytes]:
    """The parts, and word of the time that making them has taken altogether."""
    took_s = 0.0
    try:
        while True:
            begin_s = time.perf_counter()
            part = next(parts, None)
            took_s += time.perf_counter() - begin_s
            if part is None:
                observed.observe(took_s)
                return
            yield part
    finally:  # also where whoever asked has gone
        if span is not None:
            span.end({"index_s": round(took_s, 6)})


def _only(asked: LookupRequest) -> list[InstanceId] | None:
    return [InstanceId(name) for name in asked.instances] if asked.instances is not None else None
