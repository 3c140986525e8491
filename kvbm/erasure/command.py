"""What `kvbm-catalog erase` does: it puts a request into the record, or takes one out, and makes a table of what
everybody answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.catalog.sql.store import SqlStore
from kvbm.core.errors import ConfigError, ErasureError, FencedError
from kvbm.core.events import JANITOR
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure.catalog import proven_tenants
from kvbm.erasure.record import DamagedRecordError, Erasure, Matcher, Record, Subject
from kvbm.erasure.report import CATALOG, OBJECTS, Answer, Known, Line, Progress
from kvbm.erasure.stream import ErasureLog
from kvbm.files import read_small
from kvbm.safe_log import SafeLog

log = SafeLog()

_ASK_S = 1.0  # between two looks at what the others answer
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


class ErasureCluster(NamedTuple):
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

    def meant(self, wanted: EraseOptions, known: Iterable[Matcher]) -> set[NamespaceId]:
        """The namespaces that a request means; `known`: records of erasures."""
        if wanted.tenant is not None:
            return self.of_tenant(wanted.tenant, known)
        assert wanted.namespace is not None
        return {wanted.namespace}


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


async def known_cluster(database_url: str | Path) -> ErasureCluster:
    """What SQL knows now. Raises CatalogError: the database does not answer."""
    store = await SqlStore.open(database_url)
    try:
        tenants = proven_tenants(await store.namespaces())
        instances = {
            str(row.id): "the instance to answer"
            if row.state.value == "live"
            else "the instance: it erases before it serves when it starts again; if it never will, forget it"
            for row in await store.instances()
            if row.engine != JANITOR
        }
        return ErasureCluster(tenants, instances, await store.claimed_namespaces() - tenants.keys())
    finally:
        await store.close()


class EraseCommand:
    """The requests of one cluster.

    Each call makes a connection of its own, and raises StreamError, ErasureError or CatalogError.

    Args:
        connect: opens the log. Raises StreamError.
        database_url: of the catalog's database.
        has_objects: whether an object pool is configured here.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ErasureLog]], database_url: str | Path, has_objects: bool
    ) -> None:
        self._connect, self._database_url, self._has_objects = connect, database_url, has_objects

    async def ask(self, options: EraseOptions) -> Erasure:
        """Put the request into the record; gives it as it lies there."""
        cluster = await known_cluster(self._database_url)
        async with self._connected() as connected:
            await connected.make()
            while True:
                found = await connected.record()
                try:
                    record = Record() if found is None else records.decoded(found.data)
                except DamagedRecordError as error:
                    log.warning(
                        "erasure.record_damaged", why=str(error), effect="what else was in force is not any more"
                    )
                    record = Record()
                answers = report.counted(report.answers_of(await connected.answers()), cluster.instances)
                known = [Matcher(one) for one in record.erasures]
                wanted = Subject(options.tenant, tuple(cluster.meant(options, known)), options.hashes)
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

    async def lift(self, number: int) -> None:
        """Take a request out of the record."""
        async with self._connected() as connected:
            found = await connected.record()
            record = Record() if found is None else records.decoded(found.data)
            _known(record, number)
            assert found is not None
            await connected.put_record(records.encoded(records.without(record, number)), found.sequence)

    async def forget_catalog(self, name: str) -> None:
        """Wait for a catalog no more, until it answers again.

        Raises ErasureError: no catalog of the name has ever answered.
        """
        async with self._connected() as connected:
            catalogs = {one.name: one for one in report.answers_of(await connected.answers()) if one.kind == CATALOG}
            if name not in catalogs:
                there = ", ".join(sorted(catalogs)) or "none"
                raise ErasureError(f"no catalog {name!r} has answered an erasure in this cluster; there are: {there}")
            gone = msgspec.structs.replace(catalogs[name], gone=True, at_ns=time.time_ns())
            await connected.put_answer(name, report.encoded(gone))

    async def follow(self, number: int, spare: frozenset[NamespaceId], wait_s: float) -> list[Line]:
        """The table, once all is gone or nobody waits any longer."""
        until_s = time.monotonic() + wait_s
        async with self._connected() as connected:
            found = await connected.record()
            erasure = _known(Record() if found is None else records.decoded(found.data), number)
            while True:
                lines = await self._table(connected, await known_cluster(self._database_url), erasure, spare)
                if report.is_gone(lines) or time.monotonic() >= until_s:
                    return lines
                if not any(line.waits for line in lines if line.who != "NATS"):
                    return lines  # only age is waited for, which takes hours
                await asyncio.sleep(_ASK_S)

    async def answer_for_objects(self, name: str, number: int, progress: Progress) -> None:
        """Answer for the object pool, which has this name among those who answer."""
        async with self._connected() as connected:
            before = next((one for one in report.answers_of(await connected.answers()) if one.name == name), None)
            said = {number: progress} if before is None else {**before.progress, number: progress}
            answer = Answer(name=name, kind=OBJECTS, at_ns=time.time_ns(), progress=said)
            await connected.put_answer(name, report.encoded(answer))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ErasureLog]:
        connected = await self._connect()
        try:
            yield connected
        finally:
            await connected.close()

    async def _table(
        self, connected: ErasureLog, cluster: ErasureCluster, erasure: Erasure, spare: frozenset[NamespaceId]
    ) -> list[Line]:
        answers = report.counted(report.answers_of(await connected.answers()), cluster.instances)
        kept, matcher = await connected.events_kept(), Matcher(erasure)
        mine = cluster.unnamed - spare if erasure.tenant else ()
        untold = report.hints(answers, erasure, (one for one in mine if not matcher.namespace(one)))
        known = Known(cluster.instances, kept.first_ns, kept.max_age_s, self._has_objects, time.time_ns(), untold)
        return report.table(erasure.number, answers, known)


def _known(record: Record, number: int) -> Erasure:
    erasure = record.find(number)
    if erasure is None:
        there = ", ".join(str(one.number) for one in record.erasures) or "none"
        raise ErasureError(f"there is no erasure {number} in force in this cluster; in force: {there}")
    return erasure
