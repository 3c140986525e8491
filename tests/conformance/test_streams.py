"""What every `EventStream` promises."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import pytest

from kvbm.core.codec import decode_header
from kvbm.core.errors import ConfigError, FencedError, StreamError
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.core.parts import ALL_PARTS, PARTS, part_of
from kvbm.streams.base import (
    ORIGIN,
    SAMPLES_KEPT,
    START,
    AccessSample,
    EventReader,
    EventStream,
    Fence,
    Heartbeat,
    Mark,
    Position,
    StreamMessage,
    Tail,
    UnreadableError,
    fence_of,
    fence_subject,
    is_fence,
    mark_of,
    still_holds,
    subject_names,
)
from kvbm.streams.memory import MemoryStream
from kvbm.streams.nats.headers import FENCE_HEADER, fence_in
from kvbm.streams.nats.stream import NatsStream
from tests.eventually import eventually_async
from tests.nats_fixture import WAIT_S, cluster, make_frame, nats_url, patient  # noqa: F401

Told = TypeVar("Told")
Work = Callable[[EventStream], Awaitable[None]]
Run = Callable[[Work], None]
ONE = InstanceId("i")  # whose frames `make_frame` makes
TWO = InstanceId("two")


@pytest.fixture(params=["memory", "nats"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine function over a stream of each kind."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EventStream]:
        stream: EventStream
        if request.param == "memory":
            stream = MemoryStream()
        else:
            stream = await NatsStream.connect(request.getfixturevalue("nats_url"), WAIT_S)
        try:
            yield stream
        finally:
            await stream.close()

    async def whole(work: Work) -> None:
        async with asyncio.timeout(5 * WAIT_S), opened() as stream:
            await work(patient(stream))

    if request.param == "nats":
        request.getfixturevalue("nats_url")  # before any loop runs
    return lambda work: asyncio.run(whole(work))


def position(epoch: int, offset: int) -> Position:
    return Position(Epoch(epoch), Offset(offset))


async def read_until_end(reader: EventReader) -> list[StreamMessage]:
    found: list[StreamMessage] = []
    while not reader.at_end:
        found += await reader.fetch(WAIT_S)
    return found


def test_messages_come_in_the_order_they_were_published_as_the_bytes_they_were(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        sent = [make_frame(3 * at, 3).data for at in range(50)]
        sequences = [await stream.publish(cluster, ONE, data) for data in sent]
        messages = await read_until_end(await stream.pull(0, cluster))
        assert [message.data for message in messages] == sent
        assert [message.sequence for message in messages] == sequences
        assert sequences == sorted(set(sequences))
        assert {subject_names(message.subject) for message in messages} == {(cluster, ONE)}

    run(work)


def test_a_repeat_is_a_message_like_any_other(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        for first in (0, 1, 1, 0):
            await stream.publish(cluster, ONE, make_frame(first).data)
        messages = await read_until_end(await stream.pull(0, cluster))
        assert [decode_header(message.data).first_offset for message in messages] == [0, 1, 1, 0]

    run(work)


def test_a_reader_goes_on_after_a_sequence(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        sequences = [await stream.publish(cluster, ONE, make_frame(at).data) for at in range(10)]
        first = await stream.pull(0, cluster)
        assert len(await read_until_end(first)) == 10
        await first.close()
        second = await stream.pull(sequences[6], cluster)
        assert [message.sequence for message in await read_until_end(second)] == sequences[7:]

    run(work)


def test_a_reader_knows_when_it_has_all_and_waits_for_more(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        reader = await stream.pull(0, cluster)
        assert reader.at_end
        assert await reader.fetch(0.05) == []
        await stream.publish(cluster, ONE, make_frame(0).data)
        assert len(await reader.fetch(WAIT_S)) == 1
        assert reader.at_end
        waiting = asyncio.create_task(reader.fetch(WAIT_S))
        ended, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not ended
        await stream.publish(cluster, ONE, make_frame(1).data)
        assert [decode_header(message.data).first_offset for message in await waiting] == [1]
        assert reader.at_end

    run(work)


def test_a_reader_takes_more_than_one_request_holds(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        for start in range(0, 5000, 250):
            await asyncio.gather(*(stream.publish(cluster, ONE, make_frame(start + at).data) for at in range(250)))
        messages = await read_until_end(await stream.pull(0, cluster))
        assert len(messages) == 5000
        assert [message.sequence for message in messages] == sorted({message.sequence for message in messages})
        assert await stream.last_sequence() >= messages[-1].sequence >= await stream.first_sequence()

    run(work)


def test_clusters_are_read_apart_and_together(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        before = await stream.last_sequence()
        await stream.publish(cluster, ONE, make_frame(0).data)
        await stream.publish(f"{cluster}-b", TWO, make_frame(0, instance="two").data)
        alone = await read_until_end(await stream.pull(before, cluster))
        assert [subject_names(message.subject) for message in alone] == [(cluster, ONE)]
        together = await read_until_end(await stream.pull(before))
        assert {(cluster, ONE), (f"{cluster}-b", TWO)} <= {subject_names(message.subject) for message in together}

    run(work)


def test_parts_of_a_cluster_are_read_apart(run: Run, cluster: str) -> None:
    """Events, fences and heartbeats of instances in some parts, and of no others; and what one reads is what the other
    does not.
    """
    names = [InstanceId(f"gpu-{at}") for at in range(12)]
    low, high = ALL_PARTS[: PARTS // 2], ALL_PARTS[PARTS // 2 :]

    async def work(stream: EventStream) -> None:
        before = await stream.last_sequence()
        for name in names:
            await stream.set_fence(cluster, name, Epoch(1), "run", 0)
            await stream.publish(cluster, name, make_frame(0, instance=name).data)
            await stream.send_pulse(heartbeat(cluster, name, 1))
        for parts in (low, high, ALL_PARTS):
            wanted = [name for name in names if part_of(name) in parts]
            assert wanted
            read = await read_until_end(await stream.pull(before, cluster, parts=parts))
            assert [subject_names(message.subject)[1] for message in read] == [
                name for name in wanted for _ in range(2)
            ]
            heard: set[str] = set()
            async with asyncio.timeout(WAIT_S):
                async for told in stream.watch_pulses(cluster, parts):
                    heard.add(told.instance)
                    if len(heard) == len(wanted):
                        break
            assert heard == set(wanted)

    run(work)


def test_a_reader_from_beyond_the_end_reads_from_the_beginning(run: Run, cluster: str) -> None:
    """Its sequence is of a store that is gone; what it has seen before, it ignores."""

    async def work(stream: EventStream) -> None:
        await stream.publish(cluster, ONE, make_frame(0).data)
        reader = await stream.pull(await stream.last_sequence() + 1000, cluster)
        assert len(await read_until_end(reader)) == 1

    run(work)


def test_a_message_is_found_by_its_sequence_as_a_reader_gets_it(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        before = time.time_ns()
        sequence = await stream.publish(cluster, ONE, make_frame(0).data)
        (read,) = await read_until_end(await stream.pull(sequence - 1, cluster))
        assert await stream.message(sequence) == read
        assert read.stored_ns > 0
        if isinstance(stream, NatsStream):
            assert before - 60e9 < read.stored_ns < time.time_ns() + 60e9
        fence = await stream.set_fence(cluster, ONE, Epoch(1), "r", 0)
        found = await stream.message(fence.sequence)
        assert found is not None and found.subject == fence_subject(cluster, ONE)
        assert await stream.message(fence.sequence + 1000) is None
        assert await stream.message(0) is None

    run(work)


def test_a_message_sent_again_has_another_mark(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        one, two = [await stream.publish(cluster, ONE, make_frame(0).data) for _ in range(2)]
        first, second = await stream.message(one), await stream.message(two)
        assert first is not None and second is not None
        assert mark_of(first).sequence == one
        assert mark_of(first) == mark_of(first._replace())
        assert mark_of(first).fingerprint != mark_of(second).fingerprint
        assert await still_holds(stream, mark_of(first))
        assert await still_holds(stream, Mark(one))  # not known: believed
        assert not await still_holds(stream, Mark(one, mark_of(second).fingerprint))
        assert not await still_holds(stream, Mark(two + 1000, 7))
        assert not await still_holds(stream, Mark(two + 1000))
        assert await still_holds(stream, START)

    run(work)


def test_a_reader_goes_on_behind_the_message_it_knows_and_begins_anew_behind_another(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        sequences = [await stream.publish(cluster, ONE, make_frame(at).data) for at in range(3)]
        message = await stream.message(sequences[1])
        assert message is not None
        after, fingerprint = mark_of(message)
        for known, expected in ((fingerprint, sequences[2:]), (None, sequences[2:]), (7, sequences)):
            reader = await stream.pull(after, cluster, fingerprint=known)
            assert reader.begun == 1
            assert [message.sequence for message in await read_until_end(reader)] == expected

    run(work)


def test_the_tail_is_the_end_of_the_last_message_and_what_its_publisher_knew_to_be_safe(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        assert await stream.tail(cluster, ONE) is None
        data = make_frame(0, 5, epoch=4).data + make_frame(5, 2, epoch=4).data
        await stream.publish(cluster, ONE, data, acked=position(3, 8))
        await stream.publish(cluster, TWO, make_frame(0, 1, epoch=9, instance="two").data)
        assert await stream.tail(cluster, ONE) == Tail(position(4, 7), position(3, 8))
        assert await stream.tail(cluster, TWO) == Tail(position(9, 1), ORIGIN)

    run(work)


def test_what_is_not_made_of_frames_has_no_position(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        await stream.publish(cluster, ONE, b"hello")
        with pytest.raises(UnreadableError, match="not made of frames"):
            await stream.tail(cluster, ONE)
        flipped = bytearray(make_frame(0).data)
        flipped[14] ^= 0x02  # of its epoch, which would be believed to be another's
        await stream.publish(cluster, ONE, bytes(flipped))
        with pytest.raises(UnreadableError, match="not made of frames"):
            await stream.tail(cluster, ONE)
        await stream.publish(cluster, ONE, make_frame(0).data[:-1])
        with pytest.raises(UnreadableError, match="1 bytes before its last frame"):
            await stream.tail(cluster, ONE)
        await stream.publish(
            cluster, ONE, make_frame(0, epoch=7, instance="two").data
        )  # its epoch would be believed to be ours
        with pytest.raises(UnreadableError, match="a frame of instance two; another program writes there"):
            await stream.tail(cluster, ONE)

    run(work)


def test_a_fence_is_set_by_who_knows_the_last_one_and_by_nobody_else(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        assert await stream.fence(cluster, ONE) is None
        first = await stream.set_fence(cluster, ONE, Epoch(3), "a", 0)
        assert first == Fence(Epoch(3), "a", first.sequence)
        for expected in (0, first.sequence + 1):
            with pytest.raises(FencedError):
                await stream.set_fence(cluster, ONE, Epoch(9), "b", expected)
        assert await stream.fence(cluster, ONE) == first
        second = await stream.set_fence(cluster, ONE, Epoch(4), "b", first.sequence)
        assert await stream.fence(cluster, ONE) == second
        assert second.sequence > first.sequence
        assert await stream.fence(cluster, TWO) is None

    run(work)


def test_a_message_of_another_fence_is_refused_and_nothing_of_it_is_kept(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        with pytest.raises(FencedError):
            await stream.publish(cluster, ONE, make_frame(0).data, fence=Fence(Epoch(1), "r", 1))
        old = await stream.set_fence(cluster, ONE, Epoch(1), "a", 0)
        await stream.publish(cluster, ONE, make_frame(0).data, fence=old)
        await stream.publish(cluster, ONE, make_frame(1).data, fence=old)
        new = await stream.set_fence(cluster, ONE, Epoch(2), "b", old.sequence)
        with pytest.raises(FencedError):
            await stream.publish(cluster, ONE, make_frame(2).data, fence=old)
        await stream.publish(cluster, ONE, make_frame(0, epoch=2).data, fence=new)
        messages = await read_until_end(await stream.pull(0, cluster))
        events = [message for message in messages if not is_fence(message.subject)]
        headers = [decode_header(message.data) for message in events]
        assert [(header.epoch, header.first_offset) for header in headers] == [(1, 0), (1, 1), (2, 0)]
        assert [message.fence for message in events] == [old, old, new]  # what each named is told to whoever reads it

    run(work)


@pytest.mark.parametrize(
    "words", ["", "1:2", "1:2:", "-1:2:r", "1:x:r", f"1:{1 << 63}:r", f"{1 << 64}:1:r", "1:2:" + "r" * 300]
)
def test_a_fence_that_no_publisher_names_is_none(words: str) -> None:
    """It would be kept in checkpoints and archives, which hold 64 bits."""
    assert fence_in(f"{FENCE_HEADER}: {words}\r\n\r\n".encode()) is None
    assert fence_in(f"{FENCE_HEADER}: 7:2:r\r\n\r\n".encode()) == Fence(Epoch(2), "r", 7)


def test_messages_under_way_together_are_stored_in_the_order_of_their_calls(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        fence = await stream.set_fence(cluster, ONE, Epoch(1), "a", 0)
        calls = [
            asyncio.create_task(stream.publish(cluster, ONE, make_frame(at).data, fence=fence)) for at in range(300)
        ]
        sequences = await asyncio.gather(*calls)
        assert sequences == sorted(sequences)
        first, *messages = await read_until_end(await stream.pull(0, cluster))
        assert is_fence(first.subject)
        assert [decode_header(message.data).first_offset for message in messages] == list(range(300))

    run(work)


def test_a_reader_gets_fences_where_they_stand_among_the_events_with_the_runs_of_their_log(
    run: Run, cluster: str
) -> None:
    async def work(stream: EventStream) -> None:
        reader = await stream.pull(0, cluster)
        fence = await stream.set_fence(cluster, ONE, Epoch(1), "a", 0)
        sequence = await stream.publish(cluster, ONE, make_frame(0).data, fence=fence)
        runs = ((Epoch(1), "a"), (Epoch(3), "b"))
        last = await stream.set_fence(cluster, ONE, Epoch(3), "b", fence.sequence, epochs=runs)
        assert last == Fence(Epoch(3), "b", last.sequence, runs) == await stream.fence(cluster, ONE)
        for messages in (await read_until_end(reader), await read_until_end(await stream.pull(0, cluster))):
            assert [message.sequence for message in messages] == [fence.sequence, sequence, last.sequence]
            assert [is_fence(message.subject) for message in messages] == [True, False, True]
            assert {subject_names(message.subject) for message in messages} == {(cluster, ONE)}
            assert fence_of(messages[2].data, messages[2].sequence, "it") == last
        assert not await read_until_end(await stream.pull(last.sequence, cluster))

    run(work)


def test_the_state_tells_what_is_kept(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        before = await stream.state()
        assert before.first_sequence <= before.last_sequence + 1
        sequence = await stream.publish(cluster, ONE, make_frame(0).data)
        after = await stream.state()
        assert after.last_sequence == await stream.last_sequence() == sequence
        assert after.first_sequence == await stream.first_sequence()
        assert after.bytes > before.bytes
        assert after.created == before.created
        assert stream.max_message_bytes >= 1 << 20

    run(work)


def heartbeat(cluster: str, instance: InstanceId, published: int) -> Heartbeat:
    return Heartbeat(
        instance=instance,
        cluster=cluster,
        epoch=Epoch(3),
        published=Offset(published),
        wall_time_ns=published,
        free_slots={Tier.HOST: 7},
        namespaces=(NamespaceId(b"n" * 16),),
    )


def test_a_watcher_gets_the_last_pulse_of_each_instance_and_then_each_new_one(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        for published in (1, 2, 3):
            await stream.send_pulse(heartbeat(cluster, ONE, published))
        await stream.send_pulse(heartbeat(cluster, TWO, 8))
        await stream.last_sequence()  # an answer, so the pulses before it have arrived
        watch = stream.watch_pulses(cluster)
        seen = [await anext(watch), await anext(watch)]
        assert seen == [heartbeat(cluster, ONE, 3), heartbeat(cluster, TWO, 8)]
        await stream.send_pulse(heartbeat(cluster, ONE, 4))
        assert await anext(watch) == heartbeat(cluster, ONE, 4)

    run(work)


def test_the_last_pulse_of_an_instance_can_be_had_alone(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        assert await stream.last_pulse(cluster, ONE) is None
        for published in (1, 2):
            await stream.send_pulse(heartbeat(cluster, ONE, published))
        await stream.send_pulse(heartbeat(cluster, TWO, 8))
        await stream.last_sequence()  # an answer, so the pulses before it have arrived
        assert await stream.last_pulse(cluster, ONE) == heartbeat(cluster, ONE, 2)

    run(work)


async def until_heard(ask: Callable[[], Awaitable[bool]]) -> None:
    await eventually_async(ask, "nobody hears it")


def test_a_snapshot_is_asked_of_one_instance_and_answered_only_if_it_listens(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        assert not await stream.ask_snapshot(cluster, ONE)
        asks = stream.watch_snapshot_asks(cluster, ONE)
        first = asyncio.ensure_future(anext(asks))
        await until_heard(lambda: stream.ask_snapshot(cluster, ONE))
        await first
        assert await stream.ask_snapshot(cluster, ONE)
        await anext(asks)
        assert not await stream.ask_snapshot(cluster, TWO)

    run(work)


async def heard(watch: AsyncIterator[Told], tell: Callable[[], Awaitable[None]]) -> Told:
    """The first item; it is told again and again, because nobody knows when a watcher has begun."""
    first = asyncio.ensure_future(anext(watch))
    while not first.done():
        await tell()
        await asyncio.wait([first], timeout=0.01)
    return await first


def test_samples_reach_who_listens_to_their_cluster(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        sample = AccessSample(
            instance=TWO,
            cluster=cluster,
            wall_time_ns=1,
            namespace=NamespaceId(b"n" * 16),
            hashes=b"h" * 32,
            depth=1,
            rate=0.5,
        )

        elsewhere = msgspec.structs.replace(sample, cluster=f"{cluster}-b")

        async def tell() -> None:
            await stream.send_sample(elsewhere)
            await stream.send_sample(sample)

        assert await heard(stream.watch_samples(cluster), tell) == sample
        assert await heard(stream.watch_samples(), tell) in (sample, elsewhere)

    run(work)


def test_routes_reach_the_catalogs_of_their_cluster_with_the_name_of_who_tells(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        async def tell() -> None:
            await stream.send_routes(f"{cluster}-b", ONE, b"elsewhere")
            await stream.send_routes(cluster, TWO, b"\x00anything")

        assert await heard(stream.watch_routes(cluster), tell) == (TWO, b"\x00anything")
        with pytest.raises(ConfigError):
            await stream.send_routes(cluster, InstanceId("a.b"), b"")

    run(work)


def test_a_watcher_that_does_not_take_loses_the_oldest(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        def sample(at: int) -> AccessSample:
            return AccessSample(
                instance=ONE,
                cluster=cluster,
                wall_time_ns=at,
                namespace=NamespaceId(b"n" * 16),
                hashes=b"",
                depth=0,
                rate=1.0,
            )

        watch = stream.watch_samples(cluster)
        await heard(watch, lambda: stream.send_sample(sample(-1)))
        for at in range(SAMPLES_KEPT + 100):
            await stream.send_sample(sample(at))
            if not at % 100:
                await stream.last_sequence()  # an answer, so the samples before it have arrived
        await stream.last_sequence()
        for _ in range(SAMPLES_KEPT):  # the client has read them; now its tasks hand them over
            await asyncio.sleep(0)
        found = [(await anext(watch)).wall_time_ns for _ in range(SAMPLES_KEPT)]
        assert found == list(range(100, SAMPLES_KEPT + 100))

    run(work)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a>", "tab\t", "line\n", "x" * 256])
def test_names_that_cannot_be_part_of_a_subject_are_refused_by_name(run: Run, cluster: str, name: str) -> None:
    async def work(stream: EventStream) -> None:
        with pytest.raises(ConfigError, match="instance"):
            await stream.publish(cluster, InstanceId(name), make_frame(0).data)
        with pytest.raises(ConfigError, match="cluster"):
            await stream.pull(0, name)

    run(work)


def test_a_closed_stream_and_a_closed_reader_say_so(run: Run, cluster: str) -> None:
    async def work(stream: EventStream) -> None:
        reader = await stream.pull(0, cluster)
        await reader.close()
        await reader.close()
        with pytest.raises(StreamError, match="closed"):
            await reader.fetch(1.0)
        await stream.close()
        await stream.close()
        assert not stream.is_connected
        with pytest.raises(StreamError, match="closed"):
            await stream.publish(cluster, ONE, make_frame(0).data)

    run(work)


def test_a_reader_of_a_stream_that_lost_its_end_reads_what_has_its_sequences_now() -> None:
    """In memory; `integration/test_nats.py` and `test_catalog_repair.py` set a server's store back."""

    async def work() -> None:
        stream = MemoryStream()
        for at in range(4):
            await stream.publish("c", ONE, make_frame(at).data)
        behind, reader = await stream.pull(0, "c"), await stream.pull(0, "c")
        assert len(await read_until_end(reader)) == 4
        stream.lose_end(2)
        assert not reader.at_end
        for at in range(10, 14):
            await stream.publish("c", ONE, make_frame(at).data)
        for one in (reader, behind):
            found = await read_until_end(one)
            assert [decode_header(message.data).first_offset for message in found] == [0, 1, 10, 11, 12, 13]
            assert one.begun == 2
        await stream.publish("c", ONE, make_frame(14).data)
        stream.lose_end(7)
        assert len(await read_until_end(reader)) == 1
        await stream.close()

    asyncio.run(work())
