"""Who is alive: which instances' residencies answers leave out, decided from heartbeats and the stream.

A state machine without clock and socket: `Liveness.step(now_s, input)` gives effects. All times are the catalog's own,
monotonic; a sender's clock is never looked at.

    unheard ──new pulse──► live ◄──────────new pulse──────────┐
       │                    │ not heard for liveness_s         │
       └────────────────────┴────────────────────────────► silent ──► excluded, unless most fell silent together

An instance is excluded while one of these holds, and returned when none does:

- *stopped*: the stream has its clean stop, and no start of a later epoch. At once.
- *restarted*: a heartbeat, also a kept one, is of a later epoch than the stream has given yet. What the index knows is
  of a process that is gone, so it stays left out until the stream has the start, however alive the instance is.
- *newer*: a newer kvbm writes frames of its epoch that this one cannot read, so what it holds is not known, however
  alive it is.
- *silent*: not heard for `liveness_s`; or it was excluded when the stream began another epoch, in which it was not
  heard yet.

An instance is *awaited* while it is unheard, not silent yet, and known from the stream: its next heartbeat is on its
way, as after a catalog's own start. It may be sent prompts as one that is live, with a load that nobody knows.

An instance is *gone* while it is stopped, silent or unheard. Who is gone for long is forgotten; see
`kvbm.catalog.follow.forgetting`.

An instance differs from an older self by its run, not by its epoch alone: the fences in the stream name the run that
has its place (`StreamProgress.run`), and `StreamProgress.life` grows when they show that what was read before is of
another life; all heartbeats of that one are forgotten then. A heartbeat of another run than the holder's that claims no
later epoch is ignored, and whoever is ignored for `liveness_s` is named by `ignored`: nobody is left out of the view
silently.

Silence counts only while the catalog gets its own pulses: it sends pulses of its own, and when they do not come back by
the same server (for half of `liveness_s`), then it is the catalog that is cut off. Nobody is excluded then, and when
they come again, everybody has a whole `liveness_s` anew. When most fall silent together the view is kept as well: see
`_is_kept`. `freshness` says how old the kept view is.

The stream of pulses keeps the last one of every instance, also of the dead, and gives it to each new reader. So a pulse
counts as life only if the catalog has got a pulse of its own before (the stream has one order: what comes after its own
pulse was sent after it), or if another pulse of that instance came before it. One that is given twice counts once.
After a reconnection the last pulse of one that died meanwhile counts as heard when it comes: it is excluded
`liveness_s` after that.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, assert_never

from kvbm.catalog.members.roster import Roster
from kvbm.core.ids import Epoch, InstanceId
from kvbm.core.names import CATALOG_PULSES
from kvbm.core.parts import part_of
from kvbm.streams.base import Heartbeat

LIVENESS_S = 3.5  # three missed of one a second, and a margin
LEAST_MASS = 3  # fewer that fall silent together have died: one host's worth, nothing a network does to a cluster


class LifeState(Enum):
    """What is known of an instance's life."""

    LIVE = "live"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SILENT = "silent"
    UNHEARD = "unheard"


class ExcludedWhy(Enum):
    """Why an instance is excluded."""

    SILENT = "silent"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    NEWER = "newer"


class LastHeartbeat(NamedTuple):
    """An instance's last heartbeat, and when it came."""

    heartbeat: Heartbeat
    at_s: float


class HeartbeatReceived(NamedTuple):
    """A heartbeat came, not the catalog's own."""

    heartbeat: Heartbeat


class OwnPulse(NamedTuple):
    """The catalog has heard its own pulse. It sends one at least every `Liveness.own_pulse_s`."""


class LivenessTicked(NamedTuple):
    """Time has passed. Several times in each `liveness_s`: this is how late an exclusion may be."""


