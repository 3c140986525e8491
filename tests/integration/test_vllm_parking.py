"""Prompts that go on: what the scheduler's half keeps of them in HOST, and for how long. The engine is a script."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import open_engine_manager
from kvbm.core.ids import HASH_BYTES, Namespace, Tier
from kvbm.engines.vllm.handoff import KEEP_KEY, HandoffRules, kept_s
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.roles import EngineRole
from tests.eventually import eventually
from tests.vllm_script import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FULL,
    HYBRID,
    STATES,
    Engine,
    Request,
    bytes_of,
    engine_settings,
)

PROMPT = list(range(33))  # 8 blocks and a token
LONG_S = 3600.0


def engine_of(
    folder: Path,
    groups: list[KvGroup],
    rules: HandoffRules = HandoffRules(),  # noqa: B008  # frozen
    host_slots: int = 32,
) -> Engine:
    spaces = [Namespace(model="m", revision="r1", block_tokens=BLOCK_TOKENS, kv_group=group.id) for group in groups]
    manager = open_engine_manager(engine_settings(folder, host_slots, 0), spaces, BLOCK_BYTES, "vllm")
    return Engine(manager, groups, spaces, EngineRole(handoff=rules))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = engine_of(tmp_path, FULL)
    with one.manager:
        yield one


def answered(engine: Engine, tokens: list[int], params: dict[str, Any] | None) -> None:
    """A request that is answered; all of it is stored, and HBM forgets it."""
    request = Request(tokens, params)
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    engine.step(request)
    engine.scheduler.finished(request, engine.ids(request), is_answered=True)
    engine.end(request)


def flood(engine: Engine) -> None:
    """Other prompts, twice what HOST has room for."""
    for number in range(1, 9):
        engine.run(list(range(1000 * number, 1000 * number + 33)))


def in_host(engine: Engine, tokens: list[int], blocks: int, index: int = 0) -> int:
    """How many of a prompt's first blocks are in HOST."""
    state = engine.scheduler.requests.state_of(Request(tokens))
    chain = state.hashes(index, 0, blocks, engine.scheduler._derive)
    assert len(chain) == blocks * HASH_BYTES
    return engine.manager.holders(chain, state.namespaces[index].id).count(Tier.HOST)


def kept(engine: Engine) -> int:
    return engine.manager.stats().kept_blocks[Tier.HOST]


@pytest.mark.parametrize(
    ("said", "held"),
    [({KEEP_KEY: LONG_S}, 8), ({KEEP_KEY: 10**400}, 8), (None, 0), ({KEEP_KEY: 0}, 0), ({KEEP_KEY: "3600"}, 0)],
)
def test_a_turn_is_kept_as_long_as_its_request_says(engine: Engine, said: dict[str, Any] | None, held: int) -> None:
    answered(engine, PROMPT, said)
    assert kept(engine) == held
    flood(engine)
    assert in_host(engine, PROMPT, 8) == held
    told = engine.scheduler._numbers.data.get("parked_prompts", {})
    assert told == ({"turn": 1} if held else {})


def test_every_turn_is_kept_where_that_is_set(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, FULL, HandoffRules(keep_s=LONG_S))
    with engine.manager:
        answered(engine, PROMPT, None)
        answered(engine, list(range(100, 133)), {KEEP_KEY: 0})  # this one will not go on
        assert kept(engine) == 8


def test_a_turn_that_does_not_come_is_kept_no_longer(engine: Engine) -> None:
    answered(engine, PROMPT, {KEEP_KEY: 0.05})
    eventually(lambda: not kept(engine), "blocks are kept past their time")
    flood(engine)
    assert in_host(engine, PROMPT, 8) == 0


def test_who_leaves_keeps_nothing(engine: Engine) -> None:
    request = Request(PROMPT, {KEEP_KEY: LONG_S})
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    engine.step(request)
    engine.end(request)
    assert kept(engine) == 0


@pytest.mark.parametrize("said", [None, -1, math.nan, True, "1", [1], {}, 1e-9, 7200, math.inf, 10**400])
def test_how_long_is_bounded_and_what_is_no_time_is_not_said(said: Any) -> None:
    rules = HandoffRules(keep_s=5.0, keep_most_s=60.0)
    expected = {1e-9: 1e-9, 7200: 60.0, math.inf: 60.0, 10**400: 60.0}
    is_time = isinstance(said, int | float) and not isinstance(said, bool) and said > 0
    assert kept_s({KEEP_KEY: said}, rules) == (expected[said] if is_time else 5.0)


@pytest.mark.parametrize("groups", [FULL, HYBRID, STATES], ids=["full", "window", "states"])
def test_of_each_group_what_goes_on_needs_is_kept(tmp_path: Path, groups: list[KvGroup]) -> None:
    engine = engine_of(tmp_path, groups, host_slots=64)
    with engine.manager:
        answered(engine, PROMPT, {KEEP_KEY: LONG_S})
        assert kept(engine) == 8 + (2 if groups is HYBRID else 0)
        assert in_host(engine, PROMPT, 8) == 8


