"""One foreign engine as an instance of ours: its facts in a stream of its own, with epochs, snapshots and a sign of
life while it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, cast

from kvbm.core.backend import LedgerProtocol
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.manager.record.event_writer import EventWriter
from kvbm.manager.record.journal_retention import MemoryRetention
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.publisher_port import PublisherPort, Publishing
from kvbm.manager.record.snapshot_policy import SnapshotPolicy
from kvbm.streams.base import Heartbeat, Position
from kvbm.streams.foreign.blocks import Arrived, Emptied, Fact, Gained, Lost, NamespaceNamed
from kvbm.streams.foreign.state import BeginEpoch
from kvbm.streams.memory import MemoryLog


class EngineLedger(Protocol):
    """What an instance needs of its ledger beside what a stream of events does: `table.TableLedger`, or the
    ledger that specifies it."""

    @property
    def applied(self) -> Offset: ...
    @property
    def epoch(self) -> Epoch: ...
    def declare(self, namespace: Namespace) -> bool: ...
    def declared(self) -> tuple[NamespaceId, ...]: ...
    def record(self, fact: Gained | Arrived | Lost | Emptied) -> None: ...
    def forget(self) -> None: ...
    def start(self, epoch: Epoch) -> None: ...


class Names(NamedTuple):
    """Who an instance is.

    Attributes:
        run: of this process.
    """

    instance: InstanceId
    cluster: str
    run: str


class BridgeLimits(NamedTuple):
    """Of the journal in memory, and of snapshots.

    Attributes:
        least_s: between snapshots that readers ask for.
        room_bytes: a snapshot lets what lies before it go when half of so much is kept.
        most_bytes: kept at most while the stream takes nothing; then the epoch is given up for another.
    """

    least_s: float
    room_bytes: int
    most_bytes: int


class EngineView(Protocol):
    """What a publisher's thread asks of the engine."""

    def is_alive(self) -> bool:
        """Whether it answers, so that a sign of life is true."""

    def trouble(self) -> str:
        """What is wrong with its events, in words; "" when all is well."""


class BridgedPort(PublisherPort):
    """A port whose publisher sends no sign of life while the engine does not answer.

    Attributes:
        lives: whether it does.
    """

    lives: Callable[[], bool] = staticmethod(lambda: True)

    def is_silent(self) -> bool:
        """See `PublisherOwner.is_silent`."""
        return not self.lives()


class BridgedInstance:
    """See the module. The thread of the bridge drives it; a publisher asks for heartbeats in its own.

    Args:
        ledger: not started.
        wall_clock_ns: for frames and heartbeats.
        engine: what is known of the engine now.

    Attributes:
        log: the frames, for a publisher. port: its owner.
    """

    def __init__(
        self,
        names: Names,
        ledger: EngineLedger,
        limits: BridgeLimits,
        clock: Callable[[], float],
        wall_clock_ns: Callable[[], int],
        engine: EngineView,
        epoch: Epoch,
    ) -> None:
        self.names, self._ledger, self._limits = names, ledger, limits
        self._wall_clock_ns, self._engine = wall_clock_ns, engine
        ledger.start(epoch)
        self.log = MemoryLog()
        self._retention = MemoryRetention(self.log)
        self.stream = LedgerStream(names.instance, cast(LedgerProtocol, ledger), wall_clock_ns)
        offsets = Offsets()
        offsets.begin_epoch(epoch, ledger.applied)
        self.port = BridgedPort(names.instance, names.cluster, names.run, self.stream, self.heartbeat, None, True)
        self.port.lives = engine.is_alive
        self._writer = EventWriter(
            self.stream,
            self._retention,
            offsets,
            self.port,
            self._retention,
            SnapshotPolicy(limits.least_s, limits.room_bytes),
            clock,
        )

    def start(self, publishing: Publishing) -> None:
        """Publish from now on."""
        self.port.publishing = publishing

    @property
    def wants_turn(self) -> bool:
        """Whether the publisher or a reader has said something since the last turn."""
        return self.stream.wake.is_set()

    def apply(self, now_s: float, commands: Iterable[Fact | BeginEpoch]) -> None:
        """Record facts in order; each epoch and each new namespace among them begins an epoch of the stream."""
        facts: list[Gained | Arrived | Lost | Emptied] = []
        for command in commands:
            match command:
                case NamespaceNamed(namespace):
                    self._record(facts)
                    with self.stream.lock:
                        is_new = self._ledger.declare(namespace)
                    if is_new:
                        self._begin_epoch(now_s, "named")
                case BeginEpoch(why):
                    self._record(facts)
                    with self.stream.lock:
                        self._ledger.forget()
                    self._begin_epoch(now_s, str(why))
                case _:
                    facts.append(command)
        self._record(facts)

    def _record(self, facts: list[Gained | Arrived | Lost | Emptied]) -> None:
        """Record these, and forget them."""
        if not facts:
            return
        with self.stream.lock:
            for fact in facts:
                self._ledger.record(fact)
        facts.clear()

    def turn(self, now_s: float) -> float | None:
        """Write what waits, take a step of a snapshot: whatever is due.

        Gives when the next turn is due; None: when something comes.
        """
        self.stream.wake.clear()
        if self._retention.used_bytes() > self._limits.most_bytes:
            self._begin_epoch(now_s, "unpublished")  # what it lists is all that a reader needs
            begins = Position(self._ledger.epoch, Offset(0))
            self._retention.truncate(begins, begins)
        return self._writer.step(now_s)

    def _begin_epoch(self, now_s: float, why: str) -> None:
        self._writer.ask_epoch(why)
        self._writer.step(now_s)

    def heartbeat(self, published: Position) -> Heartbeat:
        """The sign of life the publisher sends."""
        names = self.names
        with self.stream.lock:
            epoch, applied, namespaces = self._ledger.epoch, self._ledger.applied, self._ledger.declared()
        offset = published.offset if published.epoch == epoch else Offset(0)
        publishing = self.port.publishing
        unpublished = publishing.trouble() if publishing is not None else ""
        return Heartbeat(
            instance=names.instance,
            cluster=names.cluster,
            epoch=epoch,
            published=offset,
            run=names.run,
            wall_time_ns=self._wall_clock_ns(),
            trouble="; ".join(filter(None, (self._engine.trouble(), unpublished))),
            namespaces=namespaces,
            stopping=self.stream.closing,
            applied=applied,
        )

    def close(self, timeout_s: float) -> bool:
        """End the stream, publish the rest. Gives whether all of it is published in time."""
        with self.stream.lock:
            self.stream.closing = True
        self.stream.end()
        self._writer.stop(timeout_s)
        publishing = self.port.publishing
        return publishing is None or publishing.stop(timeout_s)
