"""The sequencer and the row collector: what is applied, ignored, waited for and given up on, and which rows follow from
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm import _native
from kvbm.catalog.follow import instance_sequence
from kvbm.catalog.follow.forgetting import Forgetting
from kvbm.catalog.follow.instance_sequence import HOLE_MOST_S, MOST_LINES, Changes
from kvbm.catalog.follow.known_namespaces import KnownNamespaces
from kvbm.catalog.follow.reorder_buffer import REORDER_BYTES
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.sequencer import Sequencer, SequencerState
from kvbm.catalog.index.cluster_index import ClusterIndex, is_suspect
from kvbm.catalog.sql.rows import ForgottenRow, InstanceRow, InstanceStatus, StoreBatch
from kvbm.core.codec import UNKNOWN_DIGEST, VERSION, Frame, decode_frame, encode_frame
from kvbm.core.errors import CatalogError
from kvbm.core.events import BlocksCreated, EvictReason, MigrateCause, PoolStated, UsageRecorded
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import START, Fence, Heartbeat, Mark, Position, StreamMessage, fence_data, mark_of
from tests.indexes import NATIVE, Twin, each_twin

ONE = InstanceId("one")
NAMESPACE = Namespace(model="m", block_tokens=16)
POOLS = (
    PoolStated(Tier.HBM, 64, 1024),
    PoolStated(Tier.NVME, 64, 1024),
    PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "pool"),
)


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


class Instance:
    """A ledger whose every command becomes one frame."""

    def __init__(self, epoch: int = 1, name: InstanceId = ONE) -> None:
        self.name = name
        self.ledger = Ledger(POOLS)
        self.ledger.start(Epoch(epoch), [NAMESPACE], ["rack-1"], "engine", "0.1")
        self.frames: list[Frame] = []
        self.cut()

    def cut(self) -> Frame:
        taken = self.ledger.take_frames(self.name, 1000 + (self.frames[-1].next_offset if self.frames else 0))
        self.frames.extend(decode_frame(frame.data)[0] for frame in taken)
        return self.frames[-1]

    def create(self, *numbers: int) -> Frame:
        allocation = self.ledger.allocate(Tier.HBM, len(numbers))
        assert allocation is not None
        self.ledger.create(NAMESPACE.id, Tier.HBM, NO_PARENT, 0, hashes(*numbers), allocation.slots)
        return self.cut()

    def offload(self, *numbers: int) -> Frame:
        copy = self.ledger.begin_copy(NAMESPACE.id, Tier.HBM, Tier.OBJECT, hashes(*numbers))
        assert copy is not None
        self.ledger.end_copy(copy, [True] * len(numbers), MigrateCause.OFFLOAD)
        return self.cut()

    def snapshot(self) -> Frame:
        self.ledger.begin_snapshot()
        while self.ledger.step_snapshot():
            pass
        return self.cut()

    def heartbeat(self) -> Heartbeat:
        epoch = self.ledger.residencies.epoch
        return Heartbeat(instance=self.name, cluster="c", epoch=epoch, published=self.ledger.applied, wall_time_ns=0)


class Reader:
    """A sequencer with its row collector, and the stream it reads."""

    def __init__(self, sequencer: Sequencer, stored: int = 0) -> None:
        self.sequencer = sequencer
        self.rows = RowCollector("KVBM", stored)
        self.sequence = self.sequencer.sequence

    def step(self, now_s: float, messages: Sequence[StreamMessage], at_end: bool = False) -> Changes:
        step = self.sequencer.step(now_s, messages, at_end)
        self.rows.take(step)
        return step

    def take_batch(self) -> StoreBatch | None:
        return self.rows.take_batch(self.sequencer.safe_mark(), self.sequencer.rows)

    def read(self, *frames: Frame, now_s: float = 0.0, at_end: bool = False) -> Changes:
        return self.read_bytes(*(encode_frame(frame) for frame in frames), now_s=now_s, at_end=at_end)

    def read_bytes(self, *data: bytes, now_s: float = 0.0, at_end: bool = False, name: str = ONE) -> Changes:
        messages = []
        for one in data:
            self.sequence += 1
            messages.append(StreamMessage(self.sequence, f"kvbm.v1.events.c.{name}", one))
        return self.step(now_s, messages, at_end)

    @property
    def index(self) -> ClusterIndex:
        return self.sequencer.index

    def depth(self, *numbers: int) -> int:
        return self.index.prefixes(NAMESPACE.id, hashes(*numbers)).deepest

    def in_step(self, instance: Instance) -> bool:
        view = self.index.view(instance.name)
        return view is not None and view.digest == instance.ledger.residencies.digest

    def is_suspect(self) -> bool:
        return is_suspect(self.index, ONE)


def five_frames() -> tuple[Instance, list[Frame]]:
    instance = Instance()
    for number in range(1, 5):
        instance.create(number)
    return instance, instance.frames


@each_twin
def test_frames_in_order_are_applied_and_positions_follow(twin: Twin) -> None:
    instance, frames = five_frames()
    reader = Reader(twin.sequencer())
    step = reader.read(*frames)
    assert step.advanced == {ONE: Position(Epoch(1), instance.ledger.applied)}
    assert reader.sequencer.position(ONE) == (1, instance.ledger.applied)
    assert reader.depth(1, 2, 3, 4, 5) == 4
    assert not reader.is_suspect()
    assert reader.sequencer.counters.frames == 5
    assert reader.sequencer.counters.blocks == 4


@each_twin
def test_a_message_may_hold_several_frames(twin: Twin) -> None:
    _, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read_bytes(b"".join(map(encode_frame, frames)))
    assert reader.depth(1, 2, 3, 4) == 4


@each_twin
def test_repeats_and_older_frames_change_nothing(twin: Twin) -> None:
    instance, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*frames, *frames[2:], frames[0])
    assert reader.in_step(instance)
    assert reader.sequencer.counters.repeats == 4
    assert reader.sequencer.counters.digest_mismatches == 0


@each_twin
def test_a_publisher_that_goes_back_leaves_no_trace(twin: Twin) -> None:
    """Its stream is 0 1 3 4 2 3 4."""
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    step = reader.read(f[0], f[1], f[3], f[4], at_end=True)
    assert step.advanced[ONE] == (1, f[1].next_offset)
    assert reader.is_suspect()
    assert reader.depth(1, 2, 3, 4) == 1
    reader.read(f[2])
    assert reader.in_step(instance)
    assert not reader.is_suspect()
    reader.read(f[3], f[4], now_s=100.0, at_end=True)
    counters = reader.sequencer.counters
    assert (counters.holes, counters.gaps, counters.repeats) == (1, 0, 2)


@each_twin
def test_a_hole_becomes_a_gap_when_a_heartbeat_lies_past_it_and_the_reader_is_at_the_end(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[3], f[4], at_end=True)
    assert not reader.read(now_s=20.0, at_end=True).gaps  # no heartbeat has said so
    reader.sequencer.on_heartbeat(50.0, instance.heartbeat())
    assert not reader.read(now_s=50.5, at_end=True).gaps  # what it calls published may still be on its way
    assert not reader.read(now_s=51.5, at_end=False).gaps
    step = reader.read(now_s=51.5, at_end=True)
    assert [(gap.expected, gap.resumed) for gap in step.gaps] == [((1, f[2].first_offset), (1, f[3].first_offset))]
    assert reader.sequencer.counters.gaps == 1
    assert reader.is_suspect()
    assert reader.sequencer.position(ONE) == (1, instance.ledger.applied)
    assert reader.depth(1, 2, 3, 4) == 1
    reader.sequencer.on_heartbeat(60.0, instance.heartbeat())
    assert not reader.read(now_s=70.0, at_end=True).gaps


@each_twin
def test_a_frame_kept_behind_a_hole_does_not_keep_the_rest_of_its_message(twin: Twin) -> None:
    _, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1])
    reader.read_bytes(encode_frame(f[1]) * 1000 + encode_frame(f[3]))
    assert reader.sequencer._sequences[ONE].buffer.frames() == [encode_frame(f[3])]
    reader.read(f[2])
    assert reader.depth(1, 2, 3) == 3


def big_frames(first: Frame, count: int, blocks: int) -> list[Frame]:
    """Frames after one of an instance, each of which claims the same so many blocks of the cluster's pool."""
    packed = hashes(*range(blocks))
    claimed = BlocksCreated(namespace=NAMESPACE.id, tier=Tier.OBJECT, hashes=packed)
    offsets = [Offset(first.next_offset + number) for number in range(count)]
    return [msgspec.structs.replace(first, first_offset=offset, events=(claimed,)) for offset in offsets]


