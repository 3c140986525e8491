"""Settings → an erasure: asked for, its objects seen to, and followed until all is gone or nobody waits any longer."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvbm.assembly.janitor import CLOCKS, Clocks, erase_objects
from kvbm.assembly.manager import database_url, make_data_dir, stream_of_catalog
from kvbm.assembly.pools import key_source
from kvbm.catalog.service import CatalogService, Companion
from kvbm.catalog.sql.store import SqlStore
from kvbm.config import Settings, check_settings
from kvbm.core.errors import ConfigError, ErasureError, FencedError, KvbmError
from kvbm.core.events import JANITOR
from kvbm.core.ids import HASH_BYTES, NamespaceId, split_hashes
from kvbm.core.names import kept_name
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure.catalog import CatalogErasures, proven_tenants
from kvbm.erasure.record import DamagedRecordError, Erasure, Matcher, Record, Subject
from kvbm.erasure.report import CATALOG, OBJECTS, Answer, Known, Line, Place, Progress
from kvbm.files import read_small
from kvbm.janitor.holdings import parse
from kvbm.pools.object.encryption import SEALED_FOLDER
from kvbm.pools.stores.base import Store
from kvbm.pools.stores.opening import open_store
from kvbm.safe_log import SafeLog
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.erasures import ErasureLog

log = SafeLog()

T = TypeVar("T")
_ASK_S = 1.0  # between two looks at what the others answer
_RUNS = 4  # of the janitor: one that claims what nobody claims, one that erases it, and two for what was in use
_FRONT_NAMES = 1000  # deleted at once
_HASHES_MOST_BYTES = 1 << 20  # of a file of hex digits: one erasure takes 256 KiB of them


class EraseOptions(NamedTuple):
    """What `kvbm-catalog erase` was asked.

    Attributes:
        tenant, namespace, hashes: what to erase; as in `Subject`.
        status, lift: the number of an erasure to tell of, or to take out of the record.
        forget_catalog: the name of a catalog that will never run again: nobody waits for it.
        wait_s: for how long to wait for the others.
        spare: namespaces that the operator says are another tenant's, where nobody has told their fields.
    """

    tenant: str | None = None
    namespace: NamespaceId | None = None
    hashes: bytes = b""
    status: int | None = None
    lift: int | None = None
    wait_s: float = 60.0
    spare: frozenset[NamespaceId] = frozenset()
    forget_catalog: str | None = None


class _Cluster(NamedTuple):
    """What SQL knows: namespaces with their tenants, and the instances with what is said while one does not answer.

    Attributes:
        unnamed: namespaces of claims whose fields nobody has told, or were erased.
    """

    tenants: dict[NamespaceId, str]
    instances: dict[str, str]
    unnamed: set[NamespaceId]

    def of_tenant(self, tenant: str, known: Iterable[Matcher]) -> set[NamespaceId]:
        """The tenant's namespaces, also those without fields that records of erasures of the tenant have named."""
        own = [matcher for matcher in known if matcher.tenant(tenant)]
        named = {one for one, whose in self.tenants.items() if whose == tenant}
        return named | {one for one in self.unnamed if any(matcher.namespace(one) for matcher in own)}


