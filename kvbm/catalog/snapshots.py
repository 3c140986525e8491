"""When to ask an instance for a round. A state machine: no thread, clock or socket.

An instance that is doubtful for something a round can heal is asked at once, and again while it stays so. Several catalogs may
ask: the instance serves at most one round in `rounds.least_s`, and one serves every reader.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvbm.core.ids import InstanceId

ASK_AGAIN_S = 10.0
UNHEARD_AGAIN_S = 0.5  # nobody took the request: the instance may just be connecting


class Doubt(NamedTuple):
    """Why an instance should restate what it holds.

    Attributes:
        found: how many things were found that a round heals; a larger number is news.
        once: a round may not make it whole (the index refuses residencies): ask for news alone.
    """

    found: int
    once: bool = False


class Ask(NamedTuple):
    """Ask this instance for a round now, and tell `answered` what became of it."""

    instance: InstanceId


class _Asked(NamedTuple):
    found: int
    at_s: float
    again_s: float  # not before, unless there is news
    unheard: int  # requests in a row that nobody took


class RoundAsker:
    """Decides whom to ask. `now_s` is the same clock everywhere.

    Args:
        again_s: between two requests for the same doubt; up to a quarter more, so that replicas do not ask together.
        chance: gives numbers from 0 to 1.
    """

    def __init__(self, again_s: float = ASK_AGAIN_S, chance: Callable[[], float] = random.random) -> None:
        self.asked = 0  # requests so far
        self._again_s = again_s
        self._chance = chance
        self._last: dict[InstanceId, _Asked] = {}

    def step(
        self, now_s: float, doubtful: Mapping[InstanceId, Doubt], can_hear: Callable[[InstanceId], bool]
    ) -> list[Ask]:
        """Whom to ask now.

        Args:
            doubtful: everyone a round would heal.
            can_hear: whether an instance is there to be asked.
        """
        for instance in [known for known in self._last if known not in doubtful]:
            del self._last[instance]
        asks = []
        for instance, doubt in doubtful.items():
            last = self._last.get(instance)
            is_news = last is None or (doubt.found > last.found and now_s >= last.at_s + UNHEARD_AGAIN_S)
            is_due = last is not None and now_s >= last.again_s and not doubt.once
            if (is_news or is_due) and can_hear(instance):
                again_s = now_s + self._again_s * (1 + self._chance() / 4)
                self._last[instance] = _Asked(doubt.found, now_s, again_s, last.unheard if last is not None else 0)
                self.asked += 1
                asks.append(Ask(instance))
        return asks

    def answered(self, now_s: float, instance: InstanceId, heard: bool) -> None:
        """Note whether the instance took the request; one that did not is asked again sooner."""
        last = self._last.get(instance)
        if last is None:
            return
        if heard:
            self._last[instance] = last._replace(unheard=0)
            return
        soon_s = min(UNHEARD_AGAIN_S * 2**last.unheard, self._again_s)
        self._last[instance] = last._replace(again_s=now_s + soon_s, unheard=min(last.unheard + 1, 16))

    def age_s(self, now_s: float, instance: InstanceId) -> float | None:
        """How long ago an instance that is still doubtful was last asked; None when it is not, or was not."""
        last = self._last.get(instance)
        return None if last is None else now_s - last.at_s
