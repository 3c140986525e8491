"""Which prompts an engine asked for: a share of them, kept for whoever sends them on, and lost rather than
waited for.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from kvbm.core.ids import NamespaceId


class Sampled(NamedTuple):
    """One prompt: as `streams.AccessSample`, but for what is the same for all of an instance."""

    wall_time_ns: int
    namespace: NamespaceId
    hashes: bytes
    depth: int


class SampleSink(Protocol):
    """Takes samples; called while a request waits."""

    @property
    def below(self) -> bytes:
        """A prompt is sampled if its hashes come before this, as bytes."""

    @property
    def rate(self) -> float:
        """The share of prompts that is."""

    def offer(self, sample: Sampled) -> None:
        """Take it, or drop it. Never blocks."""

    def take(self) -> list[Sampled]:
        """What was offered since the last call."""


class Samples:
    """A bounded queue of samples. Any thread may call it.

    Prompts are chosen by their first block's hash, which is uniform, so that those which share it are sampled together
    or not at all.

    Args:
        rate: share of prompts, 0 to 1.
        capacity: samples that wait at most; what comes then is dropped and counted.
    """

    def __init__(self, rate: float, capacity: int = 1024) -> None:
        self.rate = rate
        self.below = b"\xff" * 9 if rate >= 1 else int(rate * 2**64).to_bytes(8, "big") if rate > 0 else b""
        self.dropped = 0
        self._capacity = capacity
        self._waiting: deque[Sampled] = deque()

    def offer(self, sample: Sampled) -> None:
        """See `SampleSink.offer`."""
        if len(self._waiting) >= self._capacity:
            self.dropped += 1
        else:
            self._waiting.append(sample)

    def take(self) -> list[Sampled]:
        """See `SampleSink.take`."""
        taken = []
        for _ in range(len(self._waiting)):
            taken.append(self._waiting.popleft())
        return taken
