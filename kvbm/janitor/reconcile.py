"""Hold the store's objects against the claims in SQL, and bring the claims to what the objects hold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId, hash_count
from kvbm.core.policy import OTHERS
from kvbm.janitor.effects import BlockRun, Header, ListPage, ObjectNames, ObjectSeen, ReadUsed, Unread, WriteUsed
from kvbm.janitor.holdings import Holdings, NamespaceClaims, ObjectName, TenantPart, column, lacking, parse
from kvbm.janitor.report import Limit
from kvbm.janitor.run_steps import RunSteps, Steps, do, runs_of
from kvbm.janitor.used import UsedBy, UsedHere
from kvbm.pools.object.tombstones import KEPT_PREFIX

_FIRST_NAME = f"{KEPT_PREFIX.removesuffix('/')}0"  # what sorts behind all that is kept besides blocks
_LOOK_CLOSER_RUNS = 4  # one run in so many reads headers also where numbers say that nothing differs
_SECOND_NS = 1_000_000_000


class Reconciler:
    """See the module. Objects without a claim are claimed; claims without an object are withdrawn."""

    def __init__(self, steps: RunSteps) -> None:
        self._steps, self._rules, self._report = steps, steps.rules, steps.report

    def inspect_objects(self, holdings: Holdings) -> Steps[int]:
        """Hold the listing against the claims, and claim what is not claimed.

        Returns the bytes of what was found so.
        """
        used_by, used_here = UsedBy((yield from do(ReadUsed()))), UsedHere()
        old_ns = self._steps.store_now_ns() - self._rules.older_ns
        after, found_bytes = _FIRST_NAME, 0
        while page := (yield from do(ListPage(after))):
            after = page[-1].name
            yield from self._steps.hold()
            lonely: list[ObjectSeen] = []
            for seen in page:
                named = parse(seen.name)
                if named is None:
                    self._steps.count_foreign(seen.name)
                    continue
                if not self._is_ours(named):
                    continue
                if named.namespace is None and not holdings.knows_sealed(named.blocks):
                    yield from self._learn_sealed(holdings, named.blocks)
                row = holdings.row(named)
                if row is not None:
                    claims = holdings.claims[row.namespace]
                    claims.take(row.at, named.blocks, seen, used_by.last_ns(seen.name))
                    if claims.last_ns[row.at] > old_ns:
                        used_here.add(seen.name, int(claims.last_ns[row.at]))
                elif self._is_young(seen):
                    self._report.waiting += 1
                    holdings.young.append((seen.name, named.blocks))
                else:
                    lonely.append(seen)
            found_bytes += yield from self._claim_found(holdings, lonely, used_by)
        if not self._steps.dry_run:
            yield from do(WriteUsed(used_here.body()))
        return found_bytes

    def _is_ours(self, named: ObjectName) -> bool:
        """Whether an object is of this pool; others may share the store."""
        is_sealed = named.namespace is None
        return self._rules.only_blocks in (0, named.blocks) and is_sealed == self._rules.sealed

    def _is_young(self, seen: ObjectSeen) -> bool:
        return self._steps.store_now_ns() - seen.modified_ns < self._rules.young_s * _SECOND_NS

    def _learn_sealed(self, holdings: Holdings, blocks: int) -> Steps[None]:
        """Learn under which names the claims of a pool stand whose names tell nothing."""
        names: dict[NamespaceId, list[str]] = {}
        for namespace, claims in holdings.claims.items():
            packed = claims.hashes.tobytes()
            if packed:
                first = yield from do(ObjectNames(blocks, BlockRun(namespace, packed[:HASH_BYTES])))
                if not first:
                    holdings.nameless.add(namespace)
                parts = parse(first[0]) if first else None
                if parts is not None and parts.namespace is None:
                    names[namespace] = yield from do(ObjectNames(blocks, BlockRun(namespace, packed)))
        holdings.learn_sealed(blocks, names)

    def _claim_found(self, holdings: Holdings, lonely: Sequence[ObjectSeen], used_by: UsedBy) -> Steps[int]:
        """Claim objects that nobody claims, by their headers. Returns their bytes."""
        described = yield from self._steps.describe([seen.name for seen in lonely])
        headers: list[Header] = []
        for seen, (name, header) in zip(lonely, described, strict=True):
            if not isinstance(header, Header):
                holdings.untold += 1
            elif not holdings.take_by_header(header, seen, used_by.last_ns(name)):
                headers.append(header)
        for header in headers:
            part = self._report.part(header.namespace)
            part.objects += 1
            part.blocks += hash_count(header.hashes)
            part.bytes += header.size_bytes
            holdings.found.setdefault(header.namespace, []).append(header.hashes)
        self._report.found += len(headers)
        yield from self._steps.emit_claims(runs_of(headers))
        return sum(header.size_bytes for header in headers)

    def reconcile(self, holdings: Holdings) -> Steps[None]:
        """Bring claims to what objects hold, in each namespace where their numbers differ; they do where objects share
        blocks, too.

        Blocks that objects share and claims without an object can make up for each other in the numbers, so some runs
        look closer.
        """
        looks_closer = zlib.crc32(self._steps.run.encode()) % _LOOK_CLOSER_RUNS == 0
        for claims in holdings.claims.values():
            placed = np.flatnonzero(claims.blocks > 0)
            found = b"".join(holdings.found.get(claims.namespace, []))
            if int(claims.blocks.sum()) == len(claims.hashes) and not looks_closer:
                continue
            if claims.namespace in holdings.nameless and holdings.untold:
                claims.learn_shared(None)  # its objects may be among those that nobody here can open
                continue
            young = [name for name, blocks in holdings.young if blocks > 1]  # some of their blocks may be claimed
            if (claims.blocks[placed] == 1).all() and not young:
                present = np.union1d(claims.hashes[placed], column(found))
            else:
                headers = yield from self._headers_of(holdings, claims, placed, young)
                held = None if headers is None else column(b"".join(header.hashes for header in headers) + found)
                claims.learn_shared(held)
                if held is None:
                    continue
                present = np.unique(held)
            yield from self._reconcile_namespace(claims, present, column(found))

    def _headers_of(
        self, holdings: Holdings, claims: NamespaceClaims, placed: np.ndarray, young: Sequence[str]
    ) -> Steps[list[Header] | None]:
        """The headers of all objects of a namespace;

        None where one cannot be told, so that nobody knows which claims are without.
        """
        names = list(young)
        for blocks in np.unique(claims.blocks[placed]).tolist():
            rows = placed[claims.blocks[placed] == blocks]
            names += yield from names_of(
                holdings, claims.namespace, blocks, [claims.block(row) for row in rows.tolist()]
            )
        described = yield from self._steps.describe(names)
        if any(header is Unread.UNKNOWN for _, header in described):
            return None
        return [h for _, h in described if isinstance(h, Header) and h.namespace == claims.namespace]

    def _reconcile_namespace(self, claims: NamespaceClaims, present: np.ndarray, found: np.ndarray) -> Steps[None]:
        """Claim what objects hold and nobody claims; withdraw what is claimed and no object holds."""
        settled_ns = self._steps.store_now_ns() - int((self._rules.young_s + self._rules.skew_s) * _SECOND_NS)
        missing = lacking(claims.hashes, present)
        missing = missing[claims.last_ns[missing] < settled_ns]
        unclaimed = present[lacking(present, claims.hashes)]
        unclaimed = unclaimed[lacking(unclaimed, found)]
        self._report.missing_blocks += len(missing)
        self._report.mended_blocks += len(unclaimed)
        if len(missing):
            yield from self._steps.emit_claims(
                [BlockRun(claims.namespace, claims.packed(missing))], EvictReason.MISSING
            )
        if len(unclaimed):
            yield from self._steps.emit_claims([BlockRun(claims.namespace, bytes(unclaimed.tobytes()))])

    def count_parts(self, holdings: Holdings, more_bytes: int) -> None:
        """Put what each namespace holds into the report, and what limits there are.

        Args:
            more_bytes: what the pool has beside it.
        """
        ahead_ns = self._steps.store_now_ns() + int(self._rules.skew_s * _SECOND_NS)
        for claims in holdings.claims.values():
            part = self._report.part(claims.namespace)
            part.tenant = claims.tenant
            part.objects += int((claims.blocks > 0).sum())
            part.blocks += int(claims.blocks.sum())
            part.bytes += int(claims.sizes.sum())
            self._report.future_blocks += int((claims.last_ns > ahead_ns).sum())
        if self._rules.erase is None:
            self._count_limits(holdings, more_bytes)

    def _count_limits(self, holdings: Holdings, more_bytes: int) -> None:
        """Put what tenants, and the pool, may have into the report, as `over_quota` goes by it."""
        parts, by_tenant = self._rules.parts, dict[str, int]()
        for part in self._report.parts.values():
            by_tenant[part.tenant] = by_tenant.get(part.tenant, 0) + part.bytes
        for tenant in (by_tenant.keys() | holdings.quotas.keys() | parts.keys()) - {OTHERS}:
            quota = parts.get(tenant, TenantPart()).quota_bytes
            quota = holdings.quotas.get(tenant) if quota is None else quota
            if quota is not None:
                self._report.limits[tenant] = Limit(by_tenant.get(tenant, 0), quota)
        if (quota := parts.get(OTHERS, TenantPart()).quota_bytes) is not None:
            others = sum(size for tenant, size in by_tenant.items() if tenant not in parts)
            self._report.limits[OTHERS] = Limit(others, quota)
        if self._rules.quota_bytes:
            self._report.pool_limit = Limit(sum(by_tenant.values()) + more_bytes, self._rules.quota_bytes)


def names_of(holdings: Holdings, namespace: NamespaceId, blocks: int, last: Sequence[bytes]) -> Steps[list[str]]:
    """The names of objects that were seen, by their last blocks."""
    if namespace in holdings.nameless:
        return [holdings.names[namespace, block] for block in last]
    return (yield from do(ObjectNames(blocks, BlockRun(namespace, b"".join(last)))))
