"""How much of what is in a source, instance by instance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvbm.core.backend import REFERENCE, Backend, NewFold
from kvbm.core.codec import RUN_EVENTS, ScannedFrame
from kvbm.core.fold import Residencies
from kvbm.core.ids import InstanceId, Tier
from kvbm.replay.findings import Finding, undamaged
from kvbm.replay.fold import StreamFold
from kvbm.replay.format import counted, time_text
from kvbm.replay.order import Begins, LifeBegins, Missing, Next, Repeat, StreamKey, in_order, life_text
from kvbm.replay.source import Located, Source, only


class InstanceStat(msgspec.Struct, kw_only=True):
    """One instance's stream in numbers.

    Attributes:
        group: what differs for two instances of one name; mostly "".
        frames, events, bytes: without repeats.
        blocks: by the name of the event that covers them.
        repeats: frames that were there once more.
        missing_events: in no good frame, though later ones are.
        held: blocks by tier after the last event.
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
        held = ", ".join(f"{tier} {count:,}" for tier, count in self.held.items()) or "nothing"
        yield f"  holds {held} at the end{' (suspect: events are missing)' if self.is_suspect else ''}"


class Stats(msgspec.Struct, kw_only=True):
    """All instances, and what damage was met on the way."""

    source: str
    instances: list[InstanceStat] = []
    findings: list[Finding] = []
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

    def __init__(self, key: StreamKey, new_fold: NewFold, backend: Backend) -> None:
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

    def finish(self) -> InstanceStat:
        residencies = self.fold.residencies
        self.stat.held = {tier.name: count for tier in Tier if (count := residencies.count(tier))}
        self.stat.is_suspect = bool(self.fold.suspect)
        return self.stat


def stats_of(
    source: Source,
    backend: Backend = REFERENCE,
    fold: NewFold = Residencies,
    instance: str | None = None,
    located: Iterable[Located] | None = None,
) -> Stats:
    """Count a source. It judges nothing: `verify` does.

    Args:
        instance: only this one.
        located: what was read from the source, where somebody watches it pass.
    """
    stats = Stats(source=source.name)
    counters: dict[StreamKey, _Counter] = {}
    read = source.read(backend) if located is None else located
    items = in_order(only(read, instance), source.is_trimmed)
    for key, step in undamaged(items, stats.notes, stats.findings):
        counter = counters.get(key)
        if counter is None:
            counter = counters[key] = _Counter(key, fold, backend)
        match step:
            case Next():
                counter.take(step.frame, step.located.data)
            case Missing():
                counter.stat.missing_events += step.next - step.first
                counter.fold.miss(step.epoch, step.next)
            case Begins():
                counter.fold.miss(step.epoch, step.offset)
            case Repeat():
                counter.stat.repeats += 1
            case LifeBegins():
                counter.fold = StreamFold(fold, backend.decode_frame)
                stats.notes.append(life_text(key, step))
    stats.instances = [counters[key].finish() for key in sorted(counters, key=lambda key: (key.instance, key.group))]
    return stats
