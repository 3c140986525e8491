from __future__ import annotations

import pytest

from kvbm.catalog.follow import sampled_hits
from kvbm.catalog.follow.sampled_hits import SampledCount, SampledHits
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId
from kvbm.streams.base import AccessSample


def sample(space: int, blocks: int, depth: int, rate: float) -> AccessSample:
    return AccessSample(
        instance=InstanceId("a"),
        cluster="c",
        wall_time_ns=1,
        namespace=NamespaceId(bytes([space]) * 16),
        hashes=bytes(HASH_BYTES * blocks),
        depth=depth,
        rate=rate,
    )


def test_a_sample_counts_for_as_many_prompts_as_it_stands_for() -> None:
    hits = SampledHits()
    hits.hear(sample(1, 10, 4, 0.5))
    hits.hear(sample(1, 10, 10, 1.0))
    hits.hear(sample(2, 3, 0, 0.25))
    assert hits.by_namespace[NamespaceId(b"\1" * 16)] == SampledCount(3.0, 30.0, 18.0)
    assert hits.total == SampledCount(7.0, 42.0, 18.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, 1e-9, float("nan"), float("inf")])
def test_a_rate_that_is_none_counts_for_nothing(rate: float) -> None:
    hits = SampledHits()
    hits.hear(sample(1, 10, 4, rate))
    assert hits.total == SampledCount() and not hits.by_namespace


def test_no_more_is_found_than_was_asked_for() -> None:
    hits = SampledHits()
    hits.hear(sample(1, 10, 99, 1.0))
    hits.hear(sample(1, 10, -5, 1.0))
    assert hits.total == SampledCount(2.0, 20.0, 10.0)


def test_namespaces_beyond_the_bound_count_in_the_total_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_hits, "_MOST_NAMESPACES", 1)
    hits = SampledHits()
    for space in (1, 2, 1):
        hits.hear(sample(space, 1, 1, 1.0))
    assert list(hits.by_namespace) == [NamespaceId(b"\1" * 16)] and hits.total.prompts == 3.0
