"""Settings → runs of a janitor."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvbm.assembly.manager import open_manager
from kvbm.assembly.native import CODER, NATIVE
from kvbm.assembly.pools import key_source, open_object_store
from kvbm.assembly.reload import Reloads
from kvbm.assembly.services import database_url, make_data_dir, stream_credentials
from kvbm.config import HbmSettings, PoolsSettings, Settings, check_gc, check_settings
from kvbm.core.errors import ConfigError, KvbmError, MissingExtraError, StreamError
from kvbm.core.events import JANITOR
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, Offset
from kvbm.core.layout import pool_name
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ObjectPool
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores.base import ObjectStore
from kvbm.progress import Watch
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position
from kvbm.streams.nats.permissions import Role
from kvbm.streams.nats.stream import NatsStream
from kvbm_ledger.hang_ups import HANG_UPS

if TYPE_CHECKING:
    from kvbm.janitor.report import Report

log = SafeLog()

_STALLED_S = 6.0  # a little after this a publisher says what it waits for
_POLL_S = 0.02
_LOOK_S = 0.5  # between two looks at whether a signal has come


class Clocks(NamedTuple):
    """What a janitor goes by and waits with.

    Attributes:
        monotonic_s: goes on while a process sleeps.
        wall_ns: since 1970; held against the store's.
        sleep: waits, while these go on.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    sleep: Callable[[float], None] = time.sleep


CLOCKS = Clocks()


def run_gc(
    settings: Settings,
    dry_run: bool,
    tell: Callable[[Report], None],
    new_store: Callable[[], ObjectStore] | None = None,
    clocks: Clocks = CLOCKS,
    reloads: Reloads | None = None,
) -> int:
    """Run the janitor of the pool that `pools.object` names: once, or with `gc.every_s` again and again until
    interrupted.

    Args:
        tell: gets the report of each run.
        new_store: opens a store to use instead of the one `pools.object` names.
        clocks: others than the machine's, for tests.
        reloads: reads the settings again at SIGHUP; the next run goes by them, and begins when it is due by them.
    Raises: ConfigError, MissingExtraError; once, also PoolError, CatalogError, StreamError, JanitorError: why it could
        not go on.
    """
    check_run(settings, dry_run, new_store is not None)
    while True:
        if reloads is not None:
            _reload(reloads, dry_run, new_store is not None)
            settings = reloads.settings
        try:
            tell(_gc_once(settings, dry_run, new_store or partial(_open_store, settings), clocks))
        except (ConfigError, MissingExtraError):
            raise
        except KvbmError as error:
            if not settings.gc.every_s:
                raise
            log.warning("gc.ended", why=str(error), again_s=settings.gc.every_s)
        if not settings.gc.every_s:
            return 0
        if reloads is None:
            clocks.sleep(settings.gc.every_s)
        else:
            _sleep_until_due(reloads, dry_run, new_store is not None, clocks)


def check_run(settings: Settings, dry_run: bool, has_store: bool = False) -> None:
    """Refuse settings that no janitor can run with. Raises ConfigError."""
    check_settings(settings)
    check_gc(settings.gc, settings.pools.object)
    if not has_store and not settings.pools.object.url:
        raise ConfigError(
            "pools.object.url names no store, so there is nothing for a janitor; give the URL of the pool's store"
        )
    if not settings.nats.enabled and not dry_run:
        raise ConfigError(
            "nats.enabled is false, and a janitor says on the stream what it does; set it, or use --dry-run"
        )


def _reload(reloads: Reloads, dry_run: bool, has_store: bool) -> None:
    """Do what SIGHUP asks, if it came. Raises KeyboardInterrupt: the terminal was closed."""

    def check(settings: Settings) -> None:
        check_run(settings, dry_run, has_store)
        if not settings.gc.every_s:
            raise ConfigError("gc.every_s is 0, and this janitor runs again and again; stop it instead")

    if HANG_UPS.take():
        if HANG_UPS.terminal_is_gone():
            raise KeyboardInterrupt
        reloads.reload(check)


def _sleep_until_due(reloads: Reloads, dry_run: bool, has_store: bool, clocks: Clocks) -> None:
    """Wait until the next run is due, by the settings as they are by then."""
    begin_s = clocks.monotonic_s()
    while (left_s := begin_s + reloads.settings.gc.every_s - clocks.monotonic_s()) > 0:
        clocks.sleep(min(left_s, _LOOK_S))
        _reload(reloads, dry_run, has_store)


def erase_objects(
    settings: Settings,
    erased: Mapping[NamespaceId, frozenset[bytes]],
    new_store: Callable[[], ObjectStore] | None = None,
    clocks: Clocks = CLOCKS,
) -> Report:
    """One run of the janitor in which objects of some namespaces go, and no others.

    Args:
        erased: blocks that an object must hold one of, by namespace; none: all objects.
        new_store, clocks: as of `run_gc`.
    Raises: as `run_gc`; JanitorBusyError: another janitor works.
    """
    check_settings(settings)
    check_gc(settings.gc, settings.pools.object)
    gc = msgspec.structs.replace(settings.gc, young_s=0.0)
    settings = msgspec.structs.replace(settings, gc=gc)
    return _gc_once(settings, False, new_store or (lambda: _open_store(settings)), clocks, erased)


