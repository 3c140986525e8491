"""What tenants have used, as far as one sequencer has read it: for metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nlargest

from kvbm.core.usage import NUMBERS, UsageEntry

MOST_TENANTS = 4096  # that are added up; those that come later are not, SQL has them
SHOWN_TENANTS = 64  # clients choose them, so a label for each would be one for every tenant there ever was


class UsageTotals:
    """Sums by tenant, of a bounded number of them."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def take(self, entries: Iterable[UsageEntry]) -> None:
        """Add what was recorded."""
        for entry in entries:
            if entry.tenant not in self._sums and (len(self._sums) >= MOST_TENANTS or not any(entry.numbers)):
                continue
            sums = self._sums.setdefault(entry.tenant, [0] * NUMBERS)
            for at, number in enumerate(entry.numbers):
                sums[at] += number

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Tenants have used nothing until now."""
        self._sums = {tenant: sums for tenant, sums in self._sums.items() if not is_meant(tenant)}

    def largest(self) -> dict[str, list[int]]:
        """Of the tenants that hold and save the most: numbers as an entry has them."""
        return dict(nlargest(SHOWN_TENANTS, self._sums.items(), key=lambda one: (sum(one[1][:4]), one[1][12], one[0])))
