"""Routers that listen to vLLM's own KV events, and what they make of the words in which the connector tells of our
tiers.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.eventually import eventually
from tests.servers import free_port
from tests.zmq_publisher import Publisher

PYTHON = Path(__file__).parents[3] / "build" / "routers" / ".venv" / "bin" / "python"
MODEL, BLOCK_TOKENS = "m", 16
TOKENS = list(range(1000, 1064))  # four blocks
WAIT_S = 120.0  # for an indexer that starts


def stored(keys: list[int], medium: str, **more: Any) -> dict[str, Any]:
    """As `kvbm.engines.vllm.kv_events` says it."""
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "extra_keys": [None] * 4,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


@pytest.fixture
def engine() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


@pytest.fixture
def depths(engine: Publisher) -> Iterator[Callable[[], dict[str, int]]]:
    """What dynamo.indexer answers of the prompt, started as docs/routers.md has it: tokens by tier."""
    assert PYTHON.exists(), f"this test needs dynamo.indexer in {PYTHON}; run: make test-bridge"
    port = free_port()
    flags = ["--block-size", str(BLOCK_TOKENS), "--port", str(port), "--model-name", MODEL]
    worker = f"1=tcp://127.0.0.1:{engine.ports[0]}"
    process = subprocess.Popen([PYTHON, "-m", "dynamo.indexer", *flags, "--workers", worker])
    question = json.dumps({"model_name": MODEL, "token_ids": TOKENS}).encode()

    def ask() -> dict[str, int]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/query", question, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            found = json.loads(answer.read())["instances"].get("1", {})
        return {tier: found[tier] for tier in ("gpu", "cpu", "disk") if found.get(tier)}

    def answers() -> bool:
        try:
            ask()
        except (URLError, OSError):
            return False
        return True

    try:
        eventually(answers, "dynamo.indexer does not answer", WAIT_S)
        yield ask
    finally:
        process.terminate()
        process.wait(60)


def test_dynamo_indexer_finds_what_lies_in_host_alone(engine: Publisher, depths: Callable[[], dict[str, int]]) -> None:
    assert depths() == {}

    def is_found() -> bool:
        engine.publish(stored([11, 12, 13, 14], "CPU"))
        return depths().get("cpu") == len(TOKENS)

    eventually(is_found, state=depths)
    assert "gpu" not in depths()
    engine.publish({"type": "BlockRemoved", "block_hashes": [11, 12, 13, 14], "medium": "CPU", "group_idx": 0})
    eventually(lambda: depths() == {}, state=depths)


def test_dynamo_indexer_indexes_nothing_that_has_an_owner(
    engine: Publisher, depths: Callable[[], dict[str, int]]
) -> None:
    engine.publish(stored([21, 22, 23, 24], "STORAGE", ownership="kvbm"))

    def is_found() -> bool:
        engine.publish(stored([21, 22, 23, 24], "STORAGE", ownership="kvbm"), stored([11, 12, 13, 14], "CPU"))
        return depths().get("cpu") == len(TOKENS)

    eventually(is_found, state=depths)  # the other event of that message was not indexed
    engine.publish({"type": "BlockRemoved", "block_hashes": [11, 12, 13, 14], "medium": "CPU", "group_idx": 0})
    eventually(lambda: depths() == {}, state=depths)
    engine.publish(stored([31, 32, 33, 34], "STORAGE"))  # as with publish.ownership = ""
    eventually(lambda: depths().get("disk") == len(TOKENS), state=depths)
