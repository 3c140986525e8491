"""The catalog over HTTP: requests parsed, checked and answered; OpenAPI from the same structs.

Bodies are read and written by msgspec, because checking 250 hashes must cost microseconds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvbm.core.errors import CatalogError, HashSchemeError, LayoutError, MissingExtraError, StreamError

try:
    from fastapi import FastAPI
    from fastapi.responses import Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
except ImportError:
    raise MissingExtraError("the catalog's web library (fastapi, uvicorn)", "catalog") from None

from kvbm.catalog.access import Access, Caller
from kvbm.catalog.forgetting import NotForgottenError
from kvbm.catalog.gate import CALLER, Gate
from kvbm.catalog.limits import LARGE_BODY_BYTES, MAX_BODY_BYTES, Exchange, Limited, Limits
from kvbm.catalog.long_requests import decode_request
from kvbm.catalog.routing import RoutingTask
from kvbm.catalog.service import CatalogService
from kvbm.core.answers import (
    MAX_HASHES,
    MAX_TOKENS,
    MAX_WAIT_S,
    BlockAnswer,
    ErrorAnswer,
    ErrorDetail,
    ForgottenAnswer,
    InstancesAnswer,
    LookupAnswer,
    LookupRequest,
    NamespacesAnswer,
    ReadyAnswer,
    RouteAnswer,
    RouteRequest,
    SnapshotAnswer,
)
from kvbm.core.hashing import check_hashable
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, SequenceHash
from kvbm.streams.base import Position
from kvbm.telemetry.metrics import CONTENT_TYPE, CatalogMetrics

BODY_WAIT_S = 10.0
THREAD_TOKENS = 16_384  # hashing more than this would keep other requests waiting
_HEX_DIGITS = 2 * HASH_BYTES
_TOKEN_IDS = "give token ids from 0 to 4294967295"
_WHOLE_REQUEST = "see /openapi.json for the fields of the request"
_NO_SECRET = secrets.token_hex(16)  # of no tenant
R = TypeVar("R", bound=LookupRequest)


class ApiError(Exception):
    """A request that fails: its HTTP status and what its body says."""

    def __init__(self, status: int, code: str, message: str, what_to_do: str) -> None:
        super().__init__(message)
        self.status = status
        self.answer = ErrorAnswer(error=ErrorDetail(code=code, message=message, what_to_do=what_to_do))


def create_app(
    service: CatalogService,
    version: str = "",
    access: Access | None = None,
    troubles: Callable[[], str] = str,
    refusals: Counter[str] | None = None,
) -> FastAPI:
    """The HTTP side of a running service.

    Args:
        access: tells who asks; None takes everybody for the embedded operator.
        troubles: more that does not work, for readiness; "" for nothing.
        refusals: what was refused, by kind, for metrics; counted here too.
    """
    limits = Limits(service.settings.limits, refusals=refusals)
    app = FastAPI(
        title="kvbm catalog", version=version or "0", docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,  # a redirect would name the host that the caller has written, and http
    )  # fmt: skip
    api = _Api(service, version, troubles, limits.refusals)
    for route in _ROUTES:
        app.add_api_route(
            route.path, getattr(api, route.handler), methods=[route.method], response_class=Response, name=route.handler
        )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(
        Gate,
        access=access or Access(),
        count=api.count_request,
        within=lambda judged: Limited(judged, limits),
    )
    return app


class _Api:
    """The handlers, one for each path of `_ROUTES`."""

    def __init__(
        self, service: CatalogService, version: str, troubles: Callable[[], str], refusals: Counter[str]
    ) -> None:
        self._service, self._version, self._troubles = service, version, troubles
        self._visible = service.queries.visibility
        self._metrics, self._refusals = CatalogMetrics(service.numbers, refusals), refusals
        self._openapi = msgspec.json.encode(openapi(version))

    def count_request(self, caller: str, outcome: str) -> None:
        """See `Gate`."""
        self._metrics.count_request(caller, outcome)
        if (refused := {"unknown": "unknown_caller", "forbidden": "not_allowed"}.get(outcome)) is not None:
            self._refusals[refused] += 1

    async def lookup(self, request: Request) -> Response:
        _, namespace, hashes = await self._prompt(request, LookupRequest)
        begin_s = time.perf_counter()
        answer = self._service.queries.lookup(namespace, hashes, _caller(request))
        response = _json(answer)
        self._metrics.lookup_s.observe(time.perf_counter() - begin_s)
        return response

    async def route(self, request: Request) -> Response:
        asked, namespace, hashes = await self._prompt(request, RouteRequest)
        begin_s = time.perf_counter()
        blocks, caller = len(hashes) // HASH_BYTES, _caller(request)
        fields = self._fields(caller, asked)
        input_tokens = asked.input_tokens
        if input_tokens is None:
            raise ApiError(
                422, "input_tokens_missing", "input_tokens is not given", "say how long the prompt is, in tokens"
            )
        block_tokens = fields.block_tokens if fields is not None else input_tokens // blocks if blocks else 1
        if blocks * block_tokens > input_tokens:
            raise ApiError(
                422, "too_many_hashes", f"{blocks} full blocks of {block_tokens} tokens are more than {input_tokens} tokens",
                "give the whole prompt's length as input_tokens, and hashes of full blocks only",
            )  # fmt: skip
        task = RoutingTask(
            _id_of(namespace), hashes, input_tokens, max(1, block_tokens), _exchange(request).key,
            asked.latency, asked.deadline_s, asked.phase,
        )  # fmt: skip
        ranked = self._service.queries.route(task, fields, namespace, caller)
        if not ranked:
            raise ApiError(
                503, "no_instance", "no live instance serves this namespace",
                "start an instance, or see /v1/instances for what is known of each",
            )  # fmt: skip
        response = _json(
            RouteAnswer(
                instance=ranked[0].instance,
                namespace=task.namespace.hex(),
                blocks=blocks,
                ranked=ranked,
                admitted=ranked[0].admitted,
                view_age_s=self._service.queries.view_age_s(),
            )
        )
        self._metrics.route_s.observe(time.perf_counter() - begin_s)
        return response

    async def block(self, request: Request) -> Response:
        namespace = _one_hash("namespace", request.path_params["namespace"])
        block = _one_hash("hash", request.path_params["hash"])
        self._check_ready()
        return _json(self._service.queries.block(NamespaceId(namespace), SequenceHash(block), _caller(request)))

    async def instances(self, request: Request) -> Response:
        return _json(InstancesAnswer(instances=self._service.queries.instances(_caller(request))))

    async def ask_snapshot(self, request: Request) -> Response:
        instance = InstanceId(request.path_params["instance"])
        try:
            heard = await self._service.requests.ask(instance)
        except StreamError as error:
            raise ApiError(503, "not_asked", str(error), "ask again when the stream is back; /readyz says so") from None
        if heard is None:
            raise ApiError(
                404, "instance_unknown", f"no instance {instance!r} was ever heard of", "see /v1/instances for their names"
            )  # fmt: skip
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
        return _json(NamespacesAnswer(namespaces=self._service.queries.namespaces(_caller(request))))

    async def status(self, request: Request) -> Response:
        ready = self._readiness()
        return _json(
            {
                "service": "kvbm-catalog", "version": self._version, "ready": ready.ready, "reason": ready.reason,
                "degraded": ready.degraded, "instances": self._service.queries.instance_count(), "api": "/openapi.json",
            }
        )  # fmt: skip

    async def healthz(self, request: Request) -> Response:
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        answer = self._readiness()
        caller: Caller | None = request.scope[CALLER]
        if caller is None or not caller.sees_all:  # names and offsets are not for everybody
            answer = ReadyAnswer(
                ready=answer.ready,
                reason="" if answer.ready else "not ready; ask with an operator's token for the reason",
                degraded="",
                stream_sequence=0,
                lag_messages=0,
            )
        return _json(answer, 200 if answer.ready else 503)

    def _readiness(self) -> ReadyAnswer:
        answer, more = self._service.readiness(), self._troubles()
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
        async with exchange.parsing(len(body)):
            try:
                if len(body) > LARGE_BODY_BYTES:
                    asked = await asyncio.to_thread(decode_request, body, kind)
                else:
                    asked = decode_request(body, kind)
            except (LayoutError, OverflowError) as error:
                raise ApiError(422, "bad_tokens", str(error), _TOKEN_IDS) from None
            except msgspec.ValidationError as error:
                raise ApiError(422, "invalid_request", str(error), _WHOLE_REQUEST) from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ApiError(400, "not_json", f"the body is not JSON: {error}", "send a JSON object") from None
            del body, exchange.body  # a wait holds nothing large
            self._check_ready()
            hashes = await self._hashes(caller, asked)
            if isinstance(asked, RouteRequest) and asked.tokens is not None:
                asked = msgspec.structs.replace(asked, input_tokens=len(asked.tokens))
            asked = msgspec.structs.replace(asked, hashes=None, tokens=None)
        if asked.at_least:
            exchange.hold(len(hashes))  # of tokens, hashes may be larger than the body
            with exchange.waiting():
                await self._wait(caller, asked)
        return asked, _asked_namespace(asked), hashes

    def _fields(self, caller: Caller, asked: LookupRequest) -> Namespace | None:
        """The fields of the namespace that is asked for: as they are given, or as an instance has told them to this caller's tenants."""
        namespace = _asked_namespace(asked)
        return namespace if isinstance(namespace, Namespace) else self._visible.fields(caller, namespace)

    def _check_ready(self) -> None:
        if not self._service.is_ready:
            raise ApiError(
                503, "not_ready", self._service.readiness().reason, "ask again soon; /readyz says when it is ready"
            )

    async def _hashes(self, caller: Caller, asked: LookupRequest) -> bytes:
        if (asked.hashes is None) == (asked.tokens is None):
            raise ApiError(
                422, "hashes_or_tokens", "give either hashes or tokens", "hashes need no secret: prefer them"
            )
        if asked.tokens is not None:
            return await self._hash_tokens(caller, asked, asked.tokens)
        given = asked.hashes or ""
        count = len(given) if isinstance(given, list) else len(given) // _HEX_DIGITS
        if count > MAX_HASHES:
            raise ApiError(422, "too_many_hashes", f"{count} hashes; at most {MAX_HASHES} are taken", "give fewer")
        if isinstance(given, list):
            wrong = next((at for at, text in enumerate(given) if len(text) != _HEX_DIGITS), None)
            if wrong is not None:
                raise _bad_hash(f"hashes[{wrong}] has {len(given[wrong])} characters, not {_HEX_DIGITS}")
            given = "".join(given)
        if len(given) % _HEX_DIGITS:
            raise _bad_hash(f"hashes has {len(given)} characters, which is no multiple of {_HEX_DIGITS}")
        try:
            hashes = bytes.fromhex(given)
        except ValueError:
            raise _bad_hash("hashes is not hexadecimal") from None
        if 2 * len(hashes) != len(given):  # fromhex skips blanks
            raise _bad_hash("hashes is not hexadecimal")
        return hashes

    async def _hash_tokens(self, caller: Caller, asked: LookupRequest, tokens: list[int]) -> bytes:
        if len(tokens) > MAX_TOKENS:
            raise ApiError(
                422, "too_many_tokens", f"{len(tokens)} tokens; at most {MAX_TOKENS} are taken", "give fewer"
            )
        fields = self._fields(caller, asked)
        if fields is None:
            raise ApiError(
                422, "namespace_unknown", f"no instance has told the fields of namespace {_id_of(_asked_namespace(asked)).hex()}",
                "give the namespace's fields instead of its id, or hashes instead of tokens",
            )  # fmt: skip
        try:
            check_hashable(fields)
        except HashSchemeError as error:
            message, _, remedy = str(error).partition("; ")
            raise ApiError(422, "scheme_not_hashable", message, remedy) from None
        if caller.sees_all or fields.tenant in (caller.tenants or ()):
            secret = self._service.secrets.get(fields.tenant, None if fields.tenant else "")
        else:
            secret = _NO_SECRET  # hashed as others are, and found nowhere: whose secrets are known here is not told
        if secret is None:
            raise ApiError(
                422, "tokens_not_hashable",
                f"tokens cannot be hashed here: the catalog does not know the secret of tenant {fields.tenant!r}",
                "hash them where the secret is and give hashes, or set catalog.tenant_secrets",
            )  # fmt: skip
        if fields.block_tokens > MAX_TOKENS:  # more than C++ may be able to say
            return b""
        arguments = (tokens, fields.block_tokens, fields.root(secret.encode()))
        try:
            if len(tokens) > THREAD_TOKENS:
                hashes = await asyncio.to_thread(self._service.backend.sequence_hashes, *arguments)
            else:
                hashes = self._service.backend.sequence_hashes(*arguments)
        except (LayoutError, OverflowError) as error:
            raise ApiError(422, "bad_tokens", str(error), _TOKEN_IDS) from None
        if len(hashes) > MAX_HASHES * HASH_BYTES:
            raise ApiError(
                422,
                "too_many_hashes",
                f"{len(hashes) // HASH_BYTES} blocks; at most {MAX_HASHES} are taken",
                "give fewer",
            )
        return hashes

    async def _wait(self, caller: Caller, asked: LookupRequest) -> None:
        deadline_s = time.monotonic() + min(asked.timeout_s, MAX_WAIT_S)
        for wanted in asked.at_least:
            position = Position(Epoch(wanted.epoch), Offset(wanted.offset))
            instance = InstanceId(wanted.instance)
            known = self._visible.waited_for(caller, instance)
            reached = await self._service.follower.wait_for(known, position, max(0.0, deadline_s - time.monotonic()))
            if reached < position:
                at = f"at offset {reached.offset} of epoch {reached.epoch} here, " if caller.sees_all else ""
                raise ApiError(
                    504,
                    "position_not_reached",
                    f"instance {instance!r} is {at}not yet at offset {position.offset} of epoch {position.epoch}",
                    f"ask again, wait longer (timeout_s up to {MAX_WAIT_S:g}), or leave at_least out",
                )


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def _asked_namespace(asked: LookupRequest) -> Namespace | NamespaceId:
    return asked.namespace if isinstance(asked.namespace, Namespace) else NamespaceId(bytes.fromhex(asked.namespace))


