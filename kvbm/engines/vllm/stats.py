"""The connector's numbers in vLLM's own statistics: its log line, and its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvbm.engines.vllm.numbers import COUNTERS, COUNTERS_BY_TIER, COUNTERS_BY_WHY, GAUGES, TIMES, merge
from kvbm.safe_log import RateLimitedLog

_remarks = RateLimitedLog()

_PREFIX = "kvbm_vllm_"
_LABELS = dict.fromkeys(COUNTERS_BY_TIER, "tier") | dict.fromkeys(COUNTERS_BY_WHY, "why")
_SPEEDS = (("load_seconds", "loaded_bytes", "load_gb_per_s"), ("store_seconds", "stored_bytes", "store_gb_per_s"))
_registered: list[Any] = []  # of the newest engine of this process
_COPY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class KvbmStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """Numbers of an interval, `data` as `numbers.Numbers.data` has them; those of ranks, the scheduler and later steps
    add up.
    """

    def reset(self) -> None:
        """Forget all numbers."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take in another's numbers; itself."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Numbers for a line of log: sums, and how fast ranks copied."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in _LABELS:
                line.update({f"{name}_{label.lower()}": count for label, count in value.items()})
            elif name in TIMES:
                line[name] = round(sum(value), 4)
            else:
                line[name] = value
        for seconds, moved, speed in _SPEEDS:
            if line.get(seconds):
                line[speed] = round(line.get(moved, 0) / line[seconds] / 1e9, 2)
        return line

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """The numbers as Prometheus metrics `kvbm_vllm_…`, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        if self._counter_cls is Counter:  # Ray's may be made beside them
            _unregister_earlier()
        names = list(labelnames)
        engines = per_engine_labelvalues
        self._counters = {
            name: create_metric_per_engine(self._metric(self._counter_cls, name, meaning, names), engines)
            for name, meaning in COUNTERS.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._metric(self._gauge_cls, name, meaning, names, multiprocess_mode="mostrecent"), engines
            )
            for name, meaning in GAUGES.items()
        }
        self._times = {
            name: create_metric_per_engine(
                self._metric(self._histogram_cls, name, meaning, names, buckets=_COPY_BUCKETS_S), engines
            )
            for name, meaning in TIMES.items()
        }
        self._labelled = {
            name: self._metric(self._counter_cls, name, meaning, [*names, _LABELS[name]])
            for name, meaning in (COUNTERS_BY_TIER | COUNTERS_BY_WHY).items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's numbers.

        Names that this version does not know are left out: another one's workers count them. What Prometheus refuses is
        left out, too: vLLM's API server would end.
        """
        for name, value in transfer_stats_data.items():
            try:
                self._add(name, value, engine_idx)
            except Exception as error:  # noqa: BLE001 - the engine must not hear of it
                _remarks.warn(
                    "numbers.refused", name=name, value=value, why=repr(error), remedy="report it; it is not counted"
                )

    def _add(self, name: str, value: Any, engine_idx: int) -> None:
        if name in self._counters:
            self._counters[name][engine_idx].inc(value)
        elif name in self._gauges:
            self._gauges[name][engine_idx].set(value)
        elif name in self._times:
            for seconds in value:
                self._times[name][engine_idx].observe(seconds)
        elif name in self._labelled:
            for label, count in value.items():
                self._labelled[name].labels(*self.per_engine_labelvalues[engine_idx], label).inc(count)

    def _metric(self, kind: Any, name: str, meaning: str, labelnames: list[str], **more: Any) -> Any:
        metric = kind(name=_PREFIX + name, documentation=meaning, labelnames=labelnames, **more)
        if self._counter_cls is Counter:
            _registered.append(metric)
        return metric


def _unregister_earlier() -> None:
    """Take the metrics of this process's engine before out of the registry, as vLLM does with its own: two of a name
    are refused.
    """
    while _registered:
        try:
            REGISTRY.unregister(_registered.pop())
        except KeyError:  # somebody has done so
            continue