class StreamProgress(NamedTuple):
    """How far an instance was read on the stream: its epoch, and whether its clean stop was read.

    For each instance the stream moved on, and for each one that a checkpoint has brought. The same again changes
    nothing.

    Attributes:
        run: of the process that has its place on the stream; "" when no fence was read.
        life: another one than before: what was heard and read until now is of another life.
        unreadable: a newer kvbm writes its epoch, in frames that this one cannot read.
    """

    instance: InstanceId
    epoch: Epoch
    stopped: bool
    run: str = ""
    life: int = 0
    unreadable: bool = False


Input = HeartbeatReceived | OwnPulse | LivenessTicked | StreamProgress


class Exclude(NamedTuple):
    """Leave the instance's residencies out of answers from now on."""

    instance: InstanceId
    epoch: Epoch
    why: ExcludedWhy


class Return(NamedTuple):
    """They count again."""

    instance: InstanceId
    epoch: Epoch


Effect = Exclude | Return


class Freshness(NamedTuple):
    """How far the view can be trusted.

    Attributes:
        age_s: since when it is kept though instances may have died; 0 when every silence counts.
        why: "" when it is fresh, else in words.
    """

    age_s: float
    why: str


class Ignored(NamedTuple):
    """Heartbeats that come in an instance's name and count for nothing.

    Attributes:
        heartbeat: the last of them.
        since_s, last_s: when the first and the last came.
    """

    heartbeat: Heartbeat
    since_s: float
    last_s: float


class _Member:
    """One instance."""

    __slots__ = (
        "awaits_heartbeat",
        "heard_s",
        "holder",
        "is_silent",
        "is_stopped",
        "is_unreadable",
        "life",
        "pulse",
        "read_epoch",
        "since_s",
        "why",
    )

    def __init__(self, now_s: float) -> None:
        self.pulse: LastHeartbeat | None = None  # the last one believed, also a kept one
        self.heard_s: float | None = None  # the last sign of life; None: unheard
        self.since_s = now_s  # silence counts from here on
        self.read_epoch: Epoch | None = None  # epoch the stream has given; None: nothing of it was read
        self.is_stopped = False  # in that epoch
        self.is_unreadable = False
        self.is_silent = False  # for liveness_s
        self.awaits_heartbeat = False  # excluded when its epoch began, and no heartbeat since
        self.why: ExcludedWhy | None = None  # it is excluded
        self.holder = ""  # the run that has its place on the stream
        self.life = 0

    @property
    def newest(self) -> Epoch:
        """The newest epoch that was read or that a heartbeat named."""
        return max(self.read_epoch or Epoch(0), self.pulse.heartbeat.epoch if self.pulse is not None else Epoch(0))

    @property
    def is_ended(self) -> bool:
        """Whether nothing came after its clean stop."""
        return self.is_stopped and self.read_epoch == self.newest


