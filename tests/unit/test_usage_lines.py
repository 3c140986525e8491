"""Usage as people read it: in units that fit, and with words where there is no name."""

from __future__ import annotations

import pytest

from kvbm.core.usage import UsageHour, UsageReport, lines_of

HOUR = "2026-11-30T15:00:00Z"


def told(*bytes_held: int, tenant: str = "acme") -> list[str]:
    hours = tuple(UsageHour(hour=HOUR, tenant=tenant, hbm_byte_seconds=3600 * one) for one in bytes_held)
    return list(lines_of(UsageReport(hours=hours)))


@pytest.mark.parametrize(
    ("held", "unit", "shown"),
    [
        (1000, "B", "1,000.000"),
        (5 << 10, "KiB", "5.000"),
        (5 << 20, "MiB", "5.000"),
        (3 << 29, "GiB", "1.500"),
        (7 << 40, "TiB", "7.000"),
    ],
)
def test_what_is_held_is_told_in_the_unit_that_fits_the_most(held: int, unit: str, shown: str) -> None:
    head, first, second = told(held // 2, held)
    assert f"hbm {unit}·h" in head and f" {shown} " in second and f" {shown} " not in first


def test_nothing_held_and_no_tenant_are_told_in_words() -> None:
    assert "hbm B·h" in told(0)[0]
    assert told(1 << 30, tenant="")[1].split()[1] == "(none)"
    assert list(lines_of(UsageReport())) == ["no usage is recorded there"]
