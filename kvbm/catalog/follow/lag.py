"""How old what is known is: against the stream's own end, and against what each instance reports as decided."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.errors import StreamError
from kvbm.core.ids import InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventReader, EventStream, Position

log = SafeLog()

ASK_END_S = 0.5
ASK_END_WAIT_S = 1.0
UNANSWERED_S = 2.0  # without an answer for so long, nobody says where the stream ends
_KEPT = 64  # reports of one instance that are not read yet; beyond them the newest gives way to the next


class Confirmation:
    """Since when it is not known that the whole stream was read.

    The stream's leader is asked where the stream ends. Once so much is read, the view is as young as that question,
    whatever the reader has heard since. While nobody answers, or what the answer names is not read, the view grows old:
    it does not matter why. A stream that ends before what is read is another one, or has lost its end, and confirms
    nothing.

    Times are of one clock that only grows.
    """

    def __init__(self, now_s: float) -> None:
        self._confirmed_s = now_s
        self._asked: deque[tuple[float, int]] = deque()

    def answered(self, asked_s: float, end: int, sequence: int) -> None:
        """A question asked at a time is answered: the stream ended there.

        The last message that was read then had that sequence.
        """
        if end < sequence or (self._asked and end < self._asked[-1][1]):
            self._asked.clear()
        if end < sequence:
            return
        if len(self._asked) == _KEPT:
            self._asked.pop()
        self._asked.append((asked_s, end))

    def read(self, reached: int) -> None:
        """Everything up to a sequence was read."""
        while self._asked and self._asked[0][1] <= reached:
            asked_s, _ = self._asked.popleft()
            self._confirmed_s = max(self._confirmed_s, asked_s)

    def age_s(self, now_s: float) -> float:
        """Since when the view is not confirmed."""
        return max(0.0, now_s - self._confirmed_s)


class StreamLag:
    """How much of the stream is not read yet. One asyncio loop.

    Args:
        end: of the stream, as of the start.

    Attributes:
        start_end: the same.
        confirmation: since when it is not known that the whole stream was read.
    """

    def __init__(self, stream: EventStream, reader: EventReader, sequencer: Sequencer, end: int) -> None:
        self.start_end = end
        self.confirmation = Confirmation(time.monotonic())
        self._stream, self._reader, self._sequencer = stream, reader, sequencer
        self._end = end
        self._answered_s = time.monotonic()  # the stream's leader has said by then where the stream ends

    async def watch(self) -> None:
        """Ask for the stream's end, for ever."""
        while True:
            await asyncio.sleep(ASK_END_S)
            asked_s, sequence = time.monotonic(), self._sequencer.sequence
            try:
                self._end = await self._stream.last_sequence(ASK_END_WAIT_S)
                self._answered_s = time.monotonic()
                self.confirmation.answered(asked_s, self._end, sequence)
            except StreamError as error:
                log.debug("stream.end_unknown", why=str(error))

    def messages(self) -> int:
        """How many messages are not read yet; 0 once the reader has fetched everything."""
        return 0 if self._reader.at_end else max(0, self._end - self._sequencer.sequence)

    def known_messages(self, now_s: float) -> int | None:
        """`messages`; None while nobody says where the stream ends, as while NATS is away."""
        return None if now_s - self._answered_s >= UNANSWERED_S else self.messages()

    def seconds(self, now_s: float, newest_s: float) -> float:
        """For how long what is read is behind: 0 once all is read, and while nobody says where the stream ends, since
        when that is so.

        Args:
            newest_s: age of the newest frame that was read.
        """
        unread = self.known_messages(now_s)
        if unread is None:
            return self.confirmation.age_s(now_s)
        return max(0.0, newest_s) if unread else 0.0


class _Reports:
    """What is known of one instance."""

    __slots__ = ("as_of_s", "is_left_out", "unread")

    def __init__(self, now_s: float) -> None:
        self.as_of_s = now_s  # all that it had decided by then is read
        self.is_left_out = False  # of answers: it does not count as behind
        # what it reported as decided later, and when: few, and mostly none, which takes a tenth of a deque's memory
        self.unread: list[tuple[Position, float]] = []


