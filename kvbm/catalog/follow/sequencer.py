"""Stream → index: messages in stream order, each instance's frames in its own.

A state machine: no thread, clock or socket.

A message is a fence, or frames of one instance. One that names a fence of a lost history is a stray: it is ignored, and
logged. What each frame is to its instance, and when a hole becomes a gap, `instance_sequence` decides. A step returns
what it changed, also the SQL rows that follow from it; `row_collector` gathers these. `suspicions` has everyone a
snapshot would heal.

An instance that was forgotten is one that was never seen. Of it a mark stays for a while: the sequence up to which its
messages count for nothing, should they be read again. A later message ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import islice

import msgspec

from kvbm.catalog.follow.instance_sequence import (
    AFTER_MESSAGES,
    MOST_LINES,
    MOST_NUMBER,
    Changes,
    Common,
    InstanceSequence,
    PlaceOwnership,
    SequenceCounters,
    SequenceState,
    StreamCursor,
    Unreadable,
)
from kvbm.catalog.follow.known_namespaces import KnownNamespaces
from kvbm.catalog.follow.stated_chains import StatedChains
from kvbm.catalog.follow.suspicions import Suspicions
from kvbm.catalog.follow.usage_totals import UsageTotals
from kvbm.catalog.index.cluster_index import ClusterIndex, PlainApplied, StreamPlace
from kvbm.catalog.index.plain_frames import RUN_BYTES, PlainRun
from kvbm.catalog.sql.rows import ForgottenRow, InstancePosition, InstanceRow, InstanceRows
from kvbm.core.backend import ScanFrames
from kvbm.core.checks import is_longer
from kvbm.core.codec import NewerFrame, ScannedFrame, newer_frame
from kvbm.core.errors import NewerFrameError, StreamError
from kvbm.core.ids import MAX_NAME_BYTES, Epoch, InstanceId, Namespace, NamespaceId
from kvbm.safe_log import RateLimitedLog
from kvbm.streams.base import ORIGIN, START, Heartbeat, Mark, Position, StreamMessage, fence_of, is_fence, subject_names
from kvbm.streams.fence_owner import is_stray

KEPT_BYTES = 16 << 20  # of frames in reorder buffers, in a checkpoint; what is more is left out, and becomes a gap
GAP_WAIT_S = 1.0  # what a heartbeat reports as published must be here by then when the reader is at the stream's end


class SequencerState(msgspec.Struct, frozen=True, kw_only=True):
    """A sequencer's state beside its index, as a checkpoint keeps it."""

    sequence: int
    newest_wall_ns: int
    namespaces: tuple[Namespace, ...]
    followed: tuple[SequenceState, ...]
    fingerprint: int | None = None  # of the message at `sequence`; None: not known


