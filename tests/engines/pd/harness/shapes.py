"""A small proxy before a prefiller and a decoder, in the three shapes that others have.

Serial: the prefiller is asked for `kv_transfer_params`, and its answer's go to the decoder: vllm-router, llm-d with
NIXL, production-stack. Bare: one after the other, and neither request has any but the client's own: llm-d with shared
storage. Both: at once, and they name each other by an id: llm-d with P2P.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.engines.pd.harness.passing import content_of, unless_gone

PREFILL, DECODE = "prefill", "decode"
SERIAL, BARE, BOTH = "serial", "bare", "both"


class Shapes:
    """See the module.

    Args:
        urls: where legs go. engines: where the engines are; both by PREFILL and DECODE.

    Attributes:
        client: sends them.
    """

    client: httpx.AsyncClient

    def __init__(self, urls: Mapping[str, str], engines: Mapping[str, str]) -> None:
        self._urls, self._engines = urls, engines

    async def complete(self, request: Request) -> Response:
        """Answer a client, in the shape that its path names."""
        shape, body = request.path_params["shape"], await request.json()
        shapes = {SERIAL: self._serial, BARE: self._bare, BOTH: self._both}
        answer = await unless_gone(request, shapes[shape](body))
        return Response(status_code=502) if answer is None else JSONResponse(content_of(answer), answer.status_code)

    async def _serial(self, body: dict[str, Any]) -> httpx.Response:
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        asked |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        first = await self._leg(PREFILL, _for_prefill(body) | {"kv_transfer_params": asked})
        if first.status_code != 200:
            return first
        return await self._leg(DECODE, body | {"kv_transfer_params": first.json().get("kv_transfer_params")})

    async def _bare(self, body: dict[str, Any]) -> httpx.Response:
        first = await self._leg(PREFILL, _for_prefill(body))
        return first if first.status_code != 200 else await self._leg(DECODE, body)

    async def _both(self, body: dict[str, Any]) -> httpx.Response:
        name = {"kv_request_id": uuid.uuid4().hex}
        url = httpx.URL(self._engines[PREFILL])
        prefiller = name | {"remote_host": url.host, "remote_port": url.port}
        asked = [
            self._leg(PREFILL, _for_prefill(body) | {"kv_transfer_params": {"remote_decoder": name}}),
            self._leg(DECODE, body | {"kv_transfer_params": {"remote_prefiller": prefiller}}),
        ]
        return (await asyncio.gather(*asked))[1]

    async def _leg(self, to: str, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post(f"{self._urls[to]}/v1/completions", json=body)


def _for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"max_tokens": 1, "stream": False}
