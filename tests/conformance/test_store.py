"""The catalog's store, on every database it supports."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest

from kvbm.catalog.sql import database, tables
from kvbm.catalog.sql import store as sql_store
from kvbm.catalog.sql.database import database_errors, migrations_folder, parse_url, shown
from kvbm.catalog.sql.rows import (
    AbsenceRow,
    ClaimRun,
    EpochRow,
    ForgottenRow,
    InstancePosition,
    InstanceRow,
    InstanceStatus,
    NamespaceRow,
    StoreBatch,
)
from kvbm.catalog.sql.store import BatchOutcome, BatchResult, SqlStore
from kvbm.core.errors import CatalogError, KvbmError, LayoutError, MissingExtraError
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier, split_hashes
from kvbm.core.parts import ALL_PARTS, part_of
from kvbm.streams.base import Mark
from tests.eventually import WAIT_S
from tests.extras import needed
from tests.servers import free_port, fresh_database

if TYPE_CHECKING:
    from alembic import command
    from alembic.autogenerate import compare_metadata
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection, func, inspect, select, text
    from sqlalchemy.exc import OperationalError
    from sqlalchemy.ext.asyncio import create_async_engine
else:
    command = needed("alembic.command", "catalog")
    compare_metadata = needed("alembic.autogenerate", "catalog").compare_metadata
    Config = needed("alembic.config", "catalog").Config
    MigrationContext = needed("alembic.runtime.migration", "catalog").MigrationContext
    Connection = needed("sqlalchemy", "catalog").Connection
    func = needed("sqlalchemy", "catalog").func
    inspect = needed("sqlalchemy", "catalog").inspect
    select = needed("sqlalchemy", "catalog").select
    text = needed("sqlalchemy", "catalog").text
    OperationalError = needed("sqlalchemy.exc", "catalog").OperationalError
    create_async_engine = needed("sqlalchemy.ext.asyncio", "catalog").create_async_engine

T = TypeVar("T")

open_store = partial(SqlStore.open, connect_timeout_s=WAIT_S)  # a busy machine is no database that does not answer
STREAM = "KVBM"
POOL = "s3-main"
FIRST, SECOND = InstanceId("engine-1"), InstanceId("engine-2")
CHAT = Namespace(model="chat-8b", block_tokens=16, tenant="acme", scheme_seed=(1 << 64) - 1)


BOUNDS = ("lock_timeout", "idle_in_transaction_session_timeout")


def hashes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count * HASH_BYTES)


def claim(run: bytes, by: InstanceId = FIRST, at_ns: int = 10, **fields: Any) -> ClaimRun:
    values: dict[str, Any] = {"pool": POOL, "namespace": CHAT.id, "hashes": run, "instance": by, "at_ns": at_ns}
    return ClaimRun(**(values | fields))


def batch(previous: int, stream_sequence: int, **fields: Any) -> StoreBatch:
    return StoreBatch(stream=STREAM, previous=previous, stream_sequence=stream_sequence, **fields)


def full_batch() -> StoreBatch:
    """One with a row of every kind."""
    pools = (PoolStated(Tier.HBM, 1000, 4096), PoolStated(Tier.OBJECT, 0, 4096, Reach.CLUSTER, POOL))
    return batch(
        0,
        7,
        instances=(
            InstanceRow(
                id=FIRST,
                cluster="west",
                epoch=Epoch(3),
                first_seen_ns=5,
                last_frame_ns=9,
                engine="vllm",
                version="1.0",
                topology=("zone-a", "rack-3", "host-17"),
                pools=pools,
                state=InstanceStatus.STOPPED,
            ),
        ),
        epochs=(
            EpochRow(
                instance=FIRST,
                epoch=Epoch(3),
                started_ns=5,
                ended_ns=9,
                end_reason="shutdown",
                next_offset=Offset(40),
                digest=(1 << 64) - 1,
            ),
        ),
        namespaces=(NamespaceRow(id=CHAT.id, fields=CHAT, first_seen_ns=5),),
        claims=(claim(hashes(3)),),
        positions=(InstancePosition(instance=FIRST, epoch=Epoch(3), next_offset=Offset(40)),),
    )


@dataclasses.dataclass
class Contents:
    """All a store holds."""

    position: int
    instances: list[InstanceRow]
    epochs: list[EpochRow]
    namespaces: list[NamespaceRow]
    positions: dict[InstanceId, InstancePosition]
    claims: list[tuple[Any, ...]]  # whole rows


async def contents(store: SqlStore) -> Contents:
    claims = await store._read(select(tables.object_claims).order_by(*tables.object_claims.primary_key))
    return Contents(
        await store.position(STREAM),
        await store.instances(),
        await store.epochs(FIRST),
        await store.namespaces(),
        await store.instance_positions(),
        [tuple(row.values()) for row in claims],
    )


async def claimed(store: SqlStore, pool: str | None = None, chunk_rows: int = 1 << 16) -> set[tuple[str, bytes, bytes]]:
    found = set()
    async for chunk in store.claims(pool, chunk_rows):
        for block in split_hashes(chunk.hashes):
            assert (chunk.pool, chunk.namespace, block) not in found
            found.add((chunk.pool, bytes(chunk.namespace), bytes(block)))
    return found


def with_store(url: str, work: Callable[[SqlStore], Awaitable[T]]) -> T:
    async def run() -> T:
        store = await open_store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def refusal(url: str, connect_timeout_s: float = WAIT_S) -> str:
    with pytest.raises(CatalogError) as caught:
        asyncio.run(SqlStore.open(url, connect_timeout_s))
    message = str(caught.value)
    assert "\n" not in message
    return message


def on_connection(url: str, work: Callable[[Connection], T]) -> T:
    async def run() -> T:
        engine = create_async_engine(parse_url(url))
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        finally:
            await engine.dispose()

    return asyncio.run(run())


def test_a_replica_that_has_not_seen_a_stream_replaced_writes_nothing_under_its_old_name(database_url: str) -> None:
    """It would write rows of the life before over those of the newer one."""

    def of(stream: str, previous: int, end: int, epoch: int, run: str) -> StoreBatch:
        row = InstancePosition(instance=FIRST, epoch=Epoch(epoch), next_offset=Offset(end), run=run)
        return StoreBatch(stream=stream, previous=previous, stream_sequence=end, positions=(row,))

    async def work(store: SqlStore) -> None:
        assert await store.apply(of("KVBM/c@1", 0, 20, 5, "old"))
        assert await store.apply(of("KVBM/other@1", 0, 7, 5, "other's"))
        assert await store.apply(of("KVBM/c@2", 0, 3, 1, "new"))
        assert await store.streams_over() == {"KVBM/c@1"}
        for previous, end in ((20, 21), (0, 30), (3, 9)):
            late = await store.apply(of("KVBM/c@1", previous, end, 5, "old"))
            assert late.outcome is BatchOutcome.OVER and late.position == 20
        assert (await store.instance_positions())[FIRST] == InstancePosition(
            instance=FIRST, epoch=Epoch(1), next_offset=Offset(3), run="new"
        )
        assert await store.apply(of("KVBM/other@1", 7, 8, 5, "other's"))  # of another cluster
        assert await store.apply(of("KVBM/c@1#2", 0, 2, 5, "old"))  # its server is there again, with what it had
        assert await store.streams_over() == {"KVBM/c@1", "KVBM/c@2"}

    with_store(database_url, work)


# -- the schema -------------------------------------------------------------------------------------------------------


async def nothing(store: SqlStore) -> None:
    return None


def test_an_empty_database_gets_every_table(database_url: str) -> None:
    with_store(database_url, nothing)
    made = on_connection(database_url, lambda connection: set(inspect(connection).get_table_names()))
    assert made == {*tables.metadata.tables, tables.VERSION_TABLE}


def test_the_migrated_schema_is_the_models(database_url: str) -> None:
    with_store(database_url, nothing)
    options = {"version_table": tables.VERSION_TABLE, "compare_type": True}

    def difference(connection: Connection) -> object:
        return compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata)

    assert difference_is_seen_when_a_column_is_missing(database_url, options)
    assert on_connection(database_url, difference) == []


def difference_is_seen_when_a_column_is_missing(url: str, options: dict[str, Any]) -> bool:
    def compare(connection: Connection) -> bool:
        connection.execute(text("ALTER TABLE tenants DROP COLUMN quota_bytes"))
        found = compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata)
        connection.execute(text("ALTER TABLE tenants ADD COLUMN quota_bytes BIGINT"))
        return bool(found)

    return on_connection(url, compare)


def test_a_position_is_kept_with_its_fingerprint_or_with_none(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.apply(batch(0, 7))
        assert await store.positions() == {STREAM: Mark(7, None)}
        assert await store.apply(batch(7, 9, fingerprint=(1 << 64) - 1))
        assert await store.positions() == {STREAM: Mark(9, (1 << 64) - 1)}
        assert not await store.apply(batch(7, 8, fingerprint=1))
        assert await store.apply(batch(9, 10))
        assert await store.positions() == {STREAM: Mark(10, None)}
        assert await store.apply(StoreBatch(stream="other", previous=0, stream_sequence=3, fingerprint=5))
        assert (await store.positions())["other"] == Mark(3, 5)

    with_store(database_url, work)


def test_opening_again_keeps_what_is_there(database_url: str) -> None:
    with_store(database_url, lambda store: store.apply(full_batch()))
    assert with_store(database_url, lambda store: store.position(STREAM)) == 7


def test_catalogs_that_start_at_once_do_not_collide(database_url: str) -> None:
    async def run() -> None:
        stores = await asyncio.gather(*(open_store(database_url) for _ in range(6)))
        for store in stores:
            assert await store.position(STREAM) == 0
            await store.close()

    asyncio.run(run())


def test_databases_that_open_at_once_in_one_process_keep_apart(postgres_server: str, tmp_path: Path) -> None:
    async def run() -> None:
        urls = [await fresh_database(postgres_server) for _ in range(4)]
        urls += [f"sqlite:///{tmp_path / str(number)}.db" for number in range(4)]
        stores = await asyncio.gather(*(open_store(url) for url in urls))
        for store in stores:
            assert await store.apply(batch(0, 1))
            await store.close()

    asyncio.run(run())


def test_a_newer_schema_is_refused_and_left_alone(database_url: str) -> None:
    with_store(database_url, nothing)

    def move_on(connection: Connection) -> None:
        connection.execute(text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '9999'"))

    on_connection(database_url, move_on)
    message = refusal(database_url)
    assert "schema 9999" in message and "upgrade kvbm" in message
    version = text(f"SELECT version_num FROM {tables.VERSION_TABLE}")
    assert on_connection(database_url, lambda connection: connection.execute(version).scalar_one()) == "9999"


def test_a_migration_that_fails_leaves_nothing(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    last = max(path.name for path in (folder / "versions").glob("*.py"))[:4]
    broken = folder / "versions" / "9999_broken.py"
    broken.write_text(
        f"from alembic import op\nrevision, down_revision = '9999', '{last}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE half (a INTEGER)')\n    op.execute('nonsense')\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr(database, "migrations_folder", lambda: folder)
        assert "cannot be migrated" in refusal(database_url)
    assert on_connection(database_url, lambda connection: inspect(connection).get_table_names()) == []
    assert with_store(database_url, lambda store: store.position(STREAM)) == 0


def test_migrations_are_numbered_and_only_go_forward(database_url: str) -> None:
    names = sorted(path.name for path in (migrations_folder() / "versions").glob("*.py"))
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    with_store(database_url, nothing)

    def downgrade(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(migrations_folder()))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.downgrade(config, "base")

    with pytest.raises(CatalogError, match="only go forward"):
        on_connection(database_url, downgrade)


# -- one batch, one transaction ---------------------------------------------------------------------------------------


def test_what_is_applied_is_read_back(database_url: str) -> None:
    async def work(store: SqlStore) -> Contents:
        assert await store.apply(full_batch()) == BatchResult(BatchOutcome.APPLIED, 7)
        assert await claimed(store) == {(POOL, CHAT.id, block) for block in split_hashes(hashes(3))}
        return await contents(store)

    sent, held = full_batch(), with_store(database_url, work)
    assert held.position == 7
    assert held.instances == list(sent.instances)
    assert held.epochs == list(sent.epochs)
    assert held.namespaces == list(sent.namespaces)
    assert held.namespaces[0].fields.id == CHAT.id
    assert held.positions == {FIRST: sent.positions[0]}


def test_applying_twice_is_applying_once(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.apply(full_batch())
        once = await contents(store)
        again = await store.apply(full_batch())
        assert not again
        assert again == BatchResult(BatchOutcome.REPEATED, 7)
        assert await contents(store) == once

    with_store(database_url, work)


def test_a_batch_whose_storing_is_cancelled_ends_whole_and_leaves_no_lock(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        for attempt in range(60):
            at = await store.position(STREAM)
            run = hashes(50, seed=attempt)
            storing = asyncio.create_task(store.apply(batch(at, at + 1, claims=(claim(run),))))
            await asyncio.sleep(attempt * 1e-4)
            storing.cancel()
            await asyncio.wait([storing])
            stored = await store.position(STREAM)
            assert len(await claimed(store)) == 50 * stored
            if stored == at:  # it had not begun
                await store.apply(batch(at, at + 1, claims=(claim(run),)))  # fails where a lock has stayed

    with_store(database_url, work)


def test_a_position_never_moves_back(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.apply(batch(0, 10))
        assert await store.apply(batch(10, 20))
        before = await contents(store)
        for previous, end, outcome in (
            (0, 10, BatchOutcome.REPEATED),
            (10, 20, BatchOutcome.REPEATED),
            (0, 19, BatchOutcome.REPEATED),
            (0, 30, BatchOutcome.OVERTAKEN),
            (19, 30, BatchOutcome.OVERTAKEN),
            (21, 30, BatchOutcome.MISSING),
        ):
            assert await store.apply(batch(previous, end, claims=(claim(hashes(1)),))) == BatchResult(outcome, 20)
        assert await contents(store) == before
        assert await store.apply(batch(20, 21)) == BatchResult(BatchOutcome.APPLIED, 21)

    with_store(database_url, work)


def test_a_replaced_database_is_told_from_a_new_one(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.apply(batch(500, 501)) == BatchResult(BatchOutcome.MISSING, 0)
        assert await store.position(STREAM) == 0

    with_store(database_url, work)


def test_streams_have_positions_of_their_own(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.apply(batch(0, 10))
        assert await store.apply(StoreBatch(stream="other", previous=0, stream_sequence=3))
        assert (await store.position(STREAM), await store.position("other"), await store.position("none")) == (10, 3, 0)

    with_store(database_url, work)


def test_a_batch_that_stands_still_is_a_bug_of_the_caller(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        with pytest.raises(LayoutError, match="forward"):
            await store.apply(batch(5, 5))
        with pytest.raises(LayoutError, match="multiple of 16"):
            await store.apply(batch(0, 1, claims=(claim(b"short"),)))

    with_store(database_url, work)


def test_a_batch_that_fails_midway_leaves_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise OperationalError("INSERT", None, ConnectionError("gone"))

    async def work(store: SqlStore) -> None:
        before, good = await contents(store), full_batch()
        with monkeypatch.context() as patched:
            patched.setattr(sql_store, "write_claims", away)  # after all other rows are written
            with pytest.raises(CatalogError, match="does not take the batch up to 7"):
                await store.apply(good)
        assert await contents(store) == before and store.refused_rows == 0
        assert await store.apply(good)

    with_store(database_url, work)


def test_wild_words_and_numbers_of_one_instance_stop_no_batch(database_url: str) -> None:
    wild = InstanceId("a\0b")
    largest = (1 << 64) - 1

    async def work(store: SqlStore) -> None:
        row = InstanceRow(
            id=wild,
            cluster="\0",
            epoch=Epoch(largest),
            first_seen_ns=largest,
            last_frame_ns=largest,
            topology=("\0",),
            pools=(PoolStated(Tier.HBM, largest, largest, Reach.POD, "\0"),),
        )
        epoch = EpochRow(instance=wild, epoch=Epoch(largest), started_ns=largest, next_offset=Offset(largest))
        position = InstancePosition(instance=wild, epoch=Epoch(largest), next_offset=Offset(largest))
        claims = (claim(hashes(1), by=wild, at_ns=largest, pool="\0"),)
        assert await store.apply(batch(0, 1, instances=(row,), epochs=(epoch,), positions=(position,), claims=claims))
        assert [row.id for row in await store.instances()] == ["a\ufffdb"]

    with_store(database_url, work)


# -- instances and epochs ---------------------------------------------------------------------------------------------


def test_an_older_epoch_changes_no_newer_row(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        await store.apply(full_batch())
        stale = InstanceRow(id=FIRST, cluster="east", epoch=Epoch(2), first_seen_ns=1, last_frame_ns=99)
        moved = InstancePosition(instance=FIRST, epoch=Epoch(2), next_offset=Offset(1000))
        shorter = EpochRow(instance=FIRST, epoch=Epoch(3), started_ns=5, next_offset=Offset(39))
        await store.apply(batch(7, 8, instances=(stale,), positions=(moved,), epochs=(shorter,)))
        sent = full_batch()
        assert await store.instances() == list(sent.instances)
        assert (await store.instance_positions())[FIRST] == sent.positions[0]
        assert await store.epochs(FIRST) == list(sent.epochs)

    with_store(database_url, work)


def test_rows_that_do_not_say_whose_they_are_set_none_back(database_url: str) -> None:
    """Frames that were read before their fence; only another run's rows may be older and count."""

    def of(previous: int, end: int, epoch: int, run: str) -> StoreBatch:
        return batch(
            previous,
            end,
            instances=(
                InstanceRow(
                    id=FIRST, cluster="west", epoch=Epoch(epoch), first_seen_ns=5, last_frame_ns=9, engine=run, run=run
                ),
            ),
            epochs=(EpochRow(instance=FIRST, epoch=Epoch(2), started_ns=5, next_offset=Offset(end), run=run),),
            positions=(InstancePosition(instance=FIRST, epoch=Epoch(epoch), next_offset=Offset(end), run=run),),
        )

    async def work(store: SqlStore) -> None:
        assert await store.apply(of(0, 20, 2, "its own"))
        newer = await contents(store)
        older = of(20, 21, 1, "")
        epochs = (EpochRow(instance=FIRST, epoch=Epoch(2), started_ns=5, next_offset=Offset(3)),)
        assert await store.apply(msgspec.structs.replace(older, epochs=epochs))
        after = await contents(store)
        assert (after.instances, after.epochs, after.positions) == (newer.instances, newer.epochs, newer.positions)
        assert await store.apply(of(21, 22, 1, "another's"))
        assert (await contents(store)).positions[FIRST].run == "another's"

    with_store(database_url, work)