def test_the_reorder_buffer_has_a_bound_and_the_rest_is_read_when_it_comes_again() -> None:
    blocks = 32_768
    reader = Reader(NATIVE.sequencer())
    (start,) = Instance().frames
    missing, *behind = big_frames(start, 1 + REORDER_BYTES // (16 * blocks) + 8, blocks)
    reader.read(start)
    reader.read_bytes(*map(_native.encode_frame, behind), at_end=True)
    assert 0 < REORDER_BYTES - reader.sequencer._sequences[ONE].buffer.bytes < 2 * 16 * blocks
    reader.read_bytes(_native.encode_frame(missing))
    reached = reader.sequencer.position(ONE).offset
    assert behind[-9].first_offset <= reached < behind[-1].next_offset  # no frame that was let go counts as read
    assert reader.sequencer.counters.blocks == (reached - missing.first_offset) * blocks
    assert reader.sequencer._sequences[ONE].buffer.bytes == 0 and not reader.sequencer.is_waiting(ONE)
    reader.read_bytes(*map(_native.encode_frame, behind))  # the publisher has gone back
    assert reader.sequencer.position(ONE).offset == behind[-1].next_offset
    assert reader.sequencer.counters.blocks == (1 + len(behind)) * blocks
    assert reader.sequencer.counters.gaps == 0 and not reader.is_suspect()


def test_what_was_let_go_behind_a_hole_is_a_gap_where_it_does_not_come_again() -> None:
    blocks = 32_768
    reader = Reader(NATIVE.sequencer())
    instance = Instance()
    (start,) = instance.frames
    missing, *behind = big_frames(start, 1 + REORDER_BYTES // (16 * blocks) + 8, blocks)
    reader.read_bytes(*map(_native.encode_frame, (start, *behind, missing)))
    reached = reader.sequencer.position(ONE)
    published = instance.heartbeat()
    published = msgspec.structs.replace(published, published=behind[-1].next_offset)
    reader.sequencer.on_heartbeat(0.0, published)
    (gap,) = reader.read(now_s=2.0, at_end=True).gaps
    assert (gap.expected, gap.resumed) == (reached, None)
    assert reader.is_suspect()


@each_twin
def test_a_snapshot_after_a_gap_makes_the_instance_whole_again(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[3], f[4])
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    reader.read(now_s=2.0, at_end=True)
    assert reader.is_suspect()
    reader.read(instance.snapshot())
    assert not reader.is_suspect()
    assert reader.depth(1, 2, 3, 4) == 4
    assert reader.in_step(instance)


@each_twin
def test_a_lost_end_is_a_gap_and_whatever_comes_next_is_read(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:4])
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    (gap,) = reader.read(now_s=2.0, at_end=True).gaps
    assert gap.resumed is None
    for number in (6, 7):
        reader.read(instance.create(number))
    assert reader.sequencer.position(ONE) == (1, instance.ledger.applied)
    assert reader.depth(7) == 1
    assert reader.sequencer.counters.gaps == 1


@each_twin
def test_a_lost_end_is_found_once_however_often_it_is_looked_for(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:-1])
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    assert len(reader.read(now_s=2.0, at_end=True).gaps) == 1
    found = reader.sequencer.suspicions.found
    for now_s in (3.0, 50.0):
        reader.sequencer.on_heartbeat(now_s, instance.heartbeat())
        assert not reader.read(now_s=now_s + 1.5, at_end=True).gaps
    assert (reader.sequencer.counters.gaps, reader.sequencer.suspicions.found) == (1, found)


@each_twin
def test_of_a_frame_that_was_read_in_part_only_the_rest_is_applied(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[3], f[4])
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    reader.read(now_s=2.0, at_end=True)
    assert reader.is_suspect()
    whole = instance.snapshot()
    assert len(whole.events) > 2
    before = reader.sequencer.counters.events
    reader.read(msgspec.structs.replace(whole, events=whole.events[:2]))
    reader.read(whole)  # cut otherwise by a publisher that began anew
    assert reader.sequencer.counters.events == before + len(whole.events)
    assert not reader.is_suspect() and reader.in_step(instance)  # what was listed twice would not add up


@each_twin
def test_what_is_in_the_reorder_buffer_is_applied_before_an_epoch_that_only_a_heartbeat_names(twin: Twin) -> None:
    instance, f = five_frames()
    behind = instance.offload(1, 2)
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[2], behind)
    reader.sequencer.on_heartbeat(
        0.0, msgspec.structs.replace(instance.heartbeat(), epoch=Epoch(2), published=Offset(9))
    )
    (gap,) = reader.read(now_s=2.0, at_end=True).gaps
    assert gap.resumed is None and reader.sequencer.position(ONE) == (2, 0)
    assert reader.index.claim_counts() == {"pool": 2}  # claims outlive their epoch
    assert reader.depth(1, 2) == 2 and not reader.sequencer.is_waiting(ONE)
    view = reader.index.view(ONE)
    assert view is not None and view.epoch == 2 and view.digest == 0


@each_twin
def test_slow_reading_is_no_gap(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    for second, frame in enumerate(f, 1):
        reader.sequencer.on_heartbeat(second, instance.heartbeat())
        assert not reader.read(frame, now_s=10.0 * second).gaps
    assert not reader.read(now_s=1000.0, at_end=True).gaps


@each_twin
def test_a_new_epoch_begins_empty_and_the_old_one_is_stale(twin: Twin) -> None:
    old, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*frames)
    new = Instance(epoch=2)
    reader.read(*new.frames, old.create(9), new.create(8))
    assert reader.depth(1) == reader.depth(9) == 0
    assert reader.depth(8) == 1
    assert reader.sequencer.counters.stale == 1
    assert reader.sequencer.position(ONE) == (2, new.ledger.applied)
    assert not reader.is_suspect()


@each_twin
def test_an_epoch_joined_mid_stream_is_suspect_until_a_snapshot(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[2:])
    assert reader.depth(2, 3, 4) == 3
    assert reader.depth(1) == 0
    assert reader.is_suspect()
    assert reader.sequencer.counters.blind_starts == 1
    reader.read(instance.snapshot())
    assert reader.depth(1, 2, 3, 4) == 4
    assert not reader.is_suspect()


@each_twin
def test_an_epoch_whose_start_was_not_yet_there_is_read_again_from_its_start(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[1:3], *f)
    assert reader.in_step(instance)
    assert not reader.is_suspect()
    assert reader.depth(1, 2, 3, 4) == 4


@each_twin
def test_what_sql_knows_of_an_epoch_names_the_pools_its_lost_start_declared(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f)
    batch = reader.take_batch()
    assert batch is not None
    later = Reader(twin.sequencer(known=batch.instances))
    later.read(instance.offload(1, 2))
    assert later.index.claim_counts() == {"pool": 2}
    later.read(instance.snapshot())
    assert not later.is_suspect()
    forgetful = Reader(twin.sequencer())
    forgetful.read(instance.offload(3))
    assert forgetful.index.anomalies() == {"unnamed-claim": 1}


@each_twin
def test_claims_outlive_the_epoch_and_can_be_withdrawn_by_anyone(twin: Twin) -> None:
    one, two = Instance(), Instance(name=InstanceId("two"))
    one.create(1, 2)
    one.offload(1, 2)
    reader = Reader(twin.sequencer())
    reader.read(*one.frames)
    reader.read(*Instance(epoch=2).frames)
    assert reader.index.prefixes(NAMESPACE.id, hashes(1, 2)).pools == [("pool", 2)]
    two.ledger.forget(Tier.OBJECT, NAMESPACE.id, hashes(1), EvictReason.MISSING)
    two.cut()
    reader.read_bytes(*map(encode_frame, two.frames), name="two")
    assert reader.index.claim_counts() == {"pool": 1}
    batch = reader.take_batch()
    assert batch is not None
    assert [(run.hashes, run.instance, run.withdrawn) for run in batch.claims] == [
        (hashes(1, 2), "one", False),
        (hashes(1), "two", True),
    ]


