"""Carries out what a janitor wants: against the store, SQL and a manager of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol, assert_never

from kvbm.catalog.sql.rows import NamespaceRow
from kvbm.core.errors import JanitorError, KvbmError, PoolError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId
from kvbm.janitor.claims_reader import ClaimsReader
from kvbm.janitor.effects import (
    Begin,
    BlockRun,
    ClaimedLast,
    Delete,
    Describe,
    Effect,
    EmitClaims,
    Header,
    Inspect,
    ListPage,
    ObjectNames,
    ObjectSeen,
    Pause,
    PutLease,
    ReadClaims,
    ReadLists,
    ReadUsed,
    Unread,
    WaitForSql,
    WriteList,
    WriteUsed,
)
from kvbm.janitor.holdings import parse
from kvbm.janitor.janitor import Janitor
from kvbm.janitor.lease import StoredLease, StoreStatus
from kvbm.janitor.report import Report
from kvbm.janitor.used import USED_PREFIX, UsedList
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.object.reader import Described
from kvbm.pools.object.tombstones import KEPT_PREFIX, LEASE_NAME, LIST_BYTES, decode_list, encode_list, read_lists
from kvbm.pools.stores.base import TRIAL_PREFIX, Get, Got, Listed, ObjectStore, Put, Refusal, StoreTrouble
from kvbm.streams.base import Position

PAGE_NAMES = 1000
_LEASE_BYTES = 64 << 10
_USED_BYTES = 1 << 30  # 67 million objects of a cluster
_CLOCK_PREFIX = f"{KEPT_PREFIX}clock/"
_CLOCK_AGE_S = 3600.0  # objects put to read the store's clock, or to try the store, go after this time at the latest
_POLL_S = 0.05
_SQL_WAIT_S = 2.0  # one look at SQL takes so long at most, so that the lease is renewed in between


class Folder(Protocol):
    """The objects of one k, as `pools.object.BlockObjects`."""

    def admit(self, namespaces: Iterable[Namespace]) -> None: ...
    def names(self, namespace: NamespaceId, hashes: list[bytes]) -> list[str]: ...
    def describe(self, names: list[str]) -> list[Described | Refusal | None]: ...


class DriverOptions(NamedTuple):
    """What one run is told.

    Attributes:
        cluster: a name that no other cluster of the store has.
        run: a number of this run's own.
        deadline_s: of one request to the store.
        batch_s: of a batch of deletions.
        dry_run: change nothing.
    """

    cluster: str
    run: str
    deadline_s: float
    batch_s: float
    dry_run: bool = False


class Driver:
    """The real world of one run.

    Args:
        folder: opens the objects of a k.
        begin: makes the janitor's instance.
    """

    def __init__(
        self,
        store: ObjectStore,
        claims: ClaimsReader,
        folder: Callable[[int], Folder],
        begin: Callable[[list[Namespace]], Manager],
        options: DriverOptions,
        *,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._claims, self._new_folder, self._begin = store, claims, folder, begin
        self._used_name = f"{USED_PREFIX}{options.cluster}"
        self._options, self._deadline_s = options, options.deadline_s
        self._wall_clock_ns, self._sleep = wall_clock_ns, sleep
        self._folders: dict[int, Folder] = {}
        self._namespaces: list[Namespace] = []
        self._manager: Manager | None = None
        self._epoch = 0
        self._emitted = Position(0, 0)  # type: ignore[arg-type]
        self._listing: tuple[str, Iterator[Listed]] | None = None  # where it stands, and what comes next

    def close(self) -> None:
        """End the janitor's instance."""
        if self._manager is not None:
            self._manager.close()

    def do(self, effect: Effect[Any]) -> Any:
        """Carry an effect out; gives its answer. Raises KvbmError: it cannot be done."""
        match effect:
            case Inspect():
                return self._inspect()
            case PutLease(body, expected):
                return self._put_lease(body, expected)
            case ReadLists():
                return read_lists(self._store, self._deadline_s)
            case ReadUsed():
                return self._read_used()
            case WriteUsed(body):
                return self._write_used(body)
            case ObjectNames(blocks, run):
                return self._names(blocks, run)
            case ListPage(after):
                return self._page(after)
            case Describe(names):
                return self._describe(names)
            case WriteList():
                return self._write_list(effect)
            case Delete(names):
                return [refusal is None for refusal in self._store.delete(names, self._options.batch_s)]
            case Pause(seconds):
                return self._sleep(seconds)
            case _:
                return self._do_with_catalog(effect)

    def _do_with_catalog(self, effect: Effect[Any]) -> Any:
        match effect:
            case Begin():
                return self._begin_instance()
            case EmitClaims():
                return self._emit_claims(effect)
            case WaitForSql(fresh):
                return self._wait_for_sql(fresh)
            case ReadClaims():
                return self._claims.claims()
            case ClaimedLast(runs):
                return self._claims.last(runs)
            case _:
                raise AssertionError(effect)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _inspect(self) -> StoreStatus:
        """The store's clock is what it stamps an object with that is put now."""
        if self._options.dry_run:
            return StoreStatus(self._wall_clock_ns(), 0.0, StoredLease(b"", 0.0))
        probe = f"{_CLOCK_PREFIX}{self._options.run}-{self._wall_clock_ns()}"
        (refusal,) = self._store.put([Put(probe, b"what time is it?")], self._deadline_s)
        if refusal is not None:
            raise self._trouble(f"put of {probe}", refusal)
        wall_ns = self._wall_clock_ns()
        kept = {entry.name: entry.modified_ns for entry in self._store.listed(KEPT_PREFIX, self._deadline_s)}
        if probe not in kept:
            raise PoolError(
                f"OBJECT pool {self._store.name}: an object put just now is not in the listing; a janitor needs a "
                "store that lists what it has"
            )
        store_ns = kept[probe]
        old_ns = store_ns - int(_CLOCK_AGE_S * 1e9)
        probes = [
            name
            for name, ns in kept.items()
            if name.startswith((_CLOCK_PREFIX, TRIAL_PREFIX)) and (name == probe or ns < old_ns)
        ]
        self._store.delete(probes, self._deadline_s)
        trial = f"{TRIAL_PREFIX}{self._options.run}"
        ignored = self._store.ignored_conditions(trial, self._deadline_s)
        if isinstance(ignored, Refusal):
            raise self._trouble(f"trial of conditional puts of {trial}", ignored)
        (lease,) = self._store.get([Get(LEASE_NAME, most_bytes=_LEASE_BYTES)], self._deadline_s)
        if isinstance(lease, Refusal) and lease.trouble is not StoreTrouble.ABSENT:
            raise self._trouble("read of the lease", lease)
        body = bytes(lease.body) if isinstance(lease, Got) else b""
        age_s = (store_ns - kept.get(LEASE_NAME, store_ns)) / 1e9
        return StoreStatus(store_ns, (wall_ns - store_ns) / 1e9, StoredLease(body, age_s), ignored)

    def _put_lease(self, body: bytes, expected: bytes) -> bool:
        refusal = self._store.replace(LEASE_NAME, body, expected or None, self._deadline_s)
        if refusal is not None and refusal.trouble is not StoreTrouble.TAKEN:
            raise self._trouble("change of the lease", refusal)
        return refusal is None

    def _names(self, blocks: int, run: BlockRun) -> list[str]:
        try:
            return self._folder(blocks).names(run.namespace, _split(run.hashes))
        except PoolError:
            return []  # a tenant's whose keys are not here: nobody here can tell what they stand under

    def _page(self, after: str) -> list[ObjectSeen]:
        if self._listing is None or self._listing[0] != after:
            self._listing = after, self._store.listed("", self._deadline_s, after)
        page = [ObjectSeen(*listed) for listed in islice(self._listing[1], PAGE_NAMES)]
        self._listing = (page[-1].name, self._listing[1]) if page else None
        return page

    def _describe(self, names: tuple[str, ...]) -> list[Header | Unread]:
        by_blocks: dict[int, list[str]] = {}
        for name in names:
            if (named := parse(name)) is not None:
                by_blocks.setdefault(named.blocks, []).append(name)
        found: dict[str, Header | Unread] = {}
        for blocks, group in by_blocks.items():
            for name, described in zip(group, self._folder(blocks).describe(group), strict=True):
                found[name] = _header(described)
        return [found.get(name, Unread.FOREIGN) for name in names]

    def _write_list(self, effect: WriteList) -> None:
        name, names, before = effect.name, effect.names, effect.before
        refusal: Refusal | None
        if not names:
            (refusal,) = self._store.delete([name], self._deadline_s)
        elif not before:
            (refusal,) = self._store.put([Put(name, encode_list(names))], self._deadline_s)
        else:
            (held,) = self._store.get([Get(name, most_bytes=LIST_BYTES)], self._deadline_s)
            if isinstance(held, Got) and decode_list(held.body) == list(names):
                return
            refusal = held if isinstance(held, Refusal) else None
            if isinstance(held, Got):
                refusal = self._store.replace(name, encode_list(names), bytes(held.body), self._deadline_s)
        if refusal is not None:
            raise self._trouble(f"change of {name}", refusal)

    def _read_used(self) -> list[UsedList]:
        listed = [entry for entry in self._store.listed(USED_PREFIX, self._deadline_s) if entry.name != self._used_name]
        answers = (
            self._store.get([Get(entry.name, most_bytes=_USED_BYTES) for entry in listed], self._deadline_s)
            if listed
            else []
        )
        for got in answers:
            if (
                isinstance(got, Refusal) and got.trouble is StoreTrouble.UNUSABLE
            ):  # what is in it must not count as unused
                raise self._trouble("read of what another cluster used", got)
        return [
            UsedList(bytes(got.body), entry.modified_ns)
            for entry, got in zip(listed, answers, strict=True)
            if isinstance(got, Got)
        ]

    def _write_used(self, body: bytes) -> None:
        (held,) = self._store.get([Get(self._used_name, most_bytes=_USED_BYTES)], self._deadline_s)
        if isinstance(held, Refusal) and held.trouble is not StoreTrouble.ABSENT:
            raise self._trouble(f"read of {self._used_name}", held)
        before = bytes(held.body) if isinstance(held, Got) else None
        refusal = self._store.replace(self._used_name, body, before, self._deadline_s)
        if refusal is not None:
            raise self._trouble(f"change of {self._used_name}", refusal)

    def _folder(self, blocks: int) -> Folder:
        if blocks not in self._folders:
            self._folders[blocks] = self._new_folder(blocks)
            self._folders[blocks].admit(self._known_namespaces())
        return self._folders[blocks]

    def _trouble(self, what: str, refusal: Refusal) -> PoolError:
        return PoolError(
            f"OBJECT pool {self._store.name}: {what} failed: {refusal.words}; check pools.object and what its "
            "credentials may do "
            "(a janitor lists, puts and deletes)"
        )

    # -- events -------------------------------------------------------------------------------------------------------

    def _known_namespaces(self) -> list[Namespace]:
        if not self._namespaces:
            rows: list[NamespaceRow] = self._claims.namespaces()
            self._namespaces = [row.fields for row in rows if row.fields.id == row.id]
        return self._namespaces

    def _begin_instance(self) -> None:
        self._manager = self._begin(self._known_namespaces())
        self._epoch = self._manager.epoch

    def _open_manager(self) -> Manager:
        if self._manager is None:
            raise JanitorError("the janitor has no instance yet; this is a bug")
        if self._manager.epoch != self._epoch:
            raise JanitorError(
                f"the janitor's instance {self._manager.instance} had to begin epoch {self._manager.epoch}: another "
                "process took its "
                "place meanwhile, or its events found no room. Nothing more was deleted"
            )
        return self._manager

    def _emit_claims(self, effect: EmitClaims) -> None:
        manager = self._open_manager()
        for namespace, hashes in effect.runs:
            if effect.withdrawn is None:
                manager.claim(namespace, hashes)
            else:
                manager.withdraw(namespace, hashes, effect.withdrawn)

    def _wait_for_sql(self, fresh: bool) -> bool:
        """Events from before something new of ours are in SQL once that is."""
        manager = self._open_manager()
        if fresh:
            manager.take_snapshot()
            self._emitted = Position(manager.epoch, manager.applied())
        until_s = time.monotonic() + _SQL_WAIT_S
        while self._claims.position(manager.instance) < self._emitted:
            if time.monotonic() > until_s:
                return False
            self._sleep(_POLL_S)
        return True


def run_once(janitor: Janitor, driver: Driver, clock: Callable[[], float] = time.monotonic) -> Report:
    """Drive one run to its end.

    Raises KvbmError: what ended it early; whatever ends it, the lease is given back if it can be.
    """
    try:
        _drive(janitor, driver, clock, janitor.step(clock()))
    except KvbmError:
        raise
    except BaseException:
        with suppress(Exception):
            _drive(janitor, driver, clock, janitor.step(clock(), JanitorError("interrupted")))
        raise
    return janitor.report


def _drive(janitor: Janitor, driver: Driver, clock: Callable[[], float], effect: Effect[Any] | None) -> None:
    while effect is not None:
        try:
            answer = driver.do(effect)
        except KvbmError as error:
            answer = error
        effect = janitor.step(clock(), answer)


def _header(described: Described | Refusal | None) -> Header | Unread:
    match described:
        case None:
            return Unread.FOREIGN
        case Refusal(trouble):
            return Unread.GONE if trouble is StoreTrouble.ABSENT else Unread.UNKNOWN
        case Described():
            return Header(described.namespace, described.hashes, described.size_bytes)
        case _:
            assert_never(described)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
