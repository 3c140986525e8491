"""Asks instances for snapshots.

`SnapshotAsker` decides when: a state machine without thread, clock and socket. `SnapshotRequests` drives it.

An instance that is suspect for something a snapshot can heal is asked at once, and again while it stays so. Several
catalogs may ask: the instance serves at most one snapshot in `snapshots.least_s`, and one serves every reader.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.members.liveness import LifeState
from kvbm.core.errors import StreamError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventStream

log = SafeLog()

ASK_AGAIN_S = 10.0
STEP_S = 0.1
UNTAKEN_AGAIN_S = 0.5  # nobody took the request: the instance may just be connecting


class SnapshotReason(NamedTuple):
    """Why an instance should take a snapshot of what it holds.

    Attributes:
        found: how many things were found that a snapshot heals; a larger number is news.
        once: a snapshot may not make it whole (the index refuses residencies): ask for news alone.
    """

    found: int
    once: bool = False


class _Asked(NamedTuple):
    found: int
    at_s: float
    again_s: float  # not before, unless there is news
    untaken: int  # requests in a row that nobody took


class SnapshotAsker:
    """Decides whom to ask. `now_s` is the same clock everywhere.

    Args:
        again_s: between two requests for the same suspicion; up to a quarter more, so that replicas do not ask
            together.
        chance: gives numbers from 0 to 1.
    """

    def __init__(self, again_s: float = ASK_AGAIN_S, chance: Callable[[], float] = random.random) -> None:
        self.asked = 0  # requests so far
        self._again_s = again_s
        self._chance = chance
        self._last: dict[InstanceId, _Asked] = {}

    def step(
        self, now_s: float, suspect: Mapping[InstanceId, SnapshotReason], can_serve: Callable[[InstanceId], bool]
    ) -> list[InstanceId]:
        """Whom to ask now; the caller reports to `answered` what became of each request.

        Args:
            suspect: everyone a snapshot would heal.
            can_serve: whether an instance is there to be asked.
        """
        for instance in [known for known in self._last if known not in suspect]:
            del self._last[instance]
        to_ask = []
        for instance, suspicion in suspect.items():
            last = self._last.get(instance)
            is_news = last is None or (suspicion.found > last.found and now_s >= last.at_s + UNTAKEN_AGAIN_S)
            is_due = last is not None and now_s >= last.again_s and not suspicion.once
            if (is_news or is_due) and can_serve(instance):
                again_s = now_s + self._again_s * (1 + self._chance() / 4)
                self._last[instance] = _Asked(suspicion.found, now_s, again_s, last.untaken if last is not None else 0)
                self.asked += 1
                to_ask.append(instance)
        return to_ask

    def answered(self, now_s: float, instance: InstanceId, taken: bool) -> None:
        """Note whether the instance took the request; one that did not is asked again sooner."""
        last = self._last.get(instance)
        if last is None:
            return
        if taken:
            self._last[instance] = last._replace(untaken=0)
            return
        soon_s = min(UNTAKEN_AGAIN_S * 2**last.untaken, self._again_s)
        self._last[instance] = last._replace(again_s=now_s + soon_s, untaken=min(last.untaken + 1, 16))

    def age_s(self, now_s: float, instance: InstanceId) -> float | None:
        """How long ago an instance that is still suspect was last asked; None when it is not, or was not."""
        last = self._last.get(instance)
        return None if last is None else now_s - last.at_s


class SnapshotRequests:
    """Asks instances of a stream for snapshots, once the stream is read. One asyncio loop.

    Attributes:
        asker: decides whom to ask.
        sending: tasks under way that ask.
    """

    def __init__(
        self, stream: EventStream, sequencer: Sequencer, heartbeats: HeartbeatFollower, again_s: float = ASK_AGAIN_S
    ) -> None:
        self.asker = SnapshotAsker(again_s)
        self.sending: set[asyncio.Task[None]] = set()
        self._stream, self._sequencer, self._heartbeats, self._again_s = stream, sequencer, heartbeats, again_s
        self._has_begun = False
        self._is_wanted = asyncio.Event()  # somebody has become suspect
        self._found = 0  # suspicions, as of the last look

    def begin(self) -> None:
        """The stream is read up to its end as of the start: ask from now on."""
        self._has_begun = True
        self._is_wanted.set()

    def look(self) -> None:
        """Ask at once if there is a new trouble."""
        if self._sequencer.suspicions.found != self._found:
            self._found = self._sequencer.suspicions.found
            self._is_wanted.set()

    def unhealed(self) -> list[InstanceId]:
        """Live instances that a snapshot would make whole."""
        state = self._heartbeats.liveness.state
        return [name for name in self._sequencer.suspicions.by_instance if state(name) is LifeState.LIVE]

    async def ask(self, instance: InstanceId) -> bool | None:
        """Ask an instance for a snapshot.

        Whether it took the request; None when there is no such instance. Raises StreamError.
        """
        cluster = self._heartbeats.cluster_of(instance)
        if cluster is None:
            return None
        return await self._stream.ask_snapshot(cluster, instance)

    async def run(self) -> None:
        """Ask whoever a snapshot would heal, at once and again, for ever."""
        while True:
            self._is_wanted.clear()
            if self._has_begun:
                view = self._sequencer.index.view
                suspicions = {
                    instance: SnapshotReason(trouble.found, once=(seen := view(instance)) is not None and seen.partial)
                    for instance, trouble in self._sequencer.suspicions.by_instance.items()
                }
                for instance in self.asker.step(time.monotonic(), suspicions, self._can_serve):
                    task = asyncio.create_task(self._ask(instance), name=f"catalog-ask-{instance}")
                    self.sending.add(task)
                    task.add_done_callback(self.sending.discard)
            try:
                async with asyncio.timeout(STEP_S):
                    await self._is_wanted.wait()
            except TimeoutError:
                pass

    async def find_unended(self) -> None:
        """Find instances that are not whole though nothing of them was missed: their first snapshot has not ended, or
        not well.
        """
        sequencer, index = self._sequencer, self._sequencer.index
        before: dict[InstanceId, Epoch] = {}
        while True:
            await asyncio.sleep(self._again_s)
            now = {
                instance: view.epoch
                for instance in index.instances()
                if instance not in sequencer.suspicions.by_instance and (view := index.view(instance)) is not None
                if view.missed and not view.stopped and not view.waiting
            }
            for instance, epoch in now.items():
                if before.get(instance) == epoch:
                    sequencer.suspicions.note(instance).unended += 1
                    self._is_wanted.set()
            before = now

    def _can_serve(self, instance: InstanceId) -> bool:
        return self._heartbeats.can_serve_requests(instance) and not self._sequencer.is_waiting(instance)

    async def _ask(self, instance: InstanceId) -> None:
        try:
            taken = await self.ask(instance)
        except StreamError as error:
            taken = False
            log.debug("snapshot.not_asked", instance=instance, why=str(error))
        self.asker.answered(time.monotonic(), instance, bool(taken))
        trouble = self._sequencer.suspicions.by_instance.get(instance)
        log.info("snapshot.asked", instance=instance, heard=bool(taken), reasons=trouble.reasons() if trouble else [])
