"""The object pool beside the bare client: the same bytes through the same number of requests, pair by pair.

The bare client is obstore, the fastest of those measured on radosgw with objects of 4 MiB, on an event loop of its own,
without checksums, compression, headers, deadlines and retries. Both sides begin and end in memory of the caller's: a
put sends rows, a get fills rows, for which the bare client copies each body as it arrives. Two kinds of bytes are put
and got: bfloat16 KV of the published shape (coding.py), which is what the pool is for and gives the numbers, and random
bytes, which do not become smaller.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbm.assembly import NATIVE, open_objects
from kvbm.bench.coding import published_kv
from kvbm.bench.measure import Found, Row, row_of
from kvbm.config import load_settings
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.object.pool import BlockObjects
from kvbm.pools.stores.link import LIMITS, link_to
from kvbm.pools.stores.s3 import bucket_of

if TYPE_CHECKING:
    from obstore.store import S3Store

_LAYERS = 32  # of the published shape: 2 MiB a block of 16 tokens
_BLOCK_BYTES = _LAYERS << 16
_BLOCKS_OF_OBJECT = 2  # what the pool chooses for such blocks
_OBJECT_BYTES = _BLOCK_BYTES * _BLOCKS_OF_OBJECT
_GOAL = "≥ 0.90"
_DEADLINE_S = 120
_EPOCH = Epoch(1)


class ObjectsOptions(NamedTuple):
    """Where and how much.

    Attributes:
        url: s3://bucket/prefix; what is put there goes again. endpoint, region: of the store; credentials come from
            boto3's chain.
        objects: of 4 MiB, put and got in one run.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    objects: int = 48


class _Rates(NamedTuple):
    """Bytes a second, pair by pair."""

    puts: list[float]
    bare_puts: list[float]
    gets: list[float]
    bare_gets: list[float]


def bench_objects(options: ObjectsOptions, pairs: int, seed: int, step: Callable[[], object] = lambda: None) -> Found:
    """Rows, and the numbers `object_put_over_client` and `object_get_over_client`: the medians of bfloat16 KV.

    Args:
        step: called after each of `steps_of(pairs)`.
    Raises: PoolError: the store is not there or refuses. ConfigError, MissingExtraError.
    """
    rows: list[Row] = []
    numbers: dict[str, float | None] = {}
    for what, blocks in (("bfloat16 KV", _published(options.objects, seed)), ("random", _noise(options.objects, seed))):
        with _pool(options) as pool:
            rates = _measure(pool, _bare_store(options), blocks, pairs, step)
            counted = pool.stats().namespaces
        [smaller] = [one.raw_bytes / one.stored_bytes for one in counted.values()]
        for verb, ours, bare in (("put", rates.puts, rates.bare_puts), ("get", rates.gets, rates.bare_gets)):
            rows.append(row_of(f"OBJECT {verb}s of {what} bytes, {smaller:.2f}× smaller", "MB/s", _megabytes(ours)))
            rows.append(row_of(f"the bare client's {verb}s of the same bytes", "MB/s", _megabytes(bare)))
            row = row_of(
                f"OBJECT {verb}s over the bare client, {what}", "", [a / b for a, b in zip(ours, bare, strict=True)]
            )
            rows.append(row)
            if f"object_{verb}_over_client" not in numbers:  # of the first kind
                row.goal = _GOAL
                numbers[f"object_{verb}_over_client"] = row.value
    note = (
        f"OBJECT: {options.url} at {options.endpoint or 'the default endpoint'}, runs of {options.objects} objects of"
        f" {_OBJECT_BYTES >> 20} MiB, {LIMITS.requests_in_flight} requests in flight, compression and checksums on; "
        "MB/s of the blocks' own bytes;"
        " the bare client copies what it gets into rows, as the pool does"
    )
    return Found(rows, numbers, (note,))


def steps_of(pairs: int) -> int:
    """How often `bench_objects` calls its step."""
    return 2 * 4 * (pairs + 1)


@contextmanager
def _pool(options: ObjectsOptions) -> Iterator[BlockObjects]:
    """The pool as a manager opens it, in a corner of its own that is empty again afterwards."""
    url = f"{options.url.rstrip('/')}/kvbm-bench-{secrets.token_hex(8)}"
    settings = load_settings(
        flags={
            "pools.object.url": url,
            "pools.object.endpoint": options.endpoint,
            "pools.object.region": options.region,
            "pools.object.timeout_s": str(_DEADLINE_S),
            "pools.object.look_s": "3600",
            "gc.grace_s": "86400",
            "pools.object.blocks": str(_BLOCKS_OF_OBJECT),
        }
    )
    pool = open_objects(settings, [_namespace()], _BLOCK_BYTES, waits=False)
    try:
        yield pool
    finally:
        try:
            pool.store.delete([one.name for one in pool.store.listed("", _DEADLINE_S)], _DEADLINE_S)
        finally:
            pool.close()


