"""Readers over RDMA beside another way: when that one serves, and when a connection is made anew.

A native owner; the device is a stand-in.

`make test-rdma` has real devices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm import _native
from kvbm.core.ids import Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead
from kvbm.transport.rdma import RdmaReader
from tests.eventually import eventually
from tests.lenders import NAMESPACE, OTHER, blocks_of, hashes_of
from tests.rdma_site import BLOCK, WAIT_S, Owner, ReaderDevice

GOOD, FAILED = ReadOutcome.GOOD, ReadOutcome.FAILED


class Others:
    """Has every block, and brings it in another way."""

    transport = "tcp"

    def __init__(self) -> None:
        self.asked = 0
        self.asked_for: list[int] = []  # how many blocks

    def read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
    ) -> PeerRead:
        self.asked += 1
        count = len(hashes) // 16
        self.asked_for.append(count)
        rows[list(range(count) if at is None else at)] = blocks_of(len(rows), BLOCK)[len(rows) - count :]
        return PeerRead(ReadResult([GOOD] * count, np.zeros(count, dtype=np.uint32)))

    def close(self) -> None: ...


class Site:
    """An owner and a reader of it."""

    def __init__(self, folder: Path) -> None:
        self.owner = Owner(folder)
        self.owner.rdma.start()
        self.device: Any = ReaderDevice(self.owner.lender.host)
        self.others = Others()
        self.known: list[Namespace] = [NAMESPACE]
        self.reader = RdmaReader(
            self.device, lambda _: self.owner.connection(*self.known), _native.RowCopier(1), others=self.others
        )

    @property
    def joined(self) -> int:
        """Connections that the owner has admitted."""
        return self.owner.pairs.made

    def read(self, namespace: Namespace = NAMESPACE, count: int = 8, deadline_s: float = WAIT_S) -> PeerRead:
        rows = np.zeros((count, BLOCK), dtype=np.uint8)
        found = self.reader.read(namespace, hashes_of(count), rows, None, deadline_s)
        for row, outcome in enumerate(found.result.outcomes):
            assert outcome is not GOOD or (rows[row] == blocks_of(count, BLOCK)[row]).all()
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path)
    monkeypatch.setattr("kvbm.transport.rdma.QueuePair", site.device.pair)
    monkeypatch.setattr("kvbm.transport.rdma.RegisteredMemory", site.device.memory)
    yield site
    site.reader.close()
    site.owner.close()


def is_by_rdma(found: PeerRead) -> bool:
    return (set(found.result.outcomes), found.trouble, found.by, found.passed_over) == ({GOOD}, "", "", "")


def is_by_others(found: PeerRead, why: str) -> bool:
    return (set(found.result.outcomes), found.trouble, found.by) == ({GOOD}, "", "tcp") and why in found.passed_over


def test_who_is_refused_reads_everything_in_another_way_at_once_and_registers_nothing(site: Site) -> None:
    site.owner.rdma.declare([OTHER])
    assert is_by_others(site.read(), "who has proved each of its namespaces")
    assert site.device.registered == 0
    site.known.append(OTHER)
    assert is_by_rdma(site.read())
    assert (site.device.registered, site.others.asked) == (1, 1)


def test_an_owner_that_cannot_be_reached_by_the_device_is_read_in_another_way(site: Site) -> None:
    site.device.is_reachable = False
    assert is_by_others(site.read(), "cannot be reached")
    eventually(lambda: not site.owner.pairs.open, "the owner keeps a queue pair of nobody's")


def test_what_has_not_arrived_when_a_read_fails_comes_in_another_way_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.transport.leased._PIECE_BYTES", 4 * BLOCK)
    pieces: list[int] = []

    def fail() -> None:
        pieces.append(1)
        site.device.trouble = "retries are used up" if len(pieces) == 2 else ""

    site.device.on_take = fail
    assert is_by_others(site.read(), "a READ failed: retries are used up")
    assert site.others.asked_for == [4]
    eventually(lambda: site.owner.lender.pinned == 0, "blocks stay pinned")
    assert is_by_rdma(site.read())


def test_what_does_not_lie_in_host_comes_in_another_way_and_is_counted_as_that(site: Site) -> None:
    site.owner.lender.evict(hashes_of(8)[16 * 3 :])
    found = site.read()
    assert is_by_rdma(found) and site.others.asked_for == [5]
    site.owner.lender.evict(hashes_of(8))
    assert (site.read().by, site.read().passed_over) == ("tcp", "")


def test_nothing_is_tried_in_another_way_by_a_reader_that_is_closed(site: Site) -> None:
    site.reader.close()
    found = site.read()
    assert found.trouble == "this reader is closed" and site.others.asked == 0


def test_a_namespace_that_is_known_since_is_proved_on_the_next_connection(site: Site) -> None:
    site.owner.lender.put(hashes_of(8, 20), blocks_of(8, BLOCK), namespace=OTHER)
    assert is_by_rdma(site.read())
    site.known.append(OTHER)
    assert is_by_others(site.read(OTHER), "does not open")
    assert is_by_rdma(site.read()) and site.joined == 2
    assert site.reader.read(OTHER, hashes_of(8, 20), np.zeros((8, BLOCK), dtype=np.uint8), None, WAIT_S).by == ""


def test_a_root_that_is_another_since_is_proved_on_the_next_connection(site: Site) -> None:
    assert is_by_rdma(site.read())
    site.owner.lender.withdraw(NAMESPACE)
    site.owner.rdma.revoke()
    site.owner.lender.admit(NAMESPACE)
    assert is_by_others(site.read(), "does not open")
    assert is_by_rdma(site.read()) and site.joined == 2


def test_a_read_whose_time_is_over_when_its_turn_comes_leaves_the_connection_alone(site: Site) -> None:
    assert is_by_rdma(site.read())
    for deadline_s in (0.0, -1.0):
        found = site.read(deadline_s=deadline_s)
        assert set(found.result.outcomes) == {FAILED} and found.retry_s > 0
    assert is_by_rdma(site.read()) and (site.joined, site.others.asked) == (1, 0)


def test_a_fenced_owner_grants_no_slots_until_it_may_again(site: Site) -> None:
    assert is_by_rdma(site.read())
    site.owner.server.fence(True)
    assert is_by_others(site.read(), "FENCED")  # which asks the same owner, but here
    assert site.owner.lender.pinned == 0
    site.owner.server.fence(False)
    assert is_by_rdma(site.read()) and site.others.asked == 1


def test_bytes_that_come_after_their_lease_do_not_count_and_accuse_nobody(site: Site) -> None:
    assert is_by_rdma(site.read())
    site.owner.lender.host[:] ^= 1  # as where the slots have other blocks by then
    site.device.on_take = lambda: time.sleep(0.3)
    found = site.read(deadline_s=0.2)
    assert set(found.result.outcomes) == {FAILED} and "deadline" in found.trouble
    site.owner.lender.host[:] ^= 1
    site.device.on_take = lambda: None
    assert is_by_rdma(site.read())
    assert site.owner.lender.suspected == []
    eventually(lambda: site.owner.lender.pinned == 0, "blocks stay pinned")


def test_an_owner_that_came_back_at_its_address_is_read_from_again(site: Site) -> None:
    assert is_by_rdma(site.read())
    site.owner.stop()
    assert set(site.read().result.outcomes) <= {GOOD, FAILED}
    site.owner.start()
    assert is_by_rdma(site.read())


def test_a_read_that_waits_for_another_until_its_deadline_may_come_again(site: Site) -> None:
    with site.reader._lock:
        found = site.read(deadline_s=0.01)
    assert set(found.result.outcomes) == {FAILED} and found.retry_s > 0


def test_reads_that_waited_while_one_was_refused_do_not_ask_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.owner.rdma.declare([OTHER])
    lock, connected = threading.Lock(), [0]
    waiting: list[int] = []

    class Counted:
        def acquire(self, timeout: float) -> bool:
            waiting.append(1)
            return lock.acquire(timeout=timeout)

        def release(self) -> None:
            lock.release()

    connect = site.reader._connect

    def late(until_s: float) -> Any:
        connected[0] += 1
        eventually(lambda: len(waiting) == 4, "the others do not wait")
        return connect(until_s)

    monkeypatch.setattr(site.reader, "_connect", late)
    with monkeypatch.context() as counted:
        counted.setattr(site.reader, "_lock", Counted())
        found: list[PeerRead] = []
        reads = [threading.Thread(target=lambda: found.append(site.read())) for _ in range(4)]
        for thread in reads:
            thread.start()
        for thread in reads:
            thread.join(WAIT_S)
    assert [is_by_others(one, "who has proved") for one in found] == [True] * 4
    assert connected == [1]
    assert site.read().by == "tcp" and connected == [2]


def test_a_reader_that_is_closed_between_two_pieces_does_not_connect_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.transport.leased._PIECE_BYTES", 4 * BLOCK)
    closing = threading.Thread(target=site.reader.close)

    def close() -> None:
        if not closing.ident:
            closing.start()
            eventually(lambda: site.reader._is_closed, "it does not close")

    site.device.on_take = close
    found = site.read()
    closing.join(WAIT_S)
    assert FAILED in found.result.outcomes and found.trouble
    assert (site.joined, site.others.asked) == (1, 0)
