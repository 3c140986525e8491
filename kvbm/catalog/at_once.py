"""Short questions answered in one step, with no task and no framework between the socket and the index.

What is refused for who asks, asks for a wait, or is long, is not answered here: it goes the long way, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvbm.catalog.access import Access, Caller
from kvbm.catalog.gate import may
from kvbm.catalog.limits import SMALL_BODY_BYTES, LimitError, Limits, cost_of, is_limited, key_of
from kvbm.catalog.prompt_answers import PromptAnswers
from kvbm.catalog.prompts import ApiError, asked_namespace, decode_prompt, without_prompt
from kvbm.core.answers import LookupRequest, RouteRequest

MOST_BYTES = SMALL_BODY_BYTES  # of a body
PATHS: dict[bytes, type[LookupRequest]] = {b"/v1/lookup": LookupRequest, b"/v1/route": RouteRequest}


class Answered(NamedTuple):
    """An answer: its status, its body, and who has asked."""

    status: int
    body: bytes
    caller: Caller


class AtOnce:
    """Answers short lookups and routes. Belongs to one asyncio loop.

    Args:
        count: told each request's caller, and that it "passed".
    """

    def __init__(
        self, access: Access, limits: Limits, answers: PromptAnswers, count: Callable[[str, str], None]
    ) -> None:
        self._access, self._limits, self._answers, self._count = access, limits, answers, count

    def answer(
        self, path: bytes, host: str, authorization: str | None, certificate: Mapping[str, Any] | None, body: bytes
    ) -> Answered | None:
        """The answer to one request; None: it must go the long way, and nothing has changed.

        Args:
            path: one of `PATHS`.
            host: the peer's address.
        """
        caller = self._access.caller(authorization, certificate)
        if caller is None or not may(caller, path.decode()):
            return None
        limits, key = self._limits, key_of(caller.name, host)
        limited = is_limited(limits.settings, caller.name, host)
        if limited and limits.requests.take(limits.clock(), key):
            return None
        status = 200
        try:
            kind = PATHS[path]
            asked = decode_prompt(body, kind)
            if asked.at_least:
                if limited:
                    limits.requests.charge(limits.clock(), key, -1)
                return None
            self._answers.check_ready(caller)
            hashes = self._answers.hashing(caller, asked)()
            namespace = asked_namespace(asked)
            if isinstance(asked, RouteRequest):
                answer = self._answers.route(caller, key, without_prompt(asked), namespace, hashes)
            else:
                answer = self._answers.lookup(caller, asked, namespace, hashes)
        except (ApiError, LimitError) as error:
            status, answer = error.status, msgspec.json.encode(error.answer)
            if isinstance(error, ApiError) and error.refused:
                limits.refusals[error.refused] += 1
        self._count(caller.name, "passed")
        if limited and (cost := cost_of(len(body), len(answer))):
            limits.requests.charge(limits.clock(), key, cost)
        return Answered(status, answer, caller)
