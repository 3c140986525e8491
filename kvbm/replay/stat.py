"""How much of what is in a source, instance by instance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvbm.core.ages import AGE_BOUNDS_S, FOLLOWED, BlockAges, NewAges
from kvbm.core.backend import Backend, NewFold
from kvbm.core.codec import RUN_EVENTS, ScannedFrame
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.fold import StreamFold
from kvbm.replay.format import counted, time_text
from kvbm.replay.order import Begins, LifeBegins, Missing, Next, Repeat, StreamKey, in_order, life_text
from kvbm.replay.source import FrameSource, Located, only

_EVERY_BLOCK = 1 << 40


class AgeStat(msgspec.Struct, kw_only=True):
    """How old blocks of one tier were when they were wanted again, and when they were evicted, as `core.ages` counts
    it.

    Attributes:
        within_s: the ages by which both are counted; what is older is counted last.
        wanted: how often blocks were wanted again, by age. evicted: blocks that were evicted, by age.
        reused, unused: of the evicted, how many had been wanted again, and how many never.
    """

    within_s: list[int]
    wanted: list[int]
    evicted: list[int]
    reused: int
    unused: int

    def line(self, tier: str) -> str:
        """For people. Of HBM no event says what is wanted again."""
        parts = (
            []
            if tier == Tier.HBM.name
            else [f"wanted again {counted(sum(self.wanted), 'time')}{self._ages(self.wanted)}"]
        )
        parts.append(f"evicted {counted(sum(self.evicted), 'block')}{self._ages(self.evicted)}")
        if tier != Tier.HBM.name and any(self.evicted):
            parts[-1] += f", {self.unused:,} of them never wanted again"
        return f"  {tier:<6} {'; '.join(parts)}"

    def _ages(self, counts: list[int]) -> str:
        """Up to which age half of them, and nine of ten, were."""
        found = [f"{share:.0%} within {self._within(counts, share)}" for share in (0.5, 0.9)] if any(counts) else []
        return f" ({', '.join(found)})" if found else ""

    def _within(self, counts: list[int], share: float) -> str:
        total = 0
        for bound_s, count in zip(self.within_s, counts, strict=False):
            total += count
            if total >= share * sum(counts):
                return f"{bound_s:,} s"
        return f"more than {self.within_s[-1]:,} s"


class InstanceStat(msgspec.Struct, kw_only=True):
    """One instance's stream in numbers.

    Attributes:
        group: what differs for two instances of one name; mostly "".
        frames, events, bytes: without repeats.
        blocks: by the name of the event that covers them.
        repeats: frames that were there once more.
        missing_events: in no good frame, though later ones are.
        held: blocks by tier after the last event.
        ages: by tier, of those in which something was wanted again or evicted.
        is_suspect: events were missed, and no snapshot has ended in some tier since.
    """

    instance: InstanceId
    group: str = ""
    epochs: int = 0
    frames: int = 0
    events: int = 0
    bytes: int = 0
    blocks: dict[str, int] = {}
    repeats: int = 0
    missing_events: int = 0
    first_wall_time_ns: int = 0
    last_wall_time_ns: int = 0
    held: dict[str, int] = {}
    ages: dict[str, AgeStat] = {}
    is_suspect: bool = False

    def block_total(self) -> int:
        """Blocks of all events together."""
        return sum(self.blocks.values())

    def lines(self) -> Iterator[str]:
        """For people."""
        whose = f"{self.instance} ({self.group})" if self.group else self.instance
        extra = f", {counted(self.repeats, 'repeat')}" if self.repeats else ""
        extra += f", {counted(self.missing_events, 'event')} missing" if self.missing_events else ""
        yield f"{whose}: {amounts(self.epochs, self.frames, self.events)}{extra}"
        for name, count in sorted(self.blocks.items()):
            yield f"  {name:<18} {counted(count, 'block'):>20}"
        yield f"  {size_text(self.bytes, self.block_total())}"
        if self.frames:
            span_s = (self.last_wall_time_ns - self.first_wall_time_ns) / 1e9
            yield f"  {time_text(self.first_wall_time_ns)} to {time_text(self.last_wall_time_ns)}, {span_s:,.3f} s"
        for tier, age in self.ages.items():
            yield age.line(tier)
        held = ", ".join(f"{tier} {count:,}" for tier, count in self.held.items()) or "nothing"
        yield f"  holds {held} at the end{' (suspect: events are missing)' if self.is_suspect else ''}"


class Stats(msgspec.Struct, kw_only=True):
    """All instances, and what damage was met on the way."""

    source: str
    instances: list[InstanceStat] = []
    findings: list[ReplayFinding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people; the totals come last."""
        for stat in self.instances:
            yield from stat.lines()
        all_of = self.instances
        total = amounts(sum(s.epochs for s in all_of), sum(s.frames for s in all_of), sum(s.events for s in all_of))
        size = size_text(sum(s.bytes for s in all_of), sum(s.block_total() for s in all_of))
        held = counted(sum(sum(s.held.values()) for s in all_of), "block")
        yield f"total: {counted(len(all_of), 'instance')}, {total}, {size}, {held} held"


