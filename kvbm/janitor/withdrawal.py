"""Withdraw the claims of objects that are to go, wait for the grace, and delete what nobody has claimed since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvbm.core.events import EvictReason
from kvbm.core.ids import NamespaceId, split_hashes
from kvbm.janitor.effects import BlockRun, ClaimedLast, Delete, Header, Pause, ReadLists, Unread, WriteList
from kvbm.janitor.holdings import Holdings, Victim, expired, over_quota, placed
from kvbm.janitor.reconcile import names_of
from kvbm.janitor.run_steps import DESCRIBED_AT_ONCE, RunSteps, Steps, do, runs_of
from kvbm.pools.object.tombstones import WITHDRAWN_PREFIX

LIST_NAMES = 4096  # of one list of tombstones at most
BATCH_NAMES = 1000  # deleted by one call


class _Listed(NamedTuple):
    """An object in a list of tombstones: what it holds, and those of its blocks whose claim says that somebody wants
    it.
    """

    header: Header
    own: bytes


class _List:
    """A list of tombstones: its names, the objects that are there, and the names of which nobody knows."""

    def __init__(self, names: tuple[str, ...], known: dict[str, _Listed]) -> None:
        self.names, self.known = names, known
        self.waiting: set[str] = set()


class _Going(NamedTuple):
    """A victim that is withdrawn.

    Attributes:
        header: what it proves to hold.
        own: blocks that no other object holds.
        last_ns: when SQL said that any of these was last claimed.
    """

    name: str
    victim: Victim
    header: Header
    own: bytes
    last_ns: int


class Withdrawer:
    """See the module."""

    def __init__(self, steps: RunSteps) -> None:
        self._steps, self._rules, self._report = steps, steps.rules, steps.report
        self._lists = 0

    def finish_left(self) -> Steps[None]:
        """Finish the tombstones that another janitor has left."""
        found = yield from do(ReadLists())
        self._report.lists = len(found)
        if self._steps.dry_run or not found:
            return
        lists: dict[str, _List] = {}
        for number, (name, names) in enumerate(sorted(found.items())):
            yield from self._steps.hold()
            headers = yield from self._steps.describe(names)
            known = {one: _Listed(header, header.hashes) for one, header in headers if isinstance(header, Header)}
            lists[name] = _List(tuple(names), known)
            unknown = {one for one, header in headers if header is Unread.UNKNOWN}
            lists[name].waiting.update(unknown)
            self._lists = max(self._lists, number + 1)
        yield from self._finish(lists)

    def choose(self, holdings: Holdings, more_bytes: int) -> list[Victim]:
        """What is older than its time, then what stands above a quota, the least recently used first."""
        victims: list[Victim] = []
        if self._rules.ttl_s:
            victims += expired(holdings, self._steps.store_now_ns(), self._rules.older_ns)
        gone: dict[NamespaceId, set[bytes]] = {}
        for one in victims:
            gone.setdefault(one.namespace, set()).add(one.block)
        return victims + over_quota(holdings, gone, self._rules.quota_bytes, more_bytes, self._rules.parts)

    def choose_erased(self, holdings: Holdings, erased: Mapping[NamespaceId, frozenset[bytes]]) -> Steps[list[Victim]]:
        """The objects of some namespaces; where blocks are named, those that hold one of them, as their headers say."""
        victims: list[Victim] = []
        for namespace, blocks in erased.items():
            claims = holdings.claims.get(namespace)
            if claims is None:
                continue
            mine = list(placed(claims, EvictReason.CLEARED))
            if not blocks:
                victims += mine
                continue
            for _, k, group in _by_folder(mine):
                names = yield from names_of(holdings, namespace, k, [one.block for one in group])
                described = yield from self._steps.describe(names)
                for (_, header), one in zip(described, group, strict=True):
                    if isinstance(header, Header) and blocks.intersection(split_hashes(header.hashes)):
                        victims.append(one)
        return victims

    def withdraw(self, holdings: Holdings, victims: Sequence[Victim]) -> Steps[None]:
        """Withdraw the claims of some objects, wait, and delete what nobody has claimed since."""
        if self._steps.dry_run:
            for one in victims:
                self._count_withdrawn(one)
            return
        going: list[_Going] = []
        for namespace, blocks, group in _by_folder(victims):
            yield from self._steps.hold()
            names = yield from names_of(holdings, namespace, blocks, [one.block for one in group])
            described = yield from self._steps.describe(names)
            for (name, header), one in zip(described, group, strict=True):
                if isinstance(header, Header):
                    own = holdings.claims[header.namespace].own(header.hashes)
                    going.append(_Going(name, one, header, own, holdings.newest_ns(header.namespace, own)))
        going = yield from self._still_unused(going)
        for reason in dict.fromkeys(entry.victim.reason for entry in going):
            left = [
                BlockRun(entry.header.namespace, holdings.claims[entry.header.namespace].leave(entry.header.hashes))
                for entry in going
                if entry.victim.reason is reason
            ]
            yield from self._steps.emit_claims(runs_of(left), reason)
        for entry in going:
            self._count_withdrawn(entry.victim)
        yield from self._steps.wait_for_sql()
        lists: dict[str, _List] = {}
        for at in range(0, len(going), LIST_NAMES):
            yield from self._steps.hold()
            part = going[at : at + LIST_NAMES]
            self._lists += 1
            name = f"{WITHDRAWN_PREFIX}{self._steps.epoch:012d}-{self._lists:06d}"
            lists[name] = _List(
                tuple(entry.name for entry in part), {entry.name: _Listed(entry.header, entry.own) for entry in part}
            )
            yield from do(WriteList(name, lists[name].names))
        if lists:
            yield from self._finish(lists)

    def _still_unused(self, going: Sequence[_Going]) -> Steps[list[_Going]]:
        """Those victims of which no block of their own was claimed or used since SQL was read, or within its time."""
        old_ns = self._steps.store_now_ns() - self._rules.older_ns
        left: list[_Going] = []
        for at in range(0, len(going), DESCRIBED_AT_ONCE):
            part = going[at : at + DESCRIBED_AT_ONCE]
            last = yield from do(ClaimedLast(tuple(BlockRun(entry.header.namespace, entry.own) for entry in part)))
            for entry, last_ns in zip(part, last, strict=True):
                if last_ns <= entry.last_ns and (entry.victim.reason is not EvictReason.TTL or last_ns < old_ns):
                    left.append(entry)
        self._report.used += len(going) - len(left)
        return left

    def _finish(self, lists: Mapping[str, _List]) -> Steps[None]:
        """The second half: the grace, then delete what nobody has claimed since, and let the rest live."""
        until_s = self._steps.now_s + self._rules.grace_s
        while self._steps.now_s < until_s:
            yield from do(Pause(min(until_s - self._steps.now_s, self._rules.lease_s / 6)))
            yield from self._steps.hold()
        yield from self._steps.wait_for_sql()
        for name, listed in lists.items():
            entries = list(listed.known.items())
            left = set(listed.waiting)
            for at in range(0, len(entries), BATCH_NAMES):
                left |= yield from self._finish_some(entries[at : at + BATCH_NAMES])
            yield from self._steps.hold()
            yield from do(WriteList(name, tuple(one for one in listed.names if one in left), listed.names))

    def _finish_some(self, entries: Sequence[tuple[str, _Listed]]) -> Steps[set[str]]:
        """Delete a batch as far as it is not claimed. Returns what is to be tried again."""
        last = yield from do(ClaimedLast(tuple(BlockRun(one.header.namespace, one.own) for _, one in entries)))
        kept = [one.header for (_, one), ns in zip(entries, last, strict=True) if ns]
        free = [(name, one.header) for (name, one), ns in zip(entries, last, strict=True) if not ns]
        self._report.kept += len(kept)
        yield from self._steps.emit_claims(
            runs_of(kept)
        )  # whole objects: what claimed it may have claimed some of its blocks
        if not free:
            return set()
        yield from self._steps.hold(self._rules.batch_s)
        gone = yield from do(Delete(tuple(name for name, _ in free)))
        for (_, header), is_gone in zip(free, gone, strict=True):
            if is_gone:
                part = self._report.part(header.namespace)
                part.deleted += 1
                part.deleted_bytes += header.size_bytes
        self._report.deleted += sum(gone)
        self._report.undeleted += len(gone) - sum(gone)
        return {name for (name, _), is_gone in zip(free, gone, strict=True) if not is_gone}

    def _count_withdrawn(self, victim: Victim) -> None:
        self._report.part(victim.namespace).withdrawn += 1
        reason = victim.reason.name.lower()
        self._report.withdrawn[reason] = self._report.withdrawn.get(reason, 0) + 1


def _by_folder(victims: Sequence[Victim]) -> Iterator[tuple[NamespaceId, int, list[Victim]]]:
    """Victims by namespace and k."""
    groups: dict[tuple[NamespaceId, int], list[Victim]] = {}
    for one in victims:
        groups.setdefault((one.namespace, one.blocks), []).append(one)
    for (namespace, blocks), group in groups.items():
        yield namespace, blocks, group
