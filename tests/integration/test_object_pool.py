"""The object pool on a real S3 server: what is already there, what is damaged, what does not answer."""

from __future__ import annotations

import io
import socket
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders
from kvbm.pools.s3_pool import S3Pool, store_name

from kvbm._native import checksums
from kvbm.core.errors import ConfigError, PoolError
from kvbm.core.ids import split_hashes
from kvbm.pools.base import ReadOutcome
from tests.pool_runs import Run, random_run
from tests.servers import S3_CREDENTIALS, free_port, s3_server

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BLOCK_BYTES = 4000
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.FAILED


class _Raw(io.BytesIO):
    """The body of an answer that no server gave."""

    def stream(self) -> Iterator[bytes]:
        """All of it."""
        yield self.read()


class Store:
    """A bucket of the test's own, and a pool on it that keeps its troubles."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.endpoint = endpoint
        self.bucket = f"kvbm-{uuid.uuid4().hex}"
        self.client: S3Client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        self.client.create_bucket(Bucket=self.bucket)
        self.troubles: list[str] = []
        self.pool = self.open()

    def open(self, **options: Any) -> S3Pool:
        """Another pool on the same bucket."""
        return S3Pool(
            f"s3://{self.bucket}/blocks",
            BLOCK_BYTES,
            checksums,
            endpoint_url=self.endpoint,
            on_trouble=self.troubles.append,
            **S3_CREDENTIALS,
            **options,
        )

    def keys(self, run: Run) -> list[str]:
        """The objects' names of a run."""
        return [f"blocks/{run.namespace.hex()}/{block_hash.hex()}" for block_hash in split_hashes(run.hashes)]

    def body(self, key: str) -> bytes:
        """The bytes of an object."""
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def store(s3_endpoint: str) -> Iterator[Store]:
    made = Store(s3_endpoint)
    yield made
    made.pool.close()


def test_an_object_is_its_header_and_bytes_under_namespace_and_hash(store: Store) -> None:
    run = random_run(1, BLOCK_BYTES)
    assert store.pool.put(run.rows, run.proof) == [True]
    [key] = store.keys(run)
    head = store.client.head_object(Bucket=store.bucket, Key=key)
    assert head["ContentLength"] == 64 + BLOCK_BYTES
    assert head["Metadata"]["kvbm-hash"] == run.hashes.hex()
    body = store.body(key)
    assert body[:4] == b"KVBO"
    assert body[8:24] == run.namespace
    assert body[24:40] == run.hashes
    assert body[64:] == run.rows.tobytes()


def test_two_instances_that_put_the_same_block_both_succeed(store: Store) -> None:
    run = random_run(5, BLOCK_BYTES)
    other = store.open()
    assert store.pool.put(run.rows, run.proof) == [True] * 5
    assert other.put(run.rows, run.proof) == [True] * 5
    assert other.name == store.pool.name
    assert store.troubles == []
    other.close()


def test_an_object_of_another_size_or_origin_under_the_name_is_no_success(store: Store) -> None:
    run = random_run(3, BLOCK_BYTES)
    keys = store.keys(run)
    store.client.put_object(Bucket=store.bucket, Key=keys[0], Body=b"something else")
    store.client.put_object(Bucket=store.bucket, Key=keys[2], Body=bytes(64 + BLOCK_BYTES))
    assert store.pool.put(run.rows, run.proof) == [False, True, False]
    assert len(store.troubles) == 1
    assert "2 of 3 blocks" in store.troubles[0]
    assert "delete it" in store.troubles[0]
    assert store.body(keys[0]) == b"something else"
    outcomes = store.pool.get(run.namespace, run.hashes, run.room()).outcomes
    assert outcomes == [CORRUPT, GOOD, CORRUPT]


def test_an_object_that_was_cut_short_is_no_success(store: Store) -> None:
    run = random_run(1, BLOCK_BYTES)
    store.pool.put(run.rows, run.proof)
    [key] = store.keys(run)
    facts = store.client.head_object(Bucket=store.bucket, Key=key)["Metadata"]
    store.client.put_object(Bucket=store.bucket, Key=key, Body=store.body(key)[:-1], Metadata=facts)
    assert store.pool.put(run.rows, run.proof) == [False]
    assert f"with {64 + BLOCK_BYTES - 1} bytes instead of {64 + BLOCK_BYTES}" in store.troubles[0]
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [CORRUPT]


def test_a_missing_object_is_missing_without_a_word(store: Store) -> None:
    run = random_run(2, BLOCK_BYTES)
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [MISSING, MISSING]
    assert store.troubles == []


@pytest.mark.parametrize("at", [0, 5, 10, 30, 45, 50, 54, 58, 62, 64, 1000, 64 + BLOCK_BYTES - 1])
def test_a_flipped_bit_in_an_object_is_corrupt(store: Store, at: int) -> None:
    run = random_run(1, BLOCK_BYTES)
    store.pool.put(run.rows, run.proof)
    [key] = store.keys(run)
    body = bytearray(store.body(key))
    body[at] ^= 4
    store.client.put_object(Bucket=store.bucket, Key=key, Body=bytes(body))
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [CORRUPT]


