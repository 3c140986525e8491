"""What tests ask of the engine core and of the instance in it, called in the core's process: plain values in
and out.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbm.core.ids import Tier, split_hashes
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.resolved import find_resolved
from kvbm.engines.vllm.step_meter import StepMeter


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


def salvaged(core: Any, wait_s: float) -> bool:
    """Wait until nothing that NVME's slots prove comes back any more."""
    manager, deadline = _manager(core), time.monotonic() + wait_s
    while not manager._salvage.is_over:
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


class _Unmeasured(StepMeter):
    """It never knows how quickly prompts are computed."""

    @property
    def tokens_per_s(self) -> float | None:
        """None."""
        return None


def reads_always(core: Any) -> None:
    """Let the instance read whatever others have, also where computing it is quicker, as of a small model it is."""
    _half(core)._meter = _Unmeasured()
    _manager(core).report_load(0, 0, None)


def counted(core: Any) -> dict[str, int]:
    """The instance's own counters, and blocks hit by tier."""
    stats = _manager(core).stats()
    hits = {f"hits_{tier.name}": count for tier, count in stats.hit_blocks.items()}
    return hits | {
        "peer_hits": stats.peer_hits,
        "corrupt_blocks": stats.corrupt_blocks,
        "failed_copies": stats.failed_copies,
        "late_copies": stats.late_copies,
        "verified_reads": stats.verified_reads,
        "engine_stores": stats.engine_stores,
    }


def kept_kv_events(core: Any) -> list[dict[str, Any]]:
    """vLLM's KV events so far, those that name blocks."""
    return [
        {
            "kind": type(event).__name__,
            "medium": event.medium,
            "hashes": list(event.block_hashes),
            "tokens": list(getattr(event, "token_ids", ())),
            "block_size": getattr(event, "block_size", 0),
            "extra_keys": list(getattr(event, "extra_keys", None) or ()),
            "kind_of_group": getattr(event, "kv_cache_spec_kind", None),
        }
        for event in core.scheduler.kv_event_publisher.__dict__.get("kept", ())
        if hasattr(event, "block_hashes")
    ]


def refusal(core: Any) -> str:
    """Why the connector has stopped serving; "" while it serves."""
    return str(_half(core).refusal)


def resolved(core: Any, ranks: int) -> list[Any] | None:
    """What the ranks have said of what vLLM resolved for them."""
    return find_resolved(core.scheduler.connector._meeting, ranks)


def touched(core: Any) -> tuple[int, int]:
    """The number of the step planned last, and how many blocks of HBM have been a request's."""
    touches = _half(core)._touches
    blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return touches.step, sum(touches.of([id]) != 0 for id in range(blocks))


def is_serving(core: Any) -> bool:
    """Whether kvbm has an instance in this engine."""
    return _half(core) is not None


def has_all_hosts(core: Any) -> bool:
    """Whether all of the engine's hosts have HOST."""
    return bool(_half(core)._is_everywhere)


def instance(core: Any) -> str:
    """What the instance is called."""
    return str(_manager(core).instance)


def position(core: Any) -> tuple[str, int, int]:
    """The instance, its epoch and how far it has recorded."""
    manager = _manager(core)
    return str(manager.instance), int(manager.epoch), int(manager.applied())


@contextmanager
def _asked(core: Any, tokens: list[int], salt: str = "") -> Iterator[Any]:
    """What the scheduler's half makes of a request with these tokens."""
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
    try:
        yield half.requests.state_of(request)
    finally:
        half.finished(request, ((),))


def hashes(core: Any, tokens: list[int], salt: str) -> tuple[str, str]:
    """What a request would be looked up by: its namespace, and the packed hashes of its whole blocks, both as hex."""
    with _asked(core, tokens, salt) as state:
        packed = state.hashes(0, 0, len(state.request.block_hashes), _half(core)._derive)
        return state.namespaces[0].id.hex(), packed.hex()


def held_of(core: Any, tokens: list[int]) -> list[tuple[bool, int, list[bool]]]:
    """Of each KV group whether it has states, the tokens of a block, and which whole blocks of a prompt a tier
    holds.
    """
    half, found = _half(core), []
    with _asked(core, tokens) as state:
        for index, group in enumerate(half._groups):
            packed = state.hashes(index, 0, len(tokens) // group.block_tokens, half._derive)
            holders = half.manager.holders(packed, state.namespaces[index].id)
            found.append((group.is_state, group.block_tokens, [holder != ABSENT for holder in holders]))
    return found


def object_names(core: Any, tokens: list[int]) -> list[tuple[int, int | None, list[str]]]:
    """Of each KV group the tokens of a block, how many blocks are read back (None: all), and what the objects of a
    prompt's blocks are named.
    """
    half, found = _half(core), []
    with _asked(core, tokens) as state:
        for index, group in enumerate(half._groups):
            packed = state.hashes(index, 0, len(tokens) // group.block_tokens, half._derive)
            names = half.manager.pools.object.names(state.namespaces[index].id, split_hashes(packed))
            found.append((group.block_tokens, group.window_blocks, names))
    return found


def drop_some(core: Any, seed: str, share: float) -> int:
    """Withdraw a share of all blocks, drawn at random, from every tier that holds them; gives how many residencies that
    were.
    """
    manager, chosen = _manager(core), random.Random(seed)
    blocks = sorted({bytes(one) for tier in manager.pools.slots for one in manager.held(tier)})
    lost = b"".join(block for block in blocks if chosen.random() < share)
    return sum(manager.evict(tier, lost) for tier in manager.pools.slots)


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
