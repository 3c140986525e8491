"""Is what a running catalog answers the fold of the log?

Compared where both stand at the same offset, so traffic does not matter.

The catalog is asked where it stands *before* the log is read. On its way the fold passes that very place of each
instance, and there digest and counts must be equal. Blocks are asked for after the reading, of instances at whose end
the catalog stands then.

A log that is still written, such as the archive of that catalog, may end before the place: it is read again a few times
(`CatalogComparison.again`). One that does not come there is no other than the catalog, it is behind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.answers import BlockAnswer, InstanceSummary, ReadyAnswer
from kvbm.core.backend import Fold
from kvbm.core.codec import ScannedFrame, decode_frame
from kvbm.core.events import InstanceStopped
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier, short
from kvbm.core.parts import followed_parts, part_of
from kvbm.replay.fold import StreamFold
from kvbm.replay.format import counted, place_text, time_text
from kvbm.streams.base import Position

SAMPLED_BLOCKS = 64  # of each instance
WAIT_S = 5.0  # for a catalog that is behind the log
QUIET_S = 60.0  # an instance without an event for so long may be gone, where the catalog cannot say
REMEMBERED_S = 24 * 3600.0  # whom it has forgotten a catalog knows for longer than this after the last event
_POLL_S = 0.1
_GONE = ("stopped", "silent")  # as why answers leave an instance out


class CatalogAnswers(Protocol):
    """What is asked of a catalog; `locate.http.CatalogClient` does it. All raise CatalogError."""

    @property
    def url(self) -> str: ...  # without user and password
    def ready(self) -> ReadyAnswer: ...
    def instances(self) -> list[InstanceSummary]: ...
    def has_forgotten(self, instance: InstanceId) -> bool | None: ...  # None: it does not tell
    def block(self, namespace: NamespaceId, block: bytes) -> BlockAnswer: ...


AskCatalog = Callable[
    [str, Path | None, Sequence[str], float], CatalogAnswers
]  # URL, file of settings, KEY=VALUE settings, seconds that an answer may take → who answers


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which the catalog is not the fold of the log.

    Attributes:
        what: "digest", "count", "holder", "absent" (the catalog does not know an instance that goes on), "behind" (it
            does not come on to where the log ends) or "ahead" (it knows of events that are not in the log).
        block: of "holder": its hash in hex.
    """

    what: str
    instance: InstanceId
    epoch: Epoch
    offset: Offset
    message: str
    block: str | None = None

    def sentence(self) -> str:
        """Whose, where and what."""
        return (
            f"catalog-{self.what} of instance {self.instance} at {place_text(self.epoch, self.offset)}: {self.message}"
        )


