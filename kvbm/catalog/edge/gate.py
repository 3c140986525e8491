"""Before any handler: who asks, and the refusals 401 and 403 where `access.judge` says so, and 421 where
`access.hosts` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.hosts import Hosts
from kvbm.catalog.access.judge import PASSED, UNIX_HOST
from kvbm.catalog.access.limits import JUDGED
from kvbm.core.answers import ErrorAnswer, ErrorDetail
from kvbm.safe_log import RateLimitedLog

CALLER = "kvbm.caller"
CALLER_NOW = "kvbm.caller_now"  # who asks as of now: a request may last longer than its token
PEER = "kvbm.peer"  # in the scope's state: the peer's certificate
NATS_CALLER = "kvbm.nats"  # so too: who asks over NATS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

UNKNOWN = ErrorAnswer(
    error=ErrorDetail(
        code="not_known",
        message="the catalog does not know who asks",
        what_to_do="set catalog.token to the file of a token that is good now (Authorization: Bearer), or show a "
        "certificate it knows",
    )
)
FORBIDDEN = ErrorAnswer(
    error=ErrorDetail(
        code="not_allowed", message="the caller's role may not ask this", what_to_do="ask with the token of an operator"
    )
)


def _other_host(host: str) -> ErrorAnswer:
    return ErrorAnswer(
        error=ErrorDetail(
            code="other_host",
            message=f"this catalog asks nobody who they are, and is not called {host[:80]!r}",
            what_to_do="ask it as localhost or by its address, or add the name to catalog.hosts",
        )
    )


class KnownHost:
    """An ASGI application before another: answers 421 to a request over TCP that names a host which is not ours."""

    def __init__(self, app: App, hosts: Hosts, limited_log: RateLimitedLog) -> None:
        self._app, self._hosts, self._limited_log = app, hosts, limited_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and _is_tcp(scope):
            host = self._hosts.refused(scope["headers"])
            if host is not None:
                self._limited_log.warn("catalog.request_refused", why="other_host", host=host[:80])
                await _answer(send, 421, _other_host(host), [])
                return
        await self._app(scope, receive, send)


def _is_tcp(scope: Scope) -> bool:
    return (scope.get("client") or ("",))[0] != UNIX_HOST and NATS_CALLER not in scope.get("state", {})


class CountedAnswers:
    """An ASGI application before another: counts its answers by their status."""

    def __init__(self, app: App, answers: MutableMapping[int, int]) -> None:
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


class Gate:
    """An ASGI application before another: puts the caller into the scope as `kvbm.caller`, and how to ask again who it
    is as `kvbm.caller_now`, or answers 401 or 403.

    Args:
        count: told each request's caller, "" for none, and its status class: "passed", "unknown" or "forbidden".
        within: puts an application, and the answers 401 and 403, within limits of the caller; it judges the request, as
            `limits.JUDGED` says.
    """

    def __init__(
        self,
        app: App,
        access: Access,
        count: Callable[[str, str], None],
        within: Callable[[App], App],
    ) -> None:
        self._app, self._access, self._count = app, access, count
        self._judged = within(self._judge)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[CALLER_NOW] = lambda: self._caller(scope)
        scope[CALLER] = scope[CALLER_NOW]()
        await self._judged(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        state = scope.get("state", {})
        if NATS_CALLER in state:
            return self._access.nats_caller(state[NATS_CALLER])
        return self._access.caller(_authorization(scope), state.get(PEER))

    async def _judge(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller, outcome = scope[CALLER], scope[JUDGED].outcome
        self._count("" if caller is None else caller.name, outcome)
        if outcome == PASSED:
            await self._app(scope, receive, send)
        elif outcome == "unknown":
            await _answer(send, 401, UNKNOWN, [(b"www-authenticate", b"Bearer")])
        else:
            await _answer(send, 403, FORBIDDEN, [])


def _authorization(scope: Scope) -> str | None:
    return authorization(scope["headers"])


def authorization(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What the header says of who asks; None without it."""
    found = [value for name, value in headers if name == b"authorization"]
    if not found:
        return None
    return found[0].decode("latin-1") if len(found) == 1 else ""  # two of them: neither counts


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What the header says that the body is, b"" without it;

    None where there are two, of which none counts before the other.
    """
    found = [value for name, value in headers if name == b"content-type"]
    return None if len(found) > 1 else (found or [b""])[0]


async def _answer(send: Send, status: int, answer: ErrorAnswer, headers: list[tuple[bytes, bytes]]) -> None:
    body = msgspec.json.encode(answer)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
