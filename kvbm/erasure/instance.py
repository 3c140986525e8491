"""An instance's side of erasures: what it has to do for each, step by step, without thread, clock or socket.

For each erasure, in this order:

1. It notes which blocks it holds that are meant. Blocks that come later are new use, and are left alone.
2. It withdraws them from its tiers by ordinary events. Pinned ones too: their slots stay with their requests. What
   their tenant has used is recorded no more.
3. It fills every slot with zeros that is free, in HBM, HOST and NVME, and waits until each other slot was free once or
   holds another block.
4. It has what is held listed again, and once the stream has that, it deletes what the journal had before, history
   included.

Nothing has to be done twice: numbers of erasures that are done are kept beside the journal. A process that dies in
between begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier
from kvbm.erasure.manager import HeldRun, Wiped
from kvbm.erasure.record import Erasure, Matcher, Record
from kvbm.erasure.report import ErasedPlace, Progress
from kvbm.files import read_small, write_new
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position

log = SafeLog()

DONE_FILE = "ERASED"
_DoneAt = Annotated[int, msgspec.Meta(gt=0)]


class Erasable(Protocol):
    """What an instance offers: `erasure.manager.ErasableManager`, which says what each of these does."""

    @property
    def is_over(self) -> bool: ...
    @property
    def tiers(self) -> list[Tier]: ...
    @property
    def engine_tier(self) -> Tier | None: ...
    def slots(self, tier: Tier) -> int: ...
    def end_salvage(self) -> None: ...
    def hold_back(self, held_back: bool) -> None: ...
    def tenants(self) -> dict[NamespaceId, str]: ...
    def held(self, tier: Tier) -> list[HeldRun]: ...
    def evict(self, tier: Tier, hashes: bytes) -> int: ...
    def drop_samples(self) -> None: ...
    def unclaim(self, hashes: bytes) -> None: ...
    def unname(self, namespaces: Iterable[NamespaceId]) -> None: ...
    def erase_usage(self, number: int, is_meant: Callable[[str], bool]) -> None: ...
    def wipe(self, tier: Tier, dirty: set[int]) -> Wiped: ...
    def mark(self) -> Position: ...
    def ask_snapshot(self) -> None: ...
    def is_durable(self, place: Position) -> bool: ...
    def forget_before(self, place: Position) -> bool: ...


class DoneErasures:
    """Which erasures this instance is done with, in a file beside its journal; in memory where it has none.

    Args:
        path: the file; None: there is no journal, so what is done is done again by the next process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.at_ns: dict[int, int] = {}
        try:
            self.at_ns = {} if path is None else msgspec.json.decode(read_small(path), type=dict[int, _DoneAt])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("erasure.done_unreadable", path=str(path), why=str(error), effect="erasures are done once more")

    def add(self, number: int, at_ns: int) -> None:
        """One more is done. Trouble is a warning: the next process does it again."""
        self.at_ns[number] = at_ns
        if self._path is None:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            write_new(part, msgspec.json.encode(self.at_ns))
            part.replace(self._path)
        except OSError as error:
            log.warning("erasure.done_unwritten", path=str(self._path), why=str(error), effect="it is done once more")


@dataclass
class _Job:
    """One erasure under way.

    Attributes:
        chosen: packed hashes that were held when it began; None: not looked yet.
        dirty: slots that may hold bytes of them, by tier.
        before: once all is zeros, the place that the journal must begin at.
    """

    erasure: Erasure
    matcher: Matcher
    chosen: bytes | None = None
    dirty: dict[Tier, set[int]] = field(default_factory=dict)
    before: Position | None = None
    withdrawn: dict[Tier, int] = field(default_factory=dict)
    zeroed: dict[Tier, int] = field(default_factory=dict)
    engine_holds: int = 0
    trouble: dict[str, str] = field(default_factory=dict)
    journal: str = "not yet"


