"""Owners and readers that are killed or stopped at seeded moments of a read: no wrong byte, no block that stays pinned,
no read without end.

200 moments in each way of reading, of which `make test` has a few of each kind and `make faults` the rest.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.nixl_agent import NixlProcess
from tests.eventually import WAIT_S, eventually
from tests.faults.processes.lending_owner import BLOCK, BLOCKS
from tests.lenders import NAMESPACE, SocketSite, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite, tls_of
from tests.nixl_site import NixlSite
from tests.peer_ways import MEMORY, NIXL, TLS, WAYS, new_nixl_process, reader_of

MOMENTS = 50  # of each side, fault and way
QUICK = 2
LONGEST_S = 0.004  # a read takes some milliseconds
GOOD = ReadOutcome.GOOD
ROOT = Path(__file__).parents[2]

seeds = pytest.mark.parametrize(
    "seeds",
    [range(QUICK), pytest.param(range(QUICK, MOMENTS), marks=pytest.mark.nightly)],
    ids=["quick", "rest"],
)
pytestmark = pytest.mark.timeout(600)
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def nixl(way: str) -> Iterator[NixlProcess | None]:
    """What readers of the test's own process read with, where the way is NIXL."""
    if way != NIXL:
        yield None
        return
    process = new_nixl_process()
    yield process
    process.close()


class Owner:
    """An owner in a process of its own, which may be started again where it was."""

    def __init__(self, way: str, folder: Path, nixl: NixlProcess | None) -> None:
        self._way, self._folder, self._tcp = way, folder, "127.0.0.1:0"
        if way == TLS:
            tls_of(folder)
        unix = str(folder / "lend.sock")
        self.start()
        self.reader = reader_of(way, unix if way == MEMORY else self._tcp, folder, nixl)

    def start(self) -> None:
        where = [str(self._folder / "lend.sock"), self._tcp, str(self._folder)]
        command = [sys.executable, "-m", "tests.faults.processes.lending_owner", self._way, *where]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self._tcp = self.process.stdout.readline().strip()
        assert self._tcp, "it does not lend"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def close(self) -> None:
        self.reader.close()
        self.kill()


@pytest.fixture
def owner(way: str, tmp_path: Path, nixl: NixlProcess | None) -> Iterator[Owner]:
    made = Owner(way, tmp_path, nixl)
    yield made
    made.close()


def read(reader: PeerReader, blocks: np.ndarray, deadline_s: float) -> PeerRead:
    """A read of all blocks, of which those that count as good are as they were computed, and nothing is written any
    more.
    """
    rows = np.zeros_like(blocks)
    found = reader.read(NAMESPACE, hashes_of(BLOCKS), rows, None, deadline_s)
    good = [at for at, outcome in enumerate(found.result.outcomes) if outcome is GOOD]
    assert np.array_equal(rows[good], blocks[good])
    assert found.trouble or len(good) == BLOCKS, "what does not come has a reason"
    return found


def is_whole(found: PeerRead) -> bool:
    return found.result.outcomes == [GOOD] * BLOCKS


@ways
@seeds
def test_an_owner_that_is_killed_is_a_miss_until_it_is_there_again(owner: Owner, seeds: range) -> None:
    blocks = blocks_of(BLOCKS, BLOCK)
    for seed in seeds:
        eventually(lambda: is_whole(read(owner.reader, blocks, WAIT_S)), "it is not read from")
        killer = threading.Timer(random.Random(seed).random() * LONGEST_S, owner.process.kill)
        killer.start()
        while is_whole(read(owner.reader, blocks, WAIT_S)):
            pass
        killer.join()
        owner.kill()
        owner.start()
    eventually(lambda: is_whole(read(owner.reader, blocks, WAIT_S)), "it is not read from again")


