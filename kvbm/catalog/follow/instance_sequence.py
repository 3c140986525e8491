"""One instance's stream: which of its frames applies next. A state machine: no thread, clock or socket.

Where a frame lies, seen from the reader's place (epoch, next offset), is the rule of `streams/frame_order.py`. The
catalog makes of it:

    STALE, REPEAT        ignored; a repeat of an epoch's start that was joined mid-stream begins it anew
    NEXT, OVERLAP        applied, as far as its events are new
    BEYOND               kept in the reorder buffer; a publisher that goes back sends what is missing
    START                applied: the epoch before is over
    MIDSTREAM            applied: a mid-stream join
    of a newer version   unreadable: neither it nor what follows it in its epoch is applied; the next epoch is

Numbers of epochs are only as good as somebody's memory: a journal, a stream or both may be lost, and two processes may
each begin an epoch of one number. So an epoch is identified by its number and the run of the process that began it.
Which life is the newer one is known from the fences, which lie in the stream among the events: a fence names the run
whose events follow, and the runs that began the epochs they are of. Where these contradict what was read
(`is_other_life`), what was read is of another life: nothing of it is held any more, and whatever epoch comes next is
entered.

A hole in front of the reorder buffer is a *gap* once the instance's heartbeat has reported what is missing as
published, and the reader has been at the stream's end since. Then reading goes on behind the hole, and the instance is
suspect until a snapshot has ended. The same happens when a frame's digest differs from the index's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvbm.catalog.follow.named_namespaces import NamedNamespaces
from kvbm.catalog.follow.published_reports import PublishedReports
from kvbm.catalog.follow.reorder_buffer import BufferedState, ReorderBuffer
from kvbm.catalog.follow.suspicions import Suspicion, Suspicions
from kvbm.catalog.index.cluster_index import Applied, Claims, ClusterIndex
from kvbm.catalog.sql.rows import (
    ClaimRun,
    EpochRow,
    InstancePosition,
    InstanceRow,
    InstanceRows,
    InstanceStatus,
    NamespaceRow,
)
from kvbm.core.chain_statement import ATTRIBUTE
from kvbm.core.codec import UNKNOWN_DIGEST, VERSION, ScannedFrame
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset
from kvbm.core.usage import UsageEntry, entries_of, start_of
from kvbm.safe_log import RateLimitedLog
from kvbm.streams.base import (
    ORIGIN,
    START,
    Fence,
    Heartbeat,
    Mark,
    Position,
    StreamMessage,
    is_other_life,
    mark_of,
    run_of,
)
from kvbm.streams.fence_owner import owner_after
from kvbm.streams.frame_order import Order, order_of

MOST_LINES = 20  # of one event in ten seconds: whoever may write to the stream can give cause for any number
# A hole that no heartbeat explains, for its instance has died, is given up after this long at the stream's end
HOLE_MOST_S = 30.0
MOST_NUMBER = (1 << 63) - 1  # of an epoch, an offset and a time in nanoseconds: what SQL keeps
AFTER_MESSAGES = 1 << 63  # the sequence of what is found at the end of a step: it comes after each of its messages


class Gap(NamedTuple):
    """Events of an instance that will not come any more.

    Attributes:
        expected: the first of them.
        resumed: where reading goes on; None when nothing behind the hole is known yet.
    """

    instance: InstanceId
    expected: Position
    resumed: Position | None


class PlaceOwnership(NamedTuple):
    """Whose an instance's place on the stream is.

    Attributes:
        run: of the process whose events follow the fence read last; "" when none was read.
        life: grows when what was read before turned out to be of another life.
    """

    run: str
    life: int


class Unreadable(msgspec.Struct, frozen=True):
    """A newer kvbm writes an instance's epoch: the version of a frame of it that was seen."""

    epoch: Epoch
    version: int

    def reason(self) -> str:
        """Why nothing is known of the instance, and what to do."""
        return (
            f"epoch {self.epoch} has frames of version {self.version}; this catalog reads up to {VERSION}: upgrade "
            "the catalog"
        )


