"""Who watches what: feeds of changes, each within what its caller may know of.

A watch of blocks reads the change log at its own speed and keeps its place in it; one that is so slow that the log has
gone on without it is told what it has missed, and goes on from now. So what a slow client costs does not grow. A watch
of a prefix asks the index again when something has changed, and tells the answer when that is another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.access.limits import FeedPlace, LimitError, Room
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.index.change_log import ChangeKind, ChangeLog, LogEntry, LogPlace
from kvbm.catalog.index.entry_events import EntryReader
from kvbm.config.settings import LimitSettings
from kvbm.core.answers import InstanceHolding, LookupAnswer, MissedWhy
from kvbm.core.events import PoolStated
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.core.watch_events import (
    MAX_KNOWN,
    BlockChanges,
    InstanceChange,
    KnownInstances,
    Missed,
    PrefixDepths,
    WatchBegun,
    WatchEnded,
    WatchEvent,
)

KEEPALIVE_S = 5.0
JUDGE_S = 1.0  # who asks may have lost its token
_GATHER_S = 0.02  # what comes within it goes out together
_PREFIX_S = 0.2  # between two looks at a prefix
_ENTRIES = 64  # looked at between two other things
_STATES = 128


class ToldEvent(NamedTuple):
    """An event, and the place to go on from after it; None where more of the same place follows."""

    event: WatchEvent
    place: LogPlace | None


class State(NamedTuple):
    """What watches tell of an instance beside its blocks."""

    excluded: str = ""
    hidden: tuple[str, ...] = ()
    suspect: bool = False


ORDINARY = State()


class WatchAsked(NamedTuple):
    """What is asked for, parsed.

    Attributes:
        hashes: of a prefix, packed; None for blocks.
        after: as the client gave it.
    """

    namespace: Namespace | NamespaceId | None
    instance: InstanceId | None
    hashes: bytes | None
    limit: int
    after: str | None


class Watching(Protocol):
    """One watch: a state machine."""

    caller: Caller

    @property
    def place(self) -> LogPlace:
        """Behind what was told."""

    def begin(self) -> list[ToldEvent]:
        """What is told first."""

    def step(self) -> list[ToldEvent] | None:
        """What is to be told now, perhaps nothing; None: nothing until something changes."""

    async def wait(self, timeout_s: float) -> None:
        """Wait until `step` may have more."""


class WatchedCluster:
    """What watches look at, beside the log."""

    def __init__(self, log: ChangeLog, sequencer: Sequencer, heartbeats: HeartbeatFollower, queries: Queries) -> None:
        self.log, self.queries = log, queries
        self.sequencer, self.visibility = sequencer, queries.visibility
        self._heartbeats = heartbeats

    @property
    def behind(self) -> frozenset[InstanceId]:
        """Instances that have decided what is not read."""
        return self._heartbeats.backlog.behind

    def state(self, instance: InstanceId) -> State:
        """Of an instance, as answers take it."""
        view = self.sequencer.index.view(instance)
        if view is None:
            return ORDINARY
        excluded, hidden = ORDINARY.excluded, ORDINARY.hidden
        if view.excluded:
            why = self._heartbeats.liveness.why(instance)
            excluded, hidden = why.value if why is not None else "excluded", _hidden(view.pools)
        return State(excluded, hidden, view.suspect or instance in self.behind)

    def epoch(self, instance: InstanceId) -> int:
        """As far as the stream was read."""
        return self.sequencer.position(instance).epoch

    def may_see(self, caller: Caller, namespace: NamespaceId) -> bool:
        """Whether a caller may know of a namespace's blocks."""
        return caller.sees_all or self.visibility.fields(caller, namespace) is not None


def _hidden(pools: tuple[PoolStated, ...]) -> tuple[str, ...]:
    """Tiers of an excluded instance that answers leave out."""
    reaches = {pool.tier: pool.reach for pool in pools}
    return tuple(tier.name for tier in Tier if reaches.get(tier, Reach.INSTANCE) == Reach.INSTANCE)