@each_twin
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not a frame",
        lambda data: data[:-3],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:4] + b"\xff\x00" + data[6:],
        lambda data: data + b"tail",
    ],
)
def test_damaged_messages_are_counted_and_skipped(twin: Twin, damage) -> None:  # type: ignore[no-untyped-def]
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f)
    last = encode_frame(instance.create(7))
    reader.read_bytes(damage(last))
    assert reader.sequencer.counters.poison == (1 if damage(last) else 0)
    reader.read_bytes(last)
    assert reader.in_step(instance)


@each_twin
@pytest.mark.parametrize(
    ("change", "counted"),
    [({"instance": InstanceId("other")}, (0, 1)), ({"epoch": Epoch(0)}, (1, 0)), ({"first_offset": Offset(9)}, (1, 0))],
)
def test_a_frame_that_cannot_be_this_instances_is_refused(
    twin: Twin, change: dict[str, object], counted: tuple[int, int]
) -> None:
    reader = Reader(twin.sequencer())
    reader.read(msgspec.structs.replace(Instance().frames[0], **change))
    assert (reader.sequencer.counters.poison, reader.sequencer.counters.foreign) == counted
    assert reader.sequencer.instances() == []


@each_twin
def test_a_digest_that_differs_makes_the_instance_suspect_until_a_snapshot(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:4], msgspec.structs.replace(f[4], digest=f[4].digest ^ 1))
    assert reader.sequencer.counters.digest_mismatches == 1
    assert reader.is_suspect()
    reader.read(instance.create(6))
    assert reader.sequencer.counters.digest_mismatches == 1
    reader.read(instance.snapshot())
    assert not reader.is_suspect()


@each_twin
def test_usage_whose_digest_nobody_knows_makes_nothing_suspect_and_leaves_the_one_before(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    end, digest = f[4].next_offset, f[4].digest
    usage = UsageRecorded(since_ms=0, until_ms=1, rows=())
    reader.read(*f, msgspec.structs.replace(f[4], first_offset=end, digest=UNKNOWN_DIGEST, events=(usage,)))
    assert reader.sequencer.counters.digest_mismatches == 0 and not reader.is_suspect()
    batch = reader.take_batch()
    assert batch is not None
    assert [(row.next_offset, row.digest) for row in batch.epochs] == [(end + 1, digest)]
    assert instance.ledger.applied == end


@each_twin
def test_the_batch_says_how_things_are_at_its_end(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    assert reader.take_batch() is None
    reader.read(*f)
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.stream, batch.previous, batch.stream_sequence) == ("KVBM", 0, 5)
    (row,) = batch.instances
    assert (row.id, row.cluster, row.epoch, row.pools, row.topology) == (ONE, "c", 1, POOLS, ("rack-1",))
    (epoch,) = batch.epochs
    assert (epoch.next_offset, epoch.digest) == (instance.ledger.applied, instance.ledger.residencies.digest)
    assert [row.fields for row in batch.namespaces] == [NAMESPACE]
    assert [(p.instance, p.epoch, p.next_offset) for p in batch.positions] == [(ONE, 1, instance.ledger.applied)]
    assert reader.take_batch() is None
    instance.ledger.stop()
    reader.read(instance.cut())
    ended = reader.take_batch()
    assert ended is not None
    assert (ended.previous, ended.stream_sequence) == (5, 6)
    assert ended.instances[0].state is InstanceStatus.STOPPED
    assert ended.epochs[0].end_reason == "shutdown"


@each_twin
def test_what_sql_has_is_not_gathered_again(twin: Twin) -> None:
    instance, f = five_frames()
    instance.offload(1)
    reader = Reader(twin.sequencer(), stored=6)
    reader.read(*f)
    assert reader.take_batch() is None
    reader.read(instance.offload(2))
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.previous, batch.stream_sequence) == (6, 7)
    assert [run.hashes for run in batch.claims] == [hashes(2)]
    assert reader.index.claim_counts() == {"pool": 2}


@each_twin
def test_a_batch_ends_before_what_is_in_the_reorder_buffer_so_that_a_new_start_reads_it_again(twin: Twin) -> None:
    instance, f = five_frames()
    claim = instance.offload(1)
    reader = Reader(twin.sequencer())
    reader.read(*f[:3], *f[4:], claim)
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.stream_sequence, batch.claims) == (3, ())
    assert reader.take_batch() is None
    reader.read(f[3])
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.previous, batch.stream_sequence, len(batch.claims)) == (3, 6 + 1, 1)


@each_twin
def test_frames_in_the_reorder_buffer_go_through_a_checkpoint(twin: Twin) -> None:
    """Who begins with it and has no SQL would never hear of their claims."""
    instance, f = five_frames()
    claim = instance.offload(1)
    first = Reader(twin.sequencer())
    first.read(*f[:3], *f[4:], claim)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(first.sequencer.state()), type=SequencerState)
    second = Reader(twin.sequencer())
    second.read(*f[:3])
    index = second.sequencer.index
    later = Sequencer(index, first.sequencer._scan_frames)
    later.restore(state, settled=5)
    assert later.is_waiting(ONE)
    assert later.safe_mark() == first.sequencer.safe_mark()
    assert not sum(index.claim_counts().values())
    later.pass_holes()
    assert later.position(ONE) == Position(claim.epoch, Offset(claim.first_offset + len(claim.events)))
    assert sum(index.claim_counts().values()) == 1


@each_twin
def test_a_place_is_kept_with_the_message_there_and_goes_through_a_checkpoint(twin: Twin) -> None:
    _, f = five_frames()
    messages = [
        StreamMessage(at, "kvbm.v1.events.c.one", encode_frame(frame), 1000 + at) for at, frame in enumerate(f, 1)
    ]
    reader = Reader(twin.sequencer())
    sequencer = reader.sequencer
    assert sequencer.mark == START
    reader.step(0.0, [*messages[:3], messages[4]._replace(sequence=4)])  # the second but last is missing
    batch = reader.take_batch()
    assert batch is not None
    assert Mark(batch.stream_sequence, batch.fingerprint) == mark_of(
        messages[2]
    )  # before what is in the reorder buffer
    assert sequencer.mark == mark_of(messages[4]._replace(sequence=4))
    reader.step(0.0, [messages[3]._replace(sequence=5)])
    batch = reader.take_batch()
    assert batch is not None
    assert Mark(batch.stream_sequence, batch.fingerprint) == sequencer.mark
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(sequencer.state()), type=SequencerState)
    later = twin.sequencer()
    later.restore(state, settled=5)
    assert later.mark == sequencer.mark
    joined = twin.sequencer()
    joined.restore_positions(sequencer.mark, ())
    assert (joined.mark, joined.sequence) == (sequencer.mark, 5)


@each_twin
def test_no_batch_names_a_place_of_a_history_that_is_gone(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:3], f[4])
    assert reader.take_batch() is not None
    reader.sequence = 0  # the server has lost all and is told it again
    assert reader.read(*f[:2]).renumbered
    reader.rows.renumber("KVBM#2", 0)
    assert reader.take_batch() is None
    reader.read(*f[2:4])
    batch = reader.take_batch()
    assert batch is not None
    assert Mark(batch.stream_sequence, batch.fingerprint) == reader.sequencer.mark
    assert batch.positions[0].next_offset == instance.ledger.applied


@each_twin
def test_claims_in_the_reorder_buffer_outlive_the_epoch_that_went_on_behind_a_hole(twin: Twin) -> None:
    instance, f = five_frames()
    claim = instance.offload(1)
    reader = Reader(twin.sequencer())
    reader.read(*f[:3], claim, *Instance(epoch=2).frames)
    assert reader.index.claim_counts() == {"pool": 1}
    batch = reader.take_batch()
    assert batch is not None
    assert [run.hashes for run in batch.claims] == [hashes(1)]
    assert not reader.is_suspect()


