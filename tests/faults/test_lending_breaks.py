"""Connections between an owner and its readers that break at seeded bytes of what is said: reset, closed, silent,
stalled, one bit otherwise. No wrong byte, no block that stays pinned, no read without end, and the next read is whole.

A proxy stands between the two, so that the bytes decide and not the clock. `make test` has a few of each kind, and
`make faults` the rest.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.core.ids import HASH_BYTES
from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.leasing_connection import LeasingConnection
from kvbm.transport.lending import LentLimits
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.rdma import RdmaReader
from tests.eventually import WAIT_S, eventually
from tests.faults.processes.proxy import Breakage, ProxyHub
from tests.lenders import COPIER, NAMESPACE, SocketSite, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite, tls_of
from tests.nixl_site import NixlSite
from tests.peer_ways import NIXL, TCP, TLS, new_nixl_process, reader_of
from tests.rdma_site import BLOCK as RDMA_BLOCK
from tests.rdma_site import Owner as RdmaOwner
from tests.rdma_site import ReaderDevice

BLOCKS, BLOCK = 12, 400_000  # above what one connection reads alone, and what the system takes of it at once
MOMENTS = 50  # of each way and breakage
QUICK = 5
SILENT_S = 0.25  # how long a read waits for who says nothing
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome
UP, DOWN = "up", "down"
GOLDEN = 0.618
RDMA, HELD = "rdma", 8  # up to the device; blocks that its owner has
STREAMS = {UP: 1, DOWN: 2}  # of readers whose connections break in that direction

seeds = pytest.mark.parametrize(
    "seeds",
    [range(QUICK), pytest.param(range(QUICK, MOMENTS), marks=pytest.mark.nightly)],
    ids=["quick", "rest"],
)
pytestmark = pytest.mark.timeout(600)


class Parted:
    """An owner, a proxy in front of it, and readers behind that."""

    def __init__(self, way: str, folder: Path, opened: ExitStack, nixl: tuple[NixlProcess, NixlProcess] | None) -> None:
        self._way, self._folder, self._nixl, self._opened = way, folder, nixl, opened
        limits = LentLimits(lease_s=WAIT_S)
        hub = ProxyHub()
        count, block = (HELD, RDMA_BLOCK) if way == RDMA else (BLOCKS, BLOCK)
        self.hashes, self.blocks = hashes_of(count), blocks_of(count, block)
        if way == RDMA:
            self.site: SocketSite | RdmaOwner = RdmaOwner(folder)  # which has these blocks
            self.site.rdma.start()
        else:
            lender = NativeLender(count, block, folder, nvme=False)
            if nixl is not None:
                self.site = NixlSite(lender, limits, folder, nixl, falls_back=False)
            else:
                options = {"tls": tls_of(folder)} if way == TLS else {}
                self.site = NativeSite(TCP, lender, limits, folder, **options)
            self.site.lender.put(self.hashes, self.blocks)
        opened.callback(self.site.close)
        opened.callback(hub.close)
        self.proxy = hub.open(int(self.site.tcp.rpartition(":")[2]), is_narrow=True)  # it sends while this breaks
        self._address = f"127.0.0.1:{self.proxy.port}"
        self._said = {side: self._first_and_second(side) for side in STREAMS}

    def _first_and_second(self, side: str) -> list[int]:
        """Bytes of a reader's first read in one direction, and of its second."""
        reader, passed = self.reader(STREAMS[side]), [self.proxy.passed[side]]
        for _ in range(2):
            assert is_whole(self.read(reader))
            self.gives_back()  # the word that says so is counted with its own read
            passed.append(self.proxy.passed[side])
        reader.close()
        return [passed[1] - passed[0], passed[2] - passed[1]]

    def broken(self, breakage: Breakage, seed: int, patience_s: float) -> tuple[PeerReader, PeerRead]:
        """A reader whose connections have broken at some byte of its first read, or of its second, and that read.

        Args:
            patience_s: how long the read waits; longer where this machine is so slow that nothing has broken by then.
        """
        while True:
            reader = self._breaking(breakage, seed)
            found = self.read(reader, patience_s)
            if is_whole(found):  # what breaks may be the word that says so
                eventually(
                    lambda: not self.proxy.is_planned or self.site.lender.pinned == 0,
                    "blocks of a whole read stay pinned",
                )
            if not self.proxy.is_planned:
                return reader, found
            assert patience_s < WAIT_S, f"nothing has broken: {found}"
            self.proxy.heal()
            reader.close()
            patience_s *= 4

    def _breaking(self, breakage: Breakage, seed: int) -> PeerReader:
        side, has_read = UP if seed % 3 == 1 else DOWN, seed % 2 == 1
        reader = self.reader(STREAMS[side])
        if has_read:
            assert is_whole(self.read(reader))
            self.gives_back()
        share = (seed * GOLDEN + random.Random(seed).random() / 10) % 1  # few seeds lie apart, too
        # A signature has some bytes more or less, and a second stream may be late.
        self.proxy.plan(breakage, side, int(self._said[side][has_read] * share * 0.95))
        return reader

    def reader(self, streams: int = 2) -> PeerReader:
        nixl = self._nixl[1] if self._nixl else None
        if isinstance(self.site, RdmaOwner):
            made: PeerReader = self._rdma_reader(self.site)
        else:
            made = reader_of(self._way, self._address, self._folder, nixl, streams)
        self._opened.callback(made.close)
        return made

    def _rdma_reader(self, owner: RdmaOwner) -> RdmaReader:
        def connect(until_s: float) -> LeasingConnection:
            return owner.connection(NAMESPACE, tcp=self._address, within_s=until_s - time.monotonic())

        device: Any = ReaderDevice(owner.lender.host)
        return RdmaReader(device, connect, COPIER, handshake_s=WAIT_S)

    def read(self, reader: PeerReader, deadline_s: float = WAIT_S, count: int = BLOCKS) -> PeerRead:
        """A read, of which the blocks that count as good are as they were computed; nothing writes its rows any more,
        or the next call sees it.
        """
        rows = np.full_like(self.blocks[:count], 0xA5)
        found = reader.read(NAMESPACE, self.hashes[: HASH_BYTES * len(rows)], rows, None, deadline_s)
        good = [at for at, outcome in enumerate(found.result.outcomes) if outcome is GOOD]
        assert np.array_equal(rows[good], self.blocks[good]), "a row is wrong"
        self.left = rows, rows.copy()
        return found

    def nothing_is_written(self) -> None:
        """Since the last read."""
        assert np.array_equal(*self.left), "a row was written after its read"

    def gives_back(self) -> None:
        eventually(lambda: self.site.lender.pinned == 0, "blocks stay pinned")


