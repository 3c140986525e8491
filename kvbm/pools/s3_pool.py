"""OBJECT: blocks in an S3-style store, found by namespace and hash, without slots and without an owner.

An object is named <prefix>/<namespace id, hex>/<hash, hex>. Its body is one block header, as in header.py with magic
"KVBO", and the block's bytes. The same facts stand in the object's user metadata (kvbm-version, -blocks, -namespace,
-hash, -bytes, -checksum), so that a HEAD tells whether an object that is already there is the block or something else.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar
from urllib.parse import urlsplit

import numpy as np

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.core.ids import NamespaceId, Reach, Tier, split_hashes
from kvbm.core.kernels import ChecksumRows
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.header import HEADER_BYTES, OBJECT_MAGIC, VERSION, encode_headers, verify
from kvbm.pools.run import check_chain, check_proof, check_rows, check_size

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_ATTEMPTS = 2  # of one request, within the deadline of the call
_PUT_ROUNDS = 3  # a conditional put that lost a race looks again this often
_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/(?P<prefix>.*))?")
_ABSENT = ("404", "NoSuchKey", "NotFound")

Answer = TypeVar("Answer")


class _Condition(TypedDict, total=False):
    """What a put waits for: that nothing has its name yet, or nothing at all."""

    IfNoneMatch: str


class Refusal(NamedTuple):
    """What a store answered instead of what was asked.

    Attributes:
        status: HTTP status, 0 when there was no answer at all.
        code: the store's word for it, or what went wrong on the way.
    """

    status: int
    code: str


class _Found(NamedTuple):
    """What a HEAD says about an object."""

    size_bytes: int
    metadata: dict[str, str]


class S3Pool:
    """An S3 bucket as an object pool, through boto3, with a few requests in flight at a time.

    A put is conditional. One that finds the object there succeeds once a HEAD agrees in size, namespace, hash,
    block_bytes and count. Checksums may differ: the same block computed twice differs in its last bits, and each object
    proves its own bytes.

    Attributes:
        name: the store, the same for every instance that uses it.
    """

    def __init__(
        self,
        url: str,
        block_bytes: int,
        checksums: ChecksumRows,
        *,
        endpoint_url: str = "",
        region: str = "",
        access_key_id: str = "",
        secret_access_key: str = "",
        name: str = "",
        requests_in_flight: int = 8,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = 5.0,
        deadline_s: float = 10.0,
        open_wait_s: float = 4.0,
        on_trouble: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Connect, and ask once for the bucket.

        Args:
            url: s3://bucket/prefix; the prefix may be absent.
            endpoint_url: of a store that is not Amazon's.
            access_key_id, secret_access_key: "" leaves both to boto3's chain: environment, profile, role.
            name: where instances reach one store by different addresses; "" derives it from url and endpoint.
            connect_timeout_s, read_timeout_s: of one request.
            deadline_s: of a whole `put` or `get`; what is not done then is trouble.
            open_wait_s: how long to wait for the bucket here.
            on_trouble: gets one sentence for each call with trouble.
        Raises: MissingExtraError: no boto3. ConfigError: a url that is none. LayoutError: `block_bytes` is below 1.
            PoolError: the bucket is missing, forbidden or does not answer in time.
        """
        try:
            import boto3  # noqa: F401  # here, so that the error says which extra is missing
        except ModuleNotFoundError as error:
            raise MissingExtraError("boto3", "s3") from error
        check_size("OBJECT", 1, block_bytes)
        self._bucket, self._prefix = bucket_of(url)
        self.tier = Tier.OBJECT
        self.block_bytes = block_bytes
        self.reach = Reach.CLUSTER
        self.blocks = 1
        self.name = name or store_name(self._bucket, self._prefix, endpoint_url)
        self._checksum_rows = checksums
        self._in_flight = requests_in_flight
        self._deadline_s = deadline_s
        self._on_trouble = on_trouble
        self._conditional = True  # until the store says it knows no conditional put
        self._closed = False
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(requests_in_flight, thread_name_prefix="kvbm-s3")

        def connect() -> S3Client:
            client = s3_client(
                endpoint_url,
                region,
                access_key_id,
                secret_access_key,
                connect_timeout_s,
                read_timeout_s,
                connections=requests_in_flight,
            )
            client.head_bucket(Bucket=self._bucket)
            return client

        self._client = self._first_answer(connect, endpoint_url, open_wait_s)

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        """Put each block that is not there yet; whether the store now holds it."""
        count = check_proof(self.name, rows, proof, self.block_bytes, at)
        places = range(count) if at is None else at
        headers = encode_headers(OBJECT_MAGIC, proof, self.block_bytes, self._checksum_rows)
        hashes = split_hashes(proof.hashes)

        def start(index: int) -> Future[str]:
            body = b"".join((headers[index], rows[places[index]]))  # a copy: a late request must not see the row reused
            metadata = self._metadata(proof.namespace, hashes[index], int(proof.checksums[index]))
            return self._workers.submit(self._put_one, self._key(proof.namespace, hashes[index]), body, metadata)

        held = [False] * count
        troubles = []
        for index, trouble in self._each(count, start):
            held[index] = not trouble
            if trouble:
                troubles.append(trouble)
        self._report("put", count, held.count(False), troubles)
        return held

    def get(
        self, namespace: NamespaceId, chain: bytes, rows: np.ndarray, at: Sequence[int] | None = None, first: int = 0
    ) -> ReadResult:
        """Fill rows with these blocks, each held to its header, its hash and its checksum before its row is touched."""
        wanted_blocks = check_chain(self.name, rows, chain, self.block_bytes, 1, at, first)
        hashes = chain[first * 16 : (first + wanted_blocks) * 16]
        count = check_rows(self.name, rows, hashes, self.block_bytes, at)
        places = range(count) if at is None else at
        wanted = split_hashes(hashes)

        def start(index: int) -> Future[bytes | Refusal]:
            return self._workers.submit(self._get_one, self._key(namespace, wanted[index]))

        outcomes = [ReadOutcome.FAILED] * count
        checksums = np.zeros(count, dtype=np.uint32)
        troubles = []
        for index, answer in self._each(count, start):
            if isinstance(answer, Refusal):
                if answer.code in _ABSENT:
                    outcomes[index] = ReadOutcome.MISSING
                else:
                    troubles.append(_words(answer))
                continue
            outcomes[index] = ReadOutcome.CORRUPT
            if len(answer) == HEADER_BYTES + self.block_bytes:
                header, row = np.split(np.frombuffer(answer, dtype=np.uint8)[np.newaxis], [HEADER_BYTES], axis=1)
                verdict = verify(
                    OBJECT_MAGIC,
                    np.ascontiguousarray(header),
                    np.ascontiguousarray(row),
                    namespace,
                    wanted[index],
                    self._checksum_rows,
                )
                if verdict.good[0]:
                    outcomes[index] = ReadOutcome.GOOD
                    checksums[index] = verdict.checksums[0]
                    rows[places[index]] = row[0]
        self._report("get", count, outcomes.count(ReadOutcome.FAILED), troubles)
        return ReadResult(outcomes, checksums)

    def close(self) -> None:
        """Drop what has not begun, wait for what has (bounded by its timeouts), give back connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _key(self, namespace: NamespaceId, block_hash: bytes) -> str:
        key = f"{namespace.hex()}/{block_hash.hex()}"
        return f"{self._prefix}/{key}" if self._prefix else key

    def _metadata(self, namespace: NamespaceId, block_hash: bytes, checksum: int) -> dict[str, str]:
        return {
            "kvbm-version": str(VERSION),
            "kvbm-blocks": "1",
            "kvbm-namespace": namespace.hex(),
            "kvbm-hash": block_hash.hex(),
            "kvbm-bytes": str(self.block_bytes),
            "kvbm-checksum": f"{checksum:08x}",
        }

    def _each(self, count: int, start: Callable[[int], Future[Answer]]) -> Iterator[tuple[int, Answer]]:
        """Answers by index as they come, until all are there or the deadline has passed; the rest is dropped."""
        deadline = time.monotonic() + self._deadline_s
        pending: dict[Future[Answer], int] = {}
        begun = 0
        while begun < count or pending:
            while begun < count and len(pending) < 2 * self._in_flight:
                with self._lock:
                    if self._closed:
                        break
                    pending[start(begun)] = begun
                begun += 1
            if not pending:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            done, _ = wait(pending, timeout=left_s, return_when=FIRST_COMPLETED)
            for future in done:
                index = pending.pop(future)
                if not future.cancelled():
                    yield index, future.result()
        for future in pending:
            future.cancel()

    def _put_one(self, key: str, body: bytes, metadata: dict[str, str]) -> str:
        """Put one object; "" once the store holds the block, else the trouble in words."""
        for _ in range(_PUT_ROUNDS):
            if not self._conditional:
                return self._put_looking_first(key, body, metadata)
            refusal = self._put_object(key, body, metadata, condition={"IfNoneMatch": "*"})
            if not isinstance(refusal, Refusal):
                return ""
            match refusal.status:
                case 412:  # it is there
                    found = self._head(key)
                    if not (isinstance(found, Refusal) and found.code in _ABSENT):
                        return self._difference(key, found, len(body), metadata)
                case 409:  # another put of the same name is under way
                    continue
                case 400 | 501:  # perhaps a store without conditional puts
                    trouble = self._put_looking_first(key, body, metadata)
                    self._conditional = bool(trouble)
                    return trouble
                case _:
                    return _words(refusal)
        return f"{key} kept changing under {_PUT_ROUNDS} conditional puts"

    def _put_looking_first(self, key: str, body: bytes, metadata: dict[str, str]) -> str:
        """The put of a store that knows no conditions. Two at once store the same block twice, which is harmless."""
        found = self._head(key)
        if not isinstance(found, Refusal):
            return self._difference(key, found, len(body), metadata)
        if found.code not in _ABSENT:
            return _words(found)
        refusal = self._put_object(key, body, metadata, condition={})
        return _words(refusal) if isinstance(refusal, Refusal) else ""

    def _put_object(self, key: str, body: bytes, metadata: dict[str, str], condition: _Condition) -> object:
        return self._try(
            lambda: self._client.put_object(Bucket=self._bucket, Key=key, Body=body, Metadata=metadata, **condition)
        )

    def _head(self, key: str) -> _Found | Refusal:
        answer = self._try(lambda: self._client.head_object(Bucket=self._bucket, Key=key))
        if isinstance(answer, Refusal):
            return answer
        return _Found(answer["ContentLength"], answer["Metadata"])

    def _difference(self, key: str, found: _Found | Refusal, size_bytes: int, metadata: dict[str, str]) -> str:
        """How the object that is there differs from the block; "" when it does not."""
        if isinstance(found, Refusal):
            return _words(found)
        if found.size_bytes != size_bytes:
            return f"object {key} is there with {found.size_bytes} bytes instead of {size_bytes}; delete it"
        for field, wanted in metadata.items():
            held = found.metadata.get(field, "")
            if held != wanted and (field != "kvbm-checksum" or not held):
                return f"object {key} is there with {field} {held!r} instead of {wanted!r}; delete it"
        return ""

    def _get_one(self, key: str) -> bytes | Refusal:
        """The body of one object. One of a wrong size is not read further than shows it."""
        size_bytes = HEADER_BYTES + self.block_bytes

        def ask() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            with closing(answer["Body"]) as body:
                return body.read() if answer["ContentLength"] == size_bytes else b""

        return self._try(ask)

    def _try(self, ask: Callable[[], Answer]) -> Answer | Refusal:
        """One request to the store; whatever it or the way to it refuses becomes a value."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return ask()
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return Refusal(status, error.response.get("Error", {}).get("Code", str(error)))
        except (BotoCoreError, OSError) as error:
            return Refusal(0, f"{type(error).__name__}: {error}")

    def _report(self, verb: str, count: int, failed_count: int, troubles: list[str]) -> None:
        """One sentence for a call with trouble."""
        if failed_count:
            first = troubles[0] if troubles else f"no answer within {self._deadline_s} s"
            self._on_trouble(
                f"OBJECT pool {self.name}: {verb} of {failed_count} of {count} blocks failed; first: {first}"
            )

    def _first_answer(self, connect: Callable[[], S3Client], endpoint: str, open_wait_s: float) -> S3Client:
        """The connected client. Looking up credentials and names has no limit of its own: the wait is bounded here."""
        opening = self._workers.submit(self._try, connect)
        done, _ = wait([opening], timeout=open_wait_s)
        answer: object = opening.result() if done else Refusal(0, f"no answer within {open_wait_s} s")
        if not isinstance(answer, Refusal):
            return answer  # type: ignore[return-value]
        self._workers.shutdown(wait=False, cancel_futures=True)
        where = endpoint or "the default endpoint"
        match answer.status:
            case 404:
                raise PoolError(f"OBJECT pool {self.name}: {where} has no bucket {self._bucket!r}; create it")
            case 401 | 403:
                raise PoolError(
                    f"OBJECT pool {self.name}: {where} refuses access to bucket {self._bucket!r} ({answer.code}); check"
                    " the credentials and their policy"
                )
            case 0:
                raise PoolError(
                    f"OBJECT pool {self.name}: bucket {self._bucket!r} at {where} does not answer ({answer.code});"
                    " check pools.object.endpoint, the network and the credentials"
                )
            case _:
                raise PoolError(
                    f"OBJECT pool {self.name}: {where} answers {_words(answer)} for bucket {self._bucket!r}; check the"
                    " region and the endpoint"
                )