def read_hashes(words: str) -> bytes:
    """Packed hashes from hex digits, or from a file of them. Raises ConfigError."""
    path = Path(words)
    try:
        is_file = len(words) < 4096 and path.is_file()
        text = read_small(path, _HASHES_MOST_BYTES).decode("ascii") if is_file else words
        hashes = bytes.fromhex("".join(text.split()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hashes is neither a file of hex digits nor hex digits ({error}); give 32 of them a block"
        ) from None
    if not hashes or len(hashes) % HASH_BYTES:
        raise ConfigError(f"--hashes has {len(hashes)} bytes; give {HASH_BYTES} a block, at least one block")
    return hashes


def run_erase(
    settings: Settings,
    options: EraseOptions,
    tell: Callable[[int, Sequence[Line]], None],
    new_store: Callable[[], Store] | None = None,
    clocks: Clocks = CLOCKS,
) -> int:
    """Ask for an erasure, or tell of one. Returns 0 when all is gone, 1 while something waits.

    Args:
        tell: gets the number and the table, once, at the end. Number 0: a catalog is forgotten.
        new_store: opens a store to use instead of the one `pools.object` names.
        clocks: the janitor's, as of `run_gc`.
    Raises: ConfigError, ErasureError, StreamError, CatalogError, MissingExtraError: why it could not be asked for.
    """
    check_settings(settings)
    if not settings.catalog.database:
        make_data_dir(settings)
    with ExitStack() as opened:
        url, credentials = stream_of_catalog(settings, opened)
        if options.lift is not None:
            _run(_lift(settings, url, credentials, options.lift))
            tell(options.lift, [])
            return 0
        if options.forget_catalog is not None:
            _run(_forget_catalog(settings, url, credentials, options.forget_catalog))
            tell(0, [])
            return 0
        number, erasure = options.status, None
        if number is None:
            erasure = _run(_ask(settings, url, credentials, options))
            number = erasure.number
        if erasure is not None and (settings.pools.object.url or new_store is not None):
            begun = Progress(places=(Place(name="objects", waits="the janitor"),))
            _run(_say(settings, url, credentials, number, begun))
            progress = _erase_objects(settings, options, erasure, new_store, clocks)
            _run(_say(settings, url, credentials, number, progress))
        wait_s = 0.0 if options.status is not None else options.wait_s
        lines = _run(_follow(settings, url, credentials, number, options.spare, wait_s))
        tell(number, lines)
        return 0 if report.is_gone(lines) else 1


def catalog_companion(settings: Settings, url: str, credentials: Credentials) -> tuple[str, Companion]:
    """A catalog's side of erasures, to run beside its service."""
    where = (
        f"{socket.gethostname()}:{settings.catalog.listen}:{settings.catalog.checkpoints}:{settings.instance.data_dir}"
    )
    name = kept_name(report.CATALOG, hashlib.sha256(where.encode()).hexdigest()[:8])

    async def connect() -> ErasureLog:
        return await _open(settings, url, credentials)

    async def run(service: CatalogService) -> None:
        await CatalogErasures(service, name, connect, settings.erasure.poll_s).run()

    return "erasures", run


# -- the stream and SQL ------------------------------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def _open(settings: Settings, url: str, credentials: Credentials) -> ErasureLog:
    nats = settings.nats
    return await ErasureLog.open(url, settings.instance.cluster, nats.timeout_s, credentials, nats.replicas)


async def _cluster(settings: Settings) -> _Cluster:
    store = await SqlStore.open(database_url(settings))
    try:
        tenants = proven_tenants(await store.namespaces())
        instances = {
            str(row.id): "the instance to answer"
            if row.state.value == "live"
            else "the instance: it erases before it serves when it starts again; if it never will, forget it"
            for row in await store.instances()
            if row.engine != JANITOR
        }
        return _Cluster(tenants, instances, await store.claimed_namespaces() - tenants.keys())
    finally:
        await store.close()


async def _ask(settings: Settings, url: str, credentials: Credentials, options: EraseOptions) -> Erasure:
    """Put the request into the record; gives it as it lies there."""
    cluster = await _cluster(settings)
    connected = await _open(settings, url, credentials)
    try:
        await connected.make()
        while True:
            found = await connected.record()
            try:
                record = Record() if found is None else records.decoded(found.data)
            except DamagedRecordError as error:
                log.warning("erasure.record_damaged", why=str(error), effect="what else was in force is not any more")
                record = Record()
            answers = report.counted(report.answers_of(await connected.answers()), cluster.instances)
            known = [Matcher(one) for one in record.erasures]
            wanted = Subject(options.tenant, tuple(_meant(cluster, options, known)), options.hashes)
            done = {number for answer in answers for number, one in answer.progress.items() if one.done_ns}
            grown, erasure = records.with_erasure(record, wanted, time.time_ns(), done)
            if grown is record:
                return erasure
            try:
                await connected.put_record(records.encoded(grown), 0 if found is None else found.sequence)
                log.info("erasure.asked", number=erasure.number, namespaces=len(erasure.namespaces))
                return erasure
            except FencedError:
                continue  # another erasure was asked for just now
    finally:
        await connected.close()


def _meant(cluster: _Cluster, options: EraseOptions, known: Iterable[Matcher]) -> set[NamespaceId]:
    if options.tenant is not None:
        return cluster.of_tenant(options.tenant, known)
    assert options.namespace is not None
    return {options.namespace}


async def _lift(settings: Settings, url: str, credentials: Credentials, number: int) -> None:
    connected = await _open(settings, url, credentials)
    try:
        found = await connected.record()
        record = Record() if found is None else records.decoded(found.data)
        _known(record, number)
        assert found is not None
        await connected.put_record(records.encoded(records.without(record, number)), found.sequence)
    finally:
        await connected.close()


async def _forget_catalog(settings: Settings, url: str, credentials: Credentials, name: str) -> None:
    """Wait for a catalog no more, until it answers again.

    Raises ErasureError: no catalog of the name has ever answered.
    """
    connected = await _open(settings, url, credentials)
    try:
        catalogs = {one.name: one for one in report.answers_of(await connected.answers()) if one.kind == CATALOG}
        if name not in catalogs:
            there = ", ".join(sorted(catalogs)) or "none"
            raise ErasureError(f"no catalog {name!r} has answered an erasure in this cluster; there are: {there}")
        gone = msgspec.structs.replace(catalogs[name], gone=True, at_ns=time.time_ns())
        await connected.put_answer(name, report.encoded(gone))
    finally:
        await connected.close()


def _known(record: Record, number: int) -> Erasure:
    erasure = record.find(number)
    if erasure is None:
        there = ", ".join(str(one.number) for one in record.erasures) or "none"
        raise ErasureError(f"there is no erasure {number} in force in this cluster; in force: {there}")
    return erasure


async def _follow(
    settings: Settings, url: str, credentials: Credentials, number: int, spare: frozenset[NamespaceId], wait_s: float
) -> list[Line]:
    """The table, once all is gone or nobody waits any longer."""
    until_s = time.monotonic() + wait_s
    connected = await _open(settings, url, credentials)
    try:
        found = await connected.record()
        erasure = _known(Record() if found is None else records.decoded(found.data), number)
        while True:
            lines = await _table(connected, await _cluster(settings), settings, erasure, spare)
            if report.is_gone(lines) or time.monotonic() >= until_s:
                return lines
            if not any(line.waits for line in lines if line.who != "NATS"):
                return lines  # only age is waited for, which takes hours
            await asyncio.sleep(_ASK_S)
    finally:
        await connected.close()


async def _table(
    connected: ErasureLog, cluster: _Cluster, settings: Settings, erasure: Erasure, spare: frozenset[NamespaceId]
) -> list[Line]:
    answers = report.counted(report.answers_of(await connected.answers()), cluster.instances)
    kept, matcher = await connected.events_kept(), Matcher(erasure)
    mine = cluster.unnamed - spare if erasure.tenant else ()
    untold = report.hints(answers, erasure, (one for one in mine if not matcher.namespace(one)))
    known = Known(
        cluster.instances, kept.first_ns, kept.max_age_s, bool(settings.pools.object.url), time.time_ns(), untold
    )
    return report.table(erasure.number, answers, known)


async def _say(settings: Settings, url: str, credentials: Credentials, number: int, progress: Progress) -> None:
    """Answer for the object pool."""
    name = kept_name(OBJECTS, hashlib.sha256(settings.pools.object.url.encode()).hexdigest()[:8])
    connected = await _open(settings, url, credentials)
    try:
        before = next((one for one in report.answers_of(await connected.answers()) if one.name == name), None)
        said = {number: progress} if before is None else {**before.progress, number: progress}
        answer = Answer(name=name, kind=OBJECTS, at_ns=time.time_ns(), progress=said)
        await connected.put_answer(name, report.encoded(answer))
    finally:
        await connected.close()


# -- objects -----------------------------------------------------------------------------------------------------------


def _erase_objects(
    settings: Settings,
    options: EraseOptions,
    erasure: Erasure,
    new_store: Callable[[], Store] | None,
    clocks: Clocks,
) -> Progress:
    """Have the janitor delete the objects; trouble is what is waited for."""
    cluster = _run(_cluster(settings))
    mine = _meant(cluster, options, [Matcher(erasure)])
    erased = {one: frozenset(split_hashes(options.hashes)) for one in mine}
    deleted, waits = 0, ""
    try:
        for _ in range(_RUNS):
            done = erase_objects(settings, erased, new_store, clocks)
            deleted += done.deleted
            left = sum(part.objects - part.deleted for name, part in done.parts.items() if bytes.fromhex(name) in mine)
            waits = f"{left} objects that were used meanwhile, or could not be read: erase again" if left else ""
            if not done.found and not done.deleted and not done.waiting:
                break
        if options.hashes:
            waits = ""  # objects of other prompts stay
        whose = {cluster.tenants.get(one, "") for one in mine} if options.tenant is None else {options.tenant}
        front = _erase_front(settings, mine, whose)
        deleted, waits = deleted + front.deleted, waits or front.waits
    except KvbmError as error:
        waits = str(error)
    place = Place(name="objects", erased=f"{deleted} objects", waits=waits)
    return Progress(places=(place,), done_ns=0 if waits else time.time_ns())


class _OfFront(NamedTuple):
    """What was deleted from the front of the pool, and what of it is waited for."""

    deleted: int = 0
    waits: str = ""


def _erase_front(settings: Settings, namespaces: set[NamespaceId], tenants: set[str]) -> _OfFront:
    """Delete objects from the front of the pool, which a janitor does not know: where they are sealed, all of those
    tenants.
    """
    wanted = settings.pools.object
    if not wanted.front:
        return _OfFront()
    tags: set[str] = set()
    if wanted.keys or wanted.keys_command:
        keys = key_source(settings).load()
        if tenants - set(keys):  # the answer lies on the stream for long, so it names nobody
            return _OfFront(
                0,
                "objects in front that are sealed under keys which are not here: they go after pools.object.ttl_s, or "
                "empty the front",
            )
        tags = {f"/{SEALED_FOLDER}/{keys[tenant].tag}/" for tenant in tenants}
    front = open_store(wanted.front, ca=wanted.ca, ttl_s=wanted.ttl_s, tries=False)
    try:
        names = [
            one.name
            for one in front.listed("", wanted.timeout_s)
            if (parts := parse(one.name)) is not None
            and (parts.namespace in namespaces if parts.namespace is not None else any(tag in one.name for tag in tags))
        ]
        parts_of = (names[at : at + _FRONT_NAMES] for at in range(0, len(names), _FRONT_NAMES))
        return _OfFront(sum(_deleted(front, part, wanted.timeout_s) for part in parts_of))
    finally:
        front.close()


def _deleted(store: Store, names: Sequence[str], deadline_s: float) -> int:
    return sum(refusal is None for refusal in store.delete(names, deadline_s))
