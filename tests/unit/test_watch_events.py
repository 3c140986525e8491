"""What entries of the change log say to a watcher, what a client makes of it, and which requests are taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.edge.watch_requests import decode_watch
from kvbm.catalog.index.change_log import ChangeLog, RecordedIndex
from kvbm.catalog.index.entry_events import EntryReader
from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier
from kvbm.core.watch_events import (
    MAX_CHANGED_HASHES,
    BlockChange,
    BlockChanges,
    InstanceChange,
    KnownInstances,
    Missed,
    WatchBegun,
    WatchEvent,
)
from kvbm.locate.watched_blocks import WatchedBlocks
from kvbm.locate.watching import parsed
from kvbm.reference.cluster_index import ReferenceIndex

OURS, THEIRS = NamespaceId(b"\1" * HASH_BYTES), NamespaceId(b"\2" * HASH_BYTES)
POOLS = (PoolStated(Tier.HBM, 64, 1024), PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, "s3://pool"))
A = InstanceId("a")


def block(at: int) -> bytes:
    return at.to_bytes(HASH_BYTES, "little")


def blocks(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def created(hashes: bytes, namespace: NamespaceId = OURS, tier: Tier = Tier.HBM) -> BlocksCreated:
    return BlocksCreated(namespace=namespace, tier=tier, hashes=hashes)


def listed(hashes: bytes, snapshot: int, namespace: NamespaceId = OURS) -> ResidenciesListed:
    return ResidenciesListed(namespace=namespace, tier=Tier.HBM, snapshot=snapshot, hashes=hashes)


def ended(snapshot: int, count: int) -> SnapshotEnded:
    return SnapshotEnded(tier=Tier.HBM, snapshot=snapshot, count=count)


class Watched:
    """An index, its log, and a client that applies what a reader tells of it."""

    def __init__(self) -> None:
        self.index = ReferenceIndex(10_000)
        self.log = ChangeLog(1 << 20, decode_frame)
        self.log.begin(0, lambda: "stream")
        self.recorded = RecordedIndex(self.index, self.log, lambda: self._sequence)
        self.reader = EntryReader(decode_frame, lambda namespace: namespace == OURS)
        self.blocks = WatchedBlocks()
        self._sequence, self._offset, self._read = 0, 0, 0
        self.send(InstanceStarted(epoch=Epoch(1), pools=POOLS))

    def send(self, *events: Event) -> list[WatchEvent]:
        """A frame is applied; what is told of it."""
        frame = Frame(
            instance=A, epoch=Epoch(1), first_offset=Offset(self._offset), wall_time_ns=0, digest=0, events=events
        )
        self._sequence += 1
        self._offset += len(events)
        self.recorded.apply(encode_frame(frame))
        return self.told()

    def told(self) -> list[WatchEvent]:
        found: list[WatchEvent] = []
        while (entry := self.log.after(self._read)) is not None:
            self._read = entry.serial
            found += self.reader.frame(entry)
        for event in found:
            self.blocks.apply(event)
        return found

    def held(self, numbers: Iterable[int]) -> list[int]:
        return [at for at in numbers if self.blocks.tiers(A, OURS.hex(), block(at).hex())]

    def indexed(self, numbers: Iterable[int]) -> list[int]:
        return [at for at in numbers if any(not h.is_pool for h in self.index.holders(OURS, SequenceHash(block(at))))]


def test_a_start_empties_and_runs_gain_and_lose() -> None:
    watched = Watched()
    watched.send(created(blocks(1, 2, 3)))
    watched.send(BlocksEvicted(namespace=OURS, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=blocks(2)))
    assert watched.held(range(5)) == watched.indexed(range(5)) == [1, 3]
    told = watched.send(InstanceStarted(epoch=Epoch(1), pools=POOLS), created(blocks(4)))
    assert told[0] == InstanceChange(instance="a", what="started", epoch=1)
    assert watched.held(range(5)) == watched.indexed(range(5)) == [4]


def test_what_moves_without_being_kept_is_lost_where_it_was() -> None:
    watched = Watched()
    watched.send(created(blocks(1)))
    moved = BlocksMigrated(
        namespace=OURS, source=Tier.HBM, target=Tier.HOST, kept=False, cause=MigrateCause.OFFLOAD, hashes=blocks(1)
    )
    (told,) = watched.send(moved)
    assert isinstance(told, BlockChanges)
    assert [(one.what, one.tier) for one in told.changes] == [("gained", "HOST"), ("lost", "HBM")]


def test_blocks_of_a_cluster_pool_are_the_pools() -> None:
    watched = Watched()
    (told,) = watched.send(created(blocks(1), tier=Tier.OBJECT))
    assert isinstance(told, BlockChanges)
    assert (told.holder, told.is_pool) == ("s3://pool", True)
    assert watched.blocks.pools(OURS.hex(), block(1).hex()) == ["s3://pool"]
    assert watched.held([1]) == []


def test_other_namespaces_are_not_told() -> None:
    watched = Watched()
    assert watched.send(created(blocks(1), THEIRS)) == []
    assert watched.send(created(blocks(1), THEIRS, Tier.OBJECT)) == []


def test_a_snapshot_that_was_seen_from_its_begin_withdraws_what_it_did_not_list() -> None:
    watched = Watched()
    watched.send(created(blocks(1, 2, 3)))
    watched.send(listed(blocks(1), 7), listed(blocks(9), 7, THEIRS), created(blocks(4)))
    watched.send(listed(blocks(5), 7), ended(7, 3))
    assert watched.held(range(10)) == watched.indexed(range(10)) == [1, 4, 5]


def test_a_snapshot_without_lists_says_that_nothing_is_held() -> None:
    watched = Watched()
    watched.send(created(blocks(1)))
    watched.send(ended(7, 0))
    assert watched.held([1]) == watched.indexed([1]) == []


def test_the_end_of_a_snapshot_that_had_begun_before_is_missed() -> None:
    watched = Watched()
    watched.send(listed(blocks(1), 7))
    watched.reader = EntryReader(decode_frame, lambda namespace: namespace == OURS)
    told = watched.send(listed(blocks(2), 7), ended(7, 2))
    assert [one.instance for one in told if isinstance(one, Missed)] == ["a"]


def test_a_snapshot_in_which_events_were_missed_withdraws_nothing() -> None:
    watched = Watched()
    watched.send(created(blocks(1)))
    watched.send(listed(blocks(2), 7))
    watched.index.miss(A)
    watched.reader.miss(A)
    assert watched.send(ended(7, 1)) == []
    assert watched.held([1, 2]) == watched.indexed([1, 2]) == [1, 2]


def test_long_runs_come_in_events_of_bounded_size_and_in_order() -> None:
    watched = Watched()
    count = 3 * MAX_CHANGED_HASHES // 2
    runs = [created(blocks(*range(at, at + count))) for at in (0, count)]
    told = watched.send(*runs)
    sizes = [sum(len(change.hashes) for change in one.changes) for one in told if isinstance(one, BlockChanges)]
    assert max(sizes) <= 2 * HASH_BYTES * MAX_CHANGED_HASHES
    assert sum(sizes) == 2 * HASH_BYTES * 2 * count
    assert watched.held(range(2 * count)) == list(range(2 * count))


def test_events_that_come_again_change_nothing_in_the_end() -> None:
    watched, log = Watched(), []
    for events in (
        (created(blocks(1, 2)),),
        (listed(blocks(1), 3), ended(3, 1)),
        (created(blocks(2)), BlocksEvicted(namespace=OURS, tier=Tier.HBM, reason=EvictReason.TTL, hashes=blocks(1))),
    ):
        log += watched.send(*events)
    for event in log:
        watched.blocks.apply(event)
    assert watched.held(range(4)) == watched.indexed(range(4)) == [2]


def test_excluded_instances_show_only_what_others_can_read() -> None:
    watched = Watched()
    watched.send(created(blocks(1)))
    watched.blocks.apply(InstanceChange(instance="a", what="state", excluded="silent", hidden=["HBM"], suspect=True))
    assert (watched.held([1]), watched.blocks.is_suspect("a")) == ([], True)
    watched.blocks.apply(WatchBegun(position="p", keepalive_s=1.0))
    assert (watched.held([1]), watched.blocks.is_suspect("a")) == ([1], False)


def test_another_catalog_that_does_not_know_an_instance_takes_it_out() -> None:
    watched = Watched()
    watched.send(created(blocks(1)))
    watched.blocks.apply(KnownInstances(instances=["b"], is_last=False))
    assert watched.held([1]) == [1]
    watched.blocks.apply(KnownInstances(instances=[], is_last=True))
    assert watched.held([1]) == []


# -- requests and events as bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * 20_000, 422),
        (b"[]", 422),
        (b"{}", 422),
        (b'{"namespace": 1}', 422),
        (b'{"namespace": "zz"}', 422),
        (b'{"instance": ""}', 422),
        (b'{"instance": "i", "more": 1}', 422),
        (json.dumps({"instance": "x" * 129}).encode(), 422),
        (json.dumps({"instance": "i", "hashes": "00" * 16}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "hashes": ""}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "hashes": []}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "hashes": "00" * 15}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "hashes": "00" * 16 * 4097}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "limit": 0}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "after": "x" * 257}).encode(), 422),
        (json.dumps({"namespace": "00" * 16, "hashes": "00" * (1 << 18)}).encode(), 413),
    ],
)
def test_what_cannot_be_watched_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        decode_watch(body)
    assert refused.value.status == status


def test_events_are_parsed_however_they_are_cut() -> None:
    first, last = (
        WatchBegun(position="p", keepalive_s=5.0),
        BlockChanges(holder="a", changes=[BlockChange(what="lost", tier="HBM")]),
    )
    text = b"".join(
        [
            b"id: 1\nevent: begun\ndata: %b\n\n" % msgspec.json.encode(first),
            b": keep-alive\nid: 2\n\n",
            b'event: of_later_times\ndata: {"type": "of_later_times"}\n\n',
            b"event: changes\ndata: %b\n\n" % msgspec.json.encode(last),
        ]
    )

    def cut(size: int) -> Iterator[bytes]:
        return (text[at : at + size] for at in range(0, len(text), size))

    wanted = [(first, "1"), (None, "2"), (last, "")]
    for size in (1, 7, 1000):
        assert [one for one in parsed(cut(size)) if one != (None, "")] == wanted


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(parsed(iter([b"data: " + b"x" * (1 << 20)] * 9)))