class Compared(msgspec.Struct, kw_only=True):
    """The comparison with a catalog.

    Attributes:
        instances: that log or catalog has, in parts that the catalog follows.
        compared: those whose digest and counts were compared at the same offset.
        uncompared: those of which they should have been and were not, by name. An instance is none of these if it is
            gone, if the catalog has forgotten it, or if it came while the log was read.
        blocks: whose holders were compared.
        ahead: places at which the catalog stood that the log does not reach: what lies there is not compared.
    """

    url: str
    instances: int = 0
    compared: int = 0
    uncompared: list[InstanceId] = []
    blocks: int = 0
    differences: list[Difference] = []
    ahead: list[Difference] = []
    notes: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether all instances were compared that should have been."""
        return not (self.ahead or self.uncompared)

    def verdict(self) -> str:
        """In one line."""
        part = f"{self.compared:,} of {counted(self.instances, 'instance')} compared"
        what = f"{counted(self.compared, 'instance')} at equal offsets, {counted(self.blocks, 'block')}"
        if self.compared and not self.blocks:
            what += " (the notes say of each instance why none of its blocks was looked up)"
        if self.differences:
            return f"DIFFERENT: the catalog at {self.url} in {counted(len(self.differences), 'way')}; {part}: {what}"
        if not self.compared:
            return (
                f"NOT COMPARED: {part}; no instance stands at the same offset in the log and in the catalog at "
                f"{self.url}, whole in both"
            )
        if self.ahead:
            return (
                f"BEHIND: the log ends before where the catalog at {self.url} stood, in "
                f"{counted(len(self.ahead), 'instance')}; {part}, equal in what was compared: {what}"
            )
        if self.uncompared:
            return (
                f"NOT ALL COMPARED: {part}, equal in what was compared: {what}; the notes say why not the others, and "
                f"{self.url}/readyz whether the catalog is degraded"
            )
        rest = "" if self.compared == self.instances else f"; {part}, the notes say why not the others"
        return f"equal: the catalog at {self.url} is the fold of the log: {what}{rest}"


class _Held(NamedTuple):
    """What is held at some place."""

    digest: int
    counts: dict[str, int]


class CatalogComparison:
    """Listens to `verify` while it folds. Ask `wanted` first, `passed` at each frame, `finish` at the end."""

    def __init__(
        self,
        catalog: CatalogAnswers,
        instance: str | None,
        wait_s: float = WAIT_S,
        wanted: Mapping[str, InstanceSummary] | None = None,
    ) -> None:
        """Asks the catalog where it stands, unless it is `wanted` where it stood. Raises CatalogError."""
        self.report = Compared(url=catalog.url)
        self._catalog = catalog
        self._only = instance
        self._wait_s = wait_s
        self._parts = followed_parts(catalog.ready().parts, "the catalog's /readyz")
        self._wanted = {one.instance: one for one in self._answers()} if wanted is None else dict(wanted)
        self._met: set[str] = set()
        self._compared: set[str] = set()
        self._excused: set[str] = set()  # those of whom no comparison is expected
        self._folds: dict[InstanceId, StreamFold] = {}
        self._last: dict[InstanceId, tuple[ScannedFrame, bytes]] = {}

    def again(self) -> CatalogComparison:
        """A new comparison with where the catalog stood for this one, for another reading of the log. Raises
        CatalogError.
        """
        return CatalogComparison(self._catalog, self._only, self._wait_s, self._wanted)

    def passed(self, frame: ScannedFrame, fold: StreamFold, data: bytes) -> None:
        """The fold has just taken this frame."""
        self._folds[frame.instance] = fold
        self._last[frame.instance] = frame, data
        wanted = self._wanted.get(frame.instance)
        if wanted is not None and (wanted.epoch, wanted.offset) == (frame.epoch, frame.next_offset):
            self._met.add(frame.instance)
            self._compare(wanted, fold)

    def life_began(self, instance: InstanceId) -> None:
        """What was passed of an instance is of another life, which the catalog has forgotten."""
        self._folds.pop(instance, None)
        self._met.discard(instance)
        self._compared.discard(instance)
        self.report.differences = [one for one in self.report.differences if one.instance != instance]

    def finish(self) -> Compared:
        """Compare what is left, at the ends. Raises CatalogError."""
        others = [name for name in self._folds if part_of(name) not in self._parts]
        if others:
            self.report.notes.append(
                f"{counted(len(others), 'instance')} in parts that the catalog does not follow; not compared"
            )
        followed = sorted(self._folds.keys() - set(others))
        for name in followed:
            self._finish_one(name, self._folds[name])
        unread = sorted(name for name in self._wanted.keys() - self._folds.keys() if self._wanted[name].epoch)
        for one in unread:
            self._take_unread(InstanceId(one), self._wanted[one])
        report, names = self.report, {*followed, *unread}
        report.instances, report.compared = len(names), len(self._compared)
        report.uncompared = sorted(InstanceId(name) for name in names - self._compared - self._excused)
        return report

    def _finish_one(self, name: InstanceId, fold: StreamFold) -> None:
        """Compare an instance at the log's end, or say why not."""
        end = Position(fold.epoch, fold.next_offset)
        answer = self._at_least(name, end)
        if answer is None:
            self._take_absent(name, end)
            return
        here = Position(Epoch(answer.epoch), Offset(answer.offset))
        if here < end:
            self._differ(
                "behind",
                name,
                end,
                f"the catalog stands at {place_text(*here)} and does not come on within {self._wait_s:g} s",
            )
        elif here == end:
            is_new = name not in self._met
            if is_new:
                self._met.add(name)
                self._compare(answer, fold)
            if not (fold.suspect or answer.suspect or answer.partial):
                self._compare_blocks(name, end, fold.residencies)
            elif not is_new:
                self._note_unlooked(name, "by now it is suspect or partial")
        elif name in self._met:
            self._note_unlooked(name, f"the catalog has moved on to {place_text(*here)} since")
        else:
            self._take_passed(name, end, here)

    def _take_passed(self, name: InstanceId, end: Position, here: Position) -> None:
        """The catalog is further than where the log ends, and the fold did not come by where it stood before."""
        wanted = self._wanted.get(name)
        if wanted is not None and Position(Epoch(wanted.epoch), Offset(wanted.offset)) > end:
            stood = place_text(wanted.epoch, wanted.offset)
            self._note_ahead(name, end, f"the log ends here, and the catalog stood at {stood} before it was read")
            return
        if wanted is None:
            self._excused.add(name)
        self.report.notes.append(f"instance {name}: the catalog has moved on to {place_text(*here)}; not compared")

    def _take_unread(self, name: InstanceId, one: InstanceSummary) -> None:
        """The log has nothing of an instance that the catalog knows."""
        if one.excluded in _GONE:
            self._excused.add(name)
            self.report.notes.append(
                f"instance {name}: the catalog knows it as {one.excluded}, and the log has nothing of it, any more or "
                "yet; not compared"
            )
            return
        place = Position(Epoch(one.epoch), Offset(one.offset))
        self._note_ahead(name, place, "the catalog knows it, and the log has nothing of it")

    def _take_absent(self, name: InstanceId, end: Position) -> None:
        """The catalog does not know an instance: it has forgotten one that is gone, or has never heard of it."""
        frame, data = self._last[name]
        when, idle_s = time_text(frame.wall_time_ns), (time.time_ns() - frame.wall_time_ns) / 1_000_000_000
        stopped = next((one for one in decode_frame(data)[0].events if isinstance(one, InstanceStopped)), None)
        is_forgotten = self._catalog.has_forgotten(name)
        may_be_forgotten = idle_s >= (QUIET_S if is_forgotten is None else REMEMBERED_S)
        if stopped is None and not is_forgotten and not may_be_forgotten:
            why = " and has not forgotten it" if is_forgotten is False else ", or has forgotten it"
            self._differ("absent", name, end, f"the log has it up to {when}, and the catalog does not know it{why}")
            return
        self._excused.add(name)
        how = (
            f"its last event is of {when}"
            if stopped is None
            else f"it stopped at {when} ({stopped.reason.name.lower()})"
        )
        why = "has forgotten it" if is_forgotten else "does not know it: it has forgotten it, or has never heard of it"
        self.report.notes.append(f"instance {name}: {how}, and the catalog {why}; not compared")

    def _note_unlooked(self, name: InstanceId, why: str) -> None:
        self.report.notes.append(f"instance {name}: {why}, so single blocks were not compared")

    def _answers(self) -> list[InstanceSummary]:
        return [one for one in self._catalog.instances() if self._only is None or one.instance == self._only]

    def _at_least(self, name: InstanceId, end: Position) -> InstanceSummary | None:
        """What the catalog answers of an instance once it stands at a place and its start was read, or after
        the wait.
        """
        deadline_s = time.monotonic() + self._wait_s
        while True:
            answer = next((one for one in self._answers() if one.instance == name), None)
            is_there = answer is not None and (answer.epoch, answer.offset) >= end and answer.excluded != "restarted"
            if is_there or time.monotonic() >= deadline_s:
                return answer
            time.sleep(_POLL_S)

    def _compare(self, answer: InstanceSummary, fold: StreamFold) -> None:
        place = Position(Epoch(answer.epoch), Offset(answer.offset))
        name = InstanceId(answer.instance)
        if fold.suspect or answer.suspect or answer.partial:
            why = (
                "its events were not all seen"
                if fold.suspect
                else "the catalog says itself that it is suspect or partial"
            )
            self.report.notes.append(f"instance {name} at {place_text(*place)}: {why}; not compared")
            return
        self._compared.add(name)
        held = _held(fold.residencies)
        for tier in Tier:
            count, known = held.counts.get(tier.name, 0), answer.held_blocks.get(tier.name, 0)
            if count != known and not fold.residencies.is_cluster(tier):
                self._differ(
                    "count", name, place, f"the log holds {count:,} blocks in {tier.name}, the catalog {known:,}"
                )
        if f"{held.digest:016x}" != answer.digest:
            self._differ(
                "digest", name, place, f"the log's digest is {held.digest:016x}, the catalog's {answer.digest}"
            )

    def _compare_blocks(self, name: InstanceId, end: Position, residencies: Fold) -> None:
        found: list[Difference] = []
        asked = 0
        for tier, namespace, block in _sampled(residencies):
            holders = {holder.tier for holder in self._catalog.block(namespace, block).holders if holder.name == name}
            asked += 1
            if tier.name not in holders:
                where = f"the catalog has it in {', '.join(sorted(holders)) or 'no tier'} of it"
                found.append(
                    Difference(
                        what="holder",
                        instance=name,
                        epoch=end.epoch,
                        offset=end.offset,
                        block=block.hex(),
                        message=f"the log holds block {short(block)} in {tier.name}, {where}",
                    )
                )
        now = self._at_least(name, end)
        moved = now is None or (now.epoch, now.offset) != end
        if now is None or moved or now.excluded or now.state not in ("live", "unheard"):
            state = "moved on" if now is None or moved else f"holds it for {now.excluded or now.state}"
            self._note_unlooked(name, f"the catalog {state}")
            return
        if not asked:
            self._note_unlooked(name, "at the log's end it holds none of its own")
        self.report.blocks += asked
        self.report.differences += found

    def _note_ahead(self, name: InstanceId, place: Position, message: str) -> None:
        self.report.ahead.append(
            Difference(what="ahead", instance=name, epoch=place.epoch, offset=place.offset, message=message)
        )

    def _differ(self, what: str, name: InstanceId, place: Position, message: str) -> None:
        self.report.differences.append(
            Difference(what=what, instance=name, epoch=place.epoch, offset=place.offset, message=message)
        )


def _held(residencies: Fold) -> _Held:
    counts = {tier.name: residencies.count(tier) for tier in Tier if not residencies.is_cluster(tier)}
    return _Held(residencies.digest, counts)


def _sampled(residencies: Fold) -> Iterator[tuple[Tier, NamespaceId, bytes]]:
    """Some blocks of each tier, the same ones each time."""
    pick = random.Random(0)
    for tier in Tier:
        if residencies.is_cluster(tier) or not residencies.count(tier):
            continue
        blocks = residencies.blocks(tier)
        total = len(blocks.hashes) // HASH_BYTES
        for at in sorted(pick.sample(range(total), min(total, SAMPLED_BLOCKS))):
            yield tier, _owner(blocks.namespaces, at), blocks.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]


def _owner(namespaces: Sequence[tuple[NamespaceId, int]], at: int) -> NamespaceId:
    """The namespace of the block at a place."""
    for namespace, count in namespaces:
        if at < count:
            return namespace
        at -= count
    raise AssertionError("fewer blocks than counted")