class SequenceCounters(msgspec.Struct, kw_only=True):
    """What was seen since the start. `blocks` counts a block once for each event that names it.

    Attributes:
        digest_divergence: instances whose residencies an audit found to be others than what was applied.
        gaps_repaired, digest_repaired: after which the instance was whole again, or was forgotten.
        foreign: frames that name another instance than their subject; they are refused with the rest of their message.
        newer: frames of a newer version than this kvbm reads, and those that follow one in its epoch; they are not
            applied.
        strays: messages that name a fence of a history that is gone; see `kvbm.streams.fence_owner`.
        lives: fences that showed that what was read of an instance is of another life.
        forgotten: instances that were gone for long, or that an operator had forgotten.
        namespaces_refused: namespaces that starts or heartbeats have told of and that are not kept: there are too many.
    """

    messages: int = 0
    frames: int = 0
    events: int = 0
    blocks: int = 0
    repeats: int = 0
    stale: int = 0
    holes: int = 0
    gaps: int = 0
    blind_starts: int = 0
    poison: int = 0
    foreign: int = 0
    newer: int = 0
    digest_mismatches: int = 0
    digest_divergence: int = 0
    gaps_repaired: int = 0
    digest_repaired: int = 0
    lives: int = 0
    strays: int = 0
    forgotten: int = 0
    namespaces_refused: int = 0


class StreamCursor:
    """How far the stream was read.

    Attributes:
        sequence: of the message that is being read, or was read last.
        last: the message read last. The mark is made of it when somebody asks.
    """

    def __init__(self, mark: Mark = START) -> None:
        self.sequence = mark.sequence
        self.last: StreamMessage | Mark = mark

    @property
    def mark(self) -> Mark:
        """The place behind the message read last."""
        if isinstance(self.last, StreamMessage):
            self.last = mark_of(self.last)
        return self.last


class Changes:
    """What a step of the sequencer changed. It is filled while the step goes on.

    Attributes:
        advanced: instances whose position moved, and where to.
        gaps: found in this step.
        renumbered: sequences began anew: the stream's store was replaced.
        changed: instances whose rows changed, and the sequence of the last message that changed them.
        chains: what starts state of how tokens are hashed.
        epochs, namespaces, claims, usages: rows that are given out once, each with the sequence of the message they
            come from.
        lacks_claims: events were passed over, and no snapshot lists claims again.
        newest_wall_ns: wall time of the newest frame; 0 when none was applied.
        at: sequence of the message being read; AFTER_MESSAGES behind the last.
        settled: up to this sequence the index may be ahead of what was read, and digests prove nothing.
    """

    def __init__(self, cursor: StreamCursor, settled: int, renumbered: bool = False) -> None:
        self.advanced: dict[InstanceId, Position] = {}
        self.gaps: list[Gap] = []
        self.renumbered = renumbered
        self.changed: dict[InstanceId, int] = {}
        self.epochs: list[tuple[int, EpochRow]] = []
        self.namespaces: list[tuple[int, NamespaceRow]] = []
        self.claims: list[tuple[int, ClaimRun]] = []
        self.usages: list[tuple[int, UsageEntry]] = []
        self.chains: dict[InstanceId, bytes] = {}
        self.lacks_claims = False
        self.newest_wall_ns = 0
        self.at = AFTER_MESSAGES
        self.cursor, self.settled = cursor, settled


class SequenceState(msgspec.Struct, frozen=True, kw_only=True):
    """An `InstanceSequence` as a checkpoint keeps it.

    Attributes:
        declared: the namespaces that its newest start named. declared_none: it named none.
        buffered: the frames in its reorder buffer.
    """

    row: InstanceRow
    epoch: Epoch
    offset: Offset
    epoch_row: EpochRow
    declared: tuple[NamespaceId, ...]
    joined_midstream: bool = msgspec.field(name="is_blind")
    is_lost: bool
    trouble: Suspicion | None
    run: str = ""
    holder: Fence | None = None
    life: int = 0
    unreadable: Unreadable | None = None
    spoke: int = 0
    buffered: tuple[BufferedState, ...] = ()
    declared_none: bool = False


