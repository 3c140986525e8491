"""What of a run to read from whom, and what to compute anew: pure, in bytes and seconds.

`plan` decides for one run; `Links` has learned what transfers cost; `LeftAlone` keeps away from those who lacked what
they were said to have. None of them has a clock: the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvbm.core.ids import Tier
from kvbm.core.topology import TIER_LINKS, Link

LOT_BLOCKS = 64  # blocks that are read at a time; a run is split between sources at multiples of it
HALF_LIFE_S = 60.0  # a measurement counts half after so long
PAUSE_FIRST_S, PAUSE_MOST_S = 1.0, 60.0
_PRIOR_BYTES = 4 << 20  # what is assumed of a link weighs as much as a transfer of so many bytes
_MOST_KNOWN = 1024  # links and pauses that are remembered
_FASTEST_BYTES_PER_S = 1e12  # so that a time of 0 means something

OBJECTS = "objects"  # a source that is no instance

# Between instances, before there are measurements: through memory of one machine, and over TCP by how far apart they
# stand.
MEMORY_LINK = Link(100e-6, 8e9)
RDMA_LINK = Link(150e-6, 5e9)
TCP_LINKS = (Link(150e-6, 3e9), Link(300e-6, 2e9), Link(500e-6, 1e9), Link(2e-3, 0.25e9))


class Transfer(msgspec.Struct, frozen=True):
    """One read from another instance, as it travels to the catalog.

    Attributes:
        transport: "memory", "tcp" or another word. distance: as `topology.distance`.
        size: bytes that came; 0: it failed. took_us: from question to answer, in microseconds.
    """

    transport: str = ""
    distance: int = 0
    size: int = 0
    took_us: int = 0


class FetchSource(NamedTuple):
    """Somebody who has blocks of the run from its beginning on.

    Attributes:
        end: behind the last of them, counted as in the run.
        link: what reading from it costs.
        together_bytes_per_s: what comes at most from all such sources together, for they share the reader's own link:
            the most that one of those that are read from says. 0: it comes another way.
    """

    end: int
    link: Link
    together_bytes_per_s: float = 0.0


class Stretch(NamedTuple):
    """Blocks from `begin` to before `end` that one source is asked for;

    `source` is its place among those that were given.
    """

    source: int
    begin: int
    end: int


def plan(
    begin: int,
    sources: Sequence[FetchSource],
    block_bytes: int,
    block_compute_s: float = 0.0,
    lot_blocks: int = LOT_BLOCKS,
) -> list[Stretch]:
    """Which blocks of a run to read from which source; what is in no stretch is computed.

    Sources work beside each other, so a long run is split over them; what shares the reader's link comes no quicker
    than that carries. What is fetched is one piece, from `begin` on: of all its possible lengths the one with which
    fetching and computing the rest takes the least time, and of equals the longest.

    Args:
        begin: the first block that is needed.
        sources: the preferred one first, which counts where two take as long.
        block_compute_s: what the engine takes to compute a block; 0: not known, and everything is fetched that somebody
            has.
        lot_blocks: no source is asked for less, but at the ends of what it has.
    Returns: stretches in the run's order, without a hole.
    """
    ends = sorted({one.end for one in sources if one.end > begin}, reverse=True)
    if not ends:
        return []
    best: list[Stretch] = []
    least_s = (ends[0] - begin) * block_compute_s
    for end in ends:
        for stretches, took_s in _ways(begin, end, sources, block_bytes, lot_blocks):
            if not block_compute_s:
                return stretches
            if (whole_s := took_s + (ends[0] - end) * block_compute_s) < least_s or (whole_s == least_s and not best):
                best, least_s = stretches, whole_s
    return best


class Length(NamedTuple):
    """One length that a run can be read in.

    Attributes:
        end: behind the last block that is read.
        seconds: until all are there, at least. blocks: that come from each source then.
    """

    end: int
    seconds: float
    blocks: tuple[int, ...]


def least_times(
    begin: int, sources: Sequence[FetchSource], block_bytes: int, lot_blocks: int = LOT_BLOCKS
) -> list[Length]:
    """How long reading takes for each end of a source, the longest first: what `plan` chooses from, for who prices it.

    Args: as `plan`.
    """
    found: list[Length] = []
    for end in sorted({one.end for one in sources if one.end > begin}, reverse=True):
        stretches, seconds = min(_ways(begin, end, sources, block_bytes, lot_blocks), key=lambda way: way[1])
        blocks = [0] * len(sources)
        for one in stretches:
            blocks[one.source] += one.end - one.begin
        found.append(Length(end, seconds, tuple(blocks)))
    return found


def quickest(begin: int, lengths: Sequence[Length], block_compute_s: float) -> Length | None:
    """The length with which reading and computing the rest takes the least time, of equals the longest;

    None: reading nothing does.

    Args:
        lengths: as of `least_times`.
        block_compute_s: more than 0.
    """
    best: Length | None = None
    if not lengths:
        return None
    longest = lengths[0].end
    least_s = (longest - begin) * block_compute_s
    for one in lengths:
        whole_s = one.seconds + (longest - one.end) * block_compute_s
        if whole_s < least_s or (whole_s == least_s and best is None):
            best, least_s = one, whole_s
    return best


def _ways(
    begin: int, end: int, sources: Sequence[FetchSource], block_bytes: int, lot_blocks: int
) -> Iterator[tuple[list[Stretch], float]]:
    """What to read from whom, and how long it takes: from all together, and where some share a link, which makes that
    slower, from fewer.
    """
    every = range(len(sources))
    yield _schedule(begin, end, sources, every, block_bytes, lot_blocks)
    free = [at for at in every if not sources[at].together_bytes_per_s]
    if len(free) == len(sources):
        return
    if any(sources[at].end >= end for at in free):
        yield _schedule(begin, end, sources, free, block_bytes, lot_blocks)
    shared = [at for at in every if sources[at].together_bytes_per_s and sources[at].end >= end]
    if free and shared:
        quickest = max(shared, key=lambda at: (sources[at].link.bytes_per_s, -at))
        yield _schedule(begin, end, sources, sorted([*free, quickest]), block_bytes, lot_blocks)
    for at, one in enumerate(sources):
        if one.end >= end:
            yield [Stretch(at, begin, end)], one.link.seconds((end - begin) * block_bytes)


def _schedule(
    begin: int, end: int, sources: Sequence[FetchSource], among: Sequence[int], block_bytes: int, lot_blocks: int
) -> tuple[list[Stretch], float]:
    """Each lot goes to the source, of these, that is through with it first; and when the last is through.

    The deepest lots come first, because the fewest sources have them.
    """
    marks = {begin, end, *range(begin // lot_blocks * lot_blocks + lot_blocks, end, lot_blocks)}
    marks |= {one.end for one in sources if begin < one.end < end}
    cuts = sorted(marks)
    busy_s = [0.0] * len(sources)
    chosen: list[Stretch] = []
    for first, last in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        size = (last - first) * block_bytes
        done_s = {
            at: busy_s[at] + (0.0 if busy_s[at] else sources[at].link.latency_s) + size / sources[at].link.bytes_per_s
            for at in among
            if sources[at].end >= last
        }
        source = min(done_s, key=lambda at: (done_s[at], at))
        busy_s[source] = done_s[source]
        if chosen and chosen[-1].source == source:
            chosen[-1] = Stretch(source, first, chosen[-1].end)
        else:
            chosen.append(Stretch(source, first, last))
    shared = [one for one in chosen if sources[one.source].together_bytes_per_s]
    together_s = 0.0
    if shared:
        used = [sources[one.source] for one in shared]
        size = sum(one.end - one.begin for one in shared) * block_bytes
        together_s = min(one.link.latency_s for one in used) + size / max(one.together_bytes_per_s for one in used)
    return chosen[::-1], max(*busy_s, together_s)


def assumed_link(transport: str, distance: int) -> Link:
    """What a transfer is taken to cost before any was measured.

    Args:
        transport: "memory", "rdma", "nixl", "tcp" or OBJECTS; of NIXL nothing was measured on a fabric, so it
            is taken for TCP. distance: as `topology.distance`.
    """
    if transport == OBJECTS:
        return TIER_LINKS[Tier.OBJECT]
    if transport == "rdma":
        return RDMA_LINK
    return MEMORY_LINK if transport == "memory" else TCP_LINKS[min(distance, len(TCP_LINKS) - 1)]


class _Measured(NamedTuple):
    """Transfers so far, the older the less they count: bytes, the seconds they took, and as of when."""

    size: float
    seconds: float
    at_s: float

    def faded(self, now_s: float) -> _Measured:
        kept = 2.0 ** (-max(0.0, now_s - self.at_s) / HALF_LIFE_S)
        return _Measured(self.size * kept, self.seconds * kept, now_s)


_UNMEASURED = _Measured(0.0, 0.0, 0.0)


class Links:
    """What transfers have cost, by who was read from and how. Where measurements fade, what is assumed comes back.

    Args:
        assumed: what is assumed, as `assumed_link`.
    """

    def __init__(self, assumed: Callable[[str, int], Link] = assumed_link) -> None:
        self._assumed = assumed
        self._known: OrderedDict[tuple[str, str], _Measured] = OrderedDict()

    def link(self, now_s: float, name: str, transport: str, distance: int = 0) -> Link:
        """What the next transfer is taken to cost."""
        assumed = self._assumed(transport, distance)
        measured = self._known.get((name, transport))
        if measured is None:
            return assumed
        known = measured.faded(now_s)
        size, seconds = _PRIOR_BYTES + known.size, _PRIOR_BYTES / assumed.bytes_per_s + known.seconds
        return Link(assumed.latency_s, size / seconds)

    def alone_bytes_per_s(self, now_s: float, name: str, transport: str, distance: int = 0) -> float:
        """What a link carries while nothing else comes: what is assumed, or more where more was measured."""
        return max(
            self._assumed(transport, distance).bytes_per_s, self.link(now_s, name, transport, distance).bytes_per_s
        )

    def measured(self, now_s: float, name: str, transport: str, size: int, seconds: float, distance: int = 0) -> None:
        """A transfer has taken so long.

        Args:
            size: bytes that came; 0 where none did.
        """
        moving_s = max(seconds - self._assumed(transport, distance).latency_s, size / _FASTEST_BYTES_PER_S, 0.0)
        key = (name, transport)
        known = self._known.pop(key, _UNMEASURED).faded(now_s)
        self._known[key] = _Measured(known.size + size, known.seconds + moving_s, now_s)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class _Pause(NamedTuple):
    until_s: float
    pause_s: float


class LeftAlone:
    """Who is not asked for a while, because it could not give what was wanted.

    The while doubles each time, up to a minute.
    """

    def __init__(self, first_s: float = PAUSE_FIRST_S, most_s: float = PAUSE_MOST_S) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def may(self, now_s: float, name: str) -> bool:
        """Whether it may be asked."""
        pause = self._pauses.get(name)
        return pause is None or now_s >= pause.until_s

    def failed(self, now_s: float, name: str, at_least_s: float = 0.0) -> bool:
        """It could not. Whether that is news: it was to be asked until now.

        Several failures of questions that were under way together count once.

        Args:
            at_least_s: it has said itself when to come again; at most a minute.
        """
        known = self._pauses.pop(name, None)
        if known is not None and now_s < known.until_s:
            self._pauses[name] = known
            return False
        pause_s = self._first_s if known is None else min(2 * known.pause_s, self._most_s)
        self._pauses[name] = _Pause(now_s + min(max(pause_s, at_least_s), self._most_s), pause_s)
        if len(self._pauses) > _MOST_KNOWN:
            self._pauses.popitem(last=False)
        return True

    def worked(self, name: str) -> None:
        """It gave what was wanted: the next pause is a short one again."""
        self._pauses.pop(name, None)
