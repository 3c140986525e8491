"""Stream → index and SQL rows. A state machine: no thread, clock or socket.

A reader's place in an instance's stream is (epoch, next offset). What arrives is one of these:

    epoch below the known one        stale    ignored
    of a fence of a lost history     stray    ignored, with a word in the log
    before the next offset           repeat   ignored: a publisher that lost an acknowledgement sends again
    the next offset                  applied
    beyond the next offset           a hole   kept aside; a publisher that goes back sends what is missing, 0 1 3 4 2 3 4
    epoch above, from offset 0       applied  the epoch before is over
    epoch above, from later          applied  blind: its start is no longer, or not yet, on the stream
    a frame of a newer version       unreadable: neither it nor what follows it in its epoch is applied; the next epoch is

Numbers of epochs are only as good as somebody's memory: a journal, a stream or both may be lost, and two processes may each begin an epoch
of one number. So an epoch is told by its number and the run of the process that began it, and which life is the newer one by the
fences, which lie in the stream among the events: a fence says whose events follow, and which runs began the epochs they are of. Where
these contradict what was read (`is_other_life`), what was read is of another life: nothing of it is held any more, and whatever
epoch comes next is entered.

A hole is a *gap* once the instance's heartbeat has said that what is missing was published, and the reader has been at the
stream's end since. Then the reader goes on behind the hole, and the instance is doubtful until a round has ended. So it is when a
frame's digest differs from the index's. `troubles` tells of everyone a round would heal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from kvbm.catalog.index import Applied, ClusterIndex
from kvbm.catalog.sql_store import (
    ClaimRun,
    EpochRow,
    InstancePosition,
    InstanceRow,
    InstanceState,
    NamespaceRow,
    StoreBatch,
)
from kvbm.core.backend import ScanFrames
from kvbm.core.codec import VERSION, NewerFrame, ScannedFrame, newer_frame
from kvbm.core.errors import NewerFrameError, StreamError
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.streams.base import (
    ORIGIN,
    START,
    Fence,
    Heartbeat,
    Mark,
    Position,
    StreamMessage,
    fence_of,
    is_fence,
    is_other_life,
    mark_of,
    run_of,
    subject_names,
)
from kvbm.streams.holders import holder_after, is_stray

log = structlog.get_logger()

HOLE_MOST_S = 30.0  # a hole that no heartbeat speaks of, for its instance has died, is given up after this long at the stream's end
GAP_WAIT_S = 1.0  # what a heartbeat calls published must be here by then when the reader is at the stream's end
_ROW_BYTES = 200  # what one gathered row takes, about
ASIDE_BYTES = 16 << 20  # frames kept behind one instance's hole; more are left to be sent again, or to the next round


class Gap(NamedTuple):
    """Events of an instance that will not come any more.

    Attributes:
        expected: the first of them.
        resumed: where reading goes on; None when nothing behind the hole is known yet.
    """

    instance: InstanceId
    expected: Position
    resumed: Position | None


class Holder(NamedTuple):
    """Whose an instance's place on the stream is.

    Attributes:
        run: of the process whose events follow the fence read last; "" when none was read.
        life: grows when what was read before turned out to be of another life.
    """

    run: str
    life: int


class Step(NamedTuple):
    """What a step changed.

    Attributes:
        advanced: instances whose position moved, and where to.
        gaps: found in this step.
        renumbered: sequences began anew: the stream's store was replaced.
    """

    advanced: dict[InstanceId, Position]
    gaps: list[Gap]
    renumbered: bool


class Counters(msgspec.Struct, kw_only=True):
    """What was seen since the start. `blocks` counts a block once for each event that names it.

    Attributes:
        digest_divergence: instances whose residencies an audit found to be others than what was applied.
        gaps_repaired, digest_repaired: after which the instance was whole again.
        foreign: frames that name another instance than their subject; they are refused with the rest of their message.
        newer: frames of a newer version than this kvbm reads, and those that follow one in its epoch; they are not applied.
        strays: messages that name a fence of a history that is gone; see `kvbm.streams.holders`.
        lives: times a fence said that what was read of an instance is of another life.
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


class Trouble(msgspec.Struct, kw_only=True):
    """What was found of an instance that a round will heal, counted by kind.

    Attributes:
        gaps: events were missed. digests: its frames, or an audit, told another digest. blind: its epoch was joined midway.
        unended: it has been in want of a whole round for long.
    """

    gaps: int = 0
    digests: int = 0
    blind: int = 0
    unended: int = 0

    @property
    def found(self) -> int:
        """All of it; more than before is news."""
        return self.gaps + self.digests + self.blind + self.unended

    def reasons(self) -> list[str]:
        """In words."""
        words = {
            "events missed": self.gaps, "digest differs": self.digests, "joined midway": self.blind,
            "no whole round": self.unended,
        }  # fmt: skip
        return [reason for reason, count in words.items() if count]