@ways
@seeds
def test_an_owner_that_stops_is_a_miss_at_the_deadline_and_goes_on(owner: Owner, seeds: range) -> None:
    """Over NIXL the owner's own process alone stops: what another process of it does meanwhile goes on, and
    `test_nixl.py` stops that.
    """
    blocks = blocks_of(BLOCKS, BLOCK)
    for seed in seeds:
        eventually(lambda: is_whole(read(owner.reader, blocks, WAIT_S)), "it is not read from")
        stopper = threading.Timer(
            random.Random(seed).random() * LONGEST_S, owner.process.send_signal, (signal.SIGSTOP,)
        )
        stopper.start()
        while is_whole(read(owner.reader, blocks, 0.2)):
            pass
        stopper.join()
        owner.process.send_signal(signal.SIGCONT)
    eventually(lambda: is_whole(read(owner.reader, blocks, WAIT_S)), "it is not read from again")


@pytest.fixture
def site(way: str, tmp_path: Path) -> Iterator[SocketSite]:
    with ExitStack() as opened:
        limits = LentLimits(lease_s=0.2)
        lender = NativeLender(BLOCKS, BLOCK, tmp_path, nvme=False)
        if way == NIXL:
            processes = new_nixl_process(), new_nixl_process()
            for process in processes:
                opened.callback(process.close)
            made: SocketSite = NixlSite(lender, limits, tmp_path, processes, falls_back=False)
        else:
            options = {"tls": tls_of(tmp_path)} if way == TLS else {}
            made = NativeSite(way.partition(" ")[0], lender, limits, tmp_path, **options)
        opened.callback(made.close)
        made.lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
        yield made


def reading(site: SocketSite, way: str, folder: Path) -> subprocess.Popen[str]:
    """A process that reads over and over, and has read all blocks once."""
    where = site.unix if way == MEMORY else site.tcp
    command = [sys.executable, "-m", "tests.faults.processes.lending_reader", way, where, str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == "reads\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@ways
@seeds
def test_a_reader_that_is_killed_holds_nothing(site: SocketSite, way: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        child = reading(site, way, tmp_path)
        time.sleep(random.Random(seed).random() * LONGEST_S)
        end(child)
        eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")
    assert site.lender.suspected == []


def holds_alone(site: SocketSite, hashes: bytes, rows: np.ndarray) -> bool:
    """Have the owner hold these blocks and no others; False: somebody reads some yet."""
    site.lender.evict(hashes_of(BLOCKS) + hashes_of(BLOCKS, 7))
    try:
        site.lender.put(hashes, rows)
    except AssertionError:  # no room
        return False
    return True


def signalled(child: subprocess.Popen[str], number: int, with_its_own: bool) -> None:
    """Signal a reader, and what it reads with."""
    child.send_signal(number)
    of_child = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split() if with_its_own else []
    for one in of_child:
        with suppress(ProcessLookupError):
            os.kill(int(one), number)


@ways
@seeds
def test_a_reader_that_stops_holds_nothing_beyond_its_lease_and_believes_no_byte_that_came_too_late(
    site: SocketSite, way: str, seeds: range, tmp_path: Path
) -> None:
    """Its blocks go and their slots get other bytes while it stands still in the middle of a copy."""
    other_hashes, others = hashes_of(BLOCKS, 7), blocks_of(BLOCKS, BLOCK, 7)
    child = reading(site, way, tmp_path)
    try:
        for seed in seeds:
            time.sleep(random.Random(seed).random() * LONGEST_S)
            signalled(child, signal.SIGSTOP, seed % 2 == 0)
            eventually(lambda: site.lender.pinned == 0, "a lease does not end")
            for hashes, rows in ((other_hashes, others), (hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))):
                eventually(partial(holds_alone, site, hashes, rows), "a question that came before does not end")
                if hashes is other_hashes:
                    signalled(child, signal.SIGCONT, with_its_own=True)
                    time.sleep(0.01)
                    signalled(child, signal.SIGSTOP, seed % 2 == 0)
                    eventually(lambda: site.lender.pinned == 0, "a lease does not end")
            signalled(child, signal.SIGCONT, with_its_own=True)
            assert child.poll() is None, "it has taken wrong bytes for good ones"
        time.sleep(0.05)
        assert child.poll() is None, "it has taken wrong bytes for good ones"
    finally:
        signalled(child, signal.SIGCONT, with_its_own=True)
        end(child)
    assert site.lender.suspected == []
