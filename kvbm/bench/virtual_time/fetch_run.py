"""A workload in virtual time on instances of several tiers that read blocks from each other's HOST and NVME.

What is read from whom is decided by the functions a manager decides with: `core.fetching.plan` with what `Links` has
learned of transfers so far, and `LeftAlone`. What a read then takes is the simulation's: an instance's link carries one
lot at a time to others and one from them, so who reads from a busy instance, or has several reads under way, waits. A
lot is read from what its owner has when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kvbm.bench.virtual_time.block_pool import ColderPool
from kvbm.bench.virtual_time.compare_policies import HBM, PolicyComparison
from kvbm.bench.virtual_time.instance_model import InstanceModel, WorkloadRequest
from kvbm.bench.virtual_time.policies import BLOCK_BYTES, Policy
from kvbm.config import OnboardSettings
from kvbm.core.fetching import LOT_BLOCKS, OBJECTS, FetchSource, LeftAlone, Links, assumed_link, plan
from kvbm.core.ids import Tier
from kvbm.core.topology import TIER_LINKS, Link, distance
from kvbm.workload.trace import TRACE_BLOCK_TOKENS

PEER = "peer"
MEMORY, TCP = "memory", "tcp"  # as `assumed_link` has them
LOT = max(1, LOT_BLOCKS * 16 // TRACE_BLOCK_TOKENS)  # the tokens of a manager's lot, for blocks of 16
_OWN = (Tier.HOST, Tier.NVME)


class FetchCluster(NamedTuple):
    """What instances have, and how far apart they stand.

    Attributes:
        slots: of each instance by tier, HBM's among them; of OBJECT those that all share.
        places: of each instance its labels, as `topology.distance` takes them.
        link: between any two; None: as `assumed_link` has it for their distance.
        wait_s: the longest a request waits for bytes.
    """

    slots: Mapping[Tier, int]
    places: Sequence[tuple[str, ...]]
    link: Link | None = None
    wait_s: float = OnboardSettings().wait_s

    def assumed(self, transport: str, apart: int) -> Link:
        """What a reader assumes of a link, which is what it gives while nobody else uses it."""
        return self.link if self.link is not None and transport != OBJECTS else assumed_link(transport, apart)


class _Reader:
    """What one instance knows of those it reads from, and until when their ways to it are taken."""

    def __init__(self, cluster: FetchCluster) -> None:
        self.links = Links(cluster.assumed)
        self.lacking = LeftAlone()
        self.arriving_until_s = self.leaving_until_s = 0.0


class _Request:
    """A request whose bytes are on their way.

    Attributes:
        found: index of a block that is there → where it was.
        reads: under way.
        is_over: it waits no more.
    """

    def __init__(self, reader: int, request: WorkloadRequest, in_hbm: int, expected: int) -> None:
        self.reader, self.request, self.in_hbm, self.expected = reader, request, in_hbm, expected
        self.found: dict[int, str] = {}
        self.reads = 0
        self.is_over = False


class _Way(NamedTuple):
    """From where to read.

    Attributes:
        label: as the report counts it.
        link: what it gives while nobody else uses it.
        holds: whether a block is there now.
        owner: the instance; None: own tiers and objects.
        measured_as: name, transport and distance, as `Links` knows it; None: nothing is learned of it.
    """

    label: str
    link: Link
    holds: Callable[[int], bool]
    owner: int | None = None
    measured_as: tuple[str, str, int] | None = None

    @property
    def takes_links(self) -> bool:
        """Whether it goes over the link of its owner and that of its reader."""
        return self.measured_as is not None and self.measured_as[1] == TCP


class FetchingRun(PolicyComparison):
    """See the module.

    Args:
        policy, speeds: as `PolicyComparison`.
        fetches: whether instances read from each other.
    """

    def __init__(
        self,
        policy: Callable[[Sequence[InstanceModel]], Policy],
        speeds: Sequence[float],
        cluster: FetchCluster,
        fetches: bool,
    ) -> None:
        slots = cluster.slots
        self._objects = ColderPool(slots[Tier.OBJECT]) if Tier.OBJECT in slots else None
        shared = {} if self._objects is None else {Tier.OBJECT: self._objects}
        super().__init__(
            policy,
            speeds,
            slots[Tier.HBM],
            lambda: {tier: ColderPool(slots[tier]) for tier in _OWN if tier in slots} | shared,
        )
        self._cluster, self._fetches = cluster, fetches
        self._numbers = {id(instance): number for number, instance in enumerate(self.instances)}
        self._readers = [_Reader(cluster) for _ in self.instances]

    def _bring(self, instance: InstanceModel, request: WorkloadRequest, in_hbm: int, expected: int) -> None:
        coming = _Request(self._numbers[id(instance)], request, in_hbm, expected)
        reads: list[tuple[_Way, int, int]] = []
        end = 0
        for tier, group in groupby(instance.held(request.blocks)):
            begin, end = end, end + len(list(group))
            if tier is Tier.HBM:
                coming.found |= dict.fromkeys(range(begin, end), HBM)
            else:
                reads.append((_Way(tier.name, TIER_LINKS[tier], lambda _: True), begin, end))
        reads += self._elsewhere(coming, end)
        coming.reads = len(reads)
        if not reads:
            self._go_on(coming)
            return
        for way, begin, end in reads:
            self._read(coming, way, begin, begin, end, self._now_s)
        self._later(self._cluster.wait_s, lambda: self._go_on(coming))

    def _elsewhere(self, coming: _Request, begin: int) -> list[tuple[_Way, int, int]]:
        """What to read beyond the own tiers, which end before block `begin`."""
        blocks, number = coming.request.blocks, coming.reader
        if begin == len(blocks):
            return []
        ways: list[_Way] = []
        sources: list[FetchSource] = []
        for apart, other in self._lenders(number):
            end = self._end(blocks, begin, self.instances[other].lends)
            if end > begin:
                ways.append(self._way_to(number, other, apart))
                sources.append(self._source(number, ways[-1], end))
        if self._objects is not None:
            link, objects = assumed_link(OBJECTS, 0), self._objects
            ways.append(_Way(Tier.OBJECT.name, link, objects.__contains__, None, (OBJECTS, OBJECTS, 0)))
            sources.append(self._source(number, ways[-1], self._end(blocks, begin, objects.__contains__)))
        compute_s = TRACE_BLOCK_TOKENS / self.instances[number].tokens_per_s
        stretches = plan(begin, sources, BLOCK_BYTES, compute_s, LOT)
        return [(ways[source], first, end) for source, first, end in stretches]

    def _lenders(self, number: int) -> list[tuple[int, int]]:
        """Who may be asked now, the nearest first: how far away, and who."""
        if not self._fetches:
            return []
        places, lacking = self._cluster.places, self._readers[number].lacking
        others = [one for one in range(len(self.instances)) if one != number and lacking.may(self._now_s, str(one))]
        return sorted((distance(places[number], places[one]), one) for one in others)

    def _way_to(self, number: int, other: int, apart: int) -> _Way:
        transport = TCP if apart else MEMORY
        link = self._cluster.assumed(transport, apart)
        return _Way(PEER, link, self.instances[other].lends, other, (str(other), transport, apart))

    def _source(self, number: int, way: _Way, end: int) -> FetchSource:
        """As a manager knows it: only what comes over TCP shares the reader's link."""
        assert way.measured_as is not None
        name, transport, apart = way.measured_as
        links, now_s = self._readers[number].links, self._now_s
        alone = links.alone_bytes_per_s(now_s, name, transport, apart) if way.takes_links else 0.0
        return FetchSource(end, links.link(now_s, name, transport, apart), alone)

    @staticmethod
    def _end(blocks: Sequence[int], begin: int, holds: Callable[[int], bool]) -> int:
        return next((at for at in range(begin, len(blocks)) if not holds(blocks[at])), len(blocks))

    def _read(self, coming: _Request, way: _Way, begin: int, at: int, end: int, began_s: float) -> None:
        """Read the next lot of a stretch, which began with block `begin`, from block `at` on."""
        if at == end or coming.is_over:
            self._read_ended(coming, way, at - begin, began_s)
            return
        lot_end = min(end, at + LOT)
        start_s = self._now_s if at > begin else self._now_s + way.link.latency_s
        moving_s = (lot_end - at) * BLOCK_BYTES / way.link.bytes_per_s
        if way.owner is not None and way.takes_links:
            reader, owner = self._readers[coming.reader], self._readers[way.owner]
            start_s = max(start_s, reader.arriving_until_s, owner.leaving_until_s)
            reader.arriving_until_s = owner.leaving_until_s = start_s + moving_s
        self._later(start_s - self._now_s, lambda: self._lot_begun(coming, way, begin, at, lot_end, end, began_s))

    def _lot_begun(
        self, coming: _Request, way: _Way, begin: int, at: int, lot_end: int, end: int, began_s: float
    ) -> None:
        had = self._end(coming.request.blocks[:lot_end], at, way.holds)
        if way.owner is not None:
            lacking = self._readers[coming.reader].lacking
            if had < lot_end:
                lacking.failed(self._now_s, str(way.owner))
            else:
                lacking.worked(str(way.owner))
        moving_s = (had - at) * BLOCK_BYTES / way.link.bytes_per_s
        self._later(
            moving_s, lambda: self._lot_ended(coming, way, begin, at, had, end if had == lot_end else had, began_s)
        )

    def _lot_ended(self, coming: _Request, way: _Way, begin: int, at: int, had: int, end: int, began_s: float) -> None:
        if coming.is_over:
            self._keep(coming.reader, coming.request.blocks[at:had])  # too late for the request, not for the next one
        else:
            coming.found |= dict.fromkeys(range(at, had), way.label)
        self._read(coming, way, begin, had, end, began_s)

    def _read_ended(self, coming: _Request, way: _Way, count: int, began_s: float) -> None:
        if way.measured_as is not None and count:
            name, transport, apart = way.measured_as
            self._readers[coming.reader].links.measured(
                self._now_s, name, transport, count * BLOCK_BYTES, self._now_s - began_s, apart
            )
        coming.reads -= 1
        if not coming.reads:
            self._go_on(coming)

    def _go_on(self, coming: _Request) -> None:
        """Compute what is not there, unless that was begun before."""
        if coming.is_over:
            return
        coming.is_over = True
        sources: list[str] = []
        while (source := coming.found.get(len(sources))) is not None:
            sources.append(source)
        self._compute(self.instances[coming.reader], coming.request, coming.in_hbm, coming.expected, sources)

    def _keep(self, number: int, blocks: Sequence[int]) -> None:
        if (host := self.instances[number].colder.get(Tier.HOST)) is not None:
            host.put(blocks)

    def _prefilled(self, instance: InstanceModel, request: WorkloadRequest, in_hbm: int, missing: int) -> None:
        for pool in instance.colder.values():  # written through, whether computed or fetched
            pool.put(request.blocks)
        super()._prefilled(instance, request, in_hbm, missing)