class Unreadable(msgspec.Struct, frozen=True):
    """A newer kvbm writes an instance's epoch: the version of a frame of it that was seen."""

    epoch: Epoch
    version: int

    def words(self) -> str:
        """Why nothing is said of the instance, and what to do."""
        return f"epoch {self.epoch} has frames of version {self.version}; this catalog reads up to {VERSION}: upgrade the catalog"


class FollowedState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance in a `ProjectorState`."""

    row: InstanceRow
    epoch: Epoch
    offset: Offset
    epoch_row: EpochRow
    declared: tuple[NamespaceId, ...]
    is_blind: bool
    is_lost: bool
    trouble: Trouble | None
    run: str = ""
    holder: Fence | None = None
    life: int = 0
    unreadable: Unreadable | None = None


class ProjectorState(msgspec.Struct, frozen=True, kw_only=True):
    """A projector's state beside its index, as a checkpoint keeps it. Frames kept aside are left out."""

    sequence: int
    newest_wall_ns: int
    namespaces: tuple[Namespace, ...]
    followed: tuple[FollowedState, ...]
    fingerprint: int | None = None  # of the message at `sequence`; None: not known


class _Arrived(NamedTuple):
    """A good frame, the bytes it lies in, and the place before the message they came with: None until it is kept aside."""

    frame: ScannedFrame
    data: bytes
    before: Mark | None = None

    @property
    def size(self) -> int:
        return self.frame.end - self.frame.at


class _Evidence(NamedTuple):
    """What a heartbeat calls published and is not read yet.

    Attributes:
        run: of the process that said so; "" when it did not tell.
    """

    said: Position
    since_s: float
    run: str


class _Followed:
    """One instance, as far as it was read."""

    def __init__(self, row: InstanceRow) -> None:
        self.row = row
        self.position = ORIGIN
        self.run = ""  # that began the position's epoch; "" when nobody has told
        self.holder: Fence | None = None  # whose events come now: the fence read last
        self.life = 0  # grows when a fence says that what was read is of another one
        self.epoch_row = EpochRow(instance=row.id, epoch=Epoch(0), started_ns=0)
        self.declared: frozenset[NamespaceId] = frozenset()  # namespaces its start named
        self.is_blind = False
        self.is_lost = False  # the hole at `position` is a gap already: whatever comes next counts
        self.aside: dict[Offset, _Arrived] = {}
        self.aside_bytes = 0
        self.hole_since_s: float | None = (
            None  # since when something lies aside while the reader is at the stream's end
        )
        self.evidence: _Evidence | None = None
        self.unreadable: Unreadable | None = None  # of this epoch nothing more is read


