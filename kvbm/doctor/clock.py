"""The clock: whether somebody keeps it right, and whether it runs evenly."""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

from kvbm.doctor.finding import DoctorFinding, milliseconds, ok, problem, warning

_UNSYNCHRONIZED = 0x40  # STA_UNSYNC
_WATCHED_S = 0.3
_STEP_S = 0.005
_LARGE_ERROR_S = 0.1
_EARLIEST_S = 1_735_689_600  # 2025-01-01: what wakes before has lost its time


class ClockFacts(NamedTuple):
    """The wall clock.

    Attributes:
        known: the kernel told; else the next two mean nothing.
        synchronized: somebody (NTP, PTP) keeps it. error_s: how far off it may be, as estimated by who keeps it.
        drift_s: between wall and monotonic clock while they were watched. went_back: the monotonic clock did.
    """

    known: bool
    synchronized: bool
    error_s: float
    drift_s: float
    went_back: bool
    now_s: float


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def look_at_clock() -> ClockFacts:
    """See `ClockFacts`."""
    timex, known = _Timex(), False
    try:
        known = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) >= 0
    except (OSError, AttributeError):
        pass  # not Linux
    begin_s, last_s = time.time() - time.monotonic(), time.monotonic()
    until_s, went_back = last_s + _WATCHED_S, False
    while last_s < until_s:
        time.sleep(0.002)
        now_s = time.monotonic()
        went_back, last_s = went_back or now_s < last_s, now_s
    drift_s = time.time() - time.monotonic() - begin_s
    synchronized = known and not timex.status & _UNSYNCHRONIZED
    return ClockFacts(known, synchronized, timex.esterror / 1e6, drift_s, went_back, time.time())


def judge_clock(facts: ClockFacts) -> DoctorFinding:
    """Offsets order events, not clocks; ages, TTLs and `state --at TIME` go by the clock."""
    check, keep = "clock", "run chrony or systemd-timesyncd on the host (timedatectl set-ntp true)"
    if facts.went_back:
        return problem(check, "the monotonic clock went back", "choose another clock source, such as tsc or kvm-clock")
    if facts.now_s < _EARLIEST_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(max(0.0, facts.now_s)))
        return problem(check, f"it says {day}", f"set the clock, then {keep}: certificates fail with this one")
    if abs(facts.drift_s) > _STEP_S:
        found = f"the wall clock moved {milliseconds(abs(facts.drift_s))} against the monotonic one in {_WATCHED_S:g} s"
        return warning(check, found, f"{keep}, and let it slew, not step, after the start")
    if not facts.known:
        return warning(check, "even; the kernel does not say whether anybody keeps it", keep)
    if not facts.synchronized:
        return warning(check, "nobody keeps it (no NTP as far as the kernel knows); it runs evenly", keep)
    if facts.error_s > _LARGE_ERROR_S:
        return warning(
            check, f"kept, but up to {milliseconds(facts.error_s)} off", "see chronyc tracking: is its server far?"
        )
    return ok(check, f"kept, within {milliseconds(facts.error_s)} as estimated; runs evenly")
