"""Forgets instances that are gone: for long (`catalog.forget_s`), or because an operator says so.

Decision 084 has the reasons.

SQL comes first: one transaction removes an instance's rows and keeps a *mark*, the sequence of its last message. Then
memory lets go of it. The mark is why nobody brings the instance back from what was said before: a catalog that reads
the stream anew passes over messages up to it, and a batch cut before it stores no rows of the instance. Its claims are
in SQL by then, and stay. A message after it makes the instance known again, as one that was never seen.

Several catalogs of one database learn of marks from there. One that hears the instance does not follow: it asks it for
a snapshot, whose messages end the mark for everybody. One whose database was restored from an older copy forgets there
again what it has marks of. A mark goes once the stream holds nothing up to it, and no heartbeat of before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.sql_writer import SqlWriter
from kvbm.catalog.members.downtime import Downtimes
from kvbm.catalog.members.liveness import LifeState
from kvbm.catalog.sql.rows import ForgottenRow
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.errors import CatalogError, StreamError
from kvbm.core.ids import InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventStream

log = SafeLog()

PAUSE_S = 5.0  # between two looks; another catalog's word is heard within it
MOST_AT_ONCE = 500  # in one transaction
CONFIRMED_S = 10.0  # the stream was read to its end as of then, or the catalog does not listen
OLD_PULSES_S = 25 * 3600.0  # the server keeps heartbeats for a day
_STORE_LOOKS, _STORE_LOOK_S = 40, 0.05
_LEAST_MARK_S = 60.0  # a batch under way may still have rows of the instance
_SAVE_MOST_S = 600.0
NAMESPACES_EVERY_S = 60.0
_SLICE = 500  # names looked at between two other things


class NotForgottenError(CatalogError):
    """An instance is not forgotten. The message says why, and what to do.

    Attributes:
        code: "instance_unknown" and "instance_alive", which a retry does not change; "not_now", which it may.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Forgetting:
    """Forgets instances. One asyncio loop.

    Args:
        cluster: whose instances; None: of all clusters.
        applying: held by whoever applies messages to the sequencer.
        let_go: tells whoever else keeps something of an instance.

    Attributes:
        downtimes: for how long instances are gone.
    """

    def __init__(
        self,
        store: SqlStore,
        stream: EventStream,
        sequencer: Sequencer,
        writer: SqlWriter,
        heartbeats: HeartbeatFollower,
        lag: StreamLag,
        applying: asyncio.Lock,
        let_go: Callable[[InstanceId], None],
        cluster: str | None,
        forget_s: float,
    ) -> None:
        self.pause_s = min(PAUSE_S, max(0.1, forget_s / 20))
        self.downtimes = Downtimes(forget_s, most_step_s=2 * self.pause_s)
        self._store, self._stream, self._sequencer, self._writer = store, stream, sequencer, writer
        self._heartbeats, self._lag, self._applying, self._let_go_of = heartbeats, lag, applying, let_go
        self._cluster, self._forget_s = cluster, forget_s
        self._save_s = min(_SAVE_MOST_S, forget_s / 100)
        self._saved_s = time.monotonic()
        self._namespaces_s = time.monotonic()  # when those that nobody declares were looked for
        self._loaded = -1  # the writer's `read_again` then: SQL may know others since
        for mark in sequencer.forgotten.values():
            heartbeats.expect_old_pulse(mark.instance, mark.pulse_ns)

    async def run(self) -> None:
        """Forget whoever is due, for ever. While the database or the stream is away, nobody is."""
        while True:
            try:
                await self.step()
            except (CatalogError, StreamError) as error:
                log.debug("forgetting.waits", why=str(error))
            await asyncio.sleep(self.pause_s)

    async def step(self) -> None:
        """Look at everyone once, and do what is due. Raises CatalogError, StreamError."""
        await self._look()
        if self._writer.is_behind or not self._writer.name:
            return
        if self._loaded != self._writer.read_again:
            again = self._writer.read_again
            await self._store.drop_marks(self._writer.name, [])
            self.downtimes.load(await self._store.instance_names(self._cluster), await self._store.absences())
            self._loaded = again
        await self._follow_marks()
        await self._drop_marks()
        while self._lag.messages() == 0 and (due := self.downtimes.due(MOST_AT_ONCE)):
            if not await self._forget(due, "gone for long"):
                break
        if time.monotonic() - self._namespaces_s >= NAMESPACES_EVERY_S and self._lag.messages() == 0:
            self._namespaces_s = time.monotonic()
            await self.forget_namespaces()
        if time.monotonic() - self._saved_s >= self._save_s:
            self._saved_s = time.monotonic()
            gone, here = self.downtimes.rows(self._save_s)
            await self._store.note_absences(gone, here)
            self.downtimes.stored(gone, here)

    async def forget(self, instance: InstanceId) -> None:
        """Forget one instance now, because an operator says so. It must be gone.

        Raises:
            NotForgottenError: it is alive, unknown, or not known to be gone.
            CatalogError: the database does not answer; nothing was forgotten.
        """
        await self._look()
        if why := self._why_not_now():
            raise NotForgottenError(why, "not_now")
        liveness = self._heartbeats.liveness
        if not liveness.is_gone(instance):
            last, now_s = liveness.last(instance), time.monotonic()
            age_s = now_s - last.at_s if last is not None else 0.0
            raise NotForgottenError(
                f"instance {instance!r} is alive, heard {age_s:.1f} s ago; stop it first, or leave it", "instance_alive"
            )
        if instance not in self.downtimes:
            raise NotForgottenError(
                f"no instance {instance!r} is known; GET /v1/instances has their names", "instance_unknown"
            )
        for _ in range(_STORE_LOOKS):  # SQL may not have yet what it said last
            if self._sequencer.spoke(instance) <= self._writer.stored:
                break
            await asyncio.sleep(_STORE_LOOK_S)
        if not await self._forget([instance], "by name"):
            raise NotForgottenError(
                f"instance {instance!r} has spoken just now, or another catalog has read further; ask again in a "
                "moment",
                "not_now",
            )

    async def forget_namespaces(self) -> None:
        """Forget the namespaces that went with the last who named them. Raises CatalogError."""
        sequencer, read = self._sequencer, self._sequencer.sequence
        unused, let_go = sequencer.known_namespaces.undeclared(), sequencer.known_namespaces.take_let_go()
        if not unused and not let_go:
            return
        try:
            claimed = await self._store.forget_namespaces(self._writer.name, read, unused | let_go, sequencer.followed)
        except CatalogError:
            sequencer.known_namespaces.tell(unused)  # SQL may have their rows no more
            raise
        if claimed is None:
            # Another catalog has stored what this one has not read; rows that are left are found at the next start
            return
        async with self._applying:
            gone = (unused & sequencer.known_namespaces.undeclared()) - claimed
            sequencer.forget_namespaces(gone)
            sequencer.known_namespaces.tell(unused - gone - claimed)  # named meanwhile: SQL has their rows no more
        if gone or let_go:
            log.info("namespaces.forgotten", namespaces=len(gone | let_go), known=len(sequencer.namespaces()))

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Take note of who is gone now."""
        now_s, liveness, sequencer = time.monotonic(), self._heartbeats.liveness, self._sequencer
        confirmed = self._lag.confirmation.age_s(now_s) < CONFIRMED_S
        self.downtimes.listen(now_s, confirmed and liveness.listened_s(now_s) > 0)
        names = list({*liveness.instances(), *sequencer.followed, *self.downtimes.gone()})
        for at in range(0, len(names), _SLICE):
            if at:
                await asyncio.sleep(0)
            for instance in names[at : at + _SLICE]:
                self.downtimes.note(instance, liveness.is_gone(instance), sequencer.spoke(instance))

    def _why_not_now(self) -> str:
        """Why it is not known who is alive; "" when it is."""
        now_s = time.monotonic()
        liveness_s = self._heartbeats.liveness.liveness_s
        listened_s = self._heartbeats.liveness.listened_s(now_s)
        if listened_s < liveness_s:
            return (
                f"the catalog has listened to heartbeats for {listened_s:.1f} s without a break, and a live instance "
                "is heard "
                f"within {liveness_s:g} s; ask again in {liveness_s:g} s"
            )
        if (unread := self._lag.messages()) or self._lag.confirmation.age_s(now_s) >= CONFIRMED_S:
            return f"the stream is not read to its end ({unread} messages wait); ask again once /readyz is not degraded"
        if self._writer.is_behind or not self._writer.name:
            return "the database is being brought up to date; ask again when /readyz is not degraded"
        return ""

    async def _forget(self, instances: Sequence[InstanceId], why: str) -> list[InstanceId]:
        """Forget instances in SQL, then here. Returns which. Raises CatalogError: none is."""
        read, spoke = self._sequencer.sequence, self._sequencer.spoke
        # SQL has all claims of these, and needs none of their messages any more
        marks = [self._mark(instance, read) for instance in instances if spoke(instance) <= self._writer.stored]
        if not marks or not await self._store.forget(marks, read):
            return []  # another catalog has stored what this one has not read
        forgotten = [mark.instance for mark in marks if await self._let_go(mark)]
        log.info("instances.forgotten", instances=forgotten, why=why)
        return forgotten

    def _mark(self, instance: InstanceId, read: int) -> ForgottenRow:
        last = self._heartbeats.liveness.last(instance)
        is_old = self.downtimes.unheard_s(instance) >= OLD_PULSES_S
        return ForgottenRow(
            instance=instance,
            stream=self._writer.name,
            sequence=self._sequencer.spoke(instance) or read,
            until_ns=time.time_ns() + int((_LEAST_MARK_S if is_old else OLD_PULSES_S) * 1e9),
            pulse_ns=last.heartbeat.wall_time_ns if last is not None else 0,
            declared=self._sequencer.instance_row(instance),
        )

    async def _let_go(self, mark: ForgottenRow) -> bool:
        """Forget an instance in memory, unless it has spoken since: then SQL gets its rows with what it said."""
        instance = mark.instance
        async with self._applying:  # no checkpoint begins meanwhile
            if mark.stream != self._writer.name or self._sequencer.spoke(instance) > mark.sequence:
                return False
            self._sequencer.forget(mark)
            self._heartbeats.forget(instance, mark.pulse_ns)
            self.downtimes.forget(instance)
            self._let_go_of(instance)
        return True

    async def _follow_marks(self) -> None:
        """Forget whom another catalog has forgotten; and in a database that was restored, whom this one has."""
        sequencer, liveness = self._sequencer, self._heartbeats.liveness
        stream, read = self._writer.name, sequencer.sequence
        marks = {mark.instance: mark for mark in await self._store.forgotten(stream)}
        followed = []
        for instance, mark in marks.items():
            mine = sequencer.forgotten.get(instance)
            if mine is not None and mine.sequence >= mark.sequence:
                continue
            if sequencer.spoke(instance) > mark.sequence or mark.sequence > read:
                continue  # it has spoken since, and its next rows end the mark; or its last message is to be read yet
            if liveness.state(instance) in (LifeState.LIVE, LifeState.STOPPING):
                cluster = self._heartbeats.cluster_of(instance)
                if cluster is not None:
                    await self._stream.ask_snapshot(cluster, instance)
                continue
            if await self._let_go(mark):
                followed.append(instance)
        if followed:
            log.info("instances.forgotten", instances=followed, why="by another catalog")
        lost = [
            mark
            for name, mark in sequencer.forgotten.items()
            if name not in marks and name not in sequencer.followed and mark.stream == stream
        ]
        for at in range(0, len(lost), MOST_AT_ONCE):
            await self._store.forget(lost[at : at + MOST_AT_ONCE], read)

    async def _drop_marks(self) -> None:
        """Let go of marks that nothing can need any more."""
        now_ns = time.time_ns()
        old = [mark for mark in self._sequencer.forgotten.values() if mark.until_ns <= now_ns]
        if not old:
            return
        first = await self._stream.first_sequence()
        over = [mark.instance for mark in old if mark.sequence < first]
        await self._store.drop_marks(self._writer.name, over)
        for instance in over:
            self._sequencer.expect_no_more(instance)
            self._heartbeats.expect_old_pulse(instance, 0)
