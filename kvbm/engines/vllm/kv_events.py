"""What `tier_events` tells, in the words of vLLM's own KV events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvbm.core.ids import Tier
from kvbm.engines.vllm.tier_events import ToldBlocks

_INT_BYTES, _INT = 8, ">u8"  # the end of a hash, which events have as an integer
_MEDIA = {Tier.HOST: MEDIUM_CPU, Tier.NVME: MEDIUM_STORAGE, Tier.OBJECT: MEDIUM_STORAGE}


def are_wanted(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class LayerKind(NamedTuple):
    """What layers a KV group is of, in vLLM's words."""

    name: str
    sliding_window: int | None


def kinds_of(kv_cache_config: Any) -> Sequence[LayerKind]:
    """The kind of each KV group of the engine."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [LayerKind(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def extra_keys_of(request: Any, begin: int, end: int, block_tokens: int) -> Sequence[Any] | None:
    """What vLLM's hashes of a request's blocks are made of besides tokens, as its events have it;

    None where that is nothing.
    """
    if not (request.mm_features or request.lora_request or request.prompt_embeds is not None):
        return _salts_of(request, begin, end, block_tokens)
    found, image = [], 0
    for at in range(begin, end):
        keys, image = generate_block_hash_extra_keys(request, at * block_tokens, (at + 1) * block_tokens, image)
        found.append(keys)
    return to_event_extra_keys(found) if any(found) else None


def _salts_of(request: Any, begin: int, end: int, block_tokens: int) -> Sequence[Any] | None:
    """The same of a request that has nothing but a salt, which is the first block's: others need not be asked for."""
    if begin or not request.cache_salt:
        return None
    first, _ = generate_block_hash_extra_keys(request, 0, block_tokens, 0)
    keys: Sequence[Any] | None = to_event_extra_keys([first] + [None] * (end - 1))
    return keys


def _in_events(digests: Sequence[Any]) -> list[Any]:
    """Hashes as vLLM's events have them. vLLM's own function looks the form up for each: here the first tells it."""
    first, size = maybe_convert_block_hash(digests[0]), len(digests[0])
    if isinstance(first, int) and size % _INT_BYTES == 0:
        packed = b"".join(digests)
        if len(packed) == size * len(digests):
            words = size // _INT_BYTES
            found: list[Any] = np.frombuffer(packed, _INT)[words - 1 :: words].tolist()
            if found[0] == first:
                return found
    return [maybe_convert_block_hash(digest) for digest in digests]


def kv_event(told: ToldBlocks, kinds: Sequence[LayerKind], ownership: str = "") -> BlockStored | BlockRemoved:
    """An event of vLLM's.

    Args:
        kinds: of the engine's KV groups.
        ownership: whose blocks in objects are.
    """
    owned = {"ownership": ownership} if ownership and told.tier == Tier.OBJECT else {}
    run, begin, end = told.run, told.begin, told.end
    hashes = _in_events(run.digests[begin:end])
    medium, group = _MEDIA[told.tier], run.group
    if not told.is_held:
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group.id, **owned)
    parent = run.digests[begin - 1] if begin else run.parent
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(parent) if parent else None,
        token_ids=run.tokens[begin * group.block_tokens : end * group.block_tokens].tolist(),
        block_size=group.block_tokens,
        lora_id=run.lora[0] if run.lora else None,
        lora_name=run.lora[1] if run.lora else None,
        medium=medium,
        extra_keys=[None] * (end - begin) if run.extra_keys is None else list(run.extra_keys[begin:end]),
        group_idx=group.id,
        kv_cache_spec_kind=kinds[group.id].name,
        kv_cache_spec_sliding_window=kinds[group.id].sliding_window,
        **owned,
    )
