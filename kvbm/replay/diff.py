"""Two sources side by side: do they tell the same events, and where is the first one they do not?

Events are compared, not frames: the same events may have been cut into other frames, or be there twice. Frames of equal
bytes are compared without taking them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvbm.core.backend import Backend, DecodeFrame
from kvbm.core.codec import UNKNOWN_DIGEST
from kvbm.core.events import Event
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.progress import Watch
from kvbm.replay.format import counted, event_fields, event_text, place_text
from kvbm.replay.frames import FrameLibrary, InstanceFrames
from kvbm.replay.order import StreamKey
from kvbm.replay.progress import watched
from kvbm.replay.source import FrameSource, SourceError, only
from kvbm.streams.base import Position

EVENT, ABSENT, DIGEST, INSTANCE = "event", "absent", "digest", "instance"


class DiffSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one source has at the place where two part.

    Attributes:
        place: of the frame; where the event is absent, of the next frame that is there, "" for none.
        event: in words; None where it is absent.
    """

    source: str
    place: str
    event: str | None


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where two sources part, for one instance.

    Attributes:
        kind: EVENT: other events at this offset. ABSENT: one source goes on without it. DIGEST: the same events, and
            frames that end after this one say that other blocks are held. INSTANCE: one source has nothing of the
            instance; epoch and offset are 0.
        why: in what two events differ.
    """

    kind: str
    instance: InstanceId
    epoch: Epoch
    offset: Offset
    a: DiffSide
    b: DiffSide
    why: str = ""

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.kind == INSTANCE:
            there, gone = (self.a, self.b) if self.a.event is not None else (self.b, self.a)
            yield f"instance {self.instance}: only {there.source} has it, not {gone.source}"
            return
        if self.kind == DIGEST:
            yield (
                f"instance {self.instance} epoch {self.epoch} offset {self.offset}: the same event, and other "
                "digests after it"
            )
        else:
            yield f"instance {self.instance} epoch {self.epoch} offset {self.offset}: first divergence"
        for name, side in (("A", self.a), ("B", self.b)):
            where = f" ({'next ' if side.event is None else ''}{side.place})" if side.place else ""
            yield f"  {name} {side.event or 'has no such event, and goes on'}{where}"
        if self.why:
            yield f"  they differ in {self.why}"


class Diffed(msgspec.Struct, kw_only=True):
    """Two sources compared.

    Attributes:
        events: compared. equal_frames: pairs of frames with the same bytes, which needed no taking apart.
        notes: what is worth saying and no difference, such as that one begins later.
    """

    a: str
    b: str
    instances: int = 0
    events: int = 0
    equal_frames: int = 0
    divergences: list[Divergence] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people; the first line is the verdict, after the notes."""
        yield from self.notes
        what = f"{counted(self.events, 'event')} of {counted(self.instances, 'instance')} compared"
        if not self.divergences:
            yield f"same: {what}"
            return
        yield f"DIFFERENT: {counted(len(self.divergences), 'instance')} of {self.a} (A) and {self.b} (B), {what}"
        for divergence in self.divergences:
            yield from (f"  {line}" for line in divergence.lines())


def diff(a: FrameSource, b: FrameSource, backend: Backend, instance: str | None = None) -> Diffed:
    """Compare two sources, instance by instance, up to the first divergence of each.

    Args:
        instance: only this one.
    Raises: SourceError: they have no events in common.
    """
    report = Diffed(a=a.name, b=b.name)
    with FrameLibrary(a.name) as library_a, FrameLibrary(b.name) as library_b:
        for source, library in ((a, library_a), (b, library_b)):
            library.fill(only(watched(source.read(backend), source), instance), source.is_trimmed)
            report.notes += library.notes
            report.notes += [f"{source.name}: {finding.sentence()}" for finding in library.findings]
        pairs = _pairs(library_a.instances, library_b.instances)
        watch = Watch(f"{a.name} and {b.name}", sum(len(one or ()) for _, one, _ in pairs))
        with watch:
            for name, one, other in pairs:
                _compare(name, one, other, report, backend.decode_frame, watch)
    if not report.events and not report.divergences:
        asked = f" of instance {instance!r}" if instance else ""
        raise SourceError(f"{a.name} and {b.name} have no events{asked} in common; kvbm-replay stat says what each has")
    return report


def _pairs(
    a: dict[StreamKey, InstanceFrames], b: dict[StreamKey, InstanceFrames]
) -> list[tuple[InstanceId, InstanceFrames | None, InstanceFrames | None]]:
    """Whose frames are to be compared: the same name; where a source has two of one name, the same group, too."""
    names = sorted({key.instance for key in (*a, *b)})
    pairs: list[tuple[InstanceId, InstanceFrames | None, InstanceFrames | None]] = []
    for name in names:
        ours, theirs = ([key for key in source if key.instance == name] for source in (a, b))
        if len(ours) <= 1 and len(theirs) <= 1:
            pairs.append((name, a[ours[0]] if ours else None, b[theirs[0]] if theirs else None))
            continue
        pairs += [(name, a.get(key), b.get(key)) for key in sorted({*ours, *theirs})]
    return pairs


