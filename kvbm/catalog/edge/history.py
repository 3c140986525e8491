"""Questions about the past over HTTP: /v1/history and what lies below it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbm.catalog.answers.prompts import ApiError, id_of
from kvbm.catalog.answers.token_prompts import PromptBlocks
from kvbm.catalog.edge.feed_response import send_until_gone
from kvbm.catalog.history.past import PastAnswers, whole
from kvbm.catalog.routing.past_costs import routed_then
from kvbm.config.settings import RoutingSettings
from kvbm.core.answers import HistoryPromptRequest, HistoryRouteRequest
from kvbm.core.history_answers import MOST_LISTED, MOST_STEPS, HistoryPrompt, HistoryQuestion, HistoryRoute
from kvbm.safe_log import SafeLog

log = SafeLog()

ARROW = "application/vnd.apache.arrow.stream"
_DIGITS = 9  # of numbers in a query


class HistoryHandlers:
    """The handlers of a catalog with a history, or without one.

    Args:
        past: answers; None: no history is kept.
    """

    def __init__(self, past: PastAnswers | None) -> None:
        self._past = past

    async def history(self, request: Request) -> Response:
        _query(request, ())
        return self._answer("status", {})

    async def history_overview(self, request: Request) -> Response:
        return self._answer("overview", _query(request, ("at",)))

    async def history_timeline(self, request: Request) -> Response:
        asked = _query(request, ("from", "to", "steps"))
        steps = asked.pop("steps", None)
        if steps is not None:
            if not (steps.isascii() and steps.isdigit() and len(steps) < _DIGITS):
                raise ApiError(422, "bad_time", f"steps {steps[:80]!r} is no number", f"give 1 to {MOST_STEPS}")
            asked["steps"] = int(steps)
        return self._answer("timeline", asked)

    async def history_changes(self, request: Request) -> Response:
        return self._answer("changes", _query(request, ("from", "to", "instance")))

    async def history_tenants(self, request: Request) -> Response:
        return self._answer("tenants", _query(request, ("at",)))

    async def history_block(self, request: Request) -> Response:
        return self._answer("block", _query(request, ("at",)) | {"digits": request.path_params["hash"]})

    async def history_instance(self, request: Request) -> Response:
        return self._answer("instance", _query(request, ("at",)) | {"name": request.path_params["instance"]})

    async def history_pools(self, request: Request) -> Response:
        return self._answer("pools", _query(request, ("at",)))

    def prompt_of(self, asked: HistoryPromptRequest, prompt: PromptBlocks) -> Response:
        """Who held how much of a prompt, which was read."""
        return HistoryResponse(self._kept(), "prompt", _of_prompt(asked, prompt, asked.limit))

    async def route_of(
        self, asked: HistoryRouteRequest, prompt: PromptBlocks, routing: RoutingSettings
    ) -> HistoryRoute:
        """What serving it would have cost. Raises ApiError."""
        async with self._kept().ask("prompt", _of_prompt(asked, prompt, MOST_LISTED)) as reply:
            answer = msgspec.json.decode(await whole(reply.body), type=HistoryPrompt)
        input_tokens = asked.input_tokens
        if input_tokens is None:
            raise ApiError(422, "input_tokens_missing", "input_tokens is not given", "give the whole prompt's length")
        full_tokens = answer.blocks * (answer.block_tokens or 1)
        if full_tokens > input_tokens:
            raise ApiError(
                422,
                "too_many_hashes",
                f"{answer.blocks} full blocks have {full_tokens} tokens, and the prompt {input_tokens}",
                "give the whole prompt's length as input_tokens, and hashes of full blocks only",
            )
        return routed_then(answer, input_tokens, routing, asked.latency, asked.limit)

    async def history_of(self, request: Request, body: bytes | bytearray) -> Response:
        """A question in SQL, whose body was read."""
        past = self._kept()
        try:
            asked = msgspec.json.decode(body, type=HistoryQuestion)
        except msgspec.ValidationError as error:
            raise ApiError(422, "bad_question", str(error), 'send {"question": "SELECT …"}') from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, "not_json", f"the body is not JSON: {error}", "send a JSON object") from None
        limits = past.limits
        is_arrow = ARROW in request.headers.get("accept", "")
        within_s = _within("within_s", asked.within_s, limits.history_s, "limits.history_s")
        rows = _within("rows", asked.rows, math.inf if is_arrow else limits.history_rows, "limits.history_rows")
        arguments = {"question": asked.question, "arrow": is_arrow, "rows": rows}
        if rows is None and not is_arrow:
            arguments["rows"] = limits.history_rows
        return HistoryResponse(past, "sql", arguments, within_s)

    def _answer(self, kind: str, arguments: dict[str, Any]) -> Response:
        if "from" in arguments:
            arguments["since"] = arguments.pop("from")
        return HistoryResponse(self._kept(), kind, arguments)

    def _kept(self) -> PastAnswers:
        """Raises ApiError: there is none."""
        if self._past is None:
            raise ApiError(
                404,
                "history_off",
                "this catalog keeps no history",
                "set catalog.archive and catalog.history (--archive DIR --history DIR)",
            )
        return self._past


def _of_prompt(asked: HistoryPromptRequest, prompt: PromptBlocks, limit: int) -> dict[str, Any]:
    """What the history is asked. Raises ApiError: it is asked what is of now alone."""
    if asked.at_least or asked.instances is not None:
        raise ApiError(422, "of_now_alone", "at_least and instances are of now alone", "leave them out")
    namespace = id_of(prompt.namespace).hex()
    return {"namespace": namespace, "hashes": prompt.hashes.hex(), "at": asked.at, "limit": limit}


class HistoryResponse(Response):
    """Sends an answer piece by piece; its question is cancelled as soon as the client goes."""

    def __init__(self, past: PastAnswers, kind: str, arguments: dict[str, Any], within_s: float | None = None) -> None:
        super().__init__(None, 200)
        self._past, self._kind, self._arguments, self._within_s = past, kind, arguments, within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Raises ApiError, before anything is sent."""
        await send_until_gone(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        has_begun = False
        try:
            async with self._past.ask(self._kind, self._arguments, self._within_s) as reply:
                headers = {"content-type": reply.head.content_type, "cache-control": "no-store", **reply.head.headers}
                if reply.head.content_type == ARROW:
                    has_begun = True
                    await send(_start(headers))
                    async for part in reply.body:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                data = await whole(reply.body)
        except ApiError as error:
            if not has_begun:
                raise
            log.warning("history.answer_broken", why=str(error))  # it has no end, which is how its reader knows
            return
        await send(_start(headers | {"content-length": str(len(data))}))
        await send({"type": "http.response.body", "body": data, "more_body": False})


def _start(headers: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _query(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """What a query has of these. Raises ApiError: it has others, or one of them twice."""
    asked: QueryParams = request.query_params
    wrong = [name for name in asked if name not in names or len(asked.getlist(name)) > 1]
    if wrong:
        known = ", ".join(names) or "nothing"
        raise ApiError(422, "bad_query", f"{wrong[0][:80]!r} is asked that is not known, or twice", f"give {known}")
    return dict(asked)


def _within(name: str, value: Any, most: Any, setting: str) -> Any:
    """A number above 0 and up to a limit, or None. Raises ApiError."""
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise ApiError(422, "bad_question", f"{name} {value} will not do", f"give above 0, up to {most:g} ({setting})")
    return value
