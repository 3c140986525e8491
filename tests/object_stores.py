"""Empty places in every kind of object store, for whoever asks each of them the same.

@pytest.mark.parametrize("place", OBJECT_STORES, indirect=True)
def test_…(place: Place) -> None:
    with closing(place.open()) as store: …
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from kvbm.pools.stores.base import ObjectStore
from kvbm.pools.stores.link import RequestLimits
from kvbm.pools.stores.memory import MemoryStore
from tests.ceph import ACCESS_KEY_ID, SECRET_ACCESS_KEY, Radosgw
from tests.servers import AZURITE_ACCOUNT, AZURITE_KEY, S3_CREDENTIALS

QUICK = ["memory", "s3", "azure"]
OBJECT_STORES = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.objects) for name in ("radosgw", "redis", "redis_cluster")),
]
WAIT_S = 120.0  # a machine that is busy with other tests is no silent store
OPEN_WAIT_S = WAIT_S
PATIENT = RequestLimits(
    requests_in_flight=4, connect_timeout_s=WAIT_S, read_timeout_s=WAIT_S
)  # nothing is asked twice for being late


class Place(NamedTuple):
    """An empty place in a store.

    Attributes:
        open: another `ObjectStore` on it, with further options of its `open_…_store`; the caller closes it.
        url, endpoint: as settings name it; "" for memory, which has no address.
        environment: variables with the credentials, for whoever opens it by settings.
    """

    kind: str
    open: Callable[..., ObjectStore]
    url: str = ""
    endpoint: str = ""
    environment: Mapping[str, str] = MappingProxyType({})


def place_in(store: str, request: pytest.FixtureRequest) -> Place:
    """An empty place in the object store of this name, for fixtures that are parametrized by more than that."""
    match store:
        case "memory":
            return memory_place()
        case "s3":
            return s3_place(request.getfixturevalue("s3_endpoint"))
        case "azure":
            return azure_place(request.getfixturevalue("azurite_endpoint"))
        case "radosgw":
            return radosgw_place(request.getfixturevalue("ceph"))
        case "redis":
            return redis_place(request.getfixturevalue("redis_url"))
        case "redis_cluster":
            return redis_place(request.getfixturevalue("redis_cluster_url"), store)
        case other:
            raise AssertionError(f"{other!r} is none of {OBJECT_STORES}")


def memory_place() -> Place:
    """All of its stores are one."""
    store = MemoryStore(f"memory://{uuid.uuid4().hex}")
    return Place("memory", lambda **options: store)


def s3_place(endpoint: str, kind: str = "s3", **credentials: Any) -> Place:
    """A bucket of one's own."""
    from kvbm.pools.stores.s3 import open_s3_store

    said = S3_CREDENTIALS | credentials
    bucket = f"kvbm-{uuid.uuid4().hex}"
    boto3_client(endpoint, said["access_key_id"], said["secret_access_key"]).create_bucket(Bucket=bucket)
    url = f"s3://{bucket}/blocks"
    environment = {
        "AWS_ACCESS_KEY_ID": said["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": said["secret_access_key"],
        "AWS_DEFAULT_REGION": said["region"],
    }
    opened = partial(open_s3_store, url, endpoint=endpoint, open_wait_s=OPEN_WAIT_S, limits=PATIENT, **said)
    return Place(kind, opened, url, endpoint, environment)


def radosgw_place(ceph: Radosgw) -> Place:
    """A bucket of one's own."""
    return s3_place(
        ceph.endpoint, "radosgw", access_key_id=ACCESS_KEY_ID, secret_access_key=SECRET_ACCESS_KEY, region="us-east-1"
    )


def azure_place(endpoint: str) -> Place:
    """A container of one's own."""
    from azure.storage.blob import ContainerClient

    from kvbm.pools.stores.azure import open_azure_store

    container = f"kvbm-{uuid.uuid4().hex}"
    credential = {"account_name": AZURITE_ACCOUNT, "account_key": AZURITE_KEY}
    with ContainerClient(
        endpoint, container, credential=credential, connection_timeout=WAIT_S, read_timeout=WAIT_S
    ) as made:
        made.create_container()
    url = f"az://{container}/blocks"
    opened = partial(
        open_azure_store, url, endpoint=endpoint, account_key=AZURITE_KEY, open_wait_s=OPEN_WAIT_S, limits=PATIENT
    )
    return Place("azure", opened, url, endpoint, {"AZURE_STORAGE_KEY": AZURITE_KEY})


def redis_place(server_url: str, kind: str = "redis") -> Place:
    """A prefix of one's own."""
    from kvbm.pools.stores.redis import open_redis_store

    url = f"{server_url}?prefix=kvbm-{uuid.uuid4().hex}"
    return Place(kind, partial(open_redis_store, url, open_wait_s=OPEN_WAIT_S, limits=PATIENT), url)


def boto3_client(endpoint: str, access_key_id: str, secret_access_key: str) -> Any:
    """A client of the test's own, to make buckets and to look at what lies there."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        config=Config(connect_timeout=WAIT_S, read_timeout=WAIT_S),
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key_id,
        aws_secret_access_key=secret_access_key,
    )