@each_twin
def test_holes_are_passed_one_behind_the_other(twin: Twin) -> None:
    instance, f = five_frames()
    claim = instance.offload(1)
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[2], f[4], claim)
    reader.rows.take(reader.sequencer.pass_holes())
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.stream_sequence, len(batch.claims)) == (4, 1)
    assert batch.positions[0].next_offset == instance.ledger.applied


@each_twin
def test_a_hole_nobody_speaks_of_is_given_up_in_the_end(twin: Twin) -> None:
    _, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:3], f[4], now_s=0.0, at_end=True)
    assert not reader.read(now_s=HOLE_MOST_S - 1, at_end=True).gaps
    (gap,) = reader.read(now_s=HOLE_MOST_S, at_end=True).gaps
    assert gap.resumed == Position(Epoch(1), f[4].first_offset)
    assert is_suspect(reader.index, ONE)
    batch = reader.take_batch()
    assert batch is not None
    assert batch.stream_sequence == 4


@each_twin
def test_an_epoch_that_ends_without_a_word_is_ended_by_the_next(twin: Twin) -> None:
    reader = Reader(twin.sequencer())
    reader.read(*Instance().frames, *Instance(epoch=3).frames)
    batch = reader.take_batch()
    assert batch is not None
    assert [(row.epoch, row.end_reason) for row in batch.epochs] == [(1, "replaced"), (3, "")]


@each_twin
def test_an_epoch_that_ended_keeps_its_end_when_the_next_begins_in_the_same_batch(twin: Twin) -> None:
    first = Instance()
    first.ledger.stop()
    first.cut()
    reader = Reader(twin.sequencer())
    reader.read(*first.frames, *Instance(epoch=2).frames)
    batch = reader.take_batch()
    assert batch is not None
    assert [(row.epoch, row.end_reason) for row in batch.epochs] == [(1, "shutdown"), (2, "")]


@each_twin
def test_a_stream_that_begins_anew_is_told(twin: Twin) -> None:
    _, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f)
    reader.sequence = 0
    assert reader.read(f[0]).renumbered
    reader.rows.renumber("KVBM#2", 0)
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.stream, batch.previous, batch.stream_sequence) == ("KVBM#2", 0, 1)


@each_twin
def test_a_gap_is_a_trouble_until_a_snapshot_and_counts_as_repaired_then(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[3], f[4])
    assert not reader.sequencer.suspicions.by_instance  # the hole may still be filled
    assert reader.sequencer.is_waiting(ONE)
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    reader.read(now_s=2.0, at_end=True)
    assert {name: trouble.reasons() for name, trouble in reader.sequencer.suspicions.by_instance.items()} == {
        ONE: ["events missed"]
    }
    reader.read(instance.create(6))
    assert reader.sequencer.suspicions.by_instance
    reader.read(instance.snapshot())
    assert not reader.sequencer.suspicions.by_instance
    assert reader.sequencer.counters.gaps_repaired == reader.sequencer.counters.gaps == 1


@each_twin
def test_a_divergence_is_a_trouble_until_a_snapshot_and_counts_as_repaired_then(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:4], msgspec.structs.replace(f[4], digest=f[4].digest ^ 1))
    assert reader.sequencer.suspicions.by_instance[ONE].reasons() == ["digest differs"]
    reader.sequencer.suspicion(ONE)
    assert reader.sequencer.suspicions.by_instance[ONE].found == 2
    reader.read(instance.snapshot())
    assert not reader.sequencer.suspicions.by_instance
    assert reader.sequencer.counters.digest_repaired == 2


@each_twin
def test_a_start_ends_the_troubles_of_the_epoch_before(twin: Twin) -> None:
    _, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[2:])
    assert reader.sequencer.suspicions.by_instance[ONE].reasons() == ["joined midway"]
    reader.read(*Instance(epoch=2).frames)
    assert not reader.sequencer.suspicions.by_instance


@each_twin
def test_an_old_epochs_lost_end_is_forgotten_when_the_newer_one_is_said_to_be_published(twin: Twin) -> None:
    """A restarted instance whose old tail was never published: the old hole must not stand for what the new epoch
    sends.
    """
    old, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], at_end=True)
    reader.sequencer.on_heartbeat(0.0, old.heartbeat())
    new = Instance(epoch=2)
    reader.sequencer.on_heartbeat(0.5, new.heartbeat())
    assert not reader.read(now_s=1.2, at_end=True).gaps  # the newer word is young
    reader.read(*new.frames, new.create(7), at_end=True, now_s=1.3)
    assert not reader.read(now_s=50.0, at_end=True).gaps
    assert reader.sequencer.counters.gaps == 0
    assert not reader.is_suspect()


@each_twin
def test_a_heartbeat_of_an_older_epoch_says_nothing_of_the_newer(twin: Twin) -> None:
    old, _ = five_frames()
    new = Instance(epoch=2)
    reader = Reader(twin.sequencer())
    reader.read(*new.frames)
    reader.sequencer.on_heartbeat(0.0, old.heartbeat())
    assert not reader.read(now_s=50.0, at_end=True).gaps


@each_twin
def test_an_epoch_that_was_never_restated_after_sql_alone_is_suspect_until_its_snapshot(twin: Twin) -> None:
    instance, f = five_frames()
    first = Reader(twin.sequencer())
    first.read(*f)
    batch = first.take_batch()
    assert batch is not None
    later = Reader(twin.sequencer(known=batch.instances), stored=5)
    later.sequencer.restore_positions(Mark(5), batch.positions)
    later.sequence = 5
    assert later.sequencer.position(ONE) == (1, instance.ledger.applied)
    assert later.is_suspect() and later.sequencer.suspicions.by_instance[ONE].reasons() == ["joined midway"]
    later.read(instance.create(6))
    assert later.sequencer.counters.gaps == later.sequencer.counters.holes == 0
    later.read(instance.snapshot())
    assert later.depth(1, 2, 3, 4) == 4
    assert not later.is_suspect() and not later.sequencer.suspicions.by_instance


@each_twin
def test_an_instance_that_sql_says_has_stopped_is_not_asked_to_restate(twin: Twin) -> None:
    instance, _ = five_frames()
    instance.ledger.stop()
    instance.cut()
    first = Reader(twin.sequencer())
    first.read(*instance.frames)
    batch = first.take_batch()
    assert batch is not None
    later = Reader(twin.sequencer(known=batch.instances), stored=6)
    later.sequencer.restore_positions(Mark(6), batch.positions)
    assert not later.sequencer.suspicions.by_instance


@each_twin
def test_rows_that_were_dropped_are_gathered_again_from_where_another_has_read_them(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f, instance.offload(1))
    assert reader.rows.waiting_bytes > 0
    reader.rows.drop_rows()
    assert reader.rows.waiting_bytes == 0
    reader.read(instance.offload(2))
    assert reader.take_batch() is None
    reader.rows.gather_after(8)
    reader.read(instance.offload(3), instance.offload(4))
    batch = reader.take_batch()
    assert batch is not None
    assert (batch.previous, batch.stream_sequence) == (8, 9)
    assert [run.hashes for run in batch.claims] == [hashes(4)]


@each_twin
def test_what_waits_behind_a_hole_is_read_when_nobody_waits_for_the_hole(twin: Twin) -> None:
    instance, f = five_frames()
    offload = instance.offload(1)
    reader = Reader(twin.sequencer())
    reader.read(f[0], f[1], f[3], f[4], offload)
    reader.rows.take(reader.sequencer.pass_holes())
    batch = reader.take_batch()
    assert batch is not None
    assert [run.hashes for run in batch.claims] == [hashes(1)]
    assert reader.sequencer.position(ONE) == (1, instance.ledger.applied)


