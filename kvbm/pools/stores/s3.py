"""S3: the handle is boto3's (credentials, region, bucket, lifecycle), the bytes go through obstore with the same
credentials.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.pools.stores.base import OPEN_WAIT_S, StoreAwayError, why_no_place
from kvbm.pools.stores.blobs import NO_RETRIES, BlobStore, made, require_obstore
from kvbm.pools.stores.direct import DirectSigner, is_direct
from kvbm.pools.stores.link import LIMITS, RequestLimits, StoreLink, certificate_words, first_line, link_to
from kvbm.pools.stores.waiting import Silent, within

if TYPE_CHECKING:
    from botocore.credentials import Credentials
    from mypy_boto3_s3.client import S3Client
    from obstore.store import S3Credential

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/(?P<prefix>[A-Za-z0-9._/=-]*))?")
_CREDENTIALS_LAST = timedelta(minutes=5)  # then the chain is asked again, which renews what is about to expire
_CHECK_ATTEMPTS = 2


class _Bucket(NamedTuple):
    """A bucket that answers.

    Attributes:
        link: how it is reached.
        endpoint: "" for Amazon's own.
        expiry_days, remarks: as `BlobStore` has them.
    """

    client: S3Client
    link: StoreLink
    credentials: Credentials
    endpoint: str
    region: str
    expiry_days: int | None
    remarks: tuple[str, ...]


def open_s3_store(
    url: str,
    *,
    endpoint: str = "",
    region: str = "",
    access_key_id: str = "",
    secret_access_key: str = "",
    ca: str = "",
    name: str = "",
    limits: RequestLimits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
) -> BlobStore:
    """Connect, and ask once for the bucket.

    Args:
        url: s3://bucket/prefix; the prefix may be absent.
        endpoint: of a store that is not Amazon's.
        region: "" leaves it to boto3's chain, and to the bucket where Amazon says.
        access_key_id, secret_access_key: "" leaves both to boto3's chain: environment, profile, role; renewed as it
            renews them.
        ca: file (PEM) of who signs the endpoint's certificate; "" leaves it to AWS_CA_BUNDLE, the profile, and then as
            `link_to`.
        name: where instances reach one store by different addresses; "" derives it from url and endpoint.
        open_wait_s: how long to wait for the bucket here.
    Raises: MissingExtraError: no boto3 or obstore. ConfigError: a url that is none, or what a client cannot use.
        PoolError: the bucket is missing, forbidden, in another region. StoreAwayError: it does not answer in time, or
        is not well.
    """
    bucket, prefix = bucket_of(url)
    require_obstore("s3")
    from obstore.store import S3Store

    name = name or store_name(bucket, prefix, endpoint)

    def find() -> _Bucket:
        return _look(_linked(endpoint, region, access_key_id, secret_access_key, ca, limits), bucket, prefix, endpoint)

    answer = within(open_wait_s, find)
    if isinstance(answer, Silent):
        if isinstance(answer.error, ConfigError):
            raise answer.error
        why = _why_not(answer.error, bucket, region, endpoint, open_wait_s)
        raise StoreAwayError(name, why) if _is_away(answer.error) else PoolError(f"OBJECT pool {name}: {why}")
    credentials = answer.credentials

    def current() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key or "",
            "secret_access_key": frozen.secret_key or "",
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }

    options = answer.link.client_options()

    def client(deletes_many: bool) -> S3Store:
        return S3Store(
            bucket,
            prefix=prefix or None,
            region=answer.region,
            disable_bulk_delete=not deletes_many,
            unsigned_payload=True,  # objects prove their own bytes, and hashing them again costs more than sending them
            credential_provider=current,
            client_options=options,
            retry_config=NO_RETRIES,
            config={"endpoint": answer.endpoint} if answer.endpoint else None,
        )

    blobs = made(name, lambda: client(deletes_many=True))
    return BlobStore(
        name,
        blobs,
        limits,
        deleting_singly=made(name, lambda: client(deletes_many=False)),
        signer=DirectSigner(blobs, limits) if is_direct(answer.link) else None,
        on_close=answer.client.close,
        remarks=answer.remarks,
        expiry_days=answer.expiry_days,
    )


def bucket_of(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix. Raises ConfigError: the URL is none."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"pools.object.url {url!r} is no s3://bucket/prefix ({why_no_place(url, 'a bucket', '-.')}); correct it"
        )
    return match["bucket"], re.sub("/+", "/", match["prefix"] or "").strip("/")


def store_name(bucket: str, prefix: str, endpoint: str) -> str:
    """s3://bucket/prefix, and the endpoint's host unless it is Amazon's, where bucket names are unique."""
    name = f"s3://{bucket}/{prefix}".rstrip("/")
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if not host or host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return name
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{name}?endpoint={host}" if port in (80, 443) else f"{name}?endpoint={host}:{port}"


