"""A prompt of a million tokens reaches the colder tiers, in its order from the beginning, as far as they hold it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvbm import load_settings, open_manager
from kvbm.assembly import NATIVE
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, NamespaceId, Tier, split_hashes
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.pools.memory import MemoryPool
from tests.eventually import eventually
from tests.managers import make_manager
from tests.owning_engines import NAMESPACE, OwningEngine, opened, parent_of

PROMPT = 62_500  # blocks of 16 tokens
CHUNK = 512  # what an engine computes in a step
WAIT_S = 240.0
LONG = Namespace(model="test", block_tokens=16, tenant="long")
SHORT = Namespace(model="test", block_tokens=16, tenant="short")


def chain_of(prompt: int, blocks: int) -> bytes:
    return NATIVE.sequence_hashes(np.arange(16 * blocks, dtype=np.uint32), 16, NAMESPACE.root(bytes([prompt])))


def prefill(manager: Manager, chain: bytes, namespace: NamespaceId, begin: int = 0) -> None:
    """Create a chain's blocks as a prefill does, from one on, and let go of them."""
    slots: list[int] = []
    for at in range(begin, len(chain) // HASH_BYTES, CHUNK):
        part = chain[at * HASH_BYTES : (at + CHUNK) * HASH_BYTES]
        taken = manager.allocate(len(part) // HASH_BYTES, namespace)
        assert taken is not None
        slots += manager.create(namespace, parent_of(chain, at), at, part, taken)
    manager.unpin(slots)


def depth_in(manager: Manager, chain: bytes, *tiers: Tier) -> int:
    """How many blocks of a chain, from its first on, some tiers hold together."""
    held = {block for tier in tiers for block in manager.held(tier)}
    return next((at for at, block in enumerate(split_hashes(chain)) if block not in held), len(chain) // HASH_BYTES)


@pytest.mark.parametrize("chunked", [True, False], ids=["as a prefill", "at once"])
def test_a_prompt_of_a_million_tokens_reaches_host_and_nvme_whole(tmp_path: Path, chunked: bool) -> None:
    settings = load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": PROMPT,
            "pools.host.slots": PROMPT,
            "pools.nvme.slots": PROMPT // 4,
            "pools.nvme.direct": "auto",
        }
    )
    manager = open_manager(settings, [NAMESPACE], 64)
    try:
        chain = chain_of(1, PROMPT)
        if chunked:
            prefill(manager, chain, NAMESPACE.id)
        else:
            slots = manager.allocate(PROMPT, NAMESPACE.id)
            assert slots is not None
            manager.unpin(manager.create(NAMESPACE.id, NO_PARENT, 0, chain, slots))
        assert manager.settle(WAIT_S)
        stats = manager.stats()
        assert depth_in(manager, chain, Tier.HOST) == PROMPT
        assert depth_in(manager, chain, Tier.NVME) == PROMPT // 4 == stats.pools[Tier.NVME].held
        assert stats.skipped == {Skipped.BEYOND: PROMPT - PROMPT // 4}
    finally:
        manager.close()


@pytest.mark.parametrize(
    ("slots", "depth", "held"),
    [
        ({Tier.HOST: 1000}, 1000, {Tier.HOST: 1000}),
        ({Tier.HOST: 500, Tier.NVME: 2000}, 2000, {Tier.NVME: 2000}),  # HOST is the way to NVME
        ({Tier.HOST: 2000, Tier.NVME: 500}, 2000, {Tier.HOST: 2000, Tier.NVME: 500}),
        ({Tier.HOST: 40, Tier.NVME: 5000}, 5000, {Tier.NVME: 5000}),  # smaller than a copy
        ({Tier.NVME: 700}, 700, {Tier.NVME: 700}),
    ],
)
def test_tiers_smaller_than_a_prompt_hold_its_beginning(
    slots: dict[Tier, int], depth: int, held: dict[Tier, int]
) -> None:
    manager = make_manager({Tier.HBM: 5000} | slots, by_hand=True)
    chain = chain_of(1, 5000)
    prefill(manager, chain, NAMESPACE.id)
    while manager.offload_one():
        manager.step_frames(0.0)
    assert depth_in(manager, chain, *slots) == depth
    assert {tier: depth_in(manager, chain, tier) for tier in held} == held
    stats = manager.stats()
    assert stats.skipped.get(Skipped.BEYOND, 0) >= 5000 - depth
    assert not {Skipped.QUEUE, Skipped.GONE, Skipped.ROOM} & set(stats.skipped)
    manager.close()


class _Stuck(MemoryPool):
    """A device that takes nothing until it is told to."""

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__(pool.tier, pool.slots, pool.block_bytes, NATIVE.checksums)
        self.goes_on = threading.Event()

    def write(  # type: ignore[override]
        self, slots: list[int], rows: np.ndarray, proof: Proof, at: list[int] | None = None
    ) -> None:
        assert self.goes_on.wait(WAIT_S)
        super().write(slots, rows, proof, at)


def test_a_prompt_does_not_lose_its_beginning_in_host_while_nvme_takes_nothing() -> None:
    pools: list[_Stuck] = []

    def wrap(pool: MemoryPool) -> MemoryPool:
        if pool.tier != Tier.NVME:
            return pool
        pools.append(_Stuck(pool))
        return pools[0]

    manager = make_manager({Tier.HBM: 5000, Tier.HOST: 500, Tier.NVME: 5000}, wrap=wrap)  # type: ignore[arg-type]
    try:
        chain = chain_of(1, 5000)
        prefill(manager, chain, NAMESPACE.id)
        assert not manager.settle(0.3)
        held = eventually(lambda: manager.held(Tier.HOST), "nothing reaches HOST")
        assert set(held) == set(split_hashes(chain)[: len(held)]) and len(held) <= 500
        pools[0].goes_on.set()
        assert manager.settle(WAIT_S)
        assert depth_in(manager, chain, Tier.NVME) == 5000
    finally:
        pools[0].goes_on.set()
        manager.close()


def test_what_left_hbm_before_its_turn_is_counted() -> None:
    manager = make_manager({Tier.HBM: 512, Tier.HOST: 4096}, by_hand=True)
    for prompt in range(4):
        prefill(manager, chain_of(prompt, CHUNK), NAMESPACE.id)
    while manager.offload_one():
        pass
    stats = manager.stats()
    assert stats.skipped == {Skipped.GONE: 3 * CHUNK}
    assert stats.offloaded_blocks[Tier.HOST] == CHUNK
    assert depth_in(manager, chain_of(3, CHUNK), Tier.HOST) == CHUNK
    manager.close()


def test_what_finds_host_full_of_pinned_blocks_is_counted() -> None:
    manager = make_manager({Tier.HBM: 64, Tier.HOST: 64}, by_hand=True)
    first = chain_of(1, 64)
    prefill(manager, first, NAMESPACE.id)
    while manager.offload_one():
        pass
    found = manager._ledger.match(first, pinned=True, hottest=Tier.HOST)
    prefill(manager, chain_of(2, 64), NAMESPACE.id)
    while manager.offload_one():
        pass
    assert manager.stats().skipped == {Skipped.ROOM: 64}
    manager._ledger.unpin(Tier.HOST, found.slots)
    manager.close()


def test_a_long_prompt_starves_no_other_tenant(tmp_path: Path) -> None:
    settings = load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": PROMPT + CHUNK,
            "pools.host.slots": PROMPT + CHUNK,
            "tenants.long.weight": 1,
            "tenants.short.weight": 1,
            "offload.threads": 1,
        }
    )
    manager = open_manager(settings, [LONG, SHORT], 64)
    try:
        long, short = chain_of(1, PROMPT), chain_of(2, 8)
        with manager._lock:  # offloads begin once both wait
            ledger = manager._ledger
            for chain, namespace in ((long, LONG), (short, SHORT)):
                room = ledger.allocate(Tier.HBM, len(chain) // HASH_BYTES, namespace.id)
                assert room is not None
                ledger.create(namespace.id, Tier.HBM, NO_PARENT, 0, chain, room.slots)  # type: ignore[arg-type]
                ledger.unpin(Tier.HBM, room.slots)
                manager._offloader.offer(namespace.id, Tier.HBM, chain, 1, NO_PARENT, 0)
            turns = [manager._offloader.next(0.0) for _ in range(2)]
        assert {request.namespace for request in turns if request is not None} == {LONG.id, SHORT.id}
        with manager._lock:
            for request in turns:
                assert request is not None
                manager._offloader.defer(request)
        assert manager.settle(WAIT_S)
        assert depth_in(manager, long, Tier.HOST) == PROMPT
        assert depth_in(manager, short, Tier.HOST) == 8
        assert not manager.stats().skipped
    finally:
        manager.close()


def test_an_engines_prompt_of_a_million_tokens_goes_through_host_to_nvme(tmp_path: Path) -> None:
    """HOST is smaller than the prompt, and NVME is slower than the engine: what finds no room is asked for again."""
    blocks, host = 8_000, 1_000
    flags = {"pools__hbm__slots": blocks, "pools__host__slots": host, "pools__nvme__slots": blocks}
    with opened(tmp_path, **flags) as manager:
        engine = OwningEngine(manager)
        chain = chain_of(1, blocks)
        at = 0
        while at < blocks:
            manager.engine_stored(
                NAMESPACE.id, parent_of(chain, at), at, chain[at * HASH_BYTES : (at + CHUNK) * HASH_BYTES]
            )
            end = min(at + CHUNK, blocks)
            while at < end:
                fits = manager.storable(NAMESPACE.id, at, end - at)
                if not fits:
                    manager.settle(0.05)
                    continue
                run = chain[at * HASH_BYTES : (at + fits) * HASH_BYTES]
                store = manager.begin_store(NAMESPACE.id, parent_of(chain, at), at, run)
                assert store is not None and store.hashes == run
                manager.end_store(store, [True] * fits, engine.fill(store))
                at += fits
        assert manager.settle(WAIT_S)
        assert depth_in(manager, chain, Tier.NVME) == blocks
        assert not manager.stats().skipped


def test_an_engines_prompt_beyond_host_leaves_its_beginning_there(tmp_path: Path) -> None:
    flags = {"pools__hbm__slots": 500, "pools__host__slots": 100, "offload__nvme": "never"}
    with opened(tmp_path, **flags) as manager:
        engine = OwningEngine(manager)
        for at in range(0, 500, 50):
            engine.store(1, at + 50, at)
        assert engine.acquired(1, 500).depth == 100
        assert manager.stats().skipped == {Skipped.BEYOND: 400}
