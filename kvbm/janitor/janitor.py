"""One run of the janitor, step by step, without thread, clock or socket.

`step(now_s, answer)` takes the answer to the last effect and gives the next one, until there is none. In this order:

1. the lease, so that over all clusters of a store one janitor works; the two clocks are compared
2. the withdrawn lists that another has left: their grace begins anew, and what nobody has claimed since is deleted
3. the claims, from SQL, beside the store's listing: objects without a claim are claimed; claims without an object withdrawn
4. what is older than its time, and what stands above a quota: the claims of the blocks that no other object holds are withdrawn and
   the catalog has that; its names are written into the store, where every instance sees them; the grace passes; what nobody has claimed since is deleted, the list goes

It may die anywhere. Claims withdrawn and no list: the next run finds objects without a claim and claims them, so they live once
more. A list: the next run, of whatever cluster, begins its grace anew, and deletes or lets go. An object deleted and named still:
it is gone already. Nothing is deleted whose name has not been in a list for a whole grace of one janitor, on that one's own
monotonic clock, and that its catalog has claimed since. A holder of the lease that sleeps for longer than the lease notices before its next batch; should it
sleep between looking and deleting, what it deletes late costs a miss, never a wrong byte.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from kvbm.core.errors import JanitorBusyError, JanitorError, KvbmError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId, hash_count
from kvbm.janitor import lease as leases
from kvbm.janitor.effects import (
    Begin,
    ClaimedLast,
    Delete,
    Describe,
    Effect,
    Header,
    ListPage,
    Look,
    Names,
    ObjectSeen,
    Pause,
    PutLease,
    ReadClaims,
    ReadLists,
    ReadUsed,
    Run,
    Say,
    Settle,
    Unread,
    WriteList,
    WriteUsed,
)
from kvbm.janitor.holdings import (
    Chosen,
    Holdings,
    Named,
    Space,
    TenantPart,
    column,
    expired,
    lacking,
    over_quota,
    parse,
)
from kvbm.janitor.report import Report
from kvbm.janitor.used import UsedBy, UsedHere
from kvbm.pools.object.tombstones import KEPT_PREFIX, WITHDRAWN_PREFIX

LIST_NAMES = 4096  # of one withdrawn list at most
WAVE_NAMES = 16 * LIST_NAMES  # withdrawn together, at most: each wave waits for one grace
BATCH_NAMES = 1000  # deleted by one call
DESCRIBED_AT_ONCE = 512
_ASKS = 8  # for the headers of so many objects, of a store that is slow
_RENEWALS = 3  # tried in a row, where the store takes so long that the lease is nearly over again
_FIRST_NAME = f"{KEPT_PREFIX.removesuffix('/')}0"  # what sorts behind all that is kept besides blocks
_USED_S = 30 * 86_400.0  # where nothing goes for its age, other clusters are told of uses so far back
_LOOK_CLOSER_RUNS = 4  # one run in so many reads headers also where numbers say that nothing differs
_SECOND_NS = 1_000_000_000

T = TypeVar("T")
Steps = Generator[Effect[Any], Any, T]


class Rules(NamedTuple):
    """What a janitor goes by.

    Attributes:
        ttl_s: objects go that nobody has claimed or used for so long; 0: never.
        quota_bytes: the least recently used go while there are more; 0: no limit.
        grace_s: between a withdrawal that everybody can see and the deletion.
        young_s: an object without a claim may get one yet for so long.
        skew_s: how far clocks of instances, janitors and store may be apart. It is added to the TTL, and a janitor whose clock is
            farther from the store's does not work.
        lease_s: for how long the lease is taken.
        settle_s: how long the catalog may take to store what was said.
        only_blocks: the k of this pool; 0: every k that is there.
        parts: of tenants, by name; OTHERS for all that are not named.
        sealed: whether its objects are those whose names tell nothing; others are not this pool's, then.
    """

    ttl_s: float
    quota_bytes: int
    grace_s: float
    young_s: float = 60.0
    skew_s: float = 60.0
    lease_s: float = 60.0
    settle_s: float = 60.0
    only_blocks: int = 0
    sealed: bool = False
    parts: Mapping[str, TenantPart] = {}

    @property
    def batch_s(self) -> float:
        """How long a batch of deletions may take: it must end before the lease does."""
        return self.lease_s / 4


class Janitor:
    """See the module.

    Args:
        holder, run: who this is, for people, and a number of its own.
        dry_run: look, and change nothing; it needs neither lease nor instance.

    Attributes:
        report: what was found and done so far.
    """

    def __init__(self, pool: str, holder: str, run: str, rules: Rules, dry_run: bool = False) -> None:
        self.report = Report(pool=pool, dry_run=dry_run)
        self._holder, self._run, self._rules, self._dry_run = holder, run, rules, dry_run
        self._now_s = 0.0
        self._lease = leases.Lease(holder="", run="", epoch=0, held_s=0.0)
        self._lease_body = b""  # as it lies in the store while we have it
        self._good_until_s = -math.inf
        self._store_ns, self._store_ns_at_s = 0, 0.0  # the store's time at one of ours
        self._lists = 0
        self._steps = self._work()
        self._begun = False

    def step(self, now_s: float, answer: Any = None) -> Effect[Any] | None:
        """The next effect; None when the run is over.

        Args:
            now_s: on a monotonic clock that goes on while a process sleeps.
            answer: to the last effect; an exception of kvbm's where it failed.
        Raises: what ends the run early: JanitorError, or the exception that was given.
        """
        self._now_s = now_s
        try:
            if isinstance(answer, KvbmError):
                return self._steps.throw(answer)
            if not self._begun:
                self._begun = True
                return next(self._steps)
            return self._steps.send(answer)
        except StopIteration:
            return None

    # -- the run ------------------------------------------------------------------------------------------------------

    def _work(self) -> Steps[None]:
        yield from self._take_lease()
        try:
            if not self._dry_run:
                yield from _do(Begin())
                yield from self._settle()
            yield from self._finish_left()
            holdings = Holdings((yield from _do(ReadClaims())))
            more_bytes = yield from self._go_through(holdings)
            yield from self._mend(holdings)
            self._tell(holdings)
            chosen = self._choose(holdings, more_bytes)
            for at in range(0, len(chosen), WAVE_NAMES):
                yield from self._withdraw(holdings, chosen[at : at + WAVE_NAMES])
        except KvbmError:
            with suppress(KvbmError):  # it ends by itself
                yield from self._give_lease_back()
            raise
        yield from self._give_lease_back()

    def _take_lease(self) -> Steps[None]:
        asked_s = self._now_s
        sight = yield from _do(Look())
        skew_s, allowed_s = sight.skew_s, self._rules.skew_s
        if abs(skew_s) > allowed_s:
            way = "ahead of" if skew_s > 0 else "behind"
            raise JanitorError(
                f"this machine's clock is {abs(skew_s):.0f} s {way} the store's, more than gc.skew_s ({allowed_s:g}); set the clock. "
                "Nothing was changed"
            )
        self._store_ns, self._store_ns_at_s = sight.store_ns, self._now_s
        if self._dry_run:
            return
        lease = leases.claimed(sight.lease, self._holder, self._run, self._rules.lease_s)
        if not (yield from self._put_lease(lease, sight.lease.body, asked_s)):
            raise JanitorBusyError("another janitor took the lease just now; nothing to do")

    def _put_lease(self, lease: leases.Lease, expected: bytes, asked_s: float) -> Steps[bool]:
        body = leases.encode(lease)
        taken = yield from _do(PutLease(body, expected))
        if taken:
            self._lease, self._lease_body = lease, body
            self._good_until_s = asked_s + lease.held_s
        else:
            self._lease_body = b""
        return taken

    def _hold(self, for_s: float = 0.0) -> Steps[None]:
        """Go on only while the lease is ours, and for so long at least; renew it in time. Raises JanitorError: it was lost."""
        if self._dry_run:
            return
        for _ in range(_RENEWALS):
            if self._good_until_s - self._now_s >= max(for_s, self._lease.held_s * 2 / 3):
                return
            asked_s = self._now_s
            renewed = msgspec.structs.replace(self._lease, renewed=self._lease.renewed + 1)
            if not (yield from self._put_lease(renewed, self._lease_body, asked_s)):
                raise JanitorError(
                    f"the lease was lost: no renewal for {asked_s - self._good_until_s + self._lease.held_s:.0f} s, and another "
                    "janitor has taken it. Nothing more was deleted; the other goes on"
                )
            if self._good_until_s - self._now_s >= for_s:
                return
        raise JanitorError(f"the store takes too long to renew a lease of {self._lease.held_s:g} s; raise gc.lease_s")

    def _give_lease_back(self) -> Steps[None]:
        if self._lease_body:
            free = msgspec.structs.replace(self._lease, holder="", renewed=self._lease.renewed + 1)
            yield from _do(PutLease(leases.encode(free), self._lease_body))
            self._lease_body = b""

    def _store_now_ns(self) -> int:
        """The store's time, by our monotonic clock since we looked."""
        return self._store_ns + int((self._now_s - self._store_ns_at_s) * _SECOND_NS)

    def _settle(self) -> Steps[None]:
        """Wait until SQL has all that was said before now. Raises JanitorError: it does not come to it."""
        deadline_s, fresh = self._now_s + self._rules.settle_s, True
        while not (yield from _do(Settle(fresh))):
            fresh = False
            if self._now_s > deadline_s:
                raise JanitorError(
                    f"the catalog has not stored within {self._rules.settle_s:g} s what was said; start `kvbm-catalog serve` on this "
                    "cluster and database, or see why it is behind. Nothing more was deleted"
                )
            yield from self._hold()

    # -- what is there ------------------------------------------------------------------------------------------------

    def _finish_left(self) -> Steps[None]:
        """Finish the lists another janitor has left."""
        found = yield from _do(ReadLists())
        self.report.lists = len(found)
        if self._dry_run or not found:
            return
        lists: dict[str, _List] = {}
        for number, (name, names) in enumerate(sorted(found.items())):
            yield from self._hold()
            headers = yield from self._describe(names)
            known = {one: _Listed(header, header.hashes) for one, header in headers if isinstance(header, Header)}
            lists[name] = _List(tuple(names), known)
            unknown = {one for one, header in headers if header is Unread.UNKNOWN}
            lists[name].waiting.update(unknown)
            self._lists = max(self._lists, number + 1)
        yield from self._finish(lists)

    def _go_through(self, holdings: Holdings) -> Steps[int]:
        """Hold the listing against the claims, and claim what is not claimed. Returns the bytes of what was found so."""
        used_by, used_here = UsedBy((yield from _do(ReadUsed()))), UsedHere()
        old_ns = self._store_now_ns() - self._older_ns()
        after, found_bytes = _FIRST_NAME, 0
        while page := (yield from _do(ListPage(after))):
            after = page[-1].name
            yield from self._hold()
            lonely: list[ObjectSeen] = []
            for seen in page:
                named = parse(seen.name)
                if named is None or not self._is_ours(named):
                    self._count_foreign(seen.name, named is None)
                    continue
                if named.namespace is None and not holdings.knows_sealed(named.blocks):
                    yield from self._learn_sealed(holdings, named.blocks)
                place = holdings.place(named)
                if place is not None:
                    space = holdings.spaces[place.namespace]
                    space.take(place.row, named.blocks, seen, used_by.last_ns(seen.name))
                    if space.last_ns[place.row] > old_ns:
                        used_here.add(seen.name, int(space.last_ns[place.row]))
                elif self._is_young(seen):
                    self.report.waiting += 1
                    holdings.young.append((seen.name, named.blocks))
                else:
                    lonely.append(seen)
            found_bytes += yield from self._claim_found(holdings, lonely, used_by)
        if not self._dry_run:
            yield from _do(WriteUsed(used_here.body()))
        return found_bytes

    def _is_ours(self, named: Named) -> bool:
        """Whether an object is of this pool; others may share the store."""
        is_sealed = named.namespace is None
        return self._rules.only_blocks in (0, named.blocks) and is_sealed == self._rules.sealed

    def _is_young(self, seen: ObjectSeen) -> bool:
        return self._store_now_ns() - seen.modified_ns < self._rules.young_s * _SECOND_NS

    def _count_foreign(self, name: str, is_no_object: bool) -> None:
        if is_no_object:
            self.report.foreign += 1
            self.report.first_foreign = self.report.first_foreign or name

    def _learn_sealed(self, holdings: Holdings, blocks: int) -> Steps[None]:
        """Learn under which names the claims of a pool stand whose names tell nothing."""
        names: dict[NamespaceId, list[str]] = {}
        for namespace, space in holdings.spaces.items():
            packed = space.hashes.tobytes()
            if packed:
                first = yield from _do(Names(blocks, Run(namespace, packed[:HASH_BYTES])))
                if not first:
                    holdings.nameless.add(namespace)
                parts = parse(first[0]) if first else None
                if parts is not None and parts.namespace is None:
                    names[namespace] = yield from _do(Names(blocks, Run(namespace, packed)))
        holdings.learn_sealed(blocks, names)

    def _claim_found(self, holdings: Holdings, lonely: Sequence[ObjectSeen], used_by: UsedBy) -> Steps[int]:
        """Claim objects that nobody claims, by their headers. Returns their bytes."""
        described = yield from self._describe([seen.name for seen in lonely])
        headers: list[Header] = []
        for seen, (name, header) in zip(lonely, described, strict=True):
            if not isinstance(header, Header):
                holdings.untold += 1
            elif not holdings.take_by_header(header, seen, used_by.last_ns(name)):
                headers.append(header)
        for header in headers:
            part = self.report.part(header.namespace)
            part.objects += 1
            part.blocks += hash_count(header.hashes)
            part.bytes += header.size_bytes
            holdings.found.setdefault(header.namespace, []).append(header.hashes)
        self.report.found += len(headers)
        yield from self._say(_runs(headers))
        return sum(header.size_bytes for header in headers)

    def _mend(self, holdings: Holdings) -> Steps[None]:
        """Bring claims to what objects hold, in each namespace where their numbers differ; they do where objects share blocks, too.

        Blocks that objects share and claims without an object can make up for each other in the numbers, so some runs look closer.
        """
        looks_closer = zlib.crc32(self._run.encode()) % _LOOK_CLOSER_RUNS == 0
        for space in holdings.spaces.values():
            placed = np.flatnonzero(space.blocks > 0)
            found = b"".join(holdings.found.get(space.namespace, []))
            if int(space.blocks.sum()) == len(space.hashes) and not looks_closer:
                continue
            if space.namespace in holdings.nameless and holdings.untold:
                space.learn_shared(None)  # its objects may be among those that nobody here can open
                continue
            young = [name for name, blocks in holdings.young if blocks > 1]  # some of their blocks may be claimed
            if (space.blocks[placed] == 1).all() and not young:
                present = np.union1d(space.hashes[placed], column(found))
            else:
                headers = yield from self._headers_of(holdings, space, placed, young)
                held = None if headers is None else column(b"".join(header.hashes for header in headers) + found)
                space.learn_shared(held)
                if held is None:
                    continue
                present = np.unique(held)
            yield from self._mend_space(space, present, column(found))

    def _names_of(
        self, holdings: Holdings, namespace: NamespaceId, blocks: int, last: Sequence[bytes]
    ) -> Steps[list[str]]:
        """The names of objects that were seen, by their last blocks."""
        if namespace in holdings.nameless:
            return [holdings.names[namespace, block] for block in last]
        return (yield from _do(Names(blocks, Run(namespace, b"".join(last)))))

    def _headers_of(
        self, holdings: Holdings, space: Space, placed: np.ndarray, young: Sequence[str]
    ) -> Steps[list[Header] | None]:
        """The headers of all objects of a namespace; None where one cannot be told, so that nobody knows which claims are without."""
        names = list(young)
        for blocks in np.unique(space.blocks[placed]).tolist():
            rows = placed[space.blocks[placed] == blocks]
            names += yield from self._names_of(
                holdings, space.namespace, blocks, [space.block(row) for row in rows.tolist()]
            )
        described = yield from self._describe(names)
        if any(header is Unread.UNKNOWN for _, header in described):
            return None
        return [h for _, h in described if isinstance(h, Header) and h.namespace == space.namespace]

    def _mend_space(self, space: Space, present: np.ndarray, found: np.ndarray) -> Steps[None]:
        """Claim what objects hold and nobody claims; withdraw what is claimed and no object holds."""
        settled_ns = self._store_now_ns() - int((self._rules.young_s + self._rules.skew_s) * _SECOND_NS)
        missing = lacking(space.hashes, present)
        missing = missing[space.last_ns[missing] < settled_ns]
        unclaimed = present[lacking(present, space.hashes)]
        unclaimed = unclaimed[lacking(unclaimed, found)]
        self.report.missing_blocks += len(missing)
        self.report.mended_blocks += len(unclaimed)
        if len(missing):
            yield from self._say([Run(space.namespace, space.packed(missing))], EvictReason.MISSING)
        if len(unclaimed):
            yield from self._say([Run(space.namespace, bytes(unclaimed.tobytes()))])

    def _tell(self, holdings: Holdings) -> None:
        ahead_ns = self._store_now_ns() + int(self._rules.skew_s * _SECOND_NS)
        for space in holdings.spaces.values():
            part = self.report.part(space.namespace)
            part.tenant = space.tenant
            part.objects += int((space.blocks > 0).sum())
            part.blocks += int(space.blocks.sum())
            part.bytes += int(space.sizes.sum())
            self.report.future_blocks += int((space.last_ns > ahead_ns).sum())

    # -- what goes ----------------------------------------------------------------------------------------------------

    def _choose(self, holdings: Holdings, more_bytes: int) -> list[Chosen]:
        """What is older than its time, then what stands above a quota, the least recently used first."""
        chosen: list[Chosen] = []
        if self._rules.ttl_s:
            chosen += expired(holdings, self._store_now_ns(), self._older_ns())
        gone: dict[NamespaceId, set[bytes]] = {}
        for one in chosen:
            gone.setdefault(one.namespace, set()).add(one.block)
        return chosen + over_quota(holdings, gone, self._rules.quota_bytes, more_bytes, self._rules.parts)

    def _older_ns(self) -> int:
        """The age from which objects go: clocks that are apart by less than is allowed make none go early."""
        return int(((self._rules.ttl_s or _USED_S) + self._rules.skew_s) * _SECOND_NS)

    def _withdraw(self, holdings: Holdings, chosen: Sequence[Chosen]) -> Steps[None]:
        """Withdraw the claims of some objects, wait, and delete what nobody has claimed since."""
        if self._dry_run:
            for one in chosen:
                self._count_withdrawn(one)
            return
        going: list[_Going] = []
        for namespace, blocks, group in _by_folder(chosen):
            yield from self._hold()
            names = yield from self._names_of(holdings, namespace, blocks, [one.block for one in group])
            described = yield from self._describe(names)
            for (name, header), one in zip(described, group, strict=True):
                if isinstance(header, Header):
                    own = holdings.spaces[header.namespace].own(header.hashes)
                    going.append(_Going(name, one, header, own, holdings.newest_ns(header.namespace, own)))
        going = yield from self._still_unused(going)
        for reason in dict.fromkeys(entry.chosen.reason for entry in going):
            left = [
                Run(entry.header.namespace, holdings.spaces[entry.header.namespace].leave(entry.header.hashes))
                for entry in going
                if entry.chosen.reason is reason
            ]
            yield from self._say(_runs(left), reason)
        for entry in going:
            self._count_withdrawn(entry.chosen)
        yield from self._settle()
        lists: dict[str, _List] = {}
        for at in range(0, len(going), LIST_NAMES):
            yield from self._hold()
            part = going[at : at + LIST_NAMES]
            self._lists += 1
            name = f"{WITHDRAWN_PREFIX}{self._lease.epoch:012d}-{self._lists:06d}"
            lists[name] = _List(
                tuple(entry.name for entry in part), {entry.name: _Listed(entry.header, entry.own) for entry in part}
            )
            yield from _do(WriteList(name, lists[name].names))
        if lists:
            yield from self._finish(lists)

    def _still_unused(self, going: Sequence[_Going]) -> Steps[list[_Going]]:
        """Those of the chosen of which no block of their own was claimed or used since SQL was read, or within its time."""
        old_ns = self._store_now_ns() - self._older_ns()
        left: list[_Going] = []
        for at in range(0, len(going), DESCRIBED_AT_ONCE):
            part = going[at : at + DESCRIBED_AT_ONCE]
            last = yield from _do(ClaimedLast(tuple(Run(entry.header.namespace, entry.own) for entry in part)))
            for entry, last_ns in zip(part, last, strict=True):
                if last_ns <= entry.last_ns and (entry.chosen.reason is not EvictReason.TTL or last_ns < old_ns):
                    left.append(entry)
        self.report.used += len(going) - len(left)
        return left

    def _finish(self, lists: Mapping[str, _List]) -> Steps[None]:
        """The second half: the grace, then delete what nobody has claimed since, and let the rest live."""
        until_s = self._now_s + self._rules.grace_s
        while self._now_s < until_s:
            yield from _do(Pause(min(until_s - self._now_s, self._rules.lease_s / 6)))
            yield from self._hold()
        yield from self._settle()
        for name, listed in lists.items():
            entries = list(listed.known.items())
            left = set(listed.waiting)
            for at in range(0, len(entries), BATCH_NAMES):
                left |= yield from self._finish_some(entries[at : at + BATCH_NAMES])
            yield from self._hold()
            yield from _do(WriteList(name, tuple(one for one in listed.names if one in left), listed.names))

    def _finish_some(self, entries: Sequence[tuple[str, _Listed]]) -> Steps[set[str]]:
        """Delete a batch as far as it is not claimed. Returns what is to be tried again."""
        last = yield from _do(ClaimedLast(tuple(Run(one.header.namespace, one.own) for _, one in entries)))
        kept = [one.header for (_, one), ns in zip(entries, last, strict=True) if ns]
        free = [(name, one.header) for (name, one), ns in zip(entries, last, strict=True) if not ns]
        self.report.kept += len(kept)
        yield from self._say(_runs(kept))  # whole objects: what claimed it may have claimed some of its blocks
        if not free:
            return set()
        yield from self._hold(self._rules.batch_s)
        gone = yield from _do(Delete(tuple(name for name, _ in free)))
        for (_, header), is_gone in zip(free, gone, strict=True):
            if is_gone:
                part = self.report.part(header.namespace)
                part.deleted += 1
                part.deleted_bytes += header.size_bytes
        self.report.deleted += sum(gone)
        self.report.undeleted += len(gone) - sum(gone)
        return {name for (name, _), is_gone in zip(free, gone, strict=True) if not is_gone}

    def _count_withdrawn(self, chosen: Chosen) -> None:
        self.report.part(chosen.namespace).withdrawn += 1
        reason = chosen.reason.name.lower()
        self.report.withdrawn[reason] = self.report.withdrawn.get(reason, 0) + 1

    # -- small steps --------------------------------------------------------------------------------------------------

    def _describe(self, names: Sequence[str]) -> Steps[list[tuple[str, Header | Unread]]]:
        """What objects hold, in their order; what does not tell is counted."""
        described: list[tuple[str, Header | Unread]] = []
        for at in range(0, len(names), DESCRIBED_AT_ONCE):
            yield from self._hold()
            headers = yield from self._ask_headers(tuple(names[at : at + DESCRIBED_AT_ONCE]))
            for name, header in headers.items():
                described.append((name, header))
                if header is Unread.FOREIGN:
                    self._count_foreign(name, True)
                self.report.unknown += header is Unread.UNKNOWN
        return described

    def _ask_headers(self, names: tuple[str, ...]) -> Steps[dict[str, Header | Unread]]:
        """Those of some objects. What a slow store did not answer in time is asked for again, while it answers for others."""
        headers: dict[str, Header | Unread] = dict.fromkeys(names, Unread.UNKNOWN)
        asked = names
        for _ in range(_ASKS):
            headers.update(zip(asked, (yield from _do(Describe(asked))), strict=True))
            late = tuple(name for name in asked if headers[name] is Unread.UNKNOWN)
            if not late or len(late) == len(asked):
                break
            asked = late
            yield from self._hold()
        return headers

    def _say(self, runs: Sequence[Run], withdrawn: EvictReason | None = None) -> Steps[None]:
        if runs and not self._dry_run:
            yield from self._hold()
            yield from _do(Say(tuple(runs), withdrawn))


