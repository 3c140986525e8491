"""The catalog's paths over HTTP: what each takes and gives, for the application and for OpenAPI."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.routing import Route

from kvbm.catalog.answers.prompts import HEX_DIGITS
from kvbm.catalog.edge.checkpoint_response import CONTENT_TYPE as CHECKPOINT
from kvbm.catalog.edge.feed_response import CONTENT_TYPE as EVENTS
from kvbm.core.answers import (
    MAX_INSTANCES,
    MAX_POSITIONS,
    BlockAnswer,
    ErrorAnswer,
    FindAnswer,
    FindRequest,
    ForgottenAnswer,
    HistoryPromptRequest,
    HistoryRouteRequest,
    InstancesAnswer,
    LookupAnswer,
    LookupRequest,
    NamespacesAnswer,
    PresenceAnswer,
    PresenceRequest,
    ReadyAnswer,
    RouteAnswer,
    RouteRequest,
    SnapshotAnswer,
    UsageAnswer,
)
from kvbm.core.history_answers import (
    MOST_STEPS,
    HistoryBlocks,
    HistoryChanges,
    HistoryOfInstance,
    HistoryOverview,
    HistoryPools,
    HistoryPrompt,
    HistoryQuestion,
    HistoryRoute,
    HistoryRows,
    HistoryStatus,
    HistoryTenants,
    HistoryTimeline,
)
from kvbm.core.overview import InstanceDetail, OverviewAnswer
from kvbm.core.watch_events import WatchRequest


class ApiRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A path: what it takes, gives and is for, and the handler of `api` that answers."""

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
        return (
            ["GET", "HEAD"] if self.method == "GET" and self.media_type not in (CHECKPOINT, EVENTS) else [self.method]
        )

    def served_by(self, api: object) -> Route:
        """The route of the web library, which leads to the handler."""
        path = self.path.replace("{file}", "{file:path}")  # it may lie in a folder; "" is the page itself
        if self.handler in ("instance_detail", "history_instance"):
            path = path.replace("{instance}", "{instance:path}")  # whatever a stranger on the stream calls itself
        served = Route(path, getattr(api, self.handler), name=self.handler)
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

_PAST_ERRORS = (404, 422, 503, 504)
_TIME = {"type": "string", "description": "ISO 8601, Unix seconds, or a clock time such as 12:00 (UTC)"}

