"""The catalog's overview: computed once for all who look, at most once a second and only while somebody looks.

A look takes each instance in turn, some at a time, so that questions are answered between. It asks the index for its
own counters, never for blocks. Whoever may see all tenants shares one view; callers of the same tenants share another.
A view keeps its newest answer, whole, and what has changed since the one before: a reader that has taken that one gets
the change, everybody else gets the whole, so that a slow reader costs no memory.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from heapq import nlargest
from typing import NamedTuple

import msgspec

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.access.limits import FeedPlace, LimitError, Room
from kvbm.catalog.edge.overview_rows import ROW_TIERS, OverviewRow, columns_of, row_of, without_numbers
from kvbm.catalog.edge.overview_tenants import NO_TENANTS, TenantsFound, TenantsLook
from kvbm.catalog.edge.overview_tenants import columns_of as tenant_columns
from kvbm.catalog.service import CatalogService
from kvbm.core.ages import AGE_BOUNDS_S, FOLLOWED, TierAges
from kvbm.core.errors import CatalogError
from kvbm.core.ids import InstanceId, Tier
from kvbm.core.overview import (
    MOST_POOLS,
    AgesTold,
    CatalogState,
    OverviewAnswer,
    PoolTotals,
    SampledTold,
    TierTotals,
)
from kvbm.safe_log import SafeLog

log = SafeLog()

EVERY_S = 1.0
TENANTS_EVERY_S = 10.0
KEEPALIVE_S = 5.0
_STEP_S = 0.002  # of the loop's time, before others are answered
_LOOP_SHARE = 0.05  # of it, that looking may take
_BYTES_PER_S = 16 << 20  # to all feeds together
_VIEW_KEPT_S = 30.0  # of a view that nobody looks at
_COUNTED = (
    "messages",
    "frames",
    "events",
    "holes",
    "gaps",
    "gaps_repaired",
    "digest_mismatches",
    "digest_divergence",
    "digest_repaired",
    "blind_starts",
    "poison",
    "foreign",
    "newer",
    "stale",
    "repeats",
)
Tenants = frozenset[str] | None


class OverviewTick(NamedTuple):
    """One answer of a view.

    Attributes:
        whole, change: as `OverviewAnswer`, encoded; `change` goes on from the version before.
    """

    version: int
    whole: Callable[[], bytes]
    change: bytes


class _Shared(NamedTuple):
    """What a look has found, for whoever sees all."""

    at_ms: int
    at_s: float
    pool_sizes: Mapping[str, int]
    rows: Mapping[InstanceId, OverviewRow]
    tenants: TenantsFound
    tenants_serial: int


class _View:
    """What callers of the same tenants see."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.asked_s = time.monotonic()
        self.rows: dict[InstanceId, OverviewRow] = {}
        self.tick: OverviewTick | None = None
        self.looked_s = self.tenants_serial = -1.0
        self.told_tenants = tenant_columns(NO_TENANTS, tenants)