class InstanceErasures:
    """See the module.

    Args:
        started_with: the record that the start has left blocks out by; None: it was not known then.
        now_ns: the wall clock.
    """

    def __init__(
        self, instance: Erasable, done: DoneErasures, started_with: Record | None, now_ns: Callable[[], int]
    ) -> None:
        self._instance, self._done, self._now_ns = instance, done, now_ns
        self._at_start = (
            frozenset(one.number for one in started_with.erasures) if started_with is not None else frozenset()
        )
        self._jobs: dict[int, _Job] = {}
        self._in_force: dict[int, Erasure] = {}

    @property
    def is_busy(self) -> bool:
        """Whether an erasure is under way."""
        return bool(self._jobs)

    def take(self, record: Record) -> None:
        """What is in force. Blocks that are meant by something new are withdrawn before this returns."""
        self._in_force = {one.number: one for one in record.erasures}
        for gone in [number for number in self._jobs if number not in self._in_force]:
            del self._jobs[gone]
        for erasure in record.erasures:
            if erasure.number in self._done.at_ns or erasure.number in self._jobs:
                continue
            job = self._jobs[erasure.number] = _Job(erasure, Matcher(erasure))
            self._instance.end_salvage()  # first: what it has brought back is chosen with the rest
            self._choose(job)
            self._withdraw(job)
            self._instance.drop_samples()
            self._instance.unclaim(job.chosen or b"")
            log.info("erasure.begun", number=erasure.number, blocks=sum(job.withdrawn.values()))

    def step(self) -> None:
        """Go on with what is under way, as far as it goes without waiting for others."""
        for number, job in list(self._jobs.items()):
            if self._instance.is_over:
                return
            self._withdraw(job)
            if job.erasure.tenant:  # until it is done: what was withdrawn counts as held until its frame is cut
                self._instance.erase_usage(number, job.matcher.tenant)
            self._wipe(job)
            if self._is_clean(job) and self._is_out_of_journal(job):
                self._done.add(number, self._now_ns())
                del self._jobs[number]
                log.info("erasure.done", number=number)

    def progress(self) -> dict[int, Progress]:
        """How far each erasure in force has come."""
        return {number: self._progress(number) for number in self._in_force}

    # -- one erasure --------------------------------------------------------------------------------------------------

    def _choose(self, job: _Job) -> None:
        matcher, chosen = job.matcher, list[bytes]()
        tenants = self._instance.tenants()
        meant = [namespace for namespace, tenant in tenants.items() if matcher.namespace(namespace, tenant)]
        if job.erasure.number not in self._at_start:  # else what was there was left out by the start: the rest is new
            for tier in [*self._instance.tiers, *filter(None, [self._instance.engine_tier])]:
                for run in self._instance.held(tier):
                    if run.namespace is None or matcher.namespace(run.namespace, run.tenant):
                        chosen.append(matcher.of(run.hashes))
        if matcher.is_whole:
            self._instance.unname(meant)
        job.chosen = b"".join(dict.fromkeys(_split(b"".join(chosen))))
        job.dirty = {tier: set(range(self._instance.slots(tier))) for tier in self._instance.tiers}

    def _unsaid(self, erasure: Erasure) -> tuple[bytes, ...]:
        """Digests of namespaces of the tenant that the record does not name: catalogs may know no fields of what was
        erased before.
        """
        if not erasure.tenant:
            return ()
        matcher, tenants = Matcher(erasure), self._instance.tenants()
        digests = {erasure.namespace_digest(one) for one, tenant in tenants.items() if matcher.namespace(one, tenant)}
        return tuple(sorted(digests.difference(erasure.namespaces)))

    def _withdraw(self, job: _Job) -> None:
        """Also what a copy has brought to another tier since."""
        if job.chosen:
            for tier in self._instance.tiers:
                count = self._instance.evict(tier, job.chosen)
                if count:
                    job.before = None
                    job.withdrawn[tier] = job.withdrawn.get(tier, 0) + count
        engine_tier = self._instance.engine_tier
        if job.chosen and engine_tier is not None:
            chosen = set(_split(job.chosen))
            held = b"".join(run.hashes for run in self._instance.held(engine_tier))
            job.engine_holds = sum(block in chosen for block in _split(held))

    def _wipe(self, job: _Job) -> None:
        for tier, dirty in job.dirty.items():
            if not dirty:
                continue
            job.trouble.pop(tier.name, None)
            try:
                wiped = self._instance.wipe(tier, dirty)
            except KvbmError as error:
                job.trouble[tier.name] = str(error)
                continue
            dirty.difference_update(wiped.clean)
            job.zeroed[tier] = job.zeroed.get(tier, 0) + wiped.zeroed

    def _is_clean(self, job: _Job) -> bool:
        return not any(job.dirty.values()) and not job.engine_holds

    def _is_out_of_journal(self, job: _Job) -> bool:
        instance = self._instance
        if job.before is None:
            job.before, job.journal = instance.mark(), "its own writer"
        if not instance.is_durable(job.before):
            return False
        try:
            if instance.forget_before(job.before):
                return True
        except OSError as error:
            job.journal = f"its folder: {error.strerror or error}"
            return False
        job.journal = "a snapshot, and the stream to have it"
        instance.ask_snapshot()
        return False

    def _progress(self, number: int) -> Progress:
        job = self._jobs.get(number)
        if job is None:
            done = ErasedPlace(name="all", erased="every tier, and the journal")
            done_ns = self._done.at_ns.get(number, 0)
            return Progress(places=(done,), done_ns=done_ns, namespaces=self._unsaid(self._in_force[number]))
        places = [self._tier_place(job, tier) for tier in job.dirty]
        if self._instance.engine_tier is not None:
            waits = f"the engine: {job.engine_holds} blocks in its prefix cache; reset it, or restart the engine"
            places.append(ErasedPlace(name="engine's HBM", waits=waits if job.engine_holds else ""))
        is_last = self._is_clean(job)
        places.append(ErasedPlace(name="journal", waits=job.journal if is_last else "the tiers"))
        return Progress(places=tuple(places), namespaces=self._unsaid(job.erasure))

    def _tier_place(self, job: _Job, tier: Tier) -> ErasedPlace:
        left, trouble = len(job.dirty[tier]), job.trouble.get(tier.name, "")
        waits = f"{left} slots that requests or copies use" if left else ""
        erased = f"{job.withdrawn.get(tier, 0)} blocks withdrawn, {job.zeroed.get(tier, 0)} slots zeroed"
        return ErasedPlace(name=tier.name, erased=erased, waits=trouble or waits)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