def bucket_of(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix. Raises ConfigError: the URL is none."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"pools.object.url {url!r} is no s3://bucket/prefix; correct it")
    return match["bucket"], (match["prefix"] or "").strip("/")


def store_name(bucket: str, prefix: str, endpoint: str) -> str:
    """s3://bucket/prefix, and the endpoint's host unless it is Amazon's, where bucket names are unique."""
    name = f"s3://{bucket}/{prefix}".rstrip("/")
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if not host or host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return name
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{name}?endpoint={host}" if port in (80, 443) else f"{name}?endpoint={host}:{port}"


def s3_client(
    endpoint: str,
    region: str,
    access_key_id: str,
    secret_access_key: str,
    connect_timeout_s: float,
    read_timeout_s: float,
    connections: int,
) -> S3Client:
    """A client as the pool uses it: few attempts, short waits, no checksums that other stores refuse."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        max_pool_connections=connections,
        s3={"addressing_style": "path"} if endpoint else None,  # other stores seldom have a host name for each bucket
        request_checksum_calculation="when_required",  # blocks bring their own; other stores refuse Amazon's trailers
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=region or None,
        aws_access_key_id=access_key_id or None,
        aws_secret_access_key=secret_access_key or None,
        config=config,
    )


def _words(refusal: Refusal) -> str:
    return f"{refusal.status} {refusal.code}" if refusal.status else refusal.code
