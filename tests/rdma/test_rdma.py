"""Reads over RDMA between two devices of one machine, and what is done to them meanwhile. Never a wrong row."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvbm.core.errors import VerbsError
from kvbm.core.ids import Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead
from kvbm.transport.rdma import RdmaReader
from kvbm.transport.rdma_hello import RdmaStatus
from kvbm.transport.rdma_owner import RdmaOwner
from kvbm.verbs.device import Device
from kvbm.verbs.memory import RegisteredMemory, new_memory
from kvbm.verbs.quarantine import Quarantine
from kvbm.verbs.queue_pair import QueuePair
from tests.eventually import eventually
from tests.rdma.instances import (
    BLOCK_BYTES,
    MISSING_FROM,
    NAMESPACE,
    OwnerHandle,
    block_bytes_of,
    hashes_of,
    netem,
    receive,
    send,
)

pytestmark = pytest.mark.rdma
_MARK = 0xA5
_LONG_S = 120.0


def rows_for(count: int) -> np.ndarray:
    return np.full((count, BLOCK_BYTES), _MARK, dtype=np.uint8)


def read(reader: RdmaReader, first: int, rows: np.ndarray, deadline_s: float = _LONG_S) -> PeerRead:
    return reader.read(NAMESPACE, hashes_of(first, len(rows)), rows, None, deadline_s)


def assert_good_rows_are_right(found: PeerRead, first: int, rows: np.ndarray) -> Counter[ReadOutcome]:
    wanted = block_bytes_of(range(first, first + len(rows)))
    for row, outcome in enumerate(found.result.outcomes):
        assert outcome is not ReadOutcome.GOOD or (rows[row] == wanted[row]).all(), f"block {first + row} is wrong"
    return Counter(found.result.outcomes)


def in_thread(call: Callable[[], PeerRead]) -> tuple[threading.Thread, list[PeerRead]]:
    found: list[PeerRead] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


@pytest.mark.smoke
def test_a_run_is_read_whole_into_the_rows_that_were_named(owner: OwnerHandle) -> None:
    rows = rows_for(130)
    at = [int(row) for row in np.random.default_rng(1).permutation(130)[:120]]
    found = owner.reader().read(NAMESPACE, hashes_of(0, 120), rows, at, _LONG_S)
    assert found.trouble == ""
    assert found.result.outcomes == [ReadOutcome.GOOD] * 120
    assert (rows[at] == block_bytes_of(range(120))).all()
    others = sorted(set(range(130)) - set(at))
    assert (rows[others] == _MARK).all()


def test_what_the_owner_lacks_is_missing_and_the_connection_goes_on(owner: OwnerHandle) -> None:
    reader, rows = owner.reader(), rows_for(10)
    found = read(reader, MISSING_FROM - 4, rows)
    assert found.result.outcomes == [ReadOutcome.GOOD] * 4 + [ReadOutcome.MISSING] * 6
    assert read(reader, MISSING_FROM, rows_for(2)).result.outcomes == [ReadOutcome.MISSING] * 2
    assert read(reader, 0, rows_for(2)).result.outcomes == [ReadOutcome.GOOD] * 2
    assert owner.tell("readers") == {"readers": 1}


def test_a_run_longer_than_one_question_is_asked_for_in_pieces(
    owner: OwnerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.transport.leased._PIECE_BYTES", 30 * BLOCK_BYTES)
    rows = rows_for(MISSING_FROM + 20)
    at = [int(row) for row in np.random.default_rng(2).permutation(len(rows))]
    found = owner.reader().read(NAMESPACE, hashes_of(0, len(rows)), rows, at, _LONG_S)
    assert found.result.outcomes == [ReadOutcome.GOOD] * MISSING_FROM + [ReadOutcome.MISSING] * 20
    assert (rows[at[:MISSING_FROM]] == block_bytes_of(range(MISSING_FROM))).all()
    assert (rows[at[MISSING_FROM:]] == _MARK).all()


class Others:
    """Has every block, and brings it in another way."""

    transport = "tcp"

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.is_closed = False

    def read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
    ) -> PeerRead:
        self.asked.append(hashes)
        blocks = [int.from_bytes(hashes[i : i + 16], "little") for i in range(0, len(hashes), 16)]
        assert at is not None and 0 < deadline_s <= _LONG_S
        rows[list(at)] = block_bytes_of(range(blocks[0], blocks[-1] + 1))
        return PeerRead(ReadResult([ReadOutcome.GOOD] * len(blocks), np.ones(len(blocks), dtype=np.uint32)))

    def close(self) -> None:
        self.is_closed = True


def test_what_does_not_lie_in_host_comes_in_another_way(owner: OwnerHandle) -> None:
    others = Others()
    reader, rows, first = owner.reader(others=others), rows_for(10), MISSING_FROM - 4
    assert assert_good_rows_are_right(read(reader, first, rows), first, rows) == {ReadOutcome.GOOD: 10}
    assert others.asked == [hashes_of(MISSING_FROM, 6)]
    assert read(reader, 0, rows).result.outcomes == [ReadOutcome.GOOD] * 10 and len(others.asked) == 1
    reader.close()
    assert others.is_closed


def test_a_block_larger_than_a_message_comes_in_pieces(owner: OwnerHandle, reader_device: Device) -> None:
    limits = reader_device.limits
    reader_device.limits = limits._replace(message_bytes=3000)
    try:
        rows = rows_for(30)
        assert assert_good_rows_are_right(read(owner.reader(), 5, rows), 5, rows) == {ReadOutcome.GOOD: 30}
    finally:
        reader_device.limits = limits


def test_a_deadline_with_the_link_cut_leaves_the_rows_alone_and_the_next_read_works(owner: OwnerHandle) -> None:
    reader, rows = owner.reader(), rows_for(100)
    assert read(reader, 0, rows_for(1)).trouble == ""
    with netem("veth0", "loss", "100%"):
        found = read(reader, 0, rows, 0.4)
    assert found.result.outcomes == [ReadOutcome.FAILED] * 100 and found.trouble
    assert len(reader.quarantine) == 0
    again = rows_for(100)
    for _ in range(20):
        if (next_read := read(reader, 0, again, 5)).trouble == "":
            break
    assert next_read.trouble == ""
    assert assert_good_rows_are_right(next_read, 0, again) == {ReadOutcome.GOOD: 100}
    assert (rows == _MARK).all(), "packets that came late have written rows of a read that was over"


def test_an_owner_that_dies_under_a_read_is_noticed_before_the_deadline(owner: OwnerHandle) -> None:
    reader, rows = owner.reader(), rows_for(100)
    assert read(reader, 0, rows_for(1)).trouble == ""
    with netem("veth0", "loss", "100%"):
        thread, found = in_thread(lambda: read(reader, 0, rows))
        while owner.tell("readers") != {"readers": 1} and thread.is_alive():
            pass
        owner.kill()
        thread.join(_LONG_S / 2)
    assert found[0].result.outcomes == [ReadOutcome.FAILED] * 100
    assert read(reader, 0, rows, 1).trouble, "nobody is there any more"


def test_a_reader_that_is_dismissed_learns_it_from_its_reads(owner: OwnerHandle) -> None:
    reader, rows = owner.reader(), rows_for(3)
    assert read(reader, 0, rows).trouble == ""
    owner.tell("revoke")
    found = read(reader, 0, rows_for(3))
    assert found.result.outcomes == [ReadOutcome.FAILED] * 3 and found.trouble
    assert read(reader, 0, rows).trouble == "", "it may come again"


def test_memory_deregistered_under_a_read_fails_it(owner: OwnerHandle) -> None:
    reader, rows = owner.reader(), rows_for(150)
    assert read(reader, 0, rows_for(1)).trouble == ""
    with netem("veth0", "rate", "8mbit"):
        thread, found = in_thread(lambda: read(reader, 0, rows))
        time.sleep(0.3)
        assert owner.tell("deregister") == {}
        thread.join(_LONG_S)
    outcomes = assert_good_rows_are_right(found[0], 0, rows)
    assert outcomes[ReadOutcome.FAILED] and "access err" in found[0].trouble


@pytest.mark.smoke
def test_a_wrong_key_reads_nothing(owner: OwnerHandle) -> None:
    owner.tell("lie", key=0x55)
    rows = rows_for(5)
    found = read(owner.reader(), 0, rows)
    assert found.result.outcomes == [ReadOutcome.FAILED] * 5 and "access err" in found.trouble
    assert (rows == _MARK).all()


def test_an_owner_that_grants_slots_it_does_not_have_is_not_believed(owner: OwnerHandle) -> None:
    owner.tell("lie", slots=200)
    found = read(owner.reader(), 0, rows_for(60))
    assert found.result.outcomes == [ReadOutcome.FAILED] * 60 and "beyond" in found.trouble


@pytest.mark.smoke
def test_bytes_that_changed_in_the_owners_memory_are_corrupt_and_it_is_told(owner: OwnerHandle) -> None:
    owner.tell("flip", block=7, byte=9999)
    reader, rows = owner.reader(), rows_for(20)
    found = read(reader, 0, rows)
    assert [row for row, one in enumerate(found.result.outcomes) if one is not ReadOutcome.GOOD] == [7]
    assert found.result.outcomes[7] is ReadOutcome.CORRUPT
    assert assert_good_rows_are_right(found, 0, rows)[ReadOutcome.GOOD] == 19
    assert read(reader, MISSING_FROM, rows_for(1)).trouble == ""  # answered after the END
    assert owner.tell("failed") == {"failed": [7]}


def test_a_slot_that_changes_while_it_is_read_is_never_good(owner: OwnerHandle) -> None:
    owner.tell("rewrite", block=4)
    reader = owner.reader()
    for _ in range(5):
        rows = rows_for(8)
        found = read(reader, 0, rows)
        assert found.result.outcomes[4] is ReadOutcome.CORRUPT
        assert assert_good_rows_are_right(found, 0, rows)[ReadOutcome.GOOD] == 7


def test_bytes_flipped_on_the_way_never_make_a_wrong_row(owner: OwnerHandle) -> None:
    reader = owner.reader()
    with netem("veth0", "corrupt", "3%"):
        for first in (0, 50, 100):
            rows = rows_for(50)
            found = read(reader, first, rows, 2)
            assert ReadOutcome.MISSING not in assert_good_rows_are_right(found, first, rows)


def test_64_reads_in_flight_are_each_right(owner: OwnerHandle) -> None:
    reader = owner.reader()
    rows = [rows_for(4) for _ in range(64)]
    reads = [in_thread(lambda number=number: read(reader, number, rows[number])) for number in range(64)]
    for number, (thread, found) in enumerate(reads):
        thread.join(_LONG_S)
        assert assert_good_rows_are_right(found[0], number, rows[number]) == {ReadOutcome.GOOD: 4}


def test_64_requests_are_on_their_way_at_once(owner: OwnerHandle) -> None:
    rows = rows_for(MISSING_FROM)
    reader = owner.reader(lane_bytes=64 * BLOCK_BYTES)
    assert assert_good_rows_are_right(read(reader, 0, rows), 0, rows) == {ReadOutcome.GOOD: MISSING_FROM}


def test_only_who_has_proved_every_namespace_is_admitted(owner: OwnerHandle) -> None:
    found = read(owner.reader(is_proved=False), 0, rows_for(2))
    assert found.result.outcomes == [ReadOutcome.FAILED] * 2 and "who has proved" in found.trouble
    assert owner.tell("readers") == {"readers": 0}


def test_readers_beyond_the_bound_are_refused_and_leave_room_when_they_go(owner: OwnerHandle) -> None:
    owner.tell("most_readers", most=1)
    first, second = owner.reader(), owner.reader()
    assert read(first, 0, rows_for(1)).trouble == ""
    assert "no room" in read(second, 0, rows_for(1)).trouble
    first.close()
    eventually(lambda: owner.tell("readers") == {"readers": 0}, "the first reader leaves no room")
    assert read(second, 0, rows_for(1)).trouble == ""


def test_a_stranger_that_says_something_else_is_hung_up_on(owner: OwnerHandle) -> None:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(owner.address)
    send(stranger, {"role": "reader", "proved": True})
    stranger.sendall(b"\xff" * 64)
    stranger.settimeout(_LONG_S)
    with pytest.raises(OSError):
        receive(stranger)
    assert owner.tell("readers") == {"readers": 0}


def test_what_has_not_drained_stays_in_quarantine_until_its_queue_pair_is_destroyed(
    owner: OwnerHandle, reader_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every queue pair of this device drains, so that it did not is said in its place; what may be destroyed is
    real.
    """
    quarantine = Quarantine(most=1)
    reader = owner.reader(quarantine=quarantine)
    assert read(reader, 0, rows_for(1)).trouble == ""
    with netem("veth0", "loss", "100%"), monkeypatch.context() as stuck:
        stuck.setattr(QueuePair, "drain", lambda self, within_s: False)
        assert read(reader, 0, rows_for(90), 0.3).trouble
        assert len(quarantine) == 1
    with monkeypatch.context() as stuck:
        stuck.setattr("kvbm.verbs.quarantine._destroyed", lambda pair, memory: False)
        assert "did not drain" in read(reader, 0, rows_for(1)).trouble
    assert read(reader, 0, rows_for(1)).trouble == ""
    assert len(quarantine) == 0