class _Linked(NamedTuple):
    """A client, and how it reaches the store."""

    client: S3Client
    link: StoreLink


def _linked(
    endpoint: str, region: str, access_key_id: str, secret_access_key: str, ca: str, limits: RequestLimits
) -> _Linked:
    """A client that reaches the store as the other one will. Raises ConfigError, MissingExtraError."""
    named = _named_ca()
    link = link_to(endpoint or _usual_endpoint(), ca, named, limits)
    client = s3_client(link, endpoint, region, access_key_id, secret_access_key)
    actual = link_to(client.meta.endpoint_url, ca, named, limits)  # profiles name one, too
    if actual.proxy != link.proxy:
        client.close()
        client = s3_client(actual, endpoint, region, access_key_id, secret_access_key)
    return _Linked(client, actual)


def _usual_endpoint() -> str:
    said = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return said or "https://s3.amazonaws.com"


def _named_ca() -> str:
    """The file of trusted certificates by AWS_CA_BUNDLE or a profile. Raises MissingExtraError."""
    try:
        from botocore.session import get_session
    except ModuleNotFoundError as error:
        raise MissingExtraError("boto3", "s3") from error
    return str(get_session().get_config_variable("ca_bundle") or "")


def s3_client(
    link: StoreLink, endpoint: str = "", region: str = "", access_key_id: str = "", secret_access_key: str = ""
) -> S3Client:
    """A boto3 client: few attempts, short waits, one connection, no checksums that other stores refuse.

    Raises MissingExtraError.
    """
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise MissingExtraError("boto3", "s3") from error
    from botocore.config import Config

    config = Config(
        connect_timeout=link.limits.connect_timeout_s,
        read_timeout=link.limits.read_timeout_s,
        retries={"total_max_attempts": _CHECK_ATTEMPTS, "mode": "standard"},
        max_pool_connections=1,
        proxies=link.proxies,
        s3={"addressing_style": "path"} if endpoint else None,  # other stores seldom have a host name for each bucket
        request_checksum_calculation="when_required",  # blocks bring their own; other stores refuse Amazon's trailers
        response_checksum_validation="when_required",
    )
    token = None
    if not access_key_id:
        access_key_id, secret_access_key, token = _bare_variables()
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=region or None,
        aws_access_key_id=access_key_id.strip() or None,
        aws_secret_access_key=secret_access_key.strip() or None,
        aws_session_token=token,
        verify=link.trusted or None,
        config=config,
    )


