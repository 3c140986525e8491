"""The catalog over HTTP: requests parsed, checked and answered; OpenAPI from the same structs.

Bodies are read and written by msgspec, because checking 250 hashes must cost microseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from kvbm.core.errors import CatalogError, MissingExtraError, StreamError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
except ImportError:
    raise MissingExtraError("the catalog's web library (starlette)", "catalog") from None

from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.hosts import Hosts
from kvbm.catalog.access.judge import PASSED, allowed
from kvbm.catalog.access.limits import BODY_WAIT_S, LARGE_BODY_BYTES, MAX_BODY_BYTES, Limited, Limits, MeteredExchange
from kvbm.catalog.answers.prompts import HEX_DIGITS, ApiError, bad_hash, without_prompt
from kvbm.catalog.answers.token_prompts import PromptBlocks
from kvbm.catalog.edge.checkpoint_response import CheckpointResponse
from kvbm.catalog.edge.fast_path import BINARY_TYPE, FastPath
from kvbm.catalog.edge.feed_response import FeedResponse
from kvbm.catalog.edge.gate import CALLER, CALLER_NOW, FORBIDDEN, UNKNOWN, CountedAnswers, Gate, KnownHost, content_type
from kvbm.catalog.edge.history import HistoryHandlers
from kvbm.catalog.edge.instance_detail import instance_detail
from kvbm.catalog.edge.metrics import ROWS
from kvbm.catalog.edge.overview import Overview
from kvbm.catalog.edge.page import HEADERS, ToPage, page_files
from kvbm.catalog.edge.prompt_answers import NOT_TOLD, PromptAnswers
from kvbm.catalog.edge.routes import ROUTES, openapi
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
    ErrorAnswer,
    ErrorDetail,
    FindRequest,
    ForgottenAnswer,
    HistoryPromptRequest,
    HistoryRouteRequest,
    LookupRequest,
    PresenceRequest,
    ReadyAnswer,
    ReadyWord,
    RouteRequest,
    SnapshotAnswer,
    UsageAnswer,
)
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, SequenceHash
from kvbm.core.prompt_batches import CONTENT_TYPE as BATCHES
from kvbm.core.usage import time_text
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
    hosts: Hosts | None = None,
) -> Surface:
    """The HTTP side of a running service.

    Args:
        access: tells who asks; None takes everybody for the embedded operator.
        troubles: more that does not work, for readiness; "" for nothing.
        refusals: what was refused, by kind, for metrics; counted here too.
        hosts: that requests may name; None: every one.
    """
    hosts = hosts or Hosts()
    limits = Limits(service.settings.limits, refusals=refusals)
    access = access or Access()
    metrics = CatalogMetrics(ROWS, service, limits.refusals, version)
    answers = PromptAnswers(service, metrics)
    api = _Api(service, version, troubles, limits.refusals, metrics, answers)
    app = Starlette(
        routes=[route.served_by(api) for route in ROUTES],
        middleware=[
            Middleware(ToPage),
            Middleware(CountedAnswers, answers=metrics.answers),
            Middleware(KnownHost, hosts=hosts, limited_log=limits.limited_log),
            Middleware(Gate, access=access, count=api.count_request, within=lambda judged: Limited(judged, limits)),
        ],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    app.router.redirect_slashes = False  # a redirect would name the host that the caller has written, and http
    return Surface(
        app,
        FastPath(
            access, limits, answers, api.count_request, metrics.answers, hosts, service.backend.read_plain_question
        ),
        limits,
    )


class _Api(HistoryHandlers):
    """The handlers, one for each path of `ROUTES`."""

    def __init__(
        self,
        service: CatalogService,
        version: str,
        troubles: Callable[[], str],
        refusals: Counter[str],
        metrics: CatalogMetrics,
        answers: PromptAnswers,
    ) -> None:
        super().__init__(service.past)
        self._service, self._version, self._troubles = service, version, troubles
        self._visible = service.queries.visibility
        self._metrics, self._refusals = metrics, refusals
        self._answers = answers
        self._openapi = msgspec.json.encode(openapi(version))
        self._overview, self._files = Overview(service, version, troubles), page_files()

    def count_request(self, caller: str, outcome: str) -> None:
        """See `Gate`."""
        self._metrics.count_request(caller, outcome)
        if (refusal := _REFUSALS.get(outcome)) is not None:
            self._refusals[refusal] += 1

    async def lookup(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, LookupRequest)
        asked, prompt = await self._prompt(request, LookupRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, prompt, _trace(request)))

    async def presence(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, PresenceRequest)
        asked, prompt = await self._prompt(request, PresenceRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, prompt, _trace(request)))

    async def find(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, FindRequest)
        asked, prompt = await self._prompt(request, FindRequest)
        return _encoded(self._answers.lookup(_caller(request), asked, prompt, _trace(request)))

    async def route(self, request: Request) -> Response:
        if _is_binary(request):
            return await self._batch(request, RouteRequest)
        asked, prompt = await self._prompt(request, RouteRequest)
        key = _exchange(request).key
        return _encoded(self._answers.route(_caller(request), key, asked, prompt, _trace(request)))

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

    async def overview(self, request: Request) -> Response:
        return _encoded(await self._overview.answer(_caller(request)))

    async def overview_feed(self, request: Request) -> Response:
        def caller_now() -> Caller | None:
            caller, outcome = _judged_now(request)
            return caller if outcome == PASSED else None

        return FeedResponse(self._overview.open(_exchange(request).key, caller_now))

    async def instance_detail(self, request: Request) -> Response:
        return _json(instance_detail(self._service, InstanceId(request.path_params["instance"])))

    async def to_page(self, request: Request) -> Response:
        return Response(status_code=307, headers={"location": "ui/", "vary": "accept"})

    async def page(self, request: Request) -> Response:
        found = self._files.get(request.path_params["file"])
        if found is None:
            raise HTTPException(404, "the page has no such file")
        headers = {**HEADERS, "etag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)

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

    async def history_sql(self, request: Request) -> Response:
        body = await _body(request)
        self._judge_again(request)
        return await self.history_of(request, body)

    async def history_prompt(self, request: Request) -> Response:
        return self.prompt_of(*await self._prompt(request, HistoryPromptRequest))

    async def history_route(self, request: Request) -> Response:
        asked, prompt = await self._prompt(request, HistoryRouteRequest)
        return _json(await self.route_of(asked, prompt, self._service.settings.routing))

    async def usage(self, request: Request) -> Response:
        caller, asked = _caller(request), request.query_params
        wanted = usage_wanted(caller, asked)
        try:
            page = await self._service.store.usage(wanted)
            has_gaps = caller.sees_all and "next" not in asked
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

    async def _prompt(self, request: Request, kind: type[R]) -> tuple[R, PromptBlocks]:
        """The request, and its prompt as the index is asked for it, once that has seen what it must have."""
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
                prompt = await asyncio.to_thread(self._answers.hashing(caller, asked))
            else:
                prompt = self._answers.hashing(caller, asked)()
            asked = without_prompt(asked)
        if asked.at_least:
            exchange.hold(
                len(prompt.hashes) + sum(len(one.hashes) for one in prompt.groups)
            )  # of tokens, hashes may be larger than the body
            with exchange.waiting():
                await self._wait(caller, asked)
        self._judge_again(request)
        return asked, prompt

    async def _batch(self, request: Request, kind: type[LookupRequest]) -> Response:
        """Several prompts in the binary form."""
        exchange, body = _exchange(request), await _body(request)
        async with exchange.parsing(len(body)):
            self._judge_again(request)
            batch = self._answers.begin_batch(_caller(request), exchange.key, kind, body, _trace(request))
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


def _trace(request: Request) -> str:
    """Its `traceparent`; "" for none."""
    return str(request.headers.get("traceparent", ""))


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
    answer = _json(error.answer, error.status)
    if error.status == 429:
        answer.headers["retry-after"] = "1"
    return answer


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