def test_reads_posted_and_never_waited_for_write_nothing_once_their_queue_pair_is_destroyed(
    reader_device: Device,
) -> None:
    owner_device = Device("rxe0")
    source, target = new_memory(64 * 4096), new_memory(64 * 4096)
    source[:], target[:] = 1, _MARK
    lent, own = RegisteredMemory(owner_device, source, True), RegisteredMemory(reader_device, target, False)
    answering, asking = QueuePair(owner_device, 1, True), QueuePair(reader_device, 64, False)
    answering.connect(asking.end)
    asking.connect(answering.end)
    quarantine = Quarantine()
    with netem("veth0", "loss", "100%"):
        for number in range(64):
            asking.read(number, own, number * 4096, 4096, (lent.address, lent.remote_key))
        assert asking.outstanding == 64
        quarantine.put(asking, own)
        assert quarantine.sweep() == 0
    time.sleep(0.3)  # for an answer that comes late
    assert (target == _MARK).all()
    answering.close()
    lent.close()
    owner_device.close()


def test_others_go_on_while_an_end_is_looked_for_that_cannot_be_reached(reader_device: Device) -> None:
    turns, is_over = [0], threading.Event()

    def count() -> None:
        while not is_over.wait(0.01):
            turns[0] += 1

    pair, counting = QueuePair(reader_device, 1, False), threading.Thread(target=count)
    nobody = pair.end._replace(gid=bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 99]))
    counting.start()
    try:
        before = turns[0]
        with pytest.raises(VerbsError, match="cannot be reached"):
            pair.connect(nobody)
        assert turns[0] - before > 3, "the GIL is kept while the kernel looks for it"
    finally:
        is_over.set()
        counting.join(_LONG_S)
        pair.close()


def test_an_owner_does_not_look_again_at_once_for_a_reader_that_cannot_be_reached(reader_device: Device) -> None:
    device = Device("rxe0")
    owner = RdmaOwner(device, new_memory(4096).reshape(1, 4096))
    pair = QueuePair(reader_device, 1, False)
    nobody = pair.end._replace(gid=bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 99]))
    assert owner.admit(nobody, True, 0).ready.status is RdmaStatus.FULL
    assert not owner._reach.may(time.monotonic(), nobody.gid)
    assert owner.admit(pair.end, True, 0).ready.status is RdmaStatus.READY
    owner.close()
    pair.close()
    device.close()
