"""Rows on their way to a real SQL file: what has not reached it is not lost with an older copy of it, nor with the
stream's old end.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvbm import _native
from kvbm.assembly import NATIVE_INDEX
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.sql_writer import Numbering, SqlWriter, WriterOptions, numbering
from kvbm.catalog.sql.rows import ClaimRun, ForgottenRow, StoreBatch
from kvbm.catalog.sql.store import BatchResult, ClaimChunk, SqlStore
from kvbm.core import codec
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.errors import CatalogError, StreamError
from kvbm.core.events import BlocksCreated, BlocksEvicted, EvictReason, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Reach, Tier, split_hashes
from kvbm.streams.memory import MemoryStream
from tests.eventually import eventually_async

ONE, TWO = InstanceId("one"), InstanceId("two")
SPACE = Namespace(model="m", block_tokens=4)
POOL = PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "pool")
WAIT_S = 60.0


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


class World:
    """A stream in memory, an SQL file, and what brings one to the other; each step is the test's."""

    def __init__(self, store: SqlStore, file: Path, stream: MemoryStream | None = None) -> None:
        self.store, self.file = store, file
        self.stream = stream or MemoryStream()
        self.offsets = {ONE: 0, TWO: 0}

    async def begin(self) -> None:
        begun = await numbering(self.store, "c", await self.stream.state(), self.stream)
        self.sequencer = Sequencer(NATIVE_INDEX(1 << 16), _native.scan_frames, await self.store.instances())
        self.rows = RowCollector(begun.name, begun.place.sequence)
        self.writer = self._writer(begun)
        self.reader = await self.stream.pull(begun.place.sequence, "c", fingerprint=begun.place.fingerprint)
        if begun.place.sequence:
            return
        await self.start(ONE)

    async def start(self, name: InstanceId) -> None:
        """An instance's first word."""
        started = InstanceStarted(
            epoch=Epoch(1), pools=(POOL,), namespaces=(SPACE,), topology=(), engine="test", version="0"
        )
        await self.say(started, name)

    def _writer(self, begun: Numbering) -> SqlWriter:
        return SqlWriter(
            self.store,
            self.stream,
            self.sequencer,
            self.rows,
            begun,
            asyncio.Lock(),
            Degraded(),
            lambda known, namespaces: Sequencer(NATIVE_INDEX(1), _native.scan_frames, known, namespaces),
            WriterOptions("c", every_s=0.005),
        )

    async def say(self, event: InstanceStarted | BlocksCreated | BlocksEvicted, name: InstanceId = ONE) -> None:
        """Publish one event and have it read."""
        offset = self.offsets[name]
        frame = Frame(
            instance=name,
            epoch=Epoch(1),
            first_offset=Offset(offset),
            wall_time_ns=1000 + offset,
            digest=0,
            events=(event,),
        )
        self.offsets[name] += 1
        await self.stream.publish("c", name, encode_frame(frame))
        await self.read()

    async def read(self) -> None:
        """Read what there is."""
        for message in await self.reader.fetch(WAIT_S):
            self.rows.take(self.sequencer.step(0.0, [message]))

    async def claim(self, number: int) -> None:
        await self.say(BlocksCreated(namespace=SPACE.id, tier=Tier.OBJECT, hashes=block(number)))

    async def withdraw(self, number: int) -> None:
        await self.say(
            BlocksEvicted(namespace=SPACE.id, tier=Tier.OBJECT, hashes=block(number), reason=EvictReason.TTL)
        )

    async def claimed(self) -> set[int]:
        """What SQL says is claimed."""
        return {
            int.from_bytes(chunk.hashes[at : at + 16], "little")
            async for chunk in self.store.claims()
            for at in range(0, len(chunk.hashes), 16)
        }

    def indexed(self) -> set[int]:
        """What the index says is claimed."""
        found: set[int] = set()
        first: int | None = 0
        while first is not None:
            first, runs = self.sequencer.index.claims(first)
            found |= {int.from_bytes(one, "little") for _, _, hashes in runs for one in split_hashes(hashes)}
        return found

    def copy(self, name: str) -> None:
        with sqlite3.connect(self.file) as here, sqlite3.connect(self.file.with_name(name)) as there:
            here.backup(there)

    def restore(self, name: str) -> None:
        with sqlite3.connect(self.file) as here, sqlite3.connect(self.file.with_name(name)) as there:
            there.backup(here)

    async def store_until(self, check: Callable[[], Awaitable[bool]]) -> None:
        running = asyncio.create_task(self.writer.run())
        try:
            await eventually_async(check, "it is not stored", WAIT_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def run(work: Callable[[World], Awaitable[None]], url: str, file: Path) -> None:
    async def opened() -> None:
        store = await SqlStore.open(url)
        try:
            world = World(store, file)
            await world.begin()
            await work(world)
        finally:
            await store.close()

    asyncio.run(opened())


async def another(world: World) -> World:
    """Another catalog on the same stream and file, that goes on where SQL stands."""
    other = World(world.store, world.file, world.stream)
    other.offsets = dict(world.offsets)
    await other.begin()
    return other


async def refuse(self: SqlStore, batch: StoreBatch) -> BatchResult:
    raise CatalogError("the database is away")


def test_claims_that_waited_for_a_database_restored_from_an_older_copy_reach_it_though_the_stream_has_lost_them(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        world.copy("older.db")
        await world.claim(2)
        await world.writer.flush()
        assert await world.claimed() == {1, 2}
        with monkeypatch.context() as away:
            away.setattr(SqlStore, "apply", refuse)
            await world.claim(3)
            await world.withdraw(1)
            with pytest.raises(CatalogError):
                await world.writer.flush()  # these two are a batch that waits
            await world.claim(4)
            await world.claim(5)
            await world.withdraw(4)  # these are gathered behind it
        world.restore("older.db")
        assert await world.claimed() == {1}
        world.stream.forget(range(1, await world.stream.last_sequence() + 1))  # the outage took longer than it keeps
        await world.claim(6)

        async def is_read_again() -> bool:
            return world.writer.read_again == 1 and world.writer.stored == await world.stream.last_sequence()

        await world.store_until(is_read_again)
        await world.claim(7)

        async def is_stored() -> bool:
            return world.writer.stored == await world.stream.last_sequence()

        await world.store_until(is_stored)
        assert await world.claimed() == {3, 5, 6, 7}  # of 2 the copy knows nothing: a janitor finds its object

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_claims_that_waited_are_stored_in_the_order_of_the_stream_where_it_still_has_them(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        world.copy("older.db")
        await world.withdraw(1)
        await world.writer.flush()
        with monkeypatch.context() as away:
            away.setattr(SqlStore, "apply", refuse)
            await world.claim(1)
            with pytest.raises(CatalogError):
                await world.writer.flush()
            await world.claim(2)
            await world.withdraw(1)
        world.restore("older.db")

        async def is_stored() -> bool:
            return world.writer.read_again == 1 and world.writer.stored == await world.stream.last_sequence()

        await world.store_until(is_stored)
        assert await world.claimed() == {2}

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_claims_that_waited_reach_sql_though_another_catalog_had_stored_a_history_that_is_gone(
    sqlite_url: str, tmp_path: Path
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        other = await another(world)
        await other.claim(2)
        await other.claim(3)
        await other.writer.flush()
        world.stream.lose_end(2)  # before this one has read them: it sees no change of the stream
        await world.claim(4)
        world.stream.forget([3])
        await world.claim(5)

        async def is_stored() -> bool:
            return world.writer.read_again == 1 and 5 in await world.claimed()

        await world.store_until(is_stored)
        assert await world.claimed() >= {1, 4, 5}

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_what_is_claimed_and_withdrawn_while_claims_are_read_from_sql_counts(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.claim(2)
        await world.writer.flush()
        read = world.store.claims

        async def meanwhile() -> AsyncIterator[ClaimChunk]:
            async for chunk in read():
                await world.withdraw(1)
                await world.claim(3)
                yield chunk  # which has 1, and not 3

        monkeypatch.setattr(world.store, "claims", meanwhile)
        await world.writer._take_claims()
        monkeypatch.undo()
        assert world.indexed() == {2, 3}
        await world.writer.flush()
        assert await world.claimed() == {2, 3}

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_the_index_follows_an_older_copy_whose_next_messages_are_gone_though_both_have_as_many_claims(
    sqlite_url: str, tmp_path: Path
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        world.copy("older.db")
        await world.withdraw(1)
        await world.claim(2)
        await world.writer.flush()
        world.restore("older.db")
        world.stream.forget([3, 4])
        await world.claim(3)
        await world.claim(4)

        async def is_followed() -> bool:
            return world.writer.read_again == 1 and await world.claimed() == world.indexed() >= {1, 3, 4}

        await world.store_until(is_followed)

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_rows_that_another_catalog_has_overtaken_in_part_are_stored(sqlite_url: str, tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        other = await another(world)
        await other.claim(2)
        await other.writer.flush()
        await world.read()
        world.offsets = other.offsets
        await world.claim(3)  # the batch has both
        await world.writer.flush()

        async def is_stored() -> bool:
            return world.writer.stored == await world.stream.last_sequence()

        await world.store_until(is_stored)
        assert await world.claimed() == {1, 2, 3} and world.writer.read_again == 0

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_a_place_that_could_not_be_checked_is_checked_again(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: MemoryStream, sequence: int, timeout_s: float = 5.0) -> None:
        raise StreamError("no answer")

    async def work(world: World) -> None:
        await world.claim(1)
        await world.claim(2)
        await world.writer.flush()
        name = world.writer.name
        world.stream.lose_end(2)
        world.writer.on_reader()  # as after a lost connection
        with monkeypatch.context() as away:
            away.setattr(MemoryStream, "message", silent)
            with pytest.raises(StreamError):
                await world.writer.flush()
        await (await another(world)).claim(3)  # has the sequence now that SQL stands at

        async def is_renamed() -> bool:
            return world.writer.name == f"{name}#2" and 3 in await world.claimed()

        await world.store_until(is_renamed)

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_a_catalog_learns_on_a_quiet_stream_that_another_has_given_it_a_later_name(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the old name it could forget nobody, as SQL refuses that, and heard of nobody whom the other forgot."""
    monkeypatch.setattr("kvbm.catalog.follow.sql_writer.NAME_EVERY_S", 0.01)

    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        name, other = world.writer.name, await another(world)
        other.writer.begin_anew()  # it has seen the end lost, or the stream replaced twice

        def mark(by: World) -> ForgottenRow:
            return ForgottenRow(instance=ONE, stream=by.writer.name, sequence=1, until_ns=1, pulse_ns=0)

        async def is_renamed() -> bool:
            return await world.store.position(f"{name}#2") == await world.stream.last_sequence()

        await other.store_until(is_renamed)
        assert not await world.store.forget([mark(world)], world.sequencer.sequence)

        async def is_followed() -> bool:
            return world.writer.name == f"{name}#2" and not world.writer.is_behind

        await world.store_until(is_followed)
        for one in (world, other):  # neither drives the other on
            await one.writer._look_at_name()
        assert other.writer.name == world.writer.name
        assert await world.store.forget([mark(world)], world.sequencer.sequence)
        assert await world.claimed() == world.indexed() == {1}

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_a_quiet_catalog_of_another_server_leaves_the_database_to_the_one_that_reads(
    sqlite_url: str, tmp_path: Path
) -> None:
    async def work(world: World) -> None:
        await world.claim(1)
        await world.writer.flush()
        name = world.writer.name
        other = World(world.store, world.file)
        await other.begin()
        await other.claim(2)
        await other.writer.flush()
        assert await world.store.streams_over() == {name}
        await world.writer._look_at_name()
        assert world.writer.name == name and not world.writer.is_behind

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_instances_that_an_older_copy_does_not_know_are_told_again(sqlite_url: str, tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.copy("older.db")
        await world.start(TWO)
        await world.writer.flush()
        world.restore("older.db")
        world.stream.forget(range(1, await world.stream.last_sequence() + 1))
        await world.claim(1)

        async def is_told() -> bool:
            return world.writer.read_again == 1

        await world.store_until(is_told)
        await world.claim(2)

        async def is_stored() -> bool:
            return world.writer.stored == await world.stream.last_sequence()

        await world.store_until(is_stored)
        rows = {row.id: row for row in await world.store.instances()}
        assert rows[TWO].engine == "test" and rows[TWO].pools == (POOL,)  # though it has said nothing since

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_a_handover_that_does_not_end_in_time_lets_the_catalog_go_on_and_is_made_again(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvbm.catalog.follow.sql_writer._HANDOVER_S", -1.0
    )  # it is over as soon as the first reader is ahead

    async def work(world: World) -> None:
        class Overtaken(asyncio.Lock):
            """The first reader goes on once more just before it stands still."""

            async def acquire(self) -> Literal[True]:
                if 3 not in world.indexed():
                    await world.claim(3)
                return await super().acquire()

        applying = world.writer._applying = Overtaken()
        await world.claim(1)
        await world.writer.flush()
        await world.claim(2)
        world.writer._drop_rows("more wait than may")
        await world.writer._read_again()
        assert world.indexed() == {1, 2, 3} and not applying.locked()
        assert (world.writer.is_behind, world.writer.read_again) == (True, 0)
        await world.writer._read_again()
        assert (world.writer.is_behind, world.writer.read_again) == (False, 1)
        await world.writer.flush()
        assert await world.claimed() == {1, 2, 3}

    run(work, sqlite_url, tmp_path / "catalog.db")


def test_what_is_told_again_goes_with_the_next_batch_where_another_catalog_has_stored_the_same_messages(
    sqlite_url: str, tmp_path: Path
) -> None:
    """The other has read them too, but not what the stream has lost since."""

    async def work(world: World) -> None:
        await world.start(TWO)
        await world.claim(1)
        await world.writer.flush()
        with sqlite3.connect(world.file) as here:
            here.execute("DELETE FROM instances WHERE id = 'two'")
        world.sequencer.index.claim("pool", SPACE.id, block(2))
        world.rows.add_instances(world.sequencer.followed)
        world.rows.add_namespaces(world.sequencer.namespaces(), seen_ns=1)
        world.rows.add_claims([ClaimRun(pool="pool", namespace=SPACE.id, hashes=block(2), instance=TWO, at_ns=1)])
        other = await another(world)
        await world.claim(3)
        await other.read()
        await other.writer.flush()
        await world.writer.flush()  # the other was first
        assert [row.id for row in await world.store.instances()] == [ONE]
        assert await world.claimed() == {1, 3}
        await world.claim(4)
        await world.writer.flush()
        assert [row.id for row in await world.store.instances()] == [ONE, TWO]
        assert await world.claimed() == {1, 2, 3, 4}

    run(work, sqlite_url, tmp_path / "catalog.db")


def lying_start(monkeypatch: pytest.MonkeyPatch, what: str) -> InstanceStarted:
    """What an instance may say whose kvbm is not ours: a text of 3,000 mixed characters, more than a row of
    PostgreSQL's B-tree has.
    """
    dice = random.Random(1)
    long = "".join(chr(dice.randrange(0x4E00, 0x9FFF)) for _ in range(3000))
    started = InstanceStarted(epoch=Epoch(1), pools=(POOL,), namespaces=(SPACE,))
    fields: list[Any] = msgspec.msgpack.decode(codec.encode_started(started))
    if what == "tenant":
        fields[2][0]["tenant"] = long
    else:
        fields[1][0][4] = long
    monkeypatch.setattr(codec, "encode_started", lambda event: msgspec.msgpack.encode(fields))
    return started


@pytest.mark.parametrize("what", ["tenant", "pool"])
def test_a_start_whose_text_no_database_can_keep_stops_sql_for_nobody(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def lie(world: World) -> None:
        with monkeypatch.context() as lying:
            await world.say(lying_start(lying, what), TWO)
        await world.say(BlocksCreated(namespace=SPACE.id, tier=Tier.OBJECT, hashes=block(7)), TWO)
        await world.claim(1)

        async def is_stored() -> bool:
            return 1 in await world.claimed()

        await world.store_until(is_stored)
        assert world.sequencer.counters.poison == 1

    run(lie, postgres_url, tmp_path)
