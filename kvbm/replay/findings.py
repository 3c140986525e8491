"""Defects by name: where each is, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvbm.core.ids import InstanceId
from kvbm.replay.format import counted
from kvbm.replay.order import DamagedBytes, Step, StreamKey
from kvbm.replay.scan import ERASED, NEWER, NOTED, TORN
from kvbm.replay.source import TRUNCATED, FramePlace

MISSING, CONFLICT, ILLEGAL = "missing-frame", "conflicting-repeat", "illegal-event"
SKIPPED, DIGEST = "skipped-snapshot-run", "digest-mismatch"

SNAPSHOT_RULES = ("snapshot-withdrew", "snapshot-incomplete", "snapshot-added")


class ReplayFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One defect.

    Attributes:
        kind: its name, such as "corrupt-frame".
        message: what it means, without where it is.
        source, sequence, byte: where the frame lies; `sequence` only in a stream.
        instance, epoch, offset: whose, and the first event concerned; None where damage hides them.
        rule: of an illegal event, the rule it breaks.
    """

    kind: str
    message: str
    source: str
    sequence: int | None
    byte: int
    instance: InstanceId | None = None
    epoch: int | None = None
    offset: int | None = None
    rule: str | None = None

    def sentence(self) -> str:
        """Kind, place and meaning."""
        whose = "" if self.instance is None else f", instance {self.instance} epoch {self.epoch} offset {self.offset}"
        return f"{self.kind} at {FramePlace(self.source, self.sequence, self.byte)}{whose}: {self.message}"


def exit_code(findings: Sequence[ReplayFinding]) -> int:
    """0 without findings, 2 when all there is to say is that a newer kvbm wrote some of it, else 1."""
    if not findings:
        return 0
    return 2 if all(finding.kind == NEWER for finding in findings) else 1


def damage_finding(damaged: DamagedBytes) -> ReplayFinding:
    """The finding for bytes that are no good frame."""
    place, header = damaged.located.place, damaged.damage.header
    return ReplayFinding(
        kind=damaged.damage.kind,
        message=damage_text(damaged),
        source=place.source,
        sequence=place.sequence,
        byte=place.at,
        instance=header.instance if header else None,
        epoch=header.epoch if header else None,
        offset=header.first_offset if header else None,
    )


def damage_text(damaged: DamagedBytes) -> str:
    """What damage means."""
    place, damage = damaged.located.place, damaged.damage
    if damage.kind == TORN:
        return (
            f"{place.source}: tail torn at byte {place.at:,}: {counted(damage.size, 'byte')} after the last whole "
            "frame; "
            "a write was cut short or is under way"
        )
    if damage.kind == TRUNCATED:
        return f"the capture ends inside a frame ({damage.why}); it was cut short after byte {place.at:,}"
    if damage.kind in (NEWER, ERASED):
        return damage.why
    return f"no good frame in {counted(damage.size, 'byte')}, which were left out: {damage.why}"


def undamaged(
    items: Iterable[tuple[StreamKey, Step] | DamagedBytes], notes: list[str], findings: list[ReplayFinding]
) -> Iterator[tuple[StreamKey, Step]]:
    """What a tool that does not judge goes on with: damage is reported, a torn tail as a note and the rest as
    findings.
    """
    for item in items:
        if not isinstance(item, DamagedBytes):
            yield item
        elif item.damage.kind in NOTED:
            notes.append(damage_text(item))
        else:
            findings.append(damage_finding(item))
