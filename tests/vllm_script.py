"""vLLM in script: its block pool, requests and worker, over the scheduler's half of the connector and a manager."""

from __future__ import annotations

import hashlib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvbm.assembly import NATIVE
from kvbm.config import (
    HbmSettings,
    HostSettings,
    InstanceSettings,
    JournalSettings,
    NatsSettings,
    NvmeSettings,
    OnboardSettings,
    PoolsSettings,
    Settings,
)
from kvbm.core.checksum import crc32c
from kvbm.core.ids import Namespace, Tier, split_slots
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, StepPlan, StoredPart
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup
from kvbm.engines.vllm.roles import EngineRole
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.manager.engine_hbm import EngineHbmManager
from tests.eventually import eventually

BLOCK_TOKENS, BLOCK_BYTES, HBM_BLOCKS = 4, 64, 96
BOTH = EngineRole()
WAIT_S = 60.0
_numbers = count()

FULL = [KvGroup(0, BLOCK_TOKENS, BLOCK_TOKENS)]
STATES = [FULL[0], KvGroup(1, BLOCK_TOKENS, BLOCK_TOKENS, window_blocks=1, is_state=True)]
DRAFTED = [FULL[0]._replace(has_draft=True)]
HYBRID = [KvGroup(0, BLOCK_TOKENS, BLOCK_TOKENS), KvGroup(1, BLOCK_TOKENS, BLOCK_TOKENS, window_blocks=2)]


def engine_settings(folder: Path, host_slots: int, nvme_slots: int) -> Settings:
    """Of a manager whose engine owns HBM: no stream, no catalog."""
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
        onboard=OnboardSettings(wait_s=WAIT_S, locate_s=WAIT_S),
    )


class Block:
    """vLLM's block: what the connector reads of it."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.block_hash, self.ref_cnt = block_id, None, 0
        self.is_null = block_id == 0


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

    def __init__(self, tokens: list[int], params: dict[str, Any] | None = None) -> None:
        self.request_id = f"r{next(_numbers)}"
        self.block_hashes: list[bytes] = []
        self.all_token_ids = tokens
        parent = b"none"
        for at in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            parent = hashlib.sha256(parent + repr(tokens[at : at + BLOCK_TOKENS]).encode()).digest()
            self.block_hashes.append(parent)
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_tokens = 0
        self.skip_reading_prefix_cache = False
        self.shared_prefix_boundary = 0
        self.kv_transfer_params = params
        self.lora_request: Any = None
        self.blocks: list[list[Block]] = []


def bytes_of(digest: bytes, group: int) -> np.ndarray:
    """What the engine computes for a block."""
    return np.frombuffer(hashlib.sha512(digest + bytes([group])).digest(), dtype=np.uint8)


class Engine:
    """vLLM's scheduler and one worker, in script."""

    def __init__(
        self,
        manager: EngineHbmManager,
        groups: list[KvGroup],
        namespaces: list[Namespace],
        role: EngineRole = BOTH,
        ranks: Ranks = Ranks((Stage(BLOCK_BYTES),)),  # noqa: B008  # immutable
    ) -> None:
        self.manager, self.groups = manager, groups
        self.pool = Pool()
        self.hbm = np.zeros((HBM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        spaces = [GroupNamespace(namespace.id, namespace.root()) for namespace in namespaces]
        self.host = manager.pools.slots[Tier.HOST].memory
        assert self.host is not None
        self.sizes = ranks.part_sizes
        share = HostShare(0, -1, 0, len(self.host), ranks)
        self.scheduler = Scheduler(manager, NATIVE, groups, lambda _: spaces, ranks, share, BLOCK_TOKENS, role=role)
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

    def step(self, *requests: Request) -> StepPlan:
        plan = self.scheduler.plan({request.request_id: 1 for request in requests}, len(requests), ())
        self.work(plan)
        return plan

    def work(self, plan: StepPlan, failing: str = "") -> None:
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

    def store(self, job: Job, failing: str) -> dict[int, StoredPart]:
        if failing:
            return {0: StoredPart(b"", failing)}
        rows, blocks = split_slots(job.rows), split_slots(job.blocks)
        self.host[rows] = self.hbm[blocks]
        parts, begin = {}, 0
        for part, size in enumerate(self.sizes):
            bytes_of_part = [self.host[row, begin : begin + size].tobytes() for row in rows]
            parts[part] = StoredPart(np.array([crc32c(one) for one in bytes_of_part], dtype="<u4").tobytes())
            begin += size
        return parts

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
        found: list[int] = []

        def is_answered() -> bool:
            answer = self.scheduler.loads.matched(request, 0)
            if answer is None:
                self.step()
                self.manager.settle(0.005)
                return False
            found.append(answer)
            return True

        eventually(is_answered, "the answer stays 'ask again'", 2 * WAIT_S)
        return found[0]

    def check(self, request: Request, end: int) -> None:
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            for at in range(end):
                if blocks[at].block_id:
                    assert np.array_equal(self.hbm[blocks[at].block_id], bytes_of(request.block_hashes[at], group.id))
