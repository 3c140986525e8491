"""A recorder in front of each of two engines, and a small proxy over both that speaks in the shapes of others.

All three listen in one thread of the test's process. Whoever leaves one of them leaves the engine behind it, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.engines.pd.harness.passing import content_of, unless_gone
from tests.engines.pd.harness.shapes import DECODE, PREFILL, Shapes
from tests.eventually import eventually
from tests.servers import free_port

_PASSED_ON = ("content-type", "x-request-id")  # vllm-router's `authorization: Bearer ` is none that httpx would send
_WAIT_S = 200.0


class Leg(NamedTuple):
    """One request for a completion as an engine got it.

    Attributes:
        to: PREFILL or DECODE. headers: their names in lower case.
        answer: its body's JSON, or text; None: whoever asked left before, or the engine did not answer.
    """

    to: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int
    answer: Any


class Proxies:
    """See the module.

    Attributes:
        engines: where they are, by PREFILL and DECODE.
        urls: of the recorders, likewise.
        url: of the proxy; `/serial`, `/bare` and `/both` are its shapes.
        legs: what came through the recorders, in the order of its end.
        before_decode: called before a leg reaches the decoder, whichever proxy sends it.
    """

    def __init__(self, engines: dict[str, str]) -> None:
        self.legs: list[Leg] = []
        self.before_decode: Callable[[], None] = lambda: None
        self.engines = engines
        ports = {name: free_port() for name in (PREFILL, DECODE, "proxy")}
        self.urls = {name: f"http://127.0.0.1:{ports[name]}" for name in (PREFILL, DECODE)}
        self.url = f"http://127.0.0.1:{ports['proxy']}"
        self._shapes = Shapes(self.urls, engines)
        apps: dict[str, Starlette] = {name: Starlette(routes=[self._recorder(name)]) for name in (PREFILL, DECODE)}
        apps["proxy"] = Starlette(routes=[Route("/{shape}/v1/completions", self._shapes.complete, methods=["POST"])])
        self._servers = [
            uvicorn.Server(uvicorn.Config(apps[name], port=port, lifespan="off", log_level="error"))
            for name, port in ports.items()
        ]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxies", daemon=True)
        self._thread.start()
        eventually(lambda: all(server.started for server in self._servers), "the proxies do not listen")

    def close(self) -> None:
        """End all three, and the requests in them."""
        for server in self._servers:
            server.should_exit = server.force_exit = True
        self._thread.join(_WAIT_S)

    def sent(self, to: str) -> list[Leg]:
        """The legs to one of the engines."""
        return [leg for leg in self.legs if leg.to == to]

    async def _serve(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=_WAIT_S, limits=limits, trust_env=False) as self._client:
            self._shapes.client = self._client
            await asyncio.gather(*(server.serve() for server in self._servers))

    def _recorder(self, to: str) -> Route:
        async def passed(request: Request) -> Response:
            content, headers = await request.body(), dict(request.headers)
            is_leg = request.url.path.endswith("completions")
            if is_leg and to == DECODE:
                await asyncio.to_thread(self.before_decode)
            kept = {name: value for name, value in headers.items() if name in _PASSED_ON}
            url = self.engines[to] + request.url.path
            answer: httpx.Response | None = None
            try:
                asked = self._client.request(request.method, url, content=content, headers=kept)
                answer = await unless_gone(request, asked)
            except httpx.HTTPError:
                pass  # the engine is gone
            if is_leg:
                said = None if answer is None else content_of(answer)
                self.legs.append(Leg(to, headers, httpx.Response(200, content=content).json(), _status(answer), said))
            if answer is None:
                return Response(status_code=502)
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

        return Route("/{path:path}", passed, methods=["GET", "POST"])


def _status(answer: httpx.Response | None) -> int:
    return 0 if answer is None else answer.status_code