class BlocksWatch:
    """A watch of the blocks of a namespace, of an instance, or of both.

    Attributes:
        caller: who asks, as of now.
        place: behind what was told.
    """

    def __init__(self, cluster: WatchedCluster, asked: WatchAsked, caller: Caller) -> None:
        self.caller = caller
        self._cluster, self._log, self._asked = cluster, cluster.log, asked
        self._serial, self._run = cluster.log.last, cluster.log.run
        self.place = cluster.log.place()
        self._reader = EntryReader(cluster.log.decode, self._may_see)
        self._met: set[InstanceId] = set()  # of a caller of some tenants: the instances it may have heard of
        self._told: dict[InstanceId, State] = {}  # which are not ordinary
        self._behind = cluster.behind
        self._states: Iterator[list[ToldEvent]] = iter(())

    # -- as `Watching` ------------------------------------------------------------------------------------------------

    def begin(self) -> list[ToldEvent]:
        """See `Watching`."""
        now, events, with_names = self._log.place(), [], False
        if self._asked.after is not None:
            place = self._log.place_of(self._asked.after, self.caller.sees_all)
            serial = self._log.find(place) if place is not None else None
            if serial is None:
                why = (
                    "the catalog no longer knows what has changed since" if place is not None else "this is no position"
                )
                events.append(ToldEvent(Missed(after=self._asked.after, until=self._text(now), why=why), now))
            else:
                assert place is not None
                self._serial, self.place, now = serial, place, place
                with_names = place.run != self._log.run
        self._begin_states(with_names)
        why_none = self._cluster.queries.misses.watch(self.caller, self._asked.namespace)
        begun = WatchBegun(position=self._text(now), keepalive_s=KEEPALIVE_S, missed=why_none)
        return [ToldEvent(begun, now), *events]

    def step(self) -> list[ToldEvent] | None:
        """See `Watching`."""
        if (states := next(self._states, None)) is not None:
            return states
        if self._run != self._log.run:
            return self._overrun("the stream was replaced")
        told: list[ToldEvent] = []
        touched: dict[InstanceId, None] = {}
        for _ in range(_ENTRIES):
            try:
                entry = self._log.after(self._serial)
            except LookupError:
                return [*told, *self._overrun("the client was too slow")]
            if entry is None:
                break
            told += self._read(entry, touched)
            self._serial = entry.serial
            self.place = self._log.place_behind(entry)
        if self._behind is not self._cluster.behind:
            touched |= dict.fromkeys(self._behind ^ self._cluster.behind)
            self._behind = self._cluster.behind
        told += [change for instance in touched for change in self._state(instance)]
        return told if told or self._serial < self._log.last else None

    async def wait(self, timeout_s: float) -> None:
        """See `Watching`."""
        await self._log.wait_after(self._serial, timeout_s)

    # -- entries ------------------------------------------------------------------------------------------------------

    def _read(self, entry: LogEntry, touched: dict[InstanceId, None]) -> Iterator[ToldEvent]:
        found = list(self._events(entry))
        instance = entry.name()
        if instance and self._is_of(instance):
            touched[instance] = None
        for event in found[:-1]:
            yield ToldEvent(event, None)
        if found:
            yield ToldEvent(found[-1], self._log.place_behind(entry))

    def _events(self, entry: LogEntry) -> Iterator[WatchEvent]:
        instance = entry.name()
        match entry.kind:
            case ChangeKind.FRAME:
                if self._asked.instance is not None and instance != self._instance():
                    return
                for event in self._reader.frame(entry):
                    if (ours := self._ours(event, entry)) is not None:
                        yield ours
            case ChangeKind.CLAIMS:
                if self._asked.instance is None:
                    yield from self._reader.claims(entry)
            case ChangeKind.EMPTIED:
                self._reader.forget(instance)
                if self._is_known(instance):
                    yield InstanceChange(instance=instance, what="emptied", epoch=entry.epoch)
            case ChangeKind.DROPPED:
                self._reader.forget(instance)
                if self._is_known(instance):
                    yield InstanceChange(instance=instance, what="dropped")
                self._told.pop(instance, None)
            case ChangeKind.MISSED:
                self._reader.miss(instance)
            case ChangeKind.FORGOTTEN:
                if any(self._may_see(one.namespace) for one in entry.claims):
                    yield self._missed("blocks of the namespace were erased", entry)
            case ChangeKind.STATUS:
                pass

    def _ours(self, event: BlockChanges | InstanceChange | Missed, entry: LogEntry) -> WatchEvent | None:
        """The event as this caller gets it."""
        match event:
            case BlockChanges(is_pool=False, holder=holder):
                if all(change.what == "ended" for change in event.changes) and not self._is_known(InstanceId(holder)):
                    return None
                if not self.caller.sees_all:
                    self._met.add(InstanceId(holder))
                return event
            case BlockChanges():
                return event
            case InstanceChange(instance=instance):
                return event if self._is_known(InstanceId(instance)) else None
            case Missed(instance=instance):
                return self._missed(event.why, entry, instance) if self._is_known(InstanceId(instance)) else None

    def _missed(self, why: str, entry: LogEntry, instance: str = "") -> Missed:
        until = self._text(self._log.place_behind(entry))
        return Missed(after=self._text(self.place), until=until, why=why, instance=instance)

    def _overrun(self, why: str) -> list[ToldEvent]:
        """Go on from now."""
        now = self._log.place()
        missed = Missed(after=self._text(self.place), until=self._text(now), why=why)
        self._serial, self._run, self.place = self._log.last, self._log.run, now
        self._reader.begin_anew()
        self._begin_states(with_names=True)
        return [ToldEvent(missed, now)]

    # -- instances ----------------------------------------------------------------------------------------------------

    def _begin_states(self, with_names: bool) -> None:
        index = self._cluster.sequencer.index
        if self._asked.instance is not None:
            names = [instance] if index.view(instance := self._instance()) is not None else []
        else:
            names = [name for name in index.instances() if self._is_visible(name)]
        if not self.caller.sees_all:
            self._met.update(names)
        self._states = self._pages(names, with_names)

    def _pages(self, names: list[InstanceId], with_names: bool) -> Iterator[list[ToldEvent]]:
        if with_names:
            for at in range(0, max(1, len(names)), MAX_KNOWN):
                page: list[str] = list(names[at : at + MAX_KNOWN])
                yield [ToldEvent(KnownInstances(instances=page, is_last=at + MAX_KNOWN >= len(names)), None)]
        every = list(dict.fromkeys([*names, *self._told]))
        for at in range(0, len(every), _STATES):
            yield [told for instance in every[at : at + _STATES] for told in self._state(instance)]

    def _state(self, instance: InstanceId) -> list[ToldEvent]:
        """What is news of an instance's state."""
        if not self._is_known(instance):
            return []
        state = self._cluster.state(instance)
        if state == self._told.get(instance, ORDINARY):
            return []
        if state == ORDINARY:
            del self._told[instance]
        else:
            self._told[instance] = state
        change = InstanceChange(
            instance=instance,
            what="state",
            epoch=self._cluster.epoch(instance),
            excluded=state.excluded,
            hidden=list(state.hidden),
            suspect=state.suspect,
        )
        return [ToldEvent(change, None)]

    # -- what the caller may know of ----------------------------------------------------------------------------------

    def _text(self, place: LogPlace) -> str:
        return self._log.text(place, self.caller.sees_all)

    def _instance(self) -> InstanceId:
        """The instance that is asked for, or one that nobody is."""
        assert self._asked.instance is not None
        return self._cluster.visibility.waited_for(self.caller, self._asked.instance)

    def _may_see(self, namespace: NamespaceId) -> bool:
        asked = self._asked.namespace
        if asked is not None and namespace != self._cluster.visibility.key(self.caller, asked):
            return False
        return self._cluster.may_see(self.caller, namespace)

    def _is_of(self, instance: InstanceId) -> bool:
        return self._asked.instance is None or instance == self._asked.instance

    def _is_visible(self, instance: InstanceId) -> bool:
        return self._cluster.visibility.instance(self.caller, instance)

    def _is_known(self, instance: InstanceId) -> bool:
        """Whether the watch is of an instance that its caller may know of, or has heard of."""
        return self._is_of(instance) and (instance in self._met or self._is_visible(instance))