class Sequencer:
    """Applies a stream to an index.

    Args:
        known, namespaces: as SQL has them; where a start is no longer on the stream, they replace it.
        gap_wait_s: how long what is reported as published may be missing at the stream's end before it is a gap.

    Attributes:
        newest_wall_ns: wall time of the newest frame that was applied. known_namespaces: whose fields are known.
        chains: how instances hash tokens. usage: what tenants have used, as far as was read here.
        on_run: told each run of plain frames that was applied, before what follows from it.
    """

    def __init__(
        self,
        index: ClusterIndex,
        scan_frames: ScanFrames,
        known: Iterable[InstanceRow] = (),
        namespaces: Iterable[Namespace] = (),
        gap_wait_s: float = GAP_WAIT_S,
    ) -> None:
        self.index = index
        self.counters = SequenceCounters()
        self.suspicions = Suspicions()
        self.usage = UsageTotals()
        self.newest_wall_ns = 0
        self.on_run: Callable[[Sequence[StreamMessage], PlainRun, PlainApplied], None] | None = None
        self._scan_frames = scan_frames
        self._known = {row.id: row for row in known}
        self._gap_wait_s = gap_wait_s
        self._sequences: dict[InstanceId, InstanceSequence] = {}
        self._by_subject: dict[str, InstanceSequence] = {}  # of events, those that have come
        self.known_namespaces = KnownNamespaces(namespaces, self._sequences.values())
        self.chains = StatedChains(self.declared)
        self._forgotten: dict[InstanceId, ForgottenRow] = {}
        self._cursor = StreamCursor()
        self._common = Common(index, self.counters, self.suspicions, {}, RateLimitedLog(most=MOST_LINES))
        self._unsettled = self._common.unsettled  # perhaps also some that had a hole
        self._settled = 0  # up to this sequence the index may be ahead of what was read, and digests prove nothing

    # -- beginning elsewhere than at nothing ---------------------------------------------------------------------------

    def state(self, with_frames: bool = True) -> SequencerState:
        """What a checkpoint keeps beside the index.

        Args:
            with_frames: also what is in reorder buffers.
        """
        return SequencerState(
            sequence=self.sequence,
            fingerprint=self.mark.fingerprint,
            newest_wall_ns=self.newest_wall_ns,
            namespaces=tuple(self.known_namespaces.by_id.values()),
            followed=tuple(_states(self._sequences.values(), KEPT_BYTES if with_frames else -1)),
        )

    def restore(self, state: SequencerState, settled: int) -> None:
        """Go on from a checkpoint; the index has been loaded from it.

        Args:
            settled: sequence that had been applied when the checkpoint was whole. Blocks in it may be newer than
                `state`, so until then digests are not compared.
        """
        self._cursor = StreamCursor(Mark(state.sequence, state.fingerprint))
        self.newest_wall_ns, self._settled = state.newest_wall_ns, settled
        for entry in state.followed:
            self._new_sequence(entry.row).restore(entry, _buffered(entry, self._scan_frames))
        self.known_namespaces.add(state.namespaces)

    def restore_positions(self, mark: Mark, positions: Iterable[InstancePosition]) -> Changes:
        """Go on from where SQL stands: nothing is known to be held, and every instance that has not stopped is joined
        mid-stream.
        """
        self._cursor = StreamCursor(mark)
        changes = Changes(self._cursor, self._settled)
        for position in positions:
            row = self._known.get(position.instance)
            if row is not None and row.epoch == position.epoch:
                self._new_sequence(row).restore_position(position, changes)
        return changes

    # -- input --------------------------------------------------------------------------------------------------------

    def step(self, now_s: float, messages: Sequence[StreamMessage], at_end: bool = False) -> Changes:
        """Apply messages in stream order.

        Args:
            now_s: on the clock that `on_heartbeat` is given too.
            at_end: the reader had fetched everything when it returned these.
        """
        cursor = self._cursor
        changes = Changes(cursor, self._settled, any(message.sequence <= cursor.sequence for message in messages[:1]))
        if changes.renumbered:
            self._settled = changes.settled = 0
            cursor.last = START
            self._forgotten.clear()  # their sequences are of another history
            for followed in self._sequences.values():
                followed.buffer.begin_anew()
                followed.spoke = 0
        for message in messages:
            cursor.sequence = changes.at = message.sequence
            self._receive(message, changes)
            cursor.last = message
        changes.at = AFTER_MESSAGES
        if at_end:
            for instance, followed in list(self._unsettled.items()):
                if followed.judge(now_s, self._gap_wait_s, changes):
                    del self._unsettled[instance]
        self._note(changes)
        return changes

    def goes_on(self, message: StreamMessage) -> bool:
        """Whether a message's frames may be plain, as far as can be told without reading them."""
        followed = self._by_subject.get(message.subject)
        return followed is not None and followed.goes_on(message.fence)

    def plain_run(self, messages: Sequence[StreamMessage], at: int) -> PlainRun:
        """Messages from `at` on, some MiB at most, of which `step` would do no more than apply them if their frames are
        plain.

        `ClusterIndex.apply_plain` applies them; then, before anything else is applied, `take_plain` takes note of it.
        """
        return _plain_run(self._by_subject, messages, at, max(self._settled, self._cursor.sequence))

    def take_plain(self, messages: Sequence[StreamMessage], run: PlainRun, applied: PlainApplied) -> Changes:
        """Take note of what a run of these messages, the first of them the run's first, has done.

        Of a message whose digest differs the rest is applied here.
        """
        if self.on_run is not None:
            self.on_run(messages, run, applied)
        cursor, counters = self._cursor, self.counters
        changes = Changes(cursor, self._settled)
        for said in applied.claims:
            changes.at = messages[said.message].sequence
            self._sequences[run.places[run.messages[said.message][0]].instance].note_claims(
                said.claims, said.wall_time_ns, changes
            )
        for place, reached in zip(run.places, applied.places, strict=True):
            if reached.frames:
                followed = self._sequences[place.instance]
                changes.at = followed.spoke = messages[reached.last].sequence
                position = Position(place.epoch, reached.offset)
                followed.advance(position, reached.digest, reached.wall_time_ns, changes)
        counters.messages += applied.messages
        counters.frames += applied.frames
        counters.events += applied.events
        counters.blocks += applied.blocks
        if applied.messages:
            cursor.last = messages[applied.messages - 1]
            cursor.sequence = cursor.last.sequence
        if applied.diverged_at is not None:
            message = messages[applied.messages]
            cursor.sequence = changes.at = message.sequence
            self._sequences[run.places[run.messages[applied.messages][0]].instance].diverge()
            self._receive(message, changes, applied.diverged_at)
            cursor.last = message
        changes.at = AFTER_MESSAGES
        self._note(changes)
        return changes

    def on_heartbeat(self, now_s: float, heartbeat: Heartbeat) -> Position:
        """Take note of what an instance reports as published. Returns how far it was read."""
        if not heartbeat.published:
            return self.position(heartbeat.instance)
        followed = self._follow(heartbeat.instance, heartbeat.cluster)
        followed.on_heartbeat(now_s, heartbeat)
        return followed.position

    def hear_namespaces(self, heartbeat: Heartbeat) -> bool:
        """Take note of the namespaces that a heartbeat names and tells of, and of how their tokens are hashed.

        Whether the instance names others than before.
        """
        self.chains.take(heartbeat.instance, heartbeat.chain)
        if not heartbeat.namespaces and not heartbeat.told and heartbeat.instance not in self._sequences:
            return False
        told = self.known_namespaces.hear(heartbeat.told, self.counters) if heartbeat.told else ()
        return self._follow(heartbeat.instance, heartbeat.cluster).names.hear(heartbeat.namespaces, told)

    def forget(self, mark: ForgottenRow) -> None:
        """Nothing is known of an instance any more, and its messages up to the mark's sequence count for nothing.

        Its claims stay: they are their pool's.
        """
        self.counters.forgotten += mark.instance in self._sequences
        self.drop(mark.instance)
        self.expect(mark)

    def drop(self, instance: InstanceId) -> None:
        """Nothing is known of an instance any more, so it lacks nothing either."""
        followed = self._sequences.pop(instance, None)
        self._unsettled.pop(instance, None)
        for subject in followed.subjects if followed is not None else ():
            del self._by_subject[subject]
        self._known.pop(instance, None)
        if (trouble := self.suspicions.take(instance)) is not None:
            self.counters.gaps_repaired += trouble.gaps
            self.counters.digest_repaired += trouble.digests
        self.chains.forget(instance)
        self.index.drop(instance)

    def expect(self, mark: ForgottenRow) -> None:
        """Messages of an instance that was forgotten may come again; those up to the mark's sequence count for
        nothing.
        """
        self._forgotten[mark.instance] = mark
        if mark.declared is not None and mark.instance not in self._sequences:
            self._known[mark.instance] = mark.declared

    def expect_no_more(self, instance: InstanceId) -> None:
        """No message of before it was forgotten can come any more."""
        if self._forgotten.pop(instance, None) is not None and instance not in self._sequences:
            self._known.pop(instance, None)

    def suspicion(self, instance: InstanceId) -> None:
        """What the index holds of an instance has another digest than it should, as an audit of the index has found."""
        self.index.miss(instance)
        self.suspicions.note(instance).digests += 1

    def pass_holes(self) -> Changes:
        """Go on behind every hole, whatever may still come: for who reads to the end of something and wants all that is
        there.
        """
        changes = Changes(self._cursor, self._settled)
        for followed in self._sequences.values():
            followed.pass_holes(changes)
        self._note(changes)
        return changes

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Of the message read last."""
        return self._cursor.sequence

    @property
    def mark(self) -> Mark:
        """The place behind the message read last."""
        return self._cursor.mark

    def safe_mark(self) -> Mark:
        """The place before the first message that has a frame in a reorder buffer: who begins there reads that one
        again.
        """
        buffered = [mark for followed in self._unsettled.values() for mark in followed.buffer.marks()]
        return min([self.mark, *buffered], key=lambda mark: mark.sequence)

    @property
    def forgotten(self) -> Mapping[InstanceId, ForgottenRow]:
        """The marks of instances that were forgotten and have sent no message since. Read only."""
        return self._forgotten

    def spoke(self, instance: InstanceId) -> int:
        """Sequence of an instance's last message; 0 when none is known."""
        followed = self._sequences.get(instance)
        return 0 if followed is None else followed.spoke

    @property
    def followed(self) -> KeysView[InstanceId]:
        """The instances that messages or heartbeats have named."""
        return self._sequences.keys()

    def rows(self, instance: InstanceId) -> InstanceRows:
        """The rows of a followed instance as they are now."""
        return self._sequences[instance].rows()

    def position(self, instance: InstanceId) -> Position:
        """How far an instance was read; (0, 0) when nothing of it was."""
        followed = self._sequences.get(instance)
        return ORIGIN if followed is None else followed.position

    def instance_row(self, instance: InstanceId) -> InstanceRow | None:
        """What an instance's newest start declared; None when nothing of it was read."""
        followed = self._sequences.get(instance)
        return None if followed is None else followed.row

    def ownership(self, instance: InstanceId) -> PlaceOwnership:
        """Whose an instance's place on the stream is."""
        followed = self._sequences.get(instance)
        return PlaceOwnership("", 0) if followed is None else followed.ownership

    def unreadable(self, instance: InstanceId) -> Unreadable | None:
        """What this kvbm is too old to read of an instance's epoch; None when it reads it."""
        followed = self._sequences.get(instance)
        return None if followed is None else followed.unreadable

    def instances(self) -> list[InstanceId]:
        """The instances read from, by name; also those of which nothing could be read."""
        return sorted(
            instance for instance, followed in self._sequences.items() if followed.position.epoch or followed.unreadable
        )

    def namespaces(self) -> dict[NamespaceId, Namespace]:
        """The namespaces whose fields an instance has declared. Read only."""
        return self.known_namespaces.by_id

    def forget_namespaces(self, names: Iterable[NamespaceId]) -> None:
        """Know no more what these are, until an instance names them again, and have none named until then."""
        gone = frozenset(names)
        self.known_namespaces.remove(gone)
        for followed in self._sequences.values():
            followed.names.forget(gone)

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        """The namespaces that an instance's newest start or its heartbeats have named; empty when none are known."""
        followed = self._sequences.get(instance)
        return frozenset() if followed is None else followed.names.all

    def declares_nothing(self, instance: InstanceId) -> bool:
        """Whether an instance's start was read and names no namespace, nor does a heartbeat.

        One of whom nothing is known does not.
        """
        followed = self._sequences.get(instance)
        return followed is not None and followed.names.declares_nothing

    def waiting(self) -> int:
        """How many instances have a hole that may still be filled."""
        return sum(bool(followed.buffer) for followed in self._unsettled.values())

    def is_waiting(self, instance: InstanceId) -> bool:
        """Whether an instance has a hole that may still be filled."""
        return instance in self._unsettled and bool(self._unsettled[instance].buffer)

    # -- messages → frames --------------------------------------------------------------------------------------------

    def _receive(self, message: StreamMessage, changes: Changes, begin: int = 0) -> None:
        """Take a message, or what it has from a byte on."""
        self.counters.messages += 1
        cluster, instance = subject_names(message.subject)
        if is_longer(instance, MAX_NAME_BYTES) or is_longer(cluster, MAX_NAME_BYTES):
            self._refuse(message, f"its subject has a name of more than {MAX_NAME_BYTES} bytes")
            return
        if self._forgotten and (mark := self._forgotten.get(instance)) is not None:
            if message.sequence <= mark.sequence:
                changes.lacks_claims = True  # SQL has them: it had all of the instance when that was forgotten
                return
            del self._forgotten[instance]
            self._common.limited_log.info("instance.known_again", instance=instance, forgotten_at=mark.sequence)
        self._take(message, cluster, instance, changes, begin)
        followed = self._sequences.get(instance)
        if followed is not None:
            followed.spoke = message.sequence

    def _take(self, message: StreamMessage, cluster: str, instance: InstanceId, changes: Changes, begin: int) -> None:
        if is_fence(message.subject):
            self._receive_fence(message, self._follow(instance, cluster), changes)
            return
        frames, error = self._scan_frames(message.data, begin)
        if message.fence is not None:
            followed = self._follow(instance, cluster)
            if is_stray(message.fence, followed.fence):
                self.counters.strays += 1
                why = (
                    f"it is of run {message.fence.run}, which had fence {message.fence.sequence} in a history that "
                    "is gone"
                )
                self._refuse(message, why, 0)
                return
            followed.name_fence(message.fence, changes)
        for frame in frames:
            if frame.instance != instance:
                self.counters.foreign += 1
                self._refuse(message, f"byte {frame.at}: a frame of instance {frame.instance!r}", 0)
                return
            if flaw := frame.flaw or _beyond(frame):
                self._refuse(message, f"byte {frame.at}: {flaw}")
                return
            followed = self._follow(instance, cluster)
            if message.subject not in followed.subjects:
                followed.subjects.add(message.subject)
                self._by_subject[message.subject] = followed
            followed.receive(_in_time(frame), message.data, changes)
        if isinstance(error, NewerFrameError):
            self._receive_newer(message, error, self._follow(instance, cluster), changes)
        elif error is not None:
            self._refuse(message, str(error))

    def _receive_fence(self, message: StreamMessage, followed: InstanceSequence, changes: Changes) -> None:
        try:
            fence = fence_of(message.data, message.sequence, f"message {message.sequence}")
        except StreamError as error:
            self._refuse(message, str(error))
            return
        followed.take_fence(fence, changes)

    def _receive_newer(
        self, message: StreamMessage, error: NewerFrameError, followed: InstanceSequence, changes: Changes
    ) -> None:
        known = followed.unreadable
        newer = NewerFrame(error.version, known.epoch) if known is not None else newer_frame(message.data, error.at)
        if newer is None:
            self._refuse(message, str(error))  # a version that damage has changed
        else:
            followed.refuse_newer(newer.epoch, newer.version, changes)

    def _refuse(self, message: StreamMessage, why: str, poison: int = 1) -> None:
        self.counters.poison += poison
        self._common.limited_log.warn("message.refused", sequence=message.sequence, subject=message.subject, why=why)

    def _follow(self, instance: InstanceId, cluster: str) -> InstanceSequence:
        followed = self._sequences.get(instance)
        if followed is None:
            row = InstanceRow(id=instance, cluster=cluster, epoch=Epoch(0), first_seen_ns=0, last_frame_ns=0)
            followed = self._new_sequence(row)
        return followed

    def _new_sequence(self, row: InstanceRow) -> InstanceSequence:
        followed = InstanceSequence(row, self._common, self._known.get(row.id))
        self._sequences[row.id] = followed
        return followed

    def _note(self, changes: Changes) -> None:
        """Take over what a step has found."""
        self.newest_wall_ns = max(self.newest_wall_ns, changes.newest_wall_ns)
        self.known_namespaces.take(changes, self.counters)
        self.usage.take(entry for _, entry in changes.usages)
        for instance, stated in changes.chains.items():
            self.chains.take(instance, stated)