class Projector:
    """Applies a stream to an index, and gathers the SQL rows that follow from it.

    Args:
        stream: name of the stream in SQL.
        stored: sequence up to which SQL has everything; rows are gathered from there on.
        known, namespaces: as SQL has them; where a start is no longer on the stream, they tell what it said.
    """

    def __init__(
        self,
        index: ClusterIndex,
        scan_frames: ScanFrames,
        stream: str,
        stored: int = 0,
        known: Iterable[InstanceRow] = (),
        namespaces: Iterable[Namespace] = (),
        gap_wait_s: float = GAP_WAIT_S,
    ) -> None:
        self.index = index
        self.counters = Counters()
        self.found = 0  # things that a round heals; grows with each
        self.may_lack_claims = False  # events were passed over, and no round states claims again
        self.sequence = 0
        self.newest_wall_ns = 0
        self._scan_frames = scan_frames
        self._stream, self._stored = stream, stored
        self._known = {row.id: row for row in known}
        self._gap_wait_s = gap_wait_s
        self._followed: dict[InstanceId, _Followed] = {}
        self._namespaces = {namespace.id: namespace for namespace in namespaces}
        self._last: StreamMessage | Mark = START  # read; the mark is made of it when somebody asks
        self._is_gathering = False
        self._is_behind = False  # rows were let go: none are gathered until `gather_after`
        self._settled = 0  # up to this sequence the index may be ahead of what was read, and digests say nothing
        self._troubles: dict[InstanceId, Trouble] = {}
        self._dirty: set[InstanceId] = set()
        self._epochs: list[EpochRow] = []
        self._new_namespaces: list[NamespaceRow] = []
        self._claims: list[ClaimRun] = []
        self._tells, self._told_claims = False, 0  # as in `StoreBatch`
        self._claims_bytes = 0
        self._watched: list[ClaimRun] | None = None

    # -- beginning elsewhere than at nothing ---------------------------------------------------------------------------

    def state(self) -> ProjectorState:
        """What a checkpoint keeps beside the index."""
        return ProjectorState(
            sequence=self.sequence,
            fingerprint=self.mark.fingerprint,
            newest_wall_ns=self.newest_wall_ns,
            namespaces=tuple(self._namespaces.values()),
            followed=tuple(
                FollowedState(
                    row=followed.row, epoch=followed.position.epoch, offset=followed.position.offset,
                    epoch_row=followed.epoch_row, declared=tuple(followed.declared), is_blind=followed.is_blind,
                    is_lost=followed.is_lost, trouble=_copy(self._troubles.get(instance)), run=followed.run,
                    holder=followed.holder, life=followed.life, unreadable=followed.unreadable,
                )
                for instance, followed in self._followed.items()
            ),
        )  # fmt: skip

    def restore(self, state: ProjectorState, settled: int) -> None:
        """Go on from a checkpoint; the index has been loaded from it.

        Args:
            settled: sequence that had been applied when the checkpoint was whole. Blocks in it may be newer than `state`, so until
                then digests are not compared.
        """
        self._last = Mark(state.sequence, state.fingerprint)
        self.sequence, self.newest_wall_ns, self._settled = state.sequence, state.newest_wall_ns, settled
        for namespace in state.namespaces:
            self._namespaces.setdefault(namespace.id, namespace)
        for entry in state.followed:
            followed = self._followed[entry.row.id] = _Followed(entry.row)
            followed.position = Position(entry.epoch, entry.offset)
            followed.epoch_row, followed.declared = entry.epoch_row, frozenset(entry.declared)
            followed.is_blind, followed.is_lost = entry.is_blind, entry.is_lost
            followed.run, followed.holder, followed.life = entry.run, entry.holder, entry.life
            if entry.unreadable is not None and entry.unreadable.version > VERSION:
                followed.unreadable = entry.unreadable
                continue
            followed.is_lost |= (
                entry.unreadable is not None
            )  # this kvbm can read what comes next; a round tells the rest
            if entry.trouble is not None:
                self._troubles[entry.row.id] = entry.trouble
            elif (view := self.index.view(entry.row.id)) is not None and view.missed and not view.stopped:
                self.want_round(entry.row.id)  # the index may have learned of it a moment after the state was taken

    def restore_blind(self, place: Mark, positions: Iterable[InstancePosition]) -> None:
        """Go on from where SQL stands: nothing is known to be held, and every instance that has not stopped is to restate it."""
        self.sequence, self._last = place.sequence, place
        for position in positions:
            row = self._known.get(position.instance)
            if row is None or row.epoch != position.epoch:
                continue
            followed = self._followed[row.id] = _Followed(row)
            followed.position = Position(position.epoch, position.next_offset)
            followed.run = position.run
            followed.epoch_row = EpochRow(
                instance=row.id, epoch=position.epoch, started_ns=row.last_frame_ns, next_offset=position.next_offset,
                run=position.run,
            )  # fmt: skip
            if row.state is InstanceState.LIVE:
                self._begin_blind(followed, position.epoch, row.last_frame_ns)

    # -- input --------------------------------------------------------------------------------------------------------

    def step(self, now_s: float, messages: Sequence[StreamMessage], at_end: bool = False) -> Step:
        """Apply messages in stream order.

        Args:
            now_s: on the clock that `hear` is told too.
            at_end: the reader had fetched everything when it returned these.
        """
        step = Step({}, [], any(message.sequence <= self.sequence for message in messages[:1]))
        if step.renumbered:
            self._settled, self._last = 0, START
            for followed in self._followed.values():  # places of another history
                followed.aside = {first: kept._replace(before=START) for first, kept in followed.aside.items()}
        for message in messages:
            self.sequence = message.sequence
            self._is_gathering = not self._is_behind and (step.renumbered or message.sequence > self._stored)
            self._receive(message, step)
            self._last = message
        self._is_gathering = not self._is_behind
        if at_end:
            for instance, followed in self._followed.items():
                self._judge(now_s, instance, followed, step)
        return step

    def hear(self, now_s: float, heartbeat: Heartbeat) -> None:
        """Take note of what an instance says it has published.

        It speaks of one epoch alone: that of an older one all was published, or never will be, is not said. A newer epoch than the
        one that is read takes the place of what was said of the older, whose end nobody will send any more. What another life
        said of an epoch does not count: nobody will send that.
        """
        if not heartbeat.published:
            return
        said = Position(heartbeat.epoch, heartbeat.published)
        followed = self._follow(heartbeat.instance, heartbeat.cluster)
        if followed.unreadable is not None and said.epoch <= followed.unreadable.epoch:
            return
        known, holder = followed.evidence, followed.holder
        if _contradicts(holder, said.epoch, heartbeat.run):
            return
        if known is not None and holder is not None and known.run != heartbeat.run == holder.run:
            known = followed.evidence = None  # whose place it is knows better
        if said <= followed.position:
            return
        if known is None or known.said <= followed.position or known.said.epoch < said.epoch:
            followed.evidence = _Evidence(said, now_s, heartbeat.run)

    def renumber(self, stream: str, stored: int) -> None:
        """Go on in a stream whose sequences began anew, under another name in SQL."""
        self._stream, self._stored = stream, stored
        self.may_lack_claims = True

    def doubt(self, instance: InstanceId) -> None:
        """What the index holds of an instance is not what its digest says, as a sweep of the index has found."""
        self.index.miss(instance)
        self._trouble(instance).digests += 1

    def want_round(self, instance: InstanceId) -> None:
        """The index wants a whole round of an instance, and none has ended for long."""
        self._trouble(instance).unended += 1

    def pass_holes(self) -> None:
        """Go on behind every hole, whatever may still come: for who reads to the end of something and wants all that is there."""
        step = Step({}, [], False)
        for followed in self._followed.values():
            self._pass_holes(followed, step)

    # -- output -------------------------------------------------------------------------------------------------------

    def take_batch(self) -> StoreBatch | None:
        """What was gathered since the last call, up to here; None when the stream has not moved on.

        The caller stores it, and until it has, keeps it: the next batch begins where this one ends. It ends before the first
        message that is still kept aside, so that whoever begins there reads that one again; rows of later ones repeat then.
        """
        kept = [one.before for followed in self._followed.values() for one in followed.aside.values()]
        end = min([self.mark, *(place for place in kept if place is not None)], key=lambda place: place.sequence)
        if end.sequence <= self._stored or self._is_behind:
            return None
        changed = [self._followed[instance] for instance in sorted(self._dirty)]
        batch = StoreBatch(
            stream=self._stream,
            previous=self._stored,
            stream_sequence=end.sequence,
            fingerprint=end.fingerprint,
            instances=tuple(followed.row for followed in changed),
            epochs=(*self._epochs, *(followed.epoch_row for followed in changed)),
            namespaces=tuple(self._new_namespaces),
            claims=tuple(self._claims),
            positions=tuple(map(_position_of, changed)),
            tells=self._tells,
            told_claims=self._told_claims,
        )
        self._stored = end.sequence
        self._forget_rows()
        return batch

    @property
    def mark(self) -> Mark:
        """The place behind the message read last."""
        if isinstance(self._last, StreamMessage):
            self._last = mark_of(self._last)
        return self._last

    @property
    def waiting_bytes(self) -> int:
        """What the rows that were gathered and not taken weigh, about."""
        return self._claims_bytes + _ROW_BYTES * (len(self._epochs) + len(self._new_namespaces) + len(self._claims))

    def tell_all(self) -> None:
        """Give out the rows of all instances and namespaces with the next batch: the stream may not have what they come from."""
        self._dirty |= {instance for instance, followed in self._followed.items() if followed.position.epoch}
        self.tell_namespaces(self._namespaces, self.newest_wall_ns)

    def tell_namespaces(self, namespaces: Mapping[NamespaceId, Namespace], seen_ns: int) -> None:
        """Give out the rows of these namespaces as well: SQL may have lost them, and no start that names them comes again."""
        self._tells = True
        told = {row.id for row in self._new_namespaces}
        self._new_namespaces += [
            NamespaceRow(id=name, fields=fields, first_seen_ns=seen_ns)
            for name, fields in namespaces.items() if name not in told
        ]  # fmt: skip

    def waiting_claims(self) -> list[ClaimRun]:
        """Claims that were gathered and not given out."""
        return list(self._claims)

    def add_claims(self, claims: Iterable[ClaimRun]) -> None:
        """Give out these as well, before those gathered here."""
        earlier = list(claims)
        self._told_claims += len(earlier)
        self._claims = [*earlier, *self._claims]
        self._claims_bytes += sum(len(run.hashes) for run in earlier)

    def watch_claims(self) -> None:
        """Remember what is claimed and withdrawn from here on, until `claim_again`."""
        self.may_lack_claims = False
        self._watched = []

    def claim_again(self) -> None:
        """Say once more what was claimed and withdrawn since `watch_claims`: claims of another time were said meanwhile."""
        watched, self._watched = self._watched or [], None
        for run in watched:
            (self.index.unclaim if run.withdrawn else self.index.claim)(run.pool, run.namespace, run.hashes)

    def let_rows_go(self) -> None:
        """Gather none any more: SQL has been away for too long. Whoever calls this reads them again from where SQL stands."""
        self._is_behind = True
        self._is_gathering = False
        self._forget_rows()

    def gather_after(self, sequence: int) -> None:
        """Gather rows of what comes after a sequence; SQL has all before. It must not lie before `sequence` here."""
        self._is_behind = False
        self._stored = sequence

    def take_rows(self, other: Projector) -> None:
        """Add what another has gathered and not given out; it has read the same stream. They are given out with the next message."""
        self._dirty |= other._dirty & self._followed.keys()
        self._epochs += other._epochs
        self._new_namespaces += other._new_namespaces
        self._tells |= other._tells
        self._told_claims += other._told_claims if not self._claims else 0
        self._claims += other._claims
        self._claims_bytes += other._claims_bytes
        other._forget_rows()

    def _forget_rows(self) -> None:
        self._dirty, self._epochs, self._new_namespaces, self._claims = set(), [], [], []
        self._claims_bytes = self._told_claims = 0
        self._tells = False

    def position(self, instance: InstanceId) -> Position:
        """How far an instance was read; (0, 0) when nothing of it was."""
        followed = self._followed.get(instance)
        return ORIGIN if followed is None else followed.position

    def instance_row(self, instance: InstanceId) -> InstanceRow | None:
        """What an instance's newest start said of it; None when nothing of it was read."""
        followed = self._followed.get(instance)
        return None if followed is None else followed.row

    def holder(self, instance: InstanceId) -> Holder:
        """Whose an instance's place on the stream is."""
        followed = self._followed.get(instance)
        if followed is None:
            return Holder("", 0)
        return Holder(followed.holder.run if followed.holder is not None else followed.run, followed.life)

    def unreadable(self, instance: InstanceId) -> Unreadable | None:
        """What this kvbm is too old to read of an instance's epoch; None when it reads it."""
        followed = self._followed.get(instance)
        return None if followed is None else followed.unreadable

    def instances(self) -> list[InstanceId]:
        """The instances read from, by name; also those of which nothing could be read."""
        return sorted(
            instance for instance, followed in self._followed.items() if followed.position.epoch or followed.unreadable
        )

    def namespaces(self) -> dict[NamespaceId, Namespace]:
        """The namespaces whose fields an instance has told. Read only."""
        return self._namespaces

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        """The namespaces an instance's newest start named; empty when none are known."""
        followed = self._followed.get(instance)
        return frozenset() if followed is None else followed.declared

    def waiting(self) -> int:
        """How many instances have a hole that may still be filled."""
        return sum(bool(followed.aside) for followed in self._followed.values())

    def is_waiting(self, instance: InstanceId) -> bool:
        """Whether an instance has a hole that may still be filled."""
        followed = self._followed.get(instance)
        return followed is not None and bool(followed.aside)

    def troubles(self) -> Mapping[InstanceId, Trouble]:
        """Everyone a round would heal, and why. Read only."""
        return self._troubles

    # -- messages → frames --------------------------------------------------------------------------------------------

    def _receive(self, message: StreamMessage, step: Step) -> None:
        self.counters.messages += 1
        cluster, instance = subject_names(message.subject)
        if is_fence(message.subject):
            self._receive_fence(message, self._follow(instance, cluster), step)
            return
        frames, error = self._scan_frames(message.data)
        if message.fence is not None and not self._hear_of_holder(message, message.fence, cluster, instance, step):
            return
        for frame in frames:
            if frame.instance != instance:
                self.counters.foreign += 1
                self._refuse(message, f"byte {frame.at}: a frame of instance {frame.instance!r}")
                return
            if frame.flaw:
                self._poison(message, f"byte {frame.at}: {frame.flaw}")
                return
            self._place(self._follow(instance, cluster), _Arrived(frame, message.data), step)
        if isinstance(error, NewerFrameError):
            self._refuse_newer(message, error, self._follow(instance, cluster), step)
        elif error is not None:
            self._poison(message, str(error))

    def _refuse_newer(self, message: StreamMessage, error: NewerFrameError, followed: _Followed, step: Step) -> None:
        """A newer kvbm writes this epoch: nothing of the instance is known until a readable one begins."""
        known = followed.unreadable
        newer = NewerFrame(error.version, known.epoch) if known is not None else newer_frame(message.data, error.at)
        if newer is None:
            self._poison(message, str(error))  # a version that damage has changed
            return
        self.counters.newer += 1
        if known is not None or newer.epoch < followed.position.epoch:
            return
        followed.unreadable = Unreadable(newer.epoch, newer.version)
        followed.aside, followed.aside_bytes = {}, 0
        followed.evidence = followed.hole_since_s = None
        followed.is_lost = False
        self.may_lack_claims = True
        instance = followed.row.id
        self._troubles.pop(instance, None)  # no round can heal it
        self.index.wait(instance, False)
        self.index.miss(instance)
        step.advanced[instance] = followed.position
        log.warning("instance.unreadable", instance=instance, why=followed.unreadable.words())

    # -- lives --------------------------------------------------------------------------------------------------------

    def _receive_fence(self, message: StreamMessage, followed: _Followed, step: Step) -> None:
        try:
            fence = fence_of(message.data, message.sequence, f"message {message.sequence}")
        except StreamError as error:
            self._poison(message, str(error))
            return
        self._take_fence(followed, fence, step)

    def _hear_of_holder(
        self, message: StreamMessage, named: Fence, cluster: str, instance: InstanceId, step: Step
    ) -> bool:
        """Take the fence that a message of events names. False: nobody reads it."""
        followed = self._follow(instance, cluster)
        if is_stray(named, followed.holder):
            self.counters.strays += 1
            self._refuse(
                message, f"it is of run {named.run}, which had fence {named.sequence} in a history that is gone"
            )
            return False
        holder = holder_after(named, followed.holder)
        if holder is not None and holder is not followed.holder:
            if followed.holder is None or holder.run != followed.holder.run:
                self._take_fence(followed, holder, step)
            followed.holder = holder
        return True

    def _take_fence(self, followed: _Followed, fence: Fence, step: Step) -> None:
        if is_other_life(followed.position.epoch, followed.run, fence):
            self._begin_life(followed, fence, step)
        followed.holder = fence
        if followed.evidence is not None and _contradicts(fence, followed.evidence.said.epoch, followed.evidence.run):
            followed.evidence = None
        if followed.position.epoch and not followed.run:
            self._learn_run(followed, run_of(fence, followed.position.epoch))
        step.advanced[followed.row.id] = followed.position

    def _begin_life(self, followed: _Followed, fence: Fence, step: Step) -> None:
        """Nothing that was read of the instance is so any more; its next frame is entered, whatever its epoch."""
        log.warning(
            "instance.life_begun", instance=followed.row.id, epoch=fence.epoch, run=fence.run,
            other_epoch=followed.position.epoch, other_run=followed.run,
            why="its journal, the stream's end or both were lost; what was read before is of another life",
        )  # fmt: skip
        self._pass_holes(followed, step)
        self._end_epoch(followed, followed.row.last_frame_ns)
        self.counters.lives += 1
        followed.life += 1
        followed.evidence = followed.hole_since_s = followed.unreadable = None
        followed.declared = frozenset()
        followed.run = fence.run
        self._known.pop(followed.row.id, None)
        self._begin_blind(followed, fence.epoch, 0)
        followed.position = ORIGIN
        if self._is_gathering:
            self._dirty.add(followed.row.id)

    def _learn_run(self, followed: _Followed, run: str) -> None:
        """Frames were read before the fence of who wrote them. Rows without a run change none of another life's."""
        followed.run = run
        followed.row = msgspec.structs.replace(followed.row, run=run)
        followed.epoch_row = msgspec.structs.replace(followed.epoch_row, run=run)
        if run and self._is_gathering:
            self._dirty.add(followed.row.id)

    def _end_epoch(self, followed: _Followed, ended_ns: int) -> None:
        """Give out the row of the epoch that is over."""
        old = followed.epoch_row
        if not old.epoch or not self._is_gathering:
            return
        if old.ended_ns is None:
            old = msgspec.structs.replace(old, ended_ns=ended_ns, end_reason="replaced")
        self._epochs.append(old)  # also one that had ended: its row may not have been given out yet

    def _poison(self, message: StreamMessage, why: str) -> None:
        self.counters.poison += 1
        self._refuse(message, why)

    def _refuse(self, message: StreamMessage, why: str) -> None:
        log.warning("message.refused", sequence=message.sequence, subject=message.subject, why=why)

    def _follow(self, instance: InstanceId, cluster: str) -> _Followed:
        followed = self._followed.get(instance)
        if followed is None:
            row = InstanceRow(id=instance, cluster=cluster, epoch=Epoch(0), first_seen_ns=0, last_frame_ns=0)
            followed = self._followed[instance] = _Followed(row)
        return followed

    def _place(self, followed: _Followed, arrived: _Arrived, step: Step) -> None:
        frame = arrived.frame
        if followed.unreadable is not None:
            if frame.epoch <= followed.unreadable.epoch:
                self.counters.newer += 1
                return
            followed.unreadable = None
            log.info("instance.readable", instance=followed.row.id, epoch=frame.epoch)
        epoch, offset = followed.position
        if frame.epoch < epoch:
            self.counters.stale += 1
        elif frame.epoch > epoch:
            self._enter(followed, frame, step)
            self._apply(followed, arrived, step)
        elif frame.next_offset <= offset:
            if followed.is_blind and frame.first_offset == 0:  # its publisher went back to the epoch's start
                self._enter(followed, frame, step)
                self._apply(followed, arrived, step)
            else:
                self.counters.repeats += 1
        elif frame.first_offset <= offset:
            self._apply(followed, arrived, step)
        elif followed.is_lost:
            self._jump(followed, frame.first_offset)
            self._apply(followed, arrived, step)
        else:
            self._put_aside(followed, arrived)

    def _put_aside(self, followed: _Followed, arrived: _Arrived) -> None:
        first, size = arrived.frame.first_offset, arrived.size
        if not followed.aside:
            self.counters.holes += 1
            self.index.wait(followed.row.id, True)
        if first not in followed.aside and followed.aside_bytes + size <= ASIDE_BYTES:
            frame = arrived.frame  # its own bytes alone: what is kept must not keep the rest of its message
            alone = arrived.data[frame.at : frame.end]
            followed.aside[first] = _Arrived(frame._replace(at=0, end=size), alone, self.mark)
            followed.aside_bytes += size

    def _pass_holes(self, followed: _Followed, step: Step) -> None:
        """Apply all that is kept aside: claims among it outlive the epoch."""
        while followed.aside:  # behind one hole there may be another
            self.index.miss(followed.row.id)
            self._jump(followed, min(followed.aside))
            self._resume(followed, step)

    def _resume(self, followed: _Followed, step: Step) -> None:
        """Apply what was kept aside as far as it follows on now."""
        for first in sorted(followed.aside):
            if first > followed.position.offset:
                return
            kept = followed.aside.pop(first)
            followed.aside_bytes -= kept.size
            if kept.frame.next_offset > followed.position.offset:
                self._apply_events(followed, kept, step)
        self.index.wait(followed.row.id, False)

    # -- gaps ---------------------------------------------------------------------------------------------------------

    def _judge(self, now_s: float, instance: InstanceId, followed: _Followed, step: Step) -> None:
        if not followed.aside:
            followed.hole_since_s = None
        elif followed.hole_since_s is None:
            followed.hole_since_s = now_s
        if followed.evidence is not None and followed.evidence.said <= followed.position:
            followed.evidence = None
        run = ""
        if followed.evidence is not None:
            said, since_s, run = followed.evidence
            wait_s = self._gap_wait_s
        elif followed.hole_since_s is not None:
            said, since_s = followed.position, followed.hole_since_s
            wait_s = HOLE_MOST_S
        else:
            return
        if followed.is_lost or now_s - since_s < wait_s:
            return
        expected = followed.position
        self.counters.gaps += 1
        if said.epoch > expected.epoch:  # not even the start of its epoch came
            self._pass_holes(followed, step)
            followed.run = run_of(followed.holder, said.epoch) or run
            self._begin_blind(followed, said.epoch, 0)
            followed.position = Position(said.epoch, Offset(0))
        resumed = min(followed.aside, default=None)
        self.index.miss(instance)
        self._trouble(instance).gaps += 1
        if resumed is None:
            followed.is_lost = True
        else:
            self._jump(followed, resumed)
            self._resume(followed, step)
        step.gaps.append(Gap(instance, expected, None if resumed is None else Position(said.epoch, resumed)))
        log.warning(
            "stream.gap_found", instance=instance, epoch=expected.epoch, expected=expected.offset,
            published=said.offset, resumed=resumed,
        )  # fmt: skip

    def _jump(self, followed: _Followed, offset: Offset) -> None:
        self.may_lack_claims = True
        followed.position = Position(followed.position.epoch, offset)
        followed.is_lost = False

    # -- who is to restate what it holds --------------------------------------------------------------------------------

    def _trouble(self, instance: InstanceId) -> Trouble:
        self.found += 1
        return self._troubles.setdefault(instance, Trouble())

    def _check_healed(self, instance: InstanceId) -> None:
        view = self.index.view(instance)
        if view is not None and not view.missed:
            self._heal(instance)

    def _heal(self, instance: InstanceId) -> None:
        trouble = self._troubles.pop(instance, None)
        if trouble is not None:
            self.counters.gaps_repaired += trouble.gaps
            self.counters.digest_repaired += trouble.digests
            log.info("instance.healed", instance=instance, of=trouble.reasons())

    # -- frames → index and rows --------------------------------------------------------------------------------------

    def _enter(self, followed: _Followed, frame: ScannedFrame, step: Step) -> None:
        """Begin the frame's epoch where the frame begins."""
        if followed.aside:
            self.counters.gaps += 1  # the epoch went on behind the hole, and is over
            self.counters.gaps_repaired += 1
            self._pass_holes(followed, step)
        row = followed.row
        if followed.epoch_row.epoch < frame.epoch:
            self._end_epoch(followed, frame.wall_time_ns)
        followed.is_lost = followed.is_blind = False
        followed.position = Position(frame.epoch, frame.first_offset)
        followed.run = run_of(followed.holder, frame.epoch)
        followed.row = msgspec.structs.replace(
            row, epoch=frame.epoch, run=followed.run, first_seen_ns=row.first_seen_ns or frame.wall_time_ns,
            state=InstanceState.LIVE,
        )  # fmt: skip
        followed.epoch_row = EpochRow(
            instance=row.id, epoch=frame.epoch, started_ns=frame.wall_time_ns, run=followed.run
        )
        if frame.first_offset:
            self._begin_blind(followed, frame.epoch, frame.wall_time_ns)

    def _begin_blind(self, followed: _Followed, epoch: Epoch, wall_time_ns: int) -> None:
        instance = followed.row.id
        self.counters.blind_starts += 1
        self.may_lack_claims = True
        self._trouble(instance).blind += 1
        followed.is_blind = True
        run, known = followed.run, self._known.get(instance)
        if known is not None and (known.epoch, known.run) in ((epoch, run), (epoch, "")) and known.pools:
            followed.row = msgspec.structs.replace(known, state=InstanceState.LIVE, run=run)
            self.index.begin_blind(instance, epoch, known.pools)
        else:
            likely = followed.row.pools or (known.pools if known is not None else ())
            followed.row = msgspec.structs.replace(followed.row, epoch=epoch, pools=(), run=run)
            self.index.begin_blind(instance, epoch, likely=likely)
        followed.epoch_row = EpochRow(instance=instance, epoch=epoch, started_ns=wall_time_ns, run=run)
        log.info("instance.joined_midway", instance=instance, epoch=epoch, offset=followed.position.offset)

    def _apply(self, followed: _Followed, arrived: _Arrived, step: Step) -> None:
        self._apply_events(followed, arrived, step)
        if followed.aside:
            self._resume(followed, step)

    def _apply_events(self, followed: _Followed, arrived: _Arrived, step: Step) -> None:
        """Apply those events of a frame that are not applied yet; the first of them is the next."""
        frame, instance = arrived.frame, followed.row.id
        applied = self.index.apply(arrived.data, frame.at, followed.position.offset - frame.first_offset)
        self.counters.events += applied.events
        self.counters.blocks += applied.blocks
        self._note(followed, frame, applied)
        self.counters.frames += 1
        followed.is_lost = False
        followed.position = Position(frame.epoch, frame.next_offset)
        followed.row = msgspec.structs.replace(
            followed.row, last_frame_ns=max(followed.row.last_frame_ns, frame.wall_time_ns)
        )
        followed.epoch_row = msgspec.structs.replace(
            followed.epoch_row, next_offset=frame.next_offset, digest=frame.digest
        )
        self.newest_wall_ns = max(self.newest_wall_ns, frame.wall_time_ns)
        step.advanced[instance] = followed.position
        if self._is_gathering:
            self._dirty.add(instance)
        if self.sequence > self._settled and not self.index.agrees(instance, frame.digest):
            self.counters.digest_mismatches += 1
            self.doubt(instance)
            log.warning("digest.diverged", instance=instance, epoch=frame.epoch, offset=frame.next_offset)
        elif instance in self._troubles:
            self._check_healed(instance)

    def _note(self, followed: _Followed, frame: ScannedFrame, applied: Applied) -> None:
        """Follow what SQL keeps of a frame."""
        if applied.started is not None:
            self._note_start(followed, frame, applied.started)
        if applied.stopped is not None:
            followed.row = msgspec.structs.replace(followed.row, state=InstanceState.STOPPED)
            followed.epoch_row = msgspec.structs.replace(
                followed.epoch_row, ended_ns=frame.wall_time_ns, end_reason=applied.stopped.name.lower()
            )
        for tier, namespace, hashes, withdrawn in applied.claims:
            pool = self.index.pool_name(followed.row.id, tier)
            if pool is None:
                continue
            run = ClaimRun(
                pool=pool, namespace=namespace, hashes=hashes, instance=followed.row.id, at_ns=frame.wall_time_ns,
                withdrawn=withdrawn,
            )  # fmt: skip
            if self._watched is not None:
                self._watched.append(run)
            if self._is_gathering:
                self._claims.append(run)
                self._claims_bytes += len(hashes)

    def _note_start(self, followed: _Followed, frame: ScannedFrame, event: InstanceStarted) -> None:
        followed.is_blind = False
        self._heal(followed.row.id)  # it holds nothing, and its round follows by itself
        followed.declared = frozenset(namespace.id for namespace in event.namespaces)
        followed.row = msgspec.structs.replace(
            followed.row, epoch=event.epoch, engine=event.engine, version=event.version, topology=event.topology,
            pools=event.pools, state=InstanceState.LIVE,
        )  # fmt: skip
        for namespace in event.namespaces:
            self._namespaces.setdefault(namespace.id, namespace)
            if self._is_gathering:
                self._new_namespaces.append(
                    NamespaceRow(id=namespace.id, fields=namespace, first_seen_ns=frame.wall_time_ns)
                )


def _copy(trouble: Trouble | None) -> Trouble | None:
    return None if trouble is None else msgspec.structs.replace(trouble)


def _position_of(followed: _Followed) -> InstancePosition:
    return InstancePosition(
        instance=followed.row.id, epoch=followed.position.epoch, next_offset=followed.position.offset, run=followed.run
    )


def _contradicts(fence: Fence | None, epoch: Epoch, run: str) -> bool:
    """Whether a fence knows another run to have begun an epoch than the one that speaks of it."""
    return bool(run) and run_of(fence, epoch) not in ("", run)
