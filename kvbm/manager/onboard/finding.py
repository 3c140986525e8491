"""Where blocks lie beyond the own tiers, each by itself, asked in a thread for a request of an engine.

Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from kvbm.safe_log import SafeLog

log = SafeLog()


class Finding:
    """See the module. `EngineHbmManager.begin_find` makes one; one thread at a time uses it."""

    def __init__(self, asked: Future[list[bytes]], clock: Callable[[], float], deadline_s: float) -> None:
        self._asked, self._clock, self._deadline_s = asked, clock, deadline_s

    @property
    def done(self) -> bool:
        """Whether it is over: an answer is there, or the time is up."""
        return self._asked.done() or self._clock() >= self._deadline_s

    def result(self) -> list[bytes]:
        """For each run what `EngineHbmManager.holders` gives, of others' NVME and of OBJECT; empty where no answer came
        in time.
        """
        if self._asked.cancel() or not self._asked.done() or self._asked.cancelled():
            return []
        if (error := self._asked.exception()) is not None:
            log.warning(
                "find.failed", why=f"{type(error).__name__}: {error}", notice="blocks elsewhere are not looked for"
            )
            return []
        return self._asked.result()

    def release(self) -> None:
        """Nobody wants to know it any more. Idempotent."""
        self._asked.cancel()