def _plain_run(
    by_subject: Mapping[str, InstanceSequence], messages: Sequence[StreamMessage], at: int, after: int
) -> PlainRun:
    """See `Sequencer.plain_run`. `after`: messages up to this sequence are not looked at."""
    taken: list[tuple[int, bytes]] = []
    places: list[StreamPlace] = []
    numbers: dict[InstanceId, int] = {}
    size = 0
    for message in islice(messages, at, None):
        followed = by_subject.get(message.subject)
        if message.sequence <= after or followed is None or not followed.goes_on(message.fence):
            break
        number = numbers.get(followed.row.id)
        if number is None:
            epoch, offset = followed.position
            if offset >> 62:
                break  # a frame of them may end beyond what is counted
            number = numbers[followed.row.id] = len(places)
            places.append(StreamPlace(followed.row.id, epoch, offset))
        taken.append((number, message.data))
        size += len(message.data)
        if size >= RUN_BYTES:
            break
    return PlainRun(taken, places, size)


def _beyond(frame: ScannedFrame) -> str:
    """Why neither a checkpoint nor SQL could keep a frame's place; "" when they can."""
    if frame.epoch <= MOST_NUMBER and frame.next_offset <= MOST_NUMBER:
        return ""
    return f"it ends at offset {frame.next_offset} of epoch {frame.epoch}, and {MOST_NUMBER} is the last of both"


def _in_time(frame: ScannedFrame) -> ScannedFrame:
    """The frame, with a time that SQL can keep."""
    return frame if frame.wall_time_ns <= MOST_NUMBER else frame._replace(wall_time_ns=MOST_NUMBER)


def _states(sequences: Iterable[InstanceSequence], bytes_left: int) -> Iterator[SequenceState]:
    """What a checkpoint keeps of instances, with so many bytes of frames in reorder buffers."""
    for followed in sequences:
        bytes_left -= followed.buffer.bytes
        kept = followed.state()
        yield kept if bytes_left >= 0 else msgspec.structs.replace(kept, buffered=())


def _buffered(entry: SequenceState, scan_frames: ScanFrames) -> Iterator[tuple[ScannedFrame, bytes, Mark]]:
    """The frames that were in an instance's reorder buffer; what is none of its frames is left out."""
    for one in entry.buffered:
        frames, _ = scan_frames(one.data, 0)
        if frames and frames[0].instance == entry.row.id and not (frames[0].flaw or _beyond(frames[0])):
            yield _in_time(frames[0]), one.data, Mark(one.sequence, one.fingerprint)
