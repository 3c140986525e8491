"""The scheduler's half of the vLLM connector over a real manager; the engine is a script that moves bytes as workers would."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvbm.assembly import NATIVE, open_engine_manager
from kvbm.config import (
    HbmSettings,
    HostSettings,
    InstanceSettings,
    JournalSettings,
    NatsSettings,
    NvmeSettings,
    PoolsSettings,
    Settings,
)
from kvbm.core.checksum import crc32c
from kvbm.core.ids import HASH_BYTES, Namespace, Tier, split_hashes, split_slots
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, Plan, Ranks, Stored
from kvbm.engines.vllm.requests import Group, GroupNamespace
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.manager.engine_hbm import EngineHbmManager

BLOCK_TOKENS, BLOCK_BYTES, HBM_BLOCKS = 4, 64, 96
_numbers = count()


class Block:
    """vLLM's block: what the connector reads of it."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.block_hash, self.ref_cnt = block_id, None, 0


class Map:
    """vLLM's map from hash to block, without duplicates."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Block] = {}

    def get_one_block(self, key: bytes) -> Block | None:
        return self._cache.get(key)

    def insert(self, key: bytes, block: Block) -> None:
        self._cache[key] = block

    def pop(self, key: bytes, block_id: int) -> Block | None:
        return self._cache.pop(key, None)


class Pool:
    """vLLM's BlockPool as far as the connector touches it; block 0 is the null block."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(HBM_BLOCKS)]
        self.cached_block_hash_to_block = Map()
        self.free = list(range(HBM_BLOCKS - 1, 0, -1))

    def cache_full_blocks(
        self, request: Any, blocks: list[Block], cached: int, full: int, block_size: int, group: int
    ) -> None:
        for at in range(cached, full):
            if blocks[at].block_id:
                key = request.block_hashes[at] + group.to_bytes(4, "big")
                blocks[at].block_hash = key
                self.cached_block_hash_to_block.insert(key, blocks[at])

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def reset_prefix_cache(self) -> bool:
        if any(block.ref_cnt for block in self.blocks):
            return False
        self.cached_block_hash_to_block = Map()
        return True

    def evict(self, block: Block) -> None:
        assert not block.ref_cnt
        self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
        block.block_hash = None


class Request:
    """A request of the script."""

    def __init__(self, tokens: list[int]) -> None:
        self.request_id = f"r{next(_numbers)}"
        self.block_hashes: list[bytes] = []
        parent = b"none"
        for at in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            parent = hashlib.sha256(parent + repr(tokens[at : at + BLOCK_TOKENS]).encode()).digest()
            self.block_hashes.append(parent)
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params = None
        self.blocks: list[list[Block]] = []


def bytes_of(digest: bytes, group: int) -> np.ndarray:
    """What the engine computes for a block."""
    return np.frombuffer(hashlib.sha512(digest + bytes([group])).digest(), dtype=np.uint8)


