"""Questions over NATS answered as over HTTP: short ones at once, the others as requests to the same application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.judge import Judged, judge
from kvbm.catalog.access.limits import LARGE_BODY_BYTES, Limits, Room
from kvbm.catalog.edge.fast_path import BINARY_TYPE, MOST_BYTES, PATHS, Answered, FastPath, ShortQuestion
from kvbm.catalog.edge.gate import NATS_CALLER, UNKNOWN, App, Message
from kvbm.core.answers import ErrorAnswer, ErrorDetail
from kvbm.core.asks import JSON_TYPE, RETRY_HEADER, HttpAsk, is_caller, request_of
from kvbm.core.errors import StreamError
from kvbm.safe_log import SafeLog
from kvbm.streams.base import AskLine, CatalogAsk

log = SafeLog()

MUTE_S = 1.0
_MOST_LONG = 256  # questions under way that are not answered at once
_MOST_LONG_EACH = 64
_LONG_BYTES = 64 << 20  # of their bodies
_BINARY = BINARY_TYPE.decode()
_SHORT = {verb: path for path in PATHS if (verb := path.decode().rpartition("/")[2])}


class Asks:
    """Answers questions. Belongs to one asyncio loop.

    A caller that goes on asking when it is refused is not listened to for `MUTE_S`: a message that the server does not
    bring costs nothing.

    Attributes:
        under_way: tasks of questions that are not answered at once.
    Args:
        app: answers what is not short. at_once: answers what is.
        host: address that callers without a name count as.
        on_muted: called when a caller is not to be listened to.
    """

    def __init__(
        self, app: App, at_once: FastPath, access: Access, limits: Limits, host: str, on_muted: Callable[[], None]
    ) -> None:
        self._app, self._at_once, self._access, self._limits, self._host = app, at_once, access, limits, host
        self._on_muted = on_muted
        self._muted: dict[str, float] = {}  # name in the subject → until when
        self._long = Room(_MOST_LONG, _MOST_LONG_EACH)
        self._long_bytes = Room(_LONG_BYTES, _LONG_BYTES // 2)
        self.under_way: set[asyncio.Task[None]] = set()

    def muted(self) -> set[str]:
        """Names, as in subjects, that are not listened to now."""
        now_s = self._limits.clock()
        self._muted = {name: until_s for name, until_s in self._muted.items() if now_s < until_s}
        return set(self._muted)

    def at_once(self, line: AskLine, ask: CatalogAsk) -> bool:
        """See `AskTaker.at_once`."""
        path = _SHORT.get(ask.verb)
        caller = None if path is None else self._caller(ask)
        found = None if path is None or caller is None else self._found(ask, caller, path)
        if found is None:
            return False
        status, kind, body = _fitting(line, found.status, found.content_type.decode(), found.body)
        try:
            line.answer_now(ask, status, kind, body)
        except StreamError as error:
            log.debug("ask.answer_failed", verb=ask.verb, why=str(error))  # who asks will ask again
        return True

    async def take(self, line: AskLine, ask: CatalogAsk) -> None:
        """See `AskTaker.take`."""
        caller = self._caller(ask)
        if caller is None:
            self._limits.refusals["unknown_caller"] += 1
            await _answer(line, ask, 401, UNKNOWN)
            return
        path = _SHORT.get(ask.verb)
        found = None if path is None else self._found(ask, caller, path)
        if found is not None:
            await _send(line, ask, found.status, found.content_type.decode(), found.body)
            return
        asked = request_of(ask.verb, ask.body)
        judged = judge(self._limits, caller, self._host, "" if asked is None else asked.path)
        if judged.over:
            await self._refuse(line, ask, judged)
            return
        self._limits.withdraw(judged)  # the application judges it again
        if asked is None:
            await _answer(
                line,
                ask,
                404,
                _error(
                    "not_found",
                    f"nothing is asked with {ask.verb[:40]!r} and this body",
                    "see docs/route.md for the questions over NATS",
                ),
            )
            return
        await self._begin(line, ask, asked, judged.key)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _caller(self, ask: CatalogAsk) -> Caller | None:
        return self._access.nats_caller(ask.caller) if is_caller(ask.caller) else None

    def _found(self, ask: CatalogAsk, caller: Caller, path: bytes) -> Answered | None:
        """The answer to a short question; None: it must go the long way, and nothing has changed."""
        is_binary = ask.kind == _BINARY
        if len(ask.body) > (LARGE_BODY_BYTES if is_binary else MOST_BYTES):
            return None
        return self._at_once.answer_to(
            caller, ShortQuestion(path, is_binary, self._host, None, None, ask.trace), ask.body
        )

    async def _refuse(self, line: AskLine, ask: CatalogAsk, judged: Judged) -> None:
        """Tell a caller that it asks too much; where it goes on, it is not listened to."""
        limits, over, key = self._limits, judged.over, judged.key
        limits.refusals[over.why] += 1
        limits.limited_log.warn("catalog.request_refused", why=over.why, caller=key)
        if limits.refusing.take(limits.clock(), key):
            self._muted[ask.caller] = limits.clock() + MUTE_S
            self._on_muted()
            return
        await _answer(line, ask, 429, limits.refusal(over).answer, {RETRY_HEADER: "1"})

    async def _begin(self, line: AskLine, ask: CatalogAsk, asked: HttpAsk, key: str) -> None:
        why = self._long.take(key, 1)
        if not why and (why := self._long_bytes.take(key, len(ask.body))):
            self._long.give(key, 1)
        if why:
            self._limits.refusals["too_many_waits"] += 1
            error = _error(
                "too_many_waits",
                "too many long questions are under way",
                "ask again soon, with fewer long questions at a time",
            )
            await _answer(line, ask, 429 if why == "caller" else 503, error)
            return

        def ended(task: asyncio.Task[None]) -> None:
            self.under_way.discard(task)
            self._long.give(key, 1)
            self._long_bytes.give(key, len(ask.body))

        task = asyncio.create_task(self._answer_long(line, ask, asked))
        self.under_way.add(task)
        task.add_done_callback(ended)

    async def _answer_long(self, line: AskLine, ask: CatalogAsk, asked: HttpAsk) -> None:
        answer = _Collected(asked.body)
        try:
            await self._app(self._scope(ask, asked), answer.receive, answer.send)
        except Exception:
            if not answer.is_whole:
                raise
            log.exception("catalog.ask_failed", verb=ask.verb)  # the application has answered 500 and raised
        more = {RETRY_HEADER: answer.retry_after} if answer.retry_after else None
        await _send(line, ask, answer.status, answer.kind, bytes(answer.body), more)

    def _scope(self, ask: CatalogAsk, asked: HttpAsk) -> dict[str, object]:
        headers = [(b"host", b"catalog"), (b"content-type", ask.kind.encode("latin-1", "replace")[:200])]
        if asked.method == "POST":
            headers.append((b"content-length", b"%d" % len(asked.body)))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": asked.method,
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": asked.query,
            "root_path": "",
            "headers": headers,
            "client": (self._host, 0),
            "server": ("catalog", 0),
            "state": {NATS_CALLER: ask.caller},
        }


class _Collected:
    """The answer of an ASGI application."""

    def __init__(self, asked: bytes) -> None:
        self.status, self.kind, self.retry_after = 500, JSON_TYPE, ""
        self.body = bytearray()
        self.is_whole = False
        self._asked: bytes | None = asked

    async def receive(self) -> Message:
        if self._asked is None:
            return {"type": "http.disconnect"}
        body, self._asked = self._asked, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message.get("headers", ()):
                if name == b"content-type":
                    self.kind = value.decode("latin-1")
                elif name == b"retry-after":
                    self.retry_after = value.decode("latin-1")
        else:
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)


def _error(code: str, message: str, what_to_do: str) -> ErrorAnswer:
    return ErrorAnswer(error=ErrorDetail(code=code, message=message, what_to_do=what_to_do))


async def _answer(
    line: AskLine, ask: CatalogAsk, status: int, error: ErrorAnswer, more: dict[str, str] | None = None
) -> None:
    await _send(line, ask, status, JSON_TYPE, msgspec.json.encode(error), more)


async def _send(
    line: AskLine, ask: CatalogAsk, status: int, kind: str, body: bytes, more: dict[str, str] | None = None
) -> None:
    try:
        await line.answer(ask, *_fitting(line, status, kind, body), more)
    except StreamError as error:
        log.debug("ask.answer_failed", verb=ask.verb, why=str(error))  # who asks will ask again


def _fitting(line: AskLine, status: int, kind: str, body: bytes) -> tuple[int, str, bytes]:
    """An answer, or that it is too large."""
    if len(body) <= line.max_answer_bytes:
        return status, kind, body
    error = _error(
        "answer_too_large",
        f"the answer has {len(body)} bytes; NATS takes {line.max_answer_bytes}",
        "ask for less with limit, or over HTTP, or have max_payload raised at nats-server",
    )
    return 413, JSON_TYPE, msgspec.json.encode(error)
