"""Whom to read a run from, and what to compute: never worse than the best single choice, whatever the sources are."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.fetching import (
    HALF_LIFE_S,
    LOT_BLOCKS,
    MEMORY_LINK,
    OBJECTS,
    PAUSE_MOST_S,
    TCP_LINKS,
    FetchSource,
    LeftAlone,
    Links,
    Stretch,
    assumed_link,
    least_times,
    plan,
    quickest,
)
from kvbm.core.topology import Link

BLOCK_BYTES = 1 << 20
NEAR, FAR = Link(0.0, 4e9), Link(0.0, 1e9)
links = st.builds(Link, st.floats(0.0, 0.1), st.floats(1e6, 1e10))


def source(end: int, link: Link, more: float) -> FetchSource:
    """`more`: how much quicker the reader's own link is than this one; 0: none is shared."""
    return FetchSource(end, link, more * link.bytes_per_s)


several = st.lists(st.builds(source, st.integers(0, 400), links, st.sampled_from([0.0, 1.0, 3.0])), max_size=5)


def seconds(begin: int, found: list[Stretch], sources: list[FetchSource], deepest: int, block_s: float) -> float:
    """What fetching these and computing the rest takes."""
    of_each: dict[int, int] = {}
    for one in found:
        of_each[one.source] = of_each.get(one.source, 0) + one.end - one.begin
    fetched_s = max((sources[at].link.seconds(blocks * BLOCK_BYTES) for at, blocks in of_each.items()), default=0.0)
    shared = {at: blocks for at, blocks in of_each.items() if sources[at].together_bytes_per_s}
    if shared:
        most = max(sources[at].together_bytes_per_s for at in shared)
        least_s = min(sources[at].link.latency_s for at in shared)
        fetched_s = max(fetched_s, least_s + sum(shared.values()) * BLOCK_BYTES / most)
    end = found[-1].end if found else begin
    return fetched_s + (deepest - end) * block_s


@given(st.integers(0, 200), several, st.sampled_from([0.0, 1e-4, 1e-2]), st.sampled_from([1, 7, LOT_BLOCKS]))
def test_what_is_planned_is_there_without_a_hole_and_beats_any_single_choice(
    begin: int, sources: list[FetchSource], block_s: float, lot: int
) -> None:
    found = plan(begin, sources, BLOCK_BYTES, block_s, lot)
    deepest = max((one.end for one in sources if one.end > begin), default=begin)
    assert not found or found[0].begin == begin
    assert all(before.end == after.begin and before.source != after.source for before, after in pairwise(found))
    assert all(one.begin < one.end <= sources[one.source].end for one in found)
    if not block_s:
        assert (found[-1].end if found else begin) == deepest
        return
    took_s = seconds(begin, found, sources, deepest, block_s)
    assert took_s <= (deepest - begin) * block_s + 1e-9
    for at, one in enumerate(sources):
        if one.end > begin:
            assert took_s <= seconds(begin, [Stretch(at, begin, one.end)], sources, deepest, block_s) + 1e-9


@given(st.integers(0, 200), several, st.sampled_from([1e-4, 1e-2]), st.sampled_from([1, 7, LOT_BLOCKS]))
def test_what_is_priced_is_what_is_planned(begin: int, sources: list[FetchSource], block_s: float, lot: int) -> None:
    found = plan(begin, sources, BLOCK_BYTES, block_s, lot)
    lengths = least_times(begin, sources, BLOCK_BYTES, lot)
    assert [one.end for one in lengths] == sorted({one.end for one in sources if one.end > begin}, reverse=True)
    best = quickest(begin, lengths, block_s)
    assert (best is None) == (not found)
    if best is not None:
        deepest = lengths[0].end
        assert best.end == begin + sum(best.blocks)
        assert (
            abs(seconds(begin, found, sources, deepest, block_s) - best.seconds - (deepest - best.end) * block_s) < 1e-9
        )


def test_a_short_run_is_read_from_one_and_a_long_one_from_all() -> None:
    two = [FetchSource(1000, NEAR), FetchSource(1000, NEAR)]
    assert plan(0, two, BLOCK_BYTES)[-1].end == 1000
    assert plan(10, [FetchSource(40, NEAR), FetchSource(40, NEAR)], BLOCK_BYTES) == [Stretch(0, 10, 40)]
    blocks = [sum(one.end - one.begin for one in plan(0, two, BLOCK_BYTES) if one.source == at) for at in (0, 1)]
    assert min(blocks) >= 1000 // 2 - LOT_BLOCKS
    uneven = plan(0, [FetchSource(640, NEAR), FetchSource(640, FAR)], BLOCK_BYTES)
    assert sum(one.end - one.begin for one in uneven if one.source == 1) == 2 * LOT_BLOCKS