def is_whole(found: PeerRead) -> bool:
    return (set(found.result.outcomes), found.trouble) == ({GOOD}, "")


@pytest.fixture(scope="module")
def nixl_processes() -> Iterator[tuple[NixlProcess, NixlProcess]]:
    both = new_nixl_process(), new_nixl_process()
    yield both
    for process in both:
        process.close()


NewParted = Callable[[str], Parted]


@pytest.fixture
def new_parted(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewParted]:
    with ExitStack() as opened:

        def new(way: str) -> Parted:
            nixl = request.getfixturevalue("nixl_processes") if way == NIXL else None
            if way == RDMA:
                monkeypatch.setattr("kvbm.transport.rdma.QueuePair", lambda device, *_, **__: device.pair())
                monkeypatch.setattr(
                    "kvbm.transport.rdma.RegisteredMemory",
                    lambda device, array, is_lent: device.memory(device, array, is_lent),
                )
            return Parted(way, tmp_path, opened, nixl)

        yield new


@seeds
@pytest.mark.parametrize("breakage", [Breakage.RESET, Breakage.CLOSE, Breakage.SILENCE, Breakage.STALL])
@pytest.mark.parametrize("way", [TCP, TLS, NIXL, RDMA])
def test_a_connection_that_breaks_anywhere_is_a_miss_and_the_next_read_is_whole(
    new_parted: NewParted, way: str, breakage: Breakage, seeds: range
) -> None:
    """Over NIXL and RDMA it is the connection on which blocks are asked for. Every second reader has read before."""
    parted = new_parted(way)
    is_told = breakage in (Breakage.RESET, Breakage.CLOSE)
    for seed in seeds:
        reader, found = parted.broken(breakage, seed, WAIT_S if is_told else SILENT_S)
        assert set(found.result.outcomes) <= {GOOD, FAILED}
        assert is_whole(found) or found.trouble, "what does not come has a reason"
        parted.gives_back()
        parted.proxy.heal()
        parted.nothing_is_written()
        again = parted.read(reader)
        if is_whole(found) and again.trouble:  # of the word that ended it a part was lost: the owner hangs up on that
            again = parted.read(reader)
        assert is_whole(again), again.trouble
        reader.close()
    parted.gives_back()
    assert parted.site.lender.suspected == []


