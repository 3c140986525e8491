"""vLLM's own KV events with kvbm: HBM as vLLM tells of it, HOST and NVME as kvbm does, both by vLLM's hashes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.words import BLOCK_TOKENS

WANTED = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
PATCH = ("tests.engines.vllm.harness.patches:kv_events_are_kept",)


def held(events: list[dict[str, Any]], medium: str) -> dict[int, tuple[Any, ...]]:
    """Blocks that a medium holds after events, by hash, with their tokens, what else they were hashed with, and their
    layers' kind.

    Raises AssertionError: a removal of what is not there.
    """
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if event["medium"] != medium:
            continue
        for at, block in enumerate(event["hashes"]):
            if event["kind"] == "BlockRemoved":
                assert block in found
                del found[block]
            else:
                size = event["block_size"]
                keys = event["extra_keys"][at]
                tokens = tuple(event["tokens"][at * size : (at + 1) * size])
                found[block] = tokens, None if keys is None else tuple(keys), event["kind_of_group"]
    return found


def tokens_of(blocks: dict[int, tuple[Any, ...]]) -> set[tuple[int, ...]]:
    return {tokens for tokens, _, _ in blocks.values()}


@pytest.mark.parametrize("core", ["inside", "process"])
def test_a_listener_knows_where_blocks_are_in_every_tier(engines, llama, truth, tmp_path, core):
    asks = truth.prompts("events", 2, 300)
    asks[1] = asks[1]._replace(salt="a")
    full = [
        ask.tokens[at : at + BLOCK_TOKENS]
        for ask in asks
        for at in range(0, len(ask.tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ]
    one_more = truth.prompts("events-more", 1, 40)  # a step, at which what has changed is told
    more = {"pools.nvme.slots": 400, "publish.engine_events": True}
    described = with_kvbm(llama, tmp_path / "a", more, core=core, options=WANTED, patches=PATCH)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0, 0])
        engine.offload()
        scenarios.ask(engine, truth, one_more)
        events = engine.in_core("kept_kv_events")
        in_hbm, in_host = held(events, "GPU"), held(events, "CPU")
        assert {*full} <= tokens_of(in_host)
        assert [keys for _, keys, _ in in_host.values() if keys] == [
            ("a",)
        ]  # the first block's: what follows it is hashed behind it
        assert {block: in_hbm[block] for block in in_host} == in_host  # the same hashes, for the same tokens
        engine.in_core("drop", "HOST")
        for _ in range(3):
            scenarios.ask(engine, truth, one_more)
        events = engine.in_core("kept_kv_events")
        assert not {*full} & tokens_of(held(events, "CPU"))
        assert {*full} <= tokens_of(held(events, "STORAGE"))


def test_by_default_vllms_events_tell_of_hbm_alone(engines, llama, truth, tmp_path):
    asks = truth.prompts("events-off", 1, 300)
    described = with_kvbm(llama, tmp_path / "a", {"pools.nvme.slots": 400}, options=WANTED, patches=PATCH)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0])
        engine.offload()
        scenarios.ask(engine, truth, truth.prompts("events-off-more", 1, 40))
        events = engine.in_core("kept_kv_events")
        assert held(events, "GPU")
        assert {event["medium"] for event in events} == {"GPU"}