def test_a_sequencer_goes_on_from_its_state_and_its_indexs_checkpoint(tmp_path: Path) -> None:
    instance, f = five_frames()
    one = Reader(NATIVE.sequencer())
    one.read(*f[:3])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(one.sequencer.state()), type=SequencerState)
    one.read(f[3], f[4])  # the blocks in the checkpoint are newer than the state
    path = tmp_path / "checkpoint"
    index = one.index
    assert isinstance(index, _native.ClusterIndex)
    index.write_checkpoint(str(path))
    again = _native.ClusterIndex(1000)
    again.load_checkpoint(str(path))
    two = Reader(NATIVE.sequencer(again))
    two.sequencer.restore(state, settled=5)
    two.sequence = 3
    assert two.sequencer.position(ONE) == (1, f[2].next_offset)
    assert two.sequencer.declared(ONE) == one.sequencer.declared(ONE)
    two.read(f[3], f[4])
    assert two.in_step(instance)
    assert not two.is_suspect()
    assert two.sequencer.counters.digest_mismatches == 0
    two.read(msgspec.structs.replace(instance.create(9), digest=1))
    assert two.sequencer.counters.digest_mismatches == 1


@each_twin
def test_a_hole_that_goes_through_a_checkpoint_is_filled_or_becomes_a_gap(twin: Twin) -> None:
    instance, f = five_frames()
    one = Reader(twin.sequencer())
    one.read(f[0], f[1], f[3])
    state = one.sequencer.state()
    assert one.sequencer.is_waiting(ONE)
    for goes_back in (True, False):
        index = twin.index()
        for frame in f[:2]:
            index.apply(encode_frame(frame))
        two = Reader(twin.sequencer(index))
        two.sequencer.restore(state, settled=3)
        two.sequence = 3
        assert two.sequencer.is_waiting(ONE)
        two.sequencer.on_heartbeat(0.0, instance.heartbeat())
        two.read(*(f[2:] if goes_back else f[4:]), at_end=True, now_s=0.5)
        gaps = two.read(at_end=True, now_s=2.0).gaps
        assert bool(gaps) is not goes_back
        assert two.in_step(instance) is goes_back
        assert bool(two.sequencer.suspicions.by_instance) is not goes_back


@each_twin
def test_an_instance_whose_index_wants_a_snapshot_is_in_trouble_after_a_restore(twin: Twin) -> None:
    _, f = five_frames()
    one = Reader(twin.sequencer())
    one.read(*f)
    state = one.sequencer.state()
    one.index.miss(ONE)  # an audit found it between the state and the checkpoint's front
    two = Reader(twin.sequencer(one.index))
    two.sequencer.restore(state, settled=5)
    assert two.sequencer.suspicions.by_instance[ONE].reasons() == ["no completed snapshot"]


# -- lives -------------------------------------------------------------------------------------------------------------


def life(reader: Reader, epoch: int, run: str, log: tuple[tuple[int, str], ...] = ()) -> Changes:
    """Read a fence."""
    reader.sequence += 1
    data = fence_data(Epoch(epoch), run, tuple((Epoch(number), who) for number, who in log))
    return reader.step(0.0, [StreamMessage(reader.sequence, "kvbm.v1.fence.c.one", data)])


@each_twin
def test_an_epoch_of_a_smaller_number_counts_when_a_fence_says_whose_it_is(twin: Twin) -> None:
    reader = Reader(twin.sequencer())
    old, new = Instance(epoch=5), Instance(epoch=1)
    old.create(1, 2)
    new.create(3)
    life(reader, 5, "old")
    reader.read(*old.frames)
    reader.read(*new.frames)
    assert reader.sequencer.counters.stale == 2 and reader.depth(1, 2) == 2  # nothing says that these are another's
    life(reader, 1, "new")
    assert reader.depth(1, 2) == 0 and reader.is_suspect()
    reader.read(*new.frames)
    assert reader.sequencer.position(ONE) == (1, new.ledger.applied)
    assert reader.in_step(new) and not reader.is_suspect()
    assert (reader.depth(1, 2), reader.depth(3)) == (0, 1)
    assert reader.sequencer.ownership(ONE) == ("new", 1) and reader.sequencer.counters.lives == 1


@each_twin
def test_an_epoch_of_one_number_that_two_runs_began_is_read_of_the_one_that_has_the_place(twin: Twin) -> None:
    """The server has lost its end: the first one's fence, and events that were read."""
    reader = Reader(twin.sequencer())
    first, second = Instance(epoch=2), Instance(epoch=2)
    first.create(1, 2, 3)
    second.create(4)
    life(reader, 2, "first")
    reader.read(*first.frames)
    life(reader, 3, "second", ((2, "second"), (3, "second")))
    reader.read(*second.frames)
    assert reader.in_step(second) and not reader.is_suspect()
    assert (reader.depth(1, 2, 3), reader.depth(4)) == (0, 1)


@each_twin
@pytest.mark.parametrize("is_gap_found", [False, True])
def test_what_the_life_before_called_published_is_not_waited_for(twin: Twin, is_gap_found: bool) -> None:
    """The stream is another: the old end was heard before the new fence was read."""
    reader = Reader(twin.sequencer())
    old, new = Instance(), Instance()
    old.create(1, 2)
    said = msgspec.structs.replace(old.heartbeat(), published=Offset(200), run="old")
    reader.sequencer.on_heartbeat(0.0, said)
    if is_gap_found:
        assert reader.read(now_s=20.0, at_end=True).gaps
    life(reader, 1, "new")
    reader.sequencer.on_heartbeat(21.0, said)  # a zombie's, or one that was kept
    reader.read(*new.frames, new.create(3), at_end=True, now_s=21.0)
    assert not reader.read(now_s=50.0, at_end=True).gaps
    assert reader.in_step(new) and not reader.is_suspect()


@each_twin
def test_all_namespaces_are_given_out_again_with_all_rows(twin: Twin) -> None:
    reader, instance = Reader(twin.sequencer()), Instance()
    reader.read(*instance.frames)
    reader.take_batch()
    reader.rows.add_instances(reader.sequencer.followed)
    reader.rows.add_namespaces(reader.sequencer.namespaces(), seen_ns=1)
    reader.read(instance.create(1))
    batch = reader.take_batch()
    assert batch is not None
    assert [row.id for row in batch.namespaces] == [NAMESPACE.id]


@each_twin
def test_a_restart_goes_on_with_the_log_that_was_read(twin: Twin) -> None:
    """What is not on the stream yet of the epoch before comes first."""
    reader = Reader(twin.sequencer())
    instance, after = Instance(epoch=2), Instance(epoch=3)
    instance.create(1)
    life(reader, 2, "before")
    reader.read(*instance.frames)
    life(reader, 3, "after", ((2, "before"), (3, "after")))
    assert reader.depth(1) == 1 and not reader.is_suspect()
    instance.create(2)
    reader.read(instance.frames[-1])
    assert reader.in_step(instance)
    reader.read(*after.frames)
    assert reader.in_step(after) and not reader.sequencer.counters.lives


@each_twin
def test_rows_of_frames_that_were_read_before_their_fence_tell_whose_they_are(twin: Twin) -> None:
    """Trimming has taken the first fence: a row that names nobody would change none of another life's."""
    reader, instance = Reader(twin.sequencer()), Instance()
    reader.read(*instance.frames)
    before = reader.take_batch()
    assert before is not None and before.instances[0].run == before.epochs[0].run == ""
    life(reader, 1, "one's")  # its publisher sets it again
    batch = reader.take_batch()
    assert batch is not None
    assert [row.run for row in (*batch.instances, *batch.epochs, *batch.positions)] == ["one's"] * 3


def send(reader: Reader, fence: Fence, *frames: Frame) -> Changes:
    """Read frames whose publisher named a fence."""
    messages = []
    for frame in frames:
        reader.sequence += 1
        messages.append(StreamMessage(reader.sequence, "kvbm.v1.events.c.one", encode_frame(frame), fence=fence))
    return reader.step(0.0, messages)


@each_twin
def test_a_message_whose_fence_had_its_number_in_another_history_is_a_stray(twin: Twin) -> None:
    """The stream was made anew while it was on its way: by number alone the server takes it for the holder's."""
    reader, old, new = Reader(twin.sequencer()), Instance(), Instance()
    old.create(1, 2)
    new.create(3)
    late = old.create(4)
    life(reader, 1, "new")
    send(reader, Fence(Epoch(1), "new", 1), *new.frames)
    send(reader, Fence(Epoch(1), "old", 1), *old.frames[:2], late)
    assert reader.sequencer.counters.strays == 3
    assert reader.in_step(new) and not reader.is_suspect()
    assert (reader.depth(3), reader.depth(1, 2)) == (1, 0)
    send(reader, Fence(Epoch(1), "new", 1), new.create(5))
    assert reader.in_step(new) and not reader.is_suspect()


