"""How quickly the engine computes prompts, and how quickly it works off its queue, measured by the scheduler from when
its steps follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.manager.load_meter import LoadMeter

LEAST_TOKENS = 256
"""A step with fewer prompt tokens says more of decoding than of prompts."""
_DECODED = 8  # a request that has so many tokens of a step or fewer decodes: one, and what a draft model guessed


class StepMeter:
    """Prompt tokens a second. One thread; told of each step as it is planned.

    How long a step takes is seen from the plan of the next one, or of the one after that, where the engine plans a step
    while the one before it runs. So the longer of the two times counts: of a prompt between steps that decode this is
    its own step's either way. Both times count only while some request goes on from step to step: then nothing was idle
    in between.

    Attributes:
        waits: whether it is to be told of the next step whatever that has; else only of one with `LEAST_TOKENS` more
            tokens than requests.
    """

    def __init__(self) -> None:
        self._meter = LoadMeter()
        self._scheduled: Mapping[str, int] = {}  # of the step before
        self._at_s = 0.0  # when it was planned
        self._waited: tuple[int, float] | None = (
            None  # prompt tokens of the step before that, and the time between the two
        )
        self._tokens = 0  # prompt tokens of the step before
        self.waits = False

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed in a second; None before the first."""
        return self._meter.prefill_tokens_per_s or None

    def planned(self, scheduled: Mapping[str, int], tokens: int, now_s: float) -> bool:
        """Take in a step.

        Args:
            scheduled: request → tokens of it in this step.
            tokens: of all requests together.
        Returns: whether `tokens_per_s` may have changed.
        """
        is_changed = False
        if self._tokens or self._waited is not None:
            gone_on, elapsed_s = not self._scheduled.keys().isdisjoint(scheduled), now_s - self._at_s
            if self._waited is not None and gone_on:
                self._meter.prefilled(self._waited[0], max(self._waited[1], elapsed_s))
                is_changed = True
            self._waited = (self._tokens, elapsed_s) if self._tokens and gone_on else None
        self._scheduled, self._at_s, self._tokens = scheduled, now_s, 0
        if tokens - len(scheduled) >= LEAST_TOKENS:
            prompts = sum(count for count in scheduled.values() if count > _DECODED)
            self._tokens = prompts if prompts >= max(LEAST_TOKENS, tokens / 2) else 0
        self.waits = bool(self._tokens) or self._waited is not None
        return is_changed


class QueueMeter:
    """Prompt tokens that are worked off the queue in a second. One thread; told of each step as it is planned.

    Whole prompts count, as `Requests.queued_tokens` counts those that wait: what is found of them in a cache is worked
    off, too. The prompts that begin in one step are gone when the next that waited begins; a time in which none
    waited says nothing of how quickly others would have followed.

    Attributes:
        follows: whether prompts waited behind those that have begun last.
    """

    def __init__(self) -> None:
        self._meter = LoadMeter()
        self._tokens = 0
        self._at_s = 0.0
        self.follows = False

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first."""
        return self._meter.queue_tokens_per_s or None

    def planned(self, begun: int, queued: int, now_s: float) -> bool:
        """Take in a step; one in which none begins matters only where `follows`.

        Args:
            begun: tokens of the prompts that begin in it. queued: of those that still wait.
        Returns: whether `tokens_per_s` may have changed.
        """
        is_changed = bool(begun) and self.follows
        if is_changed:
            self._meter.worked_off(self._tokens, now_s - self._at_s)
        if begun:
            self._tokens, self._at_s = begun, now_s
            self.follows = queued > 0
        elif not queued:
            self.follows = False  # those that waited were given up
        return is_changed
