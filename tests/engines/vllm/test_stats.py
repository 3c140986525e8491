"""The connector's numbers through vLLM's own classes: its aggregation, its log line, and a Prometheus registry."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvbm.engines.vllm.numbers import COUNTERS, COUNTERS_BY_TIER, COUNTERS_BY_WHY, GAUGES, TIMES, Numbers
from kvbm.engines.vllm.stats import KvbmPromMetrics, KvbmStats


def _of_a_rank(seconds: float) -> KvbmStats:
    numbers = Numbers()
    numbers.add("loaded_bytes", 4_000_000)
    numbers.add("loaded_blocks", 4)
    numbers.time("load_seconds", seconds)
    return KvbmStats(numbers.take())


def _of_the_scheduler() -> KvbmStats:
    numbers = Numbers()
    numbers.add_of("hit_blocks", "HOST", 3)
    numbers.add_of("hit_blocks", "NVME", 1)
    numbers.add("stores_skipped", 0)
    numbers.set("storing_blocks", 7)
    return KvbmStats(numbers.take())


def test_nothing_counted_is_empty() -> None:
    assert KvbmStats().is_empty()
    assert KvbmStats(Numbers().take()).is_empty()
    stats = _of_the_scheduler()
    assert not stats.is_empty() and "stores_skipped" not in stats.data
    stats.reset()
    assert stats.is_empty()


def test_ranks_and_scheduler_add_up_to_one_line() -> None:
    stats = pickle.loads(pickle.dumps(_of_a_rank(0.001)))
    total = stats.aggregate(_of_a_rank(0.003)).aggregate(_of_the_scheduler()).aggregate(_of_the_scheduler())
    assert total is stats
    assert total.reduce() == {
        "loaded_bytes": 8_000_000,
        "loaded_blocks": 8,
        "load_seconds": 0.004,
        "load_gb_per_s": 2.0,
        "hit_blocks_host": 6,
        "hit_blocks_nvme": 2,
        "storing_blocks": 7,
    }
    later = _of_the_scheduler().aggregate(KvbmStats({"hit_blocks": {"OBJECT": 2}, "storing_blocks": 0}))
    assert later.to_dict() == {"hit_blocks": {"HOST": 3, "NVME": 1, "OBJECT": 2}, "storing_blocks": 0}


def test_vllm_aggregates_what_ranks_count() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    def output(stats: KvbmStats | None) -> ModelRunnerOutput:
        made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        made.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
        return made

    merged = KVOutputAggregator(3).aggregate([output(_of_a_rank(0.1)), output(None), output(_of_a_rank(0.2))])
    assert merged is not None and merged.kv_connector_output is not None
    stats = merged.kv_connector_output.kv_connector_stats
    assert stats is not None and stats.data["loaded_blocks"] == 8 and stats.data["load_seconds"] == [0.1, 0.2]


def _exposed(metric: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(metric, labels)


def _made(counter: Any = Counter, gauge: Any = Gauge, histogram: Any = Histogram) -> KvbmPromMetrics:
    return KvbmPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: counter, Gauge: gauge, Histogram: histogram},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


@pytest.fixture
def metrics() -> KvbmPromMetrics:
    return _made()


def test_the_next_engine_of_a_process_takes_the_metrics_over(metrics: KvbmPromMetrics) -> None:
    labels = {"model_name": "m", "engine": "0"}
    metrics.observe(_of_a_rank(0.002).to_dict())
    assert _exposed("kvbm_vllm_loaded_blocks_total", **labels) == 4
    later = _made()
    assert _exposed("kvbm_vllm_loaded_blocks_total", **labels) == 0
    later.observe(_of_a_rank(0.002).to_dict())
    metrics.observe(
        _of_a_rank(0.002).to_dict()
    )  # the engine before, still running: nobody sees its numbers, and nothing breaks
    assert _exposed("kvbm_vllm_loaded_blocks_total", **labels) == 4
    assert _exposed("kvbm_vllm_load_seconds_count", **labels) == 1


def test_metrics_of_another_kind_leave_those_of_prometheus_alone(metrics: KvbmPromMetrics) -> None:
    elsewhere = MagicMock()
    _made(elsewhere, elsewhere, elsewhere)
    metrics.observe(_of_a_rank(0.002).to_dict())
    assert _exposed("kvbm_vllm_loaded_blocks_total", model_name="m", engine="0") == 4


def test_numbers_are_exposed_by_engine_and_tier(metrics: KvbmPromMetrics) -> None:
    of_first, of_second = {"model_name": "m", "engine": "0"}, {"model_name": "m", "engine": "1"}
    metrics.observe(_of_a_rank(0.002).to_dict(), 0)
    metrics.observe(_of_a_rank(0.004).to_dict(), 0)
    metrics.observe(_of_the_scheduler().to_dict(), 1)
    metrics.observe({"a number of another version": 3}, 1)
    assert _exposed("kvbm_vllm_loaded_bytes_total", **of_first) == 8_000_000
    assert _exposed("kvbm_vllm_loaded_bytes_total", **of_second) == 0
    assert _exposed("kvbm_vllm_load_seconds_count", **of_first) == 2
    assert _exposed("kvbm_vllm_load_seconds_bucket", **of_first, le="0.0025") == 1
    assert _exposed("kvbm_vllm_hit_blocks_total", **of_second, tier="HOST") == 3
    assert _exposed("kvbm_vllm_hit_blocks_total", **of_second, tier="NVME") == 1
    assert _exposed("kvbm_vllm_storing_blocks", **of_second) == 7


def test_every_number_has_a_metric(metrics: KvbmPromMetrics) -> None:
    text = generate_latest(REGISTRY).decode()
    for name in [*COUNTERS, *COUNTERS_BY_TIER, *COUNTERS_BY_WHY]:
        assert f"# TYPE kvbm_vllm_{name}_total counter" in text
    for name in GAUGES:
        assert f"# TYPE kvbm_vllm_{name} gauge" in text
    for name in TIMES:
        assert f"# TYPE kvbm_vllm_{name} histogram" in text


def test_a_number_that_prometheus_refuses_costs_nobody_the_engine(metrics: KvbmPromMetrics) -> None:
    refused = {"hit_blocks": {"HOST": -1}, "load_seconds": None, "storing_blocks": "7", "stored_blocks": -2}
    metrics.observe(refused | {"loaded_blocks": 4})
    assert _exposed("kvbm_vllm_loaded_blocks_total", model_name="m", engine="0") == 4
