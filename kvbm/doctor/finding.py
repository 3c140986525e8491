"""What a check says: one result, what was found in one line, and what to do where it is not well."""

from __future__ import annotations

from enum import Enum

import msgspec


class Result(Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # works; slower, or less safe, than it could be
    PROBLEM = "problem"  # does not work as configured
    UNUSED = "not used"  # not configured, or not there and not asked for


class DoctorFinding(msgspec.Struct, frozen=True):
    """One line of the table.

    Attributes:
        found: one line, with numbers and units.
        fix: what to do, "" where nothing is.
    """

    check: str
    result: Result
    found: str
    fix: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    """All is well."""
    return DoctorFinding(check, Result.OK, found)


def warning(check: str, found: str, fix: str) -> DoctorFinding:
    """It works, but worse than it could."""
    return DoctorFinding(check, Result.WARNING, found, fix)


def problem(check: str, found: str, fix: str) -> DoctorFinding:
    """It does not work as configured."""
    return DoctorFinding(check, Result.PROBLEM, found, fix)


def unused(check: str, found: str) -> DoctorFinding:
    """Nobody asked for it."""
    return DoctorFinding(check, Result.UNUSED, found)


def refused(check: str, error: Exception) -> DoctorFinding:
    """A problem in the words of an error of ours, whose sentence ends with what to do."""
    found, _, fix = str(error).rpartition("; ")
    return problem(check, found or fix, fix if found else "see the message")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.0f} TiB" if count >= 10 else f"{count:.1f} TiB"


def speed(bytes_s: float) -> str:
    """Bytes a second for people."""
    return f"{bytes_s / 1e9:.1f} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.0f} MB/s"


def milliseconds(seconds: float) -> str:
    """A short time for people."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