def test_no_more_than_half_of_host_is_kept(engine: Engine) -> None:
    for number in range(4):
        answered(engine, list(range(1000 * number, 1000 * number + 33)), {KEEP_KEY: LONG_S})
    assert kept(engine) == 8  # a quarter, for next turns
    for number in range(4, 8):
        request = Request(list(range(1000 * number, 1000 * number + 33)), {"do_remote_decode": True})
        engine.admit(request, 0, engine.ask(request))
        engine.compute(request)
        engine.step(request)
        engine.scheduler.finished(request, engine.ids(request), is_answered=True)
        engine.end(request)
    assert kept(engine) == 16


def decoding(engine: Engine) -> Request:
    """A request that has just computed its ninth block, the last of its answer so far; eight are stored."""
    request = Request(PROMPT)
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    engine.step(request)
    longer = Request([*PROMPT, 33, 34, 35, 36])
    request.num_tokens, request.num_output_tokens, request.block_hashes = 37, 4, longer.block_hashes
    request.blocks[0].append(engine.pool.blocks[engine.pool.free.pop()])
    engine.compute(request)
    engine.step(request)  # which computes it, and has looked at the others before
    return request


def preempt(engine: Engine, request: Request, taken: int = 0) -> None:
    """Its blocks are vLLM's to give away, and so many, from its last on, are another's before the step is planned."""
    request.num_computed_tokens = 0
    blocks, request.blocks = request.blocks[0], [[]]
    for block in blocks[len(blocks) - taken :]:
        engine.pool.evict(block)
        engine.hbm[block.block_id] = 0xEE
    engine.work(engine.scheduler.plan({}, 0, [request.request_id]))


def test_what_a_preempted_request_computed_last_is_stored_and_kept(engine: Engine) -> None:
    request = decoding(engine)
    preempt(engine, request)
    assert not any(block.ref_cnt for block in engine.pool.blocks)
    assert kept(engine) == 9
    flood(engine)
    assert in_host(engine, [*PROMPT, 33, 34, 35, 36], 9) == 9
    again = Request([*PROMPT, 33, 34, 35, 36])
    found = engine.ask(again)
    engine.admit(again, 0, found)
    engine.step()
    engine.check(again, 9)
    assert found == 36
    assert (engine.hbm[again.blocks[0][8].block_id] == bytes_of(again.block_hashes[8], 0)).all()


def test_a_block_that_another_has_got_already_is_not_stored(engine: Engine) -> None:
    request = decoding(engine)
    preempt(engine, request, taken=1)
    assert kept(engine) == 8
    assert in_host(engine, [*PROMPT, 33, 34, 35, 36], 9) == 8


def test_a_block_that_this_step_only_begins_to_compute_is_not_stored(engine: Engine) -> None:
    """Another request with the same tokens has got a block of its own for it; its hash is there before its bytes."""
    request = decoding(engine)
    last = request.blocks[0][8]
    engine.pool.evict(last)
    other = engine.pool.blocks[engine.pool.free.pop()]
    engine.hbm[other.block_id] = 0xEE
    engine.pool.cache_full_blocks(request, [*request.blocks[0][:8], other], 8, 9, BLOCK_TOKENS, 0)
    preempt(engine, request)
    assert in_host(engine, [*PROMPT, 33, 34, 35, 36], 9) == 8


def test_what_a_decoder_waits_for_stays_for_the_next_turn_that_was_asked_for(engine: Engine) -> None:
    params = {"do_remote_decode": True, KEEP_KEY: LONG_S}
    request = Request(PROMPT, params)
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    assert engine.scheduler.finished(request, engine.ids(request), is_answered=True) is not None
    engine.step()
    ledger = engine.manager._ledger
    assert kept(engine) == 8
    found = ledger.lend(engine.scheduler.requests.state_of(Request(PROMPT)).namespaces[0].id, chain_of(engine, 8))
    ledger.unpin(Tier.HOST, found.slots, read=True)
    assert kept(engine) == 8


def test_a_prompt_that_is_preempted_before_its_answer_is_handed_off_all_the_same(engine: Engine) -> None:
    request = Request(PROMPT, {"do_remote_decode": True})
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    engine.step(request)
    preempt(engine, request)
    assert engine.scheduler.finished(request, [[]], is_answered=True) is not None


def chain_of(engine: Engine, blocks: int) -> bytes:
    state = engine.scheduler.requests.state_of(Request(PROMPT))
    return state.hashes(0, 0, blocks, engine.scheduler._derive)


def test_a_request_preempted_in_its_prompt_keeps_what_is_stored(engine: Engine) -> None:
    request = Request(PROMPT)
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    engine.step(request)
    preempt(engine, request)
    assert kept(engine) == 8
    engine.scheduler.finished(request, [[]])  # its client leaves
    assert not any(block.ref_cnt for block in engine.pool.blocks)