def _bare_variables() -> tuple[str, str, str | None]:
    """The credentials of the environment without white space at their ends, where they have some; else none, and the
    chain chooses.
    """
    said = [os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")]
    key, secret, token = (one.strip() for one in said)
    return (key, secret, token or None) if key and secret and [key, secret, token] != said else ("", "", None)


def _look(linked: _Linked, bucket: str, prefix: str, endpoint: str) -> _Bucket:
    """The bucket as boto3 finds it; Amazon's redirects to its region are followed."""
    from botocore.exceptions import NoCredentialsError

    client = linked.client
    # the chain's choice, which renews itself
    credentials = client._request_signer._credentials  # type: ignore[attr-defined]
    if credentials is None:
        raise NoCredentialsError
    answer = client.head_bucket(Bucket=bucket)
    at_amazon = (urlsplit(client.meta.endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    own = endpoint or ("" if at_amazon else client.meta.endpoint_url)  # AWS_ENDPOINT_URL and profiles name one too
    region = (answer.get("BucketRegion") if at_amazon else "") or client.meta.region_name
    region = "us-east-1" if region in ("", "aws-global", None) else region
    days = _expiry_days(client, bucket, prefix)
    remark = (
        f"bucket {bucket!r} deletes what lies under {prefix!r} after {days} days by its own lifecycle; claims for it "
        "last"
        " until somebody misses it, so let the janitor's TTL be shorter"
    )
    return _Bucket(client, linked.link, credentials, own, region, days, (remark,) if days is not None else ())


def _expiry_days(client: S3Client, bucket: str, prefix: str) -> int | None:
    """The fewest days after which a lifecycle rule expires objects under the prefix;

    None for none, or where nobody tells us.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        rules: list[Any] = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    except (ClientError, BotoCoreError):
        return None
    days = [
        rule["Expiration"]["Days"]
        for rule in rules
        if rule.get("Status") == "Enabled" and "Days" in rule.get("Expiration", {})
        if _overlap(rule.get("Filter", {}).get("Prefix", rule.get("Prefix", "")), prefix)
    ]
    return min(days, default=None)


def _overlap(ruled: str, prefix: str) -> bool:
    return f"{prefix}/".startswith(ruled) or ruled.startswith(f"{prefix}/") or not prefix


def _is_away(error: Exception | None) -> bool:
    """Whether nobody has answered, or only that it cannot now."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    if isinstance(error, ClientError):
        return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) >= 500
    return error is None or isinstance(error, ConnectionError | HTTPClientError)


def _why_not(error: Exception | None, bucket: str, region: str, endpoint: str, wait_s: float) -> str:
    """One sentence: what is the matter with the bucket, and what to do."""
    from botocore.exceptions import ClientError, NoCredentialsError

    where = endpoint or "Amazon's endpoint"
    if error is None:
        return (
            f"bucket {bucket!r} at {where} does not answer (no answer within {wait_s:g} s); check "
            "pools.object.endpoint and the network"
        )
    if isinstance(error, NoCredentialsError):
        return (
            f"no credentials for bucket {bucket!r}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or "
            "a role"
        )
    if not isinstance(error, ClientError):
        why = f"{type(error).__name__}: {first_line(str(error))}"
        do = certificate_words(why) or "; check pools.object.endpoint and the network"
        return f"bucket {bucket!r} at {where} does not answer ({why}){do}"
    said = error.response.get("ResponseMetadata", {})
    status, headers = said.get("HTTPStatusCode", 0), said.get("HTTPHeaders", {})
    lies_in = headers.get("x-amz-bucket-region", "")
    if lies_in and lies_in != region and status in (301, 307, 400):
        asked = f"not in {region!r}" if region else "not where it was asked for"
        return f"bucket {bucket!r} lies in region {lies_in!r}, {asked}; set pools.object.region = {lies_in!r}"
    code = error.response.get("Error", {}).get("Code", "")
    said_so = f"{status} {code}".rstrip() if code != str(status) else str(status)  # a HEAD's answer has no words
    match status:
        case 404:
            return f"{where} has no bucket {bucket!r}; create it"
        case 401 | 403:
            return (
                f"{where} refuses access to bucket {bucket!r} ({said_so}): it is not ours, or the credentials, their"
                " policy or this machine's clock are wrong"
            )
        case _:
            return f"{where} answers {said_so} for bucket {bucket!r}; check the region and the endpoint"
