"""A store by its URL: the scheme says which."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvbm.core.errors import ConfigError
from kvbm.pools.stores.base import OPEN_WAIT_S, Store
from kvbm.pools.stores.blobs import LIMITS, Limits

SCHEMES = ("s3", "az", "redis", "rediss")


def open_store(
    url: str,
    *,
    endpoint: str = "",
    region: str = "",
    name: str = "",
    ttl_s: int = 0,
    limits: Limits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
) -> Store:
    """Open a store and ask once whether it is there. Credentials come from where each technology looks for them.

    Args:
        url: s3://bucket/prefix, az://account/container/prefix, redis://host:port/database; each technology's file says more.
        endpoint, region: of s3 and az.
        name: where instances reach one store by different addresses; "" derives it.
        ttl_s: of redis.
    Raises: ConfigError: a url that is none. MissingExtraError: the technology's client is not installed. PoolError: the store is
        missing or forbidden. StoreAwayError: it does not answer in time, or is not well.
    """
    match urlsplit(url).scheme:
        case "s3":
            from kvbm.pools.stores.s3 import open_s3_store

            return open_s3_store(
                url, endpoint=endpoint, region=region, name=name, limits=limits, open_wait_s=open_wait_s
            )
        case "az":
            from kvbm.pools.stores.azure import open_azure_store

            return open_azure_store(url, endpoint=endpoint, name=name, limits=limits, open_wait_s=open_wait_s)
        case "redis" | "rediss":
            from kvbm.pools.stores.redis import open_redis_store

            return open_redis_store(url, name=name, ttl_s=ttl_s, limits=limits, open_wait_s=open_wait_s)
        case _:
            raise ConfigError(
                f"{url!r} names no store; begin it with one of {', '.join(f'{one}://' for one in SCHEMES)}"
            )
