"""An object store of its own for engines, over S3, and the cluster that tells what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.vllm.harness.cluster import Cluster
from tests.servers import S3_CREDENTIALS, s3_server

BUCKET = "kvbm-test"


class ObjectSite(NamedTuple):
    """See the module.

    Attributes:
        client: boto3's, of the store.
        store: closed, it kills the store.
        settings, environment: of an engine that belongs to both.
    """

    client: Any
    store: ExitStack
    cluster: Cluster
    settings: dict[str, Any]
    environment: dict[str, str]

    def objects(self) -> list[str]:
        """Names of objects with blocks; the pool's own notes are smaller."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [one["Key"] for one in found if one["Size"] > 4096]


@contextmanager
def object_site(folder: Path, timeout_s: float = 60.0) -> Iterator[ObjectSite]:
    """Both, until it is left. The store has so long to answer."""
    import boto3

    with ExitStack() as store, Cluster(folder / "cluster") as cluster:
        endpoint = store.enter_context(s3_server())
        key, secret = S3_CREDENTIALS["access_key_id"], S3_CREDENTIALS["secret_access_key"]
        region = S3_CREDENTIALS["region"]
        client = boto3.client(
            "s3", endpoint_url=endpoint, region_name=region, aws_access_key_id=key, aws_secret_access_key=secret
        )
        client.create_bucket(Bucket=BUCKET)
        pools = {
            "pools.object.url": f"s3://{BUCKET}/blocks",
            "pools.object.endpoint": endpoint,
            "pools.object.region": region,
            "pools.object.timeout_s": timeout_s,
            "gc.grace_s": 3600.0,  # at least twice that; nobody collects here
        }
        environment = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        yield ObjectSite(client, store, cluster, pools | cluster.settings, environment)