class Engine:
    """vLLM's scheduler and one worker, in script."""

    def __init__(self, manager: EngineHbmManager, groups: list[Group], namespaces: list[Namespace]) -> None:
        self.manager, self.groups = manager, groups
        self.pool = Pool()
        self.hbm = np.zeros((HBM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        spaces = [GroupNamespace(namespace.id, namespace.root()) for namespace in namespaces]
        self.host = manager.pools.slots[Tier.HOST].memory
        assert self.host is not None
        share = HostShare(0, -1, 0, len(self.host), BLOCK_BYTES, BLOCK_BYTES)
        self.scheduler = Scheduler(
            manager, NATIVE, groups, lambda _: spaces, Ranks(1, 1, BLOCK_BYTES), share, BLOCK_TOKENS
        )
        self.requests: dict[str, Request] = {}
        self.scheduler.bind(self.pool, lambda name: self.ids(self.requests[name]))

    def ids(self, request: Request) -> list[list[int]]:
        return [[block.block_id for block in blocks] for blocks in request.blocks]

    def admit(self, request: Request, computed: int = 0, loaded: int = 0) -> None:
        """Give a request its blocks; those before the window of a group are the null block."""
        self.requests[request.request_id] = request
        count = len(request.block_hashes)
        loaded_end = (computed + loaded) // BLOCK_TOKENS
        for group in self.groups:
            nulls = group.first_needed(loaded_end)
            blocks = [self.pool.blocks[0]] * nulls + [
                self.pool.blocks[self.pool.free.pop()] for _ in range(count - nulls)
            ]
            request.blocks.append(blocks)
        self.scheduler.allocated(request, self.ids(request), loaded)

    def compute(self, request: Request) -> None:
        """Fill what is not computed yet, in one step."""
        begin = request.num_computed_tokens // BLOCK_TOKENS
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            for at in range(begin, len(blocks)):
                self.hbm[blocks[at].block_id] = bytes_of(request.block_hashes[at], group.id)
            self.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_TOKENS, group.id)
        request.num_computed_tokens = len(request.block_hashes) * BLOCK_TOKENS

    def step(self, *requests: Request) -> Plan:
        plan = self.scheduler.plan({request.request_id: 1 for request in requests}, len(requests), ())
        self.work(plan)
        return plan

    def work(self, plan: Plan, failing: str = "") -> None:
        """What a worker does with a plan."""
        answers = Answers()
        for job in plan.loads:
            if failing:
                answers.failed[job.id] = failing
            else:
                self.hbm[split_slots(job.blocks)] = self.host[split_slots(job.rows)]
            answers.loaded[job.id] = 1
        for job in plan.stores:
            answers.stored[job.id] = self.store(job, failing)
        self.scheduler.answered(answers)

    def store(self, job: Job, failing: str) -> dict[int, Stored]:
        if failing:
            return {0: Stored(b"", failing)}
        rows, blocks = split_slots(job.rows), split_slots(job.blocks)
        self.host[rows] = self.hbm[blocks]
        sums = np.array([crc32c(self.host[row].tobytes()) for row in rows], dtype="<u4")
        return {0: Stored(sums.tobytes())}

    def end(self, request: Request) -> None:
        """The request is over, what is left of it is stored, and HBM forgets it and is filled with something else."""
        self.scheduler.finished(request, self.ids(request))
        self.step()
        for blocks in request.blocks:
            for block in blocks:
                if block.block_id:
                    self.pool.evict(block)
                    self.pool.free.append(block.block_id)
                    self.hbm[block.block_id] = 0xEE
        self.scheduler.plan({}, 0, ())

    def run(self, tokens: list[int]) -> int:
        """Serve a prompt whole; what it found, and every byte it has is right."""
        request = Request(tokens)
        found = self.ask(request)
        self.admit(request, 0, found)
        self.step()
        request.num_computed_tokens = found
        self.check(request, found // BLOCK_TOKENS)
        self.compute(request)
        self.step(request)
        self.end(request)
        return found

    def ask(self, request: Request) -> int:
        """Ask until the answer is one, as vLLM does step after step."""
        for _ in range(2000):
            found = self.scheduler.loads.matched(request, 0)
            if found is not None:
                return found
            self.step()
            self.manager.settle(0.005)
        raise AssertionError("the answer stayed 'ask again'")

    def check(self, request: Request, end: int) -> None:
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            for at in range(end):
                if blocks[at].block_id:
                    assert np.array_equal(self.hbm[blocks[at].block_id], bytes_of(request.block_hashes[at], group.id))


def settings(folder: Path, host_slots: int, nvme_slots: int) -> Settings:
    return replace(
        Settings(),
        instance=InstanceSettings(id="e", data_dir=str(folder)),
        pools=PoolsSettings(
            hbm=HbmSettings(owner="engine", slots=HBM_BLOCKS),
            host=HostSettings(slots=host_slots),
            nvme=NvmeSettings(slots=nvme_slots),
        ),
        nats=NatsSettings(enabled=False),
        journal=JournalSettings(in_memory=not nvme_slots),
    )


def opened(
    folder: Path, groups: list[Group], host_slots: int, nvme_slots: int
) -> tuple[EngineHbmManager, list[Namespace]]:
    namespaces = [Namespace(model="m", revision="r1", block_tokens=BLOCK_TOKENS, kv_group=group.id) for group in groups]
    return open_engine_manager(settings(folder, host_slots, nvme_slots), namespaces, BLOCK_BYTES, "vllm"), namespaces


FULL = [Group(0, BLOCK_TOKENS, BLOCK_TOKENS)]
HYBRID = [Group(0, BLOCK_TOKENS, BLOCK_TOKENS), Group(1, BLOCK_TOKENS, BLOCK_TOKENS, window_blocks=2)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    manager, namespaces = opened(tmp_path, FULL, 64, 0)
    with manager:
        yield Engine(manager, FULL, namespaces)


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[Engine]:
    manager, namespaces = opened(tmp_path, HYBRID, 64, 0)
    with manager:
        yield Engine(manager, HYBRID, namespaces)


def test_what_one_request_computed_another_loads_and_the_last_token_is_left_to_compute(engine: Engine) -> None:
    prompt = list(range(33))
    assert engine.run(prompt) == 0
    assert engine.run(prompt) == 32
    assert engine.run(prompt[:32]) == 28
    assert engine.run([*prompt[:10], 99, 98, 97, 96]) == 8
    assert engine.scheduler.take_numbers()["hit_blocks"] == {"HOST": 17}


def test_a_host_too_small_sends_blocks_to_nvme_and_they_come_back_verified(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        prompts = [list(range(start, start + 33)) for start in (0, 100, 200)]
        for prompt in prompts:
            engine.run(prompt)
            assert manager.settle(10)
        assert [engine.run(prompt) for prompt in prompts] == [32, 32, 32]
        assert manager.stats().hit_blocks[Tier.NVME] >= 14
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        assert engine.run(prompts[0]) == 32
        assert engine.scheduler.take_numbers()["hit_blocks"] == {"NVME": 8}


def test_a_prompt_that_host_cannot_hold_goes_through_it_to_nvme_while_its_request_runs(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        request = Request(list(range(40 * BLOCK_TOKENS + 1)))
        assert engine.ask(request) == 0
        engine.admit(request)
        engine.compute(request)
        chain = engine.scheduler.requests.state_of(request).hashes(0, 0, 40, NATIVE.derived_hashes)
        for _ in range(2000):  # as many steps as a device takes for it
            engine.step(request)
            manager.settle(0.005)
            lacking = len(set(split_hashes(chain)).difference(manager.held(Tier.NVME)))
            if not lacking:
                break
        assert not lacking
        engine.end(request)
        assert "stores_skipped" not in engine.scheduler.take_numbers()
        assert manager.stats().skipped == {}


def test_what_a_small_host_without_nvme_keeps_is_the_beginning_of_a_prompt(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 0)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        prompt = list(range(40 * BLOCK_TOKENS + 1))
        assert engine.run(prompt) == 0
        assert engine.run(prompt) == 10 * BLOCK_TOKENS


def test_a_hybrid_model_finds_a_prefix_only_where_every_group_has_what_it_needs(hybrid: Engine) -> None:
    prompt = list(range(41))
    assert hybrid.run(prompt) == 0
    assert hybrid.run(prompt) == 40
    window = hybrid.scheduler.requests.state_of(Request(prompt))
    lost = window.hashes(1, 8, 9, NATIVE.derived_hashes)
    assert hybrid.manager.evict(Tier.HOST, lost) == 1
    assert hybrid.run(prompt) == 32  # block 8 of the window is gone, so a prefix that needs it is none


def test_a_second_request_waits_for_the_first_ones_load(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    first, second = Request(prompt), Request(prompt)
    assert engine.ask(first) == 32
    engine.admit(first, 0, 32)
    assert engine.scheduler.loads.matched(second, 0) is None
    engine.step()
    assert engine.scheduler.loads.matched(second, 0) == 32


def test_a_failed_load_is_never_offered_to_that_request_again(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    request = Request(prompt)
    assert engine.ask(request) == 32
    engine.admit(request, 0, 32)
    engine.work(engine.scheduler.plan({}, 0, ()), failing="the device is gone")
    assert engine.scheduler.loads.matched(request, 0) == 0
    assert engine.ask(Request(prompt)) == 32


def test_a_failed_store_claims_nothing(engine: Engine) -> None:
    request = Request(list(range(33)))
    assert engine.ask(request) == 0
    engine.admit(request)
    engine.compute(request)
    engine.work(engine.scheduler.plan({request.request_id: 9}, 9, ()), failing="no memory")
    assert engine.manager.held(Tier.HOST) == []
    assert all(not block.ref_cnt for block in engine.pool.blocks)


def test_blocks_stay_referenced_until_the_workers_have_answered(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    plan = engine.scheduler.plan({request.request_id: 9}, 9, ())
    assert sum(block.ref_cnt for block in engine.pool.blocks) == 8
    assert engine.scheduler.stores.has_work()
    engine.work(plan)
    assert sum(block.ref_cnt for block in engine.pool.blocks) == 0
    assert not engine.scheduler.stores.has_work()


def test_what_steps_in_flight_compute_is_not_stored_yet(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    request.num_in_flight_tokens = 18
    engine.step(request)
    assert len(engine.manager.held(Tier.HOST)) == 3  # 14 tokens are certain


def test_blocks_that_decoding_fills_are_stored_while_others_decode(engine: Engine) -> None:
    requests = [Request(list(range(start, start + 33 + start % 3))) for start in (0, 100, 200)]
    for request in requests:
        engine.admit(request)
        engine.compute(request)
        request.num_computed_tokens = request.num_tokens
    for step in range(40):
        engine.step(*requests)
        full = sum(request.num_computed_tokens // BLOCK_TOKENS for request in requests)
        assert len(engine.manager.held(Tier.HOST)) == full, f"step {step}"
        for request in requests:
            request.num_computed_tokens += 1
            request.num_tokens += 1
            if request.num_computed_tokens % BLOCK_TOKENS == 0:
                at = len(request.block_hashes)
                request.block_hashes.append(hashlib.sha256(request.block_hashes[-1]).digest())
                block = engine.pool.blocks[engine.pool.free.pop()]
                request.blocks[0].append(block)
                engine.hbm[block.block_id] = bytes_of(request.block_hashes[at], 0)
                engine.pool.cache_full_blocks(request, request.blocks[0], at, at + 1, BLOCK_TOKENS, 0)


def test_a_request_that_ends_while_it_waits_gives_back_its_pins(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    request = Request(prompt)
    assert engine.ask(request) == 32
    engine.scheduler.finished(request, [[]])
    counts = engine.manager.stats().pools[Tier.HOST]
    assert counts.evictable == counts.held == 8


def test_the_stream_holds_hbm_as_the_engine_has_it(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    engine.step(request)
    state = engine.scheduler.requests.state_of(request)
    assert b"".join(engine.manager.held(Tier.HBM)) == state.hashes(0, 0, 8, NATIVE.derived_hashes)
    engine.end(request)
    assert engine.manager.held(Tier.HBM) == []
    assert len(engine.manager.held(Tier.HOST)) == 8


def test_a_sessions_tokens_that_were_taken_back_are_hashed_anew(engine: Engine) -> None:
    request, other = Request(list(range(33))), Request([*range(20), *range(50, 63)])
    state = engine.scheduler.requests.state_of(request)
    before = state.hashes(0, 0, 8, NATIVE.derived_hashes)
    request.block_hashes = other.block_hashes
    after = state.hashes(0, 0, 8, NATIVE.derived_hashes)
    assert before[: 5 * HASH_BYTES] == after[: 5 * HASH_BYTES]
    assert before[5 * HASH_BYTES :] != after[5 * HASH_BYTES :]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Engine]:
    """A HOST of ten blocks."""
    manager, namespaces = opened(tmp_path, FULL, 10, 0)
    with manager:
        yield Engine(manager, FULL, namespaces)


def test_a_chains_deepest_blocks_leave_before_its_beginning_though_that_was_loaded_first(small: Engine) -> None:
    prompt = list(range(33))
    small.run(prompt[:16])
    assert small.run(prompt) == 16
    small.run(list(range(100, 117)))  # four blocks, for which two of the eight leave
    assert small.run(prompt) == 24


def test_a_chains_deepest_blocks_leave_before_its_beginning_though_that_was_stored_first(small: Engine) -> None:
    prompt = Request(list(range(33)))
    small.admit(prompt)
    small.compute(prompt)
    for computed in (16, 32):
        prompt.num_computed_tokens = computed
        small.step(prompt)
    small.end(prompt)
    small.run(list(range(100, 117)))
    assert small.ask(Request(list(range(33)))) == 24


def test_a_chain_whose_beginning_the_engine_kept_in_hbm_is_used_whole(small: Engine) -> None:
    prompt = list(range(17))
    small.run(prompt)
    small.run(list(range(100, 117)))
    request = Request(prompt)
    small.admit(request, 16)  # all of it was in HBM: HOST was never asked
    small.compute(request)
    small.step(request)
    small.end(request)
    small.run(list(range(200, 217)))
    assert small.ask(Request(prompt)) == 16


def test_a_refreshed_chain_that_lies_partly_in_nvme_leaves_no_block_pinned(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        for start in (0, 100):
            engine.run(list(range(start, start + 33)))
            assert manager.settle(10)
        chain = engine.scheduler.requests.state_of(Request(list(range(33)))).hashes(0, 0, 8, NATIVE.derived_hashes)
        tiers = set(manager.holders(chain))
        assert tiers == {Tier.HOST, Tier.NVME}
        manager.refresh(chain)
        engine.run(list(range(200, 241)))
        assert len(set(manager.held(Tier.HOST))) == 10
        assert not set(manager.held(Tier.HOST)) & {
            chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)
        }


def test_after_a_refusal_nothing_is_stored_and_what_requests_wait_for_is_still_handed_out(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    waiting, other = Request(prompt), Request(list(range(100, 133)))
    assert engine.ask(waiting) == 32
    engine.admit(waiting, 0, 32)
    engine.scheduler.loads.abandon("lost")
    engine.admit(other)
    engine.compute(other)
    engine.scheduler.refusal = "a rank cannot map HOST"
    plan = engine.scheduler.plan({other.request_id: 9}, 9, ())
    assert [(job.request, bool(job.why)) for job in plan.loads] == [(waiting.request_id, False), ("lost", True)]
    assert plan.stores == []
    engine.scheduler.finished(other, engine.ids(other))
    assert engine.scheduler.plan({}, 0, ()).stores == []
