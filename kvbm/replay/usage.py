"""What tenants have used, by clock hour: the sums of what instances have recorded in a log.

They are those that a catalog has of the same events, to the byte. What was used and is in no UsageRecorded, because an
instance was killed before it wrote one or the log has a hole, is named and not guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from kvbm.core.backend import Backend
from kvbm.core.codec import USAGE_VERSION
from kvbm.core.events import InstanceStarted, UsageRecorded
from kvbm.core.ids import Offset
from kvbm.core.usage import (
    UsageGap,
    UsageHour,
    UsageSums,
    begin_of_hour,
    end_of_hour,
    entries_of,
    lines_of,
    start_of,
    unused_lines,
)
from kvbm.core.usage import UsageReport as Sums
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.order import LifeBegins, Missing, Next, in_order, life_text
from kvbm.replay.source import FrameSource, Located, only

_VERSION_AT = slice(4, 6)  # of a frame


class UsageOfLog(msgspec.Struct, kw_only=True):
    """Usage by hour and tenant, and what is not in it.

    Attributes:
        hours, gaps: as in `core.usage.UsageReport`. events: UsageRecorded that were read.
        tenants: all that the log has recorded something of, or has a namespace of.
    """

    source: str
    events: int = 0
    hours: tuple[UsageHour, ...] = ()
    gaps: tuple[UsageGap, ...] = ()
    tenants: list[str] = []
    notes: list[str] = []
    findings: list[ReplayFinding] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from lines_of(Sums(hours=self.hours, gaps=self.gaps))


class UsageStretch(msgspec.Struct, frozen=True, kw_only=True):
    """Hours that begin within a stretch of time, and whose.

    Attributes:
        since_ms, until_ms: None: there is no bound. tenants: None: all.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    tenants: Collection[str] | None = None

    @property
    def begin_ms(self) -> int:
        """Where its first hour begins."""
        return 0 if self.since_ms is None else begin_of_hour(self.since_ms)

    @property
    def end_ms(self) -> int | None:
        """Where its last hour ends; None: there is no bound."""
        return None if self.until_ms is None else end_of_hour(self.until_ms)

    def has(self, event: UsageRecorded) -> bool:
        """Whether a recorded stretch is in it."""
        return self.begin_ms <= event.since_ms and (self.end_ms is None or event.since_ms < self.end_ms)


def usage_of(
    source: FrameSource,
    backend: Backend,
    wanted: UsageStretch,
    instance: str | None = None,
    located: Iterable[Located] | None = None,
) -> UsageOfLog:
    """What a log says that tenants have used.

    Args:
        instance: of this one alone.
        located: what was read from the source, where somebody watches it pass.
    """
    report = UsageOfLog(source=source.name)
    sums, known = UsageSums(), set[str]()
    read = source.read(backend) if located is None else located
    steps = in_order(only(read, instance), source.is_trimmed)
    for key, step in undamaged(steps, report.notes, report.findings):
        if isinstance(step, Missing):
            report.notes.append(
                f"events {step.first:,} to {step.next - 1:,} of epoch {step.epoch} of {key.instance} are missing: "
                "what they say of usage is lost"
            )
        if isinstance(step, LifeBegins):
            report.notes.append(life_text(key, step))
        if not isinstance(step, Next) or not _may_tell(step):
            continue
        frame, _ = backend.decode_frame(step.located.data)
        for offset, event in enumerate(frame.events, frame.first_offset):
            if isinstance(event, InstanceStarted):
                known.update(one.tenant for one in event.namespaces)
                if (began := start_of(frame.instance, frame.wall_time_ns, event)) is not None:
                    sums.note(began)
            if not isinstance(event, UsageRecorded):
                continue
            known.update(row.tenant for row in event.rows)
            is_wanted = wanted.has(event)
            report.events += is_wanted
            for entry in entries_of(frame.instance, frame.epoch, Offset(offset), event):
                if is_wanted and (wanted.tenants is None or entry.tenant in wanted.tenants):
                    sums.add(entry)
                else:
                    sums.note(entry)  # a gap may end behind what is wanted
    found = sums.report(wanted.begin_ms, wanted.end_ms)
    report.hours, report.gaps, report.tenants = found.hours, found.gaps, sorted(known)
    report.notes += unused_lines(report.hours, wanted.tenants or (), known, "the log")
    return report


def _may_tell(step: Next) -> bool:
    """Whether a frame may have usage, or begins an epoch."""
    version = int.from_bytes(step.located.data[_VERSION_AT], "little")
    return version >= USAGE_VERSION or not step.frame.first_offset