def test_sources_that_share_the_readers_link_bring_no_more_than_it_carries() -> None:
    block_s = BLOCK_BYTES / 2e9
    alone = [FetchSource(640, FAR)] * 3  # each has a way of its own: 3 GB/s together, against 2 that are computed
    assert {one.source for one in plan(0, alone, BLOCK_BYTES, block_s)} == {0, 1, 2}
    shared = [FetchSource(640, FAR, 1e9)] * 3
    assert plan(0, shared, BLOCK_BYTES, block_s) == []
    wide = [FetchSource(640, FAR, 4e9)] * 3  # slow now, and the reader's link could bring more
    assert {one.source for one in plan(0, wide, BLOCK_BYTES, block_s)} == {0, 1, 2}
    beside = [*shared, FetchSource(640, Link(0.0, 2.5e9))]  # through memory: what is not shared counts by itself
    assert plan(0, beside, BLOCK_BYTES, block_s)[-1].end == 640


def test_a_link_alone_carries_what_is_assumed_or_more_where_more_was_measured() -> None:
    known = Links(lambda transport, distance: Link(0.0, 1e9))
    assert known.link(0.0, "a", "tcp", 3) == Link(0.0, 1e9)
    known.measured(0.0, "a", "tcp", 1 << 30, 10.0)
    known.measured(0.0, "b", "tcp", 1 << 30, 0.2)
    assert known.link(0.0, "a", "tcp").bytes_per_s < 0.2e9
    assert known.alone_bytes_per_s(0.0, "a", "tcp") == 1e9
    assert known.alone_bytes_per_s(0.0, "b", "tcp") == known.link(0.0, "b", "tcp").bytes_per_s > 4e9


def test_what_takes_longer_than_computing_it_is_computed() -> None:
    block_s = BLOCK_BYTES / 2e9
    assert plan(0, [FetchSource(100, FAR)], BLOCK_BYTES, block_s) == []
    assert plan(0, [FetchSource(100, FAR)], BLOCK_BYTES) == [Stretch(0, 0, 100)]
    assert plan(0, [FetchSource(100, FAR), FetchSource(50, NEAR)], BLOCK_BYTES, block_s, 1000) == [Stretch(1, 0, 50)]
    slow_start = FetchSource(100, Link(1.0, 1e12))
    assert plan(0, [slow_start], BLOCK_BYTES, 1.0 / 200) == []
    assert plan(0, [slow_start], BLOCK_BYTES, 1.0 / 50) == [Stretch(0, 0, 100)]


def test_links_begin_by_distance_and_are_learned_and_fade() -> None:
    known = Links()
    assert known.link(0.0, "a", "memory") == MEMORY_LINK == assumed_link("memory", 3)
    assert [known.link(0.0, "a", "tcp", far).bytes_per_s for far in (0, 1, 2, 3, 9)] == [
        *(one.bytes_per_s for one in TCP_LINKS),
        TCP_LINKS[-1].bytes_per_s,
    ]
    assert known.link(0.0, "pool", OBJECTS).bytes_per_s == 0.5e9
    for _ in range(20):
        known.measured(0.0, "a", "tcp", 1 << 30, 10.0)
    slow = known.link(0.0, "a", "tcp").bytes_per_s
    assert 0.9e8 < slow < 1.2e8
    assert known.link(0.0, "b", "tcp") == TCP_LINKS[0] and known.link(0.0, "a", "memory") == MEMORY_LINK
    later = [known.link(n * HALF_LIFE_S, "a", "tcp").bytes_per_s for n in range(0, 40, 4)]
    assert later == sorted(later) and later[-1] > 0.9 * TCP_LINKS[0].bytes_per_s
    known.measured(0.0, "c", "tcp", 0, 5.0)  # nothing came
    assert known.link(0.0, "c", "tcp").bytes_per_s < 1e6
    for number in range(2000):
        known.measured(1.0, f"n-{number}", "tcp", 1, 0.0)
    assert known.link(1.0, "a", "tcp") == TCP_LINKS[0]  # the oldest were forgotten


def test_who_could_not_give_is_left_alone_ever_longer_up_to_a_minute() -> None:
    alone, now_s = LeftAlone(), 0.0
    pauses = []
    for _ in range(9):
        assert alone.may(now_s, "a")
        assert alone.failed(now_s, "a")
        assert not alone.failed(now_s, "a")  # asked at the same time
        begun_s = now_s
        while not alone.may(now_s, "a"):
            now_s += 0.25
        pauses.append(now_s - begun_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    alone.worked("a")
    assert alone.failed(now_s, "a") and alone.may(now_s + 1, "a") and alone.may(now_s, "b")
    assert alone.failed(now_s, "b", 30.0) and not alone.may(now_s + 29, "b") and alone.may(now_s + 30, "b")
    assert alone.failed(now_s, "c", 1e9) and alone.may(now_s + PAUSE_MOST_S, "c")
