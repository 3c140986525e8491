"""What each instance held at a time or an offset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvbm.core.backend import Backend, Fold, NewFold
from kvbm.core.codec import UNKNOWN_DIGEST, ScannedFrame
from kvbm.core.ids import InstanceId, Tier, split_hashes
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.fold import StreamFold
from kvbm.replay.format import At, counted, time_text
from kvbm.replay.order import Begins, LifeBegins, Missing, Next, StreamKey, in_order, life_text
from kvbm.replay.source import FrameSource, Located, only


class BlockState(msgspec.Struct, frozen=True, kw_only=True):
    """One residency; `slot` is None where kvbm does not own the tier's slots."""

    hash: str
    namespace: str
    slot: int | None


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier held.

    Attributes:
        digest: of this tier alone; the instance's is the sum of them modulo 2**64. 16 hex digits.
        suspect: events were missed or illegal, and no snapshot has ended since.
        blocks: in the order of their hashes; None unless asked for.
    """

    tier: str
    held: int
    digest: str
    suspect: bool
    blocks: list[BlockState] | None = None


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance held before `offset` of `epoch`.

    Attributes:
        group: what differs for two instances of one name; mostly "".
        wall_time_ns: of the last frame that was folded, whole or in part; 0 for none.
        frame_digest: that frame's, if it has one, was folded whole and nothing is suspect; None otherwise.
    """

    instance: InstanceId
    group: str
    epoch: int
    offset: int
    wall_time_ns: int
    digest: str
    frame_digest: str | None
    tiers: list[TierState]

    def lines(self, lists_blocks: bool = True) -> Iterator[str]:
        """For people."""
        when = f", last frame {time_text(self.wall_time_ns)}" if self.wall_time_ns else ""
        whose = f"{self.instance} ({self.group})" if self.group else self.instance
        yield f"{whose}: epoch {self.epoch}, before offset {self.offset:,}{when}, digest {self.digest}"
        for tier in self.tiers:
            suspicion = ", suspect" if tier.suspect else ""
            yield f"  {tier.tier:<6} {counted(tier.held, 'block'):>16} held, digest {tier.digest}{suspicion}"
            for block in (tier.blocks or ()) if lists_blocks else ():
                slot = "" if block.slot is None else f" slot {block.slot}"
                yield f"         {block.hash} in {block.namespace[:8]}{slot}"
        if self.frame_digest not in (None, self.digest):
            yield (
                f"  the frame says digest {self.frame_digest}: this state is not to be trusted; run kvbm-replay verify"
            )


class States(msgspec.Struct, kw_only=True):
    """What all instances held, and what damage was met on the way.

    Attributes:
        instances: of which the log has something up to the place. later: the others, whose first event comes behind.
    """

    source: str
    instances: list[InstanceState] = []
    later: list[InstanceId] = []
    findings: list[ReplayFinding] = []
    notes: list[str] = []


class _Cut:
    """Folds one stream up to a place and no further."""

    def __init__(self, at: At, new_fold: NewFold, backend: Backend) -> None:
        self.fold = StreamFold(new_fold, backend.decode_frame)
        self.last: ScannedFrame | None = None
        self.is_whole_frame = False
        self.begins_ns = 0  # when the first frame was cut
        self._at = at
        self._is_over = False

    def take(self, frame: ScannedFrame, data: bytes) -> None:
        """Fold what of this frame lies before the place."""
        at = self._at
        self.begins_ns = self.begins_ns or frame.wall_time_ns
        if at.time_us is not None and frame.wall_time_ns // 1000 > at.time_us:
            self._is_over = True
        if self._is_over or (at.epoch is not None and frame.epoch > at.epoch):
            return
        bound = at.offset if at.offset is not None and at.epoch in (None, frame.epoch) else frame.next_offset
        stop = max(0, bound - frame.first_offset)
        if stop:
            self.last = frame
            self.is_whole_frame = stop >= frame.event_count
            for _ in self.fold.evolve(frame, data, None if self.is_whole_frame else stop):
                pass  # verify judges, state shows

    def next_life(self, fresh: _Cut) -> _Cut:
        """What counts from the beginning of another life on; a time that has passed lies in this one."""
        return self if self._is_over else fresh

    def miss(self, step: Missing | Begins) -> None:
        """Events were missed, unless they lie beyond the place."""
        at, after = self._at, step.after if isinstance(step, Missing) else step.located
        frame = after.found
        is_late = at.time_us is not None and isinstance(frame, ScannedFrame) and frame.wall_time_ns // 1000 > at.time_us
        if self._is_over or is_late or (at.epoch is not None and step.epoch > at.epoch):
            return
        first, following = (step.first, step.next) if isinstance(step, Missing) else (step.offset, step.offset)
        if (
            at.offset is not None
            and at.epoch in (None, step.epoch)
            and step.epoch == self.fold.epoch
            and at.offset <= first
        ):
            return
        if at.offset is not None and at.epoch in (None, step.epoch):
            following = min(following, at.offset)
        self.fold.miss(step.epoch, following)