@each_twin
def test_a_fence_that_the_server_has_lost_gives_the_place_back_to_the_run_before(twin: Twin) -> None:
    """What its messages name is proof; until it takes a snapshot of what it holds, what is known of it is a part."""
    reader, older, newer = Reader(twin.sequencer()), Instance(epoch=2), Instance(epoch=3)
    older.create(1, 2)
    newer.create(3)
    life(reader, 2, "older")
    send(reader, Fence(Epoch(2), "older", 1), *older.frames)
    life(reader, 3, "newer")
    lost = reader.sequence
    send(reader, Fence(Epoch(3), "newer", lost), *newer.frames)
    assert reader.depth(3) == 1
    send(reader, Fence(Epoch(2), "older", 1), older.create(4))
    assert reader.sequencer.counters.lives == 1
    assert reader.sequencer.ownership(ONE).run == "older"
    assert reader.depth(3) == 0 and reader.is_suspect()
    send(reader, Fence(Epoch(2), "older", 1), older.snapshot())
    assert reader.in_step(older) and not reader.is_suspect()
    assert (reader.depth(1, 2), reader.depth(4)) == (2, 1)


@each_twin
def test_a_reader_that_joins_mid_stream_learns_whose_events_it_reads_from_the_first_of_them(twin: Twin) -> None:
    reader, instance = Reader(twin.sequencer()), Instance()
    send(reader, Fence(Epoch(1), "one's", 77), *instance.frames)
    batch = reader.take_batch()
    assert batch is not None and batch.instances[0].run == batch.positions[0].run == "one's"


@each_twin
def test_who_began_an_epoch_is_known_after_a_checkpoint_and_from_sql(twin: Twin) -> None:
    reader = Reader(twin.sequencer())
    first, second = Instance(epoch=2), Instance(epoch=2)
    first.create(1, 2)
    second.create(3)
    life(reader, 2, "first")
    reader.read(*first.frames)
    state, batch = reader.sequencer.state(), reader.take_batch()
    assert batch is not None and batch.positions[0].run == batch.instances[0].run == batch.epochs[0].run == "first"
    loaded = Reader(twin.sequencer(reader.index))
    loaded.sequencer.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SequencerState), settled=0)
    stored = Reader(twin.sequencer(known=batch.instances), stored=3)
    stored.sequencer.restore_positions(Mark(3), batch.positions)
    for later in (stored, loaded):
        later.sequence = 3
        life(later, 2, "second")
        later.read(*second.frames)
        assert later.in_step(second) and not later.is_suspect()
        assert (later.depth(1, 2), later.depth(3)) == (0, 1)


@each_twin
@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        fence_data(Epoch(-1), "z"),
        fence_data(Epoch(1 << 63), "z"),
        fence_data(Epoch(0), "z" * 70_000),
        fence_data(Epoch(0), "z", ((Epoch(-2), "y"),)),
        fence_data(Epoch(0), "z", tuple((Epoch(number), "y") for number in range(1000))),
    ],
)
def test_a_fence_that_is_none_is_poison_and_changes_nothing(twin: Twin, data: bytes) -> None:
    reader = Reader(twin.sequencer())
    instance, frames = five_frames()
    reader.read(*frames)
    reader.sequence += 1
    reader.step(0.0, [StreamMessage(reader.sequence, "kvbm.v1.fence.c.one", data)])
    assert reader.in_step(instance) and reader.sequencer.counters.poison == 1


# -- frames of a newer kvbm --------------------------------------------------------------------------------------------


def newer(frame: Frame, version: int = VERSION + 1) -> bytes:
    """A frame as a newer kvbm may write it: what lies behind its header means nothing to this one."""
    data = encode_frame(frame)
    data = data[:4] + version.to_bytes(2, "little") + data[6:-4]
    return data + _native.crc32c(data).to_bytes(4, "little")


@each_twin
def test_an_epoch_with_a_newer_frame_is_unreadable_and_the_next_one_is_read(twin: Twin) -> None:
    one, later = Instance(), Instance(epoch=2)
    reader = Reader(twin.sequencer())
    reader.read(*one.frames, one.create(1))
    step = reader.read_bytes(newer(one.create(2)))
    read = Position(Epoch(1), one.frames[1].next_offset)
    assert step.advanced == {ONE: read}  # it is told that something of it is new
    found = reader.sequencer.unreadable(ONE)
    assert found is not None and found.reason() == (
        f"epoch 1 has frames of version {VERSION + 1}; this catalog reads up to {VERSION}: upgrade the catalog"
    )
    reader.read(one.create(3), one.snapshot(), at_end=True)
    reader.sequencer.on_heartbeat(5.0, one.heartbeat())
    assert reader.read(now_s=60.0, at_end=True).gaps == []  # no endless gaps
    counters = reader.sequencer.counters
    assert (counters.newer, counters.poison, counters.gaps, counters.holes) == (3, 0, 0, 0)
    assert reader.sequencer.suspicions.by_instance == {}  # nobody asks for a snapshot that cannot be read
    assert reader.sequencer.position(ONE) == read
    reader.read(*later.frames, later.create(4))
    assert reader.sequencer.unreadable(ONE) is None
    assert reader.sequencer.position(ONE) == Position(Epoch(2), later.frames[-1].next_offset)
    view = reader.sequencer.index.view(ONE)
    assert view is not None and not view.missed and view.digest == later.frames[-1].digest


@each_twin
def test_a_start_of_a_newer_kvbm_makes_its_epoch_unreadable_and_not_the_one_before_again(twin: Twin) -> None:
    one, later, last = Instance(), Instance(epoch=2), Instance(epoch=3)
    reader = Reader(twin.sequencer())
    reader.read(*one.frames)
    reader.read_bytes(newer(later.frames[0]))
    reader.read(later.create(1))  # in a version that is known: its epoch is not
    reader.read_bytes(newer(one.create(1)))
    found = reader.sequencer.unreadable(ONE)
    assert found is not None and found.epoch == 2
    assert reader.sequencer.position(ONE) == Position(Epoch(1), one.frames[0].next_offset)
    reader.read(*last.frames)
    assert reader.sequencer.unreadable(ONE) is None
    reader.read_bytes(newer(later.create(2)))  # of an epoch that is over
    assert reader.sequencer.unreadable(ONE) is None


@each_twin
def test_an_instance_of_which_only_newer_frames_were_read_is_named(twin: Twin) -> None:
    reader = Reader(twin.sequencer())
    reader.read_bytes(newer(Instance(epoch=4).frames[0]))
    assert reader.sequencer.instances() == [ONE]
    assert reader.sequencer.position(ONE) == Position(Epoch(0), Offset(0))
    view = reader.sequencer.index.view(ONE)
    assert view is not None and view.missed and not view.counts


@each_twin
def test_a_version_that_damage_has_changed_is_poison(twin: Twin) -> None:
    one = Instance()
    reader = Reader(twin.sequencer())
    reader.read(*one.frames)
    data = encode_frame(one.create(1))
    reader.read_bytes(data[:4] + b"\x09" + data[5:])
    assert reader.sequencer.unreadable(ONE) is None
    assert (reader.sequencer.counters.poison, reader.sequencer.counters.newer) == (1, 0)


def test_a_checkpoint_keeps_what_is_unreadable_and_an_upgraded_catalog_asks_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Instance()
    reader = Reader(NATIVE.sequencer())
    reader.read(*one.frames, one.create(1))
    reader.read_bytes(newer(one.create(2)))
    state = reader.sequencer.state()
    assert isinstance(reader.sequencer.index, _native.ClusterIndex)
    reader.sequencer.index.write_checkpoint(str(tmp_path / "index"), b"")

    def restored() -> Sequencer:
        sequencer = NATIVE.sequencer()
        assert isinstance(sequencer.index, _native.ClusterIndex)
        sequencer.index.load_checkpoint(str(tmp_path / "index"))
        sequencer.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SequencerState), 0)
        return sequencer

    same = restored()
    assert same.unreadable(ONE) == reader.sequencer.unreadable(ONE)
    assert same.suspicions.by_instance == {}
    monkeypatch.setattr(instance_sequence, "VERSION", VERSION + 1)
    upgraded = Reader(restored())
    assert upgraded.sequencer.unreadable(ONE) is None
    assert upgraded.sequencer.suspicions.by_instance[ONE].reasons() == ["no completed snapshot"]
    upgraded.read(one.create(3), one.snapshot())
    assert upgraded.sequencer.suspicions.by_instance == {}
    assert upgraded.sequencer.index.agrees(ONE, one.frames[-1].digest)