class PrefixWatch:
    """A watch of who has how much of a prefix."""

    def __init__(self, cluster: WatchedCluster, asked: WatchAsked, caller: Caller) -> None:
        assert asked.namespace is not None and asked.hashes is not None
        self.caller = caller
        self._cluster, self._log = cluster, cluster.log
        self._namespace, self._hashes, self._limit = asked.namespace, asked.hashes, asked.limit
        self._only = None if asked.instance is None else [asked.instance]
        self._serial = -1
        self._behind = cluster.behind
        self._told: tuple[dict[str, InstanceHolding | int], MissedWhy | None] | None = None

    def begin(self) -> list[ToldEvent]:
        """See `Watching`."""
        now = self._log.place()
        position = self._log.text(now, self.caller.sees_all)
        return [ToldEvent(WatchBegun(position=position, keepalive_s=KEEPALIVE_S), now)]

    def step(self) -> list[ToldEvent] | None:
        """See `Watching`."""
        if self._serial == self._log.last and self._behind is self._cluster.behind:
            return None
        self._serial, self._behind = self._log.last, self._cluster.behind
        queries = self._cluster.queries
        answer = queries.holdings(self._namespace, self._hashes, self.caller, self._limit, self._only)
        why = queries.misses.why_none(answer, self.caller, self._namespace)
        told = (_depths(answer), why)
        if told == self._told:
            return None
        self._told = told
        if why is not None:
            answer = queries.misses.reasoned(answer, "watch", self.caller, self._namespace, why)
        return [ToldEvent(PrefixDepths(answer=answer), self._log.place())]

    @property
    def place(self) -> LogPlace:
        """See `Watching`."""
        return self._log.place()

    async def wait(self, timeout_s: float) -> None:
        """See `Watching`."""
        begin_s = time.monotonic()
        await asyncio.sleep(min(_PREFIX_S, timeout_s))
        await self._log.wait_after(self._serial, max(0.0, timeout_s - (time.monotonic() - begin_s)))


