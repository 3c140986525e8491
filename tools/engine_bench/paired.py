"""Statistics of paired measurements: how large a ratio is, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_Z = statistics.NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A mean, and how far from it the truth may be with 95 % confidence.

    `half` is infinite of fewer than three values.
    """

    mean: float
    half: float
    count: int


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.3 % from 3 degrees of freedom on; infinite below 2.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    if degrees < 2:
        return math.inf
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value with its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 3:
        return Interval(mean, math.inf, len(values))
    return Interval(mean, student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)), len(values))


def is_settled(values: Sequence[float], half: float, least: int) -> bool:
    """Whether the 95 % interval of the mean is within ± `half`, of at least `least` values.

    `least` keeps a few values that happen to lie close together from ending a measurement.
    """
    return len(values) >= max(least, 3) and interval(values).half <= half


def spread(values: Sequence[float]) -> float | None:
    """Half the distance of the quartiles over the median; None of fewer than two values, or around 0."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else None
