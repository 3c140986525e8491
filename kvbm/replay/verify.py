"""Is a stream true? Frames undamaged, offsets without holes, events legal, snapshots complete, digests equal."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbm.core.backend import Backend, DecodeFrame, NewFold
from kvbm.core.codec import ScannedFrame
from kvbm.replay.compare_catalog import CatalogComparison, Compared
from kvbm.replay.findings import (
    CONFLICT,
    DIGEST,
    ILLEGAL,
    MISSING,
    SKIPPED,
    SNAPSHOT_RULES,
    ReplayFinding,
    damage_finding,
    damage_text,
)
from kvbm.replay.fold import Illegal, StreamFold
from kvbm.replay.format import counted, offsets
from kvbm.replay.holes import Hole, explained_by
from kvbm.replay.order import (
    Begins,
    Conflict,
    DamagedBytes,
    LateEnd,
    LifeBegins,
    Missing,
    Next,
    Repeat,
    Step,
    StreamKey,
    WentBack,
    in_order,
    life_text,
)
from kvbm.replay.scan import ERASED, TORN
from kvbm.replay.source import FrameSource, Located, only


class Verified(msgspec.Struct, kw_only=True):
    """What was read and what was found.

    Attributes:
        fold: which one was used, "native" or "reference".
        frames, events, blocks: folded.
        repeats: frames that were seen before, byte by byte; harmless.
        stale: frames of an epoch that was over, from an instance that was shut out; no reader counts them, and they are
            no defect.
        lives: times an instance began another life, its journal or the stream's end having been lost.
        late: frames of an epoch's end that were stored only after the next epoch had begun; not folded, and no defect.
        notes: what is worth saying and no defect.
        catalog: whether a catalog agrees, when one was asked.
    """

    source: str
    fold: str
    instances: int = 0
    epochs: int = 0
    frames: int = 0
    events: int = 0
    blocks: int = 0
    repeats: int = 0
    late: int = 0
    stale: int = 0
    lives: int = 0
    findings: list[ReplayFinding] = []
    notes: list[str] = []
    catalog: Compared | None = None

    def verdict(self) -> str:
        """The whole in one line."""
        counts = (
            f"{counted(self.instances, 'instance')}, {counted(self.epochs, 'epoch')}, {counted(self.frames, 'frame')}, "
        )
        counts += counted(self.events, "event")
        if self.repeats:
            counts += f", {counted(self.repeats, 'repeat')}"
        if self.late:
            counts += f", {self.late:,} late"
        if self.stale:
            counts += f", {self.stale:,} stale"
        if self.lives:
            counts += f", {'1 new life' if self.lives == 1 else f'{self.lives:,} new lives'}"
        found = counted(len(self.findings), "finding")
        return f"FAILED: {found} in {counts}" if self.findings else f"verified: {counts}, {found}"


def verify(
    source: FrameSource,
    backend: Backend,
    fold: NewFold,
    instance: str | None = None,
    located: Iterable[Located] | None = None,
    against: CatalogComparison | None = None,
) -> Verified:
    """Fold every stream of a source and name each defect once.

    After a defect the fold goes on leniently until a snapshot has ended, so that one does not show as many.

    Args:
        backend, fold: both native or both the specification; the report has the name of `backend`.
        instance: only this one's frames.
        located: what was read from the source, where somebody watches it pass.
        against: a catalog to compare with, asked before the reading begins.
    """
    verifier = _Verifier(Verified(source=source.name, fold=backend.name), fold, backend.decode_frame, against)
    read = source.read(backend) if located is None else located
    for item in in_order(only(read, instance), source.is_trimmed):
        verifier.take(item)
    report = verifier.finish()
    if against is not None:
        report.catalog = against.finish()
    return report


class _Verifier:
    def __init__(
        self, report: Verified, new_fold: NewFold, decode_frame: DecodeFrame, against: CatalogComparison | None
    ) -> None:
        self._against = against
        self.report = report
        self._new_fold = new_fold
        self._decode_frame = decode_frame
        self._folds: dict[StreamKey, StreamFold] = {}
        self._epochs: set[tuple[StreamKey, int]] = set()
        self._stale: set[tuple[StreamKey, int]] = set()
        self._found: list[tuple[int, ReplayFinding]] = []  # by the order of the frame
        self._damage: list[DamagedBytes] = []
        self._holes: list[Hole] = []
        self._erased: dict[str, int] = {}  # frames, by which erasure

    def take(self, item: tuple[StreamKey, Step] | DamagedBytes) -> None:
        if isinstance(item, DamagedBytes):
            self._take_damage(item)
            return
        key, step = item
        match step:
            case Next():
                self._fold(key, step)
            case Missing():
                self._holes.append(Hole(key, step))
                self._fold_of(key).miss(step.epoch, step.next)
            case Begins():
                self._fold_of(key).miss(step.epoch, step.offset)
                self.report.notes.append(
                    f"instance {key.instance} begins at offset {step.offset:,} of epoch {step.epoch}: nothing is known "
                    "before"
                )
            case Repeat():
                self.report.repeats += 1
            case LateEnd():
                self.report.late += 1
            case Conflict():
                why = (
                    f"{offsets(step.frame)} were already seen with other bytes, and the first are believed; two "
                    "writers, or a rewritten file"
                )
                self._find(CONFLICT, why, step.located, step.frame)
            case WentBack():
                self._note_stale(key, step)
            case LifeBegins():
                self._folds[key] = StreamFold(self._new_fold, self._decode_frame)
                self.report.lives += 1
                self.report.notes.append(life_text(key, step))
                if self._against is not None:
                    self._against.life_began(key.instance)

    def finish(self) -> Verified:
        """The report, once everything was taken."""
        explained = explained_by(self._holes, self._damage)
        for index, hole in enumerate(self._holes):
            if index not in explained:
                self._find_hole(hole)
        for why, count in self._erased.items():
            self.report.notes.append(
                f"{counted(count, 'frame')} {why}; each instance is whole again at its next snapshot"
            )
        self.report.instances = len(self._folds)
        self.report.epochs = len(self._epochs)
        self.report.findings = [finding for _, finding in sorted(self._found, key=lambda entry: entry[0])]
        return self.report

    def _note_stale(self, key: StreamKey, step: WentBack) -> None:
        self.report.stale += 1
        if (key, step.frame.epoch) not in self._stale:
            self._stale.add((key, step.frame.epoch))
            self.report.notes.append(
                f"instance {key.instance} epoch {step.frame.epoch} goes on at {step.located.place} after epoch "
                f"{step.epoch} had "
                "begun: a process that was replaced; its frames do not count"
            )

    def _fold_of(self, key: StreamKey) -> StreamFold:
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = StreamFold(self._new_fold, self._decode_frame)
        return fold

    def _fold(self, key: StreamKey, step: Next) -> None:
        frame, fold = step.frame, self._fold_of(key)
        self._epochs.add((key, frame.epoch))
        self.report.frames += 1
        self.report.events += frame.event_count
        self.report.blocks += sum(frame.blocks)
        for illegal in fold.evolve(frame, step.located.data):
            self._find_illegal(step, illegal)
        if not fold.agrees(frame.digest):
            why = (
                f"after {offsets(frame)} the fold holds {fold.residencies.count():,} blocks with digest "
                f"{fold.residencies.digest:016x}, the frame says {frame.digest:016x}; an event is wrong or was never "
                "recorded"
            )
            self._find(DIGEST, why, step.located, frame, offset=frame.next_offset - 1)
            fold.diverge()
        if self._against is not None:
            self._against.passed(frame, fold, step.located.data)

    def _find_illegal(self, step: Next, illegal: Illegal) -> None:
        frame, rule = step.frame, illegal.error.rule
        kind = SKIPPED if rule in SNAPSHOT_RULES else ILLEGAL
        why = f"{illegal.event} breaks {illegal.error}"
        self._find(kind, why, step.located, frame, frame.first_offset + illegal.place, rule)

    def _find_hole(self, hole: Hole) -> None:
        step = hole.step
        count = step.next - step.first
        which = f"offset {step.first:,}" if count == 1 else f"offsets {step.first:,} to {step.next - 1:,}"
        finding = ReplayFinding(
            kind=MISSING,
            message=f"{counted(count, 'event')} lost: no frame before this one has {which} of epoch {step.epoch}",
            source=step.after.place.source,
            sequence=step.after.place.sequence,
            byte=step.after.place.at,
            instance=hole.key.instance,
            epoch=step.epoch,
            offset=step.first,
        )
        self._found.append((step.after.order, finding))

    def _find(
        self,
        kind: str,
        message: str,
        located: Located,
        frame: ScannedFrame,
        offset: int | None = None,
        rule: str | None = None,
    ) -> None:
        place = located.place
        finding = ReplayFinding(
            kind=kind,
            message=message,
            source=place.source,
            sequence=place.sequence,
            byte=place.at,
            instance=frame.instance,
            epoch=frame.epoch,
            offset=frame.first_offset if offset is None else offset,
            rule=rule,
        )
        self._found.append((located.order, finding))

    def _take_damage(self, damaged: DamagedBytes) -> None:
        if damaged.damage.kind == TORN:
            self.report.notes.append(damage_text(damaged))
            return
        self._damage.append(damaged)
        if damaged.damage.kind == ERASED:
            why = damaged.damage.why
            self._erased[why] = self._erased.get(why, 0) + 1
            return
        self._found.append((damaged.located.order, damage_finding(damaged)))
