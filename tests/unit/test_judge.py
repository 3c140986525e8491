"""Whether a request is answered is judged once, whichever way it comes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from kvbm.assembly import NATIVE
from kvbm.catalog.access.callers import EMBEDDED, Access, Caller
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.access.hosts import Hosts
from kvbm.catalog.access.judge import allowed, judge
from kvbm.catalog.access.limits import Limited, Limits
from kvbm.catalog.edge.fast_path import PATHS, FastPath, ShortQuestion
from kvbm.catalog.edge.gate import Gate
from kvbm.config import LimitSettings

ROUTER = Caller("router", "router", frozenset({"acme"}))
SCRAPER = Caller("scraper", "metrics", None)
HOST = "10.0.0.1"


@pytest.mark.parametrize(
    ("path", "nobody", "scraper", "router"),
    [
        ("/healthz", "passed", "passed", "passed"),
        ("/readyz", "passed", "passed", "passed"),
        ("/metrics", "unknown", "passed", "forbidden"),
        ("/v1/lookup", "unknown", "forbidden", "passed"),
        ("/v1/blocks/00/11", "unknown", "forbidden", "passed"),
        ("/v1/blocks/00/11/22", "unknown", "forbidden", "forbidden"),
        ("/v1/instances", "unknown", "forbidden", "passed"),
        ("/v1/instances/a", "unknown", "forbidden", "forbidden"),
        ("/", "unknown", "forbidden", "forbidden"),
        ("/v1/what-nobody-has-listed", "unknown", "forbidden", "forbidden"),
    ],
)
def test_a_role_may_ask_what_is_listed_for_it_and_an_operator_all(
    path: str, nobody: str, scraper: str, router: str
) -> None:
    assert [allowed(one, path) for one in (None, SCRAPER, ROUTER, EMBEDDED)] == [nobody, scraper, router, "passed"]


def test_who_asks_too_much_is_told_that_first_and_a_withdrawn_request_does_not_count() -> None:
    limits = Limits(LimitSettings(requests_per_s=1.0, burst=2), clock=lambda: 0.0)
    first = judge(limits, None, HOST, "/v1/lookup")
    assert (first.outcome, first.key, first.limited) == ("unknown", HOST, True)
    limits.withdraw(first)
    assert [judge(limits, ROUTER, HOST, "/v1/lookup").outcome for _ in range(3)] == ["passed", "passed", "over"]
    assert [judge(limits, None, HOST, "/v1/lookup").outcome for _ in range(3)] == ["unknown", "unknown", "over"]


class Ways:
    """The application's gate and the short way, with the same callers and limits."""

    def __init__(self, folder: Path) -> None:
        file = folder / "callers.toml"
        self.tokens = {
            name: f"Bearer {add_token(file, NewToken(name, cast(Any, name)), 1.0)}" for name in ("router", "metrics")
        }
        self.limits = Limits(LimitSettings(requests_per_s=1.0, burst=2), clock=lambda: 0.0)
        access = Access(str(file))
        self.gate = Gate(self._app, access, lambda *_: None, lambda app: Limited(app, self.limits))
        self.short = FastPath(
            access, self.limits, cast(Any, None), lambda *_: None, defaultdict(int), Hosts(), NATIVE.read_plain_question
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def long(self, path: bytes, authorization: str | None) -> int:
        """The status of the application's answer."""
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [] if authorization is None else [(b"authorization", authorization.encode())]
        scope = {"type": "http", "method": "POST", "path": path.decode(), "client": (HOST, 1), "headers": headers}
        asyncio.run(cast(Any, self.gate(scope, cast(Any, None), send)))
        return statuses[0]


@pytest.mark.parametrize("path", list(PATHS))
def test_what_the_application_refuses_the_short_way_does_not_answer(tmp_path: Path, path: bytes) -> None:
    ways = Ways(tmp_path)
    for authorization, status in ((None, 401), ("Bearer kvbm_nobody", 401), (ways.tokens["metrics"], 403)):
        assert ways.short.answer(ShortQuestion(path, False, HOST, authorization, None), b"{}") is None
        assert ways.long(path, authorization) == status
    assert [ways.long(path, ways.tokens["router"]) for _ in range(3)] == [200, 200, 429]
    question = ShortQuestion(path, False, HOST, ways.tokens["router"], None)
    assert ways.short.answer(question, b"{}") is None  # it would fail if it went on: there is nothing that answers
