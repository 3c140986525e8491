"""The table of peers: the best way to each, who is left alone, what is measured, and readers that come and go."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.core.answers import PeerHolding
from kvbm.core.errors import PoolError
from kvbm.core.fetching import MEMORY_LINK, PAUSE_MOST_S, TCP_LINKS
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace
from kvbm.core.peer_address import UCX, PeerAddress
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, failed_read
from kvbm.transport.peers import MEMORY, NIXL, RDMA, TCP, Peers

SPACE = Namespace(model="m", revision="r", block_tokens=16)
HASHES = b"".join(bytes([number]) * HASH_BYTES for number in range(1, 5))
GOOD, MISSING, CORRUPT = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT


def peer(
    name: str = "a",
    depth: int = 4,
    host: str = "here",
    unix: str = "/s",
    tcp: str = "a:1",
    far: int = 0,
    rdma: str = "",
    nixl: str = "",
) -> PeerHolding:
    lends = PeerAddress(host, unix, tcp, rdma, nixl).words()
    return PeerHolding(instance=name, depth=depth, tiers={}, distance=far, suspect=False, lends=lends)


class Network:
    """Readers that answer as they are told, and a clock that goes by a second with each read."""

    def __init__(self, most: int = 32, transports: Sequence[str] = (MEMORY, TCP)) -> None:
        self.now_s = 0.0
        self.answers: dict[tuple[str, str], PeerRead | Exception] = {}
        self.opened: list[tuple[str, str]] = []
        self.closed: list[tuple[str, str]] = []
        self.unreachable: set[str] = set()
        self.peers = Peers(
            self.open, "here", transports, lambda one: one.tenant != "hidden", most, clock=lambda: self.now_s
        )
        self.peers.declare([SPACE])

    def open(self, instance: InstanceId, transport: str, address: PeerAddress) -> Reader:
        self.opened.append((instance, transport))
        if transport in self.unreachable:
            raise PoolError(f"{transport} cannot be had")
        return Reader(self, instance, transport)

    def answer(
        self, outcomes: list[ReadOutcome], name: str = "a", way: str = MEMORY, trouble: str = "", retry_s: float = 0.0
    ) -> None:
        result = ReadResult(outcomes, np.zeros(len(outcomes), dtype=np.uint32))
        self.answers[name, way] = PeerRead(result, trouble, retry_s)

    def read(self, holding: PeerHolding) -> list[ReadOutcome]:
        (source,) = self.peers.sources(SPACE.id, [holding])
        rows = np.zeros((4, 1 << 20), dtype=np.uint8)
        return self.peers.read(source, SPACE.id, HASHES, rows, None, 1.0).outcomes

    def ways(self, *holdings: PeerHolding) -> list[tuple[str, str]]:
        return [(one.instance, one.transport) for one in self.peers.sources(SPACE.id, holdings)]


class Reader:
    def __init__(self, network: Network, name: str, transport: str) -> None:
        self.network, self.name, self.transport = network, name, transport

    def read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
    ) -> PeerRead:
        self.network.now_s += 1.0
        answer = self.network.answers.get((self.name, self.transport), failed_read(4, "nothing is known of it"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.network.closed.append((self.name, self.transport))


def test_rdma_comes_between_memory_and_tcp_and_tcp_serves_where_it_is_refused() -> None:
    network = Network(transports=(MEMORY, RDMA, TCP))
    both, near = peer(host="there", rdma="rxe0 fe80"), peer(rdma="rxe0 fe80")
    assert network.ways(near) == [("a", MEMORY)]
    assert network.ways(both) == [("a", RDMA)]
    assert network.ways(peer(host="there")) == [("a", TCP)], "the owner has no device"
    assert Network().ways(both) == [("a", TCP)], "the reader has none"
    network.answer([ReadOutcome.FAILED] * 4, way=RDMA, trouble="only for who has proved each of its namespaces")
    network.answer([GOOD] * 4, way=TCP)
    with capture_logs() as logs:
        network.read(both)
        assert network.ways(both) == [("a", TCP)]
        assert network.read(both) == [GOOD] * 4
    assert [one["event"] for one in logs] == ["peer.unread"]
    assert network.peers.stats().blocks == {RDMA: 0, TCP: 4}
    network.now_s += PAUSE_MOST_S
    assert network.ways(both) == [("a", RDMA)]


def test_who_is_about_to_have_blocks_is_asked_for_them_again_and_again() -> None:
    network = Network()
    network.answer([MISSING] * 4)
    for _ in range(3):
        (source,) = network.peers.sources(SPACE.id, [peer()], expected="a")
        rows = np.zeros((4, 1 << 20), dtype=np.uint8)
        assert network.peers.read(source, SPACE.id, HASHES, rows, None, 1.0).outcomes == [MISSING] * 4
    assert network.peers.stats().missing_blocks == 0
    assert network.ways(peer()) == [("a", MEMORY)], "nobody else leaves it alone for that"
    network.read(peer())
    assert network.peers.stats().missing_blocks == 4
    assert network.ways(peer()) == []
    assert [one.instance for one in network.peers.sources(SPACE.id, [peer()], expected="a")] == ["a"]


def test_who_is_busy_is_known_to_be() -> None:
    network = Network()
    assert not network.peers.is_busy("a")
    network.answer([ReadOutcome.FAILED] * 4, retry_s=5.0, trouble="as much is lent as may be")
    network.read(peer())
    assert network.peers.is_busy("a") and network.peers.sources(SPACE.id, [peer()], expected="a") == []
    network.now_s += 6.0
    assert not network.peers.is_busy("a")


def test_nixl_comes_between_rdma_and_tcp() -> None:
    network = Network(transports=(MEMORY, RDMA, NIXL, TCP))
    assert network.ways(peer(rdma="rxe0 fe80", nixl=UCX)) == [("a", MEMORY)]
    both = peer(host="there", rdma="rxe0 fe80", nixl=UCX)
    assert network.ways(both) == [("a", RDMA)]
    network.answer([ReadOutcome.FAILED] * 4, way=RDMA, trouble="the link is down")
    network.read(both)
    assert network.ways(both) == [("a", NIXL)]
    assert Network(transports=(MEMORY, TCP)).ways(both) == [("a", TCP)], "who cannot read over NIXL passes it over"
    assert network.ways(peer(host="there")) == [("a", TCP)]


def test_where_rdma_is_refused_for_good_tcp_serves_every_read_with_one_warning_and_is_what_is_measured() -> None:
    network = Network(transports=(MEMORY, RDMA, TCP))
    both, why = peer(host="there", rdma="rxe0 fe80"), "only for who has proved each of its namespaces"
    network.answer([GOOD] * 4, way=RDMA)
    answered = network.answers["a", RDMA]
    network.answers["a", RDMA] = answered._replace(by=TCP, passed_over=why)  # type: ignore[union-attr]
    network.answer([GOOD] * 4, way=TCP)
    planned = network.peers.sources(SPACE.id, [both])[0]
    ways = []
    with capture_logs() as logs:
        for _ in range(300):
            ways += network.ways(both)
            assert network.read(both) == [GOOD] * 4
    assert [(one["event"], one["transport"], one["why"]) for one in logs] == [("peer.passed_over", RDMA, why)]
    assert 8 < ways.count(("a", RDMA)) < 12, "it is tried again, a minute apart in the end"
    stats = network.peers.stats()
    assert (stats.blocks, stats.failed_reads) == ({TCP: 1200}, 0)
    assert {one.transport for one in network.peers.take_transfers()} == {TCP}
    assert network.ways(both) == [("a", TCP)] and planned.transport == RDMA
    rows = np.zeros((4, 1 << 20), dtype=np.uint8)
    read = network.peers.read(planned, SPACE.id, HASHES, rows, None, 1.0)
    assert read.outcomes == [GOOD] * 4, "what was planned before fails"
    network.now_s += PAUSE_MOST_S
    network.answer([GOOD] * 4, way=RDMA)
    assert network.read(both) == [GOOD] * 4
    assert network.peers.stats().blocks[RDMA] == 4 and network.ways(both) == [("a", RDMA)]


def test_what_fails_by_tcp_after_rdma_was_passed_over_counts_against_tcp() -> None:
    network = Network(transports=(RDMA, TCP))
    both = peer(host="there", rdma="rxe0 fe80")
    network.answers["a", RDMA] = failed_read(4, "reset")._replace(by=TCP, passed_over="no room")
    with capture_logs() as logs:
        network.read(both)
    assert [one["event"] for one in logs] == ["peer.passed_over", "peer.unread"]
    assert network.ways(both) == []


def test_memory_is_used_on_one_machine_and_tcp_beyond_it() -> None:
    network = Network()
    assert network.ways(peer(), peer("b", host="there"), peer("c", tcp="", host="there"), peer("d", unix="")) == [
        ("a", MEMORY),
        ("b", TCP),
        ("d", TCP),
    ]
    assert Network(transports=[MEMORY]).ways(peer("b", host="there")) == []
    sources = network.peers.sources(SPACE.id, [peer(), peer("b", host="there", far=1)])
    assert [one.link for one in sources] == [MEMORY_LINK, TCP_LINKS[1]]
    assert [one.together_bytes_per_s for one in sources] == [0.0, TCP_LINKS[1].bytes_per_s]  # memory is no link


def test_one_reader_serves_all_reads_and_what_they_cost_is_measured() -> None:
    network = Network()
    network.answer([GOOD] * 4)
    for _ in range(3):
        assert network.read(peer()) == [GOOD] * 4
    assert network.opened == [("a", MEMORY)]
    (source,) = network.peers.sources(SPACE.id, [peer()])
    assert source.link.bytes_per_s < 16e6 < MEMORY_LINK.bytes_per_s  # 4 MiB took a second
    found = network.peers.stats()
    assert (found.reads, found.failed_reads, found.readers) == (3, 0, 1)
    assert (found.blocks, found.bytes) == ({MEMORY: 12}, {MEMORY: 12 << 20})
    network.peers.close()
    network.peers.close()
    assert network.closed == [("a", MEMORY)] and network.ways(peer()) == []


def test_who_lacks_what_it_was_said_to_have_is_left_alone() -> None:
    network = Network()
    network.answer([MISSING] * 4)
    with capture_logs() as logs:
        assert network.read(peer()) == [MISSING] * 4
    assert network.ways(peer(), peer("b")) == [("b", MEMORY)] and not logs
    network.now_s += 1.0
    network.answer([GOOD, GOOD, MISSING, MISSING])  # some of it is something
    assert network.read(peer()) == [GOOD, GOOD, MISSING, MISSING]
    assert network.ways(peer()) == [("a", MEMORY)]
    assert network.peers.stats().missing_blocks == 6


def test_a_busy_one_is_asked_again_when_it_said() -> None:
    network = Network()
    network.answers["a", MEMORY] = failed_read(4, "it is busy", 0.25)
    with capture_logs() as logs:
        for _ in range(8):  # the pause does not grow
            network.read(peer())
            assert network.ways(peer()) == []
            network.now_s += 0.125
            assert network.ways(peer()) == []
            network.now_s += 0.125
            assert network.ways(peer()) == [("a", MEMORY)]
    assert not logs
    (source,) = network.peers.sources(SPACE.id, [peer()])
    assert source.link == MEMORY_LINK  # nothing was measured
    network.answers["a", MEMORY] = failed_read(4, "it is busy", 1e6)  # nobody says for how long but us
    network.read(peer())
    network.now_s += PAUSE_MOST_S
    assert network.ways(peer()) == [("a", MEMORY)]


def test_who_does_not_lend_one_namespace_is_asked_for_its_others() -> None:
    network, other = Network(), msgspec.structs.replace(SPACE, model="another")
    network.peers.declare([other])
    shut = failed_read(4, "it does not open the namespace")._replace(is_shut=True)
    network.answers["a", MEMORY] = shut
    with capture_logs() as logs:
        network.read(peer())
    assert [one["event"] for one in logs] == ["peer.unread"]
    assert network.ways(peer()) == []
    (source,) = network.peers.sources(other.id, [peer()])
    assert (source.transport, source.link) == (MEMORY, MEMORY_LINK)  # nothing was measured
    network.answer([GOOD] * 4)
    rows = np.zeros((4, 64), dtype=np.uint8)
    assert network.peers.read(source, other.id, HASHES, rows, None, 1.0).outcomes == [GOOD] * 4
    network.answers["a", MEMORY] = shut
    network.read(peer())
    network.now_s += 1.0
    assert network.ways(peer()) == []  # the second pause is longer: another namespace's success changes nothing
    network.now_s += 1.0
    assert network.ways(peer()) == [("a", MEMORY)]


def test_a_way_that_does_not_work_gives_place_to_the_next_with_one_warning() -> None:
    network = Network()
    network.unreachable.add(MEMORY)
    network.answer([GOOD] * 4, way=TCP)
    with capture_logs() as logs:
        sources = network.peers.sources(SPACE.id, [peer()])
        rows = np.zeros((4, 64), dtype=np.uint8)
        for _ in range(3):  # planned together
            read = network.peers.read(sources[0], SPACE.id, HASHES, rows, None, 1.0)
            assert read.outcomes == [ReadOutcome.FAILED] * 4
    assert [one["event"] for one in logs] == ["peer.unread"] and "memory cannot be had" in logs[0]["why"]
    assert network.opened == [("a", MEMORY)]  # the others failed at once
    assert network.read(peer()) == [GOOD] * 4 and network.opened[-1] == ("a", TCP)
    network.answers["a", TCP] = failed_read(4, "reset")
    with capture_logs() as logs:
        network.read(peer())  # by memory: its pause is over
        network.read(peer())
        assert network.ways(peer()) == []
    assert [one["why"] for one in logs] == ["memory cannot be had", "reset"]


def test_what_cannot_be_opened_is_not_asked_for() -> None:
    network = Network()
    hidden = Namespace(model="m", revision="r", block_tokens=16, tenant="hidden")
    network.peers.declare([hidden])
    assert network.peers.knows(SPACE.id) and not network.peers.knows(hidden.id)
    assert not network.peers.knows(Namespace(model="other", block_tokens=1).id)


def test_the_least_used_reader_goes_and_so_does_one_of_an_address_that_was_left() -> None:
    network = Network(most=2)
    for name in ("a", "b", "c", "d"):
        network.answer([GOOD] * 4, name)
    for name in ("a", "b", "a", "c"):
        network.read(peer(name))
    assert network.closed == [("b", MEMORY)] and network.peers.stats().readers == 2
    network.read(peer("c", unix="/moved"))
    assert network.closed == [("b", MEMORY), ("c", MEMORY)]


def test_a_reader_in_use_stays_open_beyond_the_most_there_may_be() -> None:
    network = Network(most=1)
    for name in ("a", "b", "c"):
        network.answer([GOOD] * 4, name)

    class Reading(Reader):
        def read(
            self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
        ) -> PeerRead:
            if self.name == "a":
                network.read(peer("b"))  # another request comes meanwhile
                assert network.closed == []
            return super().read(namespace, hashes, rows, at, deadline_s)

    network.peers._open_reader = lambda instance, transport, _: Reading(network, instance, transport)
    network.read(peer("a"))
    assert network.peers.stats().readers == 2
    network.read(peer("c"))
    assert network.closed == [("a", MEMORY), ("b", MEMORY)]


def test_a_reader_that_two_want_at_once_is_one() -> None:
    network = Network()
    network.answer([GOOD] * 4)
    inner, is_first = network.open, [True]

    def slow(instance: InstanceId, transport: str, address: PeerAddress) -> Reader:
        if is_first.pop() if is_first else False:
            network.read(peer())  # another comes meanwhile
        return inner(instance, transport, address)

    network.peers._open_reader = slow
    network.read(peer())
    assert len(network.opened) == 2 and len(network.closed) == 1 and network.peers.stats().readers == 1
    assert network.peers.stats().blocks == {MEMORY: 8}


def test_corrupt_bytes_are_warned_of_and_never_good() -> None:
    network = Network()
    network.answer([GOOD, CORRUPT, CORRUPT, GOOD])
    with capture_logs() as logs:
        assert network.read(peer()) == [GOOD, CORRUPT, CORRUPT, GOOD]
    assert [(one["event"], one["blocks"]) for one in logs] == [("peer.corrupt", 2)]
    assert network.peers.stats().corrupt_blocks == 2
    assert network.ways(peer()) == []  # also beside good ones


def test_a_reader_that_raises_gives_its_place_back() -> None:
    network = Network(most=1)
    network.answers["a", MEMORY] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        network.read(peer())
    network.answer([GOOD] * 4, "b")
    network.read(peer("b"))
    assert network.closed == [("a", MEMORY)]
