"""Settings → a catalog on its stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.assembly.native import NATIVE, NATIVE_INDEX, NATIVE_MESSAGES
from kvbm.assembly.reload import NewSettings, Reloads
from kvbm.assembly.services import database_url, make_data_dir, nats_url, stream_credentials
from kvbm.assembly.start import kvbm_version
from kvbm.assembly.traces import open_tracing
from kvbm.config import Settings, check_settings
from kvbm.core.parts import parts_of
from kvbm.safe_log import SafeLog
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.permissions import Role
from kvbm.telemetry.stderr_log import is_json
from kvbm.terminal import say
from kvbm_ledger.hang_ups import HANG_UPS

if TYPE_CHECKING:
    from kvbm.catalog.service import Companion, ServiceSettings
    from kvbm.telemetry.tracing import Tracing

log = SafeLog()


def run_catalog(
    settings: Settings,
    companion: Callable[[Settings, str, Credentials], tuple[str, Companion]] | None = None,
    reloads: Reloads | None = None,
) -> int:
    """Serve the catalog until SIGINT or SIGTERM; without `reloads` SIGHUP ends it too.

    Args:
        companion: makes what runs beside the service.
        reloads: reads the settings again at SIGHUP; made with `catalog_takes`.

    Raises: ConfigError, StreamError, CatalogError, MissingExtraError: what does not answer, and what to do.
    """
    from kvbm.catalog.edge.server import run

    check_settings(settings)
    with ExitStack() as opened:
        credentials = stream_credentials(settings, Role.CATALOG)
        url = nats_url(settings, opened)
        if not (settings.catalog.database and settings.catalog.checkpoints):
            make_data_dir(settings)
        companions = () if companion is None else (companion(settings, url, credentials),)
        tracing = open_tracing(settings, "kvbm-catalog", "", kvbm_version())
        if tracing is not None:
            opened.callback(tracing.close)

        def service_settings(settings: Settings) -> ServiceSettings:
            return _service_settings(settings, url, credentials, companions, tracing)

        def tell(at: str) -> None:
            if is_json():
                log.info("catalog.listening", url=at, stream=shown(url))
            else:
                say(f"kvbm-catalog: {at} follows {shown(url)}", to=sys.stderr)

        reloading = None if reloads is None else _CatalogReloads(reloads, service_settings)
        try:
            run(service_settings(settings), NATIVE, NATIVE_INDEX, tell, reloading=reloading)
        finally:
            HANG_UPS.resume()  # asyncio leaves the signal as it was at first: it would end us before our servers
    return 0


def catalog_takes(key: str, before: object, after: object) -> bool:
    """Whether a catalog takes another value of a setting while it serves."""
    from kvbm.catalog.edge.reloading import keeps_kind, takes

    return takes(key) and keeps_kind(key, before, after)


class _CatalogReloads:
    """See `catalog.edge.reloading.Reloading`."""

    def __init__(self, reloads: Reloads, service_settings: Callable[[Settings], ServiceSettings]) -> None:
        self.look, self.take, self.keep = reloads.look, reloads.take, reloads.keep
        self.came, self.note, self.terminal_is_gone = HANG_UPS.take, HANG_UPS.note, HANG_UPS.terminal_is_gone
        self._service_settings = service_settings

    def is_installed(self) -> bool:
        """Whether SIGHUP is waited for."""
        return HANG_UPS.is_installed

    def service_settings(self, new: NewSettings) -> ServiceSettings:
        """As a service takes them."""
        return self._service_settings(new.settings)


def _service_settings(
    settings: Settings,
    url: str,
    credentials: Credentials,
    companions: tuple[tuple[str, Companion], ...],
    tracing: Tracing | None,
) -> ServiceSettings:
    from kvbm.assembly.history import history_options
    from kvbm.catalog.access.callers import AccessOptions
    from kvbm.catalog.service import ServiceSettings, TenantLimits

    return ServiceSettings(
        nats_url=url,
        credentials=credentials,
        database_url=database_url(settings),
        cluster=settings.instance.cluster,
        listen=settings.catalog.listen,
        unix_socket=settings.catalog.unix_socket,
        connect_s=settings.nats.timeout_s,
        replicas=settings.nats.replicas,
        liveness_s=settings.catalog.liveness_s,
        forget_s=settings.catalog.forget_s,
        usage_keep_days=settings.catalog.usage_keep_days,
        used_s=settings.gc.used_s,
        tenant_secrets=settings.catalog.tenant_secrets,
        tenant_secrets_file=settings.catalog.tenant_secrets_file,
        tenants={
            name: TenantLimits(one.host_bytes, one.nvme_bytes, one.object_bytes)
            for name, one in settings.tenants.items()
        },
        capacity=settings.catalog.capacity,
        checkpoints=settings.catalog.checkpoints or str(Path(settings.instance.data_dir) / "catalog-checkpoints"),
        checkpoint_every_s=settings.catalog.checkpoint_every_s,
        archive=settings.catalog.archive,
        history=history_options(settings),
        access=AccessOptions(
            file=settings.catalog.access,
            open=settings.catalog.open,
            hosts=settings.catalog.hosts,
            tls_cert=settings.catalog.tls_cert,
            tls_key=settings.catalog.tls_key,
            tls_client_ca=settings.catalog.tls_client_ca,
        ),
        limits=settings.catalog.limits,
        companions=companions,
        routing=settings.catalog.routing,
        parts=parts_of(settings.catalog.parts),
        new_messages=NATIVE_MESSAGES,
        tracing=tracing,
    )