class _Listed(NamedTuple):
    """An object in a withdrawn list: what it holds, and those of its blocks whose claim says that somebody wants it."""

    header: Header
    own: bytes


class _List:
    """A withdrawn list: its names, those that are there, and those of which nobody knows."""

    def __init__(self, names: tuple[str, ...], known: dict[str, _Listed]) -> None:
        self.names, self.known = names, known
        self.waiting: set[str] = set()


class _Going(NamedTuple):
    """An object that was chosen.

    Attributes:
        header: what it proves to hold.
        own: blocks that no other object holds.
        last_ns: when SQL said that any of these was last claimed.
    """

    name: str
    chosen: Chosen
    header: Header
    own: bytes
    last_ns: int


def _do(effect: Effect[T]) -> Steps[T]:
    """Have something done; gives its answer."""
    return cast(T, (yield effect))


def _runs(held: Sequence[Header | Run]) -> list[Run]:
    """The blocks of objects, those of a namespace together, each once."""
    blocks: dict[NamespaceId, dict[bytes, None]] = {}
    for one in held:
        known = blocks.setdefault(one.namespace, {})
        for at in range(0, len(one.hashes), HASH_BYTES):
            known[one.hashes[at : at + HASH_BYTES]] = None
    return [Run(namespace, b"".join(known)) for namespace, known in blocks.items()]


def _by_folder(chosen: Sequence[Chosen]) -> Iterator[tuple[NamespaceId, int, list[Chosen]]]:
    """The chosen by namespace and k."""
    groups: dict[tuple[NamespaceId, int], list[Chosen]] = {}
    for one in chosen:
        groups.setdefault((one.namespace, one.blocks), []).append(one)
    for (namespace, blocks), group in groups.items():
        yield namespace, blocks, group
