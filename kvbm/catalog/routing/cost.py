"""What serving a prompt at an instance costs, in seconds: a function of a few numbers, without memory or clock.

    queueing_s   what waits there now / Q                          Q: tokens it works off its queue a second
    recompute_s  W * missing tokens / P                            P: tokens it prefills a second
    balance_s    B * (its share of what was routed lately against the mean's)
    fetch_s      bringing what is held elsewhere than in HBM to HBM

W is what a second of work is worth against a second of this prompt's waiting. Work that could have been spared is
waited for by all who come after it, until the queue is empty: nobody when instances are idle, everybody when even the
least busy has a queue. So

    W = work_weight + crowding_weight * (least_s + own_crowding * (own_s - least_s))

where own_s is the queue of the instance and least_s that of the least busy one. A prompt being decoded elsewhere than
it was prefilled costs what it must wait for there: `decode_cost`.

P and Q are measured by the instance and believed only within 4 x what the catalog's settings expect, either way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvbm.config.settings import RoutingSettings

MEASURED_WITHIN = 4.0
"""A rate that an instance reports counts as at most so many times the expected one, and at least its so-many-th
part.
"""

MOST_WEIGHT = 1_000.0
CLASS_WEIGHTS = {"interactive": 0.5, "standard": 1.0, "batch": 2.0}


class InstanceNumbers(NamedTuple):
    """What the cost depends on of one instance.

    Attributes:
        queueing_s: how long a prompt that comes now waits there.
        tokens_per_s: P.
        missing_tokens: of the prompt, what it must compute.
        recent_s: what was routed there lately, decayed, in seconds of prefill.
        fetch_s: bringing to HBM what it holds, or reaches, elsewhere.
    """

    queueing_s: float
    tokens_per_s: float
    missing_tokens: int
    recent_s: float
    fetch_s: float


class ClusterNumbers(NamedTuple):
    """What the cost depends on of all candidates together.

    Attributes:
        least_s: the shortest wait.
        mean_recent_s: the mean of `InstanceNumbers.recent_s`.
    """

    least_s: float
    mean_recent_s: float


class Cost(NamedTuple):
    """The parts, and when the first token is to be expected, in seconds."""

    queueing_s: float
    recompute_s: float
    balance_s: float
    fetch_s: float
    ttft_s: float

    @property
    def sum_s(self) -> float:
        """What is compared."""
        return self.queueing_s + self.recompute_s + self.balance_s + self.fetch_s


def believed(measured: float, expected: float) -> float:
    """A rate an instance has reported, as far as it is believed; 0 or no number: it has reported none."""
    if not (measured > 0 and math.isfinite(measured)):
        return expected
    return min(max(measured, expected / MEASURED_WITHIN), expected * MEASURED_WITHIN)


def work_weight(settings: RoutingSettings, least_s: float, own_s: float, latency: str = "standard") -> float:
    """W at an instance.

    Args:
        latency: an interactive prompt counts its own time double, one of a batch that of others.
    """
    crowding_s = least_s + settings.own_crowding * (own_s - least_s)
    return min(MOST_WEIGHT, (settings.work_weight + settings.crowding_weight * crowding_s) * CLASS_WEIGHTS[latency])


def prefill_cost(
    settings: RoutingSettings, cluster: ClusterNumbers, instance: InstanceNumbers, latency: str = "standard"
) -> Cost:
    """The cost where the prompt is prefilled."""
    weight = work_weight(settings, cluster.least_s, instance.queueing_s, latency)
    compute_s = instance.missing_tokens / instance.tokens_per_s
    return Cost(
        instance.queueing_s,
        weight * compute_s,
        _balance_s(settings, cluster, instance),
        instance.fetch_s,
        instance.queueing_s + compute_s + instance.fetch_s,
    )


def decode_cost(
    settings: RoutingSettings, cluster: ClusterNumbers, instance: InstanceNumbers, running_requests: int
) -> Cost:
    """The cost where the prompt is only decoded: it waits for no prefill, and what is missing is brought, which
    `fetch_s` has.
    """
    waiting_s = settings.decode_request_s * running_requests
    return Cost(waiting_s, 0.0, _balance_s(settings, cluster, instance), instance.fetch_s, waiting_s + instance.fetch_s)


def _balance_s(settings: RoutingSettings, cluster: ClusterNumbers, instance: InstanceNumbers) -> float:
    over_s = instance.recent_s - cluster.mean_recent_s
    return settings.balance_s * over_s / (cluster.mean_recent_s + settings.prior_s)


def admits(settings: RoutingSettings, latency: str, deadline_s: float | None, ttft_s: float, least_s: float) -> bool:
    """Whether a prompt should be served now.

    Args:
        ttft_s: what is expected at the best instance.
        least_s: the shortest wait of all.
    """
    if deadline_s is not None and ttft_s > deadline_s:
        return False
    return latency != "batch" or least_s <= settings.batch_wait_s
