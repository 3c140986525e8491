"""What tests ask of the engine core and of the instance in it, called in the core's process: plain values in and out."""

from __future__ import annotations

import time
import uuid
from typing import Any

from kvbm.core.ids import Tier


def settled(core: Any, wait_s: float) -> bool:
    """Wait until nothing is on its way to a colder tier, and all that was decided is in the journal."""
    manager, deadline = _manager(core), time.monotonic() + wait_s
    if not manager.settle(wait_s):
        return False
    while manager.durable() < manager.applied():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def held(core: Any) -> dict[str, int]:
    """Blocks of each own tier."""
    manager = _manager(core)
    return {tier.name: len(manager.held(tier)) for tier in (Tier.HBM, *manager.pools.slots)}


def drop(core: Any, *tiers: str) -> int:
    """Withdraw all that these tiers hold, so that the next hit is a colder one's; gives how many blocks that were."""
    manager = _manager(core)
    return sum(manager.evict(Tier[name], b"".join(manager.held(Tier[name]))) for name in tiers)


def counted(core: Any) -> dict[str, int]:
    """The instance's own counters, and blocks hit by tier."""
    stats = _manager(core).stats()
    hits = {f"hits_{tier.name}": count for tier, count in stats.hit_blocks.items()}
    return hits | {
        "corrupt_blocks": stats.corrupt_blocks,
        "failed_copies": stats.failed_copies,
        "late_copies": stats.late_copies,
        "verified_reads": stats.verified_reads,
        "engine_stores": stats.engine_stores,
    }


def refusal(core: Any) -> str:
    """Why the connector has stopped serving; "" while it serves."""
    return str(_half(core).refusal)


def position(core: Any) -> tuple[str, int, int]:
    """The instance, its epoch and how far it has recorded."""
    manager = _manager(core)
    return manager.instance, manager.epoch, manager.applied


def hashes(core: Any, tokens: list[int], salt: str) -> tuple[str, str]:
    """What a request would be looked up by: its namespace, and the packed hashes of its whole blocks, both as hex."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    half = _half(core)
    request = Request(
        f"asked-{uuid.uuid4().hex}",
        list(tokens),
        SamplingParams(),
        None,
        cache_salt=salt or None,
        block_hasher=core.request_block_hasher,
    )
    state = half.requests.state_of(request)
    try:
        packed = state.hashes(0, 0, len(request.block_hashes), half._derive)
        return state.namespaces[0].id.hex(), packed.hex()
    finally:
        half.finished(request, ((),))


def in_pod(core: Any, tokens: list[int], salt: str) -> int:
    """Blocks of a prompt, from the first on, that other instances' files of the pod are known to have."""
    namespace, packed = hashes(core, tokens, salt)
    runs = _manager(core).pools.pod.find(bytes.fromhex(namespace), bytes.fromhex(packed))
    return sum(len(run.slots) for run in runs)


def is_asynchronous(core: Any) -> bool:
    """Whether the engine schedules a step ahead."""
    return bool(core.vllm_config.scheduler_config.async_scheduling) and "Async" in type(core.scheduler).__name__


def stuck(core: Any, seconds: float) -> None:
    """Do nothing for so long."""
    time.sleep(seconds)


def _connector(core: Any) -> Any:
    connector = core.scheduler.connector
    return next((one for one in getattr(connector, "_connectors", ()) if hasattr(one, "give_up")), connector)


def _half(core: Any) -> Any:
    return _connector(core)._scheduler


def _manager(core: Any) -> Any:
    return _half(core).manager