def test_a_newer_epoch_begins_at_offset_zero(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        await store.apply(full_batch())
        row = InstanceRow(id=FIRST, cluster="west", epoch=Epoch(4), first_seen_ns=50, last_frame_ns=50)
        moved = InstancePosition(instance=FIRST, epoch=Epoch(4), next_offset=Offset(1))
        begun = EpochRow(instance=FIRST, epoch=Epoch(4), started_ns=50, next_offset=Offset(1))
        await store.apply(batch(7, 8, instances=(row,), positions=(moved,), epochs=(begun,)))
        assert [(held.epoch, held.first_seen_ns) for held in await store.instances()] == [(4, 5)]
        assert (await store.instance_positions())[FIRST] == moved
        assert [held.epoch for held in await store.epochs(FIRST)] == [3, 4]

    with_store(database_url, work)


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_is_a_set_add_by_any_instance(database_url: str) -> None:
    first, later = hashes(4), hashes(4) + hashes(2, seed=1)

    async def work(store: SqlStore) -> None:
        await store.apply(batch(0, 1, claims=(claim(first, FIRST, 10), claim(first, SECOND, 8))))
        await store.apply(batch(1, 2, claims=(claim(later, SECOND, 30),)))
        await store.apply(batch(2, 3, claims=(claim(first, FIRST, 20),)))  # an older word moves no time back
        assert await store.claim_count() == 6
        rows = {row[2]: row[3:] for row in (await contents(store)).claims}
        for block in split_hashes(first):
            assert rows[block] == (FIRST, 10, 30)
        for block in split_hashes(hashes(2, seed=1)):
            assert rows[block] == (SECOND, 30, 30)

    with_store(database_url, work)


def test_no_end_of_an_epoch_withdraws_a_claim(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        await store.apply(full_batch())
        before = await claimed(store)
        ended = EpochRow(
            instance=FIRST, epoch=Epoch(3), started_ns=5, ended_ns=99, end_reason="fenced", next_offset=Offset(41)
        )
        begun = EpochRow(instance=FIRST, epoch=Epoch(4), started_ns=100)
        row = InstanceRow(id=FIRST, cluster="west", epoch=Epoch(4), first_seen_ns=100, last_frame_ns=100)
        await store.apply(batch(7, 8, epochs=(ended, begun), instances=(row,)))
        assert await claimed(store) == before
        assert len(before) == 3

    with_store(database_url, work)


def test_claims_and_withdrawals_of_one_batch_count_in_stream_order(database_url: str) -> None:
    kept, gone, back = (hashes(1, seed=seed) for seed in (1, 2, 3))

    async def work(store: SqlStore) -> None:
        await store.apply(batch(0, 1, claims=(claim(kept + gone + back, FIRST, 10),)))
        await store.apply(
            batch(
                1,
                2,
                claims=(
                    claim(gone, SECOND, 20),
                    claim(gone + back, SECOND, 30, withdrawn=True),
                    claim(back, SECOND, 40),
                    claim(hashes(1, seed=4), SECOND, 50, withdrawn=True),  # never claimed: harmless
                ),
            )
        )
        rows = {row[2]: row[3:] for row in (await contents(store)).claims}
        assert rows == {kept: (FIRST, 10, 10), back: (SECOND, 40, 40)}

    with_store(database_url, work)


def test_a_pools_claims_come_with_their_times_page_by_page_and_single_ones_when_asked(database_url: str) -> None:
    run, other = hashes(2500, seed=5), hashes(3, seed=6)

    async def work(store: SqlStore) -> None:
        await store.apply(batch(0, 1, claims=(claim(run, FIRST, 10), claim(other, SECOND, 20))))
        await store.apply(batch(1, 2, claims=(claim(run[:32], SECOND, 30),)))
        pool = claim(run, FIRST, 10).pool
        for chunk_rows in (7, 5000):
            found: dict[bytes, int] = {}
            async for chunk in store.claim_times(pool, chunk_rows):
                blocks = split_hashes(chunk.hashes)
                assert blocks == sorted(blocks) and len(blocks) == len(chunk.last_ns) <= chunk_rows
                found |= dict(zip(blocks, chunk.last_ns, strict=True))
            assert found == {
                **dict.fromkeys(split_hashes(run), 10),
                **dict.fromkeys(split_hashes(run[:32]), 30),
                **dict.fromkeys(split_hashes(other), 20),
            }
        assert [chunk async for chunk in store.claim_times("another pool")] == []
        namespace = claim(run, FIRST, 10).namespace
        asked = await store.last_claimed(pool, namespace, run + hashes(2, seed=9))
        assert (len(asked), asked[run[:16]], asked[run[-16:]]) == (2500, 30, 10)
        assert await store.last_claimed(pool, namespace, b"") == {}
        assert await store.last_claimed("another pool", namespace, run) == {}
        assert await store.streams() == [batch(0, 1).stream]
        assert await store.tenant_quotas() == {}

    with_store(database_url, work)


def test_random_claims_leave_what_a_set_would_hold(database_url: str) -> None:
    chance = random.Random(20)
    blocks = split_hashes(hashes(12))
    namespaces = (CHAT.id, Namespace(model="other", block_tokens=16).id)

    async def work(store: SqlStore) -> None:
        model: set[tuple[str, bytes, bytes]] = set()
        for sequence in range(25):
            runs = []
            for _ in range(chance.randrange(6)):
                chosen = chance.sample(blocks, chance.randrange(1, 5))
                pool, namespace = chance.choice(("a", "b")), chance.choice(namespaces)
                runs.append(claim(b"".join(chosen), pool=pool, namespace=namespace, withdrawn=chance.random() < 0.5))
                keys = {(pool, bytes(namespace), bytes(block)) for block in chosen}
                model = model - keys if runs[-1].withdrawn else model | keys
            assert await store.apply(batch(sequence, sequence + 1, claims=tuple(runs)))
            assert await claimed(store, chunk_rows=chance.randrange(1, 9)) == model
            assert await claimed(store, "a") == {key for key in model if key[0] == "a"}
        assert await store.claim_count() == len(model) > 0
        assert await store.claim_count("b") == sum(key[0] == "b" for key in model)

    with_store(database_url, work)


def test_one_batch_takes_twenty_thousand_claims(database_url: str) -> None:
    run = hashes(20_000)

    async def work(store: SqlStore) -> None:
        assert await store.apply(batch(0, 1, claims=(claim(run),)))
        assert await store.claim_count() == 20_000
        assert await claimed(store, chunk_rows=7000) == {(POOL, CHAT.id, block) for block in split_hashes(run)}
        assert await store.apply(batch(1, 2, claims=(claim(run, withdrawn=True),)))
        assert await store.claim_count() == 0

    with_store(database_url, work)


# -- several writers --------------------------------------------------------------------------------------------------


def test_of_two_stores_with_the_same_batch_one_wins(database_url: str) -> None:
    async def run() -> None:
        stores = [await open_store(database_url) for _ in range(2)]
        for sequence in range(20):  # the first snapshot inserts the position's row, the others update it
            once = batch(sequence, sequence + 1, claims=(claim(hashes(50, seed=sequence), at_ns=sequence),))
            results = await asyncio.gather(*(store.apply(once) for store in stores))
            assert sorted(result.outcome.value for result in results) == ["applied", "repeated"]
            assert {result.position for result in results} == {sequence + 1}
        assert await stores[0].claim_count() == 1000
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_a_writer_that_was_overtaken_catches_up_from_the_stored_position(database_url: str) -> None:
    end = 40

    async def project(store: SqlStore, seed: int) -> int:
        chance, at, written = random.Random(seed), 0, 0
        while at < end:
            until = min(end, at + chance.randrange(1, 5))
            claims = tuple(claim(hashes(1, seed=sequence)) for sequence in range(at, until))
            result = await store.apply(batch(at, until, claims=claims))
            written += (until - at) * bool(result)
            at = result.position
        return written

    async def run() -> None:
        stores = [await open_store(database_url) for _ in range(3)]
        written = await asyncio.gather(*(project(store, seed) for seed, store in enumerate(stores)))
        assert sum(written) == end
        assert await stores[0].claim_count() == end
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_streams_that_write_the_same_rows_do_not_deadlock(database_url: str) -> None:
    run_of_blocks = split_hashes(hashes(300))

    async def project(store: SqlStore, stream: str) -> None:
        chance = random.Random(stream)
        for sequence in range(10):
            shuffled = b"".join(chance.sample(run_of_blocks, len(run_of_blocks)))
            once = StoreBatch(stream=stream, previous=sequence, stream_sequence=sequence + 1, claims=(claim(shuffled),))
            assert await store.apply(once)

    async def run() -> None:
        stores = [await open_store(database_url) for _ in range(3)]
        await asyncio.gather(*(project(store, f"stream-{at}") for at, store in enumerate(stores)))
        assert await stores[0].claim_count() == 300
        for store in stores:
            await store.close()

    asyncio.run(run())


# -- databases that do not answer -------------------------------------------------------------------------------------


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def test_a_closed_port_is_one_sentence_at_once() -> None:
    message = refusal(f"postgresql://kvbm:hunter2@127.0.0.1:{free_port()}/catalog")
    assert "does not answer within" not in message
    assert "hunter2" not in message and "127.0.0.1" in message


def test_a_port_that_never_answers_is_given_up_in_time() -> None:
    with deaf_port() as port:
        message = refusal(f"postgresql://kvbm:hunter2@127.0.0.1:{port}/catalog", 0.5)
    assert message.startswith(f"postgresql://kvbm:***@127.0.0.1:{port}/catalog does not answer within 0.5 s")


def test_a_server_that_is_no_postgres_is_one_sentence() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CatalogError):
            await open_store(f"postgresql://127.0.0.1:{port}/catalog")
        server.close()

    asyncio.run(run())


def test_a_database_that_does_not_exist_is_named(postgres_url: str) -> None:
    assert '"absent" does not exist' in refusal(postgres_url.rpartition("/")[0] + "/absent")


def test_a_server_that_goes_away_is_a_catalog_error_and_its_return_is_enough(postgres_url: str) -> None:
    async def run() -> None:
        store, other = await open_store(postgres_url), await open_store(postgres_url)
        assert await store.apply(batch(0, 1))
        async with other._engine.begin() as connection:
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            await connection.execute(text(f"{end} AND datname = current_database()"))
        with pytest.raises(CatalogError):
            await store.apply(batch(1, 2))
        assert await store.apply(batch(1, 2))
        await store.close()
        await other.close()

    asyncio.run(run())


def test_a_connection_whose_server_takes_no_writes_any_more_is_ended(postgres_url: str) -> None:
    """A primary that was demoted keeps its connections."""

    async def run() -> None:
        store = await open_store(postgres_url)
        async with store._engine.connect() as connection:
            await connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
            await connection.commit()
        with pytest.raises(CatalogError, match="read-only transaction"):
            await store.apply(batch(0, 1))
        assert await store.apply(batch(0, 1))
        await store.close()

    asyncio.run(run())


@pytest.mark.nightly
def test_a_connection_that_does_not_answer_in_time_is_ended(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may be gone without a word, which TCP finds out after a quarter of an hour."""
    monkeypatch.setattr(database, "STATEMENT_TIMEOUT_S", 5.0)

    async def run() -> None:
        store = await open_store(postgres_url)
        before = (await store._read(text("SELECT pg_backend_pid() AS pid")))[0]["pid"]
        with pytest.raises(CatalogError, match="no answer in time"):
            await store._read(text("SELECT pg_sleep(600)"))
        assert (await store._read(text("SELECT pg_backend_pid() AS pid")))[0]["pid"] != before
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("first", ["closed", pytest.param("silent", marks=pytest.mark.nightly)])
def test_a_host_that_is_not_there_leaves_time_for_the_next(postgres_url: str, first: str) -> None:
    host, _, name = postgres_url.rpartition("@")[2].partition("/")

    async def run(port: int) -> None:
        store = await open_store(f"postgresql://postgres@127.0.0.1:{port},{host}/{name}", connect_timeout_s=20.0)
        assert await store.apply(batch(0, 1))
        await store.close()

    if first == "closed":
        asyncio.run(run(free_port()))
    else:
        with deaf_port() as port:
            asyncio.run(run(port))


def test_nothing_lasts_on_a_connection_for_longer_than_a_transaction(postgres_url: str) -> None:
    """So a pooler may give each transaction another connection. Waits are bounded within one."""

    async def run() -> None:
        store = await open_store(postgres_url)
        assert await store.apply(full_batch())
        await contents(store)
        async with store._engine.connect() as connection:
            inside = [(await connection.execute(text(f"SHOW {name}"))).scalar() for name in BOUNDS]
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            assert await raw.fetchval("SELECT count(*) FROM pg_prepared_statements") == 0
            await connection.rollback()
            outside = [await raw.fetchval(f"SHOW {name}") for name in BOUNDS]
        assert (inside, outside) == (["10s", "30s"], ["0", "0"])
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("postgresql://u:hunter2@one:5433,two/db", "postgresql://u:***@/db on one:5433, two:5432"),
        ("postgresql://u:hunter2@/db?host=one:5433&host=two:1", "postgresql://u:***@/db on one:5433, two:1"),
        ("postgresql://[::1]:5433,two/db?target_session_attrs=any", "postgresql:///db on ::1:5433, two:5432"),
        ("postgresql://u:hunter2@one/db", "postgresql://u:***@one/db"),
    ],
)
def test_several_hosts_may_be_named_as_libpq_has_them_and_are_shown(url: str, where: str) -> None:
    parsed = parse_url(url)
    assert shown(parsed) == where
    if "host" in parsed.query and "target_session_attrs" not in url and "," in url:
        assert parsed.query["target_session_attrs"] == "read-write"


@pytest.mark.parametrize("error", [EOFError("0 bytes read"), UnicodeError("label too long"), ConnectionResetError("x")])
def test_what_a_driver_raises_where_nobody_expects_it_is_ours(error: Exception) -> None:
    with pytest.raises(CatalogError, match="the database: "), database_errors("the database"):
        raise error


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "cannot be read"),
        ("postgresql://u:hunter2@one,/catalog", "cannot be read"),
        ("catalog.db", "cannot be read"),
        ("postgresql://u:hunter2@host:port/catalog", "cannot be read"),
        ("mysql://u:hunter2@host/catalog", "'mysql'"),
        ("postgresql+psycopg://u:hunter2@host/catalog", "'postgresql+psycopg'"),
        ("postgresql://u:hunter2@host", "names no database"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////dev/null/catalog.db", "cannot be made"),
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str, word: str) -> None:
    message = refusal(url)
    assert word in message
    assert "hunter2" not in message


def test_an_unknown_option_of_a_url_is_named(postgres_url: str) -> None:
    assert "'colour'" in refusal(postgres_url + "?colour=red")


def test_libpq_sslmode_is_understood(postgres_url: str) -> None:
    assert with_store(postgres_url + "?sslmode=disable", lambda store: store.position(STREAM)) == 0
    assert "SSL" in refusal(postgres_url + "?sslmode=require")


def test_plain_urls_get_their_driver(sqlite_url: str, postgres_url: str) -> None:
    for url in (sqlite_url.replace("+aiosqlite", ""), postgres_url.replace("+asyncpg", "")):
        assert with_store(url, lambda store: store.apply(full_batch()))


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, this is no database at all.\n" * 10)
    before = path.read_bytes()
    assert "not a database" in refusal(f"sqlite:///{path}")
    assert path.read_bytes() == before


@pytest.mark.parametrize(("driver", "url"), [("aiosqlite", "sqlite:///{}"), ("asyncpg", "postgresql://host/catalog")])
def test_a_missing_driver_names_the_extra(
    driver: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(MissingExtraError, match=driver) as caught:
        asyncio.run(SqlStore.open(url.format(tmp_path / "catalog.db")))
    assert caught.value.extra == "catalog"


def test_a_locked_sqlite_file_is_a_catalog_error(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 0.2)

    async def run() -> None:
        store, other = await open_store(sqlite_url), await open_store(sqlite_url)
        async with other._engine.connect() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(KvbmError, match="database is locked"):
                await store.apply(batch(0, 1))
            assert await store.position(STREAM) == 0  # readers are never in the way of a writer
            await connection.rollback()
        assert await store.apply(batch(0, 1))
        await store.close()
        await other.close()

    asyncio.run(run())


READ_AND_CLOSE = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(database.execute("SELECT stream_sequence FROM positions").fetchone()[0])
database.close()
"""


def test_a_database_that_is_opened_again_keeps_its_locks_against_other_processes(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Else one of them takes itself for the last, and deletes the log that is written to here: what is stored then is
    lost.
    """

    def read_elsewhere() -> str:
        command = [sys.executable, "-c", READ_AND_CLOSE, str(tmp_path / "catalog.db")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()

    async def run() -> None:
        store = await open_store(sqlite_url)
        assert await store.apply(batch(0, 1))
        await (await open_store(sqlite_url)).close()
        assert read_elsewhere() == "1"
        assert await store.apply(batch(1, 2))
        assert read_elsewhere() == "2"
        await store.close()

    asyncio.run(run())
    assert read_elsewhere() == "2"


def test_who_reads_a_database_keeps_no_writer_waiting(database_url: str) -> None:
    async def run() -> None:
        store, other = await open_store(database_url), await open_store(database_url)
        assert await store.apply(batch(0, 1, claims=(claim(hashes(2000)),)))
        counted = select(func.count()).select_from(tables.object_claims)
        async with other._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                await connection.execution_options(isolation_level="REPEATABLE READ")
            rows = await connection.stream(select(tables.object_claims))
            assert len(await rows.fetchmany(10)) == 10
            for at in range(1, 6):
                runs = (claim(hashes(2000), at_ns=at, withdrawn=at % 2 == 1), claim(hashes(3000, seed=at)))
                assert await asyncio.wait_for(store.apply(batch(at, at + 1, claims=runs)), 60)
            assert (await connection.execute(counted)).scalar_one() == 2000  # it reads on in what it began with
        assert await store.claim_count() == 15_000
        await store.close()
        await other.close()

    asyncio.run(run())


def test_a_replica_waits_for_the_one_that_writes(postgres_url: str) -> None:
    async def run() -> None:
        store, other = await open_store(postgres_url), await open_store(postgres_url)
        assert await store.apply(batch(0, 1))
        async with other._engine.connect() as connection:
            held = select(func.count()).select_from(
                select(tables.positions).where(tables.positions.c.stream == STREAM).with_for_update().subquery()
            )
            await connection.execute(held)
            waiting = asyncio.create_task(store.apply(batch(1, 2)))
            ended, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not ended
            await connection.rollback()
        assert await waiting
        await store.close()
        await other.close()

    asyncio.run(run())


def mark_of(instance: InstanceId = FIRST, sequence: int = 7, **fields: Any) -> ForgottenRow:
    return ForgottenRow(instance=instance, stream=STREAM, sequence=sequence, until_ns=1, **fields)


def test_an_instance_that_is_forgotten_leaves_every_table_but_its_claims(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        given = full_batch()
        assert await store.apply(given)
        await store.note_absences([AbsenceRow(instance=FIRST, unheard_s=9, sequence=7)], [])
        mark = mark_of(pulse_ns=5, declared=given.instances[0])
        assert not await store.forget([mark], 6)  # another catalog has stored what this one has not read
        assert await store.instance_names(None) == await store.instance_names("west") == [FIRST]
        assert await store.instance_names("east") == []
        parts = [tuple(part for part in ALL_PARTS if (part == part_of(FIRST)) == own) for own in (True, False)]
        for own, names in zip(parts, ([FIRST], []), strict=True):
            some = SqlStore(store.engine, parts=own)
            assert await some.instance_names(None) == [row.id for row in await some.instances()] == names
            assert [row.id for row in await some.instances(of_all_parts=True)] == [FIRST]
        assert await store.forget([mark], 7)
        found = await contents(store)
        assert (found.instances, found.epochs, found.positions) == ([], [], {})
        assert found.position == 7 and len(found.claims) == 3 and await store.absences() == []
        assert await store.claimed_pools() == {POOL}
        assert await store.forgotten(STREAM) == [mark] and await store.forgotten("another") == []
        await store.drop_marks(STREAM, [FIRST])
        assert await store.forgotten(STREAM) == []

    with_store(database_url, work)


def test_rows_of_before_it_was_forgotten_change_nothing_and_later_ones_end_the_mark(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        given = full_batch()
        assert await store.apply(given)
        assert await store.forget([mark_of()], 9)
        late = msgspec.structs.replace(given, previous=7, stream_sequence=8, spoke={FIRST: 7}, claims=())
        assert await store.apply(late)
        assert await store.instances() == [] and await store.instance_positions() == {}
        assert len(await store.forgotten(STREAM)) == 1
        assert await store.apply(msgspec.structs.replace(late, previous=8, stream_sequence=9, spoke={FIRST: 9}))
        assert await store.instances() == list(given.instances)
        assert await store.forgotten(STREAM) == []

    with_store(database_url, work)


def test_nothing_is_forgotten_under_a_name_that_is_over(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        first = msgspec.structs.replace(full_batch(), stream="KVBM/c@1")
        assert await store.apply(first)
        assert await store.forget([msgspec.structs.replace(mark_of(SECOND), stream="KVBM/c@1")], 7)
        assert await store.apply(msgspec.structs.replace(first, stream="KVBM/c@2"))
        assert not await store.forget([msgspec.structs.replace(mark_of(), stream="KVBM/c@1")], 100)
        assert len(await store.instances()) == 1
        await store.drop_marks("KVBM/c@2", [])
        assert await store.forgotten("KVBM/c@1") == []

    with_store(database_url, work)


def test_an_absence_only_grows_until_the_instance_was_here(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        await store.note_absences(
            [AbsenceRow(instance=FIRST, unheard_s=9), AbsenceRow(instance=SECOND, unheard_s=3)], []
        )
        await store.note_absences([AbsenceRow(instance=FIRST, unheard_s=5, sequence=2)], [SECOND])
        assert await store.absences() == [AbsenceRow(instance=FIRST, unheard_s=9, sequence=2)]
        await store.note_absences([AbsenceRow(instance=FIRST, unheard_s=1)], [FIRST])
        assert await store.absences() == [AbsenceRow(instance=FIRST, unheard_s=1)]

    with_store(database_url, work)


def test_pools_are_found_by_their_claims(database_url: str) -> None:
    async def work(store: SqlStore) -> None:
        assert await store.claimed_pools() == set()
        claims = tuple(claim(hashes(2, seed), pool=f"pool-{seed}") for seed in range(3))
        assert await store.apply(batch(0, 1, claims=claims))
        assert await store.claimed_pools() == {"pool-0", "pool-1", "pool-2"}

    with_store(database_url, work)


@pytest.mark.parametrize("place", [0, 1, 2, 6])
def test_a_row_that_the_database_refuses_for_what_it_holds_is_left_out_and_the_rest_is_stored(
    database_url: str, place: int
) -> None:
    good = [Namespace(model=f"m{number}", block_tokens=16) for number in range(6)]
    rows = [NamespaceRow(id=one.id, fields=one, first_seen_ns=5) for one in good]
    rows.insert(place, NamespaceRow(id=NamespaceId(b"short"), fields=CHAT, first_seen_ns=5))
    changed = msgspec.structs.replace(full_batch(), namespaces=tuple(rows))

    async def store(store: SqlStore) -> tuple[BatchResult, Contents, int]:
        return await store.apply(changed), await contents(store), store.refused_rows

    applied, held, refused = with_store(database_url, store)
    assert applied.outcome is BatchOutcome.APPLIED and held.position == 7
    assert {row.id for row in held.namespaces} == {one.id for one in good}
    assert len(held.instances) == len(held.epochs) == len(held.positions) == 1 and len(held.claims) == 3
    assert refused == 1


def test_claims_of_a_pool_whose_name_the_database_cannot_keep_are_left_out(postgres_url: str) -> None:
    dice = random.Random(1)
    long = "".join(
        chr(dice.randrange(0x4E00, 0x9FFF)) for _ in range(3000)
    )  # more than a row of a B-tree, also compressed
    changed = msgspec.structs.replace(
        full_batch(), claims=(claim(hashes(3)), claim(hashes(5, 1), pool=long), claim(hashes(2, 2)))
    )

    async def store(store: SqlStore) -> tuple[BatchResult, set[tuple[str, bytes, bytes]], int]:
        return await store.apply(changed), await claimed(store), store.refused_rows

    applied, held, refused = with_store(postgres_url, store)
    assert applied.outcome is BatchOutcome.APPLIED and {pool for pool, _, _ in held} == {POOL}
    assert (len(held), refused) == (5, 5)
