"""`kvbm bench connector`: what the vLLM connector costs the engine's scheduler, without the engine.

The scheduler's half is the real one over a real manager whose HOST pool holds what is asked for; requests and blocks
are plain objects with the attributes of vLLM's that it reads. Models with several KV groups have what counts of each in
HOST. Each question is asked for a prompt that was never seen before, so hashing it anew is part.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
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
from kvbm.engines.vllm.forwards import Taken
from kvbm.engines.vllm.metadata import HostShare
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.manager.engine_hbm import EngineHbmManager

_BLOCKS = 1000
_BLOCK_TOKENS = 16
_BLOCK_BYTES = 512
_RUNNING = 64
_GROUPS, _WINDOW_BLOCKS = 4, 64
_HEAP_PIECES, _HEAP_PIECE_BYTES = 512, 64 << 10
_LAST_STATE = 979  # the block behind which a prompt's last state is held


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
    """A prompt of 1,000 blocks that HOST holds, at first sight and asked again; one it lacks; steps in which nothing
    happens, and in which a request comes; its end.
    """
    rng = np.random.default_rng(seed)
    prompts, of_groups = 20 * samples, 10 * samples
    with tempfile.TemporaryDirectory() as folder:
        namespaces = [
            Namespace(model=f"bench-{at}", revision="r1", block_tokens=_BLOCK_TOKENS) for at in range(2 * _GROUPS - 1)
        ]
        settings = replace(
            Settings(),
            instance=InstanceSettings(id="bench", data_dir=folder),
            pools=PoolsSettings(
                hbm=HbmSettings(owner="engine", slots=2 * _BLOCKS),
                host=HostSettings(slots=(prompts + 3 * of_groups) * _BLOCKS),
            ),
            nats=NatsSettings(enabled=False),
            journal=JournalSettings(in_memory=True),
        )
        with open_engine_manager(settings, namespaces, _BLOCK_BYTES, "bench") as manager:
            spaces = [GroupNamespace(one.id, one.root()) for one in namespaces]
            space, group = spaces[0], KvGroup(0, _BLOCK_TOKENS, _BLOCK_TOKENS)
            windows = [KvGroup(at, _BLOCK_TOKENS, _BLOCK_TOKENS, _WINDOW_BLOCKS) for at in range(1, _GROUPS)]
            states = [one._replace(window_blocks=1, is_state=True) for one in windows]
            ranks = Ranks((Stage(_BLOCK_BYTES),))
            host = HostShare(os.getpid(), -1, 0, prompts * _BLOCKS, ranks)
            scheduler = Scheduler(manager, NATIVE, [group], lambda _: [space], ranks, host, _BLOCK_TOKENS)
            known = [[rng.bytes(32) for _ in range(_BLOCKS)] for _ in range(prompts)]
            for digests in known:
                _hold(manager, space, digests)
            hybrids = []
            for some, of, start, end in (
                (windows, spaces[1:_GROUPS], _BLOCKS - _WINDOW_BLOCKS, _BLOCKS),
                (states, spaces[_GROUPS:], _LAST_STATE, _LAST_STATE + 1),
            ):
                asked = [[rng.bytes(32) for _ in range(_BLOCKS)] for _ in range(of_groups)]
                _hold_groups(manager, [space, *of], asked, start, end)
                several = Scheduler(
                    manager, NATIVE, [group, *some], lambda _, of=of: [space, *of], ranks, host, _BLOCK_TOKENS
                )
                hybrids.append((several, asked, end))
            held = [_Request(number, digests) for number, digests in enumerate(known)]
            absent = [_Request(prompts + number, [rng.bytes(32) for _ in range(_BLOCKS)]) for number in range(prompts)]
            first, again, missed = [], [], []
            blocks = list(range(_BLOCKS, 2 * _BLOCKS))  # of HBM, numbers that Python does not keep ready
            heap_end = _used_heap()
            gc.collect()
            gc.disable()  # vLLM freezes its heap; a collection here would be of the benchmark's own objects
            try:
                for request in held:
                    request.block_hashes = [
                        bytes(bytearray(digest)) for digest in request.block_hashes
                    ]  # as just hashed
                    first.append(_asked_us(scheduler, request, _BLOCKS * _BLOCK_TOKENS))
                    again.append(_asked_us(scheduler, request, _BLOCKS * _BLOCK_TOKENS))
                parts: list[list[float]] = []
                for hybrid, asked, blocks_held in hybrids:
                    parts.append([])
                    for number, digests in enumerate(asked):
                        request = _Request(2 * prompts + number, [bytes(bytearray(digest)) for digest in digests])
                        parts[-1].append(_asked_us(hybrid, request, blocks_held * _BLOCK_TOKENS))
                for request in absent:
                    request.block_hashes = [bytes(bytearray(digest)) for digest in request.block_hashes]
                    missed.append(_asked_us(scheduler, request, 0))
                coming, ending = [], []
                for request in (*held, *absent):
                    coming.append(_step_us(scheduler, {}, [(request.request_id, [blocks])]))
                    ending.append(_ended_us(scheduler, request, blocks))
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
                del heap_end
    return _told(first, again, missed, idle, decoding, coming, ending, parts)


def _told(
    first: list[float],
    again: list[float],
    missed: list[float],
    idle: list[float],
    decoding: list[float],
    coming: list[float],
    ending: list[float],
    parts: list[list[float]],
) -> tuple[list[Row], dict[str, float]]:
    """What was measured, in rows and by name."""
    rows = [
        row_of(f"asked for a prompt of {_BLOCKS:,} blocks, all in HOST, at first sight", "us", first),
        row_of("... and asked again", "us", again),
        row_of("... for one of which nothing is held", "us", missed),
        row_of("a step with no request", "us", idle),
        row_of(f"a step of {_RUNNING} requests that fill no block", "us", decoding),
        row_of(f"a step in which a request of {_BLOCKS:,} blocks comes", "us", coming),
        row_of("... and its end", "us", ending),
        row_of(
            f"a prompt of {_BLOCKS:,} blocks at first sight, {_GROUPS} KV groups, {_GROUPS - 1} of sliding windows",
            "us",
            parts[0],
        ),
        row_of(
            f"... {_GROUPS - 1} of states, the last {_BLOCKS - _LAST_STATE - 1} blocks before its end", "us", parts[1]
        ),
    ]
    for row, goal in zip(rows, ("75", "5", "", "5", "", "", "", "120", "120"), strict=True):
        row.goal = goal
    return rows, {
        "connector_first_us": rows[0].value,
        "connector_again_us": rows[1].value,
        "connector_step_us": rows[3].value,
        "connector_coming_us": rows[5].value,
        "connector_ending_us": rows[6].value,
        "connector_first_of_groups_us": rows[7].value,
        "connector_first_of_states_us": rows[8].value,
    }


def _hold_groups(
    manager: EngineHbmManager, spaces: Sequence[GroupNamespace], prompts: list[list[bytes]], start: int, end: int
) -> None:
    """Have HOST hold all blocks of prompts in the first group, and some in the others."""
    for digests in prompts:
        _hold(manager, spaces[0], digests)
        for space in spaces[1:]:
            _hold(manager, space, digests[:end], start)


def _used_heap() -> bytes:
    """Have free memory that was used before, as an engine has that has run for a while: else each question waits for
    new pages.

    Returns: what keeps it from being given back.
    """
    pieces = [b"\x01" * _HEAP_PIECE_BYTES for _ in range(_HEAP_PIECES)]
    return pieces.pop()


def _hold(manager: EngineHbmManager, space: GroupNamespace, digests: list[bytes], start: int = 0) -> None:
    """Have HOST hold the blocks of a prompt, from one on."""
    hashes = NATIVE.derived_hashes(space.root, digests[start:])
    parent = NATIVE.derived_hashes(space.root, digests[start - 1 : start]) if start else NO_PARENT
    manager.engine_stored(space.id, parent, start, hashes)
    store = manager.begin_store(space.id, parent, start, hashes)
    assert store is not None
    blocks = len(digests) - start
    manager.end_store(store, [True] * blocks, np.zeros(blocks, dtype=np.uint32))
    manager.engine_removed(hashes)


def _asked_us(scheduler: Scheduler, request: _Request, expected: int) -> float:
    begin = time.perf_counter()
    found = scheduler.loads.matched(request, 0)
    taken = time.perf_counter() - begin
    assert found == expected, f"{found} tokens found of {expected}"
    return taken * 1e6


def _step_us(scheduler: Scheduler, scheduled: dict[str, int], taken: Sequence[Taken] = ()) -> float:
    begin = time.perf_counter()
    scheduler.plan(scheduled, len(scheduled), (), taken=taken)
    return (time.perf_counter() - begin) * 1e6


def _ended_us(scheduler: Scheduler, request: _Request, blocks: list[int]) -> float:
    begin = time.perf_counter()
    scheduler.finished(request, [blocks])
    return (time.perf_counter() - begin) * 1e6
