"""Measuring: samples with a warm-up, medians, percentiles, noise, CPU time beside wall time, and what a process
uses.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec


class Row(msgspec.Struct, kw_only=True):
    """One measured number.

    Attributes:
        what, unit: in words.
        value: the median of the samples, or a single reading.
        noise: half the distance of the quartiles over the median; None for a single reading.
        cpu: CPU time over wall time while it was measured; well below 1 means the machine was busy elsewhere. None
            where it was not taken.
        goal: what it should be, in words; "" where nothing is asked of it.
        spread: half the distance of the quartiles in the row's own unit, instead of `noise` where the value is a
            difference of two runs, which may be near 0 or below.
    """

    what: str
    unit: str
    value: float
    noise: float | None = None
    cpu: float | None = None
    goal: str = ""
    spread: float | None = None


class Found(NamedTuple):
    """What one benchmark found.

    Attributes:
        numbers: those that have a name of their own in the report; None: it could not be measured here.
        notes: what was measured on what, in sentences.
    """

    rows: list[Row]
    numbers: dict[str, float | None]
    notes: tuple[str, ...] = ()


class Sample(msgspec.Struct):
    """One timed piece of work, in seconds."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Sample:
    """Run it once; this thread's CPU time beside wall time."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - wall, time.thread_time() - cpu)


def rate(what: str, unit: str, units: float, works: Sequence[Callable[[], object]], scale: float = 1.0) -> Row:
    """Units a second: `works` are run one after the other; the first is the warm-up and does not count.

    Args:
        units: what one piece of work does.
        scale: the row is in this many units.
    """
    gc.collect()
    samples = [timed(work) for work in works][1:]
    return row_of(what, unit, [units / sample.wall_s / scale for sample in samples], samples)


def noise_of(values: Sequence[float]) -> float | None:
    """Half the distance of the quartiles over the median; None where that is 0."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return (high - low) / 2 / middle if middle else None


def row_of(what: str, unit: str, values: Sequence[float], samples: Sequence[Sample] = ()) -> Row:
    """The median of values, with their noise."""
    wall = sum(sample.wall_s for sample in samples)
    cpu = sum(sample.cpu_s for sample in samples) / wall if wall else None
    return Row(what=what, unit=unit, value=statistics.median(values), noise=noise_of(values), cpu=cpu)


def difference_of(what: str, unit: str, values: Sequence[float]) -> Row:
    """The median of differences of two runs each, with how far they scatter. Two values at least."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Row(what=what, unit=unit, value=middle, spread=(high - low) / 2)


def within_noise(row: Row) -> bool:
    """Whether a difference is no larger than it scatters, so that nobody can tell it from none."""
    return row.spread is not None and abs(row.value) <= row.spread


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def until(condition: Callable[[], bool], otherwise: str, wait_s: float, every_s: float) -> None:
    """Wait for something. Raises TimeoutError: it has not come within the time; `otherwise` says what has not."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{otherwise} within {wait_s:g} s")
        time.sleep(every_s)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_mib(pid: int) -> float:
    """Memory of another process that is in RAM now."""
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def processor_s(pid: int) -> float:
    """Processor time that another process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
