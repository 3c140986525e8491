"""Claims of a pool that forgets follow what it has, whatever it drops, and an instance remembers no more than
it may.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.core.codec import decode_frame
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier, split_hashes
from kvbm.manager.objects.claims import Claimed, ObjectClaims
from kvbm.manager.objects.own_claims import OwnClaims
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.base import ORIGIN
from kvbm.streams.memory import MemoryLog
from tests.managers import NAMESPACE, hashes_of, make_manager, serve
from tests.object_pools import memory_objects

ONE = NamespaceId(b"1" * 16)
K = 4


def claimed(number: int) -> Claimed:
    return Claimed(ONE, number.to_bytes(2 * HASH_BYTES, "big"))


def test_each_claim_has_two_others_looked_at_those_first_that_were_not_for_longest() -> None:
    claims = ObjectClaims()
    claims.add(claimed(number) for number in range(10))
    assert len(claims.due()) == 10
    claims.add([claimed(10), claimed(3)])
    assert claims.due() == [claimed(number) for number in (0, 1, 2, 4)]
    assert claims.due() == []
    assert claims.due(idle=3) == [claimed(number) for number in (5, 6, 7)]


def test_no_more_is_claimed_than_twice_what_a_pool_holds_that_drops_the_oldest() -> None:
    claims, holds = ObjectClaims(), 100
    for number in range(5000):
        claims.add([claimed(number)])
        claims.drop(
            [one for one in claims.due() if one.hashes < claimed(number - holds).hashes] if number > holds else []
        )
        assert len(claims) <= 2 * holds + 2


def test_no_more_objects_are_remembered_than_may_be() -> None:
    claims = ObjectClaims(most=5)
    claims.add(claimed(number) for number in range(9))
    assert [one.hashes for one in claims.due()] == [claimed(number).hashes for number in range(4, 9)]


class Forgetful(MemoryStore):
    """A store in memory that drops what a test takes from `objects`."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets = True

    def absent(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        return [name not in self.objects for name in names]


def withdrawn(log: MemoryLog) -> list[bytes]:
    """The runs that were withdrawn from the object pool as missing."""
    events = [event for frame in log.read_after(ORIGIN, 1 << 20) for event in decode_frame(frame.data)[0].events]
    return [
        event.hashes
        for event in events
        if isinstance(event, BlocksEvicted) and event.tier == Tier.OBJECT and event.reason == EvictReason.MISSING
    ]


def test_who_puts_objects_withdraws_claims_of_those_that_are_gone_in_runs() -> None:
    store, log = Forgetful(), MemoryLog()
    objects = memory_objects(64, K, store)
    manager = make_manager({Tier.HBM: 64, Tier.HOST: 64}, objects=objects, by_hand=True, sink=log)

    def prefill(prompt: int) -> None:
        serve(manager, prompt, 2 * K)
        while manager.offload_one():
            pass
        manager.step_frames(0.0)

    for prompt in range(3):
        prefill(prompt)
    assert withdrawn(log) == [] and len(store.objects) == 6
    for name in list(store.objects)[:4]:
        del store.objects[name]
    prefill(3)
    prefill(4)
    gone = hashes_of(0, 2 * K) + hashes_of(1, 2 * K)
    assert sorted(b"".join(withdrawn(log))[at : at + 16] for at in range(0, len(gone), 16)) == sorted(
        gone[at : at + 16] for at in range(0, len(gone), 16)
    )
    assert len(withdrawn(log)) <= 2
    store.objects.clear()
    assert manager.acquire(NAMESPACE.id, hashes_of(2, 2 * K)).depth == 2 * K  # from HOST
    manager.close()


def test_own_claims_that_are_followed_know_each_block_of_their_objects_until_one_is_gone() -> None:
    claims = OwnClaims(blocks=2, most=2)
    claims.add(hashes_of(1, 2))
    claims.follow_blocks()
    first, second, third = (split_hashes(hashes_of(prompt, 2)) for prompt in (2, 3, 4))
    claims.add(b"".join(first + second))
    assert [claims.has(block) for block in first + second] == [True] * 4
    assert not claims.has(split_hashes(hashes_of(1, 1))[0])
    claims.drop(b"".join(second))
    assert [claims.has(block) for block in first + second] == [True, True, False, False]
    claims.add(b"".join(second + third))  # the first is beyond what is remembered
    assert [claims.has(block) for block in first + second + third] == [False, False, True, True, True, True]