def _gc_once(
    settings: Settings,
    dry_run: bool,
    new_store: Callable[[], ObjectStore],
    clocks: Clocks,
    erased: Mapping[NamespaceId, frozenset[bytes]] | None = None,
) -> Report:
    from kvbm.janitor import ClaimsReader, Driver, DriverOptions, Janitor, Rules, TenantPart, run_once

    gc, wanted = settings.gc, settings.pools.object
    is_sealed = bool(wanted.keys or wanted.keys_command)
    rules = Rules(
        gc.ttl_s,
        gc.quota_bytes,
        gc.grace_s,
        gc.young_s,
        gc.skew_s,
        gc.lease_s,
        used_s=gc.used_s,
        only_blocks=wanted.blocks,
        sealed=is_sealed,
        erase=erased,
        alone=gc.alone,
        parts={
            tenant: TenantPart(share.weight, share.object_bytes or None) for tenant, share in settings.tenants.items()
        },
    )
    with ExitStack() as opened:
        store = new_store()
        opened.callback(store.close)
        if not settings.catalog.database:
            make_data_dir(settings)
        claims = ClaimsReader(database_url(settings))
        opened.callback(claims.close)
        pool = _pool_of(store.name, wanted.blocks, is_sealed, claims.pools())
        claims.use(pool)

        def folder(blocks: int) -> BlockObjects:
            envelopes = Sealing(key_source(settings), blocks, header_bytes(blocks)) if is_sealed else None
            way = ObjectPoolOptions(
                blocks=blocks, envelopes=envelopes, name=pool, threads=1, deadline_s=wanted.timeout_s
            )
            return BlockObjects(store, 1, NATIVE.checksums, CODER, way)

        run, me = secrets.token_hex(8), InstanceId(gc.id) if gc.id else janitor_id(pool)
        cluster = f"{settings.instance.cluster}-{hashlib.sha256(repr(claims.streams()).encode()).hexdigest()[:8]}"
        options = DriverOptions(cluster, run, wanted.timeout_s, rules.batch_s, dry_run)
        driver = Driver(
            store,
            claims,
            folder,
            lambda spaces: _open_janitor(settings, me, spaces, folder(1)),
            options,
            wall_clock_ns=clocks.wall_ns,
            sleep=clocks.sleep,
        )
        opened.callback(driver.close)
        holder = f"{me} of {settings.instance.cluster} on {socket.gethostname()}, process {os.getpid()}"
        with Watch(f"objects of {pool}"):
            report = run_once(Janitor(pool, holder, run, rules, dry_run), driver, clocks.monotonic_s)
        log.info("gc.completed", pool=pool, claimed=report.found, deleted=report.deleted, kept=report.kept)
        return report


def _pool_of(store: str, blocks: int, is_sealed: bool, known: Collection[str]) -> str:
    """The pool's name among those that instances have said: a k that is what the shape gives anyway is not in it."""
    marked = pool_name(store, blocks, is_sealed)
    return marked if not blocks or marked in known else pool_name(store, 0, is_sealed)


def _open_store(settings: Settings) -> ObjectStore:
    return open_object_store(settings, tries=False)  # a janitor tries more, and with --dry-run puts nothing


def janitor_id(pool: str) -> InstanceId:
    """The instance a pool's janitor is in its cluster, where `gc.id` names none."""
    return InstanceId(f"janitor-{hashlib.sha256(pool.encode()).hexdigest()[:8]}")


def _open_janitor(settings: Settings, me: InstanceId, namespaces: Sequence[Namespace], objects: ObjectPool) -> Manager:
    """A manager that holds nothing and offloads nothing: what a janitor says things with.

    Raises: StreamError: what it says does not reach the stream. Nothing was changed then.
    """
    replace = msgspec.structs.replace
    mine = replace(
        settings,
        instance=replace(settings.instance, id=me),
        pools=PoolsSettings(
            hbm=HbmSettings(slots=1, device="memory"), object=replace(settings.pools.object, url="", front="")
        ),
        offload=replace(settings.offload, host="never", nvme="never", object="never"),
        journal=replace(settings.journal, in_memory=True),
        samples=replace(settings.samples, rate=0.0),
        catalog=replace(settings.catalog, url=""),
    )
    if mine.nats.url:
        _ask_stream(mine, me)
    manager = open_manager(mine, namespaces, objects.block_bytes, JANITOR, objects)
    try:
        _wait_until_heard(manager, mine.nats.timeout_s + _STALLED_S)
    except BaseException:
        manager.close()
        raise
    return manager


def _ask_stream(settings: Settings, me: InstanceId) -> None:
    """Ask the stream for what only this instance may have, because a refusal is heard at once. Raises StreamError."""
    credentials = stream_credentials(settings, Role.JANITOR, me)

    async def ask() -> None:
        nats = settings.nats
        stream = await NatsStream.connect(nats.url, nats.timeout_s, credentials=credentials, replicas=nats.replicas)
        try:
            await stream.fence(settings.instance.cluster, me, nats.timeout_s)
        finally:
            await stream.close()

    asyncio.run(ask())


def _wait_until_heard(manager: Manager, timeout_s: float) -> None:
    """Wait until the stream has the beginning of the manager's events. Raises StreamError: it does not take them."""
    until_s = time.monotonic() + timeout_s
    begun = Position(manager.epoch, Offset(1))
    while manager.published() < begun:
        if time.monotonic() > until_s:
            why = manager.trouble() or "no answer"
            raise StreamError(
                f"the janitor's instance {manager.instance} said within {timeout_s:g} s nothing that the stream has "
                f"stored ({why}). "
                "Nothing was changed",
                timeout_s=timeout_s,
            )
        time.sleep(_POLL_S)
