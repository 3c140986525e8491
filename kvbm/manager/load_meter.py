"""How quickly an engine computes prompts, and how quickly those that wait are served, measured from what it has done
lately.
"""

from __future__ import annotations

import math

HALF_LIFE_S = 30.0
"""After so much time of work a measurement counts half."""


class LoadMeter:
    """Two rates for `Manager.report_load`. One thread; no clock of its own."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._prefill = _Rate(half_life_s)
        self._queue = _Rate(half_life_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second of computing them; 0 before the first."""
        return self._prefill.per_s

    @property
    def queue_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second in which some waited, whatever else the engine did in it; 0 before the
        first.
        """
        return self._queue.per_s

    def worked_off(self, tokens: int, elapsed_s: float) -> None:
        """Instead of what `prefilled` finds of the queue, for an engine that sees prompts begin: so many tokens were
        gone before the next of those that waited began.
        """
        self._queue.add(tokens, elapsed_s)

    def prefilled(self, tokens: int, compute_s: float, elapsed_s: float | None = None) -> None:
        """The engine has computed tokens of prompts.

        Args:
            compute_s: how long that took.
            elapsed_s: since the last call, or since a prompt began to wait if that was later; None: as long as the
                computing.
        """
        self._prefill.add(tokens, compute_s)
        self._queue.add(tokens, compute_s if elapsed_s is None else max(elapsed_s, compute_s))


class _Rate:
    """Tokens over seconds, the older the less they count."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._tokens = self._s = 0.0

    @property
    def per_s(self) -> float:
        return self._tokens / self._s if self._s > 0 else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if not (tokens > 0 and 0 < seconds < math.inf):
            return
        kept = 2.0 ** (-seconds / self._half_life_s)
        self._tokens = self._tokens * kept + tokens
        self._s = self._s * kept + seconds