def test_objects_under_each_others_names_are_corrupt(store: Store) -> None:
    run = random_run(2, BLOCK_BYTES)
    store.pool.put(run.rows, run.proof)
    first, second = store.keys(run)
    store.client.put_object(Bucket=store.bucket, Key=first, Body=store.body(second))
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [CORRUPT, GOOD]


def test_a_store_without_conditional_puts_is_asked_first(store: Store) -> None:
    run = random_run(3, BLOCK_BYTES)
    store.client.put_object(Bucket=store.bucket, Key=store.keys(run)[2], Body=b"something else")
    puts: list[str] = []

    def refuse(request: AWSPreparedRequest, **_: Any) -> Any:
        puts.append("plain" if "If-None-Match" not in request.headers else "conditional")
        if puts[-1] == "plain":
            return None
        answer = b"<Error><Code>NotImplemented</Code><Message>a header you provided</Message></Error>"
        return AWSResponse(request.url, 501, HTTPHeaders(), _Raw(answer))

    pool = store.open(requests_in_flight=1)
    pool._client.meta.events.register("before-send.s3.PutObject", refuse)
    assert pool.put(run.rows, run.proof) == [True, True, False]
    assert pool.put(run.rows, run.proof) == [True, True, False]
    assert puts == ["conditional", "plain", "plain"]  # it is told once, and overwrites nothing
    assert pool.get(run.namespace, run.hashes, run.room()).outcomes == [GOOD, GOOD, CORRUPT]
    pool.close()


def test_an_answer_after_the_deadline_touches_nothing(store: Store) -> None:
    run = random_run(4, BLOCK_BYTES)
    store.pool.put(run.rows, run.proof)
    late = store.open(deadline_s=0.3)
    late._client.meta.events.register("before-send.s3.*", lambda **_: time.sleep(1.0))
    rows = run.room()
    begin = time.monotonic()
    assert late.get(run.namespace, run.hashes, rows).outcomes == [FAILED] * 4
    assert time.monotonic() - begin < 0.9
    late.close()  # waits for the answers
    assert (rows == run.room()).all()
    assert "no answer within 0.3 s" in store.troubles[0]


def test_a_bucket_that_vanishes_is_a_failure_with_one_remark(store: Store) -> None:
    run = random_run(2, BLOCK_BYTES)
    store.client.delete_bucket(Bucket=store.bucket)
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [FAILED] * 2
    assert store.pool.put(run.rows, run.proof) == [False] * 2
    assert len(store.troubles) == 2
    assert "NoSuchBucket" in store.troubles[0]


def test_a_server_that_is_gone_costs_the_deadline_at_most() -> None:
    with s3_server() as endpoint:
        store = Store(endpoint)
    run = random_run(20, BLOCK_BYTES)
    begin = time.monotonic()
    assert store.pool.put(run.rows, run.proof) == [False] * 20
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [FAILED] * 20
    assert time.monotonic() - begin < 22
    assert len(store.troubles) == 2
    store.pool.close()


def test_a_closed_pool_puts_and_gets_nothing(store: Store) -> None:
    run = random_run(2, BLOCK_BYTES)
    store.pool.close()
    assert store.pool.put(run.rows, run.proof) == [False] * 2
    assert store.pool.get(run.namespace, run.hashes, run.room()).outcomes == [FAILED] * 2


def test_a_missing_bucket_is_named(s3_endpoint: str) -> None:
    with pytest.raises(PoolError, match="has no bucket 'nowhere'; create it"):
        S3Pool("s3://nowhere/x", BLOCK_BYTES, checksums, endpoint_url=s3_endpoint, **S3_CREDENTIALS)


def test_an_endpoint_nobody_listens_on_is_named_within_seconds() -> None:
    begin = time.monotonic()
    with pytest.raises(PoolError, match=r"does not answer .*pools\.object\.endpoint"):
        S3Pool(
            "s3://bucket/x", BLOCK_BYTES, checksums, endpoint_url=f"http://127.0.0.1:{free_port()}", **S3_CREDENTIALS
        )
    assert time.monotonic() - begin < 5


def test_an_endpoint_that_listens_and_says_nothing_is_named_within_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begin = time.monotonic()
        with pytest.raises(PoolError, match="does not answer"):
            S3Pool(
                "s3://bucket/x",
                BLOCK_BYTES,
                checksums,
                endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}",
                **S3_CREDENTIALS,
            )
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("url", ["", "bucket/x", "http://bucket", "s3://", "s3://UPPER/x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"pools\.object\.url"):
        S3Pool(url, BLOCK_BYTES, checksums)


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("", "s3://bucket/a/b"),
        ("https://s3.eu-west-1.amazonaws.com", "s3://bucket/a/b"),
        ("http://MinIO.local:9000/", "s3://bucket/a/b?endpoint=minio.local:9000"),
        ("https://store.example:443", "s3://bucket/a/b?endpoint=store.example"),
        ("https://store.example", "s3://bucket/a/b?endpoint=store.example"),
    ],
)
def test_a_store_has_one_name_however_it_is_written(endpoint: str, name: str) -> None:
    assert store_name("bucket", "a/b", endpoint) == name