class Liveness(Roster):
    """See the module. Belongs to one thread; `now_s` never goes back.

    Attributes:
        zombies: heartbeats of an epoch that is over, ignored.
        double_ids: heartbeats of a second run that claims the epoch of one that is alive, ignored. The first heard is
            believed while it is heard; the server's fence sees to it that only one of them publishes.
    """

    def __init__(self, liveness_s: float = LIVENESS_S) -> None:
        super().__init__()
        self.zombies = 0
        self.double_ids = 0
        self._liveness_s = liveness_s
        self._began_s: float | None = None
        self._own_s: float | None = None  # when the own pulse was heard last
        self._counting_s = 0.0  # silence counts from here on
        self._members: dict[InstanceId, _Member] = {}
        self._ignored: dict[InstanceId, Ignored] = {}
        self._waited: dict[InstanceId, None] = {}  # not silent, not ended; by `since_s`, the longest silent first
        self._kept: dict[
            InstanceId, float
        ] = {}  # silent and not excluded, and when most last were; -inf: no tick has judged

    @property
    def liveness_s(self) -> float:
        """An instance that is not heard for so long is silent."""
        return self._liveness_s

    @property
    def own_pulse_s(self) -> float:
        """The catalog sends a pulse of its own at least this often; it is cut off when it has not heard two."""
        return self._liveness_s / 4

    @property
    def tick_s(self) -> float:
        """A good pause between ticks."""
        return min(0.1, self._liveness_s / 10)

    def step(self, now_s: float, what: Input) -> list[Effect]:
        """Take one input; what is to be done, in order."""
        if self._began_s is None:
            self._began_s = now_s
        match what:
            case LivenessTicked():
                return self._tick(now_s)
            case HeartbeatReceived(heartbeat):
                return self._on_heartbeat(now_s, heartbeat)
            case StreamProgress():
                return self._on_progress(now_s, what)
            case OwnPulse():
                self._on_own_pulse(now_s)
                return []
            case _:
                assert_never(what)

    def renew(self, now_s: float, heartbeat: Heartbeat) -> bool:
        """Take a heartbeat that only goes on: nothing but the time it came changes, and nothing is to be done.

        False: `step` has to take it.

        What `step` would do with it is the same; nearly all heartbeats are such.
        """
        instance = heartbeat.instance
        member = self._members.get(instance)
        if member is None or member.pulse is None:
            return False
        last = member.pulse.heartbeat
        goes_on = (
            last.epoch == heartbeat.epoch == member.read_epoch
            and last.run == heartbeat.run
            and last.wall_time_ns != heartbeat.wall_time_ns
            and last.stopping == heartbeat.stopping
            and last.namespaces == heartbeat.namespaces
        )
        is_well = member.heard_s is not None and not (
            member.why or member.is_silent or member.is_stopped or member.is_unreadable or member.awaits_heartbeat
        )
        if not (goes_on and is_well) or instance in self._ignored:
            return False
        member.pulse = LastHeartbeat(heartbeat, now_s)
        member.heard_s = member.since_s = now_s
        del self._waited[instance]
        self._waited[instance] = None
        return True

    # -- asking -------------------------------------------------------------------------------------------------------

    def last(self, instance: InstanceId) -> LastHeartbeat | None:
        """The last heartbeat believed of an instance, also one the stream had kept: for its load, not its life."""
        member = self._members.get(instance)
        return None if member is None else member.pulse

    def state(self, instance: InstanceId) -> LifeState:
        """What is known of one instance, as of the last step."""
        member = self._members.get(instance)
        if member is None:
            return LifeState.UNHEARD
        if member.is_ended:
            return LifeState.STOPPED
        if member.heard_s is None:
            return LifeState.UNHEARD
        if member.is_silent:
            return LifeState.SILENT
        return LifeState.STOPPING if member.pulse is not None and member.pulse.heartbeat.stopping else LifeState.LIVE

    def states(self) -> Iterator[LifeState]:
        """Of everyone of whom a heartbeat came or something was read, in no order."""
        return (self.state(instance) for instance in self._members)

    def instances(self) -> list[InstanceId]:
        """Everyone of whom a heartbeat came or something was read."""
        return list(self._members)

    def listened_s(self, now_s: float) -> float:
        """For how long the catalog has heard its own pulses without a break; 0 while it does not."""
        return now_s - self._counting_s if self._gets_own_pulses(now_s) else 0.0

    def forget(self, instance: InstanceId) -> None:
        """Nothing of the instance is known any more. Its next sign of life is that of one that was never seen."""
        self._members.pop(instance, None)
        self._ignored.pop(instance, None)
        for known in (self._waited, self._kept):
            known.pop(instance, None)
        self._drop(instance)

    def excluded(self) -> dict[InstanceId, ExcludedWhy]:
        """The instances that are excluded."""
        return {instance: ExcludedWhy(why) for instance, why in self._excluded.items()}

    def why(self, instance: InstanceId) -> ExcludedWhy | None:
        """Why an instance is excluded; None when it is not."""
        member = self._members.get(instance)
        return None if member is None else member.why

    def loads_are_fresh(self, now_s: float) -> bool:
        """Whether `load_age_s` is 0 of everybody a prompt may be sent to."""
        if self._awaited or self._kept or not self._present:
            return False
        return now_s - self._members[next(iter(self._waited))].since_s < self._liveness_s / 2

    def load_age_s(self, now_s: float, instance: InstanceId) -> float | None:
        """How old what is known of an instance's load is: 0 while that is fresh;

        None: nothing was heard, or one knows not since when.
        """
        member = self._members.get(instance)
        if member is None or member.pulse is None or member.heard_s is None:
            return None
        age_s = now_s - member.pulse.at_s
        return round(age_s, 3) if age_s >= self._liveness_s / 2 else 0.0

    def candidates(self) -> list[InstanceId]:
        """Instances a prompt may be routed to, by name: those that `may_serve`; when nobody is heard, those known and
        not stopped.
        """
        if self._present:
            return sorted(self.serving())
        return sorted(
            instance for instance in self._members if self.state(instance) in (LifeState.SILENT, LifeState.UNHEARD)
        )

    def ignored(self, now_s: float) -> dict[InstanceId, Heartbeat]:
        """Instances in whose name heartbeats have come for `liveness_s` that count for nothing, and the last of
        them.
        """
        self._ignored = {
            instance: ignored
            for instance, ignored in self._ignored.items()
            if now_s - ignored.last_s < self._liveness_s
        }
        return {
            instance: ignored.heartbeat
            for instance, ignored in self._ignored.items()
            if ignored.last_s - ignored.since_s >= self._liveness_s
        }

    def is_fresh(self, now_s: float) -> bool:
        """Whether `freshness` says 0."""
        return self._gets_own_pulses(now_s) and not self._kept

    def freshness(self, now_s: float) -> Freshness:
        """How old the view is that answers rest on."""
        if not self._gets_own_pulses(now_s):
            last_s = self._own_s if self._own_s is not None else self._began_s if self._began_s is not None else now_s
            return Freshness(now_s - last_s, "the catalog does not hear its own pulse, so nobody's silence counts")
        if self._kept:
            oldest_s = min(self._members[instance].since_s for instance in self._kept)
            return Freshness(
                now_s - oldest_s, f"{len(self._kept)} instances, most of the cluster, fell silent together and are kept"
            )
        return Freshness(0.0, "")

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _gets_own_pulses(self, now_s: float) -> bool:
        return self._own_s is not None and now_s - self._own_s < self._liveness_s / 2

    def _on_own_pulse(self, now_s: float) -> None:
        if not self._gets_own_pulses(now_s):
            self._counting_s = now_s
            for instance in self._kept:  # they too have a whole period anew
                self._members[instance].is_silent = False
                self._waited[instance] = None
                self._note_presence(instance, self._members[instance])
                self._note_awaited(instance, self._members[instance])
            self._kept.clear()
        self._own_s = now_s

    def _on_heartbeat(self, now_s: float, heartbeat: Heartbeat) -> list[Effect]:
        member = self._member(now_s, heartbeat.instance)
        last = member.pulse.heartbeat if member.pulse is not None else None
        if last == heartbeat:
            return []
        # a later epoch that was announced, never came to the stream and is silent now, was given up: the stream's goes
        # on
        is_given_up = member.is_silent and heartbeat.epoch == member.read_epoch and not member.is_stopped
        is_holder = heartbeat.run == member.holder
        takes_back = (
            is_holder and last is not None and last.run != heartbeat.run and heartbeat.epoch == member.read_epoch
        )
        if heartbeat.epoch < member.newest and not is_given_up and not takes_back:
            self.zombies += 1
            self._ignore(now_s, heartbeat)
            return []
        is_double = last is not None and last.epoch == heartbeat.epoch and last.run != heartbeat.run
        if is_double and not is_holder and member.heard_s is not None and not member.is_silent:
            self.double_ids += 1
            self._ignore(now_s, heartbeat)
            return []
        ignored = self._ignored.get(heartbeat.instance)
        if ignored is not None and ignored.heartbeat.run == heartbeat.run:
            del self._ignored[heartbeat.instance]
        member.pulse = LastHeartbeat(heartbeat, now_s)
        if last is None or last.namespaces != heartbeat.namespaces:
            self.note(heartbeat.instance)
        if self._own_s is not None or last is not None:
            member.heard_s = now_s
            member.is_silent = member.awaits_heartbeat = False
            self._wait(now_s, heartbeat.instance, member)
        return self._settle(heartbeat.instance, member)

    def _ignore(self, now_s: float, heartbeat: Heartbeat) -> None:
        known = self._ignored.get(heartbeat.instance)
        since_s = known.since_s if known is not None and known.heartbeat.run == heartbeat.run else now_s
        self._ignored[heartbeat.instance] = Ignored(heartbeat, since_s, now_s)

    def _on_progress(self, now_s: float, what: StreamProgress) -> list[Effect]:
        instance, epoch, stopped, run, life, unreadable = what
        member = self._member(now_s, instance)
        if life != member.life:
            self._begin_life(now_s, member, what)
        member.holder, member.is_unreadable = run, unreadable
        if member.read_epoch is None or epoch > member.read_epoch:
            is_heard = (
                not member.is_silent
                and member.heard_s is not None
                and member.pulse is not None
                and member.pulse.heartbeat.epoch >= epoch
            )
            member.awaits_heartbeat = member.why is not None and not is_heard
            member.read_epoch, member.is_stopped = epoch, stopped
            if not is_heard and not member.is_silent and not member.is_ended:
                self._wait(now_s, instance, member)
        elif epoch == member.read_epoch:
            member.is_stopped = member.is_stopped or stopped
        if member.is_ended:
            self._waited.pop(instance, None)
        self.note(instance)
        return self._settle(instance, member)

    def _begin_life(self, now_s: float, member: _Member, what: StreamProgress) -> None:
        """No earlier heartbeat of an instance counts any more, but those of its new holder."""
        member.life = what.life
        member.read_epoch, member.is_stopped = None, False
        if member.pulse is not None and member.pulse.heartbeat.run != what.run:
            member.pulse = member.heard_s = None
            member.is_silent = False
            self._wait(now_s, what.instance, member)

    def _tick(self, now_s: float) -> list[Effect]:
        if not self._gets_own_pulses(now_s):
            return []
        while self._waited:
            instance = next(iter(self._waited))
            member = self._members[instance]
            if now_s - self._basis(member) < self._liveness_s:
                break
            del self._waited[instance]
            member.is_silent = True
            self._note_presence(instance, member)
            self._note_awaited(instance, member)
            if member.why is None and member.read_epoch:
                self._kept[instance] = -math.inf
        return self._judge(now_s) if self._kept else []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _member(self, now_s: float, instance: InstanceId) -> _Member:
        member = self._members.get(instance)
        if member is None:
            member = self._members[instance] = _Member(now_s)
            self._waited[instance] = None
        return member

    def _wait(self, now_s: float, instance: InstanceId, member: _Member) -> None:
        """Silence counts from now on."""
        member.since_s = now_s
        self._kept.pop(instance, None)
        self._waited.pop(instance, None)
        self._waited[instance] = None

    def _note_presence(self, instance: InstanceId, member: _Member) -> None:
        is_present = member.heard_s is not None and not member.is_silent and not member.is_ended
        is_stopping = member.pulse is not None and member.pulse.heartbeat.stopping
        self._set_present(instance, is_present, is_present and not is_stopping)

    def _note_awaited(self, instance: InstanceId, member: _Member) -> None:
        is_known = bool(member.read_epoch) and not member.is_ended and member.why is None
        is_stopping = member.pulse is not None and member.pulse.heartbeat.stopping
        self._set_awaited(instance, is_known and member.heard_s is None and not member.is_silent and not is_stopping)

    def _basis(self, member: _Member) -> float:
        return max(member.since_s, self._counting_s)

    def _settle(self, instance: InstanceId, member: _Member) -> list[Effect]:
        """Exclude or return what an input has changed; a silence is judged by the next tick."""
        self._note_presence(instance, member)
        effects = self._excluded_or_returned(instance, member)
        self._note_awaited(instance, member)
        return effects

    def _excluded_or_returned(self, instance: InstanceId, member: _Member) -> list[Effect]:
        if not member.read_epoch and not member.is_unreadable:
            return []  # nothing of it is in the index: of one that is new a heartbeat may come before its start
        why: ExcludedWhy | None
        if member.is_unreadable:
            why = ExcludedWhy.NEWER
        elif member.newest > (member.read_epoch or Epoch(0)):
            why = ExcludedWhy.RESTARTED
        elif member.is_stopped:
            why = ExcludedWhy.STOPPED
        elif member.awaits_heartbeat or (member.is_silent and member.why is ExcludedWhy.SILENT):
            why = ExcludedWhy.SILENT
        else:
            why = None
        before = member.why
        self._note_why(instance, member, why)
        if why is not None:
            self._kept.pop(instance, None)
        elif member.is_silent:
            self._kept.setdefault(instance, -math.inf)
        if (before is None) == (why is None):
            return []
        epoch = member.read_epoch or Epoch(0)
        return [Return(instance, epoch) if why is None else Exclude(instance, epoch, why)]

    def _note_why(self, instance: InstanceId, member: _Member, why: ExcludedWhy | None) -> None:
        member.why = why
        if why is None:
            self._excluded.pop(instance, None)
        else:
            self._excluded[instance] = why.value

    def _judge(self, now_s: float) -> list[Effect]:
        """Exclude those who are silent, unless most fell silent with them.

        When what kept most of them silent is over, they are heard one after the other, as each has its next heartbeat:
        for half of `liveness_s` after the first of them are no longer most, the rest is still kept.
        """
        heard = sorted(
            self._basis(member)
            for member in self._members.values()
            if member.heard_s is not None and member.why is None and not member.is_ended
        )
        quiet_until = bisect_right(heard, now_s - self._liveness_s / 2)
        effects: list[Effect] = []
        for instance, kept_s in list(self._kept.items()):
            member = self._members[instance]
            if self._is_kept(member, heard, quiet_until):
                self._kept[instance] = now_s
            elif member.heard_s is None or now_s - kept_s >= self._liveness_s / 2:
                del self._kept[instance]
                self._note_why(instance, member, ExcludedWhy.SILENT)
                effects.append(Exclude(instance, member.newest, ExcludedWhy.SILENT))
        return effects

    def _is_kept(self, member: _Member, heard: list[float], quiet_until: int) -> bool:
        """Whether so many fell silent with this instance that something between them and the server is the likelier
        reason.

        These are the instances quiet for half of `liveness_s`, whose silence began within one `liveness_s` of this
        one's; they are most when they are at least LEAST_MASS and more than half of those that were heard then or
        since. It ends when they are heard again, or half of `liveness_s` after so many others are that they are no
        longer most. One that died before or after them, alone, is not kept. An instance that was never heard fell
        silent with nobody: it is kept only while nobody at all is heard.

        Args:
            heard: since when those who were heard and are not excluded are silent, sorted.
            quiet_until: how many of them are quiet.
        """
        if member.heard_s is None:
            return quiet_until == len(heard) and len(self._kept) >= LEAST_MASS
        basis_s = self._basis(member)
        first = bisect_left(heard, basis_s - self._liveness_s)
        last = min(bisect_right(heard, basis_s + self._liveness_s), quiet_until)
        return last - first >= LEAST_MASS and 2 * (last - first) > len(heard) - first


def catalog_run(parts: tuple[int, ...]) -> str:
    """A random name for this process, of which the pulse comes back to who hears these parts alone."""
    while True:
        run = secrets.token_hex(4)
        if part_of(catalog_name(run)) in parts:
            return run


def catalog_name(run: str) -> InstanceId:
    """The name under which a catalog sends its own pulses.

    Args:
        run: random, of this process; so the pulse that comes back is not one that the stream has kept of another.
    """
    return InstanceId(CATALOG_PULSES + run)


def is_catalog(instance: InstanceId) -> bool:
    """Whether a pulse is a catalog's own, this one's or another's: no instance of that name holds anything."""
    return instance.startswith(CATALOG_PULSES)