class Overview:
    """Looks, while somebody does. One asyncio loop.

    Args:
        version: of the catalog.
        troubles: more that does not work; "" for nothing.
    """

    def __init__(self, service: CatalogService, version: str = "", troubles: Callable[[], str] = str) -> None:
        self._service, self._own_version, self._troubles = service, version, troubles
        self._room = Room(*_room_for_feeds(service))
        self._run = secrets.token_hex(8)
        self._looking = asyncio.Lock()
        self._looked = asyncio.Event()  # set and replaced at each look
        self._shared: _Shared | None = None
        self._views: dict[Tenants, _View] = {}
        self._task: asyncio.Task[None] | None = None
        self._tenants, self._tenants_s, self._tenants_serial = NO_TENANTS, float("-inf"), 0
        self._tenants_look = TenantsLook(service)
        self._newest = 0  # version of all views there were
        self._worked_s = 0.0

    async def answer(self, caller: Caller) -> bytes:
        """The newest overview, whole; it is no older than EVERY_S."""
        view = self._view(caller)
        await self._look(view)
        assert view.tick is not None
        return view.tick.whole()

    def open(self, key: str, caller_now: Callable[[], Caller | None]) -> OverviewFeed:
        """A feed; whoever opens it closes it. Arguments and errors as `Watches.open`."""
        self._room.change(*_room_for_feeds(self._service))  # settings are read anew while the catalog serves
        if why := self._room.take(key, 1):
            raise LimitError(
                429 if why == "caller" else 503,
                "too_many_watches",
                "this caller has too many overviews open" if why == "caller" else "too many overviews are open",
                "close some, or have catalog.limits.watches raised",
                5.0,
            )
        self._begin_looks()
        return OverviewFeed(self, caller_now, lambda: self._room.give(key, 1))

    @property
    def is_closed(self) -> bool:
        """Whether the catalog stops: no more is told."""
        return self._service.watches.closed

    async def next(self, caller: Caller, after: tuple[Tenants, int]) -> tuple[tuple[Tenants, int], bytes] | None:
        """What a feed tells next, and where it is then; None: nothing within KEEPALIVE_S, or the catalog stops.

        Args:
            after: where it is: whose view it has, and up to which version.
        """
        view = self._view(caller)
        if view.tick is None or after[0] != view.tenants or after[1] < 0:  # it may be of when somebody watched last
            await self._look(view)
        deadline_s = time.monotonic() + KEEPALIVE_S
        while view.tick is None or after == (view.tenants, view.tick.version):
            if self.is_closed or (left_s := deadline_s - time.monotonic()) <= 0:
                return None
            view.asked_s = time.monotonic()
            self._begin_looks()
            try:
                async with asyncio.timeout(min(left_s, EVERY_S)):
                    await self._looked.wait()
            except TimeoutError:
                continue
            if self._views.get(view.tenants) is not view:
                return None
        tick, place = view.tick, (view.tenants, view.tick.version)
        return place, tick.change if after == (view.tenants, tick.version - 1) else tick.whole()

    # -- looking ------------------------------------------------------------------------------------------------------

    def _view(self, caller: Caller) -> _View:
        tenants = None if caller.sees_all else (caller.tenants or frozenset())
        view = self._views.get(tenants)
        if view is None:
            self._forget_views(time.monotonic())
            view = self._views[tenants] = _View(tenants)
        view.asked_s = time.monotonic()
        return view

    def _forget_views(self, now_s: float) -> None:
        for view in [one for one in self._views.values() if now_s - one.asked_s > _VIEW_KEPT_S]:
            del self._views[view.tenants]

    def _begin_looks(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_looks(), name="catalog-overview")

    async def _run_looks(self) -> None:
        """Look for as long as anybody has a feed."""
        while self._room.taken and not self.is_closed:
            begin_s, worked_s = time.monotonic(), self._worked_s
            self._forget_views(begin_s)
            try:
                for view in list(self._views.values()):
                    await self._look(view)
            except (CatalogError, ValueError) as error:  # nobody's feed ends for it, and the next look may be good
                log.warning("catalog.overview_failed", why=str(error))
            sent = sum(len(view.tick.change) for view in self._views.values() if view.tick is not None)
            took_s = self._worked_s - worked_s
            pause_s = max(EVERY_S, took_s / _LOOP_SHARE, self._room.taken * sent / _BYTES_PER_S)
            await asyncio.sleep(max(0.0, begin_s + pause_s - time.monotonic()))

    async def _look(self, view: _View) -> None:
        """Have a view no older than EVERY_S; those who ask meanwhile wait for the same look."""
        async with self._looking:
            now_s = time.monotonic()
            if view.tick is not None and now_s - view.looked_s < 0.9 * EVERY_S:
                return
            if self._shared is None or now_s - self._shared.at_s >= 0.9 * EVERY_S:
                self._shared = await self._find()
            await self._advance(view, self._shared)
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()

    async def _find(self) -> _Shared:
        service, now_s, now_ns = self._service, time.monotonic(), time.time_ns()
        are_tenants_due = now_s - self._tenants_s >= TENANTS_EVERY_S
        if are_tenants_due:
            await self._tenants_look.prepare()
        took = _Steps()
        names = sorted({*service.heartbeats.liveness.instances(), *service.index.instances()})
        rows: dict[InstanceId, OverviewRow] = {}
        pool_sizes: dict[str, int] = {}
        for name in names:
            rows[name] = row_of(service, name, now_s, now_ns, pool_sizes)
            await took.pause()
        if are_tenants_due:
            self._tenants_s = now_s
            self._tenants = await self._tenants_look.find(took.pause)
            self._tenants_serial += 1
        self._worked_s += took.total_s()
        return _Shared(now_ns // 1_000_000, now_s, pool_sizes, rows, self._tenants, self._tenants_serial)

    async def _advance(self, view: _View, shared: _Shared) -> None:
        """Let a view be that of the newest look."""
        took, rows = _Steps(), shared.rows
        if view.tenants is not None:
            caller, seen = Caller("", "router", view.tenants), dict[InstanceId, OverviewRow]()
            for name, row in rows.items():
                if self._service.queries.visibility.instance(caller, name):
                    seen[name] = without_numbers(row)
                await took.pause()
            rows = seen
        changed, before, sums = [], view.rows, _Sums()
        for name, row in rows.items():
            if before.get(name) != row:
                changed.append(row)
            sums.add(row)
            await took.pause()
        gone = [name for name in before if name not in rows]
        # A slow reader may still be at a version of such a view that was forgotten: no version here goes on from it.
        version = view.tick.version + 1 if view.tick is not None else self._newest + 2
        self._newest = max(self._newest, version)
        head = self._head(view.tenants is None, shared, sums)
        is_newer = view.tenants_serial != shared.tenants_serial
        tenants = tenant_columns(shared.tenants, view.tenants) if is_newer else view.told_tenants
        change = _encoded(
            msgspec.structs.replace(
                head,
                version=version,
                base=version - 1,
                rows=columns_of(changed),
                gone=[str(name) for name in gone],
                tenants=tenants if tenants != view.told_tenants else None,
            )
        )
        kept: list[bytes] = []

        def whole() -> bytes:
            if not kept:
                answer = msgspec.structs.replace(head, version=version, rows=columns_of(rows.values()), tenants=tenants)
                kept.append(_encoded(answer))
            return kept[0]

        view.rows, view.looked_s = dict(rows), shared.at_s
        view.told_tenants, view.tenants_serial = tenants, shared.tenants_serial
        view.tick = OverviewTick(version, whole, change)
        self._worked_s += took.total_s()

    def _head(self, sees_all: bool, shared: _Shared, sums: _Sums) -> OverviewAnswer:
        """All but rows and tenants."""
        service = self._service
        counters = service.sequencer.counters
        hits = service.archive.hits.total if service.archive is not None and sees_all else None
        return OverviewAnswer(
            run=self._run,
            version=0,
            at_ms=shared.at_ms,
            catalog=self._state(sees_all),
            states=sums.states,
            excluded=sums.excluded,
            suspect=sums.suspect,
            tiers=sums.totals() if sees_all else [],
            pools=self._pools(shared.pool_sizes) if sees_all else [],
            events={name: getattr(counters, name) for name in _COUNTED} if sees_all else {},
            bounds_s=list(AGE_BOUNDS_S),
            ages=ages_told(service.queries.ages.counted()) if sees_all else [],
            missed=self._missed() if sees_all else {},
            sampled=None if hits is None else SampledTold(**{k: round(v) for k, v in hits._asdict().items()}),
            rows=columns_of(()),
        )

    def _state(self, sees_all: bool) -> CatalogState:
        service = self._service
        ready = service.readiness()
        newest_ns, now_s = service.sequencer.newest_wall_ns, time.monotonic()
        return CatalogState(
            version=self._own_version,
            ready=ready.ready,
            reason=ready.reason if sees_all else "" if ready.ready else "not ready",
            degraded="; ".join(one for one in (ready.degraded, self._troubles()) if one) if sees_all else "",
            parts=ready.parts,
            sees_all=sees_all,
            stream_sequence=ready.stream_sequence if sees_all else None,
            lag_messages=ready.lag_messages if sees_all else None,
            lag_s=round(service.lag.seconds(now_s, time.time() - newest_ns / 1e9 if newest_ns else 0.0), 3)
            if sees_all
            else None,
            view_age_s=service.queries.view_age_s(),
            archive=service.archive is not None,
            history=service.past is not None and sees_all,
        )

    def _pools(self, sizes: Mapping[str, int]) -> list[PoolTotals]:
        counts = nlargest(MOST_POOLS, self._service.index.claim_counts().items(), key=lambda one: (one[1], one[0]))
        return [
            PoolTotals(pool=name, blocks=count, bytes=count * sizes[name] if sizes.get(name) else None)
            for name, count in counts
        ]

    def _missed(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (question, why), count in self._service.queries.misses.counts.items():
            found.setdefault(question, {})[why] = count
        return found


class OverviewFeed(FeedPlace):
    """The overview as server-sent events: a whole one, then what changes."""

    def __init__(
        self, overview: Overview, caller_now: Callable[[], Caller | None], give_back: Callable[[], None]
    ) -> None:
        super().__init__(give_back)
        self._overview, self._caller_now = overview, caller_now

    async def events(self) -> AsyncIterator[bytes]:
        """What goes out, piece by piece, until the catalog stops or the caller may ask no more."""
        place: tuple[Tenants, int] = (None, -1)
        yield b"retry: 1000\n\n"
        while not self._overview.is_closed:
            caller = self._caller_now()
            if caller is None:
                yield b'event: ended\ndata: {"why":"the caller may not ask this any more","may_return":false}\n\n'
                return
            told = await self._overview.next(caller, place)
            if told is None:
                yield b": keep-alive\n\n"
                continue
            place, body = told
            yield b"event: overview\ndata: %b\n\n" % body
        yield b'event: ended\ndata: {"why":"the catalog stops","may_return":true}\n\n'


class _Sums:
    """Totals of a view's instances."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}
        self.excluded: dict[str, int] = {}
        self.suspect = 0
        self._tiers = [[0] * 5 for _ in ROW_TIERS]

    def add(self, row: OverviewRow) -> None:
        """One more."""
        self.states[row.state] = self.states.get(row.state, 0) + 1
        self.suspect += row.suspect
        if row.excluded:
            self.excluded[row.excluded] = self.excluded.get(row.excluded, 0) + 1
        if row.excluded or row.state == "stopped":
            return
        for total, blocks, slots, size in zip(self._tiers, row.blocks, row.slots, row.block_bytes, strict=True):
            total[0] += slots > 0
            total[1] += blocks
            total[2] += slots
            total[3] += blocks * size
            total[4] += slots * size

    def totals(self) -> list[TierTotals]:
        """By tier."""
        return [
            TierTotals(tier=tier.name, instances=i, blocks=b, slots=s, bytes=size, capacity_bytes=room)
            for tier, (i, b, s, size, room) in zip(ROW_TIERS, self._tiers, strict=True)
        ]


class _Steps:
    """Leaves the loop to others when a step has taken long enough."""

    def __init__(self) -> None:
        self._begin_s, self._total_s = time.perf_counter(), 0.0

    async def pause(self) -> None:
        """After each piece of work."""
        if (took_s := time.perf_counter() - self._begin_s) >= _STEP_S:
            self._total_s += took_s
            await asyncio.sleep(0)
            self._begin_s = time.perf_counter()

    def total_s(self) -> float:
        """What all steps have taken."""
        return self._total_s + time.perf_counter() - self._begin_s


def ages_told(counted: Iterable[TierAges]) -> list[AgesTold]:
    """Ages by tier, as answers have them."""
    return [
        AgesTold(
            tier=tier.name,
            hits=list(one.wanted) if tier != Tier.HBM else [],
            hits_s=one.wanted_s,
            evicted=list(one.evicted),
            evicted_s=one.evicted_s,
            reused=one.reused,
            unused=one.unused,
        )
        for tier, one in zip(FOLLOWED, counted, strict=False)
    ]


def _room_for_feeds(service: CatalogService) -> tuple[int, int]:
    """Feeds of all callers, and of one: many pages come from one address, where nobody asks who they are."""
    most = service.settings.limits.watches
    return most, max(1, most * 3 // 4)


def _encoded(answer: OverviewAnswer) -> bytes:
    return msgspec.json.encode(answer)
