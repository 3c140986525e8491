"""What to make of one publisher's messages: a state machine without clock, socket or thread.

Messages are numbered from 0 on by the process that sends them; there is no epoch, and what a slow reader does not take
is gone. The publisher keeps the last of them, 10,000 by default, and sends them again when asked. So

    the next number           is applied
    a later one               there is a hole: the publisher is asked for what is missing, from the last message that
                              was read on
    an earlier one            another process: a new epoch, and all of its messages
    after a lost connection   as after a hole, because another process may have the address now

The last message that was read is asked for again, too: the same bytes prove that it is the same process. Where the
publisher keeps less than is missing, refuses, is silent, or stops in the middle of its answer, nothing that was held is
certain any more: a new epoch begins without it, and goes on with what comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple, assert_never

from kvbm.streams.foreign.blocks import EngineBlocks, Fact, Uncertain
from kvbm.streams.foreign.events import EventBatch, EventRefusal, ForeignEventError

Decode = Callable[[bytes], EventBatch]

SILENCE_S = 2.0  # of a publisher that is to send again
MAX_WAITING_BYTES = 64 << 20  # of messages that wait for what lies before them
MAX_WAITING = 100_000


class PublishedMessage(NamedTuple):
    """One message as it was published."""

    sequence: int
    payload: bytes


class Replayed(NamedTuple):
    """One message that was sent again."""

    sequence: int
    payload: bytes


class ReplayEnded(NamedTuple):
    """The publisher has sent again all it had."""


class ReplayRefused(NamedTuple):
    """The publisher sends nothing again."""

    why: str


class EngineConnected(NamedTuple):
    """There is a connection, the first one or another: what was sent before it is gone."""


class Check(NamedTuple):
    """Nothing has come for a while: see whether the publisher answers, and whether anything was missed.

    Silence changes nothing.
    """


class BridgeTicked(NamedTuple):
    """Time has passed."""


Input = PublishedMessage | Replayed | ReplayEnded | ReplayRefused | EngineConnected | Check | BridgeTicked


class EpochWhy(StrEnum):
    """Why another epoch begins."""

    OTHER_PROCESS = "other_process"
    MESSAGES_LOST = "messages_lost"
    UNREADABLE = "unreadable"


class BeginEpoch(NamedTuple):
    """Nothing is held from here on; what follows is of another epoch."""

    why: EpochWhy


class AskReplay(NamedTuple):
    """Ask the publisher for its messages from one on. An earlier ask counts no more."""

    start: int


Command = Fact | BeginEpoch | AskReplay


class ForeignState:
    """See the module. Give it every message in the order in which it comes, and Ticked at `wake_s`.

    Args:
        blocks: what is held, and counts; nothing yet.
        decode: bytes of a message → what it says. Raises ForeignEventError.
        can_replay: whether the publisher has an address for that.
        rank: data-parallel rank whose messages count; None: anybody's.

    Attributes:
        blocks: see above.
        epochs: how often each reason began another.
        replays: how often messages were asked for again.
        is_partial: whether what the engine held when this began is not known.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        decode: Decode,
        can_replay: bool,
        rank: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.epochs: Counter[EpochWhy] = Counter()
        self.replays = 0
        self.is_partial = False
        self._decode, self._can_replay, self._rank = decode, can_replay, rank
        self._last: PublishedMessage | None = None  # that was read
        self._waiting: deque[PublishedMessage] = deque()
        self._waiting_bytes = 0
        self._asked: int | None = None  # the message asked for, while the publisher sends again
        self._proof: PublishedMessage | None = None  # read last before the ask
        self._is_check = False  # nothing is known to be missing
        self._answers = 0  # messages that were sent again since
        self._applied = False  # whether any of them was new
        self._hole = False  # whether some were missing between them
        self._again = False  # ask for everything once this answer has ended
        self._deadline_s = 0.0

    @property
    def next(self) -> int:
        """The number of the message that is wanted next."""
        return 0 if self._last is None else self._last.sequence + 1

    @property
    def wake_s(self) -> float | None:
        """When to step with Ticked, if nothing comes before."""
        return None if self._asked is None else self._deadline_s

    @property
    def is_replaying(self) -> bool:
        """Whether the publisher is to send messages again."""
        return self._asked is not None

    def step(self, now_s: float, happened: Input) -> list[Command]:
        """Take one input; gives what follows from it, in order."""
        return list(self.commands(now_s, happened))

    def commands(self, now_s: float, happened: Input) -> Iterator[Command]:
        """As `step`, each command before what comes after it has changed anything.

        Whoever has blocks that record by themselves has to obey each as it comes.
        """
        match happened:
            case PublishedMessage():
                yield from self._on_message(now_s, happened)
            case Replayed():
                yield from self._on_replayed(now_s, happened)
            case ReplayEnded():
                yield from self._on_replay_ended(now_s, is_answer=True)
            case ReplayRefused():
                yield from self._on_replay_ended(now_s, is_answer=False)
            case EngineConnected():
                yield from self._on_connected(now_s)
            case Check():
                if self._can_replay and self._asked is None:
                    yield self._ask(now_s, is_check=True)
            case BridgeTicked():
                if self._asked is not None and now_s >= self._deadline_s:
                    yield from self._on_replay_ended(now_s, is_answer=False)
            case _:
                assert_never(happened)

    # -- messages as they come ----------------------------------------------------------------------------------------

    def _on_message(self, now_s: float, message: PublishedMessage) -> Iterator[Command]:
        if self._asked is not None and not (self._is_check and message.sequence == self.next):
            yield from self._wait(now_s, message)
        elif message.sequence == self.next:
            yield from self._apply(message)
        elif message == self._last:
            return
        elif self._last is not None and message.sequence < self.next:
            yield from self._begin_epoch(EpochWhy.OTHER_PROCESS)
            yield from self._start_over(now_s, message)
        elif self._can_replay:
            self._let_wait(message)
            yield self._ask(now_s)
        else:
            yield from self._jump(message)

    def _wait(self, now_s: float, message: PublishedMessage) -> Iterator[Command]:
        """A message comes while others are sent again."""
        if self._waiting and message.sequence <= self._waiting[-1].sequence:
            if message == self._waiting[-1]:
                return
            yield from self._begin_epoch(EpochWhy.OTHER_PROCESS)
            self._forget_waiting()
            yield from self._start_over(now_s, message)
            return
        self._let_wait(message)

    def _start_over(self, now_s: float, message: PublishedMessage) -> Iterator[Command]:
        """A message of a process whose earlier ones are not known."""
        if not message.sequence:
            self._asked = None
            yield from self._apply(message)
        elif self._can_replay:
            self._let_wait(message)
            yield self._ask(now_s)
        else:
            yield from self._jump(message)

    def _jump(self, message: PublishedMessage) -> Iterator[Command]:
        """Go on with a message though some before it are lost."""
        if self._last is None:
            self.is_partial = True
        else:
            yield from self._begin_epoch(EpochWhy.MESSAGES_LOST)
        yield from self._apply(message)

    # -- messages that are sent again ---------------------------------------------------------------------------------

    def _on_connected(self, now_s: float) -> Iterator[Command]:
        self._forget_waiting()
        if self._can_replay:
            yield self._ask(now_s)
        elif self._last is not None:
            yield from self._begin_epoch(EpochWhy.MESSAGES_LOST)
            self._last = None

    def _ask(self, now_s: float, is_check: bool = False) -> AskReplay:
        """Ask for what follows the last message, and for that one, which proves that it is the same process."""
        self._proof, self._is_check = self._last, is_check
        self._asked = 0 if self._last is None else self._last.sequence
        self._answers = 0
        self._applied = self._hole = self._again = False
        self._deadline_s = now_s + SILENCE_S
        self.replays += 1
        return AskReplay(self._asked)

    def _on_replayed(self, now_s: float, replayed: Replayed) -> Iterator[Command]:
        self._deadline_s = now_s + SILENCE_S
        if self._asked is None or self._again:
            return
        message = PublishedMessage(replayed.sequence, replayed.payload)
        is_first = not self._answers
        self._answers += 1
        if is_first and self._proof is not None:
            yield from self._on_first_replayed(message)
        elif message.sequence == self.next or (is_first and message.sequence > self.next):
            self.is_partial |= message.sequence != self.next  # the publisher has kept no earlier ones
            self._applied = True
            yield from self._apply(message)
        elif not (self._is_check and message.sequence < self.next):  # else it has come by itself meanwhile
            self._hole = True

    def _on_first_replayed(self, message: PublishedMessage) -> Iterator[Command]:
        """The answer's first message: that which was read last, if it is the same process and it has kept it."""
        if message == self._proof:
            return
        if message.sequence < self.next:
            yield from self._begin_epoch(EpochWhy.OTHER_PROCESS)
            self._again = True
            return
        self._applied = True
        yield from self._begin_epoch(EpochWhy.MESSAGES_LOST)
        yield from self._apply(message)

    def _on_replay_ended(self, now_s: float, is_answer: bool) -> Iterator[Command]:
        """The answer is over.

        Args:
            is_answer: the publisher has said so; else it refuses, or is silent.
        """
        if self._asked is None:
            return
        if self._again and is_answer:
            yield self._ask(now_s)
            return
        had_last, is_empty, applied = self._proof is not None, not self._answers, self._applied
        self._asked = None
        if had_last and is_empty and (is_answer or not self._is_check):
            yield from self._begin_epoch(EpochWhy.OTHER_PROCESS if is_answer else EpochWhy.MESSAGES_LOST)
            self._last = None
            if is_answer:  # one that has sent fewer messages
                yield self._ask(now_s)
                return
        if self._hole and applied and is_answer:
            yield self._ask(now_s)
            return
        if not (is_answer or is_empty or self._waiting):
            yield from self._lose()
        yield from self._drain(now_s, applied)

    def _lose(self) -> Iterator[Command]:
        """An answer broke off: what lies behind it may have said that blocks are gone, and nothing else has come."""
        self.is_partial = True
        if not self.blocks.is_empty:
            yield from self._begin_epoch(EpochWhy.MESSAGES_LOST)

    def _drain(self, now_s: float, progress: bool) -> Iterator[Command]:
        """Go on with the messages that came meanwhile.

        Before a hole the publisher is asked again, if anything came of the last time.
        """
        while self._waiting:
            message = self._waiting[0]
            if message.sequence > self.next and progress and self._last is not None:
                yield self._ask(now_s)
                return
            self._waiting.popleft()
            self._waiting_bytes -= len(message.payload)
            if self._last is not None and message.sequence < self.next:
                continue
            if message.sequence == self.next:
                yield from self._apply(message)
            else:
                yield from self._jump(message)
            progress = True

    # -- both ---------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, why: EpochWhy) -> Iterator[Command]:
        self.blocks.drop(forgets=why is EpochWhy.OTHER_PROCESS)
        self.epochs[why] += 1
        self.is_partial = why is not EpochWhy.OTHER_PROCESS
        if why is EpochWhy.OTHER_PROCESS:
            self._last = None
        yield BeginEpoch(why)

    def _apply(self, message: PublishedMessage) -> Iterator[Command]:
        self._last = message
        if self.blocks.take(message.payload, self._rank):
            return
        try:
            batch: EventBatch = self._decode(message.payload)
        except ForeignEventError as error:
            self.blocks.refuse(error.reason)
            yield from self._doubt()
            return
        if self._rank is not None and batch.rank is not None and batch.rank != self._rank:
            self.blocks.refuse(EventRefusal.OTHER_RANK)
            return
        for event in batch.events:
            try:
                yield from self.blocks.apply(event)
            except Uncertain:
                yield from self._doubt()

    def _doubt(self) -> Iterator[Command]:
        """What could not be read may have said that blocks are gone."""
        if not self.blocks.is_empty:
            yield from self._begin_epoch(EpochWhy.UNREADABLE)

    def _let_wait(self, message: PublishedMessage) -> None:
        """Keep a message for later. Beyond the bound the oldest goes, and is a hole again."""
        self._waiting.append(message)
        self._waiting_bytes += len(message.payload)
        while len(self._waiting) > MAX_WAITING or (self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1):
            self._waiting_bytes -= len(self._waiting.popleft().payload)

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
