"""Settings → a replica of the catalog in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.assembly.native import NATIVE, NATIVE_INDEX, NATIVE_MESSAGES
from kvbm.assembly.services import catalog_clients, stream_credentials
from kvbm.config import Settings, check_settings
from kvbm.core.errors import ConfigError
from kvbm.core.parts import parts_of
from kvbm.locate.parts import PartedCatalog
from kvbm.streams.nats.permissions import Role
from kvbm.streams.nats.read_only import ReadOnlyStream
from kvbm.tenant_secrets import TenantSecrets

if TYPE_CHECKING:
    from kvbm.catalog.replica import CatalogReplica


def open_replica(settings: Settings, name: str = "") -> CatalogReplica:
    """A catalog's view of the cluster in this process, which answers lookups and routes at once.

    It follows the stream at `nats.url`. It begins with the newest checkpoint of the catalog at `catalog.url`, which
    takes a token of an operator where the catalog wants one; without that, or where there is none, with the stream's
    first message. `wait_ready` waits until it has read the stream. Close it when it is done with.

    Args:
        name: of its account on the stream, as `kvbm nats-permissions --replica` has it; "" where the server has no
            accounts.
    Raises: ConfigError: settings that cannot be used. StreamError: the stream does not answer, or holds no events yet.
    """
    from kvbm.catalog.replica import CatalogReplica, ReplicaSettings

    check_settings(settings)
    if not settings.nats.url:
        raise ConfigError("a replica follows the stream of others, and nats.url is empty; set it to nats://host:port")
    catalog, connect_s = settings.catalog, settings.nats.timeout_s
    credentials, parts = stream_credentials(settings, Role.REPLICA, name), parts_of(settings.catalog.parts)

    def fetch(folder: Path) -> bool:
        client = catalog_clients(settings)
        try:
            if isinstance(client, PartedCatalog):
                return client.fetch_checkpoint(folder, parts)
            return client.fetch_checkpoint(folder)
        finally:
            client.close()

    replica = CatalogReplica(
        ReplicaSettings(
            cluster=settings.instance.cluster,
            connect_s=connect_s,
            liveness_s=catalog.liveness_s,
            forget_s=catalog.forget_s,
            parts=parts,
            capacity=catalog.capacity,
            routing=catalog.routing,
        ),
        lambda: ReadOnlyStream.follow(settings.nats.url, connect_s, credentials, NATIVE_MESSAGES),
        fetch if catalog.url else None,
        NATIVE,
        NATIVE_INDEX,
        TenantSecrets(catalog.tenant_secrets, catalog.tenant_secrets_file),
    )
    replica.start()
    return replica
