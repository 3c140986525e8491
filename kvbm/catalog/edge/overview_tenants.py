"""What the overview tells of tenants: what they have in object pools, what they may have, and how often they hit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from heapq import nlargest
from typing import NamedTuple

from kvbm.catalog.follow.sampled_hits import SampledCount
from kvbm.catalog.put_bytes import put_by_namespace
from kvbm.catalog.service import CatalogService, TenantLimits
from kvbm.core.errors import CatalogError
from kvbm.core.events import JANITOR
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, Reach
from kvbm.core.overview import MOST_TENANTS, TenantColumns
from kvbm.core.policy import OTHERS

_WAIT_S = 0.25  # that a look waits for the database, or for claims; what comes later is for the next one
_CLAIMS_SHARE = 0.02  # of the loop's time, that counting claims may take
_PAGES = 64  # of the index at a time: some 2 ms

Pause = Callable[[], Awaitable[None]]
Claims = Mapping[NamespaceId, Mapping[str, int]]


class _Tenant:
    """What is counted of a tenant."""

    def __init__(self) -> None:
        self.namespaces = self.instances = self.put_raw = self.put_stored = self.blocks = 0
        self.memory: int | None = 0  # bytes of `blocks` as they are in memory; None: of some nobody has said the size
        self.sampled = SampledCount()

    def held(self) -> int | None:
        """Bytes that its blocks have in object pools: less than in memory by what those who run now have saved."""
        if self.memory is None or not self.put_raw:
            return self.memory
        return self.memory * self.put_stored // self.put_raw


class TenantsFound(NamedTuple):
    """All tenants, what they may have, and whether it is counted what engines ask for."""

    by_name: Mapping[str, _Tenant]
    limits: Mapping[str, TenantLimits]
    quotas: Mapping[str, int]
    is_sampled: bool


NO_TENANTS = TenantsFound({}, {}, {}, False)


class TenantsLook:
    """Looks at tenants. One asyncio loop; what takes long goes on beside it, and the next look has it."""

    def __init__(self, service: CatalogService) -> None:
        self._service = service
        self._quotas: dict[str, int] = {}
        self._claims: Claims = {}
        self._sizes: dict[tuple[str, NamespaceId], int] = {}  # of a block, as some instance has said it last
        self._claims_s = float("-inf")  # when they may be counted again
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def prepare(self) -> None:
        """Ask the database for quotas, and count claims; while either is slow, what was found last counts."""
        self._begin("catalog-quotas", self._read_quotas)
        if time.monotonic() >= self._claims_s:
            self._begin("catalog-claim-counts", self._count_claims)
        await asyncio.wait(self._tasks.values(), timeout=_WAIT_S)

    async def find(self, pause: Pause) -> TenantsFound:
        """Look at all. Args: pause: after each piece of work."""
        service = self._service
        limits = {name: one for name, one in service.settings.tenants.items() if name != OTHERS or any(one)}
        found: dict[str, _Tenant] = {name: _Tenant() for name in (*self._quotas, *limits)}
        of: dict[NamespaceId, _Tenant] = {}
        for key, fields in list(service.sequencer.namespaces().items()):
            of[key] = tenant = found.setdefault(fields.tenant, _Tenant())
            tenant.namespaces += 1
            await pause()
        for name in list(service.index.instances()):
            self._add_instance(name, of)
            await pause()
        self._sizes = {key: size for key, size in self._sizes.items() if key[1] in self._claims}
        for key, counts in self._claims.items():
            if (owner := of.get(key)) is not None:
                self._add_claims(owner, key, counts)
            await pause()
        hits = service.archive.hits.by_namespace if service.archive is not None else None
        for key, count in list(hits.items()) if hits is not None else ():
            if (asker := of.get(key)) is not None:
                asker.sampled = asker.sampled.plus(count)
        return TenantsFound(found, limits, self._quotas, hits is not None)

    def _add_instance(self, name: InstanceId, of: Mapping[NamespaceId, _Tenant]) -> None:
        """Count an instance for whom it serves, and what it has put. A janitor names all namespaces and serves none."""
        row, view = self._service.sequencer.instance_row(name), self._service.index.view(name)
        if row is not None and row.engine == JANITOR:
            return
        named = self._service.sequencer.declared(name)
        for pool in view.pools if view is not None else ():
            if pool.reach == Reach.CLUSTER:
                kept = self._service.index.pool_name(name, pool.tier) or pool.name
                self._sizes |= dict.fromkeys(((kept, key) for key in named), pool.block_bytes)
        for tenant in {id(one): one for key in named if (one := of.get(key))}.values():
            tenant.instances += 1
        last = self._service.heartbeats.liveness.last(name)
        if last is None or not last.heartbeat.put_bytes:
            return
        for text, (raw, stored) in put_by_namespace([(name, last.heartbeat)]).items():
            if (owner := of.get(NamespaceId(bytes.fromhex(text)))) is not None:
                owner.put_raw += raw
                owner.put_stored += stored

    def _add_claims(self, owner: _Tenant, namespace: NamespaceId, counts: Mapping[str, int]) -> None:
        for pool, count in counts.items():
            owner.blocks += count
            size = self._sizes.get((pool, namespace))
            owner.memory = None if owner.memory is None or size is None else owner.memory + count * size

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.ensure_future(work())

    async def _read_quotas(self) -> None:
        with contextlib.suppress(CatalogError):
            self._quotas = await self._service.store.tenant_quotas()

    async def _count_claims(self) -> None:
        """Count the claimed blocks of each namespace by pool: the index has their sum alone."""
        index, took_s = self._service.index, 0.0
        counts: dict[NamespaceId, dict[str, int]] = {}
        first: int | None = 0
        while first is not None:
            begin_s = time.perf_counter()
            first, runs = index.claims(first, _PAGES)
            for pool, namespace, hashes in runs:
                by_pool = counts.setdefault(namespace, {})
                by_pool[pool] = by_pool.get(pool, 0) + len(hashes) // HASH_BYTES
            took_s += time.perf_counter() - begin_s
            await asyncio.sleep(0)
        self._claims, self._claims_s = counts, time.monotonic() + took_s / _CLAIMS_SHARE


def columns_of(found: TenantsFound, tenants: frozenset[str] | None) -> TenantColumns:
    """What callers of some tenants see: those with the most in object pools, and of their own alone."""
    by_name, is_sampled = found.by_name, found.is_sampled
    seen = by_name if tenants is None else {name: by_name[name] for name in tenants if name in by_name}
    told = nlargest(MOST_TENANTS, seen.items(), key=lambda one: (one[1].blocks, one[1].namespaces, one[0]))
    if tenants is None:
        told = [(name, _others(found) if name == OTHERS else one) for name, one in told]

    def sampled(part: str) -> list[int | None]:
        return [round(getattr(one.sampled, part)) if is_sampled else None for _, one in told]

    def limits(part: str) -> Iterator[int | None]:
        return ((getattr(found.limits[name], part) if name in found.limits else 0) or None for name, _ in told)

    return TenantColumns(
        tenant=[name for name, _ in told],
        namespaces=[one.namespaces for _, one in told],
        instances=[one.instances for _, one in told],
        blocks=[one.blocks for _, one in told],
        held=[one.held() for _, one in told],
        put_raw=[one.put_raw for _, one in told],
        put_stored=[one.put_stored for _, one in told],
        quota=[one or found.quotas.get(name) for one, (name, _) in zip(limits("object_bytes"), told, strict=True)],
        host_quota=list(limits("host_bytes")),
        nvme_quota=list(limits("nvme_bytes")),
        prompts=sampled("prompts"),
        asked=sampled("asked"),
        found=sampled("found"),
        more=len(seen) - len(told),
    )


def _others(found: TenantsFound) -> _Tenant:
    """What all have together who are not named in the settings, for their limits are of all of them together."""
    total = _Tenant()
    for name, one in found.by_name.items():
        if name not in found.limits:
            total.namespaces += one.namespaces
            total.blocks += one.blocks
            total.put_raw += one.put_raw
            total.put_stored += one.put_stored
            total.memory = None if total.memory is None or one.memory is None else total.memory + one.memory
    return total
