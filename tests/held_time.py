"""The time that catalogs of a test see: it stands still, or passes with the signs of life of instances, however busy
the machine is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Hold:
    """Keeps time from passing beyond it.

    Attributes:
        now_s: how far it lets time come.
    """

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._true_s = time.monotonic()

    def pass_on(self, most_s: float) -> None:
        """Let as much time pass as has gone by in truth since the last call, and no more than this."""
        last_s, self._true_s = self._true_s, time.monotonic()
        self.now_s += min(most_s, self._true_s - last_s)


class HeldTime:
    """The module `time`, of which `monotonic` is as ever until somebody holds it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_s = 0.0  # of the true time
        self._holds: list[Hold] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """Now."""
        with self._lock:
            return self._now_s()

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Hold time: it passes by no more than what is passed on to this hold, and to every other one."""
        with self._lock:
            hold = Hold(self._now_s())
            self._holds.append(hold)
        try:
            yield hold
        finally:
            with self._lock:
                self._ahead_s = self._now_s() - time.monotonic()
                self._holds.remove(hold)
                for other in self._holds:  # those that waited for this one go on from here
                    other.now_s = min(other.now_s, self._ahead_s + time.monotonic())

    def _now_s(self) -> float:
        if self._holds:
            return min(hold.now_s for hold in self._holds)
        return time.monotonic() + self._ahead_s


def hold_catalogs(monkeypatch: pytest.MonkeyPatch, *others: str) -> HeldTime:
    """Time of all catalogs in this process, until the test ends.

    Args:
        others: modules that see the same time.
    """
    made = HeldTime()
    for name, module in list(sys.modules.items()):
        if name.startswith(("kvbm.catalog.", *others)) and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", made)
    return made