class Backlog:
    """As of when each instance is known: the time of its last heartbeat after which everything decided before it was
    read.

    It does not matter why that is long ago: events may be stuck in a journal, in a publisher, in a server that takes
    nothing, or with the reader; or the heartbeats themselves do not come, and nobody knows what it has decided since.

    Args:
        patience_s: an instance known as of longer ago is behind.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._reports: dict[InstanceId, _Reports] = {}
        self._judged_s = float("-inf")
        self._behind: set[InstanceId] = set()
        self._shown: frozenset[InstanceId] | None = None  # the same as it is told; None: it has changed since

    @property
    def behind(self) -> frozenset[InstanceId]:
        """Those that were behind when last judged: the same object until it changes."""
        if self._shown is None:
            self._shown = frozenset(self._behind)
        return self._shown

    def on_heartbeat(
        self, now_s: float, sent_s: float, instance: InstanceId, decided: Position, read: Position
    ) -> None:
        """An instance reports how far it has decided; an offset of 0 does not.

        Args:
            sent_s: it was sent after this, for certain. A stream keeps heartbeats, and may give out an old one as news.
        """
        reports = self._reports.get(instance)
        if reports is None:
            reports = self._reports[instance] = _Reports(sent_s)
        unread, reports.is_left_out = reports.unread, False
        if not decided.offset or decided <= read:
            if sent_s > reports.as_of_s:
                reports.as_of_s = sent_s
            unread.clear()
            self._count(now_s, instance, reports)
            return
        while unread and unread[-1][0].epoch < decided.epoch:
            unread.pop()  # the rest of an epoch that is over may never come
        while unread and unread[-1][0] >= decided:
            unread.pop()  # reported again, or of another life
        if len(unread) == _KEPT:
            unread.pop()
        unread.append((decided, sent_s))
        self._count(now_s, instance, reports)

    def _count(self, now_s: float, instance: InstanceId, reports: _Reports) -> None:
        """At once: who is back after a silence has been behind meanwhile."""
        is_behind = now_s - reports.as_of_s >= self._patience_s and not reports.is_left_out
        if is_behind != (instance in self._behind):
            self._behind ^= {instance}
            self._shown = None

    def judge(self, now_s: float, position: Callable[[InstanceId], Position]) -> frozenset[InstanceId]:
        """Take note of what is read by now; who is behind."""
        if now_s - self._judged_s < self._patience_s / 8:
            return self.behind
        self._judged_s = now_s
        for instance, reports in self._reports.items():
            if reports.unread:
                read = position(instance)
                while reports.unread and reports.unread[0][0] <= read:
                    reports.as_of_s = max(reports.as_of_s, reports.unread.pop(0)[1])
        patience_s = self._patience_s
        behind = {
            name
            for name, reports in self._reports.items()
            if now_s - reports.as_of_s >= patience_s and not reports.is_left_out
        }
        if behind != self._behind:
            self._behind, self._shown = behind, None
        return self.behind

    def leave_out(self, instance: InstanceId) -> None:
        """It has stopped, or is silent, and so is left out of answers until its next heartbeat."""
        if instance in self._reports:
            self._reports[instance].is_left_out = True
            self._take_out(instance)

    def forget(self, instance: InstanceId) -> None:
        """Nothing is known of the instance any more."""
        self._reports.pop(instance, None)
        self._take_out(instance)

    def _take_out(self, instance: InstanceId) -> None:
        if instance in self._behind:
            self._behind.remove(instance)
            self._shown = None

    def age_s(self, now_s: float, instance: InstanceId) -> float:
        """How long ago it was that an instance is known as of; 0 of one without a heartbeat."""
        reports = self._reports.get(instance)
        return now_s - reports.as_of_s if reports is not None else 0.0

    def decided(self, instance: InstanceId) -> Position | None:
        """The newest that an instance is known to have decided and that is not read; None: all is."""
        reports = self._reports.get(instance)
        return reports.unread[-1][0] if reports is not None and reports.unread else None
