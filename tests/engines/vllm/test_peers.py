"""Two engines of one machine, without a store between them: one answers with blocks that lie in the other's host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvbm.core.ids import NamespaceId
from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.cluster import Cluster
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask
from tests.eventually import eventually

CORES = [
    pytest.param({}, id="inside", marks=pytest.mark.smoke),
    pytest.param({"core": "process", "asynchronous": True}, id="process", marks=pytest.mark.engines_full),
]


@contextmanager
def two(engines, model, folder, setup) -> Iterator[tuple[Cluster, Engine, Engine]]:
    """Engines with host memory alone, of which both lend and read."""
    with Cluster(folder / "cluster") as cluster:
        settings = cluster.settings | {"transport.listen": "host"}
        with (
            engines.running(with_kvbm(model, folder / "a", settings, **setup)) as a,
            engines.running(with_kvbm(model, folder / "b", settings, **setup)) as b,
        ):
            yield cluster, a, b


def wait_lent(cluster: Cluster, owner: Engine, asks: list[Ask]) -> None:
    """Wait until the catalog tells others that an engine lends all blocks of these prompts."""
    owner.offload()
    name = owner.in_core("instance")
    for ask in asks:
        space, packed = owner.in_core("hashes", list(ask.tokens), ask.salt)
        namespace, hashes = NamespaceId(bytes.fromhex(space)), bytes.fromhex(packed)
        wanted = name, len(ask.tokens) // BLOCK_TOKENS
        eventually(
            lambda namespace=namespace, hashes=hashes, wanted=wanted: (
                wanted  # type: ignore[misc]
                in [(one.instance, one.depth) for one in cluster.client.find(namespace, hashes).peers]
            ),
            "the catalog does not say that it lends its blocks",
        )


def from_peer(engine: Engine) -> tuple[int, dict[str, int]]:
    """Blocks that came from another engine, and all that requests got, by tier."""
    counted = engine.in_core("counted")
    assert counted["failed_copies"] == counted["corrupt_blocks"] == 0
    return counted["peer_hits"], {name: count for name, count in counted.items() if name.startswith("hits_") and count}


@pytest.mark.parametrize("setup", CORES)
def test_the_first_token_comes_from_anothers_host_memory(engines, llama, truth, tmp_path, setup):
    asks = truth.prompts("lent", 3, 300)
    cached = [ask.reusable_tokens for ask in asks]
    blocks = sum(cached) // BLOCK_TOKENS
    with two(engines, llama, tmp_path, setup) as (cluster, a, b):
        scenarios.ask(a, truth, asks, [0] * 3)
        wait_lent(cluster, a, asks)
        scenarios.ask_after_garbage(b, truth, asks, cached)  # b has computed nothing so far
        assert from_peer(b) == (blocks, {"hits_HOST": blocks})
        b.settle()
        scenarios.ask_after_garbage(b, truth, asks, cached)
        assert from_peer(b) == (blocks, {"hits_HOST": 2 * blocks})  # it has kept them
        scenarios.ask_after_garbage(a, truth, asks, cached)
        assert from_peer(a) == (0, {"hits_HOST": blocks})
        cluster.agree(a, b)


def test_a_prompt_that_goes_on_behind_anothers_blocks_is_computed_from_there(engines, llama, truth, tmp_path):
    first = truth.prompt("lent-begin", 320)
    more = truth.prompt("lent-more", 500, after=first.tokens)
    with two(engines, llama, tmp_path, {}) as (cluster, a, b):
        scenarios.ask(a, truth, [first], [0])
        wait_lent(cluster, a, [first])
        scenarios.ask_after_garbage(b, truth, [more], [320])
        assert from_peer(b)[0] == 10
        wait_lent(cluster, b, [more])
        scenarios.ask_after_garbage(a, truth, [more], [more.reusable_tokens])
        assert from_peer(a) == (5, {"hits_HOST": 15})


def test_blocks_of_an_engine_that_is_gone_are_computed(engines, llama, truth, tmp_path):
    asks = truth.prompts("lost", 2, 300)
    with two(engines, llama, tmp_path, {}) as (cluster, a, b):
        scenarios.ask(a, truth, asks, [0] * 2)
        wait_lent(cluster, a, asks)
        a.kill()
        scenarios.ask_after_garbage(b, truth, asks, [0] * 2)
        assert b.in_core("counted")["peer_hits"] == 0
        assert b.in_core("refusal") == ""
        scenarios.ask_after_garbage(b, truth, asks, [ask.reusable_tokens for ask in asks])
