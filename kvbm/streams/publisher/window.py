"""The messages that were sent and are not acknowledged, and how long an acknowledgement may take."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvbm.streams.base import Position

ACK_LEAST_S = 1.0  # no acknowledgement counts as late before, however short the round trips are
ACK_FIRST_S = 3.0  # before any acknowledgement has come


class Sent(NamedTuple):
    """A message on the way.

    Attributes:
        attempt: tells this sending from every other.
        through: where its frames end.
        size: in bytes.
    """

    attempt: int
    through: Position
    size: int
    sent_s: float


class RoundTrips:
    """How long acknowledgements take, and so how long to wait for one: as TCP's retransmission timer (RFC 6298)."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = min(least_s, most_s), most_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def take(self, took_s: float) -> None:
        """Count one."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
            return
        self._deviation_s += (abs(self._mean_s - took_s) - self._deviation_s) / 4
        self._mean_s += (took_s - self._mean_s) / 8

    def wait_s(self, late: int) -> float:
        """How long to wait, after so many that came late, or not at all, one after another."""
        wait_s = ACK_FIRST_S
        if self._mean_s is not None:
            wait_s = max(self._least_s, self._mean_s + 4 * self._deviation_s)
        return min(self._most_s, wait_s * float(1 << min(late, 16)))


class SendWindow:
    """Messages of one connection from the first without an acknowledgement on, in the order in which they were sent.

    Args:
        ack_wait_s: the longest wait for an acknowledgement.

    Attributes:
        used_bytes: what they take together.
    """

    def __init__(self, ack_wait_s: float) -> None:
        self.used_bytes = 0
        self._sent: deque[Sent] = deque()
        self._in_flight: dict[int, Sent] = {}  # by attempt: those without an acknowledgement
        self._round_trips = RoundTrips(ACK_LEAST_S, ack_wait_s)
        self._late = 0  # acknowledgements that were late, without one in time between
        self._acked_s = float("-inf")  # the last acknowledgement

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, attempt: int) -> bool:
        """Whether a message is without an acknowledgement."""
        return attempt in self._in_flight

    def add(self, sent: Sent) -> None:
        """Count a message that is sent now."""
        self._sent.append(sent)
        self._in_flight[sent.attempt] = sent
        self.used_bytes += sent.size

    def take_ack(self, attempt: int, now_s: float) -> bool:
        """Whether an acknowledgement is of one of these; else its message was given up, and is sent again."""
        acked = self._in_flight.pop(attempt, None)
        if acked is None:
            return False
        self._round_trips.take(now_s - acked.sent_s)
        self._acked_s = now_s
        self._late = 0
        return True

    def take_whole(self) -> Position | None:
        """Forget the first messages, as far as all are acknowledged; gives where they end.

        None: not even the first is.
        """
        whole: Position | None = None
        while self._sent and self._sent[0].attempt not in self._in_flight:
            sent = self._sent.popleft()
            self.used_bytes -= sent.size
            whole = sent.through
        return whole

    def clear(self) -> None:
        """Give all of them up."""
        self._sent.clear()
        self._in_flight.clear()
        self.used_bytes = 0

    def count_late(self) -> None:
        """An acknowledgement did not come in time: the next may take longer."""
        self._late += 1

    def wait_s(self) -> float:
        """How long an acknowledgement may take now."""
        return self._round_trips.wait_s(self._late)

    def overdue_s(self) -> float:
        """When the oldest message counts as late.

        Acks of others show that the stream stores; so they give it time anew.
        """
        return max(self._sent[0].sent_s, self._acked_s) + self.wait_s()
