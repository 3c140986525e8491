"""A part of `kvbm bench bridge`: what vLLM's scheduler pays for our tiers in its own KV events
(`publish.engine_events`).

The manager and `TierEvents` are the real ones. Where vLLM is installed, so are its requests, extra keys and events;
else those are left out, and a note says so.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvbm.assembly import NATIVE, open_engine_manager, told_tiers
from kvbm.bench.measure import Found, Sample, row_of, timed
from kvbm.config import (
    HbmSettings,
    HostSettings,
    InstanceSettings,
    JournalSettings,
    NatsSettings,
    PoolsSettings,
    Settings,
)
from kvbm.core.ids import NO_PARENT, Namespace, Tier
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup
from kvbm.engines.vllm.tier_events import ExtraKeys, TierEvents, ToldBlocks
from kvbm.manager.engine_hbm import EngineHbmManager

_BLOCKS, _BLOCK_TOKENS, _BLOCK_BYTES = 1000, 16, 512
_VOCABULARY = 128_000


class _Words(NamedTuple):
    """How a request is made, what its blocks are hashed with, and what is told of them."""

    request: Callable[[int, list[int], list[bytes]], Any]
    extra_keys: ExtraKeys | None
    event: Callable[[ToldBlocks], object]


def bench_engine_events(samples: int, seed: int) -> Found:
    """Nanoseconds of the scheduler's thread a block that HOST gains, and that it loses; a step in which nothing
    changes.
    """
    rng = np.random.default_rng(seed)
    is_vllm_here = importlib.util.find_spec("vllm") is not None
    words = _of_vllm() if is_vllm_here else _Words(_plain_request, None, lambda told: told)
    prompts = 10 * samples
    with tempfile.TemporaryDirectory() as folder:
        space = Namespace(model="bench", revision="r1", block_tokens=_BLOCK_TOKENS)
        with open_engine_manager(_settings(folder, prompts), [space], _BLOCK_BYTES, "bench") as manager:
            manager.follow_objects()
            events = TierEvents(partial(manager.holders, objects=True), told_tiers, words.extra_keys)
            gained, idle, lost = [], [], []
            for number in range(prompts):
                digests = [rng.bytes(32) for _ in range(_BLOCKS)]
                tokens = rng.integers(_VOCABULARY, size=_BLOCKS * _BLOCK_TOKENS).tolist()
                request = words.request(number, tokens, digests)
                hashes = _hold(manager, GroupNamespace(space.id, space.root()), digests)
                gained.append(timed(partial(_learned, events, words, request, hashes)))
            idle = [timed(partial(_told, events, words)) for _ in range(prompts)]
            known = [bytes(one) for one in manager.held(Tier.HOST)]
            manager.evict(Tier.HOST, b"".join(known))
            told: list[int] = []
            while not told or told[-1]:
                lost.append(timed(lambda: told.append(_told(events, words))))
    rows = [
        row_of("scheduler: a block that HOST gains is told, prompts of 1,000 blocks", "ns/block", _each_ns(gained)),
        row_of(
            "… a block that it loses",
            "ns/block",
            [one.cpu_s / blocks * 1e9 for one, blocks in zip(lost, told, strict=True) if blocks],
        ),
        row_of("… a step in which nothing changes, 1,024 of many blocks looked at", "us", _us(idle)),
    ]
    rows[0].goal = rows[1].goal = "1000"
    note = "vLLM is not installed here: its requests, extra keys and event objects are no part of the scheduler's cost"
    return Found(rows, {"engine_event_ns_per_block": rows[0].value}, () if is_vllm_here else (note,))


def _settings(folder: str, prompts: int) -> Settings:
    return replace(
        Settings(),
        instance=InstanceSettings(id="bench", data_dir=folder),
        pools=PoolsSettings(
            hbm=HbmSettings(owner="engine", slots=2 * _BLOCKS), host=HostSettings(slots=(prompts + 1) * _BLOCKS)
        ),
        nats=NatsSettings(enabled=False),
        journal=JournalSettings(in_memory=True),
    )


def _hold(manager: EngineHbmManager, space: GroupNamespace, digests: Sequence[bytes]) -> bytes:
    """Have HOST hold the blocks of a prompt; gives our hashes of them."""
    hashes = NATIVE.derived_hashes(space.root, digests)
    manager.engine_stored(space.id, NO_PARENT, 0, hashes)
    store = manager.begin_store(space.id, NO_PARENT, 0, hashes)
    assert store is not None
    manager.end_store(store, [True] * len(digests), np.zeros(len(digests), dtype=np.uint32))
    manager.engine_removed(hashes)
    return hashes


def _learned(events: TierEvents, words: _Words, request: Any, hashes: bytes) -> None:
    """All that the scheduler does for a store that has ended, up to vLLM's events of it."""
    group = KvGroup(0, _BLOCK_TOKENS, _BLOCK_TOKENS)
    events.learn(hashes, events.run_of(request, group, 0, _BLOCKS))
    assert _told(events, words) >= _BLOCKS


def _told(events: TierEvents, words: _Words) -> int:
    """A step's events; gives of how many blocks they tell."""
    told = events.take()
    for one in told:
        words.event(one)
    return sum(one.end - one.begin for one in told)


def _each_ns(samples: Sequence[Sample]) -> list[float]:
    return [one.cpu_s / _BLOCKS * 1e9 for one in samples[1:]]


def _us(samples: Sequence[Sample]) -> list[float]:
    return [one.cpu_s * 1e6 for one in samples]


def _plain_request(number: int, tokens: list[int], digests: list[bytes]) -> Any:
    return SimpleNamespace(all_token_ids=tokens, block_hashes=digests, lora_request=None)


def _of_vllm() -> _Words:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from kvbm.engines.vllm.kv_events import LayerKind, extra_keys_of, kv_event

    def request(number: int, tokens: list[int], digests: list[bytes]) -> Any:
        made = Request(f"request-{number}", tokens, SamplingParams(max_tokens=1), None, cache_salt="a salt")
        made.block_hashes = digests
        return made

    kinds = [LayerKind("full_attention", None)]
    return _Words(request, extra_keys_of, lambda told: kv_event(told, kinds, "kvbm"))