ROUTES = (
    ApiRoute(
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
    ApiRoute(
        path="/v1/route",
        handler="route",
        method="POST",
        takes=RouteRequest,
        gives=RouteAnswer,
        summary="Which instance should serve this prompt, and why?",
        errors=(400, 408, 413, 422, 503, 504),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP | {"input_tokens": 40}}},
    ),
    ApiRoute(
        path="/v1/presence",
        handler="presence",
        method="POST",
        takes=PresenceRequest,
        gives=PresenceAnswer,
        summary="Which of these blocks are held, and by whom? There may be holes.",
        errors=(400, 408, 413, 422, 503, 504),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP}},
    ),
    ApiRoute(
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
    ApiRoute(
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
    ApiRoute(
        path="/v1/overview",
        handler="overview",
        gives=OverviewAnswer,
        summary="All instances in columns, and what there is beside, as the page shows it; no older than a second.",
    ),
    ApiRoute(
        path="/v1/overview/feed",
        handler="overview_feed",
        media_type=EVENTS,
        errors=(503,),
        summary="The same as server-sent events: a whole one, then at most once a second what has changed.",
    ),
    ApiRoute(
        path="/v1/overview/instances/{instance}",
        handler="instance_detail",
        gives=InstanceDetail,
        errors=(404,),
        summary="What an instance's last heartbeat tells beside what /v1/instances has. For operators.",
    ),
    ApiRoute(
        path="/v1/blocks/{namespace}/{hash}",
        handler="block",
        gives=BlockAnswer,
        summary="Who holds a block?",
        errors=(422, 503),
    ),
    ApiRoute(
        path="/v1/instances",
        handler="instances",
        gives=InstancesAnswer,
        summary="Instances, by name: at most `limit` of them (1 to 1,000), behind `after`, or those of a `name`, and "
        "which of these names the catalog has forgotten.",
        errors=(422,),
        asks={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_INSTANCES, "default": MAX_INSTANCES},
            "name": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_POSITIONS},
        },
    ),
    ApiRoute(
        path="/v1/instances/{instance}/snapshot",
        handler="ask_snapshot",
        method="POST",
        gives=SnapshotAnswer,
        summary="Ask an instance to take a snapshot of what it holds.",
        errors=(404, 503),
    ),
    ApiRoute(
        path="/v1/instances/{instance}",
        handler="forget",
        method="DELETE",
        gives=ForgottenAnswer,
        summary="Forget an instance that is gone. For operators.",
        errors=(403, 404, 409, 503),
    ),
    ApiRoute(
        path="/v1/checkpoint",
        handler="checkpoint",
        media_type=CHECKPOINT,
        errors=(404, 429),
        summary="The newest checkpoint of the index, for a replica to begin with. For callers of all tenants.",
    ),
    ApiRoute(
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
    ApiRoute(
        path="/v1/history",
        handler="history",
        gives=HistoryStatus,
        summary="From when to when the past can be asked, and what is missing. For operators, as all below.",
        errors=(404, 422, 503),
    ),
    ApiRoute(
        path="/v1/history/overview",
        handler="history_overview",
        gives=HistoryOverview,
        summary="Instances, tiers and tenants at a moment.",
        errors=_PAST_ERRORS,
        asks={"at": _TIME},
    ),
    ApiRoute(
        path="/v1/history/timeline",
        handler="history_timeline",
        gives=HistoryTimeline,
        summary="Blocks gained, lost and held in equal parts of a stretch of time, starts and stops.",
        errors=_PAST_ERRORS,
        asks={
            "from": _TIME,
            "to": _TIME,
            "steps": {"type": "integer", "minimum": 1, "maximum": MOST_STEPS, "default": 100},
        },
    ),
    ApiRoute(
        path="/v1/history/changes",
        handler="history_changes",
        gives=HistoryChanges,
        summary="What began and ended in a stretch of time, by instance, tier and cause.",
        errors=_PAST_ERRORS,
        asks={"from": _TIME, "to": _TIME, "instance": {"type": "string"}},
    ),
    ApiRoute(
        path="/v1/history/tenants",
        handler="history_tenants",
        gives=HistoryTenants,
        summary="Whose blocks filled the tiers at a moment.",
        errors=_PAST_ERRORS,
        asks={"at": _TIME},
    ),
    ApiRoute(
        path="/v1/history/block/{hash}",
        handler="history_block",
        gives=HistoryBlocks,
        summary="Who held a block at a moment, and its life event by event; its hash, or 8 digits or more of it.",
        errors=_PAST_ERRORS,
        asks={"at": _TIME},
    ),
    ApiRoute(
        path="/v1/history/instances/{instance}",
        handler="history_instance",
        gives=HistoryOfInstance,
        summary="An instance at a moment, and all its epochs.",
        errors=_PAST_ERRORS,
        asks={"at": _TIME},
    ),
    ApiRoute(
        path="/v1/history/pools",
        handler="history_pools",
        gives=HistoryPools,
        summary="What pools of the cluster were claimed to have at a moment.",
        errors=_PAST_ERRORS,
        asks={"at": _TIME},
    ),
    ApiRoute(
        path="/v1/history/prompt",
        handler="history_prompt",
        method="POST",
        takes=HistoryPromptRequest,
        gives=HistoryPrompt,
        summary="Who held how much of a prompt at a moment, in which tier?",
        errors=(400, 408, 413, *_PAST_ERRORS),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP | {"at": "12:00"}}},
    ),
    ApiRoute(
        path="/v1/history/route",
        handler="history_route",
        method="POST",
        takes=HistoryRouteRequest,
        gives=HistoryRoute,
        summary="What would serving a prompt have cost at a moment, by what is recorded of it?",
        errors=(400, 408, 413, *_PAST_ERRORS),
        examples={"hashes": {"value": _EXAMPLE_LOOKUP | {"at": "12:00", "input_tokens": 40}}},
    ),
    ApiRoute(
        path="/v1/history/sql",
        handler="history_sql",
        method="POST",
        takes=HistoryQuestion,
        gives=HistoryRows,
        summary="One SELECT over the past. As JSON, or as Arrow IPC stream where `accept` is "
        "application/vnd.apache.arrow.stream.",
        errors=(400, 408, 413, *_PAST_ERRORS),
        examples={"count": {"value": {"question": "SELECT tier, count(*) AS blocks FROM residencies GROUP BY tier"}}},
    ),
    ApiRoute(
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
    ApiRoute(path="/healthz", handler="healthz", summary="Whether the process answers.", media_type="text/plain"),
    ApiRoute(
        path="/readyz", handler="readyz", gives=ReadyAnswer, summary="Whether answers are complete; 503 until then."
    ),
    ApiRoute(path="/metrics", handler="metrics", summary="Prometheus metrics.", media_type="text/plain"),
    ApiRoute(path="/ui", handler="to_page", summary="Where the page is.", media_type="text/html"),
    ApiRoute(path="/ui/{file}", handler="page", summary="The page's files.", media_type="text/html", errors=(404,)),
    ApiRoute(path="/openapi.json", handler="openapi", summary="This description."),
    ApiRoute(path="/", handler="status", summary="What this is."),
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
    504: "`at_least` was not reached in time, or the question took too long.",
}


def openapi(version: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 description of the service."""
    structs = [ErrorAnswer]
    for route in ROUTES:
        structs += [struct for struct in (route.takes, route.gives) if struct is not None]  # type: ignore[misc]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
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


def _operation(route: ApiRoute) -> dict[str, Any]:
    schema = _reference(route.gives) if route.gives is not None else {}
    responses: dict[str, Any] = {
        "200": {"description": "The answer.", "content": {route.media_type: {"schema": schema}}}
    }
    if route.handler == "readyz":
        responses["503"] = responses["200"] | {"description": "Not ready; `reason` says why."}
    asks_who = () if route.handler in ("healthz", "readyz", "to_page", "page") else (401, 403)
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
    kinds: dict[str, dict[str, str]] = {"instance": {"type": "string"}, "file": {"type": "string"}}
    if route.handler == "history_block":
        kinds["hash"] = {"type": "string", "pattern": f"^[0-9a-fA-F]{{8,{HEX_DIGITS}}}$"}
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
