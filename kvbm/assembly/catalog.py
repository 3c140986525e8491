"""Settings → a catalog on its stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.assembly.native import NATIVE, NATIVE_INDEX, NATIVE_MESSAGES
from kvbm.assembly.services import database_url, make_data_dir, nats_url, stream_credentials
from kvbm.config import Settings, check_settings
from kvbm.core.parts import parts_of
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.permissions import Role
from kvbm.terminal import say

if TYPE_CHECKING:
    from kvbm.catalog.service import Companion


def run_catalog(
    settings: Settings, companion: Callable[[Settings, str, Credentials], tuple[str, Companion]] | None = None
) -> int:
    """Serve the catalog until SIGINT, SIGTERM or SIGHUP.

    Args:
        companion: makes what runs beside the service.

    Raises: ConfigError, StreamError, CatalogError, MissingExtraError: what does not answer, and what to do.
    """
    from kvbm.catalog.access.callers import AccessOptions
    from kvbm.catalog.edge.server import run
    from kvbm.catalog.service import ServiceSettings

    check_settings(settings)
    with ExitStack() as opened:
        credentials = stream_credentials(settings, Role.CATALOG)
        url = nats_url(settings, opened)
        if not (settings.catalog.database and settings.catalog.checkpoints):
            make_data_dir(settings)
        service = ServiceSettings(
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
            capacity=settings.catalog.capacity,
            checkpoints=settings.catalog.checkpoints or str(Path(settings.instance.data_dir) / "catalog-checkpoints"),
            checkpoint_every_s=settings.catalog.checkpoint_every_s,
            archive=settings.catalog.archive,
            access=AccessOptions(
                file=settings.catalog.access,
                open=settings.catalog.open,
                tls_cert=settings.catalog.tls_cert,
                tls_key=settings.catalog.tls_key,
                tls_client_ca=settings.catalog.tls_client_ca,
            ),
            limits=settings.catalog.limits,
            companions=() if companion is None else (companion(settings, url, credentials),),
            routing=settings.catalog.routing,
            parts=parts_of(settings.catalog.parts),
            new_messages=NATIVE_MESSAGES,
        )
        follows = f"follows {shown(url)}"
        run(
            service,
            NATIVE,
            NATIVE_INDEX,
            lambda at: say(f"kvbm-catalog: {at} {follows}", to=sys.stderr),
        )
    return 0
