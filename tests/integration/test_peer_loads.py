"""A manager that reads what others lend: whose copies these are, what a stale catalog costs, and what is computed
instead.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.core.answers import PeerHolding
from kvbm.core.events import BlocksEvicted, BlocksMigrated, EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Tier, split_hashes, split_slots
from kvbm.core.peer_address import PeerAddress
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.locate.base import FoundElsewhere
from kvbm.manager.copies.copies_in_flight import lender
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.memory import MemoryLog
from kvbm.transport.base import PeerRead, failed_read
from kvbm.transport.peers import TCP, Peers
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, KnowsAll, check_bytes, events_in, hashes_of, make_manager, serve
from tests.object_pools import memory_objects

WAIT_S = 60.0
SIZES = {Tier.HBM: 400, Tier.HOST: 400}


class FromManager:
    """Reads what a manager in this process holds in HOST and NVME, as an owner would let it."""

    transport = TCP

    def __init__(self, network: Network, owner: Manager) -> None:
        self.network, self.owner = network, owner

    def read(
        self, namespace: Namespace, hashes: bytes, rows: np.ndarray, at: Sequence[int] | None, deadline_s: float
    ) -> PeerRead:
        network, count = self.network, len(hashes) // HASH_BYTES
        network.asked.append((self.owner.instance, count))
        if network.held_back is not None:
            network.held_back.wait(WAIT_S)
        if network.is_down:
            return failed_read(count, "connection reset")
        with self.owner._lock:
            found = self.owner._ledger.match(hashes, False, Tier.HOST, namespace.id)
        outcomes, sums = [ReadOutcome.MISSING] * count, np.zeros(count, dtype=np.uint32)
        places = list(range(count) if at is None else at)
        for block, (tier, slot) in enumerate(zip(found.tiers, split_slots(found.slots), strict=True)):
            wanted = split_hashes(hashes)[block]
            pool = self.owner.pools.slots[Tier(tier)]
            result = pool.read([slot], namespace.id, wanted, rows, [places[block]])
            outcomes[block], sums[block] = result.outcomes[0], result.checksums[0]
            if network.spoils and outcomes[block] == ReadOutcome.GOOD:
                outcomes[block] = ReadOutcome.CORRUPT
        return PeerRead(ReadResult(outcomes, sums))

    def close(self) -> None:
        return


class Network(KnowsAll):
    """Owners that are told to have everything, in the way there is in one process."""

    def __init__(self) -> None:
        self.owners: dict[str, Manager] = {}
        self.said: dict[str, int] = {}  # blocks that an owner is said to have, from the first of a prompt on
        self.claimed = 0
        self.asked: list[tuple[str, int]] = []
        self.questions: list[tuple[int, int]] = []
        self.is_down = self.spoils = False
        self.held_back: threading.Event | None = None
        self.peers = Peers(lambda instance, transport, address: FromManager(self, self.owners[instance]), "here", [TCP])
        self.peers.declare([NAMESPACE])

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        self.questions.append((len(hashes) // HASH_BYTES, first))
        if first >= len(hashes) // HASH_BYTES:
            return FoundElsewhere(self.claimed)
        lends = PeerAddress("there", "", "a:1").words()
        held = [
            PeerHolding(instance=name, depth=depth - first, tiers={}, distance=0, suspect=False, lends=lends)
            for name, depth in self.said.items()
            if depth > first
        ]
        return FoundElsewhere(self.claimed, held)


@pytest.fixture
def network() -> Network:
    return Network()


def owner(network: Network, name: str, depth: int, prompt: int = 1, said: int = 0) -> Manager:
    """An instance that has the first blocks of a prompt in HOST."""
    manager = make_manager(SIZES, instance=name)
    serve(manager, prompt, depth)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(prompt, depth))
    network.owners[name], network.said[name] = manager, said or depth
    return manager


def reader(network: Network, log: MemoryLog | None = None, **more: Any) -> Manager:
    return make_manager(SIZES, instance="reader", locator=network, peers=network.peers, sink=log, **more)


def fetched(log: MemoryLog) -> list[tuple[str, bool, int]]:
    """What the journal says came from others: from whom, whether they keep it, and how many blocks."""
    return [
        (str(event.source), event.kept, len(event.hashes) // HASH_BYTES)
        for event in events_in(log)
        if isinstance(event, BlocksMigrated) and event.cause == MigrateCause.FETCH
    ]


def test_what_another_computed_is_read_from_its_host_and_not_computed_twice(network: Network) -> None:
    log = MemoryLog()
    with owner(network, "owner", 6), reader(network, log) as second:
        assert serve(second, 1, 8).prefix.hits == {Tier.HOST: 6}
        stats = second.stats()
        assert (stats.peer_hits, stats.hit_blocks[Tier.HOST], stats.verified_reads) == (6, 6, 6)
        assert stats.peers is not None and stats.peers.blocks == {TCP: 6}
        assert second.settle(WAIT_S)
        eventually(lambda: fetched(log) == [("owner", True, 6)], "the fetch is not in the journal")
        assert serve(second, 1, 8).prefix.hits == {Tier.HBM: 8}  # nobody is asked
        assert network.questions == [(8, 0)]


def test_the_own_tiers_come_first_and_others_are_asked_for_the_rest(network: Network) -> None:
    with owner(network, "owner", 8), reader(network) as second:
        serve_part(second, 3)
        assert serve(second, 1, 8).prefix.hits == {Tier.HBM: 3, Tier.HOST: 5}
        assert network.questions[-1] == (5, 0)
        assert network.asked == [("owner", 5)]


def test_a_look_that_raises_is_a_miss_with_one_warning(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> FoundElsewhere:
        raise RuntimeError("a defect of ours")

    with owner(network, "owner", 6), reader(network) as second:
        serve_part(second, 3)
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(network, "find", broken)
            for _ in range(2):
                prefix = second.acquire(NAMESPACE.id, hashes_of(1, 8))
                assert prefix.hits == {Tier.HBM: 3}
                second.unpin(prefix.slots)
        assert [one["event"] for one in logs if one["log_level"] == "error"] == ["load.not_looked"]
        assert second.settle(WAIT_S)  # what was computed is being offloaded
        counts = second.stats().pools[Tier.HBM]
        assert counts.held == counts.evictable  # nothing stays pinned
        prefix = second.acquire(NAMESPACE.id, hashes_of(1, 8))
        assert prefix.hits == {Tier.HBM: 3, Tier.HOST: 3}


def serve_part(manager: Manager, depth: int) -> None:
    """The first blocks of the prompt, computed here."""
    said = dict(manager._loads.locator.said)  # type: ignore[attr-defined]
    manager._loads.locator.said.clear()  # type: ignore[attr-defined]
    serve(manager, 1, depth)
    manager._loads.locator.said.update(said)  # type: ignore[attr-defined]


def test_a_long_run_is_split_over_its_holders(network: Network) -> None:
    with owner(network, "one", 300), owner(network, "two", 300), reader(network) as second:
        prefix = second.acquire(NAMESPACE.id, hashes_of(1, 300))
        check_bytes(second, hashes_of(1, 300), prefix.slots)
        of_each = {name: sum(blocks for who, blocks in network.asked if who == name) for name in ("one", "two")}
        assert prefix.depth == sum(of_each.values()) == 300 and min(of_each.values()) >= 100
        second.unpin(prefix.slots)


@pytest.mark.parametrize("spoiled", ["gone", "corrupt", "down"])
def test_what_cannot_be_had_is_a_miss_and_its_owner_is_left_alone(network: Network, spoiled: str) -> None:
    log = MemoryLog()
    with owner(network, "owner", 4, said=8) as first, reader(network, log) as second, capture_logs() as logs:
        if spoiled == "gone":
            first.evict(Tier.HOST, hashes_of(1, 4), EvictReason.CLEARED)
        network.spoils, network.is_down = spoiled == "corrupt", spoiled == "down"
        assert serve(second, 1, 8).prefix.depth == 0
        assert second.settle(WAIT_S)
        network.said["owner"], asked = 9, len(network.asked)
        assert serve(second, 1, 9).prefix.depth == 8  # of its own
        assert len(network.asked) == asked
        events = [one["event"] for one in logs if one["log_level"] == "warning"]
        assert events == {"gone": [], "corrupt": ["peer.corrupt"], "down": ["peer.unread"]}[spoiled]
        stats = second.stats()
        assert stats.peer_hits == stats.quarantined_slots == 0
        assert fetched(log) == [] and not any(isinstance(event, BlocksEvicted) for event in events_in(log))


def test_a_catalog_that_says_too_much_costs_the_rest_of_the_run(network: Network) -> None:
    with owner(network, "owner", 4, said=8), reader(network) as second:
        assert serve(second, 1, 8).prefix.hits == {Tier.HOST: 4}
        assert second.stats().peers is not None


def test_late_reads_of_a_peer_count_apart_and_end_by_themselves(network: Network) -> None:
    network.held_back = threading.Event()
    with owner(network, "owner", 4), reader(network, wait_s=0.1) as second:
        assert second.acquire(NAMESPACE.id, hashes_of(1, 4)).depth == 0
        stats = second.stats()
        assert stats.late_slots > 0 and second._copies.late_from[lender(InstanceId("owner"))] == 1
        network.held_back.set()
        eventually(lambda: second.stats().late_slots == 0, "the late read holds its slots")
        stats = second.stats()
        assert (stats.late_copies, stats.peer_late_copies, stats.peer_hits) == (1, 1, 0)
        assert +second._copies.late_from == {}
        prefix = second.acquire(NAMESPACE.id, hashes_of(1, 4))
        assert prefix.hits == {Tier.HBM: 4}
        second.unpin(prefix.slots)


def test_a_silent_peer_is_asked_no_more_until_its_reads_end(network: Network) -> None:
    network.held_back = threading.Event()
    with owner(network, "owner", 8), reader(network, wait_s=0.05) as second:
        for depth in (2, 4):  # as many as there are threads
            second.acquire(NAMESPACE.id, hashes_of(1, depth)[(depth - 2) * HASH_BYTES :])
        assert second.stats().trouble == "peer owner: reads do not end; a miss until they do"
        asked = len(network.asked)
        assert second.acquire(NAMESPACE.id, hashes_of(1, 8)).depth == 0 and len(network.asked) == asked
        network.held_back.set()
        eventually(lambda: second.stats().trouble == "", "it is left alone for ever")


def test_what_is_quicker_to_compute_is_computed(network: Network) -> None:
    with owner(network, "owner", 8), reader(network) as second:
        second.report_load(0, 0, prefill_tokens_per_s=1e12)
        assert serve(second, 1, 8).prefix.depth == 0 and network.asked == []
        second.report_load(0, 0, prefill_tokens_per_s=1.0)
        second.evict(Tier.HBM, hashes_of(1, 8))
        second.evict(Tier.HOST, hashes_of(1, 8))
        assert serve(second, 1, 8).prefix.hits == {Tier.HOST: 8}


def test_objects_and_peers_divide_a_run_and_one_question_asks_for_both(network: Network) -> None:
    objects = memory_objects(BLOCK_BYTES, 4)
    with make_manager(SIZES, objects=objects, locator=network) as writer:
        serve(writer, 1, 200)
        assert writer.settle(WAIT_S)
    again = memory_objects(BLOCK_BYTES, 4, objects.store)
    network.claimed, network.questions = 200, []
    with owner(network, "owner", 80), reader(network, objects=again) as second:
        prefix = second.acquire(NAMESPACE.id, hashes_of(1, 202))
        check_bytes(second, hashes_of(1, 200), prefix.slots)
        assert prefix.depth == 200 and network.questions == [(202, 0)]
        assert set(prefix.hits) == {Tier.HOST, Tier.OBJECT} and sum(prefix.hits.values()) == 200
        assert second.stats().peer_hits == prefix.hits[Tier.HOST] <= 80
        second.unpin(prefix.slots)


def test_a_namespace_that_cannot_be_opened_is_asked_of_nobody(network: Network) -> None:
    network.peers = Peers(network.peers._open_reader, "here", [TCP], may_open=lambda _: False)
    network.peers.declare([NAMESPACE])
    with owner(network, "owner", 4), reader(network) as second:
        assert serve(second, 1, 4).prefix.depth == 0
        assert network.questions == [] and network.asked == []


def test_closing_ends_what_is_read(network: Network) -> None:
    network.held_back = threading.Event()
    first = owner(network, "owner", 4)
    second = reader(network, wait_s=0.05)
    second.acquire(NAMESPACE.id, hashes_of(1, 4))
    threading.Timer(0.2, network.held_back.set).start()
    second.close()
    first.close()
    eventually(lambda: not second._copies.running, "a read goes on")
