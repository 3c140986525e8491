"""What reading between instances costs, as the catalog learns it from what they tell of their reads."""

from __future__ import annotations

import pytest

from kvbm.catalog.routing.peer_links import MEASURED_WITHIN, PeerLinks
from kvbm.catalog.routing.transfers import MOST_DISTANCE
from kvbm.core.fetching import HALF_LIFE_S, MEMORY_LINK, TCP_LINKS, Transfer


def test_without_reads_links_are_those_that_instances_assume() -> None:
    memory, tcp = PeerLinks().table(0.0)
    assert len(memory) == len(tcp) == MOST_DISTANCE + 1
    assert {one[:2] for one in memory} == {MEMORY_LINK}
    assert [one[:2] for one in tcp[:4]] == list(TCP_LINKS)
    assert {one[:2] for one in tcp[3:]} == {TCP_LINKS[3]}
    assert all(one.together_bytes_per_s == one.bytes_per_s for one in tcp)
    assert not any(one.together_bytes_per_s for one in memory)


def test_reads_at_one_distance_change_the_link_at_that_distance_and_are_forgotten() -> None:
    links = PeerLinks()
    for _ in range(10):
        links.measured(0.0, Transfer("tcp", 1, 64 << 20, 640_000))  # 105 MB/s
    memory, tcp = links.table(0.0)
    assert tcp[1].bytes_per_s == pytest.approx(1.05e8, rel=0.05)
    assert tcp[1].together_bytes_per_s == TCP_LINKS[1].bytes_per_s  # while nothing else comes
    assert tcp[0][:2] == TCP_LINKS[0] and memory[1][:2] == MEMORY_LINK
    later, _ = links.table(0.5), links.table(20 * HALF_LIFE_S)
    assert later == (memory, tcp)  # prices follow once a second
    assert links.table(20 * HALF_LIFE_S)[1][1].bytes_per_s == pytest.approx(TCP_LINKS[1].bytes_per_s, rel=0.01)


def test_ways_between_machines_are_one_and_memory_is_another() -> None:
    links = PeerLinks()
    for _ in range(10):
        links.measured(0.0, Transfer("rdma", 2, 64 << 20, 6_400))  # 10 GB/s
    memory, tcp = links.table(0.0)
    assert tcp[2].bytes_per_s > 5e9
    assert memory[2][:2] == MEMORY_LINK


@pytest.mark.parametrize("size", [1, 1 << 20, 1 << 40])
def test_whoever_tells_of_wonders_is_believed_within_bounds(size: int) -> None:
    quick, slow = PeerLinks(), PeerLinks()
    for _ in range(1000):
        quick.measured(0.0, Transfer("memory", 10**9, size, 0))
        slow.measured(0.0, Transfer("tcp", -5, size, 1 << 60))
    assert quick.table(0.0)[0][MOST_DISTANCE].bytes_per_s <= MEMORY_LINK.bytes_per_s * MEASURED_WITHIN
    assert slow.table(0.0)[1][0].bytes_per_s == pytest.approx(TCP_LINKS[0].bytes_per_s / MEASURED_WITHIN, rel=0.01)
    failed = PeerLinks()
    failed.measured(0.0, Transfer("tcp", 0, 0, 10**9))
    assert failed.table(0.0)[1][0].bytes_per_s < TCP_LINKS[0].bytes_per_s


def test_one_read_that_hung_is_soon_outweighed() -> None:
    links, rate = PeerLinks(), TCP_LINKS[0].bytes_per_s
    links.measured(0.0, Transfer("tcp", 0, 0, 1 << 62))
    for _ in range(10):
        links.measured(0.0, Transfer("tcp", 0, 64 << 20, int((64 << 20) / rate * 1e6)))
    assert links.table(0.0)[1][0].bytes_per_s > rate / 2