def _id_of(namespace: Namespace | NamespaceId) -> NamespaceId:
    return namespace.id if isinstance(namespace, Namespace) else namespace


async def _body(request: Request) -> bytearray:
    """The body, no more than MAX_BODY_BYTES of it."""
    exchange = _exchange(request)
    body = exchange.body = bytearray()
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            async for part in request.stream():
                body += part
                if max(len(body), exchange.length) > MAX_BODY_BYTES:
                    raise ApiError(
                        413, "body_too_large", f"the body has more than {MAX_BODY_BYTES} bytes",
                        f"give at most {MAX_HASHES} hashes, best as one hex string",
                    )  # fmt: skip
    except TimeoutError:
        raise ApiError(408, "body_too_slow", f"the body did not come within {BODY_WAIT_S:g} s", "try again") from None
    except ClientDisconnect:
        raise ApiError(400, "body_cut_short", "the connection ended before the body did", "try again") from None
    return body


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope["kvbm.exchange"]
    return exchange


def _one_hash(what: str, text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != HASH_BYTES or len(text) != _HEX_DIGITS:
        raise _bad_hash(f"{what} {text[:80]!r} is not {_HEX_DIGITS} hex digits")
    return value


def _bad_hash(message: str) -> ApiError:
    return ApiError(422, "bad_hash", message, f"write each hash as {_HEX_DIGITS} hex digits")


def _json(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    code = error.answer.error.code
    if code == "body_too_large" or code.startswith("too_many_"):
        _exchange(request).refused("too_large")
    elif code == "body_too_slow":
        _exchange(request).refused("too_slow")
    return _json(error.answer, error.status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    detail = ErrorDetail(code=code, message=message, what_to_do="see /openapi.json for the paths")
    return _json(ErrorAnswer(error=detail), error.status_code)


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


_EXAMPLE_ID = "5e0c2d6f9b1a4c3d8e7f60514233a1b2"
_EXAMPLE_HASHES = ["00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"]
_EXAMPLE_LOOKUP = {"namespace": _EXAMPLE_ID, "hashes": _EXAMPLE_HASHES}
_EXAMPLE_FIELDS = {"namespace": {"model": "tiny", "block_tokens": 16}, "tokens": [1, 2, 3, 4] * 8}
_EXAMPLE_WAIT = _EXAMPLE_LOOKUP | {
    "at_least": [{"instance": "instance-0", "epoch": 3, "offset": 1200}], "timeout_s": 0.5,
}  # fmt: skip

_ROUTES = (
    _Route(
        path="/v1/lookup", handler="lookup", method="POST", takes=LookupRequest, gives=LookupAnswer,
        summary="Who has how much of a prefix?", errors=(400, 408, 413, 422, 503, 504),
        examples={
            "hashes": {"value": _EXAMPLE_LOOKUP},
            "tokens": {"summary": "a namespace whose secret the catalog knows", "value": _EXAMPLE_FIELDS},
            "read your writes": {"value": _EXAMPLE_WAIT},
        },
    ),
    _Route(
        path="/v1/route", handler="route", method="POST", takes=RouteRequest, gives=RouteAnswer,
        summary="Which instance should serve this prompt, and why?", errors=(400, 408, 413, 422, 503, 504),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP | {"input_tokens": 40}}},
    ),
    _Route(
        path="/v1/blocks/{namespace}/{hash}", handler="block", gives=BlockAnswer, summary="Who holds a block?",
        errors=(422, 503),
    ),
    _Route(path="/v1/instances", handler="instances", gives=InstancesAnswer, summary="All instances."),
    _Route(
        path="/v1/instances/{instance}/snapshot", handler="ask_snapshot", method="POST", gives=SnapshotAnswer,
        summary="Ask an instance to take a snapshot of what it holds.", errors=(404, 503),
    ),
    _Route(
        path="/v1/instances/{instance}", handler="forget", method="DELETE", gives=ForgottenAnswer,
        summary="Forget an instance that is gone. For operators.", errors=(403, 404, 409, 503),
    ),
    _Route(path="/v1/namespaces", handler="namespaces", gives=NamespacesAnswer, summary="All namespaces with known fields."),
    _Route(path="/healthz", handler="healthz", summary="Whether the process answers.", media_type="text/plain"),
    _Route(path="/readyz", handler="readyz", gives=ReadyAnswer, summary="Whether answers are complete; 503 until then."),
    _Route(path="/metrics", handler="metrics", summary="Prometheus metrics.", media_type="text/plain"),
    _Route(path="/openapi.json", handler="openapi", summary="This description."),
    _Route(path="/", handler="status", summary="What this is."),
)  # fmt: skip

_ERROR_WORDS = {
    400: "The body is not JSON.",
    401: "The catalog does not know who asks.",
    403: "The caller's role may not ask this.",
    404: "There is no such instance.",
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
            "title": "kvbm catalog", "version": version or "0", "description": "Where the cluster's KV-cache blocks lie.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }  # fmt: skip


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
    if names:
        kinds = {"instance": {"type": "string"}}
        pattern = {"type": "string", "pattern": f"^[0-9a-fA-F]{{{_HEX_DIGITS}}}$"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": kinds.get(name, pattern)} for name in names
        ]
    return operation


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
