"""What an engine holds, by its instance's ledger and by vLLM's own prefix cache: called in the core's process, plain
values out.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Any, NamedTuple

from kvbm.core.ids import HASH_BYTES, Tier
from tests.engines.vllm.harness.core_access import _half, _manager
from tests.engines.vllm.harness.engine import Engine

_GROUP_BYTES = 4  # vLLM appends the group's number to a hash


class Holding(NamedTuple):
    """One engine's word.

    Attributes:
        instance, epoch, offset: how far its stream goes.
        digest: of all it holds at that offset, 16 hex digits.
        tiers: hashes by tier, as hex.
        prefix_cache: hashes of what vLLM would find in HBM, read from vLLM and derived here a second way.
    """

    instance: str
    epoch: int
    offset: int
    digest: str
    tiers: dict[str, frozenset[str]]
    prefix_cache: frozenset[str]


def holding_of(engine: Engine) -> Holding:
    """All of it, of an engine with one KV group and one tenant."""
    *position, tiers, prefix_cache = engine.ask("in_core", f"{__name__}:_holding")
    return Holding(*position, {tier: frozenset(hashes) for tier, hashes in tiers.items()}, frozenset(prefix_cache))


def _holding(core: Any) -> tuple[str, int, int, str, dict[str, list[str]], list[str]]:
    manager = _manager(core)
    offset, digest = manager.digest()
    tiers = {tier.name: [bytes(one).hex() for one in manager.held(tier)] for tier in (Tier.HBM, *manager.pools.slots)}
    keys = core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    root = _root(core)
    derived = [hashlib.sha256(root + key[:-_GROUP_BYTES]).digest()[:HASH_BYTES].hex() for key in keys]
    return manager.instance, manager.epoch, offset, f"{digest:016x}", tiers, derived


def _root(core: Any) -> bytes:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    half = _half(core)
    request = Request(f"asked-{uuid.uuid4().hex}", [1], SamplingParams(), None)
    try:
        return bytes(half.requests.state_of(request).namespaces[0].root)
    finally:
        half.finished(request, ((),))
