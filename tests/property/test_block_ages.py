"""How old blocks become: both twins count the same of any events, and what they count is what a script of a few blocks
says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core.ages import AGE_BOUNDS_S, BlockAges, NewAges, ReadableAges, TierAges, added
from kvbm.core.errors import FrameError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    MigrateCause,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Tier
from tests.examples import examples
from tests.indexes import crowded_events, frame_bytes

SPACE = Namespace(model="m", block_tokens=16).id
ONE = InstanceId("one")
SECOND_NS = 1_000_000_000
each_twin = pytest.mark.parametrize("new", [ReadableAges, _native.BlockAges], ids=["reference", "native"])


def block(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def frame(at_s: float, *events: Event) -> bytes:
    return frame_bytes(ONE, *events, wall_time_ns=int(max(0.0, at_s) * SECOND_NS))


def created(tier: Tier, *numbers: int) -> Event:
    return BlocksCreated(namespace=SPACE, tier=tier, hashes=b"".join(map(block, numbers)), parent=NO_PARENT)


def moved(source: Tier, target: Tier, cause: MigrateCause, *numbers: int, kept: bool = True) -> Event:
    hashes = b"".join(map(block, numbers))
    return BlocksMigrated(namespace=SPACE, source=source, target=target, kept=kept, cause=cause, hashes=hashes)


def evicted(tier: Tier, *numbers: int, reason: EvictReason = EvictReason.CAPACITY) -> Event:
    return BlocksEvicted(namespace=SPACE, tier=tier, reason=reason, hashes=b"".join(map(block, numbers)))


def ages_of(counts: Sequence[int]) -> dict[float, int]:
    """Counts by the upper bound of their age."""
    return {bound: count for bound, count in zip((*AGE_BOUNDS_S, float("inf")), counts, strict=True) if count}


@each_twin
def test_ages_at_reuse_and_at_eviction_by_tier(new: NewAges) -> None:
    ages: BlockAges = new(100)
    ages.take(frame(0, InstanceStarted(epoch=Epoch(1)), created(Tier.HBM, 1, 2, 3)))
    ages.take(frame(5, moved(Tier.HBM, Tier.HOST, MigrateCause.OFFLOAD, 1, 2, 3)))
    ages.take(frame(6, moved(Tier.HOST, Tier.NVME, MigrateCause.OFFLOAD, 1, kept=False)))  # neither wanted nor evicted
    ages.take(frame(60, evicted(Tier.HBM, 1, 2, 3)))
    ages.take(
        frame(65, moved(Tier.HOST, Tier.HBM, MigrateCause.ONBOARD, 2), created(Tier.HBM, 3))
    )  # 60 s after they came to HOST
    ages.take(frame(1806, moved(Tier.NVME, Tier.HBM, MigrateCause.ONBOARD, 1)))
    ages.take(
        frame(2000, evicted(Tier.HOST, 2, reason=EvictReason.QUOTA), evicted(Tier.HOST, 3, reason=EvictReason.CLEARED))
    )
    ages.take(frame(300_000, evicted(Tier.NVME, 1), evicted(Tier.NVME, 9)))  # of 9 nothing is known
    hbm, host, nvme = ages.tiers()
    assert (ages_of(hbm.evicted), hbm.evicted_s, hbm.unused, hbm.reused, sum(hbm.wanted)) == ({60: 3}, 180, 3, 0, 0)
    assert (ages_of(host.wanted), host.wanted_s) == ({60: 2}, 120)
    assert (ages_of(host.evicted), host.reused, host.unused) == ({7200: 1}, 1, 0)
    assert (ages_of(nvme.wanted), nvme.wanted_s, ages_of(nvme.evicted)) == ({1800: 1}, 1800, {float("inf"): 1})
    assert added([hbm], [host])[0] == TierAges(
        host.wanted, tuple(map(sum, zip(hbm.evicted, host.evicted, strict=True))), 120, 180 + host.evicted_s, 1, 3
    )


@each_twin
def test_what_came_before_it_was_looked_at_has_no_age(new: NewAges) -> None:
    ages = new(100)
    ages.take(frame(0, ResidenciesListed(namespace=SPACE, tier=Tier.NVME, snapshot=1, hashes=block(1) + block(2))))
    ages.take(frame(9, moved(Tier.NVME, Tier.HOST, MigrateCause.ONBOARD, 1), evicted(Tier.NVME, 1)))
    ages.take(
        frame(9, created(Tier.NVME, 2), ResidenciesListed(namespace=SPACE, tier=Tier.NVME, snapshot=2, hashes=block(2)))
    )
    ages.take(frame(10, evicted(Tier.NVME, 2)))
    assert (sum(ages.tiers()[2].wanted), ages_of(ages.tiers()[2].evicted)) == (0, {1: 1})
    ages.forget()
    ages.take(frame(20, evicted(Tier.HOST, 1)))
    ages.take(
        frame(30, created(Tier.HOST, 3), SnapshotEnded(tier=Tier.HOST, snapshot=1, count=0), evicted(Tier.HOST, 3))
    )
    assert not any(ages.tiers()[1].evicted)
    with pytest.raises(FrameError):
        ages.take(b"no frame")


@each_twin
def test_no_more_blocks_are_followed_than_were_asked_for_and_a_part_counts_for_all(new: NewAges) -> None:
    few, part = new(2), new(1000, 4)
    for ages in (few, part):
        ages.take(frame(0, created(Tier.HBM, *range(800))))
        ages.take(frame(1, evicted(Tier.HBM, *range(800))))
    assert sum(few.tiers()[0].evicted) == 2
    chosen = sum(int.from_bytes(block(number)[:8], "little") % 4 == 0 for number in range(800))
    assert sum(part.tiers()[0].evicted) == part.tiers()[0].unused == part.tiers()[0].evicted_s == 4 * chosen
    assert 500 < 4 * chosen < 1100


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.lists(crowded_events(), min_size=1, max_size=3)), max_size=30),
    st.sampled_from([1, 5, 1000]),
    st.sampled_from([1, 1, 3]),
    st.sampled_from([0, 7]),
)
def test_both_count_the_same_of_any_events(
    script: list[tuple[int, list[Event]]], most: int, every: int, forget_at: int
) -> None:
    twins: tuple[BlockAges, BlockAges] = (ReadableAges(most, every), _native.BlockAges(most, every))
    now_s = 0
    for at, (step_s, drawn) in enumerate(script):
        now_s += step_s * 10 - 30  # a clock may be set back
        events = [event for event in drawn if not isinstance(event, InstanceStarted)] or [created(Tier.NVME, step_s)]
        data = frame(now_s, *events)
        for one in twins:
            one.take(data)
            if at == forget_at:
                one.forget()
        assert twins[0].tiers() == twins[1].tiers()