def _namespace() -> Namespace:
    return Namespace(model="bench", revision="r1", block_tokens=16, kv_dtype="bfloat16")


def _bare_store(options: ObjectsOptions) -> S3Store:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    bucket, prefix = bucket_of(options.url)
    return S3Store(
        bucket,
        prefix=f"{prefix}/kvbm-bench-bare-{secrets.token_hex(8)}".lstrip("/"),
        region=options.region or "us-east-1",
        unsigned_payload=True,
        credential_provider=Boto3CredentialProvider(),
        client_options=link_to(options.endpoint or "https://s3.amazonaws.com").client_options(),
        config={"endpoint": options.endpoint} if options.endpoint else None,
    )


def _measure(pool: BlockObjects, bare: S3Store, blocks: np.ndarray, pairs: int, step: Callable[[], object]) -> _Rates:
    """Pairs in turn, each begun by the other side than the one before; the first pair warms up and does not count."""
    import obstore

    count = len(blocks) // _BLOCKS_OF_OBJECT
    bodies = [row.data for row in blocks.reshape(count, -1)]
    names = [f"{at:04}" for at in range(count)]
    rows, bare_rows = np.empty_like(blocks), np.empty((count, _OBJECT_BYTES), dtype=np.uint8)
    hashes = secrets.token_bytes(len(blocks) * HASH_BYTES)
    proof = Proof(_namespace().id, _EPOCH, hashes, NATIVE.checksums(blocks))

    async def bare_put(at: int) -> None:
        await obstore.put_async(bare, names[at], bodies[at], mode="create", use_multipart=False)

    async def bare_get(at: int) -> None:
        answer = await obstore.get_async(bare, names[at])
        body = np.frombuffer(memoryview(await answer.bytes_async()), dtype=np.uint8)
        if len(body) != _OBJECT_BYTES:
            raise PoolError("the bare client got an object that is not whole; the store fails")
        bare_rows[at] = body

    def put() -> None:
        if not all(pool.put(blocks, proof)):
            raise PoolError(f"OBJECT pool {pool.name}: a put failed while it was measured; look at the store")

    def get() -> None:
        outcomes = pool.get(proof.namespace, hashes, rows).outcomes
        if set(outcomes) != {ReadOutcome.GOOD}:
            raise PoolError(f"OBJECT pool {pool.name}: a get failed while it was measured; look at the store")

    rates = _Rates([], [], [], [])
    ours: list[tuple[list[float], Callable[[], object]]] = [(rates.puts, put), (rates.gets, get)]
    theirs: list[tuple[list[float], Callable[[], object]]] = [
        (rates.bare_puts, lambda: asyncio.run(_side_by_side(bare_put, count))),
        (rates.bare_gets, lambda: asyncio.run(_side_by_side(bare_get, count))),
    ]
    for pair in range(pairs + 1):
        for one, other in zip(ours, theirs, strict=True):
            for kept, work in (one, other) if pair % 2 else (other, one):
                begin = time.perf_counter()
                work()
                took = time.perf_counter() - begin
                if pair:
                    kept.append(blocks.nbytes / took)
                step()
        if not (np.array_equal(rows, blocks) and np.array_equal(bare_rows.reshape(blocks.shape), blocks)):
            raise PoolError(f"OBJECT pool {pool.name}: other bytes came back than were put")
        pool.store.delete([one.name for one in pool.store.listed("", _DEADLINE_S)], _DEADLINE_S)
        obstore.delete(bare, names)
    return rates


async def _side_by_side(work: Callable[[int], Awaitable[None]], count: int) -> None:
    """As many at a time as the pool has requests in flight."""
    free = asyncio.Semaphore(LIMITS.requests_in_flight)

    async def one(at: int) -> None:
        async with free:
            await work(at)

    await asyncio.gather(*(one(at) for at in range(count)))


def _published(objects: int, seed: int) -> np.ndarray:
    return published_kv(_LAYERS, objects * _BLOCKS_OF_OBJECT, seed).rows


def _noise(objects: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(objects * _OBJECT_BYTES), dtype=np.uint8).reshape(
        -1, _BLOCK_BYTES
    )


def _megabytes(rates: list[float]) -> list[float]:
    return [rate / 1e6 for rate in rates]
