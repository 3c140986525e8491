"""vLLM's `kv_role`: who stores, and who loads."""

from __future__ import annotations

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.setups import connector
from tests.engines.vllm.harness.words import Setup


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_consumer_hits_what_a_producer_stored_and_neither_does_the_others_work(engines, truth_of, tmp_path, kind):
    truth = truth_of(kind)
    stored, own = truth.prompts("role-stored", 2, 300), truth.prompts("role-own", 2, 300)
    whole = [ask.reusable_tokens for ask in stored]

    def of(kv_role):
        config = connector(tmp_path / "a", {"pools.nvme.slots": 400}) | {"kv_role": kv_role}
        return Setup(engines.model(kind), connector=config)

    with engines.running(of("kv_producer")) as producer:
        scenarios.ask(producer, truth, stored, [0, 0])
        scenarios.ask_after_garbage(producer, truth, stored, [0, 0])
        producer.offload()
        assert producer.in_core("counted")["engine_stores"] > 0
        assert not any(count for name, count in producer.in_core("counted").items() if name.startswith("hits_"))
        producer.stop()
    with engines.running(of("kv_consumer")) as consumer:
        scenarios.ask(consumer, truth, stored, whole)
        scenarios.ask(consumer, truth, own, [0, 0])
        consumer.offload()
        scenarios.ask_after_garbage(consumer, truth, own, [0, 0])
        scenarios.ask_after_garbage(consumer, truth, stored, whole)
        assert consumer.in_core("counted")["engine_stores"] == 0
        consumer.stop()
    with engines.running(of("kv_both")) as engine:
        scenarios.ask(engine, truth, [*stored, *own], [*whole, 0, 0])
        scenarios.ask_after_garbage(engine, truth, own, [ask.reusable_tokens for ask in own])