def amounts(epochs: int, frames: int, events: int) -> str:
    """Three counts in words."""
    return f"{counted(epochs, 'epoch')}, {counted(frames, 'frame')}, {counted(events, 'event')}"


def size_text(size: int, blocks: int) -> str:
    """Bytes, and bytes for each block an event covers."""
    return counted(size, "byte") + (f" for {counted(blocks, 'block')}: {size / blocks:.1f} a block" if blocks else "")


class _Counter:
    """Counts one stream."""

    def __init__(self, key: StreamKey, new_fold: NewFold, backend: Backend, ages: BlockAges) -> None:
        self.ages = ages
        self.stat = InstanceStat(instance=key.instance, group=key.group)
        self.fold = StreamFold(new_fold, backend.decode_frame)
        self._epochs: set[int] = set()

    def take(self, frame: ScannedFrame, data: bytes) -> None:
        stat = self.stat
        if not stat.frames:
            stat.first_wall_time_ns = frame.wall_time_ns
        stat.last_wall_time_ns = frame.wall_time_ns
        self._epochs.add(frame.epoch)
        stat.epochs = len(self._epochs)
        stat.frames += 1
        stat.bytes += len(data)
        stat.events += frame.event_count
        for kind, blocks in zip(RUN_EVENTS, frame.blocks, strict=True):
            if blocks:
                stat.blocks[kind.__name__] = stat.blocks.get(kind.__name__, 0) + blocks
        for _ in self.fold.evolve(frame, data):
            pass  # stat judges nothing
        self.fold.agrees(frame.digest)
        self.ages.take(data)

    def miss(self, epoch: Epoch, offset: Offset) -> None:
        self.fold.miss(epoch, offset)
        self.ages.forget()

    def finish(self) -> InstanceStat:
        residencies = self.fold.residencies
        self.stat.held = {tier.name: count for tier in Tier if (count := residencies.count(tier))}
        self.stat.ages = {
            tier.name: AgeStat(
                within_s=[*AGE_BOUNDS_S],
                wanted=[*one.wanted],
                evicted=[*one.evicted],
                reused=one.reused,
                unused=one.unused,
            )
            for tier, one in zip(FOLLOWED, self.ages.tiers(), strict=True)
            if any(one.wanted) or any(one.evicted)
        }
        self.stat.is_suspect = bool(self.fold.suspect)
        return self.stat


def stats_of(
    source: FrameSource,
    backend: Backend,
    fold: NewFold,
    new_ages: NewAges,
    instance: str | None = None,
    located: Iterable[Located] | None = None,
) -> Stats:
    """Count a source. It judges nothing: `verify` does.

    Args:
        instance: only this one.
        located: what was read from the source, where somebody watches it pass.
        new_ages: makes what follows the ages of an instance's blocks.
    """
    stats = Stats(source=source.name)
    counters: dict[StreamKey, _Counter] = {}
    read = source.read(backend) if located is None else located
    items = in_order(only(read, instance), source.is_trimmed)
    for key, step in undamaged(items, stats.notes, stats.findings):
        counter = counters.get(key)
        if counter is None:
            counter = counters[key] = _Counter(key, fold, backend, new_ages(_EVERY_BLOCK))
        match step:
            case Next():
                counter.take(step.frame, step.located.data)
            case Missing():
                counter.stat.missing_events += step.next - step.first
                counter.miss(step.epoch, step.next)
            case Begins():
                counter.miss(step.epoch, step.offset)
            case Repeat():
                counter.stat.repeats += 1
            case LifeBegins():
                counter.fold = StreamFold(fold, backend.decode_frame)
                counter.ages.forget()
                stats.notes.append(life_text(key, step))
    stats.instances = [counters[key].finish() for key in sorted(counters, key=lambda key: (key.instance, key.group))]
    return stats
