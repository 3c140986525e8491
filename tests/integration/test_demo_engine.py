"""The demo's engine over a block manager: the same tokens whatever was reused, batched or preempted.

`new_manager` is the only place that names a manager; what it gives here is a stand-in that keeps blocks in HBM alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.demo.engine import Engine, Finished, ModelShape, Request, Weights
from tests.extras import needed

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = needed("torch", "engine")
    Tensor = needed("torch", "engine").Tensor

torch.set_num_threads(1)

BLOCK_TOKENS = 4
NEW_TOKENS = 14
SHAPE = ModelShape(vocab=97, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64, max_tokens=128)
NAMESPACE = Namespace(model="tiny", revision="r1", block_tokens=BLOCK_TOKENS)
WEIGHTS = Weights.random(SHAPE, seed=11)


class Pool(NamedTuple):
    tensor: Tensor


class Prefix(NamedTuple):
    depth: int
    slots: list[int]
    hits: dict[Tier, int]


class MemoryManager:
    """Blocks in HBM, the least recently used evicted; every misuse of the interface fails an assertion."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        nan_bytes = 0xFF  # float32 NaN: reading what was never written spoils the logits
        self.hbm = Pool(torch.full((slots, block_bytes), nan_bytes, dtype=torch.uint8))
        self.free = list(range(slots))
        self.held: dict[bytes, int] = {}  # least recently used first
        self.pins: Counter[int] = Counter()
        self.allocated: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.chains: dict[bytes, tuple[bytes, int]] = {}  # hash → (parent, position), as created

    def hash_tokens(self, tokens: list[int], root: SequenceHash, block_tokens: int) -> bytes:
        parent, hashes = bytes(root), b""
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            parent = hashlib.sha256(parent + repr(tokens[start : start + block_tokens]).encode()).digest()[:HASH_BYTES]
            hashes += parent
        return hashes

    def acquire(self, namespace_id: NamespaceId, hashes: bytes) -> Prefix:
        self.calls["acquire"] += 1
        assert namespace_id == NAMESPACE.id
        run = list(itertools.takewhile(self.held.__contains__, split_hashes(hashes)))
        slots = [self.held[one] for one in run]
        self.pins.update(slots)
        return Prefix(len(slots), slots, {Tier.HBM: len(slots)} if slots else {})

    def allocate(self, count: int, namespace_id: NamespaceId) -> list[int] | None:
        assert count > 0
        assert namespace_id == NAMESPACE.id
        victims = [one for one, slot in self.held.items() if not self.pins[slot]]
        if len(self.free) + len(victims) < count:
            return None
        while len(self.free) < count:
            slot = self.held.pop(victims.pop(0))
            self.hbm.tensor[slot] = 0xFF
            self.free.append(slot)
        slots = [self.free.pop() for _ in range(count)]
        self.allocated.update(slots)
        return slots

    def create(
        self, namespace_id: NamespaceId, parent: SequenceHash, start: int, hashes: bytes, slots: list[int]
    ) -> list[int]:
        self.calls["create"] += 1
        run = split_hashes(hashes)
        assert namespace_id == NAMESPACE.id
        assert len(run) == len(slots) > 0
        assert (parent == NO_PARENT) == (start == 0)
        result = []
        for position, (one, slot) in enumerate(zip(run, slots, strict=True), start):
            assert self.chains.setdefault(one, (parent, position)) == (parent, position)
            self.allocated.remove(slot)
            assert not self.hbm.tensor[slot].view(torch.float32).isnan().any()
            if one in self.held:
                self.free.append(slot)
            else:
                self.held[one] = slot
            result.append(self.held[one])
            parent = one
        self.pins.update(result)
        return result

    def unpin(self, slots: list[int]) -> None:
        assert all(self.pins[slot] > 0 for slot in slots)
        self.pins.subtract(slots)
        hashes = {slot: one for one, slot in self.held.items()}
        for slot in reversed(slots):  # a prefix outlives what hangs on it
            self.held[hashes[slot]] = self.held.pop(hashes[slot])

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self.allocated.remove(slot)
            self.hbm.tensor[slot] = 0xFF
            self.free.append(slot)

    def assert_nothing_in_use(self) -> None:
        assert not self.allocated
        assert not any(self.pins.values())
        assert len(self.free) + len(self.held) == len(self.hbm.tensor)


def new_manager(slots: int = 64) -> MemoryManager:
    return MemoryManager(slots, SHAPE.block_bytes(BLOCK_TOKENS))


