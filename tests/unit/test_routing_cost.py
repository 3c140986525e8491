"""What a route costs, as a function of numbers; and how an engine measures two of them."""

from __future__ import annotations

import math

import pytest

from kvbm.catalog.routing.cost import (
    ClusterNumbers,
    InstanceNumbers,
    admits,
    believed,
    decode_cost,
    prefill_cost,
    work_weight,
)
from kvbm.config import RoutingSettings
from kvbm.manager.load_meter import LoadMeter

SETTINGS = RoutingSettings(work_weight=2.0, crowding_weight=4.0, own_crowding=0.5, balance_s=3.0, prior_s=10.0)


def test_the_parts_are_waiting_weighed_work_balance_and_fetching() -> None:
    cluster = ClusterNumbers(least_s=1.0, mean_recent_s=5.0)
    cost = prefill_cost(SETTINGS, cluster, InstanceNumbers(3.0, 1_000.0, 500, 8.0, 0.25))
    assert cost.queueing_s == 3.0
    assert cost.recompute_s == pytest.approx((2 + 4 * (1 + 0.5 * 2)) * 0.5)
    assert cost.balance_s == pytest.approx(3 * (8 - 5) / (5 + 10))
    assert cost.fetch_s == 0.25
    assert cost.sum_s == pytest.approx(3.0 + 5.0 + 0.6 + 0.25)
    assert cost.ttft_s == pytest.approx(3.0 + 0.5 + 0.25)


def test_work_weighs_more_the_longer_everybody_waits_and_never_without_bound() -> None:
    assert work_weight(SETTINGS, 0.0, 0.0) == 2.0
    assert work_weight(SETTINGS, 0.0, 2.0) == pytest.approx(2 + 4 * 0.5 * 2)
    assert work_weight(SETTINGS, 2.0, 2.0) == pytest.approx(2 + 4 * 2)
    assert work_weight(SETTINGS, 1e9, 1e9) == work_weight(SETTINGS, 1e12, 1e12)
    assert work_weight(SETTINGS, 0.0, 0.0, "interactive") == 1.0
    assert work_weight(SETTINGS, 0.0, 0.0, "batch") == 4.0


def test_decoding_waits_for_requests_that_run_and_computes_nothing() -> None:
    cost = decode_cost(SETTINGS, ClusterNumbers(9.0, 0.0), InstanceNumbers(9.0, 1_000.0, 500, 0.0, 0.5), 7)
    assert cost == (pytest.approx(0.07), 0.0, 0.0, 0.5, pytest.approx(0.57))


def test_a_rate_is_believed_within_four_times_of_what_is_expected() -> None:
    assert [believed(rate, 100.0) for rate in (99.0, 400.0, 401.0, 25.0, 24.0, 1e300)] == [99, 400, 400, 25, 25, 400]
    assert {believed(rate, 100.0) for rate in (0.0, -5.0, math.nan, math.inf, -math.inf)} == {100.0}


def test_who_cannot_be_in_time_is_refused_and_a_batch_while_all_wait() -> None:
    settings = RoutingSettings(batch_wait_s=10.0)
    assert admits(settings, "standard", None, 1e9, 1e9)
    assert admits(settings, "standard", 2.0, 2.0, 1e9)
    assert not admits(settings, "interactive", 2.0, 2.1, 0.0)
    assert [admits(settings, "batch", None, 1e9, least_s) for least_s in (10.0, 10.1)] == [True, False]


def test_a_meter_measures_work_and_service_and_forgets() -> None:
    meter = LoadMeter(half_life_s=10.0)
    assert (meter.prefill_tokens_per_s, meter.queue_tokens_per_s) == (0.0, 0.0)
    meter.prefilled(1_000, 0.5, elapsed_s=2.0)
    assert (meter.prefill_tokens_per_s, meter.queue_tokens_per_s) == (2_000.0, 500.0)
    for _ in range(200):
        meter.prefilled(400, 1.0, elapsed_s=0.1)  # no less time has passed than the work took
    assert meter.prefill_tokens_per_s == pytest.approx(400.0, rel=0.01)
    assert meter.queue_tokens_per_s == pytest.approx(400.0, rel=0.01)
    for tokens, seconds in ((0, 1.0), (-5, 1.0), (5, 0.0), (5, math.inf), (5, math.nan)):
        meter.prefilled(tokens, seconds)
    assert meter.prefill_tokens_per_s == pytest.approx(400.0, rel=0.01)