class Common(NamedTuple):
    """What all instances have together.

    Attributes:
        held: what frames are applied to.
        unsettled: those that may have a hole, as something is in their buffer, or reported and not read; each adds
            itself.
        limited_log: on what messages say.
    """

    held: ClusterIndex
    counters: SequenceCounters
    suspicions: Suspicions
    unsettled: dict[InstanceId, InstanceSequence]
    limited_log: RateLimitedLog


class InstanceSequence:
    """One instance, as far as it was read.

    Args:
        known: the instance as SQL has it; where a start is no longer on the stream, this replaces it.

    Attributes:
        position: the next event to apply.
        run: of the process that began the position's epoch; "" when it is not known.
        fence: the fence read last; it names the run whose events come now.
        names: what it has said of namespaces.
        unreadable: set while a newer kvbm writes its epoch; nothing of it is applied then.
        spoke: sequence of its last message; 0 when none is known. subjects: on which its events came.
        joined_midstream: the start of its epoch was not read.
    """

    __slots__ = (
        *("_counters", "_epoch_row", "_hole_since_s", "_id", "_index", "_is_lost", "_known", "_life", "_limited_log"),
        *("_reports", "_suspicions", "_unsettled", "buffer", "fence", "joined_midstream", "names", "position", "row"),
        *("run", "spoke", "subjects", "unreadable"),
    )

    def __init__(self, row: InstanceRow, common: Common, known: InstanceRow | None) -> None:
        self.row = row
        self.position = ORIGIN
        self.run = ""
        self.fence: Fence | None = None
        self.names = NamedNamespaces()
        self.unreadable: Unreadable | None = None
        self.spoke = 0
        self.subjects: set[str] = set()
        self.buffer = ReorderBuffer()
        self._id, self._known = row.id, known
        self._index, self._counters, self._suspicions, self._unsettled, self._limited_log = common
        self._life = 0  # grows when a fence shows that what was read is of another one
        self._epoch_row = EpochRow(instance=row.id, epoch=Epoch(0), started_ns=0)
        self.joined_midstream = False
        self._is_lost = False  # the hole at `position` is a gap already: whatever comes next counts
        self._hole_since_s: float | None = None  # since when the reader is at the stream's end and the buffer not empty
        self._reports = PublishedReports()

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def ownership(self) -> PlaceOwnership:
        """Whose the instance's place on the stream is."""
        return PlaceOwnership(self.fence.run if self.fence is not None else self.run, self._life)

    def rows(self) -> InstanceRows:
        """Its rows as they are now."""
        epoch, offset = self.position
        place = InstancePosition(instance=self._id, epoch=epoch, next_offset=offset, run=self.run)
        return InstanceRows(self.row, self._epoch_row, place, self.spoke)

    def state(self) -> SequenceState:
        """What a checkpoint keeps."""
        trouble = self._suspicions.by_instance.get(self._id)
        return SequenceState(
            row=self.row,
            epoch=self.position.epoch,
            offset=self.position.offset,
            epoch_row=self._epoch_row,
            declared=tuple(self.names.started),
            declared_none=self.names.named_none,
            is_lost=self._is_lost,
            joined_midstream=self.joined_midstream,
            trouble=None if trouble is None else msgspec.structs.replace(trouble),
            run=self.run,
            holder=self.fence,
            life=self._life,
            unreadable=self.unreadable,
            spoke=self.spoke,
            buffered=self.buffer.state(),
        )

    def restore(self, state: SequenceState, buffered: Iterable[tuple[ScannedFrame, bytes, Mark]] = ()) -> None:
        """Go on from a checkpoint, with the frames that were in the reorder buffer."""
        self.position, self._epoch_row = Position(state.epoch, state.offset), state.epoch_row
        self.names = NamedNamespaces(state.declared, state.declared_none)
        self.run, self.fence, self._life = state.run, state.holder, state.life
        self.spoke, self._is_lost, self.joined_midstream = state.spoke, state.is_lost, state.joined_midstream
        if state.unreadable is not None and state.unreadable.version > VERSION:
            self.unreadable = state.unreadable
            return
        for frame, data, before in buffered:
            self._put_in_buffer(frame, data, before)
        self._is_lost |= state.unreadable is not None  # this kvbm can read what comes next; a snapshot lists the rest
        if state.trouble is not None:
            self._suspicions.restore(self._id, state.trouble)
        elif (view := self._index.view(self._id)) is not None and view.missed and not view.stopped:
            self._suspicions.note(self._id).unended += 1  # the index has learned of it since the state was taken

    def restore_position(self, stored: InstancePosition, changes: Changes) -> None:
        """Go on from the position in SQL: nothing is known to be held, and a live instance is joined mid-stream."""
        self.position, self.run = Position(stored.epoch, stored.next_offset), stored.run
        self.spoke = changes.cursor.sequence
        self._epoch_row = EpochRow(
            instance=self._id,
            epoch=stored.epoch,
            started_ns=self.row.last_frame_ns,
            next_offset=stored.next_offset,
            run=stored.run,
        )
        if self.row.state is InstanceStatus.LIVE:
            self._join(stored.epoch, self.row.last_frame_ns, changes)

    # -- heartbeats and fences ----------------------------------------------------------------------------------------

    def on_heartbeat(self, now_s: float, heartbeat: Heartbeat) -> None:
        """Take note of what the instance reports as published."""
        if self.unreadable is None or heartbeat.epoch > self.unreadable.epoch:
            self._reports.on_heartbeat(now_s, heartbeat, self.position, self.fence)
            if not self._reports.is_empty:
                self._unsettled[self._id] = self

    def name_fence(self, named: Fence, changes: Changes) -> None:
        """Take the fence that a message of events names."""
        fence = owner_after(named, self.fence)
        if fence is not None and fence is not self.fence:
            if self.fence is None or fence.run != self.fence.run:
                self.take_fence(fence, changes)
            self.fence = fence

    def take_fence(self, fence: Fence, changes: Changes) -> None:
        """Take a fence: the events that follow are its run's."""
        if is_other_life(self.position.epoch, self.run, fence):
            self._begin_life(fence, changes)
        self.fence = fence
        self._reports.take_fence(fence)
        if self.position.epoch and not self.run:
            self._learn_run(run_of(fence, self.position.epoch), changes)
        changes.advanced[self._id] = self.position

    def _begin_life(self, fence: Fence, changes: Changes) -> None:
        """Nothing that was read of the instance is so any more; its next frame is entered, whatever its epoch."""
        self._limited_log.warn(
            "instance.life_begun",
            instance=self._id,
            epoch=fence.epoch,
            run=fence.run,
            other_epoch=self.position.epoch,
            other_run=self.run,
            why="its journal, the stream's end or both were lost; what was read before is of another life",
        )
        self.pass_holes(changes)
        self._end_epoch(self.row.last_frame_ns, changes)
        self._counters.lives += 1
        self._life += 1
        self._reports.clear()
        self._hole_since_s = self.unreadable = None
        self.names = NamedNamespaces()
        self.run = fence.run
        self._known = None
        self._join(fence.epoch, 0, changes)
        self.position = ORIGIN
        changes.changed[self._id] = changes.at

    def _learn_run(self, run: str, changes: Changes) -> None:
        """Frames were read before the fence of who wrote them. Rows without a run change none of another life's."""
        self.run = run
        self.row = msgspec.structs.replace(self.row, run=run)
        self._epoch_row = msgspec.structs.replace(self._epoch_row, run=run)
        if run:
            changes.changed[self._id] = changes.at

    # -- frames -------------------------------------------------------------------------------------------------------

    def receive(self, frame: ScannedFrame, data: bytes, changes: Changes) -> None:
        """Take a good frame: apply it, keep it for later, or ignore it."""
        if self.unreadable is not None:
            if frame.epoch <= self.unreadable.epoch:
                self._counters.newer += 1
                return
            self.unreadable = None
            self._limited_log.info("instance.readable", instance=self._id, epoch=frame.epoch)
        match order_of(frame, self.position):
            case Order.STALE:
                self._counters.stale += 1
            case Order.START | Order.MIDSTREAM:
                self._enter(frame, changes)
                self._apply(frame, data, changes)
            case Order.REPEAT if self.joined_midstream and frame.first_offset == 0:
                self._enter(frame, changes)  # its publisher went back to the epoch's start
                self._apply(frame, data, changes)
            case Order.REPEAT:
                self._counters.repeats += 1
            case Order.BEYOND if not self._is_lost:
                self._put_in_buffer(frame, data, changes.cursor.mark)
            case order:
                if order is Order.BEYOND:
                    self._jump(frame.first_offset, changes)
                self._apply(frame, data, changes)

    def goes_on(self, named: Fence | None) -> bool:
        """Whether frames of a message that names this fence may be plain: nothing is to be decided about any but what
        they hold.

        What `name_fence` and `receive` would do with them is then no more than to apply them.
        """
        return bool(
            self.position.epoch
            and not self.buffer
            and not self._is_lost
            and self.unreadable is None
            and owner_after(named, self.fence) is self.fence
            and self._id not in self._suspicions.by_instance
        )

    def diverge(self) -> None:
        """After the last frame the index has another digest than the frame."""
        self._counters.digest_mismatches += 1
        self._index.miss(self._id)
        self._suspicions.note(self._id).digests += 1
        epoch, offset = self.position
        self._limited_log.warn("digest.diverged", instance=self._id, epoch=epoch, offset=offset)

    def refuse_newer(self, epoch: Epoch, version: int, changes: Changes) -> None:
        """A newer kvbm writes this epoch: nothing of the instance is known until a readable one begins."""
        self._counters.newer += 1
        if self.unreadable is not None or epoch < self.position.epoch:
            return
        self.unreadable = Unreadable(epoch, version)
        self.buffer.clear()
        self._reports.clear()
        self._hole_since_s = None
        self._is_lost = False
        changes.lacks_claims = True
        self._suspicions.take(self._id)  # no snapshot can heal it
        self._index.wait(self._id, False)
        self._index.miss(self._id)
        changes.advanced[self._id] = self.position
        self._limited_log.warn("instance.unreadable", instance=self._id, why=self.unreadable.reason())

    def _put_in_buffer(self, frame: ScannedFrame, data: bytes, before: Mark) -> None:
        self._unsettled[self._id] = self
        if not self.buffer:
            self._counters.holes += 1
            self._index.wait(self._id, True)
        self.buffer.put(frame, data, before)

    def _enter(self, frame: ScannedFrame, changes: Changes) -> None:
        """Begin the frame's epoch where the frame begins."""
        if self.buffer:
            self._counters.gaps += 1  # the epoch went on behind the hole, and is over
            self._counters.gaps_repaired += 1
            self.pass_holes(changes)
        row = self.row
        if self._epoch_row.epoch < frame.epoch:
            self._end_epoch(frame.wall_time_ns, changes)
        self._is_lost = self.joined_midstream = False
        self.position = Position(frame.epoch, frame.first_offset)
        self.run = run_of(self.fence, frame.epoch)
        self.row = msgspec.structs.replace(
            row,
            epoch=frame.epoch,
            run=self.run,
            first_seen_ns=row.first_seen_ns or frame.wall_time_ns,
            state=InstanceStatus.LIVE,
        )
        self._epoch_row = EpochRow(instance=row.id, epoch=frame.epoch, started_ns=frame.wall_time_ns, run=self.run)
        if frame.first_offset:
            self._join(frame.epoch, frame.wall_time_ns, changes)

    def _join(self, epoch: Epoch, wall_time_ns: int, changes: Changes) -> None:
        """Join an epoch mid-stream: its start was not read."""
        self._counters.blind_starts += 1
        changes.lacks_claims = True
        self._suspicions.note(self._id).joins += 1
        self.joined_midstream = True
        run, known = self.run, self._known
        if known is not None and (known.epoch, known.run) in ((epoch, run), (epoch, "")) and known.pools:
            self.row = msgspec.structs.replace(known, state=InstanceStatus.LIVE, run=run)
            self._index.begin_blind(self._id, epoch, known.pools)
        else:
            likely = self.row.pools or (known.pools if known is not None else ())
            self.row = msgspec.structs.replace(self.row, epoch=epoch, pools=(), run=run)
            self._index.begin_blind(self._id, epoch, likely=likely)
        self._epoch_row = EpochRow(instance=self._id, epoch=epoch, started_ns=wall_time_ns, run=run)
        self._limited_log.info("instance.joined_midway", instance=self._id, epoch=epoch, offset=self.position.offset)

    def _end_epoch(self, ended_ns: int, changes: Changes) -> None:
        """Give out the row of the epoch that is over."""
        old = self._epoch_row
        if not old.epoch:
            return
        if old.ended_ns is None:
            old = msgspec.structs.replace(old, ended_ns=ended_ns, end_reason="replaced")
        changes.epochs.append((changes.at, old))  # also one that had ended: its row may not have been given out yet

    # -- holes and gaps -----------------------------------------------------------------------------------------------

    def judge(self, now_s: float, gap_wait_s: float, changes: Changes) -> bool:
        """Find a gap, now that the reader is at the stream's end.

        Returns whether nothing is in the buffer, nor reported and not read.
        """
        self._find_gap(now_s, gap_wait_s, changes)
        return not self.buffer and self._reports.is_empty

    def _find_gap(self, now_s: float, gap_wait_s: float, changes: Changes) -> None:
        if not self.buffer:
            self._hole_since_s = None
        elif self._hole_since_s is None:
            self._hole_since_s = now_s
        run, reported = "", self._reports.unread(self.position)
        if reported is not None:
            published, since_s, run = reported
            wait_s = gap_wait_s
        elif self._hole_since_s is not None:
            published, since_s = self.position, self._hole_since_s
            wait_s = HOLE_MOST_S
        else:
            return
        if self._is_lost or now_s - since_s < wait_s:
            return
        expected = self.position
        self._counters.gaps += 1
        if published.epoch > expected.epoch:  # not even the start of its epoch came
            self.pass_holes(changes)
            self.run = run_of(self.fence, published.epoch) or run
            self._join(published.epoch, 0, changes)
            self.position = Position(published.epoch, Offset(0))
        resumed = self.buffer.first_offset()
        self._index.miss(self._id)
        self._suspicions.note(self._id).gaps += 1
        if resumed is None:
            self._is_lost = True
        else:
            self._jump(resumed, changes)
            self._resume(changes)
        changes.gaps.append(Gap(self._id, expected, None if resumed is None else Position(published.epoch, resumed)))
        self._limited_log.warn(
            "stream.gap_found",
            instance=self._id,
            epoch=expected.epoch,
            expected=expected.offset,
            published=published.offset,
            resumed=resumed,
        )

    def pass_holes(self, changes: Changes) -> None:
        """Apply all that is in the reorder buffer: claims among it outlive the epoch."""
        while (first := self.buffer.first_offset()) is not None:  # behind one hole there may be another
            self._index.miss(self._id)
            self._jump(first, changes)
            self._resume(changes)

    def _jump(self, offset: Offset, changes: Changes) -> None:
        changes.lacks_claims = True
        self.position = Position(self.position.epoch, offset)
        self._is_lost = False

    def _resume(self, changes: Changes) -> None:
        """Apply what is in the reorder buffer as far as it follows on now."""
        for first in self.buffer.offsets():
            if first > self.position.offset:
                return
            buffered = self.buffer.pop(first)
            if order_of(buffered.frame, self.position) is not Order.REPEAT:
                self._apply_events(buffered.frame, buffered.data, changes)
        self._index.wait(self._id, False)

    # -- frames → index and rows --------------------------------------------------------------------------------------

    def _apply(self, frame: ScannedFrame, data: bytes, changes: Changes) -> None:
        self._apply_events(frame, data, changes)
        if self.buffer:
            self._resume(changes)

    def _apply_events(self, frame: ScannedFrame, data: bytes, changes: Changes) -> None:
        """Apply those events of a frame that are not applied yet; the first of them is the next."""
        instance, counters = self._id, self._counters
        applied = self._index.apply(data, frame.at, self.position.offset - frame.first_offset)
        counters.events += applied.events
        counters.blocks += applied.blocks
        self._note(frame, applied, changes)
        counters.frames += 1
        self._is_lost = False
        digest = self._epoch_row.digest if frame.digest == UNKNOWN_DIGEST else frame.digest  # usage changes none
        self.advance(Position(frame.epoch, frame.next_offset), digest, frame.wall_time_ns, changes)
        if changes.cursor.sequence > changes.settled and not self._index.agrees(instance, digest):
            self.diverge()
        elif instance in self._suspicions.by_instance:
            view = self._index.view(instance)
            if view is not None and not view.missed:
                self._heal()

    def advance(self, position: Position, digest: int, wall_time_ns: int, changes: Changes) -> None:
        """Everything before a position is applied; digest and time are of its last frame."""
        self.position, wall_time_ns = position, min(wall_time_ns, MOST_NUMBER)
        self.row = msgspec.structs.replace(self.row, last_frame_ns=max(self.row.last_frame_ns, wall_time_ns))
        self._epoch_row = msgspec.structs.replace(self._epoch_row, next_offset=position.offset, digest=digest)
        changes.newest_wall_ns = max(changes.newest_wall_ns, wall_time_ns)
        changes.advanced[self._id] = position
        changes.changed[self._id] = changes.at

    def _heal(self) -> None:
        trouble = self._suspicions.take(self._id)
        if trouble is not None:
            self._counters.gaps_repaired += trouble.gaps
            self._counters.digest_repaired += trouble.digests
            self._limited_log.info("instance.healed", instance=self._id, of=trouble.reasons())

    def _note(self, frame: ScannedFrame, applied: Applied, changes: Changes) -> None:
        """Follow what SQL keeps of a frame."""
        if applied.started is not None:
            self._note_start(frame, applied.started, changes)
        if applied.stopped is not None:
            self.row = msgspec.structs.replace(self.row, state=InstanceStatus.STOPPED)
            self._epoch_row = msgspec.structs.replace(
                self._epoch_row, ended_ns=frame.wall_time_ns, end_reason=applied.stopped.name.lower()
            )
        for claims in applied.claims:
            self.note_claims(claims, frame.wall_time_ns, changes)
        for number, usage in applied.usages:
            offset = Offset(frame.first_offset + number)
            changes.usages += [(changes.at, entry) for entry in entries_of(self._id, frame.epoch, offset, usage)]

    def note_claims(self, claims: Claims, wall_time_ns: int, changes: Changes) -> None:
        """A frame of that time had claims."""
        pool = self._index.pool_name(self._id, claims.tier)
        if pool is None:
            return
        run = ClaimRun(
            pool=pool,
            namespace=claims.namespace,
            hashes=claims.hashes,
            instance=self._id,
            at_ns=min(wall_time_ns, MOST_NUMBER),
            withdrawn=claims.withdrawn,
        )
        changes.claims.append((changes.at, run))

    def _note_start(self, frame: ScannedFrame, event: InstanceStarted, changes: Changes) -> None:
        self.joined_midstream = False
        self._heal()  # it holds nothing, and its snapshot follows by itself
        self.names.start(namespace.id for namespace in event.namespaces)
        self.row = msgspec.structs.replace(
            self.row,
            epoch=event.epoch,
            engine=event.engine,
            version=event.version,
            topology=event.topology,
            pools=event.pools,
            state=InstanceStatus.LIVE,
        )
        changes.chains[self._id] = event.attributes.get(ATTRIBUTE, b"")
        if (began := start_of(self._id, frame.wall_time_ns, event)) is not None:
            changes.usages.append((changes.at, began))
        for namespace in event.namespaces:
            changes.namespaces.append(
                (changes.at, NamespaceRow(id=namespace.id, fields=namespace, first_seen_ns=frame.wall_time_ns))
            )
