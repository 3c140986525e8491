"""Two engines in one process, one after the other, as notebooks and test suites have them."""

from __future__ import annotations

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.cluster import Cluster
from tests.engines.vllm.harness.setups import with_kvbm


@pytest.mark.parametrize("core", ["inside", "process"])
def test_the_next_engine_of_a_process_hits_what_the_one_before_has_stored(engines, llama, truth, tmp_path, core):
    asks = truth.prompts("one-process", 3, 300)
    with engines.running(with_kvbm(llama, tmp_path / "a", {"pools.nvme.slots": 400}, core=core)) as engine:
        scenarios.ask(engine, truth, asks, [0] * 3)
        engine.offload()
        if core == "inside":
            assert engine.ask("kept_of_kvbm", str(tmp_path))
        engine.ask("drop")
        assert engine.ask("kept_of_kvbm", str(tmp_path)) == []
        for _ in range(2):
            engine.ask("start_anew")
            scenarios.ask(engine, truth, asks, [ask.reusable_tokens for ask in asks])
            assert engine.in_core("counted")["hits_NVME"] > 0
            assert engine.metrics()["kvbm_vllm_hit_blocks_total{tier=NVME}"] > 0
            engine.ask("drop")
        assert engine.ask("kept_of_kvbm", str(tmp_path)) == []


def test_the_one_before_leaves_no_connection_and_the_next_one_tells_the_catalog(engines, llama, truth, tmp_path):
    asks = truth.prompts("one-process-stream", 2, 300)
    with Cluster(tmp_path / "cluster") as cluster:
        ports = [int(url.rpartition(":")[2]) for url in cluster.addresses.values()]
        described = with_kvbm(llama, tmp_path / "a", {"pools.nvme.slots": 400, **cluster.settings})
        with engines.running(described) as engine:
            for cached in ([0, 0], [ask.reusable_tokens for ask in asks]):
                scenarios.ask(engine, truth, asks, cached)
                engine.offload()
                cluster.agree(engine)
                assert engine.ask("connections", ports) > 0
                engine.ask("drop")
                assert engine.ask("connections", ports) == 0
                assert engine.ask("kept_of_kvbm", str(tmp_path)) == []
                engine.ask("start_anew")
