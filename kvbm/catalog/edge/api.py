"""The catalog over HTTP: requests parsed, checked and answered; OpenAPI from the same structs.

Bodies are read and written by msgspec, because checking 250 hashes must cost microseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvbm.core.errors import CatalogError, MissingExtraError, StreamError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError:
    raise MissingExtraError("the catalog's web library (starlette)", "catalog") from None

from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.judge import PASSED, allowed
from kvbm.catalog.access.limits import BODY_WAIT_S, LARGE_BODY_BYTES, MAX_BODY_BYTES, Limited, Limits, MeteredExchange
from kvbm.catalog.answers.prompts import HEX_DIGITS, ApiError, asked_namespace, bad_hash, without_prompt
from kvbm.catalog.edge.checkpoint_response import CONTENT_TYPE as CHECKPOINT
from kvbm.catalog.edge.checkpoint_response import CheckpointResponse
from kvbm.catalog.edge.fast_path import BINARY_TYPE, FastPath
from kvbm.catalog.edge.feed_response import CONTENT_TYPE as EVENTS
from kvbm.catalog.edge.feed_response import FeedResponse
from kvbm.catalog.edge.gate import CALLER, CALLER_NOW, FORBIDDEN, UNKNOWN, Gate, content_type
from kvbm.catalog.edge.metrics import ROWS
from kvbm.catalog.edge.prompt_answers import NOT_TOLD, PromptAnswers
from kvbm.catalog.edge.usage_requests import usage_wanted
from kvbm.catalog.edge.watch_requests import decode_watch
from kvbm.catalog.follow.follower import FIRST, not_reached
from kvbm.catalog.follow.forgetting import NotForgottenError
from kvbm.catalog.service import CatalogService
from kvbm.core.answers import (
    MAX_HASHES,
    MAX_INSTANCES,
    MAX_POSITIONS,
    MAX_WAIT_S,
    BlockAnswer,
    ErrorAnswer,
    ErrorDetail,
    FindAnswer,
    FindRequest,
    ForgottenAnswer,
    InstancesAnswer,
    LookupAnswer,
    LookupRequest,
    NamespacesAnswer,
    PresenceAnswer,
    PresenceRequest,
    ReadyAnswer,
    ReadyWord,
    RouteAnswer,
    RouteRequest,
    SnapshotAnswer,
    UsageAnswer,
)
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, SequenceHash
from kvbm.core.prompt_batches import CONTENT_TYPE as BATCHES
from kvbm.core.usage import time_text
from kvbm.core.watch_events import WatchRequest
from kvbm.streams.base import Position
from kvbm.telemetry.metrics import CONTENT_TYPE, CatalogMetrics

THREAD_TOKENS = 16_384  # hashing more than this would keep other requests waiting
_REFUSALS = {"unknown": "unknown_caller", "forbidden": "not_allowed"}  # as metrics count them
R = TypeVar("R", bound=LookupRequest)


class Surface(NamedTuple):
    """What callers can ask of a service: an ASGI application for all of it, and what answers short questions without
    it, in limits.
    """

    app: Starlette
    at_once: FastPath
    limits: Limits


def create_surface(
    service: CatalogService,
    version: str = "",
    access: Access | None = None,
    troubles: Callable[[], str] = str,
    refusals: Counter[str] | None = None,
) -> Surface:
    """The HTTP side of a running service.

    Args:
        access: tells who asks; None takes everybody for the embedded operator.
        troubles: more that does not work, for readiness; "" for nothing.
        refusals: what was refused, by kind, for metrics; counted here too.
    """
    limits = Limits(service.settings.limits, refusals=refusals)
    access = access or Access()
    metrics = CatalogMetrics(ROWS, service, limits.refusals)
    answers = PromptAnswers(service, metrics)
    api = _Api(service, version, troubles, limits.refusals, metrics, answers)
    app = Starlette(
        routes=[route.served_by(api) for route in _ROUTES],
        middleware=[
            Middleware(Gate, access=access, count=api.count_request, within=lambda judged: Limited(judged, limits))
        ],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    app.router.redirect_slashes = False  # a redirect would name the host that the caller has written, and http
    return Surface(app, FastPath(access, limits, answers, api.count_request), limits)


class _Api:
    """The handlers, one for each path of `_ROUTES`."""

    def __init__(
        self,
        service: CatalogService,
        version: str,
        troubles: Callable[[], str],
        refusals: Counter[str],
        metrics: CatalogMetrics,
        answers: PromptAnswers,
    ) -> None:
        self._service, self._version, self._troubles = service, version, troubles
        self._visible = service.queries.visibility
        self._metrics, self._refusals = metrics, refusals
        self._answers = answers
        self._openapi = msgspec.json.encode(openapi(version))

    def count_request(self, caller: str, outcome: str) -> None:
        """See `Gate`."""
        self._metrics.count_request(caller, outcome)
        if (refusal := _REFUSALS.get(outcome)) is not None:
            self._refusals[refusal] += 1

    async def lookup(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, LookupRequest)
        asked, namespace, hashes = await self._prompt(request, LookupRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, namespace, hashes))

    async def presence(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, PresenceRequest)
        asked, namespace, hashes = await self._prompt(request, PresenceRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, namespace, hashes))

    async def find(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, FindRequest)
        asked, namespace, hashes = await self._prompt(request, FindRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, namespace, hashes))

    async def route(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, RouteRequest)
        asked, namespace, hashes = await self._prompt(request, RouteRequest)
        return _encoded(self._answers.route(_caller(request), _exchange(request).key, asked, namespace, hashes))

    async def watch(self, request: Request) -> Response:
        body = await _body(request)
        asked = decode_watch(body)
        exchange = _exchange(request)
        body.clear()
        self._judge_again(request)

        def caller_now() -> Caller | None:
            caller, outcome = _judged_now(request)
            return caller if outcome == PASSED else None

        return FeedResponse(self._service.watches.open(exchange.key, asked, _caller(request), caller_now))

    async def checkpoint(self, request: Request) -> Response:
        if not _caller(request).sees_all:  # it has all tenants' blocks
            raise ApiError(
                403, "not_allowed", "the caller may not see all tenants", "ask with the token of an operator"
            )
        checkpointer = self._service.checkpointer
        found = None if checkpointer is None else await asyncio.to_thread(checkpointer.newest)
        if found is None:
            raise ApiError(
                404,
                "no_checkpoint",
                "this catalog has written no checkpoint yet",
                "begin at the stream's first message",
            )
        return CheckpointResponse(found)

    async def block(self, request: Request) -> Response:
        namespace = _one_hash("namespace", request.path_params["namespace"])
        block = _one_hash("hash", request.path_params["hash"])
        self._answers.check_ready(_caller(request))
        return _json(self._service.queries.block(NamespaceId(namespace), SequenceHash(block), _caller(request)))

    async def instances(self, request: Request) -> Response:
        asked = request.query_params
        unknown = set(asked.keys()) - {"after", "limit", "name"}
        names, text = asked.getlist("name"), asked.get("limit", str(MAX_INSTANCES))
        if unknown or len(names) > MAX_POSITIONS or not _is_count(text, MAX_INSTANCES):
            raise ApiError(
                422,
                "bad_page",
                f"{request.url.query[:200]!r} is no page of instances",
                f"give limit=1 to {MAX_INSTANCES}, after=NAME, and name=NAME at most {MAX_POSITIONS} times",
            )
        return _json(self._service.queries.instance_page(_caller(request), asked.get("after", ""), int(text), names))

    async def ask_snapshot(self, request: Request) -> Response:
        instance = InstanceId(request.path_params["instance"])
        try:
            heard = await self._service.requests.ask(instance)
        except StreamError as error:
            raise ApiError(503, "not_asked", str(error), "ask again when the stream is back; /readyz says so") from None
        if heard is None:
            raise ApiError(
                404,
                "instance_unknown",
                f"no instance {instance!r} was ever heard of",
                "see /v1/instances for their names",
            )
        return _json(SnapshotAnswer(instance=instance, heard=heard))

    async def forget(self, request: Request) -> Response:
        instance = InstanceId(request.path_params["instance"])
        try:
            await self._service.forgetting.forget(instance)
        except NotForgottenError as error:
            message, _, remedy = str(error).partition("; ")
            status = {"instance_unknown": 404, "instance_alive": 409}.get(error.code, 503)
            raise ApiError(status, error.code, message, remedy) from None
        except CatalogError as error:
            raise ApiError(503, "not_forgotten", str(error), "ask again when the database is back") from None
        return _json(ForgottenAnswer(instance=instance))

    async def namespaces(self, request: Request) -> Response:
        asked = request.query_params
        after, text = asked.get("after", ""), asked.get("limit", str(MAX_INSTANCES))
        if set(asked.keys()) - {"after", "limit"} or not _is_count(text, MAX_INSTANCES):
            raise ApiError(
                422,
                "bad_page",
                f"{request.url.query[:200]!r} is no page of namespaces",
                f"give limit=1 to {MAX_INSTANCES} and after=ID",
            )
        return _json(
            self._service.queries.namespace_page(
                _caller(request), _one_hash("after", after) if after else b"", int(text)
            )
        )

    async def usage(self, request: Request) -> Response:
        caller, asked = _caller(request), request.query_params
        wanted = usage_wanted(caller, asked)
        try:
            page = await self._service.store.usage(wanted)
            has_gaps = caller.sees_all and wanted.tenants is None and "next" not in asked
            gaps = await self._service.store.usage_gaps(wanted) if has_gaps else []
        except CatalogError as error:
            raise ApiError(503, "no_usage", str(error), "ask again when the database is back") from None
        going_on = "" if page.next_ms is None else time_text(page.next_ms)
        return _json(UsageAnswer(hours=page.hours, gaps=gaps, next=going_on))

    async def status(self, request: Request) -> Response:
        ready = self._readiness(_caller(request))
        return _json(
            {
                "service": "kvbm-catalog",
                "version": self._version,
                "ready": ready.ready,
                "reason": ready.reason,
                **({"degraded": ready.degraded} if isinstance(ready, ReadyAnswer) else {}),
                "instances": self._service.queries.instance_count(),
                "api": "/openapi.json",
            }
        )

    async def healthz(self, request: Request) -> Response:
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        answer = self._readiness(request.scope[CALLER])
        return _json(answer, 200 if answer.ready else 503)

    def _readiness(self, caller: Caller | None) -> ReadyAnswer | ReadyWord:
        answer, more = self._service.readiness(), self._troubles()
        if caller is None or not caller.sees_all:  # names and offsets are not for everybody
            reason = "" if answer.ready else NOT_TOLD
            return ReadyWord(ready=answer.ready, reason=reason, parts="" if caller is None else answer.parts)
        degraded = "; ".join(one for one in (answer.degraded, more) if one)
        return msgspec.structs.replace(answer, degraded=degraded) if more else answer

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _prompt(self, request: Request, kind: type[R]) -> tuple[R, Namespace | NamespaceId, bytes]:
        """The request, its namespace and the packed hashes of its prompt, once the index has seen what it must have."""
        caller = _caller(request)
        body = await _body(request)
        exchange = _exchange(request)
        _check_one_type(request)
        async with exchange.parsing(len(body)):
            if len(body) > LARGE_BODY_BYTES:
                asked = await asyncio.to_thread(self._answers.decoded, body, kind)
            else:
                asked = self._answers.decoded(body, kind)
            del body, exchange.body  # a wait holds nothing large
            self._answers.check_ready(caller)
            if asked.tokens is not None and len(asked.tokens) > THREAD_TOKENS:
                hashes = await asyncio.to_thread(self._answers.hashing(caller, asked))
            else:
                hashes = self._answers.hashing(caller, asked)()
            asked = without_prompt(asked)
        if asked.at_least:
            exchange.hold(len(hashes))  # of tokens, hashes may be larger than the body
            with exchange.waiting():
                await self._wait(caller, asked)
        self._judge_again(request)
        return asked, asked_namespace(asked), hashes

    async def _batch(self, request: Request, kind: type[LookupRequest]) -> Response:
        """Several prompts in the binary form."""
        exchange, body = _exchange(request), await _body(request)
        async with exchange.parsing(len(body)):
            self._judge_again(request)
            batch = self._answers.begin_batch(_caller(request), exchange.key, kind, body)
        exchange.counts_as(batch.cost)
        return Response(await exchange.in_steps(batch.parts), media_type=BATCHES)

    def _judge_again(self, request: Request) -> None:
        """Know the caller as it is by now: reading a body and waiting take seconds, and its token may be gone, or its
        role another.
        """
        caller, outcome = _judged_now(request)
        if outcome != PASSED:
            status, refusal = (401, UNKNOWN.error) if outcome == "unknown" else (403, FORBIDDEN.error)
            self._refusals[_REFUSALS[outcome]] += 1
            raise ApiError(status, refusal.code, refusal.message, refusal.what_to_do)
        request.scope[CALLER] = caller

    async def _wait(self, caller: Caller, asked: LookupRequest) -> None:
        deadline_s = time.monotonic() + min(asked.timeout_s, MAX_WAIT_S)
        for wanted in asked.at_least:
            position = max(Position(Epoch(wanted.epoch), Offset(wanted.offset)), FIRST)
            instance = InstanceId(wanted.instance)
            known = self._visible.waited_for(caller, instance)
            reached = await self._service.follower.wait_for(known, position, max(0.0, deadline_s - time.monotonic()))
            if reached < position:
                raise ApiError(
                    504,
                    "position_not_reached",
                    not_reached(instance, position, reached if caller.sees_all else None),
                    f"ask again, wait longer (timeout_s up to {MAX_WAIT_S:g}), or leave at_least out",
                )


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def _is_binary(request: Request) -> bool:
    return content_type(request.scope["headers"]) == BINARY_TYPE


def _check_one_type(request: Request) -> None:
    """Refuse what says twice what its body is; the body is read by then, so that the connection goes on.

    Raises ApiError.
    """
    if content_type(request.scope["headers"]) is None:
        raise ApiError(400, "two_content_types", "the request has more than one Content-Type header", "send one")


async def _body(request: Request) -> bytearray:
    """The body, no more than MAX_BODY_BYTES of it."""
    exchange = _exchange(request)
    body = exchange.body = bytearray()
    if exchange.length > MAX_BODY_BYTES:
        raise _too_large()
    await exchange.reserve()
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                await exchange.pace()
    except TimeoutError:
        raise ApiError(408, "body_too_slow", f"the body did not come within {BODY_WAIT_S:g} s", "try again") from None
    except ClientDisconnect:
        raise ApiError(400, "body_cut_short", "the connection ended before the body did", "try again") from None
    return body


def _too_large() -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        f"the body has more than {MAX_BODY_BYTES} bytes",
        f"give at most {MAX_HASHES} hashes, best as one hex string",
    )


def _judged_now(request: Request) -> tuple[Caller | None, str]:
    """Who asks as of now, and whether it may: None is nobody who is known."""
    caller: Caller | None = request.scope[CALLER_NOW]()
    return caller, allowed(caller, request.scope["path"])


def _exchange(request: Request) -> MeteredExchange:
    exchange: MeteredExchange = request.scope["kvbm.exchange"]
    return exchange


def _is_count(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most


def _one_hash(what: str, text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != HASH_BYTES or len(text) != HEX_DIGITS:
        raise bad_hash(f"{what} {text[:80]!r} is not {HEX_DIGITS} hex digits")
    return value


def _json(answer: object, status: int = 200) -> Response:
    return _encoded(msgspec.json.encode(answer), status)


def _encoded(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.refused:
        _exchange(request).refused(error.refused)
    return _json(error.answer, error.status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    detail = ErrorDetail(code=code, message=message, what_to_do="see /openapi.json for the paths")
    answer = _json(ErrorAnswer(error=detail), error.status_code)
    answer.headers.update(error.headers or {})  # such as `allow`
    return answer


async def _on_bug(request: Request, error: Exception) -> Response:
    """Any error no handler foresaw; the server logs it with its traceback."""
    detail = ErrorDetail(
        code="internal", message=f"{type(error).__name__} in {request.url.path}", what_to_do="report it with the log"
    )
    return _json(ErrorAnswer(error=detail), 500)


# -- OpenAPI ----------------------------------------------------------------------------------------------------------


class _Route(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    handler: str
    summary: str
    method: str = "GET"
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    examples: dict[str, Any] = {}
    asks: dict[str, Any] = {}  # in the query

    @property
    def methods(self) -> list[str]:
        """Those it answers; HEAD, with which some look whether a server is there, but for what is long."""
        return ["GET", "HEAD"] if self.method == "GET" and self.media_type != CHECKPOINT else [self.method]

    def served_by(self, api: _Api) -> Route:
        """The route of the web library, which leads to the handler."""
        served = Route(self.path, getattr(api, self.handler), name=self.handler)
        served.methods = set(self.methods)  # by itself it answers HEAD wherever it answers GET
        return served


_EXAMPLE_ID = "5e0c2d6f9b1a4c3d8e7f60514233a1b2"
_EXAMPLE_HASHES = ["00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"]
_EXAMPLE_LOOKUP = {"namespace": _EXAMPLE_ID, "hashes": _EXAMPLE_HASHES}
_EXAMPLE_FIELDS = {"namespace": {"model": "tiny", "block_tokens": 16}, "tokens": [1, 2, 3, 4] * 8}
_EXAMPLE_WAIT = _EXAMPLE_LOOKUP | {
    "at_least": [{"instance": "instance-0", "epoch": 3, "offset": 1200}],
    "timeout_s": 0.5,
}

_ROUTES = (
    _Route(
        path="/v1/lookup",
        handler="lookup",
        method="POST",
        takes=LookupRequest,
        gives=LookupAnswer,
        summary="Who has how much of a prefix?",
        errors=(400, 408, 413, 422, 503, 504),
        examples={
            "hashes": {"value": _EXAMPLE_LOOKUP},
            "tokens": {"summary": "a namespace whose secret the catalog knows", "value": _EXAMPLE_FIELDS},
            "read your writes": {"value": _EXAMPLE_WAIT},
        },
    ),
    _Route(
        path="/v1/route",
        handler="route",
        method="POST",
        takes=RouteRequest,
        gives=RouteAnswer,
        summary="Which instance should serve this prompt, and why?",
        errors=(400, 408, 413, 422, 503, 504),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP | {"input_tokens": 40}}},
    ),
    _Route(
        path="/v1/presence",
        handler="presence",
        method="POST",
        takes=PresenceRequest,
        gives=PresenceAnswer,
        summary="Which of these blocks are held, and by whom? There may be holes.",
        errors=(400, 408, 413, 422, 503, 504),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP}},
    ),
    _Route(
        path="/v1/find",
        handler="find",
        method="POST",
        takes=FindRequest,
        gives=FindAnswer,
        summary="What of these blocks can be read from pools, and from which live instances?",
        errors=(400, 408, 413, 422, 503, 504),
        examples={
            "hashes": {
                "value": _EXAMPLE_LOOKUP | {"first": 1, "asker": "instance-0", "topology": ["zone-a", "host-17"]}
            }
        },
    ),
    _Route(
        path="/v1/watch",
        handler="watch",
        method="POST",
        takes=WatchRequest,
        media_type=EVENTS,
        summary="A feed of changes of a namespace, an instance or a prefix, as server-sent events.",
        errors=(400, 408, 413, 422, 503),
        examples={
            "namespace": {"value": {"namespace": _EXAMPLE_ID}},
            "instance": {"value": {"instance": "instance-0", "after": None}},
            "prefix": {"value": _EXAMPLE_LOOKUP},
        },
    ),
    _Route(
        path="/v1/blocks/{namespace}/{hash}",
        handler="block",
        gives=BlockAnswer,
        summary="Who holds a block?",
        errors=(422, 503),
    ),
    _Route(
        path="/v1/instances",
        handler="instances",
        gives=InstancesAnswer,
        summary="Instances, by name: at most `limit` of them (1 to 1,000), behind `after`, or those of a `name`.",
        errors=(422,),
        asks={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_INSTANCES, "default": MAX_INSTANCES},
            "name": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_POSITIONS},
        },
    ),
    _Route(
        path="/v1/instances/{instance}/snapshot",
        handler="ask_snapshot",
        method="POST",
        gives=SnapshotAnswer,
        summary="Ask an instance to take a snapshot of what it holds.",
        errors=(404, 503),
    ),
    _Route(
        path="/v1/instances/{instance}",
        handler="forget",
        method="DELETE",
        gives=ForgottenAnswer,
        summary="Forget an instance that is gone. For operators.",
        errors=(403, 404, 409, 503),
    ),
    _Route(
        path="/v1/checkpoint",
        handler="checkpoint",
        media_type=CHECKPOINT,
        errors=(404, 429),
        summary="The newest checkpoint of the index, for a replica to begin with. For callers of all tenants.",
    ),
    _Route(
        path="/v1/namespaces",
        handler="namespaces",
        gives=NamespacesAnswer,
        errors=(422,),
        summary="Namespaces with known fields, by id: at most `limit` of them (1 to 1,000) and some MiB, behind "
        "`after`.",
        asks={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_INSTANCES, "default": MAX_INSTANCES},
        },
    ),
    _Route(
        path="/v1/usage",
        handler="usage",
        gives=UsageAnswer,
        errors=(422, 503),
        summary="What tenants have used, by clock hour: those that begin from `from` to before `to`, by default of 31 "
        "days until now. Where the answer has `next`, ask again with it.",
        asks={
            "from": {"type": "string"},
            "to": {"type": "string"},
            "tenant": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_POSITIONS},
            "next": {"type": "string"},
        },
    ),
    _Route(path="/healthz", handler="healthz", summary="Whether the process answers.", media_type="text/plain"),
    _Route(
        path="/readyz", handler="readyz", gives=ReadyAnswer, summary="Whether answers are complete; 503 until then."
    ),
    _Route(path="/metrics", handler="metrics", summary="Prometheus metrics.", media_type="text/plain"),
    _Route(path="/openapi.json", handler="openapi", summary="This description."),
    _Route(path="/", handler="status", summary="What this is."),
)

_ERROR_WORDS = {
    400: "The body is not JSON.",
    401: "The catalog does not know who asks.",
    403: "The caller's role may not ask this.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "The instance is alive.",
    413: "The body is too large.",
    422: "The request makes no sense; the error says why.",
    429: "The caller asks too much; `retry-after` says when to ask again.",
    503: "Not ready, nobody to route to, or the stream is away.",
    504: "`at_least` was not reached in time.",
}


def openapi(version: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 description of the service."""
    structs = [ErrorAnswer]
    for route in _ROUTES:
        structs += [struct for struct in (route.takes, route.gives) if struct is not None]  # type: ignore[misc]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvbm catalog",
            "version": version or "0",
            "description": "Where the cluster's KV-cache blocks lie.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: _Route) -> dict[str, Any]:
    schema = _reference(route.gives) if route.gives is not None else {}
    responses: dict[str, Any] = {
        "200": {"description": "The answer.", "content": {route.media_type: {"schema": schema}}}
    }
    if route.handler == "readyz":
        responses["503"] = responses["200"] | {"description": "Not ready; `reason` says why."}
    asks_who = () if route.handler in ("healthz", "readyz") else (401, 403)
    for status in (*asks_who, *route.errors):
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        responses[str(status)] = {"description": _ERROR_WORDS[status], "content": content}
    operation: dict[str, Any] = {"operationId": route.handler, "summary": route.summary, "responses": responses}
    content = {"application/json": {"schema": _reference(ErrorAnswer)}}
    responses["429"] = {"description": _ERROR_WORDS[429], "content": content}
    if route.takes is not None:
        content = {"application/json": {"schema": _reference(route.takes), "examples": route.examples}}
        operation["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    kinds = {"instance": {"type": "string"}}
    pattern = {"type": "string", "pattern": f"^[0-9a-fA-F]{{{HEX_DIGITS}}}$"}
    parameters = [{"name": name, "in": "path", "required": True, "schema": kinds.get(name, pattern)} for name in names]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": kind} for name, kind in route.asks.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
