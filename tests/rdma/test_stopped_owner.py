"""An owner whose process stands still while its device goes on answering READs: what has been granted is read, nothing
else is, and all goes on with it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.core.ids import Namespace
from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead
from kvbm.transport.leased import LeasedRun
from kvbm.transport.leasing_connection import OVER_RDMA, LeasingConnection, ReaderProof
from kvbm.transport.lending import LentLimits
from kvbm.transport.rdma import RdmaReader
from kvbm.transport.tcp import TcpReader
from kvbm.verbs.device import Device
from tests.eventually import eventually
from tests.lenders import COPIER, KEY, NAMESPACE, OTHER, OWNER, READER, blocks_of, hashes_of, new_client, root_of
from tests.native_owner import NativeLender
from tests.rdma.instances import forked, receive, send
from tests.soft_roce_site import RDMA_S, RdmaDevices, RdmaSite

pytestmark = pytest.mark.rdma
BLOCKS, BLOCK = 40, 16384
LEASE_S = 3.0
SHORT_S = 2.0  # of a read that nobody answers
LONG_S = 120.0
GOOD, FAILED = ReadOutcome.GOOD, ReadOutcome.FAILED
MARK = 0xA5


def serve(folder: Path, reads: Device, tester: socket.socket) -> None:
    """A native owner of all blocks, which says what is pinned whenever it is asked."""
    lender = NativeLender(BLOCKS, BLOCK, folder, nvme=False)
    lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
    site = RdmaSite(lender, LentLimits(lease_s=LEASE_S), folder, RdmaDevices(Device("rxe0"), reads))
    send(tester, {"tcp": site.tcp})
    while True:
        receive(tester)
        send(tester, {"pinned": lender.pinned, "suspected": len(lender.suspected)})


class StoppableOwner:
    """The owner's process, as a test has it."""

    def __init__(self, pid: int, tester: socket.socket) -> None:
        self._pid, self._tester = pid, tester
        tester.settimeout(LONG_S)
        self.tcp = str(receive(tester)["tcp"])

    def stop(self) -> None:
        """It stands still when this returns."""
        os.kill(self._pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self._pid, os.WUNTRACED)[1])

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def tell(self) -> dict[str, Any]:
        send(self._tester, {})
        return receive(self._tester)


class Watched(LeasingConnection):
    """Tells when the owner has granted something, before any of it is read."""

    on_grant: Callable[[LeasedRun], object]

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        run = super().ask(namespace, hashes, until_s)
        if run.lease:
            self.on_grant(run)
        return run


class Reader:
    """Reads all blocks, over RDMA and, as instances do, over TCP where that fails.

    Attributes:
        on_grant: is told of each lease.
    """

    def __init__(self, device: Device, tcp: str) -> None:
        self.on_grant: Callable[[LeasedRun], object] = lambda run: None
        proof = ReaderProof(READER, KEY, root_of, lambda: (NAMESPACE, OTHER))
        others = TcpReader(new_client, tcp, READER, OWNER, root_of, KEY, 1)

        def connect(until_s: float) -> Watched:
            connection = Watched(OVER_RDMA, tcp, OWNER, proof, until_s)
            connection.on_grant = lambda run: self.on_grant(run)
            return connection

        self._reader = RdmaReader(device, connect, COPIER, handshake_s=RDMA_S, others=others)
        self.quarantine = self._reader.quarantine
        self.close = self._reader.close

    def read(self, deadline_s: float) -> tuple[PeerRead, np.ndarray]:
        """What counts as good is as it was computed."""
        wanted, rows = blocks_of(BLOCKS, BLOCK), np.full((BLOCKS, BLOCK), MARK, dtype=np.uint8)
        found = self._reader.read(NAMESPACE, hashes_of(BLOCKS), rows, None, deadline_s)
        good = [at for at, outcome in enumerate(found.result.outcomes) if outcome is GOOD]
        assert np.array_equal(rows[good], wanted[good])
        return found, rows

    def reads_over_rdma(self) -> bool:
        found, _ = self.read(LONG_S)
        return found.result.outcomes == [GOOD] * BLOCKS and not found.by


@pytest.fixture
def owner(tmp_path: Path, reader_device: Device) -> Iterator[StoppableOwner]:
    with ExitStack() as opened:
        here, there = socket.socketpair()
        opened.callback(here.close)
        pid = opened.enter_context(forked(lambda: serve(tmp_path, reader_device, there)))
        there.close()
        yield StoppableOwner(pid, here)


@pytest.fixture
def reader(owner: StoppableOwner, reader_device: Device) -> Iterator[Reader]:
    made = Reader(reader_device, owner.tcp)
    assert made.reads_over_rdma()
    yield made
    made.close()


def assert_goes_on(owner: StoppableOwner, reader: Reader) -> None:
    """The owner is read from again, and holds nothing for what was read while it stood still."""
    owner.go_on()
    eventually(reader.reads_over_rdma, "it is not read from again", timeout_s=LONG_S)
    eventually(lambda: owner.tell()["pinned"] == 0, "blocks stay pinned", state=owner.tell)
    assert owner.tell()["suspected"] == 0
    assert len(reader.quarantine) == 0


def test_what_an_owner_has_granted_is_read_though_it_stands_still(owner: StoppableOwner, reader: Reader) -> None:
    reader.on_grant = lambda run: owner.stop()
    found, _ = reader.read(LONG_S)
    assert (found.result.outcomes, found.by, found.trouble) == ([GOOD] * BLOCKS, "", "")
    again, rows = reader.read(SHORT_S)  # of the question nobody hears
    assert again.result.outcomes == [FAILED] * BLOCKS and again.trouble
    assert (rows == MARK).all()
    reader.on_grant = lambda run: None
    assert_goes_on(owner, reader)


def test_what_the_device_answers_when_the_lease_is_over_does_not_count(owner: StoppableOwner, reader: Reader) -> None:
    def stop_until_it_is_over(run: LeasedRun) -> None:
        owner.stop()
        time.sleep(max(0.0, run.until_s - time.monotonic()))

    reader.on_grant = stop_until_it_is_over
    found, _ = reader.read(2 * LEASE_S)
    assert found.result.outcomes == [FAILED] * BLOCKS
    assert "not there by the deadline" in found.passed_over + found.trouble
    reader.on_grant = lambda run: None
    assert_goes_on(owner, reader)


def test_an_owner_that_stands_still_when_it_is_asked_is_a_miss_until_it_goes_on(
    owner: StoppableOwner, reader: Reader
) -> None:
    owner.stop()
    for _ in range(2):
        found, rows = reader.read(SHORT_S)
        assert found.result.outcomes == [FAILED] * BLOCKS and found.trouble
        assert (rows == MARK).all()
    assert_goes_on(owner, reader)
