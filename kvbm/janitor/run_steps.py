"""The steps that every part of a janitor's run takes: keep the lease, read headers, emit claims, wait for SQL.

A step is a generator of effects. It goes on with the answer to the effect that it gave last.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar, cast

import msgspec

from kvbm.core.errors import JanitorBusyError, JanitorError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.janitor import lease as leases
from kvbm.janitor.effects import BlockRun, Describe, Effect, EmitClaims, Header, Inspect, PutLease, Unread, WaitForSql
from kvbm.janitor.report import Report
from kvbm.janitor.rules import Rules

DESCRIBED_AT_ONCE = 512
_ASKS = 8  # for the headers of so many objects, of a store that is slow
_RENEWALS = 3  # tried in a row, where the store takes so long that the lease is nearly over again
_SECOND_NS = 1_000_000_000

T = TypeVar("T")
Steps = Generator[Effect[Any], Any, T]


class RunSteps:
    """See the module.

    Args:
        holder: who this is, for people.
        run: a number of its own.

    Attributes:
        now_s: the monotonic clock, set with each answer.
        epoch: of the lease; 0 without one.
        report: what was found and done so far.
    """

    def __init__(self, holder: str, run: str, rules: Rules, report: Report) -> None:
        self.rules, self.report, self.dry_run = rules, report, report.dry_run
        self.run = run
        self.now_s = 0.0
        self._holder = holder
        self._lease = leases.Lease(holder="", run="", epoch=0, held_s=0.0)
        self._lease_body = b""  # as it lies in the store while we have it
        self._good_until_s = -math.inf
        self._store_ns, self._store_ns_at_s = 0, 0.0  # the store's time at one of ours

    @property
    def epoch(self) -> int:
        """See the class."""
        return self._lease.epoch

    # -- the lease ----------------------------------------------------------------------------------------------------

    def take_lease(self) -> Steps[None]:
        """Inspect the store, and take the lease.

        Raises: JanitorError: clocks are too far apart, or the store cannot keep a lease. JanitorBusyError: another has
            it.
        """
        asked_s = self.now_s
        status = yield from do(Inspect())
        skew_s, allowed_s = status.skew_s, self.rules.skew_s
        if abs(skew_s) > allowed_s:
            way = "ahead of" if skew_s > 0 else "behind"
            raise JanitorError(
                f"this machine's clock is {abs(skew_s):.0f} s {way} the store's, more than gc.skew_s ({allowed_s:g}); "
                "set the clock. "
                "Nothing was changed"
            )
        self._store_ns, self._store_ns_at_s = status.store_ns, self.now_s
        if self.dry_run:
            return
        if status.ignored and not self.rules.alone:
            raise JanitorError(
                f"the store ignores conditions of puts ({'; '.join(status.ignored)}), so two janitors could have its "
                "lease at once; use a "
                "store that heeds them, or set gc.alone = true where this is the only janitor of all clusters, and "
                "`kvbm-catalog erase` runs "
                "only while it does not. Nothing was changed"
            )
        lease = leases.claimed(status.lease, self._holder, self.run, self.rules.lease_s)
        if not (yield from self._put_lease(lease, status.lease.body, asked_s)):
            raise JanitorBusyError("another janitor took the lease just now; nothing to do")

    def _put_lease(self, lease: leases.Lease, expected: bytes, asked_s: float) -> Steps[bool]:
        body = leases.encode(lease)
        taken = yield from do(PutLease(body, expected))
        if taken:
            self._lease, self._lease_body = lease, body
            self._good_until_s = asked_s + lease.held_s
        else:
            self._lease_body = b""
        return taken

    def hold(self, for_s: float = 0.0) -> Steps[None]:
        """Go on only while the lease is ours, and for so long at least; renew it in time.

        Raises JanitorError: it was lost.
        """
        if self.dry_run:
            return
        for _ in range(_RENEWALS):
            if self._good_until_s - self.now_s >= max(for_s, self._lease.held_s * 2 / 3):
                return
            asked_s = self.now_s
            renewed = msgspec.structs.replace(self._lease, renewed=self._lease.renewed + 1)
            if not (yield from self._put_lease(renewed, self._lease_body, asked_s)):
                raise JanitorError(
                    f"the lease was lost: no renewal for {asked_s - self._good_until_s + self._lease.held_s:.0f} s, "
                    "and another "
                    "janitor has taken it. Nothing more was deleted; the other goes on"
                )
            if self._good_until_s - self.now_s >= for_s:
                return
        raise JanitorError(f"the store takes too long to renew a lease of {self._lease.held_s:g} s; raise gc.lease_s")

    def give_lease_back(self) -> Steps[None]:
        """Let the next janitor begin at once."""
        if self._lease_body:
            free = msgspec.structs.replace(self._lease, holder="", renewed=self._lease.renewed + 1)
            yield from do(PutLease(leases.encode(free), self._lease_body))
            self._lease_body = b""

    def store_now_ns(self) -> int:
        """The store's time, by our monotonic clock since it was inspected."""
        return self._store_ns + int((self.now_s - self._store_ns_at_s) * _SECOND_NS)

    def wait_for_sql(self) -> Steps[None]:
        """Wait until SQL has all events that were emitted before now. Raises JanitorError: it takes too long."""
        deadline_s, fresh = self.now_s + self.rules.sql_wait_s, True
        while not (yield from do(WaitForSql(fresh))):
            fresh = False
            if self.now_s > deadline_s:
                raise JanitorError(
                    f"the catalog has not stored within {self.rules.sql_wait_s:g} s what was said; start `kvbm-catalog "
                    "serve` on this "
                    "cluster and database, or see why it is behind. Nothing more was deleted"
                )
            yield from self.hold()

    # -- objects and claims --------------------------------------------------------------------------------------------

    def describe(self, names: Sequence[str]) -> Steps[list[tuple[str, Header | Unread]]]:
        """What objects hold, in their order; what does not tell is counted."""
        described: list[tuple[str, Header | Unread]] = []
        for at in range(0, len(names), DESCRIBED_AT_ONCE):
            yield from self.hold()
            headers = yield from self._ask_headers(tuple(names[at : at + DESCRIBED_AT_ONCE]))
            for name, header in headers.items():
                described.append((name, header))
                if header is Unread.FOREIGN:
                    self.count_foreign(name)
                self.report.unknown += header is Unread.UNKNOWN
        return described

    def _ask_headers(self, names: tuple[str, ...]) -> Steps[dict[str, Header | Unread]]:
        """Those of some objects.

        What a slow store did not answer in time is asked for again, while it answers for others.
        """
        headers: dict[str, Header | Unread] = dict.fromkeys(names, Unread.UNKNOWN)
        asked = names
        for _ in range(_ASKS):
            headers.update(zip(asked, (yield from do(Describe(asked))), strict=True))
            late = tuple(name for name in asked if headers[name] is Unread.UNKNOWN)
            if not late or len(late) == len(asked):
                break
            asked = late
            yield from self.hold()
        return headers

    def count_foreign(self, name: str) -> None:
        """Count a name that is none of ours."""
        self.report.foreign += 1
        self.report.first_foreign = self.report.first_foreign or name

    def emit_claims(self, runs: Sequence[BlockRun], withdrawn: EvictReason | None = None) -> Steps[None]:
        """Record claims, or their withdrawal for a reason; nothing in a dry run."""
        if runs and not self.dry_run:
            yield from self.hold()
            yield from do(EmitClaims(tuple(runs), withdrawn))


def do(effect: Effect[T]) -> Steps[T]:
    """Have something done; gives its answer."""
    return cast(T, (yield effect))


def runs_of(held: Sequence[Header | BlockRun]) -> list[BlockRun]:
    """The blocks of objects, those of a namespace together, each once."""
    blocks: dict[NamespaceId, dict[bytes, None]] = {}
    for one in held:
        known = blocks.setdefault(one.namespace, {})
        for at in range(0, len(one.hashes), HASH_BYTES):
            known[one.hashes[at : at + HASH_BYTES]] = None
    return [BlockRun(namespace, b"".join(known)) for namespace, known in blocks.items()]