def _compare(
    name: InstanceId,
    a: InstanceFrames | None,
    b: InstanceFrames | None,
    report: Diffed,
    decode: DecodeFrame,
    watch: Watch,
) -> None:
    report.instances += 1
    if a is None or b is None:
        there = f"{counted(len(a or b or ()), 'frame')}"
        sides = [
            DiffSide(source=source, place="", event=None if frames is None else there)
            for source, frames in ((report.a, a), (report.b, b))
        ]
        report.divergences.append(
            Divergence(kind=INSTANCE, instance=name, epoch=Epoch(0), offset=Offset(0), a=sides[0], b=sides[1])
        )
        return
    for what, ours, theirs in (("begins", a.begin, b.begin), ("ends", a.end, b.end)):
        if ours != theirs:
            early, late = (report.a, report.b) if ours < theirs else (report.b, report.a)
            low, high = sorted((ours, theirs))
            report.notes.append(
                f"instance {name}: {early} {what} at {place_text(*low)}, {late} at {place_text(*high)}; "
                "only what both cover is compared"
            )
    walk = _Walk(name, _Cursor(a, report.a, decode), _Cursor(b, report.b, decode), report)
    for divergence in walk.divergences(max(a.begin, b.begin), min(a.end, b.end), watch):
        report.divergences.append(divergence)
        return


class _Cursor:
    """A place in one source's frames of one instance."""

    def __init__(self, frames: InstanceFrames, source: str, decode: DecodeFrame) -> None:
        self.frames = frames
        self.at = 0
        self._source = source
        self._decode = decode
        self._decoded = -1
        self._events: tuple[Event, ...] = ()

    def events(self) -> tuple[Event, ...]:
        """Of the frame here."""
        if self._decoded != self.at:
            self._decoded, self._events = self.at, self._decode(self.frames.data(self.at))[0].events
        return self._events

    def event(self, offset: Offset) -> Event:
        return self.events()[offset - self.frames[self.at].first]

    def side(self, offset: Offset | None) -> DiffSide:
        """What this source has at an offset of the frame here, or that it has no such event."""
        is_there = self.at < len(self.frames)
        return DiffSide(
            source=self._source,
            place=str(self.frames.place(self.at)) if is_there else "",
            event=None if offset is None else event_text(self.event(offset)),
        )


class _Walk:
    """Goes along both sources of one instance."""

    def __init__(self, name: InstanceId, a: _Cursor, b: _Cursor, report: Diffed) -> None:
        self._name = name
        self._a, self._b = a, b
        self._report = report

    def divergences(self, begin: Position, end: Position, watch: Watch) -> Iterator[Divergence]:
        """Where the two part between two places; the first one is the one that counts.

        Of the two frames at hand, [a.first, a.next) and [b.first, b.next), what lies before `reached` is compared
        already:

            reached ──┐
            A   ······├────────┤
            B      ···├──────────────┤   → compare up to the first end, move on whose end it is
        """
        a, b = self._a, self._b
        a.at, b.at = a.frames.first_beyond(begin), b.frames.first_beyond(begin)
        reached = begin
        while a.at < len(a.frames) and b.at < len(b.frames) and reached < end:
            ours, theirs = a.frames[a.at], b.frames[b.at]
            if ours == theirs and reached <= (ours.epoch, ours.first):
                self._report.events += ours.next - ours.first
                self._report.equal_frames += 1
                reached = Position(ours.epoch, ours.next)
            else:
                begin_a = max(Position(ours.epoch, ours.first), reached)
                begin_b = max(Position(theirs.epoch, theirs.first), reached)
                if begin_a != begin_b:
                    yield self._absent(begin_a, begin_b)
                    return
                upto = min(ours.next, theirs.next)
                yield from self._compare_events(begin_a, upto)
                if ours.next == theirs.next and len({ours.digest, theirs.digest} - {UNKNOWN_DIGEST}) > 1:
                    yield self._divergence(DIGEST, Position(ours.epoch, Offset(upto - 1)), True, True)
                reached = Position(ours.epoch, upto)
            a.at += (ours.epoch, ours.next) == reached
            b.at += (theirs.epoch, theirs.next) == reached
            watch.done = a.at

    def _compare_events(self, begin: Position, upto: Offset) -> Iterator[Divergence]:
        for offset in map(Offset, range(begin.offset, upto)):
            ours, theirs = self._a.event(offset), self._b.event(offset)
            if ours != theirs:
                found = self._divergence(EVENT, Position(begin.epoch, offset), True, True)
                yield msgspec.structs.replace(found, why=_differences(ours, theirs))
            self._report.events += 1

    def _absent(self, begin_a: Position, begin_b: Position) -> Divergence:
        return self._divergence(ABSENT, min(begin_a, begin_b), begin_a < begin_b, begin_b < begin_a)

    def _divergence(self, kind: str, at: Position, in_a: bool, in_b: bool) -> Divergence:
        return Divergence(
            kind=kind,
            instance=self._name,
            epoch=at.epoch,
            offset=at.offset,
            a=self._a.side(at.offset if in_a else None),
            b=self._b.side(at.offset if in_b else None),
        )


def _differences(a: Event, b: Event) -> str:
    """The fields in which two events differ, and of a run the first block."""
    if type(a) is not type(b):
        return "kind"
    ours, theirs = event_fields(a), event_fields(b)
    return ", ".join(_difference(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name])


def _difference(name: str, a: Any, b: Any) -> str:
    if name not in ("hashes", "slots"):
        return f"{name} (A {a}, B {b})"
    if len(a) != len(b):
        return f"{name} (A {len(a)}, B {len(b)})"
    at = next(at for at, (ours, theirs) in enumerate(zip(a, b, strict=True)) if ours != theirs)
    return f"{name} from block {at} of {len(a)} on (A {a[at]}, B {b[at]})"
