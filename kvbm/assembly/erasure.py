"""Settings → an erasure: asked for, its objects seen to, and followed until all is gone or nobody waits any longer."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvbm.assembly.janitor import CLOCKS, Clocks, erase_objects
from kvbm.assembly.pools import key_source
from kvbm.assembly.services import database_url, erasure_log, make_data_dir, stream_of_catalog
from kvbm.catalog.service import CatalogService, Companion
from kvbm.config import Settings, check_settings
from kvbm.core.ids import split_hashes
from kvbm.core.names import kept_name
from kvbm.erasure import objects, report
from kvbm.erasure.catalog import CatalogErasures
from kvbm.erasure.command import EraseCommand, EraseOptions, known_cluster
from kvbm.erasure.objects import Front
from kvbm.erasure.record import Erasure, Matcher
from kvbm.erasure.report import ErasedPlace, Line, Progress
from kvbm.erasure.stream import ErasureLog
from kvbm.janitor.holdings import parse
from kvbm.pools.stores.base import ObjectStore
from kvbm.pools.stores.opening import open_store
from kvbm.progress import Watch
from kvbm.streams.nats.credentials import Credentials


def run_erase(
    settings: Settings,
    options: EraseOptions,
    tell: Callable[[int, Sequence[Line]], None],
    new_store: Callable[[], ObjectStore] | None = None,
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
        has_objects = bool(settings.pools.object.url)
        command = EraseCommand(lambda: erasure_log(settings, url, credentials), database_url(settings), has_objects)
        if options.lift is not None:
            asyncio.run(command.lift(options.lift))
            tell(options.lift, [])
            return 0
        if options.forget_catalog is not None:
            asyncio.run(command.forget_catalog(options.forget_catalog))
            tell(0, [])
            return 0
        number, erasure = options.status, None
        if number is None:
            erasure = asyncio.run(command.ask(options))
            number = erasure.number
        if erasure is not None and (has_objects or new_store is not None):
            name = kept_name(report.OBJECTS, hashlib.sha256(settings.pools.object.url.encode()).hexdigest()[:8])
            begun = Progress(places=(ErasedPlace(name="objects", waits="the janitor"),))
            asyncio.run(command.answer_for_objects(name, number, begun))
            with Watch(f"objects of erasure {number}"):
                progress = _erase_objects(settings, options, erasure, new_store, clocks)
            asyncio.run(command.answer_for_objects(name, number, progress))
        wait_s = 0.0 if options.status is not None else options.wait_s
        with Watch(f"erasure {number}"):
            lines = asyncio.run(command.follow(number, options.spare, wait_s))
        tell(number, lines)
        return 0 if report.is_gone(lines) else 1


def _erase_objects(
    settings: Settings,
    options: EraseOptions,
    erasure: Erasure,
    new_store: Callable[[], ObjectStore] | None,
    clocks: Clocks,
) -> Progress:
    """Have the janitor delete the objects, and what lies before the pool; trouble is what is waited for."""
    cluster = asyncio.run(known_cluster(database_url(settings)))
    mine = cluster.meant(options, [Matcher(erasure)])
    tenants = {cluster.tenants.get(one, "") for one in mine} if options.tenant is None else {options.tenant}
    blocks = frozenset(split_hashes(options.hashes))
    return objects.erase_objects(
        lambda: erase_objects(settings, dict.fromkeys(mine, blocks), new_store, clocks),
        _front(settings),
        mine,
        tenants,
        not options.hashes,
    )


def _front(settings: Settings) -> Front | None:
    wanted = settings.pools.object
    if not wanted.front:
        return None
    return Front(
        lambda: open_store(wanted.front, ca=wanted.ca, ttl_s=wanted.ttl_s, tries=False),
        parse,
        (lambda: key_source(settings).load()) if wanted.keys or wanted.keys_command else None,
        wanted.timeout_s,
    )


def catalog_companion(settings: Settings, url: str, credentials: Credentials) -> tuple[str, Companion]:
    """A catalog's side of erasures, to run beside its service."""
    where = (
        f"{socket.gethostname()}:{settings.catalog.listen}:{settings.catalog.checkpoints}:{settings.instance.data_dir}"
    )
    name = kept_name(report.CATALOG, hashlib.sha256(where.encode()).hexdigest()[:8])

    async def connect() -> ErasureLog:
        return await erasure_log(settings, url, credentials)

    async def run(service: CatalogService) -> None:
        await CatalogErasures(service, name, connect, settings.erasure.poll_s).run()

    return "erasures", run
