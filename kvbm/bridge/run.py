"""The bridge's one thread: waits for all sources together and gives each its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvbm.bridge.source import BridgedSource
from kvbm.safe_log import SafeLog

log = SafeLog()

_LOOK_S = 0.02  # between two looks at what publishers and readers have said
_CLOSE_S = 5.0


def run_sources(zmq: Any, sources: Sequence[BridgedSource], goes_on: Callable[[], bool]) -> None:
    """Give sources their turns until told otherwise, then end their streams.

    Args:
        zmq: the module.
        sources: more may be added at the end by `goes_on`.
        goes_on: asked about fifty times a second.
    """
    try:
        due: dict[int, float] = {}
        while goes_on():
            due.update((number, 0.0) for number in range(len(due), len(sources)))
            ready = _wait(zmq, sources, min(due.values(), default=float("inf")))
            now_s = time.monotonic()
            for number, source in enumerate(sources):
                instance = source.instance
                if number in ready or now_s >= due[number] or (instance is not None and instance.wants_turn):
                    wake_s, has_more = source.turn(now_s)
                    due[number] = now_s if has_more else wake_s
    finally:
        for source in sources:
            if not source.close(_CLOSE_S):
                log.warning("bridge.closed_unpublished", source=source.name, remedy="the next start begins a new epoch")


def _wait(zmq: Any, sources: Sequence[BridgedSource], due_s: float) -> set[int]:
    """Wait until something comes or is due. Gives which sources have something."""
    poller = zmq.Poller()
    of: dict[Any, int] = {}
    for number, source in enumerate(sources):
        for socket in source.sockets():
            poller.register(socket, zmq.POLLIN)
            of[socket] = number
    wait_s = min(_LOOK_S, max(0.0, due_s - time.monotonic()))
    return {of[socket] for socket, _ in poller.poll(int(wait_s * 1000))}
