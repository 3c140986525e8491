"""A store by its URL: the scheme says which."""

from __future__ import annotations

from kvbm.core.errors import ConfigError
from kvbm.pools.stores.base import OPEN_WAIT_S, OpenedStore
from kvbm.pools.stores.link import LIMITS, RequestLimits
from kvbm.pools.stores.trial import try_out

SCHEMES = ("s3", "az", "redis", "rediss")


def open_store(
    url: str,
    *,
    endpoint: str = "",
    region: str = "",
    ca: str = "",
    name: str = "",
    ttl_s: int = 0,
    limits: RequestLimits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
    tries: bool = True,
) -> OpenedStore:
    """Open a store, ask once whether it is there, and put, read and delete a small object by the client that carries
    the bytes.

    Credentials come from where each technology looks for them.

    Args:
        url: s3://bucket/prefix, az://account/container/prefix, redis://host:port/database; each technology's file says
            more.
        endpoint, region: of s3 and az.
        ca: file (PEM) of who signs the store's certificate; "" leaves it to the environment and the system.
        name: where instances reach one store by different addresses; "" derives it.
        ttl_s: of redis.
        tries: whether the small object is put: whoever changes nothing, or tries by itself, does without.
    Raises: ConfigError: a url that is none, or what the client cannot use. MissingExtraError: the technology's client
        is not installed. PoolError: the store is missing or forbidden, or carries no bytes. StoreAwayError: it does not
        answer in time, or is not well.
    """
    store = _opened(url, endpoint, region, ca, name, ttl_s, limits, open_wait_s)
    if not tries:
        return store
    try:
        store.remarks = (*store.remarks, *try_out(store, open_wait_s))
    except BaseException:
        store.close()
        raise
    return store


def _opened(
    url: str, endpoint: str, region: str, ca: str, name: str, ttl_s: int, limits: RequestLimits, open_wait_s: float
) -> OpenedStore:
    match scheme := url.partition("://")[0]:
        case "s3":
            from kvbm.pools.stores.s3 import open_s3_store

            return open_s3_store(
                url, endpoint=endpoint, region=region, ca=ca, name=name, limits=limits, open_wait_s=open_wait_s
            )
        case "az":
            from kvbm.pools.stores.azure import open_azure_store

            return open_azure_store(url, endpoint=endpoint, ca=ca, name=name, limits=limits, open_wait_s=open_wait_s)
        case "redis" | "rediss":
            from kvbm.pools.stores.redis import open_redis_store

            return open_redis_store(url, ca=ca, name=name, ttl_s=ttl_s, limits=limits, open_wait_s=open_wait_s)
        case _:
            what = f"a URL that begins with {scheme!r}" if "://" in url else "a URL without a scheme"
            raise ConfigError(
                f"{what} names no store; begin it with one of {', '.join(f'{one}://' for one in SCHEMES)}"
            )
