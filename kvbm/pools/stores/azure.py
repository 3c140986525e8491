"""Azure blobs: the handle is azure-storage-blob's (credentials, container, lifecycle), the bytes go through obstore."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.pools.stores.base import OPEN_WAIT_S, StoreAwayError
from kvbm.pools.stores.blobs import LIMITS, NO_RETRIES, BlobStore, Limits, client_options, require_obstore
from kvbm.pools.stores.waiting import Silent, within

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureCredential

_URL = re.compile(r"az://(?P<first>[a-z0-9][a-z0-9-]{1,61}[a-z0-9])(/(?P<rest>[A-Za-z0-9._/=-]*))?")
_SCOPE = "https://storage.azure.com/.default"


class Place(NamedTuple):
    """Where a container is.

    Attributes:
        endpoint: of the account's blobs.
    """

    account: str
    container: str
    prefix: str
    endpoint: str


class _Key(NamedTuple):
    """How one shows who one is: an account's key, a signature (SAS), or the chain of azure-identity."""

    account_key: str = ""
    sas: str = ""


def open_azure_store(
    url: str,
    *,
    endpoint: str = "",
    account_key: str = "",
    name: str = "",
    limits: Limits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
) -> BlobStore:
    """Connect, and ask once for the container.

    Args:
        url: az://account/container/prefix, or az://container/prefix with an endpoint; the prefix may be absent.
        endpoint: https://account.blob.core.windows.net where it is another one, such as http://127.0.0.1:10000/devstoreaccount1.
        account_key: "" leaves it to the environment (AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CONNECTION_STRING),
            then to azure-identity: environment, workload identity, managed identity, az login; renewed as it renews them.
        name: where instances reach one container by different addresses; "" derives it from url and endpoint.
        open_wait_s: how long to wait for the container here.
    Raises: MissingExtraError: no azure-storage-blob, azure-identity where it is needed, or obstore. ConfigError: a url that is none.
        PoolError: the container is missing or forbidden. StoreAwayError: it does not answer in time, or is not well.
    """
    place = place_of(url, endpoint)
    require_obstore("azure")
    from obstore.store import AzureStore

    name = name or f"az://{place.account}/{place.container}/{place.prefix}".rstrip("/") + _elsewhere(place)
    key = _Key(account_key) if account_key else _from_environment()
    credential: Any = key.account_key or key.sas or _identity()
    answer = within(open_wait_s, lambda: _look(place, credential, limits))
    if isinstance(answer, Silent):
        why = _why_not(answer.error, place, open_wait_s)
        raise StoreAwayError(name, why) if _is_away(answer.error) else PoolError(f"OBJECT pool {name}: {why}")
    config: AzureConfig = {"account_name": place.account, "endpoint": place.endpoint}
    if key.account_key:
        config["account_key"] = key.account_key
    elif key.sas:
        config["sas_key"] = key.sas

    def current() -> AzureCredential:
        token = credential.get_token(_SCOPE)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    blobs = AzureStore(
        place.container,
        prefix=place.prefix or None,
        config=config,
        credential_provider=None if key.account_key or key.sas else current,
        client_options=client_options(limits, place.endpoint),
        retry_config=NO_RETRIES,
    )
    return BlobStore(name, blobs, limits)


def place_of(url: str, endpoint: str) -> Place:
    """What an az:// URL means. Raises ConfigError: it is none."""
    match = _URL.fullmatch(url)
    parts = [part for part in (match["rest"] or "").split("/") if part] if match else []
    if match is not None and endpoint:
        account = _account_of(endpoint)
        return Place(account, match["first"], "/".join(parts), endpoint.rstrip("/"))
    if match is None or not parts:
        raise ConfigError(
            f"pools.object.url {url!r} is no az://account/container/prefix, or az://container/prefix with"
            " pools.object.endpoint (letters, digits, and -._=/ in the prefix); correct it"
        )
    account = match["first"]
    return Place(account, parts[0], "/".join(parts[1:]), f"https://{account}.blob.core.windows.net")


def _account_of(endpoint: str) -> str:
    """The account an endpoint belongs to: its path's first part where it has one, as emulators do, else its host's first label."""
    parts = urlsplit(endpoint)
    return parts.path.strip("/").partition("/")[0] or (parts.hostname or "").partition(".")[0]


def _elsewhere(place: Place) -> str:
    host = urlsplit(place.endpoint).netloc
    return "" if host.endswith(".core.windows.net") else f"?endpoint={host}"


def _from_environment() -> _Key:
    said = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    pairs = dict(part.partition("=")[::2] for part in said.split(";") if part)
    key = (
        os.environ.get("AZURE_STORAGE_KEY")
        or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
        or pairs.get("AccountKey", "")
    )
    sas = os.environ.get("AZURE_STORAGE_SAS_TOKEN") or pairs.get("SharedAccessSignature", "")
    return _Key(key) if key else _Key("", sas)


def _identity() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise MissingExtraError("azure-identity", "azure") from error
    return DefaultAzureCredential(exclude_interactive_browser_credential=True)


def _look(place: Place, credential: Any, limits: Limits) -> bool:
    """Whether the container answers: an exception of the client, or True."""
    try:
        from azure.storage.blob import ContainerClient
    except ModuleNotFoundError as error:
        raise MissingExtraError("azure-storage-blob", "azure") from error
    if isinstance(credential, str) and "sig=" not in credential:
        credential = {"account_name": place.account, "account_key": credential}
    with ContainerClient(
        place.endpoint,
        place.container,
        credential=credential,
        retry_total=1,
        connection_timeout=limits.connect_timeout_s,
        read_timeout=limits.read_timeout_s,
    ) as container:
        container.get_container_properties()
    return True


def _is_away(error: Exception | None) -> bool:
    """Whether nobody has answered, or only that it cannot now."""
    from azure.core.exceptions import HttpResponseError, ServiceRequestError, ServiceResponseError

    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return error.status_code >= 500
    return error is None or isinstance(error, ServiceRequestError | ServiceResponseError)


def _why_not(error: Exception | None, place: Place, wait_s: float) -> str:
    """One sentence: what is the matter with the container, and what to do."""
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError

    what = f"container {place.container!r} at {place.endpoint}"
    if error is None:
        return f"{what} does not answer (no answer within {wait_s:g} s); check the address and the network"
    if not isinstance(error, HttpResponseError) or error.status_code is None:
        if isinstance(error, ClientAuthenticationError):
            return f"no credentials for {what} ({_first_line(error)}); set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in"
        return (
            f"{what} does not answer ({type(error).__name__}: {_first_line(error)}); check the address and the network"
        )
    code = getattr(error, "error_code", "") or error.reason
    match error.status_code:
        case 404:
            return f"{place.endpoint} has no container {place.container!r}; create it"
        case 401 | 403:
            return (
                f"{place.endpoint} refuses access to container {place.container!r} ({error.status_code} {code}): it is not"
                " ours, or the key, its rights or this machine's clock are wrong"
            )
        case status:
            return f"{what} answers {status} {code}; check account and endpoint"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
