"""Owners and readers that are killed or stopped at seeded moments of a read: no wrong byte, no block that stays pinned,
no read without end.

200 moments in all, of which `make test` has three of each kind and `make faults` the rest.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from tests.eventually import WAIT_S, eventually
from tests.faults.processes.lending_owner import BLOCK, BLOCKS
from tests.faults.processes.lending_reader import reader_of
from tests.lenders import NAMESPACE, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite

MOMENTS = 25  # of each side, fault and transport
QUICK = 3
LONGEST_S = 0.004  # a read takes some milliseconds
GOOD = ReadOutcome.GOOD
ROOT = Path(__file__).parents[2]

seeds = pytest.mark.parametrize(
    "seeds",
    [range(QUICK), pytest.param(range(QUICK, MOMENTS), marks=pytest.mark.nightly)],
    ids=["quick", "rest"],
)
pytestmark = pytest.mark.timeout(600)
transports = pytest.mark.parametrize("transport", ["memory", "tcp"])


class Owner:
    """A native owner in a process of its own, which may be started again where it was."""

    def __init__(self, transport: str, folder: Path) -> None:
        self._folder, self._tcp = folder, "127.0.0.1:0"
        self.start()
        self.reader = reader_of(transport, str(folder / "lend.sock") if transport == "memory" else self._tcp)

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.faults.processes.lending_owner", str(self._folder / "lend.sock")]
        self.process = subprocess.Popen(
            [*command, self._tcp, str(self._folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
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
def owner(transport: str, tmp_path: Path) -> Iterator[Owner]:
    made = Owner(transport, tmp_path)
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


@transports
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


@transports
@seeds
def test_an_owner_that_stops_is_a_miss_at_the_deadline_and_goes_on(owner: Owner, seeds: range) -> None:
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


@pytest.fixture
def site(transport: str, tmp_path: Path) -> Iterator[NativeSite]:
    lender = NativeLender(BLOCKS, BLOCK, tmp_path, nvme=False)
    made = NativeSite(transport, lender, LentLimits(lease_s=0.2), tmp_path)
    lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
    yield made
    made.close()


def reading(site: NativeSite) -> subprocess.Popen[str]:
    """A process that reads over and over, and has read all blocks once."""
    where = site.unix if site.transport == "memory" else site.tcp
    command = [sys.executable, "-m", "tests.faults.processes.lending_reader", site.transport, where]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == "reads\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@transports
@seeds
def test_a_reader_that_is_killed_holds_nothing(site: NativeSite, seeds: range) -> None:
    for seed in seeds:
        child = reading(site)
        time.sleep(random.Random(seed).random() * LONGEST_S)
        end(child)
        eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")
    assert site.lender.suspected == []


def holds_alone(site: NativeSite, hashes: bytes, rows: np.ndarray) -> bool:
    """Have the owner hold these blocks and no others; False: somebody reads some yet."""
    site.lender.evict(hashes_of(BLOCKS) + hashes_of(BLOCKS, 7))
    try:
        site.lender.put(hashes, rows)
    except AssertionError:  # no room
        return False
    return True


@transports
@seeds
def test_a_reader_that_stops_holds_nothing_beyond_its_lease_and_believes_no_byte_that_came_too_late(
    site: NativeSite, seeds: range
) -> None:
    """Its blocks go and their slots get other bytes while it stands still in the middle of a copy."""
    other_hashes, others = hashes_of(BLOCKS, 7), blocks_of(BLOCKS, BLOCK, 7)
    child = reading(site)
    try:
        for seed in seeds:
            time.sleep(random.Random(seed).random() * LONGEST_S)
            child.send_signal(signal.SIGSTOP)
            eventually(lambda: site.lender.pinned == 0, "a lease does not end")
            for hashes, rows in ((other_hashes, others), (hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))):
                eventually(partial(holds_alone, site, hashes, rows), "a question that came before does not end")
                if hashes is other_hashes:
                    child.send_signal(signal.SIGCONT)
                    time.sleep(0.01)
                    child.send_signal(signal.SIGSTOP)
                    eventually(lambda: site.lender.pinned == 0, "a lease does not end")
            child.send_signal(signal.SIGCONT)
            assert child.poll() is None, "it has taken wrong bytes for good ones"
        time.sleep(0.05)
        assert child.poll() is None, "it has taken wrong bytes for good ones"
    finally:
        child.send_signal(signal.SIGCONT)
        end(child)
    assert site.lender.suspected == []
