"""A source of the bridge whose sockets are in memory and whose turns a test gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvbm.assembly import NATIVE, NATIVE_FOLD, NEW_FOREIGN_TABLE
from kvbm.bridge.instance import BridgedInstance, BridgeLimits, EngineLedger, Names
from kvbm.bridge.source import BridgedSource
from kvbm.bridge.table import engine_table
from kvbm.core.codec import decode_frame
from kvbm.core.events import Event, InstanceStarted, PoolStated
from kvbm.core.fold import Residencies
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import Epoch, InstanceId, Reach, Tier
from kvbm.reference.foreign_blocks import ForeignBlocks
from kvbm.reference.foreign_ledger import HeldLedger
from kvbm.streams.base import ORIGIN
from kvbm.streams.foreign.blocks import EngineBlocks
from kvbm.streams.foreign.declared import Said
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import Decode, ForeignState, Input

NAME = InstanceId("a")


class Wire:
    """Sockets in memory: what is put there comes."""

    def __init__(self) -> None:
        self.is_connected, self.unreadable = True, 0
        self.waiting: list[Input] = []
        self.asked: list[int] = []

    def sockets(self) -> list[Any]:
        return []

    def receive(self, limit: int) -> Iterator[Input]:
        while self.waiting:
            yield self.waiting.pop(0)

    def ask(self, start: int) -> None:
        self.asked.append(start)

    def end_ask(self) -> None:
        """Nothing to close."""

    def close(self) -> None:
        """Nothing to close."""


class Made(NamedTuple):
    """What knows an engine's blocks, and the ledger of them."""

    blocks: EngineBlocks
    ledger: EngineLedger


def pools_of(source: ForeignSource) -> list[PoolStated]:
    """Those of an instance that speaks for such an engine."""
    pools = [PoolStated(tier, 0, 0) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]
    return [*pools, PoolStated(Tier.OBJECT, 0, 0, Reach.CLUSTER, source.pool)] if source.pool else pools


def readable(source: ForeignSource) -> Made:
    """Those that specify."""
    ledger = HeldLedger(NAME, pools_of(source), NATIVE_FOLD, NATIVE.encode_frame, Said())
    return Made(ForeignBlocks(source, sequence_hashes), ledger)


def native(source: ForeignSource) -> Made:
    """Those that run."""
    return Made(*engine_table(NEW_FOREIGN_TABLE, NAME, source, pools_of(source), Said(), takes_messages=True))


class Driven:
    """A source whose turns a test gives.

    Attributes:
        epochs: that its stream has begun.
    """

    def __init__(
        self, made: Made, decode: Decode, can_replay: bool = True, most_bytes: int = 1 << 28, rank: int | None = None
    ) -> None:
        self.now_s, self.wire = 100.0, Wire()
        self.made = made
        state = ForeignState(made.blocks, decode, can_replay, rank)
        self.source = BridgedSource(NAME, self.wire, state, can_replay, 5.0, lambda: self.now_s)
        self.instance = BridgedInstance(
            Names(NAME, "c", "run"),
            made.ledger,
            BridgeLimits(1.0, 1 << 26, most_bytes),
            lambda: self.now_s,
            lambda: 1,
            self.source,
            Epoch(1),
        )
        self.source.instance = self.instance
        self._fold, self.epochs, self._read = Residencies(strict=True), 0, ORIGIN

    def turn(self, *happened: Input, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.wire.waiting += happened
        self.source.turn(self.now_s)

    def read(self) -> list[Event]:
        """The events since the last time, folded by a strict reader of the stream."""
        events: list[Event] = []
        for frame in self.instance.log.read_after(self._read, 1 << 30):
            decoded, _ = decode_frame(frame.data)
            for event in decoded.events:
                self._fold.evolve(event)
                self.epochs += isinstance(event, InstanceStarted)
                events.append(event)
            assert decoded.digest == self._fold.digest
            self._read = type(self._read)(frame.epoch, frame.next_offset)
        return events

    def fold(self) -> Residencies:
        """What a reader of the whole stream holds."""
        self.read()
        return self._fold
