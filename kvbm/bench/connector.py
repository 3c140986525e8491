"""`kvbm bench connector`: what the vLLM connector costs the engine's scheduler, without the engine.

The scheduler's half is the real one over a real manager whose HOST pool holds what is asked for; requests and blocks are plain objects with the
attributes of vLLM's that it reads. Each question is asked for a prompt that was never seen before, so hashing it anew is part.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvbm.assembly import NATIVE, open_engine_manager
from kvbm.bench.measure import Row, row_of
from kvbm.config import (
    HbmSettings,
    HostSettings,
    InstanceSettings,
    JournalSettings,
    NatsSettings,
    PoolsSettings,
    Settings,
)
from kvbm.core.ids import NO_PARENT, Namespace
from kvbm.engines.vllm.metadata import HostShare, Ranks
from kvbm.engines.vllm.requests import Group, GroupNamespace
from kvbm.engines.vllm.scheduler import Scheduler

_BLOCKS = 1000
_BLOCK_TOKENS = 16
_BLOCK_BYTES = 512
_RUNNING = 64


class _Request:
    """The attributes of a vLLM request that the scheduler's half reads."""

    def __init__(self, number: int, hashes: list[bytes]) -> None:
        self.request_id = f"request-{number}"
        self.block_hashes = hashes
        self.num_prompt_tokens = self.num_tokens = len(hashes) * _BLOCK_TOKENS + 1
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: dict[str, Any] | None = None


def bench_connector(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """A prompt of 1,000 blocks that HOST holds, at first sight and asked again; one it lacks; a step in which nothing happens."""
    rng = np.random.default_rng(seed)
    prompts = 20 * samples
    with tempfile.TemporaryDirectory() as folder:
        namespace = Namespace(model="bench", revision="r1", block_tokens=_BLOCK_TOKENS)
        settings = replace(
            Settings(),
            instance=InstanceSettings(id="bench", data_dir=folder),
            pools=PoolsSettings(
                hbm=HbmSettings(owner="engine", slots=2 * _BLOCKS), host=HostSettings(slots=prompts * _BLOCKS)
            ),
            nats=NatsSettings(enabled=False),
            journal=JournalSettings(in_memory=True),
        )
        with open_engine_manager(settings, [namespace], _BLOCK_BYTES, "bench") as manager:
            space = GroupNamespace(namespace.id, namespace.root())
            group = Group(0, _BLOCK_TOKENS, _BLOCK_TOKENS)
            host = HostShare(os.getpid(), -1, 0, prompts * _BLOCKS, _BLOCK_BYTES, _BLOCK_BYTES)
            scheduler = Scheduler(
                manager, NATIVE, [group], lambda _: [space], Ranks(1, 1, _BLOCK_BYTES), host, _BLOCK_TOKENS
            )
            known = [[rng.bytes(32) for _ in range(_BLOCKS)] for _ in range(prompts)]
            for digests in known:
                hashes = NATIVE.derived_hashes(space.root, digests)
                manager.engine_stored(space.id, NO_PARENT, 0, hashes)
                store = manager.begin_store(space.id, NO_PARENT, 0, hashes)
                assert store is not None
                manager.end_store(store, [True] * _BLOCKS, np.zeros(_BLOCKS, dtype=np.uint32))
                manager.engine_removed(hashes)
            held = [_Request(number, digests) for number, digests in enumerate(known)]
            absent = [_Request(prompts + number, [rng.bytes(32) for _ in range(_BLOCKS)]) for number in range(prompts)]
            first, again, missed = [], [], []
            gc.collect()
            gc.disable()  # vLLM freezes its heap; a collection here would be of the benchmark's own objects
            try:
                for request in held:
                    request.block_hashes = [
                        bytes(bytearray(digest)) for digest in request.block_hashes
                    ]  # as just hashed
                    first.append(_asked_us(scheduler, request, _BLOCKS * _BLOCK_TOKENS))
                    again.append(_asked_us(scheduler, request, _BLOCKS * _BLOCK_TOKENS))
                for request in absent:
                    request.block_hashes = [bytes(bytearray(digest)) for digest in request.block_hashes]
                    missed.append(_asked_us(scheduler, request, 0))
                for request in (*held, *absent):
                    scheduler.finished(request, [[]])
                idle = [_step_us(scheduler, {}) for _ in range(10 * prompts)]
                running = absent[:_RUNNING]
                for request in running:
                    scheduler.requests.state_of(request).stored = [len(request.block_hashes)]
                    request.num_computed_tokens = request.num_tokens
                scheduled = {request.request_id: 1 for request in running}
                scheduler.plan(scheduled, 2 * len(scheduled), ())
                decoding = [_step_us(scheduler, scheduled) for _ in range(10 * prompts)]
            finally:
                gc.enable()
    rows = [
        row_of(f"asked for a prompt of {_BLOCKS:,} blocks, all in HOST, at first sight", "us", first),
        row_of("... and asked again", "us", again),
        row_of("... for one of which nothing is held", "us", missed),
        row_of("a step with no request", "us", idle),
        row_of(f"a step of {_RUNNING} requests that fill no block", "us", decoding),
    ]
    for row, goal in zip(rows, ("75", "5", "", "5", ""), strict=True):
        row.goal = goal
    return rows, {
        "connector_first_us": rows[0].value,
        "connector_again_us": rows[1].value,
        "connector_step_us": rows[3].value,
    }


def _asked_us(scheduler: Scheduler, request: _Request, expected: int) -> float:
    begin = time.perf_counter()
    found = scheduler.loads.matched(request, 0)
    taken = time.perf_counter() - begin
    assert found == expected, f"{found} tokens found of {expected}"
    return taken * 1e6


def _step_us(scheduler: Scheduler, scheduled: dict[str, int]) -> float:
    begin = time.perf_counter()
    scheduler.plan(scheduled, len(scheduled), ())
    return (time.perf_counter() - begin) * 1e6
