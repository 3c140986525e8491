"""How the KV of a block is spread over the ranks of one engine, and where each rank's part lies in a row of HOST.

A part is what one rank holds of a block and no other rank has to keep. A row of HOST is the parts of all ranks of a
host, in the order of pipeline stages and, within a stage, of ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Stage(NamedTuple):
    """A pipeline stage: ranks that hold the same layers.

    Attributes:
        part_bytes: what a block has on one of its ranks.
        replicas: consecutive ranks of tensor parallelism that hold identical KV.
    """

    part_bytes: int
    replicas: int = 1


class PartPlace(NamedTuple):
    """Where a rank's part of a block is.

    Attributes:
        part: its number among all parts.
        host: where the rank is.
        begin: its first byte in a row of that host.
        bytes: its size.
        stores: whether this rank is the one that stores it; all ranks load.
    """

    part: int
    host: int
    begin: int
    bytes: int
    stores: bool


class Ranks(NamedTuple):
    """The ranks of one engine, in vLLM's order: stages, then ranks of prefill context parallelism, then those of tensor
    parallelism.

    Attributes:
        stages: of pipeline parallelism, from the first layers on.
        tensor: ranks of tensor parallelism.
        prefill: ranks of prefill context parallelism.
        decode: ranks that share the tokens of a block among them (decode context parallelism); 1: each has all tokens.
        interleave: consecutive tokens of a block on one such rank.
        hosts: that the ranks are on, as many consecutive ones on each.
    """

    stages: tuple[Stage, ...]
    tensor: int = 1
    prefill: int = 1
    decode: int = 1
    interleave: int = 1
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return len(self.stages) * self.prefill * self.tensor

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Bytes of each part, in their order."""
        return tuple(place.bytes for place in _places(self) if place.stores)

    @property
    def row_bytes(self) -> int:
        """A block of all ranks on the first host, where the scheduler is."""
        return self.row_bytes_on(0)

    def row_bytes_on(self, host: int) -> int:
        """A block of all ranks on a host."""
        return sum(place.bytes for place in _places(self) if place.stores and place.host == host)

    def is_first(self, rank: int) -> bool:
        """Whether no rank of the same host goes before."""
        return rank == 0 or self.place_of(rank - 1).host != self.place_of(rank).host

    def place_of(self, rank: int) -> PartPlace:
        """Where a rank's part is."""
        return _places(self)[rank]


@lru_cache(maxsize=64)
def _places(ranks: Ranks) -> tuple[PartPlace, ...]:
    """Of each rank. Without decode context parallelism, ranks of prefill context parallelism hold identical KV (vLLM's
    `pcp_shard_decode_requests` says so). What ranks of several hosts hold alike, each host keeps."""
    places: list[PartPlace] = []
    known: dict[tuple[int, int, int, int], PartPlace] = {}
    begins = [0] * ranks.hosts
    for index, stage in enumerate(ranks.stages):
        for prefill in range(ranks.prefill):
            for tensor in range(ranks.tensor):
                host = len(places) * ranks.hosts // ranks.ranks
                key = host, index, prefill if ranks.decode > 1 else 0, tensor // stage.replicas
                if (place := known.get(key)) is None:
                    place = known[key] = PartPlace(len(known), host, begins[host], stage.part_bytes, stores=False)
                    places.append(place._replace(stores=True))
                    begins[host] += stage.part_bytes
                else:
                    places.append(place)
    return tuple(places)
