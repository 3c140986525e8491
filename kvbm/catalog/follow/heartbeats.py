"""Follows heartbeats: what they and the stream show of each instance's life goes to `liveness`, and what that decides
into the index.

It also sends pulses of the catalog's own, finds the instances that have decided what is not read (`lag`), and names
those whose heartbeats count for nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.lag import Backlog, StreamLag
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.members.liveness import (
    Exclude,
    ExcludedWhy,
    HeartbeatReceived,
    Input,
    LastHeartbeat,
    LifeState,
    Liveness,
    LivenessTicked,
    OwnPulse,
    StreamProgress,
    catalog_name,
    catalog_run,
    is_catalog,
)
from kvbm.catalog.sql.rows import InstanceStatus
from kvbm.core.errors import StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.core.parts import ALL_PARTS
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventStream, Heartbeat, Notice, Position

log = SafeLog()

OWN_CLUSTER = "_catalogs"  # of the pulses of a catalog that follows all clusters
_SENT_PULSES = 256
_MOST_OLD_PULSES = 1 << 16  # of instances that were forgotten; beyond them the first forgotten
_MOST_QUEUED = (1 << 32) - 1  # tokens

PEER_PULSES = 3  # of another catalog; when so many in a row have not come, it is gone

Listener = Callable[[InstanceId, LastHeartbeat], None]  # is told of each heartbeat that is believed


class HeartbeatFollower:
    """Follows the heartbeats of a cluster. One asyncio loop.

    Args:
        cluster: the one to follow; None for all. parts: only of instances in these.
        lag: what is not read yet may explain why a heartbeat counts for nothing.

    Attributes:
        liveness: who is alive. backlog: who has decided what is not read.
        ignored: whose heartbeats count for nothing, and the last of them.
        sending: tasks under way that send notices.
        own_name: under which this catalog sends its pulses. own_cluster: within which.
        peer_until_s: up to then another catalog that follows the same counts as there.
    """

    def __init__(
        self,
        stream: EventStream,
        sequencer: Sequencer,
        degraded: Degraded,
        cluster: str | None,
        liveness_s: float,
        lag: StreamLag,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> None:
        now_s = time.monotonic()
        self.liveness = Liveness(liveness_s)
        self.listeners: list[Listener] = []
        self.backlog = Backlog(1.25 * liveness_s)  # who is silent is left out before it counts as behind
        self.ignored: dict[InstanceId, Heartbeat] = {}
        self.sending: set[asyncio.Task[None]] = set()
        self.peer_until_s = -math.inf
        self._stream, self._sequencer, self._degraded = stream, sequencer, degraded
        self._cluster, self._lag, self._parts = cluster, lag, parts
        self._own_run = catalog_run(parts)
        self.own_name, self.own_cluster = catalog_name(self._own_run), cluster or OWN_CLUSTER
        # own ones that may still be heard: the time they bear, and when they were sent
        self._sent_pulses: dict[int, float] = {}
        self._sent_after_s = now_s  # the newest own pulse that came back was sent then: what comes now was sent later
        self._progress: dict[InstanceId, StreamProgress] = {}  # what liveness knows of the stream
        self._old_pulses: dict[InstanceId, int] = {}  # of the forgotten: the time their last one bears

    # -- tasks --------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Take every heartbeat that comes, for ever."""
        async for heartbeat in self._stream.watch_pulses(self._cluster, self._parts):
            self.on_heartbeat(heartbeat)

    async def tick(self) -> None:
        """Exclude the silent in time, for ever."""
        while True:
            self.look()
            await asyncio.sleep(self.liveness.tick_s)

    async def send_pulses(self) -> None:
        """Send pulses of the catalog's own, for ever: while they come back, silence is the silence of others."""
        while True:
            pulse = Heartbeat(
                instance=self.own_name,
                cluster=self.own_cluster,
                epoch=Epoch(1),
                published=Offset(0),
                wall_time_ns=time.time_ns(),
                run=self._own_run,
            )
            self._sent_pulses[pulse.wall_time_ns] = time.monotonic()
            if len(self._sent_pulses) > _SENT_PULSES:
                del self._sent_pulses[next(iter(self._sent_pulses))]
            try:
                await self._stream.send_pulse(pulse)
            except StreamError as error:
                log.debug("catalog.pulse_not_sent", why=str(error))
            await asyncio.sleep(self.liveness.own_pulse_s)

    # -- input --------------------------------------------------------------------------------------------------------

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take a heartbeat: an instance's, this catalog's own, or another catalog's."""
        name = heartbeat.instance
        if name == self.own_name:
            self.step(OwnPulse())
            self._sent_after_s = max(self._sent_after_s, self._sent_pulses.get(heartbeat.wall_time_ns, 0.0))
        elif is_catalog(name):
            if heartbeat.cluster == self.own_cluster:
                self.peer_until_s = time.monotonic() + PEER_PULSES * self.liveness.own_pulse_s
        elif self._old_pulses.get(name) != heartbeat.wall_time_ns:
            now_s = time.monotonic()
            is_renewed = self.liveness.renew(now_s, heartbeat)
            if not is_renewed:
                self.step(HeartbeatReceived(heartbeat))
            believed = self.liveness.last(name)
            if believed is not None and (
                is_renewed or believed.heartbeat == heartbeat
            ):  # else of a zombie, or of a second run
                read = self._sequencer.on_heartbeat(now_s, heartbeat)
                if self._sequencer.hear_namespaces(heartbeat):
                    self.liveness.note(name)
                self._sequencer.index.report_queued(name, min(max(0, heartbeat.queued_tokens), _MOST_QUEUED))
                for hear in self.listeners:
                    hear(name, believed)
                decided = Position(heartbeat.epoch, heartbeat.applied)
                self.backlog.on_heartbeat(now_s, self._sent_after_s, name, decided, read)

    def look(self) -> None:
        """Take note of the time: who has fallen silent by now, whose heartbeats count for nothing, and who is
        behind.
        """
        self.step(LivenessTicked())
        self._name_ignored()
        self._find_behind()

    def on_progress(self, instance: InstanceId) -> None:
        """The stream was read further: liveness takes note of what is news of an instance."""
        row = self._sequencer.instance_row(instance)
        if row is None:
            return
        epoch, owner = self._sequencer.position(instance).epoch, self._sequencer.ownership(instance)
        is_unreadable = self._sequencer.unreadable(instance) is not None
        is_stopped = row.state is InstanceStatus.STOPPED
        progress = StreamProgress(instance, epoch, is_stopped, owner.run, owner.life, is_unreadable)
        if self._progress.get(instance) != progress:
            self._progress[instance] = progress
            self.step(progress)

    def forget(self, instance: InstanceId, pulse_ns: int) -> None:
        """Nothing is known of the instance any more.

        Args:
            pulse_ns: time that its last heartbeat bears, which the stream keeps for a day: it is no sign of life.
        """
        self.liveness.forget(instance)
        self.backlog.forget(instance)
        self._progress.pop(instance, None)
        if self.ignored.pop(instance, None) is not None:
            self._degraded.clear(f"instance {instance}")
        self.expect_old_pulse(instance, pulse_ns)

    def expect_old_pulse(self, instance: InstanceId, pulse_ns: int) -> None:
        """The stream may give out an old heartbeat of a forgotten instance again; 0: it has it no more."""
        if pulse_ns:
            self._old_pulses.pop(instance, None)
            self._old_pulses[instance] = pulse_ns
            while len(self._old_pulses) > _MOST_OLD_PULSES:
                del self._old_pulses[next(iter(self._old_pulses))]
        else:
            self._old_pulses.pop(instance, None)

    def step(self, what: Input) -> None:
        """One step of liveness; what it decides is in answers from here on."""
        for effect in self.liveness.step(time.monotonic(), what):
            excluded = isinstance(effect, Exclude)
            if isinstance(effect, Exclude) and effect.why is not ExcludedWhy.RESTARTED:
                self.backlog.leave_out(effect.instance)  # no heartbeat of it comes, and it is left out of answers
            why = effect.why.value if isinstance(effect, Exclude) else "heard"
            self._sequencer.index.exclude(effect.instance, excluded)
            log.info(
                "instance.excluded" if excluded else "instance.returned",
                instance=effect.instance,
                epoch=effect.epoch,
                why=why,
            )

    # -- what is known ------------------------------------------------------------------------------------------------

    def cluster_of(self, instance: InstanceId) -> str | None:
        """The cluster an instance is of; None when nothing was read or heard of it."""
        row, pulse = self._sequencer.instance_row(instance), self.liveness.last(instance)
        return row.cluster if row is not None else pulse.heartbeat.cluster if pulse is not None else None

    def can_serve_requests(self, instance: InstanceId) -> bool:
        """Whether an instance is there to be asked."""
        return self.liveness.why(instance) is None and self.liveness.state(instance) is not LifeState.STOPPED

    def delays(self, instance: InstanceId) -> list[str]:
        """That what an instance has decided is not read, in words."""
        if instance not in self.backlog.behind:
            return []
        decided, age_s = self.backlog.decided(instance), self.backlog.age_s(time.monotonic(), instance)
        if decided is None:
            return [f"nothing was heard of it for {age_s:.1f} s"]
        read = self._sequencer.position(instance)
        reported = f"it has decided events up to offset {decided.offset} of epoch {decided.epoch}"
        return [
            f"{reported}, and {age_s:.1f} s later only those up to offset {read.offset} of epoch {read.epoch} are read"
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _name_ignored(self) -> None:
        """Name whose heartbeats count for nothing: to who looks at the catalog, and to the instance itself."""
        if self._lag.messages():
            return  # what is not read yet may explain it
        ignored = self.liveness.ignored(time.monotonic())
        for instance in self.ignored.keys() - ignored.keys():
            self._degraded.clear(f"instance {instance}")
        for instance, heartbeat in ignored.items():
            owner = self._sequencer.ownership(instance)
            why = (
                f"instance {instance} is ignored as run {heartbeat.run} of epoch {heartbeat.epoch}: on the stream its "
                "place "
                f"is that of run {owner.run or 'unknown'}, epoch {self._sequencer.position(instance).epoch}; stop one "
                "of "
                "the two, or give one another instance.id"
            )
            self._degraded.note(f"instance {instance}", why)
            if self.ignored.get(instance) != heartbeat:
                notice = Notice(instance=instance, cluster=heartbeat.cluster, run=heartbeat.run, why=why)
                task = asyncio.ensure_future(self._send(notice))
                self.sending.add(task)
                task.add_done_callback(self.sending.discard)
        self.ignored = ignored

    async def _send(self, notice: Notice) -> None:
        """Send a notice; one that is lost costs nothing."""
        try:
            await self._stream.send_notice(notice)
        except StreamError as error:
            log.debug("notice.not_sent", instance=notice.instance, why=str(error))

    def _find_behind(self) -> None:
        now_s, before = time.monotonic(), self.backlog.behind
        left_out: set[InstanceId] = set()
        for instance in self.backlog.judge(now_s, self._sequencer.position):
            why = self.liveness.why(instance)
            is_left_out = why is not None or not self._sequencer.position(instance).epoch
            # it has died in its restart, or before anything of it was read
            is_dead = is_left_out and self.liveness.state(instance) is LifeState.SILENT
            has_stopped = why is ExcludedWhy.STOPPED  # its last heartbeat may come after its stop
            if is_dead or has_stopped or self._sequencer.unreadable(instance) is not None:
                self.backlog.leave_out(instance)
                left_out.add(instance)
        behind = self.backlog.behind
        for instance in sorted(behind - before):
            log.warning("instance.behind", instance=instance, why=self.delays(instance)[0])
        for instance in sorted(before - behind - left_out):
            log.info("instance.caught_up", instance=instance)
