"""Owners and readers on machines of their own, as far as the network is concerned, and the link between them goes: what
was under way is a miss in time, nothing stays pinned, and it is read again once the link is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from tests.eventually import WAIT_S, eventually
from tests.lenders import NAMESPACE, SocketSite, blocks_of, hashes_of
from tests.links import OWNER_IP, Link
from tests.native_owner import NativeLender, NativeSite, tls_of
from tests.nixl_site import NixlSite
from tests.peer_ways import NIXL, TCP, TLS, new_nixl_process

BLOCKS, BLOCK = 128, 1 << 17
LANES = 16 * BLOCK  # of NIXL: many lots, so that a link goes between two of them
RATE = "256mbit"  # at which all blocks take half a second
TRIES = 20
CUT_S = 1.5  # how long a read waits whose link goes
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome

pytestmark = pytest.mark.timeout(600)
ways = pytest.mark.parametrize("way", [TCP, TLS, NIXL])


class FarSite(NativeSite):
    """A native owner that listens at its end of the link."""

    tcp = f"{OWNER_IP}:0"


class Ends:
    """An owner at one end of a link and a reader at the other."""

    def __init__(self, way: str, folder: Path, opened: ExitStack) -> None:
        self.link = Link()
        opened.callback(self.link.close)
        self.site: SocketSite = self.link.inside("owner", lambda: self._new_site(way, folder, opened))
        opened.callback(self.site.close)
        self.blocks = blocks_of(BLOCKS, BLOCK)
        self.site.lender.put(hashes_of(BLOCKS), self.blocks)
        self.reader: PeerReader = self.site.reader(**({"lane_bytes": LANES} if way == NIXL else {}))

    def _new_site(self, way: str, folder: Path, opened: ExitStack) -> SocketSite:
        limits, lender = LentLimits(lease_s=WAIT_S), NativeLender(BLOCKS, BLOCK, folder, nvme=False)
        if way != NIXL:
            options = {"tls": tls_of(folder)} if way == TLS else {}
            return FarSite(TCP, lender, limits, folder, **options)
        processes = new_nixl_process(), new_nixl_process()
        for process in processes:
            opened.callback(process.close)
        return NixlSite(lender, limits, folder, processes, falls_back=False, tcp=FarSite.tcp)

    def read(self, deadline_s: float = WAIT_S, rows: np.ndarray | None = None) -> PeerRead:
        """A read of all blocks, of which those that count as good are as they were computed."""
        into = np.full_like(self.blocks, 0xA5) if rows is None else rows
        found = self.link.inside(
            "reader", lambda: self.reader.read(NAMESPACE, hashes_of(BLOCKS), into, None, deadline_s)
        )
        good = [at for at, outcome in enumerate(found.result.outcomes) if outcome is GOOD]
        assert np.array_equal(into[good], self.blocks[good]), "a row is wrong"
        assert set(found.result.outcomes) <= {GOOD, FAILED}
        assert found.trouble or len(good) == BLOCKS, "what does not come has a reason"
        return found

    def read_while(self, cut: Callable[[], None], rows: np.ndarray) -> PeerRead:
        """A read whose link goes as soon as the first bytes are there."""
        found: list[PeerRead] = []
        thread = threading.Thread(target=lambda: found.append(self.read(CUT_S, rows)))
        thread.start()
        eventually(lambda: (rows[:16] != 0xA5).any() or not thread.is_alive(), "nothing comes")
        cut()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a read has no end"
        return found[0]


@pytest.fixture
def ends(way: str, tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as opened:
        yield Ends(way, tmp_path, opened)


def is_whole(found: PeerRead) -> bool:
    return (set(found.result.outcomes), found.trouble) == ({GOOD}, "")


@ways
@pytest.mark.parametrize("cut", [Link.set_down, Link.drop, Link.reset])
def test_a_link_that_goes_under_a_read_is_a_miss_in_time_and_is_read_over_again(
    ends: Ends, cut: Callable[[Link], None]
) -> None:
    assert is_whole(ends.read())
    for _ in range(TRIES):
        ends.link.slow(RATE)
        rows = np.full_like(ends.blocks, 0xA5)
        found = ends.read_while(lambda: cut(ends.link), rows)
        if not is_whole(found):  # this machine was so slow that all was there before
            break
        ends.link.heal()
    else:
        pytest.fail("a read goes on whatever is done to its link")
    left = rows.copy()
    eventually(lambda: ends.site.lender.pinned == 0, "blocks stay pinned while the reader cannot be heard")
    assert cut is Link.reset or not is_whole(ends.read(0.3)), "the link is there"
    ends.link.heal()
    eventually(lambda: is_whole(ends.read(CUT_S)), "it is not read from again")
    assert np.array_equal(rows, left), "packets that came late have written rows of a read that was over"
    eventually(lambda: ends.site.lender.pinned == 0, "blocks stay pinned")
    assert ends.site.lender.suspected == []


@ways
def test_an_owner_that_came_back_while_the_link_was_away_is_read_from_again(ends: Ends) -> None:
    """As a machine that has started anew: nobody has told the reader that its connections are gone."""
    assert is_whole(ends.read())
    ends.link.drop()
    assert not is_whole(ends.read(0.3))
    ends.site.stop()
    ends.link.inside("owner", ends.site.start)
    ends.link.heal()
    eventually(lambda: is_whole(ends.read(CUT_S)), "it is not read from again")
    eventually(lambda: ends.site.lender.pinned == 0, "blocks stay pinned")


@pytest.mark.nightly  # the system gives a peer a minute
@pytest.mark.parametrize("way", [TCP, TLS])
def test_connections_of_a_reader_that_has_vanished_end(ends: Ends) -> None:
    assert is_whole(ends.read())
    assert isinstance(ends.site, NativeSite)
    lending = ends.site.lending
    assert lending.stats()["connections"] > 0
    ends.link.drop()
    ends.reader.close()
    eventually(lambda: lending.stats()["connections"] == 0, "they stay", 3 * WAIT_S, lending.stats)
