"""Claims written thousands to a statement leave the tables that a statement for each block would leave, on both
databases.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from kvbm.catalog.sql import claims as sql_claims
from kvbm.catalog.sql import tables
from kvbm.catalog.sql.rows import ClaimRun, StoreBatch
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, split_hashes
from tests.extras import needed

select = needed("sqlalchemy", "catalog").select

SECOND_NS = 1_000_000_000
USED_S = 60.0
USED_NS = int(USED_S * SECOND_NS)
POOLS = ("s3", "s4", "wild\0", "wild\ufffd")  # the last two are one in SQL
SPACES = (NamespaceId(bytes(16)), NamespaceId(b"\xff" * 16), NamespaceId(b"n" * 16))
INSTANCES = (InstanceId("one"), InstanceId("two"), InstanceId("thr\0e"))
BLOCKS = [bytes([at]) * HASH_BYTES for at in range(9)] + [
    bytes(15) + b"\x01",
    b"\x01" + bytes(15),
    b"\xff" * 15 + b"\x00",
]
LARGEST = (1 << 63) - 1
Key = tuple[str, bytes, bytes]


class Claim(NamedTuple):
    """A row of the table, but for its key."""

    by: str
    first_ns: int
    last_ns: int


def claim_row_by_row(table: dict[Key, Claim], runs: Sequence[ClaimRun]) -> None:
    """What a table holds once each block of some runs was inserted, brought up to date or deleted, one after
    the other.
    """
    for run in runs:
        pool, by, at_ns = (
            run.pool.replace("\0", "\ufffd"),
            run.instance.replace("\0", "\ufffd"),
            min(run.at_ns, LARGEST),
        )
        for block in split_hashes(run.hashes):
            key = (pool, bytes(run.namespace), bytes(block))
            if run.withdrawn:
                table.pop(key, None)
                continue
            held = table.get(key, Claim(by, at_ns, at_ns))
            table[key] = held._replace(last_ns=max(held.last_ns, at_ns))


def drawn_runs(chance: random.Random, count: int, withdrawn: float) -> list[ClaimRun]:
    """Runs as any instances may say them: blocks twice in one, clocks that go back, numbers no clock has."""
    now_ns, runs = chance.randrange(10**6) * SECOND_NS, []
    for _ in range(count):
        now_ns = max(0, now_ns + chance.randrange(-90, 120) * SECOND_NS)
        at_ns = chance.choice((now_ns,) * 20 + (0, LARGEST, (1 << 64) - 1))
        runs.append(
            ClaimRun(
                pool=chance.choice(POOLS),
                namespace=chance.choice(SPACES),
                instance=chance.choice(INSTANCES),
                at_ns=at_ns,
                hashes=b"".join(chance.choices(BLOCKS, k=chance.randrange(8))),
                withdrawn=chance.random() < withdrawn,
            )
        )
    return runs


def cuts(chance: random.Random, runs: Sequence[ClaimRun]) -> Iterator[Sequence[ClaimRun]]:
    """The same runs in batches of any size."""
    at = 0
    while at < len(runs):
        size = chance.choice((1, 2, 5, 20, 60))
        yield runs[at : at + size]
        at += size


@asynccontextmanager
async def opened(url: str, used_s: float = 0.0) -> Any:
    store = await SqlStore.open(url, used_s=used_s)
    try:
        yield store
    finally:
        await store.close()


async def held(store: SqlStore) -> dict[Key, Claim]:
    """All that the table has."""
    rows = [tuple(row.values()) for row in await store._read(select(tables.object_claims))]
    return {(row[0], bytes(row[1]), bytes(row[2])): Claim(*row[3:]) for row in rows}


async def apply(store: SqlStore, runs: Sequence[ClaimRun], stream: str = "s") -> None:
    at = await store.position(stream)
    assert await store.apply(StoreBatch(stream=stream, previous=at, stream_sequence=at + 1, claims=tuple(runs)))


@pytest.fixture(params=[3, 4096])
def statement_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that need several statements, and batches that need one."""
    monkeypatch.setattr(sql_claims, "STATEMENT_BLOCKS", request.param)


@pytest.mark.usefixtures("statement_blocks")
@pytest.mark.parametrize("seed", range(4))
def test_batches_leave_what_a_statement_for_each_block_leaves(database_url: str, seed: int) -> None:
    async def run() -> None:
        chance, table = random.Random(seed), dict[Key, Claim]()
        async with opened(database_url) as store:
            for runs in cuts(chance, drawn_runs(chance, 250, withdrawn=0.3)):
                await apply(store, runs)
                claim_row_by_row(table, runs)
                assert await held(store) == table
        assert table

    asyncio.run(run())


@pytest.mark.usefixtures("statement_blocks")
@pytest.mark.parametrize("seed", range(4))
def test_a_last_use_is_never_told_late_and_at_most_so_much_early(database_url: str, seed: int) -> None:
    async def run() -> None:
        chance, table, early = random.Random(seed), dict[Key, Claim](), 0
        async with opened(database_url, USED_S) as store:
            for runs in cuts(chance, drawn_runs(chance, 250, withdrawn=0.1)):
                await apply(store, runs)
                claim_row_by_row(table, runs)
                found = await held(store)
                assert found.keys() == table.keys()
                for key, claim in table.items():
                    assert found[key][:2] == claim[:2]
                    assert claim.last_ns - USED_NS <= found[key].last_ns <= claim.last_ns
                    early += found[key].last_ns < claim.last_ns
        assert early

    asyncio.run(run())


def test_a_claim_is_written_again_once_it_is_newer_by_more_than_what_is_told_apart(database_url: str) -> None:
    def said(at_ns: int, blocks: Sequence[bytes] = BLOCKS) -> list[ClaimRun]:
        return [ClaimRun(pool="p", namespace=SPACES[0], hashes=b"".join(blocks), instance=INSTANCES[0], at_ns=at_ns)]

    async def last(store: SqlStore) -> set[int]:
        return {claim.last_ns for claim in (await held(store)).values()}

    async def run() -> None:
        async with opened(database_url, USED_S) as store:
            await apply(store, said(100))
            await apply(store, said(100 + USED_NS))
            assert await last(store) == {100}
            await apply(store, said(101 + USED_NS, BLOCKS[:1]))
            assert await last(store) == {100, 101 + USED_NS}
            await apply(store, said(102 + USED_NS))
            assert await last(store) == {101 + USED_NS, 102 + USED_NS}
            await apply(store, said(5))  # a clock that is behind
            assert await last(store) == {101 + USED_NS, 102 + USED_NS}

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_the_same_events_read_again_and_cut_otherwise_leave_the_same_table(database_url: str, seed: int) -> None:
    """As after a crash: what was stored is read again from an earlier place, whatever the batches were."""

    async def run() -> None:
        chance = random.Random(seed)
        runs = drawn_runs(chance, 200, withdrawn=0.0)
        table: dict[Key, Claim] = {}
        claim_row_by_row(table, runs)
        async with opened(database_url) as store:
            for part in cuts(chance, runs):
                await apply(store, part)
            assert await held(store) == table
            for part in cuts(chance, runs[chance.randrange(len(runs)) :]):
                await apply(store, part)
            assert await held(store) == table
            for part in cuts(chance, runs):
                await apply(store, part, "under another name")
            assert await held(store) == table

    asyncio.run(run())
