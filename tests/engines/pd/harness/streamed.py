"""An answer that a client reads as it comes: when its first token was there, and its last."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.engines.pd.harness.server import WAIT_S, body_of
from tests.engines.vllm.harness.words import Ask


class Streamed(NamedTuple):
    """Seconds from the question on, and what was counted.

    Attributes:
        first_s, last_s: until the first and the last token.
        tokens: that came.
    """

    first_s: float
    last_s: float
    tokens: int


def streamed(url: str, ask: Ask, **more: Any) -> Streamed:
    """Ask, and read the answer token by token.

    Args:
        url: without /v1/completions. more: further keys of the question.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
    body = body_of(ask) | {"stream": True, "logprobs": None, "return_tokens_as_token_ids": False} | more
    began_s = time.monotonic()
    connection.request("POST", f"{parts.path}/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()[-500:]
    times_s: list[float] = []
    tokens = 0
    for line in answer:
        if line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            got = len(choices[0].get("token_ids") or ()) if choices else 0
            if got:
                tokens += got
                times_s.append(time.monotonic() - began_s)
    connection.close()
    assert times_s, "no token came"
    return Streamed(times_s[0], times_s[-1], tokens)
