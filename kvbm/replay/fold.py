"""One instance's events, folded with as much strictness as is deserved: a suspect tier is folded leniently until a
snapshot ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvbm.core.backend import REFERENCE, DecodeFrame, NewFold
from kvbm.core.codec import UNKNOWN_DIGEST, Frame, ScannedFrame, decode_frame
from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    ResidenciesListed,
    SnapshotEnded,
    misplaced,
)
from kvbm.core.fold import MISPLACED, Residencies
from kvbm.core.ids import Epoch, Offset, Tier


class Illegal(NamedTuple):
    """An event that is illegal, by its place in the frame, from 0, and its name."""

    place: int
    event: str
    error: IllegalEventError


class StreamFold:
    """What one instance holds, and in which tiers that is suspect because of something missed or illegal.

    Args:
        new_fold: makes the fold; the specification, or its native implementation.
        decode_frame: takes frames apart, where events are looked at one by one.
    """

    def __init__(self, new_fold: NewFold, decode_frame: DecodeFrame) -> None:
        self.residencies = new_fold()
        self._is_reference = decode_frame is REFERENCE.decode_frame and isinstance(self.residencies, Residencies)
        self._decode_frame = _decode_proven if self._is_reference else decode_frame
        self.epoch = Epoch(0)
        self.next_offset = Offset(0)
        self.suspect: set[Tier] = set()

    def miss(self, epoch: Epoch, next_offset: Offset) -> None:
        """Events were missed; the next one is `next_offset` of `epoch`."""
        if epoch != self.epoch:
            self._begin_blind(epoch)
        else:
            self._suspicion()
        self.next_offset = next_offset

    def evolve(self, frame: ScannedFrame, data: bytes, stop: int | None = None) -> Iterator[Illegal]:
        """Fold a frame's events, those from index `stop` on left out; exhaust it.

        An illegal event is reported, folded as far as it makes sense, and leaves all tiers suspect. One that only names
        a place that contradicts itself (MISPLACED) is reported and folded as any other: what is held does not depend on
        it.
        """
        first = 0
        if stop is None and not self.suspect and frame.epoch == self.epoch and not self._is_reference:
            self.residencies.strict = True
            folded = self.residencies.evolve_frame(data)
            first = folded.folded
            self.next_offset = Offset(self.next_offset + first)
            if first == frame.event_count and not folded.anomalies:
                return
        for index, event in enumerate(self._decode_frame(data)[0].events[:stop]):
            if isinstance(event, BlocksCreated) and (why := misplaced(event.parent, event.start)):
                yield Illegal(index, type(event).__name__, IllegalEventError(MISPLACED, f"{event.tier.name}: {why}"))
            error = self._evolve(frame, event) if index >= first else None
            if error is not None:
                yield Illegal(index, type(event).__name__, error)

    def _evolve(self, frame: ScannedFrame, event: Event) -> IllegalEventError | None:
        illegal = self._check_beginning(frame, event)
        if illegal is not None and isinstance(event, InstanceStarted):
            event = msgspec.structs.replace(event, epoch=frame.epoch)
        residencies = self.residencies
        residencies.strict = illegal is None and self.suspect.isdisjoint(_tiers(event))
        if isinstance(event, InstanceStarted) and illegal is None:
            residencies.strict = True
        try:
            residencies.evolve(event)
        except IllegalEventError as error:
            illegal = error
            residencies.strict = False
            residencies.evolve(event)
        if illegal is not None:
            self._suspicion()
        elif isinstance(event, InstanceStarted):
            self.suspect.clear()
        elif isinstance(event, SnapshotEnded) and residencies.is_whole(event.tier):
            self.suspect.discard(event.tier)
        self.next_offset = Offset(self.next_offset + 1)
        return illegal

    def agrees(self, digest: int) -> bool:
        """Whether a frame's digest is that of what is held. Where anything is suspect, or it is not known, it always
        is.
        """
        if digest == UNKNOWN_DIGEST:
            return True
        is_same = self.residencies.digest == digest
        if is_same and not any(self.residencies.count(tier) for tier in self.suspect):
            self.suspect.clear()  # the digest covers every tier, so these are empty indeed
        return is_same or bool(self.suspect)

    def diverge(self) -> None:
        """What is held was found wrong; every tier is suspect."""
        self._suspicion()

    def _check_beginning(self, frame: ScannedFrame, event: Event) -> IllegalEventError | None:
        """Enter the frame's epoch, which must begin with its start."""
        is_new = frame.epoch != self.epoch
        if is_new:
            self.next_offset = frame.first_offset
        if isinstance(event, InstanceStarted):
            self.epoch = frame.epoch
            if event.epoch == frame.epoch:
                return None
            return IllegalEventError(
                "epoch-differs", f"InstanceStarted of epoch {event.epoch} in a frame of epoch {frame.epoch}"
            )
        if not is_new:
            return None
        self._begin_blind(frame.epoch)
        return IllegalEventError(
            "not-started", f"epoch {frame.epoch} begins with {type(event).__name__}, not InstanceStarted"
        )

    def _begin_blind(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.residencies.begin_blind(epoch)
        self._suspicion()

    def _suspicion(self) -> None:
        residencies = self.residencies
        residencies.miss_events()
        known = set(residencies.pools) or set(Tier)  # without a beginning, any tier may hold something
        self.suspect = {t for t in Tier if (t in known or residencies.count(t)) and not residencies.is_cluster(t)}


def _decode_proven(data: bytes, at: int = 0) -> tuple[Frame, int]:
    """As `decode_frame`, of a whole frame whose checksum was compared when it was found: in Python that takes a third
    of the time.
    """
    return decode_frame(data, at, lambda _: int.from_bytes(data[-4:], "little"))


def _tiers(event: Event) -> tuple[Tier, ...]:
    match event:
        case (
            BlocksCreated(tier=tier)
            | BlocksEvicted(tier=tier)
            | ResidenciesListed(tier=tier)
            | SnapshotEnded(tier=tier)
        ):
            return (tier,)
        case BlocksMigrated(source=Tier() as source, target=target):
            return (source, target)
        case BlocksMigrated(target=target):
            return (target,)
        case _:
            return ()