def mark_at(sequence: int, declared: InstanceRow | None = None) -> ForgottenRow:
    return ForgottenRow(instance=ONE, stream="KVBM", sequence=sequence, until_ns=0, declared=declared)


@each_twin
def test_who_was_forgotten_is_not_brought_back_by_what_it_said_before(twin: Twin) -> None:
    _, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*frames)
    assert reader.sequencer.spoke(ONE) == 5
    reader.sequencer.forget(mark_at(5))
    assert reader.sequencer.instances() == [] and reader.index.instances() == [] and reader.depth(1) == 0
    assert reader.sequencer.counters.forgotten == 1
    again = Reader(twin.sequencer())
    again.sequencer.expect(mark_at(5))
    changes = again.read(*frames)
    assert not changes.advanced and changes.lacks_claims  # which are in SQL
    assert again.sequencer.instances() == [] and again.depth(1) == 0


@each_twin
def test_a_later_message_of_a_forgotten_instance_makes_it_known_again(twin: Twin) -> None:
    instance, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*frames)
    row = reader.sequencer.instance_row(ONE)
    reader.sequencer.forget(mark_at(5, row))
    reader.read(instance.create(7))  # goes on in its epoch
    assert reader.sequencer.forgotten == {} and reader.is_suspect() and reader.depth(7) == 1
    assert list(reader.sequencer.suspicions.by_instance) == [ONE]  # a snapshot is asked for
    assert reader.sequencer.instance_row(ONE) is not None and row is not None
    view = reader.index.view(ONE)
    assert view is not None and view.pools == POOLS  # what its start had declared
    reader.read(instance.snapshot())
    assert reader.in_step(instance) and not reader.is_suspect() and reader.depth(1, 2, 3, 4) == 4


@each_twin
def test_a_gap_of_a_forgotten_instance_is_open_no_more(twin: Twin) -> None:
    instance, f = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*f[:4])
    reader.sequencer.on_heartbeat(0.0, instance.heartbeat())
    reader.read(now_s=2.0, at_end=True)
    counters = reader.sequencer.counters
    assert (counters.gaps, counters.gaps_repaired) == (1, 0) and reader.is_suspect()
    reader.sequencer.forget(mark_at(5))
    assert (counters.gaps, counters.gaps_repaired) == (1, 1)


@each_twin
def test_nothing_of_a_forgotten_instance_is_stale(twin: Twin) -> None:
    old = Instance(epoch=9)
    reader = Reader(twin.sequencer())
    reader.read(old.create(1))
    reader.sequencer.forget(mark_at(1))
    new = Instance(epoch=1)
    frame = new.create(2)
    reader.read(*new.frames)
    assert frame in new.frames and reader.sequencer.counters.stale == 0
    assert reader.in_step(new) and not reader.is_suspect()


@each_twin
def test_claims_of_a_forgotten_instance_stay(twin: Twin) -> None:
    instance = Instance()
    instance.create(1)
    instance.offload(1)
    reader = Reader(twin.sequencer())
    reader.read(*instance.frames)
    reader.sequencer.forget(mark_at(3))
    assert reader.index.claim_counts() == {"pool": 1}
    holders = reader.index.holders(NAMESPACE.id, hashes(1))  # type: ignore[arg-type]
    assert [holder.name for holder in holders] == ["pool"]


@each_twin
def test_who_is_forgotten_after_the_stream_was_renumbered_comes_back_with_its_next_message(twin: Twin) -> None:
    """The mark is the sequence of its last message, and of that of another history nothing may be made."""
    one, two = Instance(), Instance(name=InstanceId("two"))
    reader = Reader(twin.sequencer())
    reader.read(*one.frames, one.create(1), one.create(2), one.create(3))
    reader.sequence = 0
    assert reader.read_bytes(encode_frame(two.frames[0]), name="two").renumbered
    reader.sequencer.forget(mark_at(reader.sequencer.spoke(ONE)))
    assert reader.sequencer.instances() == [InstanceId("two")]
    frame = one.create(4)
    reader.read(frame)
    assert ONE in reader.sequencer.instances() and reader.depth(4) == 1
    assert ONE not in reader.sequencer.forgotten


@each_twin
def test_marks_are_void_in_a_stream_that_begins_anew_and_what_is_kept_of_an_instance_ends_with_its_mark(
    twin: Twin,
) -> None:
    instance, frames = five_frames()
    reader = Reader(twin.sequencer())
    reader.read(*frames)
    state = reader.sequencer.state()
    assert state.followed[0].spoke == 5
    reader.sequencer.forget(mark_at(5, reader.sequencer.instance_row(ONE)))
    reader.sequence = 0
    reader.read(*frames)
    assert reader.sequencer.instances() == [ONE] and reader.in_step(instance)
    reader.sequencer.forget(mark_at(5, reader.sequencer.instance_row(ONE)))
    reader.sequencer.expect_no_more(ONE)
    assert not reader.sequencer.forgotten and not reader.sequencer._known


# -- what one instance can do to others -------------------------------------------------------------------------------


def spaces(*numbers: int) -> list[Namespace]:
    return [Namespace(model=f"m{number}", block_tokens=16) for number in numbers]


def start_of(name: str, epoch: int, declared: Sequence[Namespace]) -> bytes:
    ledger = Ledger(POOLS)
    ledger.start(Epoch(epoch), list(declared), [], "engine", "0.1")
    return b"".join(frame.data for frame in ledger.take_frames(InstanceId(name), 1000))


def test_of_too_many_namespaces_those_that_nobody_declares_any_more_go_first() -> None:
    old, two, three = spaces(*range(4)), spaces(4, 5), spaces(6, 7, 8)
    declaring = [SimpleNamespace(names=SimpleNamespace(all={old[1].id, *(one.id for one in two)}))]
    known = KnownNamespaces(old, cast(Any, declaring), most=8)
    known.add(two)
    assert known.let_go == set()
    known.add(three)
    assert set(known.by_id.values()) == {old[1], *two, *three} or len(known.by_id) == 7
    assert known.take_let_go() == {old[0].id, old[2].id} and list(known.ids()) == sorted(known.by_id)
    declaring[0].names.all = {*known.by_id, spaces(9)[0].id}
    known.add(spaces(9, 10))
    assert len(known.by_id) == 8 and spaces(10)[0].id not in known.by_id  # all are declared: the last one has no room
    known.remove(list(known.by_id))
    assert (known.by_id, known._bytes, list(known.ids())) == ({}, 0, [])
    long = [Namespace(model=str(number) * 1000, block_tokens=16) for number in range(9)]
    known = KnownNamespaces((), most_bytes=8000)
    known.add(long)
    assert known._bytes <= 8000 and long[8].id in known.by_id and long[0].id not in known.by_id


def test_epochs_without_end_leave_bounded_namespaces_in_memory_and_on_the_way_to_sql() -> None:
    reader = Reader(NATIVE.sequencer())
    reader.sequencer.known_namespaces._most = 100
    reader.read_bytes(start_of("honest", 1, spaces(1_000_000)), name=InstanceId("honest"))
    for epoch in range(1, 51):
        reader.read_bytes(start_of("liar", epoch, spaces(*range(20 * epoch, 20 * epoch + 20))), name=InstanceId("liar"))
        assert len(reader.sequencer.namespaces()) <= 100
    assert spaces(1_000_000)[0].id in reader.sequencer.namespaces()
    assert reader.sequencer.declared(InstanceId("liar")) <= reader.sequencer.namespaces().keys()
    reader.read_bytes(start_of("other", 1, spaces(*range(2_000_000, 2_000_090))), name=InstanceId("other"))
    batch = reader.take_batch()
    assert batch is not None and reader.sequencer.counters.namespaces_refused == 11  # 100 less those of the two before
    assert len(reader.sequencer.namespaces()) == 100


