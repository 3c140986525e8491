"""When prompts were all in HOST, inside the engine core of a server that `bench_pd.py` watches."""

from __future__ import annotations

import time
from typing import Any

from tests.engines.vllm.harness.core_access import _half

_seen: dict[str, float] = {}  # request → when vLLM asked for it first
_taken: list[tuple[float, float]] = []


def watch(core: Any) -> None:
    """From now on, note when vLLM is told that a prompt's tokens can be loaded."""
    loads = _half(core).loads
    matched = loads.matched

    def noted(request: Any, computed_tokens: int) -> int | None:
        seen_s = _seen.setdefault(request.request_id, time.monotonic())
        tokens = matched(request, computed_tokens)
        if tokens:
            _taken.append((seen_s, time.monotonic()))
        return tokens

    loads.matched = noted


def taken(core: Any) -> list[tuple[float, float]]:
    """When each prompt was asked for first, and when it was there; `time.monotonic` of this machine."""
    return _taken
