"""Azure blobs: the handle is azure-storage-blob's (credentials, container, lifecycle), the bytes go through obstore."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.pools.stores.base import OPEN_WAIT_S, StoreAwayError, why_no_place
from kvbm.pools.stores.blobs import NO_RETRIES, BlobStore, made, require_obstore
from kvbm.pools.stores.link import LIMITS, RequestLimits, StoreLink, certificate_words, first_line, link_to
from kvbm.pools.stores.waiting import Silent, within

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureCredential

_URL = re.compile(r"az://(?P<first>[a-z0-9][a-z0-9-]{1,61}[a-z0-9])(/(?P<rest>[A-Za-z0-9._/=-]*))?")
# the account and key that every emulator has
_EMULATOR = "devstoreaccount1"
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SCOPE = "https://storage.azure.com/.default"


class ContainerPlace(NamedTuple):
    """Where a container is.

    Attributes:
        endpoint: of the account's blobs.
    """

    account: str
    container: str
    prefix: str
    endpoint: str


class Key(NamedTuple):
    """How one shows who one is: an account's key, a signature (SAS), or with neither the chain of azure-identity.

    Attributes:
        account, endpoint: that a connection string names; "" for none.
    """

    account_key: str = ""
    sas: str = ""
    account: str = ""
    endpoint: str = ""


def open_azure_store(
    url: str,
    *,
    endpoint: str = "",
    account_key: str = "",
    ca: str = "",
    name: str = "",
    limits: RequestLimits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
) -> BlobStore:
    """Connect, and ask once for the container.

    Args:
        url: az://account/container/prefix, or az://container/prefix with an endpoint or a connection string; the prefix
            may be absent.
        endpoint: https://account.blob.core.windows.net where it is another one, such as
            http://127.0.0.1:10000/devstoreaccount1.
        account_key: "" leaves it to the environment (AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN,
            AZURE_STORAGE_CONNECTION_STRING), then to azure-identity: environment, workload identity, managed identity,
            az login; renewed as it renews them.
        ca: file (PEM) of who signs the endpoint's certificate; "" leaves it to `link_to`.
        name: where instances reach one container by different addresses; "" derives it from url and endpoint.
        open_wait_s: how long to wait for the container here.
    Raises: MissingExtraError: no azure-storage-blob, azure-identity where it is needed, or obstore. ConfigError: a url,
        connection string or key that is none. PoolError: the container is missing or forbidden. StoreAwayError: it does
        not answer in time, or is not well.
    """
    key = Key(account_key.strip()) if account_key else key_of_environment()
    place = place_of(url, endpoint, key)
    require_obstore("azure")
    from obstore.store import AzureStore

    name = name or f"az://{place.account}/{place.container}/{place.prefix}".rstrip("/") + _elsewhere(place)
    link = link_to(place.endpoint, ca, limits=limits)
    credential: Any = key.account_key or key.sas or _identity()
    answer = within(open_wait_s, lambda: _look(place, credential, link))
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

    options = link.client_options()
    blobs = made(
        name,
        lambda: AzureStore(
            place.container,
            prefix=place.prefix or None,
            config=config,
            credential_provider=None if key.account_key or key.sas else current,
            client_options=options,
            retry_config=NO_RETRIES,
        ),
    )
    return BlobStore(name, blobs, limits)


def place_of(url: str, endpoint: str, key: Key = Key()) -> ContainerPlace:  # noqa: B008 - it never changes
    """What an az:// URL means, with the endpoint of the settings, else of the connection string.

    Raises ConfigError: it is none.
    """
    match = _URL.fullmatch(url)
    parts = [part for part in (match["rest"] or "").split("/") if part] if match else []
    if match is not None and endpoint:
        account = _account_of(endpoint)
        return ContainerPlace(account, match["first"], "/".join(parts), endpoint.rstrip("/"))
    if match is not None and key.endpoint:
        container, *rest = parts if match["first"] == key.account and parts else [match["first"], *parts]
        return ContainerPlace(key.account, container, "/".join(rest), key.endpoint)
    if match is None or not parts:
        raise ConfigError(
            f"pools.object.url {url!r} is no az://account/container/prefix, or az://container/prefix with "
            f"pools.object.endpoint ({why_no_place(url, 'an account or container', '-')}); correct it"
        )
    account = match["first"]
    return ContainerPlace(account, parts[0], "/".join(parts[1:]), f"https://{account}.blob.core.windows.net")


def _account_of(endpoint: str) -> str:
    """The account an endpoint belongs to: its path's first part where it has one, as emulators do, else its host's
    first label.
    """
    parts = urlsplit(endpoint)
    return parts.path.strip("/").partition("/")[0] or (parts.hostname or "").partition(".")[0]


def _elsewhere(place: ContainerPlace) -> str:
    host = urlsplit(place.endpoint).netloc
    return "" if host.endswith(".core.windows.net") else f"?endpoint={host}"


def key_of_environment() -> Key:
    """How the environment says who one is: a key, a signature, or a connection string.

    Raises ConfigError: a string that is none.
    """
    key = _variable("AZURE_STORAGE_KEY") or _variable("AZURE_STORAGE_ACCOUNT_KEY")
    if key:
        return Key(key)
    sas = _variable("AZURE_STORAGE_SAS_TOKEN").removeprefix("?")
    if sas:
        return Key("", sas)
    said = _variable("AZURE_STORAGE_CONNECTION_STRING")
    return key_of_string(said) if said else Key()


def key_of_string(said: str) -> Key:
    """What a connection string says, all of it. Raises ConfigError: it is none. No message shows it."""
    pairs = {name.strip().upper(): value.strip() for name, _, value in (one.partition("=") for one in said.split(";"))}
    if pairs.get("USEDEVELOPMENTSTORAGE", "").lower() == "true":
        host = pairs.get("DEVELOPMENTSTORAGEPROXYURI") or "http://127.0.0.1"
        return Key(_EMULATOR_KEY, "", _EMULATOR, f"{host.rstrip('/')}:10000/{_EMULATOR}")
    account, endpoint = pairs.get("ACCOUNTNAME", ""), pairs.get("BLOBENDPOINT", "").partition("?")[0].rstrip("/")
    key, sas = pairs.get("ACCOUNTKEY", ""), pairs.get("SHAREDACCESSSIGNATURE", "").removeprefix("?")
    if not endpoint and account:
        scheme, suffix = (
            pairs.get("DEFAULTENDPOINTSPROTOCOL") or "https",
            pairs.get("ENDPOINTSUFFIX") or "core.windows.net",
        )
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    if not endpoint or not (key or sas) or not urlsplit(endpoint).hostname:
        raise ConfigError(
            "AZURE_STORAGE_CONNECTION_STRING names no account to be reached; it needs AccountName or BlobEndpoint, and "
            "AccountKey or"
            " SharedAccessSignature, with semicolons between"
        )
    account = account or _account_of(endpoint)
    return Key(key, "" if key else sas, account, endpoint)


def _variable(name: str) -> str:
    """What it says, without white space at its ends: secrets come from files that end with a newline."""
    return os.environ.get(name, "").strip()


def _identity() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise MissingExtraError("azure-identity", "azure") from error
    return DefaultAzureCredential(exclude_interactive_browser_credential=True)


def _look(place: ContainerPlace, credential: Any, link: StoreLink) -> bool:
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
        connection_timeout=link.limits.connect_timeout_s,
        read_timeout=link.limits.read_timeout_s,
        connection_verify=link.trusted or True,
        proxies=link.proxies,
        use_env_settings=False,  # which the link has read
    ) as container:
        container.get_container_properties()
    return True


def _is_away(error: Exception | None) -> bool:
    """Whether nobody has answered, or only that it cannot now."""
    from azure.core.exceptions import HttpResponseError, ServiceRequestError, ServiceResponseError

    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return error.status_code >= 500
    return error is None or isinstance(error, ServiceRequestError | ServiceResponseError)


def _why_not(error: Exception | None, place: ContainerPlace, wait_s: float) -> str:
    """One sentence: what is the matter with the container, and what to do."""
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError

    what = f"container {place.container!r} at {place.endpoint}"
    if error is None:
        return f"{what} does not answer (no answer within {wait_s:g} s); check the address and the network"
    if not isinstance(error, HttpResponseError) or error.status_code is None:
        if isinstance(error, ClientAuthenticationError):
            return (
                f"no credentials for {what} ({first_line(str(error))}); set AZURE_STORAGE_KEY or "
                "AZURE_STORAGE_SAS_TOKEN, or log in"
            )
        do = certificate_words(error) or "; check the address and the network"
        return f"{what} does not answer ({type(error).__name__}: {first_line(str(error))}){do}"
    code = getattr(error, "error_code", "") or error.reason
    match error.status_code:
        case 404:
            return f"{place.endpoint} has no container {place.container!r}; create it"
        case 401 | 403:
            return (
                f"{place.endpoint} refuses access to container {place.container!r} ({error.status_code} {code}): it is "
                "not"
                " ours, or the key, its rights or this machine's clock are wrong"
            )
        case status:
            return f"{what} answers {status} {code}; check account and endpoint"