def test_namespaces_go_with_the_last_who_declares_them() -> None:
    reader, (one, two, three) = Reader(NATIVE.sequencer()), spaces(1, 2, 3)
    reader.read_bytes(start_of("a", 1, [one, two]), name=InstanceId("a"))
    reader.read_bytes(start_of("b", 1, [two, three]), name=InstanceId("b"))
    assert reader.sequencer.known_namespaces.undeclared() == set()
    reader.read_bytes(start_of("a", 2, []), name=InstanceId("a"))
    assert reader.sequencer.known_namespaces.undeclared() == {one.id}
    reader.sequencer.drop(InstanceId("b"))
    assert reader.sequencer.known_namespaces.undeclared() == {one.id, two.id, three.id}
    instance = Instance()
    instance.create(1)
    reader.read(*instance.frames[1:])  # its start was not read: nobody knows what it declares
    assert reader.sequencer.known_namespaces.undeclared() == set()


def pulse_of(name: str, used: Sequence[Namespace] = (), told: Sequence[Namespace] = ()) -> Heartbeat:
    return Heartbeat(
        instance=InstanceId(name),
        cluster="c",
        epoch=Epoch(1),
        published=Offset(0),
        wall_time_ns=0,
        namespaces=tuple(one.id for one in used),
        told=tuple(one.canonical() for one in told),
    )


def telling(most: int) -> Reader:
    """A reader whose rows hear of what heartbeats tell, with room for so many namespaces."""
    reader = Reader(NATIVE.sequencer())
    known = reader.sequencer.known_namespaces
    known._most = most
    known.on_told = lambda told: reader.rows.add_namespaces(told, 1)
    known.on_gone = reader.rows.drop_namespaces
    return reader


def test_heartbeats_without_end_leave_bounded_namespaces_in_memory_and_on_the_way_to_sql() -> None:
    reader, (started, used) = telling(most=100), spaces(1_000_000, 1_000_001)
    reader.read_bytes(start_of("honest", 1, [started]), name=InstanceId("honest"))
    reader.sequencer.hear_namespaces(pulse_of("honest", [started, used], [used]))
    for number in range(0, 8000, 16):  # of which it names the last 1024: more than there is room for
        reader.sequencer.hear_namespaces(pulse_of("liar", told=spaces(*range(number, number + 16))))
        assert len(reader.sequencer.namespaces()) <= 100 and len(reader.rows._namespaces) <= 100
    assert {started.id, used.id} <= reader.sequencer.namespaces().keys()
    assert reader.sequencer.counters.namespaces_refused > 0 and len(reader.sequencer.known_namespaces.let_go) <= 100
    batch = reader.take_batch()
    assert batch is not None and {row.id for row in batch.namespaces} <= reader.sequencer.namespaces().keys()
    reader.sequencer.drop(InstanceId("liar"))
    known = reader.sequencer.known_namespaces
    assert known.undeclared() == known.by_id.keys() - {started.id, used.id}
    reader.sequencer.forget_namespaces(known.undeclared())
    reader.sequencer.hear_namespaces(pulse_of("late", told=spaces(9_000_000)))  # there is room again
    assert spaces(9_000_000)[0].id in reader.sequencer.namespaces()


def test_where_all_are_named_it_is_not_looked_for_room_at_each_that_has_none() -> None:
    class Counted(list[Any]):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            return super().__iter__()

    named = Counted([SimpleNamespace(names=SimpleNamespace(all={one.id for one in spaces(*range(640))}))])
    known = KnownNamespaces(spaces(*range(640)), named, most=640)
    for number in range(1000, 1100):
        known.add(spaces(number))
    assert len(known.by_id) == 640 and 1 <= named.looks <= 10  # once for ten that were refused
    named[0].names.all = set()
    known.add(spaces(*range(2000, 2011)))
    known.add(spaces(3000))
    assert spaces(3000)[0].id in known.by_id


def test_a_row_that_waits_for_a_message_goes_with_its_namespace() -> None:
    reader, (one,) = telling(most=100), spaces(1)
    reader.sequencer.hear_namespaces(pulse_of("a", told=[one]))
    reader.sequencer.forget_namespaces([one.id])  # as an erasure does, before it deletes the rows that SQL has
    reader.read_bytes(start_of("b", 1, spaces(2)), name=InstanceId("b"))
    batch = reader.take_batch()
    assert batch is not None and [row.fields for row in batch.namespaces] == spaces(2)


def test_an_id_that_heartbeats_name_is_declared() -> None:
    reader, (one, two, three) = Reader(NATIVE.sequencer()), spaces(1, 2, 3)
    reader.read_bytes(start_of("a", 1, [one, two, three]), name=InstanceId("a"))
    reader.sequencer.hear_namespaces(pulse_of("b", [one], [two]))
    reader.read_bytes(start_of("a", 2, []), name=InstanceId("a"))
    assert reader.sequencer.known_namespaces.undeclared() == {three.id}
    reader.sequencer.hear_namespaces(pulse_of("b", [], []))
    # What was told of stays until the next start.
    assert reader.sequencer.known_namespaces.undeclared() == {one.id, three.id}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_namespace_that_is_named_while_its_row_is_removed_gets_its_row_again(is_lost: bool) -> None:
    """Also where the database's answer is lost, so that nobody knows whether it is removed."""
    reader, (one, two) = telling(most=100), spaces(1, 2)
    reader.read_bytes(start_of("a", 1, [one, two]), name=InstanceId("a"))
    reader.read_bytes(start_of("a", 2, []), name=InstanceId("a"))
    reader.take_batch()

    class Store:
        async def forget_namespaces(self, _: str, read: int, names: Any, followed: Any) -> frozenset[NamespaceId]:
            assert set(names) == {one.id, two.id}
            reader.sequencer.hear_namespaces(pulse_of("b", [one]))
            if is_lost:
                raise CatalogError("the database does not answer")
            return frozenset()

    catalog = SimpleNamespace(
        _sequencer=reader.sequencer, _store=Store(), _writer=SimpleNamespace(name="KVBM"), _applying=asyncio.Lock()
    )
    with pytest.raises(CatalogError) if is_lost else nullcontext():
        asyncio.run(Forgetting.forget_namespaces(cast(Any, catalog)))
    assert reader.sequencer.namespaces().keys() == ({one.id, two.id} if is_lost else {one.id})
    reader.read_bytes(start_of("c", 1, []), name=InstanceId("c"))
    batch = reader.take_batch()
    assert batch is not None and {row.id for row in batch.namespaces} == reader.sequencer.namespaces().keys()


@pytest.mark.parametrize("kind", ["message", "digest", "life"])
def test_remarks_on_what_an_instance_sends_are_few(kind: str) -> None:
    reader, instance = Reader(NATIVE.sequencer()), Instance()
    with capture_logs() as logs:
        reader.read(*instance.frames)
        for number in range(300):
            if kind == "message":
                reader.read_bytes(b"no frame")
            elif kind == "digest":
                frame = instance.create(number % 50) if number < 50 else None
                if frame is not None:
                    reader.read(msgspec.structs.replace(frame, digest=frame.digest ^ 1))
            else:
                reader.sequence += 1
                fence = fence_data(Epoch(1), f"run {number}")
                reader.step(0.0, [StreamMessage(reader.sequence, f"kvbm.v1.fence.c.{ONE}", fence)])
                reader.read_bytes(start_of(ONE, 1, [NAMESPACE]))
    assert 1 <= len(logs) <= 3 * MOST_LINES
    if kind == "message":
        assert reader.sequencer.counters.poison == 300


def test_a_subject_whose_names_no_database_can_keep_is_refused() -> None:
    reader = Reader(NATIVE.sequencer())
    for subject in (f"kvbm.v1.fence.c.{'i' * 256}", f"kvbm.v1.fence.{'c' * 256}.one"):
        reader.sequence += 1
        reader.step(0.0, [StreamMessage(reader.sequence, subject, fence_data(Epoch(1), "run"))])
    assert reader.sequencer.counters.poison == 2 and not reader.sequencer.followed
