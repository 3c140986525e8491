"""Settings that a catalog takes while it serves: limits, callers, certificates, tenants' secrets and limits.

All that is new is made first, beside the loop: files are read, a certificate is held against its key. Only when all of
it is good does it take the place of the old, within one turn of the loop, so no request meets half of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import uvicorn

from kvbm.catalog.access.callers import Access, check_exposed
from kvbm.catalog.access.limits import Limits
from kvbm.catalog.edge.connections import Connections, room_for_sockets
from kvbm.catalog.edge.tls import ServerTls
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.core.errors import KvbmError
from kvbm.safe_log import SafeLog
from kvbm.service_manager import ServiceManager
from kvbm.tenant_secrets import TenantSecrets

log = SafeLog()

_LOOK_S = 0.5  # between two looks at whether the catalog is ready
_MORE_S = 30.0  # that a manager is asked for while the stream is read
_TAKEN = frozenset(
    {
        *(f"catalog.{one}" for one in ("tls_cert", "tls_key", "tls_client_ca", "access", "tenant_secrets_file")),
        "catalog.tenant_secrets",
        "log.format",
        "log.level",
        "log.levels",
        "tenants",
    }
)
_BY_KIND = frozenset({"catalog.access", "catalog.tls_cert", "catalog.tls_key", "catalog.tls_client_ca"})
_AT_A_START = ("watch_bytes", "history_bytes", "history_keeper_bytes", "history_processes", "history_waiting")
_NOT_TAKEN = frozenset(f"catalog.limits.{one}" for one in _AT_A_START)


def takes(key: str) -> bool:
    """Whether a setting is taken by a catalog that serves.

    Whether callers, TLS and certificates of clients are known at all takes a restart: `keeps_kind`.
    """
    return key in _TAKEN or (key.startswith("catalog.limits.") and key not in _NOT_TAKEN)


def keeps_kind(key: str, before: object, after: object) -> bool:
    """Whether a value that is taken leaves it at what there is: a file that is named, or none."""
    return key not in _BY_KIND or bool(before) == bool(after)


class Reloading(Protocol):
    """Reads the settings of a catalog again. See `assembly.reload`."""

    def look(self) -> Any:
        """What they are now. Raises KvbmError. A thread beside the loop."""
        ...

    def service_settings(self, new: Any) -> ServiceSettings:
        """Of what `look` has found, as a service takes them."""
        ...

    def take(self, new: Any, more: tuple[str, ...] = ()) -> None:
        """They count from now on."""
        ...

    def keep(self, why: object) -> None:
        """All is as before."""
        ...

    def is_installed(self) -> bool:
        """Whether SIGHUP is waited for."""
        ...

    def note(self) -> None:
        """A signal has come."""
        ...

    def came(self) -> bool:
        """Whether a signal came that nobody has taken."""
        ...

    def terminal_is_gone(self) -> bool:
        """Whether the signal came because the terminal was closed: then the catalog ends."""
        ...


class ServedParts(NamedTuple):
    """What of a catalog that serves takes other settings.

    Attributes:
        address: that it listens on.
    """

    service: CatalogService
    access: Access
    tls: ServerTls | None
    limits: Limits
    connections: Connections
    config: uvicorn.Config
    address: str


class _Prepared(NamedTuple):
    settings: ServiceSettings
    access: Access | None
    tls: ServerTls | None
    secrets: TenantSecrets
    sockets: int


def prepare(parts: ServedParts, settings: ServiceSettings) -> _Prepared:
    """Make what is new, and check it. Raises ConfigError: what cannot be used; nothing has changed."""
    options = settings.access
    check_exposed(options, parts.address)
    access = Access(options.file) if options.file else None
    tls = ServerTls(options) if options.tls_cert else None
    secrets = TenantSecrets(settings.tenant_secrets, settings.tenant_secrets_file)
    # Those that are open count as files that the process needs, and as connections
    sockets = room_for_sockets(settings.limits.sockets, may_raise=True) + len(parts.connections)
    return _Prepared(settings, access, tls, secrets, sockets)


def commit(parts: ServedParts, new: _Prepared) -> tuple[str, ...]:
    """Take it. In the loop; nothing here fails. Returns the keys of files that hold something else."""
    changed = []
    if new.access is not None and parts.access.take(new.access):
        changed.append("catalog.access")
    if new.tls is not None and parts.tls is not None and parts.tls.take(new.tls):
        changed.append("catalog.tls_cert")
    if parts.service.secrets.take(new.secrets):
        changed.append("catalog.tenant_secrets_file" if new.settings.tenant_secrets_file else "catalog.tenant_secrets")
    limits = new.settings.limits
    if limits != parts.limits.settings:
        parts.limits.change(limits)
        parts.connections.change(limits, new.sockets)
        parts.service.watches.change(limits)
        if parts.service.past is not None:
            parts.service.past.limits = limits
        parts.config.timeout_keep_alive = max(1, round(limits.idle_s))
    before = parts.service.settings
    parts.service.settings = msgspec.structs.replace(
        before,
        access=new.settings.access,
        limits=limits,
        tenant_secrets=new.settings.tenant_secrets,
        tenant_secrets_file=new.settings.tenant_secrets_file,
        tenants=new.settings.tenants,
    )
    return tuple(changed)


class Reloader:
    """Does what SIGHUP asks, one after the other. One asyncio loop.

    Attributes:
        wake: set when a signal has come.
    """

    def __init__(
        self, parts: ServedParts, reloading: Reloading, manager: ServiceManager, end: Callable[[], None]
    ) -> None:
        self.wake = asyncio.Event()
        self._parts, self._reloading, self._manager, self._end = parts, reloading, manager, end
        self._is_ready = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._reloading.came():
                self.wake.clear()
                await self.wake.wait()
            elif self._reloading.terminal_is_gone():
                self._end()
                return
            else:
                await self._reload()

    async def tell(self) -> None:
        """Tell the manager when the catalog is ready, and that it lives, until cancelled."""
        service, manager = self._parts.service, self._manager
        while not (word := service.readiness()).ready:
            manager.starting(f"not ready: {word.reason}", _MORE_S)
            await asyncio.sleep(_LOOK_S)
        self._is_ready = True
        manager.ready(self._status())
        while manager.watchdog_s:
            manager.alive()
            await asyncio.sleep(manager.watchdog_s / 3)

    async def _reload(self) -> None:
        if self._is_ready:
            self._manager.reloading()
        status = ""
        try:
            new = await asyncio.to_thread(self._reloading.look)
            settings = self._reloading.service_settings(new)
            prepared = await asyncio.to_thread(prepare, self._parts, settings)
        except (KvbmError, OSError, ValueError, RuntimeError) as error:
            self._reloading.keep(error)
            status = f"; the settings are as before: {error}"
        else:
            self._reloading.take(new, commit(self._parts, prepared))
        if self._is_ready:
            self._manager.ready(self._status() + status)

    def _status(self) -> str:
        return f"serving, follows the stream at {self._parts.service.sequencer.sequence}"
