"""What tests reach inside an API server's engine: its workers have this class mixed in (`--worker-extension-cls`), and
vLLM's development mode calls its methods over HTTP.

The worker is in the process and the thread of the engine core (`server._ONE_PROCESS`).
"""

from __future__ import annotations

import sys
from typing import Any

from kvbm.core.ids import Tier
from tests.engines.vllm.harness.access import TestAccess
from tests.engines.vllm.harness.child import called
from tests.engines.vllm.harness.core_access import _half, _manager


class Inside(TestAccess):
    """Methods of the worker."""

    def in_core(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Call "module:name" with vLLM's EngineCore."""
        return {"said": called(name)(_core(), *arguments)}


def _core() -> Any:
    """The engine core, whose thread has called this."""
    frame = sys._getframe()
    while frame is not None:
        one = frame.f_locals.get("self")
        if hasattr(one, "scheduler") and hasattr(one, "model_executor"):
            return one
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("this worker is not in the engine core's process")


def forget(core: Any) -> bool:
    """Empty vLLM's prefix cache and overwrite all device KV with garbage; False while blocks are in use."""
    if core.scheduler.has_requests() or not core.scheduler.reset_prefix_cache():
        return False
    core.collective_rpc("overwrite_kv")
    return True


def left(core: Any) -> dict[str, Any]:
    """What is left of requests, by name: in vLLM, in the connector, in pins, keeps, copies and leases.

    Empty once all are over.
    """
    half, stats = _half(core), _manager(core).stats()
    found = {
        "requests": waiting(core),
        "states": list(half.requests.states),
        "copies": stats.copies_in_flight,
        "lent": 0 if stats.lent is None else stats.lent.blocks_lent_now,
        "kept": sum(stats.kept_blocks.values()),
        "pinned": sum(
            counts.held - counts.evictable + counts.allocated
            for tier, counts in stats.pools.items()
            if tier != Tier.HBM
        ),
        "steps": core.scheduler.has_requests(),
    }
    return {name: what for name, what in found.items() if what}


def waiting(core: Any) -> dict[str, list[str]]:
    """vLLM's requests by status."""
    found: dict[str, list[str]] = {}
    for name, request in core.scheduler.requests.items():
        found.setdefault(request.status.name, []).append(name)
    return found


def lent_bytes(core: Any) -> int:
    """Bytes of blocks that were lent to others so far, on whichever way."""
    lent = _manager(core).stats().lent
    return (
        0 if lent is None else lent.memory_bytes + lent.rdma_bytes + lent.nixl_bytes + lent.unix_bytes + lent.tcp_bytes
    )


def block_bytes(core: Any) -> int:
    """Bytes of a block."""
    return int(_manager(core).pools.slots[Tier.HOST].block_bytes)


class _Tampered:
    """A worker's copy queue with its loads in a test's hand."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.is_held = self.is_hollow = False
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def scatter(self, id: int, slots: Any, rows: Any, at: Any) -> None:
        """Bring nothing, where that is asked for, and say that all has come."""
        if self.is_hollow or self.is_held:
            self._kept.append((id, slots, rows, at))
        else:
            self.queue.scatter(id, slots, rows, at)

    def ended(self) -> list[Any]:
        """With those that have brought nothing."""
        hollow = []
        if not self.is_held:
            for id, *run in self._kept:
                if self.is_hollow:
                    hollow.append((id, None, 0.0, ""))
                else:
                    self.queue.scatter(id, *run)
            self._kept = []
        return [*self.queue.ended(), *hollow]


def loads_are_hollow(core: Any, so: bool) -> None:
    """From now on, what is loaded is claimed and does not come."""
    _tampered().is_hollow = so


def loads_are_held(core: Any, so: bool) -> None:
    """No load begins while it is so."""
    _tampered().is_held = so


def answers_are_held(core: Any, so: bool) -> None:
    """Every request is told to ask again while it is so."""
    loads = _half(core).loads
    loads.__dict__.pop("matched", None)
    if so:

        def again(request: Any, computed_tokens: int) -> None:
            loads.is_asked_again = True

        loads.matched = again


def _tampered() -> _Tampered:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    if not isinstance(worker._queue, _Tampered):
        worker._queue = _Tampered(worker._queue)
    return worker._queue