def states_at(
    source: FrameSource,
    at: At,
    backend: Backend,
    fold: NewFold,
    instance: str | None = None,
    with_blocks: bool = False,
    located: Iterable[Located] | None = None,
) -> States:
    """What each instance held at a place in its stream; where its stream ends before that, at its end.

    A time of day is the last one the log reaches, which a note names: the source is read once before, to see where it
    ends. An offset without an epoch is one of the last epoch, which begins anew, so each epoch is folded up to it and
    the last one stays.

    Args:
        instance: only this one.
        located: what was read from the source, where somebody watches it pass.
    """
    states = States(source=source.name)
    if at.clock_us is not None:
        at = at.on_last_day(last_us(source, backend))
        states.notes.append(
            f"the time of day is that of {time_text((at.time_us or 0) * 1000)}, the last one the log reaches"
        )
    cuts: dict[StreamKey, _Cut] = {}
    read = source.read(backend) if located is None else located
    items = in_order(only(read, instance), source.is_trimmed)
    for key, step in undamaged(items, states.notes, states.findings):
        cut = cuts.get(key)
        if cut is None:
            cut = cuts[key] = _Cut(at, fold, backend)
        if isinstance(step, Next):
            cut.take(step.frame, step.located.data)
        elif isinstance(step, Missing | Begins):
            cut.miss(step)
        elif isinstance(step, LifeBegins):
            cuts[key] = cut.next_life(_Cut(at, fold, backend))
            states.notes.append(life_text(key, step))
    for key, cut in sorted(cuts.items(), key=lambda entry: (entry[0].instance, entry[0].group)):
        if cut.fold.epoch:
            states.instances.append(_state(key, cut, with_blocks))
            states.notes += _notes(key, cut, at)
        else:
            states.later.append(key.instance)
            begins = f"its first event in the log is of {time_text(cut.begins_ns)}"
            states.notes.append(f"instance {key.instance}: not there yet, {begins}")
    return states


def last_us(source: FrameSource, backend: Backend) -> int:
    """When the last of its frames was cut, of whichever instance; 0 where there is none."""
    read = (one.found for one in source.read(backend))
    return max((found.wall_time_ns for found in read if isinstance(found, ScannedFrame)), default=0) // 1000


def _notes(key: StreamKey, cut: _Cut, at: At) -> Iterator[str]:
    fold = cut.fold
    wanted_epoch = fold.epoch if at.epoch is None else at.epoch
    if at.offset is not None and (fold.epoch, fold.next_offset) < (wanted_epoch, at.offset):
        yield (
            f"instance {key.instance}: its stream ends at offset {fold.next_offset:,} of epoch {fold.epoch}, before "
            "the one "
            "asked for; this is its state there"
        )


def _state(key: StreamKey, cut: _Cut, with_blocks: bool) -> InstanceState:
    fold, last = cut.fold, cut.last
    residencies = fold.residencies
    tiers = [
        _tier_state(residencies, tier, tier in fold.suspect, with_blocks)
        for tier in Tier
        if residencies.count(tier)
        or tier in fold.suspect
        or (tier in residencies.pools and not residencies.is_cluster(tier))
    ]
    digest = last.digest if last is not None and cut.is_whole_frame and not fold.suspect else UNKNOWN_DIGEST
    return InstanceState(
        instance=key.instance,
        group=key.group,
        epoch=fold.epoch,
        offset=fold.next_offset,
        wall_time_ns=last.wall_time_ns if last else 0,
        digest=f"{residencies.digest:016x}",
        frame_digest=None if digest == UNKNOWN_DIGEST else f"{digest:016x}",
        tiers=tiers,
    )


def _tier_state(residencies: Fold, tier: Tier, is_suspect: bool, with_blocks: bool) -> TierState:
    return TierState(
        tier=tier.name,
        held=residencies.count(tier),
        digest=f"{residencies.tier_digest(tier):016x}",
        suspect=is_suspect,
        blocks=_block_states(residencies, tier) if with_blocks else None,
    )


def _block_states(residencies: Fold, tier: Tier) -> list[BlockState]:
    blocks = residencies.blocks(tier)
    owners = (namespace.hex() for namespace, count in blocks.namespaces for _ in range(count))
    slots = memoryview(blocks.slots).cast("q")
    found = [
        BlockState(hash=block.hex(), namespace=owner, slot=None if slot < 0 else slot)
        for block, owner, slot in zip(split_hashes(blocks.hashes), owners, slots, strict=True)
    ]
    return sorted(found, key=lambda block: block.hash)