def _depths(answer: LookupAnswer) -> dict[str, InstanceHolding | int]:
    """What of an answer is news when it changes; among equals the order is no news."""
    found: dict[str, InstanceHolding | int] = {one.instance: one for one in answer.instances}
    return found | {f"{one.pool} ": one.depth for one in answer.pools} | {" deepest": answer.deepest}


class Watches:
    """All watches of a catalog. One asyncio loop.

    Attributes:
        closed: no more is told.
    """

    def __init__(self, cluster: WatchedCluster, settings: LimitSettings) -> None:
        self.closed = False
        self._cluster = cluster
        self._room = Room(settings.watches, settings.watches_per_caller)

    def change(self, settings: LimitSettings) -> None:
        """From now on so many may be open; those that are stay."""
        self._room.change(settings.watches, settings.watches_per_caller)

    def __len__(self) -> int:
        return self._room.taken

    def close(self) -> None:
        """End all feeds at once."""
        self.closed = True
        self._cluster.log.wake()

    def open(self, key: str, asked: WatchAsked, caller: Caller, caller_now: Callable[[], Caller | None]) -> Feed:
        """A feed; whoever opens it closes it.

        Args:
            key: what the caller is counted by. caller_now: who asks as of now; None: nobody who may.
        Raises: LimitError: there are too many.
        """
        if why := self._room.take(key, 1):
            raise LimitError(
                429 if why == "caller" else 503,
                "too_many_watches",
                "this caller watches too much" if why == "caller" else "too many callers watch",
                "close a feed, or have catalog.limits.watches and watches_per_caller raised",
                5.0,
            )
        watch: Watching
        if asked.hashes is None:
            watch = BlocksWatch(self._cluster, asked, caller)
        else:
            watch = PrefixWatch(self._cluster, asked, caller)
        return Feed(self, self._cluster.log, watch, caller_now, lambda: self._room.give(key, 1))


class Feed(FeedPlace):
    """One watch as server-sent events."""

    def __init__(
        self,
        watches: Watches,
        log: ChangeLog,
        watch: Watching,
        caller_now: Callable[[], Caller | None],
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(give_back)
        self._watches, self._log, self._watch, self._caller_now = watches, log, watch, caller_now

    async def events(self) -> AsyncIterator[bytes]:
        """What goes out, piece by piece, until the service closes or the caller may watch no more."""
        yield self._encoded(self._watch.begin())
        judged_s = said_s = time.monotonic()
        while not self._watches.closed:
            if time.monotonic() - judged_s >= JUDGE_S:
                judged_s = time.monotonic()
                caller = self._caller_now()
                if caller is None:
                    yield self._encoded(
                        [ToldEvent(WatchEnded(why="the caller may not ask this any more", may_return=False), None)]
                    )
                    return
                self._watch.caller = caller
            told = self._watch.step()
            if told:
                yield self._encoded(told)
                said_s = time.monotonic()
            elif told is None:
                left_s = said_s + KEEPALIVE_S - time.monotonic()
                if left_s <= 0:
                    yield b": keep-alive\nid: %b\n\n" % self._text(self._watch.place)
                    said_s = time.monotonic()
                    continue
                await self._watch.wait(min(left_s, JUDGE_S))
                await asyncio.sleep(_GATHER_S)
            else:
                await asyncio.sleep(0)
        yield self._encoded([ToldEvent(WatchEnded(why="the catalog stops", may_return=True), None)])

    def _text(self, place: LogPlace) -> bytes:
        return self._log.text(place, self._watch.caller.sees_all).encode()

    def _encoded(self, told: list[ToldEvent]) -> bytes:
        parts: list[bytes] = []
        for event, place in told:
            if place is not None:
                parts.append(b"id: %b\n" % self._text(place))
            kind = type(event).__struct_config__.tag
            parts.append(b"event: %b\ndata: %b\n\n" % (str(kind).encode(), msgspec.json.encode(event)))
        return b"".join(parts)
