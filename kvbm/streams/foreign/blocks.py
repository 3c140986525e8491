"""What one engine holds, block by block, under its own hashes: events → facts for our stream.

A stored event brings the tokens. They are hashed here, as any client of ours hashes a prompt, and go no further. The
engine's hash is kept beside ours, because a later event names a parent or a removed block by it alone. Nothing is
guessed: what has neither tokens behind a known parent nor a known hash is counted and left out, which costs a hit and
is never a wrong one.

`reference.foreign_blocks` specifies it; `bridge.table` is what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvbm.core.errors import KvbmError
from kvbm.core.events import EvictReason
from kvbm.core.ids import Namespace, NamespaceId, SequenceHash, Tier
from kvbm.streams.foreign.events import (
    BlocksStored,
    Cleared,
    EventRefusal,
    ForeignEvent,
    RefusedEvent,
)
from kvbm.streams.foreign.identity import MEDIA, ForeignSource, Homes


class NamespaceNamed(NamedTuple):
    """A namespace of which blocks come for the first time."""

    namespace: Namespace


class Gained(NamedTuple):
    """Blocks of one chain lie in a tier now: at most MAX_RUN_BLOCKS, none of them there before.

    Attributes:
        parent: the block before, NO_PARENT where the run begins its chain.
        start: position of the first in its chain, in blocks.
        hashes: packed.
    """

    namespace: NamespaceId
    tier: Tier
    parent: SequenceHash
    start: int
    hashes: bytes


class Arrived(NamedTuple):
    """Blocks that were known before lie in a tier now; which chain they are of is not said. As `Gained`."""

    namespace: NamespaceId
    tier: Tier
    hashes: bytes


class Lost(NamedTuple):
    """Blocks lie in a tier no more: at most MAX_RUN_BLOCKS, all of them there before."""

    namespace: NamespaceId
    tier: Tier
    reason: EvictReason
    hashes: bytes


class Emptied(NamedTuple):
    """Nothing lies in a tier any more."""

    tier: Tier


Fact = NamespaceNamed | Gained | Arrived | Lost | Emptied

OWN_TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)  # the engine's


class Uncertain(KvbmError):
    """An event may have said that blocks are gone, and could not be read: nothing that is held is certain any more."""


class EngineBlocks(Protocol):
    """What `ForeignState` needs of whoever knows an engine's blocks: `ForeignBlocks`, or what does the same in C++."""

    @property
    def counts(self) -> Counter[EventRefusal]: ...
    @property
    def stored(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def is_empty(self) -> bool: ...
    @property
    def remembered(self) -> int: ...

    def refuse(self, reason: EventRefusal) -> None:
        """Count what counts for nothing."""

    def namespaces(self) -> list[Namespace]: ...
    def expect(self, block_tokens: int) -> Namespace: ...
    def take(self, payload: bytes, rank: int | None) -> bool:
        """Apply a publisher's message whole, without a fact; False: nothing of it, so its events are to be applied.

        Args:
            rank: whose messages count; None: anybody's.
        """

    def apply(self, event: ForeignEvent) -> Iterator[Fact]: ...
    def drop(self, forgets: bool) -> None: ...


class BlocksHome(NamedTuple):
    """Where blocks of a stored event are.

    Attributes:
        number: of their namespace, among the source's.
        is_new: no blocks of that namespace have come before.
    """

    tier: Tier
    number: int
    is_new: bool


class NamedBlocks:
    """What is known of a source's namespaces, tiers and refusals, however its blocks are kept."""

    def __init__(self, source: ForeignSource) -> None:
        self._counts: Counter[EventRefusal] = Counter()
        self._stored = self._removed = 0
        self._source = source
        self._homes = Homes(source)

    @property
    def stored(self) -> int:
        """Blocks that events have told of."""
        return self._stored

    @property
    def removed(self) -> int:
        """The same."""
        return self._removed

    def refuse(self, reason: EventRefusal) -> None:
        """Count what counts for nothing."""
        self._counts[reason] += 1

    def namespaces(self) -> list[Namespace]:
        """Those of which blocks have come, in the order in which they came."""
        return [home.namespace for home in self._homes.all]

    def expect(self, block_tokens: int) -> Namespace:
        """The namespace of blocks of a size that will come, of no adapter."""
        number = self._homes.number("", 0, block_tokens)
        assert number is not None
        return self._homes.all[number].namespace

    def tier(self, medium: str, ownership: str) -> Tier | None:
        """The tier an event speaks of; None, and counted: it counts for nothing."""
        tier = MEDIA.get(medium)
        if tier is None:
            self.refuse(EventRefusal.UNKNOWN_MEDIUM)
            return None
        if not ownership and tier != Tier.OBJECT:
            return tier
        if self._source.pool and ownership in ("", self._source.pool):
            return Tier.OBJECT
        self.refuse(EventRefusal.NO_POOL)
        return None

    def home(self, event: BlocksStored) -> BlocksHome | None:
        """Where the blocks of an event are; None, and counted: they count for nothing."""
        tier = self.tier(event.medium, event.ownership)
        if tier is None or not event.keys:
            return None
        self._stored += len(event.keys)
        known = len(self._homes.all)
        number = self._homes.number(event.lora, event.group, event.block_tokens)
        if number is None:
            self._counts[EventRefusal.BEYOND] += len(event.keys)
            return None
        return BlocksHome(tier, number, len(self._homes.all) > known)

    def refuse_event(self, event: RefusedEvent) -> None:
        """Count it. Raises Uncertain: it may have said that blocks are gone."""
        self.refuse(event.reason)
        if event.is_loss:
            raise Uncertain(event.why)


def cleared_tiers(event: Cleared) -> tuple[Tier, ...]:
    """The tiers that an engine has emptied."""
    return OWN_TIERS if event.is_all else (Tier.HBM,)
