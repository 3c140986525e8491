"""Settings → what a process of kvbm talks to: the stream, the catalog and its database, and how it proves itself to
each.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvbm.assembly.native import NATIVE
from kvbm.config import Settings
from kvbm.core.errors import ConfigError
from kvbm.erasure.stream import ErasureLog
from kvbm.files import make_folder
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.http import TIMEOUT_S, CatalogClient
from kvbm.locate.nats_proof import NatsCredentials
from kvbm.locate.parts import PartedCatalog, catalogs_at
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import INBOX, Credentials
from kvbm.streams.nats.permissions import Role, catalog_inbox, grant, instance_inbox
from kvbm.streams.server import shared_server


def nats_url(settings: Settings, opened: ExitStack) -> str:
    """Where the stream is: as set, else a server of our own. Raises ConfigError, StreamError, MissingExtraError."""
    if settings.nats.url:
        shown(settings.nats.url)  # refuses what is none
        return settings.nats.url
    make_data_dir(settings)
    server = shared_server(Path(settings.instance.data_dir) / "nats", settings.nats.timeout_s)
    opened.callback(server.stop)
    return server.url


def stream_credentials(settings: Settings, role: Role, name: str = "") -> Credentials:
    """How this process proves itself to the stream. Raises ConfigError, MissingExtraError: what cannot be used.

    Args:
        role, name: what it is there, as `kvbm nats-permissions` names it.
    """
    nats, cluster = settings.nats, settings.instance.cluster
    inbox = INBOX
    if role is Role.CATALOG:
        inbox = catalog_inbox(cluster)
    elif role in (Role.INSTANCE, Role.JANITOR):
        inbox = instance_inbox(cluster, name)
    credentials = Credentials(
        nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key, inbox, grant(cluster, role, name)
    )
    if nats.enabled:
        credentials.connect_options(nats.url)
    return credentials


def stream_of_catalog(settings: Settings, opened: ExitStack) -> tuple[str, Credentials]:
    """Where the stream is, and how a catalog proves itself to it.

    Raises ConfigError, StreamError, MissingExtraError.
    """
    credentials = stream_credentials(settings, Role.CATALOG)
    return nats_url(settings, opened), credentials


async def erasure_log(settings: Settings, url: str, credentials: Credentials) -> ErasureLog:
    """The log of erasures on the stream at a URL. Raises StreamError: nothing answers in time, or refuses."""
    nats = settings.nats
    return await ErasureLog.open(url, settings.instance.cluster, nats.timeout_s, credentials, nats.replicas)


def catalog_client(
    url: str, credentials: CatalogCredentials = NO_CREDENTIALS, timeout_s: float = TIMEOUT_S
) -> CatalogClient:
    """A client of the catalog that hashes tokens natively. Raises CatalogError: the URL cannot be used."""
    return CatalogClient(url, timeout_s, hash_tokens=NATIVE.sequence_hashes, credentials=credentials)


def catalog_clients(settings: Settings, url: str = "", timeout_s: float = TIMEOUT_S) -> CatalogClient | PartedCatalog:
    """A client of the catalog at a URL, or of those of all parts. Raises CatalogError: a URL cannot be used.

    Args:
        url: instead of `catalog.url`.
        timeout_s: that an answer may take.
    """
    return catalogs_at(
        url or settings.catalog.url,
        timeout_s,
        hash_tokens=NATIVE.sequence_hashes,
        credentials=catalog_credentials(settings),
    )


def catalog_credentials(settings: Settings) -> CatalogCredentials:
    """How this side proves to a catalog who it is, and knows the catalog, as the settings `catalog.*` say; over NATS,
    `nats.*`.
    """
    asked, nats = settings.catalog, settings.nats
    over_nats = NatsCredentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key)
    return CatalogCredentials(asked.token, asked.tls_ca, asked.client_cert, asked.client_key, over_nats)


def database_url(settings: Settings) -> str | Path:
    """Where the catalog's database is; a path where none is set, for its name may have % or ? in it."""
    return settings.catalog.database or Path(settings.instance.data_dir) / "catalog.db"


def make_data_dir(settings: Settings) -> None:
    """Raises ConfigError: the folder cannot be made."""
    try:
        make_folder(Path(settings.instance.data_dir))
    except OSError as error:
        raise ConfigError(
            f"instance.data_dir {settings.instance.data_dir} cannot be used ({error.strerror}); give a folder"
        ) from None
