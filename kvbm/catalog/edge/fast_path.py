"""Short questions answered in one step, with no task and no framework between the socket and the index.

What is refused for who asks, asks for a wait, or is long, is not answered here: it goes the long way, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.hosts import Hosts
from kvbm.catalog.access.judge import PASSED, Judged, allowed, judge, key_of
from kvbm.catalog.access.limits import (
    LARGE_BODY_BYTES,
    SMALL_BODY_BYTES,
    LimitError,
    Limits,
    cost_of,
)
from kvbm.catalog.answers.prompts import ApiError, without_prompt
from kvbm.catalog.edge.prompt_answers import PromptAnswers
from kvbm.core import prompt_batches
from kvbm.core.answers import FindRequest, LookupRequest, PresenceRequest, RouteRequest
from kvbm.core.backend import ReadPlainQuestion
from kvbm.core.plain_questions import PlainQuestion

MOST_BYTES = SMALL_BODY_BYTES  # of a body in JSON
PATHS: dict[bytes, type[LookupRequest]] = {
    b"/v1/lookup": LookupRequest,
    b"/v1/route": RouteRequest,
    b"/v1/presence": PresenceRequest,
    b"/v1/find": FindRequest,
}
_TEXTS = {path: path.decode() for path in PATHS}
JSON_TYPE = b"application/json"
_MOST_PLAIN_S = 0.001  # that a plain answer counts as work: what took longer has been kept waiting by others
BINARY_TYPE = prompt_batches.CONTENT_TYPE.encode()


class ShortQuestion(NamedTuple):
    """A request that may be answered at once.

    Attributes:
        path: one of `PATHS`.
        is_binary: its body is a `PromptBatch`.
        host: the peer's address. authorization: the header. certificate: the peer's.
        trace: its `traceparent`; "" for none.
    """

    path: bytes
    is_binary: bool
    host: str
    authorization: str | None
    certificate: Mapping[str, Any] | None
    trace: str = ""


class HeldRoom(NamedTuple):
    """Room for a body: whose it is, and how many bytes."""

    key: str
    amount: int


NOTHING_HELD = HeldRoom("", 0)


class Answered(NamedTuple):
    """An answer: its status, its body, what that is, and who has asked."""

    status: int
    body: bytes
    content_type: bytes
    caller: Caller


class FastPath:
    """Answers short questions about prompts and blocks. Belongs to one asyncio loop.

    Args:
        count: told each request's caller, and that it "passed".
        statuses: counts answers by their status.
        read_plain: reads what most requests are.

    Attributes:
        hosts: that requests over TCP may name.
    """

    def __init__(
        self,
        access: Access,
        limits: Limits,
        answers: PromptAnswers,
        count: Callable[[str, str], None],
        statuses: MutableMapping[int, int],
        hosts: Hosts,
        read_plain: ReadPlainQuestion,
    ) -> None:
        self.hosts, self._read_plain = hosts, read_plain
        self._access, self._limits, self._answers, self._count = access, limits, answers, count
        self._statuses = statuses
        self._default_headers: list[tuple[bytes, bytes]] = []
        self._heads: dict[tuple[int, bytes], bytes] = {}  # by status and type, with the headers above

    def hold(self, question: ShortQuestion, length: int) -> HeldRoom | None:
        """Take room for a body, for `give_back`.

        None: it is too long, there is no room, or whoever asks may not ask this.

        Who sends nothing but headers would else take the room of those who may ask.
        """
        over = max(0, length - SMALL_BODY_BYTES)
        if over == 0:
            return NOTHING_HELD
        if not question.is_binary or length > LARGE_BODY_BYTES:
            return None
        caller = self._access.caller(question.authorization, question.certificate)
        if caller is None or allowed(caller, _TEXTS[question.path]) != PASSED:
            return None
        key = key_of(caller.name, question.host)
        return None if self._limits.bodies.take_in_turn(key, over) else HeldRoom(key, over)

    def give_back(self, held: HeldRoom) -> None:
        """The body is gone."""
        if held.amount:
            self._limits.bodies.give(held.key, held.amount)

    def answer(self, question: ShortQuestion, body: bytes) -> Answered | None:
        """The answer to one request; None: it must go the long way, and nothing has changed."""
        caller = self._access.caller(question.authorization, question.certificate)
        return None if caller is None else self.answer_to(caller, question, body)

    def answer_to(self, caller: Caller, question: ShortQuestion, body: bytes) -> Answered | None:
        """`answer`, where it is known who asks."""
        if question.is_binary and prompt_batches.is_long(body):
            return None  # others are answered between its steps
        limits = self._limits
        judged = judge(limits, caller, question.host, _TEXTS[question.path])
        if judged.outcome != PASSED:
            limits.withdraw(judged)
            return None
        begin_s = limits.work_clock()
        try:
            return self._answer(caller, judged, question, body)
        finally:
            limits.work.charge(limits.clock(), judged.key, limits.work_clock() - begin_s)

    def read_plain(self, data: bytes, begin: int, end: int) -> PlainQuestion | None:
        """The plain question that begins at a place; None: there is none, or it goes the way of all others."""
        return self._read_plain(data, begin, end) if self._answers.may_be_plain() else None

    def answer_plain(self, asked: PlainQuestion, host: str, certificate: Mapping[str, Any] | None) -> Answered | None:
        """The answer that `answer` gives to the same request.

        The loop's time is taken from the clock on the wall: asking for the thread's takes as long as a short answer.

        Args:
            host: the peer's address. certificate: the peer's.
        """
        proof = None if asked.authorization is None else asked.authorization.decode("latin-1")
        caller = self._access.caller(proof, certificate)
        if caller is None:
            return None
        limits = self._limits
        judged = judge(limits, caller, host, "/v1/route" if asked.is_route else "/v1/lookup")
        if judged.outcome != PASSED:
            limits.withdraw(judged)
            return None
        begin_s, status = limits.clock(), 200
        answer: bytes | None
        try:
            if asked.is_route:
                answer = self._answers.plain_route(caller, judged.key, asked)
            else:
                answer = self._answers.plain_lookup(caller, asked)
        except ApiError as error:
            status, answer = error.status, self._refusal(error)
        now_s = limits.clock()
        limits.work.charge(now_s, judged.key, min(now_s - begin_s, _MOST_PLAIN_S))
        if answer is None:
            limits.withdraw(judged)
            return None
        return self._counted(caller, judged, asked.body_bytes, Answered(status, answer, JSON_TYPE, caller))

    def head(self, default_headers: list[tuple[bytes, bytes]], status: int, content_type: bytes) -> bytes:
        """What stands before the length of an answer's body.

        Args:
            default_headers: another list where they are others.
        """
        if default_headers is not self._default_headers:
            self._default_headers, self._heads = default_headers, {}
        found = self._heads.get((status, content_type))
        if found is None:
            lines = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in default_headers)]
            found = b"".join([*lines, b"content-type: %b\r\ncontent-length: " % content_type])
            self._heads[status, content_type] = found
        return found

    def _answer(self, caller: Caller, judged: Judged, question: ShortQuestion, body: bytes) -> Answered | None:
        limits, key = self._limits, judged.key
        status, content_type, cost = 200, BINARY_TYPE if question.is_binary else JSON_TYPE, 0
        answer: bytes | None
        try:
            if question.is_binary:
                answer, cost = self._answers.batch(caller, key, PATHS[question.path], body, question.trace)
            else:
                answer = self._answered(question, caller, key, body)
        except (ApiError, LimitError) as error:
            status, answer, content_type = error.status, self._refusal(error), JSON_TYPE
        if answer is None:
            limits.withdraw(judged)
            return None
        return self._counted(caller, judged, len(body), Answered(status, answer, content_type, caller), cost)

    def _refusal(self, error: ApiError | LimitError) -> bytes:
        if isinstance(error, ApiError) and error.refused:
            self._limits.refusals[error.refused] += 1
        return msgspec.json.encode(error.answer)

    def _counted(
        self, caller: Caller, judged: Judged, body_bytes: int, answered: Answered, more_cost: int = 0
    ) -> Answered:
        """The answer, as one that was given."""
        self._count(caller.name, "passed")
        self._statuses[answered.status] += 1
        cost = more_cost + cost_of(body_bytes, len(answered.body))
        if judged.limited and cost:
            self._limits.requests.charge(self._limits.clock(), judged.key, cost)
        return answered

    def _answered(self, question: ShortQuestion, caller: Caller, key: str, body: bytes) -> bytes | None:
        asked = self._answers.decoded(body, PATHS[question.path])
        if asked.at_least:
            return None
        self._answers.check_ready(caller)
        prompt = self._answers.hashing(caller, asked)()
        if isinstance(asked, RouteRequest):
            return self._answers.route(caller, key, without_prompt(asked), prompt, question.trace)
        return self._answers.lookup(caller, asked, prompt, question.trace)
