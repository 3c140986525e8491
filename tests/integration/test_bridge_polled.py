"""The bridge and engines of which events are fetched, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bridge_site import Site, site
from tests.eventually import eventually
from tests.foreign_engines import Prompt
from tests.nats_fixture import cluster, nats_url
from tests.servers import free_port
from tests.trtllm_server import TrtllmServer

__all__ = ["cluster", "nats_url", "site"]

PROMPT = Prompt(tuple(range(100, 124)))  # six blocks
OTHER = Prompt(tuple(range(500, 512)))


@pytest.fixture
def servers() -> Iterator[list[TrtllmServer]]:
    made: list[TrtllmServer] = []
    yield made
    for one in made:
        one.close()


def stored(prompt: Prompt, begin: int = 0, end: int | None = None) -> dict[str, Any]:
    keys = prompt.keys()
    blocks = [
        {
            "type": "stored_block",
            "block_hash": keys[at],
            "tokens": [{"type": "unique_token", "token_id": token} for token in prompt.tokens[4 * at : 4 * at + 4]],
            "cache_level": 0,
        }
        for at in range(begin, len(keys) if end is None else end)
    ]
    return {"type": "stored", "parent_hash": keys[begin - 1] if begin else None, "blocks": blocks}


def removed(*keys: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(keys)}


def test_what_trtllm_holds_is_found_by_tokens_like_any_other_engines_blocks(site: Site, servers: list[TrtllmServer]):
    servers.append(engine := TrtllmServer())
    engine.publish({"type": "created", "num_blocks_per_cache_level": [8, 8]})
    engine.publish(stored(PROMPT))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    key = PROMPT.keys()[5]
    engine.publish({"type": "updated", "block_hash": key, "cache_level": {"new_value": 1, "old_value": 0}})
    bridge.agrees(PROMPT, {"a": {"HBM": 5, "HOST": 1}})
    engine.publish(removed(key))
    bridge.agrees(PROMPT, {"a": {"HBM": 5}})


def test_events_that_are_lost_on_the_way_cost_the_epoch(site: Site, servers: list[TrtllmServer]):
    servers.append(engine := TrtllmServer())
    engine.publish(stored(PROMPT))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.publish(removed(*PROMPT.keys()), is_lost=True)
    engine.publish(stored(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}
    engine.breaks.set()  # and nothing comes behind it
    engine.publish(removed(*OTHER.keys()))
    eventually(lambda: not engine._waiting)
    engine.breaks.clear()
    bridge.agrees(OTHER, {})


def test_an_engine_that_starts_again_is_another_process(site: Site, servers: list[TrtllmServer]):
    port = free_port()
    engine = TrtllmServer(port)
    engine.publish(stored(PROMPT))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.close()
    servers.append(again := TrtllmServer(port))
    again.publish(stored(OTHER, 0, 1))
    again.publish(stored(OTHER, 1))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}


def test_attention_ranks_are_instances_of_their_own(site: Site, servers: list[TrtllmServer]):
    servers.append(engine := TrtllmServer())
    engine.publish(stored(PROMPT, 0, 1))
    engine.publish(stored(PROMPT, 0, 2), rank=1)
    engine.publish(stored(PROMPT, 0, 3), rank=2)  # of which the settings know nothing
    bridge = site.bridge(a=engine.settings | {"ranks": 2})
    bridge.agrees(PROMPT, {"a-dp0": {"HBM": 1}, "a-dp1": {"HBM": 2}})
    eventually(lambda: "1 unreadable" in getattr(site.catalog.instance("a-dp0"), "trouble", ""))


@pytest.mark.parametrize("site", [2.0], indirect=True)
def test_an_engine_that_answers_nonsense_is_left_out_until_it_answers(site: Site, servers: list[TrtllmServer]):
    servers.append(engine := TrtllmServer())
    engine.publish(stored(PROMPT))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.says = b"<html>"
    bridge.agrees(PROMPT, {})
    engine.says = None
    engine.publish(stored(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
