"""One source: its sockets, the machine that understands its messages, and the instance that tells of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvbm.bridge.instance import BridgedInstance
from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.blocks import Fact, NamespaceNamed
from kvbm.streams.foreign.events import EventRefusal
from kvbm.streams.foreign.state import AskReplay, BeginEpoch, BridgeTicked, Check, ForeignState, Input

log = SafeLog()

CHECK_S = 1.0  # without a message before the publisher is asked whether anything was missed
TURN_MESSAGES = 256  # of one source before others have their turn
MOST_EPOCHS = 30  # in EPOCHS_S, before a publisher is left alone for REST_S
EPOCHS_S = 60.0
REST_S = 10.0
_REMARK_S = 60.0  # between two remarks about what counts for nothing


class Sockets(Protocol):
    """What a source needs of `PublisherSockets`."""

    is_connected: bool
    unreadable: int

    def sockets(self) -> list[Any]: ...
    def receive(self, limit: int) -> Iterable[Input]: ...
    def ask(self, start: int) -> None: ...
    def end_ask(self) -> None: ...
    def close(self) -> None: ...


class BridgedSource:
    """See the module. The bridge's thread drives it.

    Args:
        name: of the instance.
        can_replay: whether the publisher answers asks; else a connection that stands counts as its answer.
        silence_s: after so long without an answer it counts as silent, and the instance sends no sign of life.
    """

    def __init__(
        self,
        name: str,
        sockets: Sockets,
        state: ForeignState,
        can_replay: bool,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.state = name, state
        self.instance: BridgedInstance | None = None
        self._sockets, self._can_replay, self._silence_s, self._clock = sockets, can_replay, silence_s, clock
        self._answered_s = float("-inf")
        self._came_s = self._checked_s = float("-inf")
        self._wake_s: float | None = None
        self._remark_s = float("-inf")
        self._remarked: dict[str, int] = {}
        self._was_alive = False
        self._epochs: deque[float] = deque(maxlen=MOST_EPOCHS)  # when the last began
        self._rests_until_s = float("-inf")

    def sockets(self) -> list[Any]:
        """Those to wait for."""
        return self._sockets.sockets()

    def is_alive(self) -> bool:
        """Whether the engine answers, so that a sign of life is true. Any thread."""
        if self._can_replay:
            return self._clock() - self._answered_s < self._silence_s
        return self._sockets.is_connected

    def trouble(self) -> str:
        """What is wrong with the engine's events, in words; "" when all is well. Any thread."""
        words = []
        if self._clock() < self._rests_until_s:
            words.append(f"its events began {MOST_EPOCHS} epochs within {EPOCHS_S:g} s; two publishers at one address?")
        if self.state.is_partial:
            words.append("what the engine held before the bridge heard it is not known")
        if counts := self._counts():
            words.append("events: " + ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())))
        return "; ".join(words)

    def turn(self, now_s: float) -> tuple[float, bool]:
        """Take what has come, and do what is due. Gives when the next turn is due, and whether more waits already."""
        instance, taken = self.instance, 0
        assert instance is not None
        for happened in self._sockets.receive(TURN_MESSAGES) if now_s >= self._rests_until_s else ():
            taken += 1
            self._came_s = self._answered_s = now_s
            self._step(now_s, happened)
            if now_s < self._rests_until_s:
                break
        state = self.state
        if state.wake_s is not None and now_s >= state.wake_s:
            self._step(now_s, BridgeTicked())
        elif self._can_replay and not state.is_replaying and now_s >= max(self._came_s, self._checked_s) + CHECK_S:
            self._checked_s = now_s
            self._step(now_s, Check())
        if not state.is_replaying:
            self._sockets.end_ask()
        if taken or instance.wants_turn or self._wake_s is None or now_s >= self._wake_s:
            due_s = instance.turn(now_s)
            self._wake_s = now_s + CHECK_S if due_s is None else due_s
        self._remark(now_s)
        return min(self._wake_s, state.wake_s or self._wake_s, now_s + CHECK_S), taken >= TURN_MESSAGES

    def _step(self, now_s: float, happened: Input) -> None:
        instance = self.instance
        facts: list[Fact | BeginEpoch] = []
        assert instance is not None
        for command in self.state.commands(now_s, happened):
            if isinstance(command, AskReplay):
                self._sockets.ask(command.start)
                continue
            facts.append(command)
            if isinstance(command, BeginEpoch | NamespaceNamed):  # nothing that follows may be recorded before it
                instance.apply(now_s, facts)
                facts = []
                if isinstance(command, BeginEpoch):
                    self._note_epoch(now_s)
        if facts:
            instance.apply(now_s, facts)

    def _note_epoch(self, now_s: float) -> None:
        """Leave a publisher alone for a while that makes one epoch after the other: each is work for every reader of
        the stream.
        """
        self._epochs.append(now_s)
        if len(self._epochs) == MOST_EPOCHS and now_s < self._epochs[0] + EPOCHS_S:
            self._epochs.clear()
            self._rests_until_s = now_s + REST_S
            log.warning(
                "bridge.source_unsteady",
                source=self.name,
                epochs=MOST_EPOCHS,
                within_s=EPOCHS_S,
                rest_s=REST_S,
                remedy="see whether two publishers have one address, or one sends what cannot be read",
            )

    def _counts(self) -> dict[str, int]:
        found = {str(reason): count for reason, count in list(self.state.blocks.counts.items()) if count}
        if self._sockets.unreadable:
            unreadable = str(EventRefusal.UNREADABLE)
            found[unreadable] = found.get(unreadable, 0) + self._sockets.unreadable
        return found

    def _remark(self, now_s: float) -> None:
        alive = self.is_alive()
        if alive != self._was_alive:
            self._was_alive = alive
            log.info("bridge.engine_heard" if alive else "bridge.engine_silent", source=self.name)
        if now_s < self._remark_s:
            return
        self._remark_s = now_s + _REMARK_S
        counts = self._counts()
        if counts != self._remarked:
            self._remarked = counts
            log.warning("bridge.events_refused", source=self.name, **counts)

    def close(self, timeout_s: float) -> bool:
        """End the instance's stream. Gives whether all of it is published in time."""
        self._sockets.close()
        return self.instance is None or self.instance.close(timeout_s)
