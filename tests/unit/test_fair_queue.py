"""Tenants take turns in the offload queue by their weights, and a full queue is shared by them too."""

from __future__ import annotations

from collections import Counter

from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Tier
from kvbm.core.policy import OTHERS, WriteThrough
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.offload.fair_queue import FairQueue
from kvbm.manager.offload.queue import Offloader

A, B, C = (Namespace(model="m", block_tokens=16, tenant=tenant) for tenant in "abc")
TENANTS = {namespace.id: namespace.tenant for namespace in (A, B, C)}


def queue(capacity_blocks: int = 1000, **weights: int) -> Offloader:
    named = {OTHERS if name == "others" else name: weight for name, weight in weights.items()}
    return Offloader(
        {Tier.HOST: WriteThrough()}, lambda tier, run: run, capacity_blocks, 4, fair=FairQueue(named, TENANTS)
    )


def offer(offloader: Offloader, namespace: Namespace, blocks: int, first: int = 0) -> None:
    """Runs of 4 blocks."""
    for at in range(first, first + blocks, 4):
        hashes = b"".join(namespace.id[:8] + number.to_bytes(8, "big") for number in range(at, at + 4))
        offloader.offer(namespace.id, Tier.HBM, hashes, 1)


def taken(offloader: Offloader, requests: int) -> Counter[NamespaceId]:
    """Blocks of each namespace among the next requests."""
    counted: Counter[NamespaceId] = Counter()
    for _ in range(requests):
        request = offloader.next(0.0)
        if request is not None:
            counted[request.namespace] += len(request.hashes) // HASH_BYTES
    return counted


def test_tenants_get_blocks_by_weight_while_both_want_some_and_all_of_them_after() -> None:
    offloader = queue(a=3, b=1)
    offer(offloader, A, 120)
    offer(offloader, B, 120)
    assert taken(offloader, 40) == {A.id: 120, B.id: 40}
    assert taken(offloader, 40) == {B.id: 80}
    assert offloader.next(0.0) is None
    assert not offloader.waiting_blocks


def test_who_had_nothing_to_offload_has_saved_up_nothing() -> None:
    offloader = queue(a=1, b=1)
    offer(offloader, A, 400)
    assert taken(offloader, 50) == {A.id: 200}
    offer(offloader, B, 400)
    assert taken(offloader, 20) == {A.id: 40, B.id: 40}


def test_all_that_are_not_named_have_one_share_together() -> None:
    offloader = queue(a=1, others=1)
    for namespace in (A, B, C):
        offer(offloader, namespace, 100)
    assert taken(offloader, 40) == {A.id: 80, B.id: 40, C.id: 40}


def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    offloader = queue(100, a=1, b=1)
    offer(offloader, A, 200)
    assert (offloader.waiting_blocks, offloader.skipped[Skipped.QUEUE]) == (100, 100)
    offer(offloader, B, 200)
    assert (offloader.waiting_blocks, offloader.skipped[Skipped.QUEUE]) == (100, 300)
    waiting = taken(offloader, 25)
    assert abs(waiting[A.id] - waiting[B.id]) <= 4
    assert sum(waiting.values()) == 100


def test_a_run_whose_time_has_not_come_costs_its_tenant_no_turn() -> None:
    offloader = queue(a=1, b=1)
    offer(offloader, A, 40)
    offer(offloader, B, 40)
    for _ in range(5):
        request = offloader.next(0.0)
        assert request is not None and request.namespace == A.id
        offloader.defer(request)
    assert offloader.waiting_blocks == 80
    assert taken(offloader, 10) == {A.id: 20, B.id: 20}


def test_without_shares_ways_take_turns_as_ever() -> None:
    offloader = Offloader({Tier.HOST: WriteThrough()}, lambda tier, run: run, 1000, 4)
    for namespace in (A, B):
        offer(offloader, namespace, 40)
    assert taken(offloader, 10) == {A.id: 20, B.id: 20}


def test_a_tenant_whose_namespace_is_declared_later_gets_its_part_of_the_turns() -> None:
    offloader = Offloader(
        {Tier.HOST: WriteThrough()}, lambda tier, run: run, 1000, 4, fair=FairQueue({"a": 3, "b": 1}, {B.id: "b"})
    )
    offloader.declare([A, C])
    for namespace in (A, B):
        offer(offloader, namespace, 120)
    assert taken(offloader, 16) == {A.id: 48, B.id: 16}
