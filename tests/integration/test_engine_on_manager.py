"""The demo's engine on the real manager: KV that comes back from any tier gives exactly the tokens recomputing
gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm import KvShape, Manager, Namespace, Tier, load_settings, open_manager
from kvbm.demo.engine import Engine, ModelShape, Request, Weights
from kvbm.locate.base import Nowhere
from tests.extras import needed
from tests.managers import KnowsAll
from tests.object_pools import memory_objects

torch = needed("torch", "engine")

SHAPE = ModelShape(vocab=97, layers=2, width=48, heads=4, kv_heads=2, head_dim=12, ffn_width=96, max_tokens=512)
BLOCK_TOKENS, WAIT_S = 4, 60.0
KV = KvShape(SHAPE.layers, BLOCK_TOKENS, SHAPE.kv_heads, SHAPE.head_dim)
NAMESPACE = Namespace(model="tiny", revision="r1", block_tokens=BLOCK_TOKENS, layout=KV.describe())
PROMPT = [(7 * i * i + 3 * i) % SHAPE.vocab for i in range(45)]


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.set_num_threads(1)
    return Weights.random(SHAPE, 3)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    flags = {
        "instance.data_dir": str(tmp_path),
        "pools.hbm.slots": 40,
        "pools.hbm.device": "cpu",
        "pools.host.slots": 40,
        "pools.nvme.slots": 60,
        "nats.enabled": False,
        "onboard.wait_s": WAIT_S,
    }
    objects = memory_objects(KV.block_bytes)
    with open_manager(load_settings(flags=flags), [NAMESPACE], KV.block_bytes, object_pool=objects) as opened:
        opened._loads.locator = KnowsAll()
        yield opened


def ask(weights: Weights, manager: Manager, request: Request, reuse: bool = True) -> tuple[list[int], dict[Tier, int]]:
    engine = Engine(weights, manager, NAMESPACE.id, NAMESPACE.root(), BLOCK_TOKENS, 4, 16, reuse=reuse)
    engine.submit(request)
    (finished,) = engine.run_until_idle()
    assert finished.failed is None
    return finished.new_tokens, dict(finished.hits)


def test_tokens_from_every_tier_equal_those_recomputed(weights: Weights, manager: Manager) -> None:
    request = Request("r", PROMPT, 20)
    truth, hits = ask(weights, manager, request, reuse=False)
    assert hits == {}
    blocks = (len(PROMPT) - 1) // BLOCK_TOKENS
    assert ask(weights, manager, request) == (truth, {})
    assert manager.settle(WAIT_S)
    hotter: list[Tier] = []
    for tier in Tier:
        for emptied in hotter:
            manager.evict(emptied, b"".join(manager.held(emptied)))
        manager.hbm.tensor[[slot for slot in range(40) if Tier.HBM in hotter]] = 0xA5  # a false hit cannot pass
        tokens, hits = ask(weights, manager, request)
        assert hits == {tier: blocks}
        assert tokens == truth
        assert manager.settle(WAIT_S)
        hotter.append(tier)
    assert manager.stats().corrupt_blocks == 0


def test_a_flipped_bit_on_nvme_costs_a_recompute_and_no_token(
    weights: Weights, manager: Manager, tmp_path: Path
) -> None:
    request = Request("r", PROMPT, 20)
    truth, _ = ask(weights, manager, request, reuse=False)
    ask(weights, manager, request)
    assert manager.settle(WAIT_S)
    manager._loads.locator = Nowhere()  # no object is found
    for emptied in (Tier.HBM, Tier.HOST):
        manager.evict(emptied, b"".join(manager.held(emptied)))
    pool = tmp_path / "instances" / "instance-0" / "nvme.pool"
    data = bytearray(pool.read_bytes())
    for at in range(4096 + 64 + 100, len(data), 4096):  # one bit in every slot's bytes
        data[at] ^= 4
    with open(pool, "r+b") as file:
        file.write(data)
    tokens, hits = ask(weights, manager, request)
    assert tokens == truth
    assert hits == {}
    assert manager.stats().corrupt_blocks > 0


def test_conversations_under_pressure_keep_their_tokens(weights: Weights, manager: Manager) -> None:
    engine = Engine(weights, manager, NAMESPACE.id, NAMESPACE.root(), BLOCK_TOKENS, 3, 16)
    prompts = {f"r{i}": [(i * 13 + j * (i % 5 + 2)) % SHAPE.vocab for j in range(20 + 3 * i)] for i in range(10)}
    for _ in range(3):
        for name, tokens in prompts.items():
            engine.submit(Request(name, tokens, 8))
    answers = engine.run_until_idle()
    assert len(answers) == 30
    assert sum(sum(answer.hits.values()) for answer in answers) > 0
    for answer in answers:
        assert answer.failed is None
        truth, _ = ask(weights, manager, Request(answer.id, prompts[answer.id], 8), reuse=False)
        assert answer.new_tokens == truth
    assert manager.settle(WAIT_S)
    for counts in manager.stats().pools.values():
        assert counts.allocated == 0
        assert counts.evictable == counts.held