@seeds
@pytest.mark.parametrize("way", [TCP, TLS])
def test_a_bit_that_is_flipped_on_the_way_never_makes_a_wrong_row(
    new_parted: NewParted, way: str, seeds: range
) -> None:
    parted = new_parted(way)
    for seed in seeds:
        reader, found = parted.broken(Breakage.FLIP, seed, 1.0)
        outcomes = set(found.result.outcomes)
        assert way != TLS or outcomes <= {GOOD, FAILED}, "TLS lets a spoilt byte pass"
        parted.proxy.heal()
        assert is_whole(parted.read(reader))
        parted.nothing_is_written()
        reader.close()
    parted.gives_back()
    assert parted.site.lender.suspected == [], "what was spoilt on the way is taken for spoilt at the owner"


@pytest.mark.parametrize("way", [TCP, TLS])
def test_connections_that_were_forgotten_on_the_way_cost_one_read(new_parted: NewParted, way: str) -> None:
    """As where a firewall has lost its table: whoever says something on them is never answered, while new ones are
    made as ever.
    """
    parted = new_parted(way)
    reader = parted.reader()
    assert is_whole(parted.read(reader))
    assert len(parted.proxy.connections()) == 2
    parted.proxy.plan(Breakage.FORGOTTEN, UP, 0)
    found = parted.read(reader, SILENT_S, count=1)
    assert set(found.result.outcomes) == {FAILED} and found.trouble
    again = parted.read(reader, count=1)
    assert is_whole(again), again.trouble
    assert is_whole(parted.read(reader))
    parted.gives_back()


@pytest.mark.parametrize("way", [TCP, TLS])
def test_both_ends_ask_whether_the_other_is_still_there(new_parted: NewParted, way: str) -> None:
    """On connections that are idle, within half a minute, so that the system ends them where its machine is gone."""
    site = new_parted(way).site
    assert isinstance(site, NativeSite)
    reader = site.reader()
    rows = np.zeros((BLOCKS, BLOCK), dtype=np.uint8)
    assert is_whole(reader.read(NAMESPACE, hashes_of(BLOCKS), rows, None, WAIT_S))
    port = f":{int(site.tcp.rpartition(':')[2]):04X}"

    def timers() -> list[tuple[str, str]]:
        """Of both ends of each connection that stands: what the system waits for, and for how long."""
        ends = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [(end[5][:2], end[5][3:]) for end in ends if end[3] == "01" and port in (end[1][-5:], end[2][-5:])]

    eventually(  # a reader's second connection may be late
        lambda: len(timers()) >= 2 and all(one == "02" and int(left, 16) <= 30 * 100 for one, left in timers()),
        "a connection would stay when the other end is gone",
        state=timers,
    )


@pytest.mark.parametrize("way", [TCP, TLS, NIXL, RDMA])
def test_an_owner_that_came_back_while_nobody_heard_is_read_from_again(new_parted: NewParted, way: str) -> None:
    """At the same address. What a reader knows of its connections is what it knew before, until it uses them."""
    parted = new_parted(way)
    reader = parted.reader()
    assert is_whole(parted.read(reader))
    parted.proxy.plan(Breakage.SILENCE, UP, 0)
    assert set(parted.read(reader, SILENT_S).result.outcomes) == {FAILED}
    parted.site.stop()
    parted.site.start()
    parted.proxy.heal()
    again = parted.read(reader)
    assert is_whole(again), again.trouble
    parted.nothing_is_written()
    parted.gives_back()


@pytest.mark.parametrize("way", [TCP, TLS])
def test_a_reader_that_vanishes_while_it_takes_bytes_holds_nothing_beyond_its_time(
    new_parted: NewParted, way: str
) -> None:
    """Its machine neither takes nor refuses what is sent, and says no end."""
    parted = new_parted(way)
    reader = parted.reader()
    parted.proxy.plan(Breakage.STALL, DOWN, BLOCKS * BLOCK // 8)
    thread = threading.Thread(target=parted.read, args=(reader, SILENT_S))
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    reader.close()
    assert parted.proxy.connections(), "its end was told"
    parted.gives_back()