def new_engine(
    manager: MemoryManager,
    *,
    max_batch: int = 4,
    prefill_chunk_tokens: int = 8,
    reuse: bool = True,
    clock: Callable[[], float] | None = None,
) -> Engine:
    ticks = itertools.count()
    return Engine(
        WEIGHTS,
        manager,
        NAMESPACE.id,
        NAMESPACE.root(),
        BLOCK_TOKENS,
        max_batch,
        prefill_chunk_tokens,
        reuse,
        clock or (lambda: float(next(ticks))),
    )


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, SHAPE.vocab, (length,), generator=generator)]


SHARED = prompt(22, seed=1)
PROMPTS = [SHARED, SHARED + prompt(9, seed=2), prompt(1, seed=3), SHARED[:13] + prompt(20, seed=4), prompt(16, seed=5)]


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Finished]:
    """Submit all prompts at once; what became of them, in prompt order."""
    for index, tokens in enumerate(prompts):
        engine.submit(Request(str(index), tokens, new_tokens))
    return sorted(engine.run_until_idle(), key=lambda finished: int(finished.id))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of each prompt served alone, without reuse, in one chunk."""
    alone = [serve(new_engine(new_manager(), reuse=False, prefill_chunk_tokens=64), [tokens])[0] for tokens in PROMPTS]
    assert min(finished.smallest_margin for finished in alone) > 1e-3  # else rounding could choose another token
    assert all(len(finished.new_tokens) == NEW_TOKENS for finished in alone)
    assert len({tuple(finished.new_tokens) for finished in alone}) == len(PROMPTS)
    return [finished.new_tokens for finished in alone]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("max_batch", "chunk_tokens"), [(1, 64), (2, 3), (5, 8)])
def test_tokens_do_not_depend_on_batching_chunks_or_reuse(
    expected: list[list[int]], reuse: bool, max_batch: int, chunk_tokens: int
) -> None:
    manager = new_manager()
    engine = new_engine(manager, max_batch=max_batch, prefill_chunk_tokens=chunk_tokens, reuse=reuse)
    for _ in range(2):  # the second time every prompt can be hit
        assert [finished.new_tokens for finished in serve(engine, PROMPTS)] == expected
    manager.assert_nothing_in_use()


def test_a_prompt_seen_before_is_hit_in_all_blocks_but_those_of_its_last_token(expected: list[list[int]]) -> None:
    engine = new_engine(new_manager())
    whole = PROMPTS[4]  # 16 tokens, 4 full blocks: the last one is computed again
    first, second = serve(engine, [whole])[0], serve(engine, [whole])[0]
    assert (first.prompt_blocks, first.hits) == (4, {})
    assert (second.prompt_blocks, second.hits) == (4, {Tier.HBM: 3})
    assert first.new_tokens == second.new_tokens == expected[4]


def test_a_full_hit_computes_only_the_tokens_after_the_last_whole_block(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(new_manager(), prefill_chunk_tokens=64)
    serve(engine, [SHARED])
    chunks = []
    prefill = engine._model.prefill

    def counting(tokens: list[int], start: int, block_table: list[int], pool: Tensor) -> Tensor:
        chunks.append((start, len(tokens)))
        return prefill(tokens, start, block_table, pool)

    monkeypatch.setattr(engine._model, "prefill", counting)
    assert serve(engine, [SHARED])[0].new_tokens == expected[0]
    assert chunks == [(20, 2)]


def test_generated_tokens_are_hit_by_the_next_turn_of_a_conversation() -> None:
    engine = new_engine(new_manager())
    answer = serve(engine, [SHARED])[0].new_tokens
    next_turn = [*SHARED, *answer, *prompt(5, seed=6)]
    found = serve(engine, [next_turn])[0]
    written = len(SHARED) + len(answer) - 1  # the last token's KV was never needed
    assert found.hits == {Tier.HBM: written // BLOCK_TOKENS}
    assert found.new_tokens == serve(new_engine(new_manager(), reuse=False), [next_turn])[0].new_tokens


def test_without_reuse_nothing_is_acquired_or_created() -> None:
    manager = new_manager()
    serve(new_engine(manager, reuse=False), PROMPTS)
    assert manager.calls == {}
    assert len(manager.free) == len(manager.hbm.tensor)


def test_two_requests_that_compute_one_prefix_at_once_end_with_one_copy_of_it(expected: list[list[int]]) -> None:
    manager = new_manager()
    found = serve(new_engine(manager, max_batch=2), [SHARED, SHARED])
    assert [finished.new_tokens for finished in found] == [expected[0], expected[0]]
    assert len(manager.held) == (len(SHARED) + NEW_TOKENS - 1) // BLOCK_TOKENS
    manager.assert_nothing_in_use()


@pytest.mark.parametrize("reuse", [True, False])
def test_a_pool_too_small_for_all_preempts_the_youngest_and_changes_no_token(
    expected: list[list[int]], reuse: bool
) -> None:
    slots = 14
    manager = new_manager(slots)
    found = serve(new_engine(manager, max_batch=5, reuse=reuse), PROMPTS)
    assert [finished.new_tokens for finished in found] == expected
    assert found[0].preemptions == 0
    assert sum(finished.preemptions for finished in found) > 0
    manager.assert_nothing_in_use()


def test_a_preempted_request_goes_on_before_those_that_came_after_it(expected: list[list[int]]) -> None:
    engine = new_engine(new_manager(slots=12), max_batch=2)
    for name, index in (("a", 4), ("b", 0), ("c", 2)):
        engine.submit(Request(name, PROMPTS[index], NEW_TOKENS))
    found = engine.run_until_idle()
    assert [(finished.id, finished.preemptions) for finished in found] == [("a", 0), ("b", 1), ("c", 0)]
    assert [finished.new_tokens for finished in found] == [expected[4], expected[0], expected[2]]


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_arrivals_in_a_tiny_pool_gives_the_tokens_of_each_prompt_alone(
    expected: list[list[int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    manager = new_manager(slots=12 + seed)
    engine = new_engine(manager, max_batch=1 + seed, prefill_chunk_tokens=1 + 3 * seed)
    order = [int(index) % len(PROMPTS) for index in torch.randint(0, 100, (12,), generator=generator)]
    found = []
    for number, index in enumerate(order):
        engine.submit(Request(f"{number}:{index}", PROMPTS[index], NEW_TOKENS))
        for _ in range(int(torch.randint(0, 9, (1,), generator=generator))):
            found += engine.step()
    found += engine.run_until_idle()
    assert len(found) == len(order)
    for finished in found:
        assert finished.new_tokens == expected[int(finished.id.partition(":")[2])]
    manager.assert_nothing_in_use()


def test_times_count_from_submit(expected: list[list[int]]) -> None:
    now_s = [100.0]
    engine = new_engine(new_manager(), max_batch=1, prefill_chunk_tokens=64, clock=lambda: now_s[0])
    engine.submit(Request("first", PROMPTS[4], 1))
    engine.submit(Request("second", PROMPTS[4], 2))
    now_s[0] += 5
    (first,) = engine.step()
    now_s[0] += 2
    assert engine.step() == []
    now_s[0] += 1
    (second,) = engine.step()
    assert (first.id, first.queued_s, first.ttft_s) == ("first", 5.0, 5.0)
    assert (second.id, second.queued_s, second.ttft_s) == ("second", 7.0, 7.0)
    assert engine.idle


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "reason", "message"),
    [
        ([], 1, "empty-prompt", "the prompt has 0 tokens"),
        ([1], 0, "no-new-tokens", "max_new_tokens is 0"),
        ([1, 97], 1, "unknown-token", "token 97 is outside the vocabulary, 0 to 96"),
        ([1, -1], 1, "unknown-token", "token -1 is outside"),
        ([1] * 125, 4, "too-long", "125 prompt and 4 new tokens, the model takes 128 together"),
        ([1] * 38, 4, "never-fits", "11 HBM slots wanted, the pool has 10"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_the_others_are_served(
    expected: list[list[int]], tokens: list[int], new_tokens: int, reason: str, message: str
) -> None:
    engine = new_engine(new_manager(slots=10))
    engine.submit(Request("good", SHARED, NEW_TOKENS))
    engine.submit(Request("bad", tokens, new_tokens))
    found = {finished.id: finished for finished in engine.run_until_idle()}
    assert found["good"].new_tokens == expected[0]
    failed = found["bad"].failed
    assert failed is not None
    assert (failed.reason, found["bad"].new_tokens) == (reason, [])
    assert message in str(failed)


def test_the_largest_request_that_fits_the_pool_is_served() -> None:
    manager = new_manager(slots=10)
    (finished,) = serve(new_engine(manager), [prompt(37, seed=7)], new_tokens=4)
    assert finished.failed is None
    assert len(finished.new_tokens) == 4
    manager.assert_nothing_in_use()


def test_slots_that_never_come_back_fail_the_request_instead_of_waiting_for_ever() -> None:
    manager = new_manager(slots=10)
    serve(new_engine(manager), [SHARED])
    kept = manager.allocate(6, NAMESPACE.id)
    assert kept is not None
    (finished,) = serve(new_engine(manager), [SHARED])
    assert manager.calls["acquire"] == 2  # the prefix of 4 blocks stayed held while it waited
    assert finished.failed is not None
    assert finished.failed.reason == "starved"
    assert "6 HBM slots wanted of 10, not free for 30 s" in str(finished.failed)
    manager.release(kept)
    manager.assert_nothing_in_use()


def test_a_pool_of_another_block_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="open the pool with block_bytes 1024"):
        new_engine(MemoryManager(4, SHAPE.block_bytes(BLOCK_TOKENS) * 2))
