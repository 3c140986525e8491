"""What one foreign engine holds, in one native table: the blocks by the engine's hashes, and the ledger of them.

`ForeignBlocks` and `HeldLedger` of kvbm/reference specify it; the two classes here are their two sides over one table,
which records a change as it is made. So facts come from neither: whoever drives them has to obey a command before it
asks for the next, as `BridgedSource` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol, assert_never

from kvbm.core.codec import FrameBytes
from kvbm.core.errors import IllegalEventError, KvbmError
from kvbm.core.events import MAX_RUN_BLOCKS, InstanceStarted, PoolStated, StopReason
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier
from kvbm.core.results import TierCounts
from kvbm.streams.foreign.blocks import Arrived, Emptied, Fact, Gained, Lost, NamedBlocks, NamespaceNamed, cleared_tiers
from kvbm.streams.foreign.declared import DeclaredNamespaces, Said
from kvbm.streams.foreign.events import (
    BlockKey,
    BlocksStored,
    Cleared,
    EventRefusal,
    ForeignEvent,
    RefusedEvent,
    Removed,
)
from kvbm.streams.foreign.identity import ForeignSource, Homes


class ForeignTable(Protocol):
    """The native table. Any thread: a call has the table for itself from its beginning to its end, so every thread sees
    whole messages; one of much work is without the GIL meanwhile.
    """

    @property
    def is_empty(self) -> bool: ...
    @property
    def remembered(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def applied(self) -> int: ...
    @property
    def digest(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...

    def name(
        self, namespace: NamespaceId, root: SequenceHash, group: int, block_tokens: int, is_plain: bool
    ) -> None: ...
    def take(self, message: bytes, rank: int | None) -> bool: ...
    def store(
        self,
        home: int,
        tier: Tier,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        tokens: Sequence[int],
        width: int,
        extra_keys: Sequence[bytes],
    ) -> None: ...
    def remove(self, tier: Tier, group: int, keys: Sequence[BlockKey]) -> None: ...
    def remove_anywhere(self, group: int, keys: Sequence[BlockKey]) -> None: ...
    def clear(self, tier: Tier) -> None: ...
    def drop(self, forgets: bool) -> None: ...
    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Blocks unmapped, in conflict, beyond the bound and not held; stored and removed by messages taken whole."""

    def begin(self, started: InstanceStarted, namespaces: int) -> None: ...
    def stop(self, reason: StopReason) -> None: ...
    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]: ...
    def held(self, tier: Tier) -> int: ...
    def hashes(self, tier: Tier) -> bytes: ...
    def begin_snapshot(self) -> bool: ...
    def step_snapshot(self, limit: int) -> bool: ...


class NewForeignTable(Protocol):
    """Signature of what makes one."""

    def __call__(
        self, instance: InstanceId, most_blocks: int, most_gone: int, counts_copies: bool, tiers: Sequence[Tier]
    ) -> ForeignTable: ...


class TableBlocks(NamedBlocks):
    """As `ForeignBlocks`, without facts.

    Args:
        table: of this source alone.
        takes_messages: whether messages are vLLM's or SGLang's, which the table reads by itself.
        clears_all: whether a cleared cache is the host's as well, as SGLang's; the table empties HBM alone by itself.
    """

    def __init__(
        self, source: ForeignSource, table: ForeignTable, takes_messages: bool, clears_all: bool = False
    ) -> None:
        super().__init__(source)
        self._table, self._takes_messages, self._clears_all = table, takes_messages, clears_all
        self._named = 0  # namespaces that the table knows

    @property
    def counts(self) -> Counter[EventRefusal]:
        """Events and blocks that count for nothing."""
        unmapped, conflict, beyond, not_held, _, _ = self._table.counts()
        found = Counter(self._counts)
        found[EventRefusal.UNMAPPED] += unmapped
        found[EventRefusal.CONFLICT] += conflict
        found[EventRefusal.BEYOND] += beyond
        found[EventRefusal.NOT_HELD] += not_held
        return found

    @property
    def stored(self) -> int:
        """Blocks that events have told of."""
        return super().stored + self._table.counts()[4]

    @property
    def removed(self) -> int:
        """The same."""
        return super().removed + self._table.counts()[5]

    @property
    def is_empty(self) -> bool:
        """Whether no tier holds anything."""
        return self._table.is_empty

    @property
    def remembered(self) -> int:
        """How many blocks are remembered, those that are gone included."""
        return self._table.remembered

    def take(self, payload: bytes, rank: int | None) -> bool:
        """See `EngineBlocks.take`."""
        if self._clears_all and b"AllBlocksCleared" in payload:
            return False
        return self._takes_messages and self._table.take(payload, rank)

    def apply(self, event: ForeignEvent) -> Iterator[Fact]:
        """Apply an event. Gives the namespace it names, before anything is recorded. Raises Uncertain."""
        match event:
            case BlocksStored():
                yield from self._store(event)
            case Removed():
                self._remove(event)
            case Cleared():
                for tier in cleared_tiers(event):
                    self._table.clear(tier)
            case RefusedEvent():
                self.refuse_event(event)
            case _:
                assert_never(event)

    def drop(self, forgets: bool) -> None:
        """See `ForeignBlocks.drop`."""
        self._table.drop(forgets)
        if forgets:
            self._homes, self._named = Homes(self._source), 0

    def _store(self, event: BlocksStored) -> Iterator[Fact]:
        home = self.home(event)
        if home is None:
            return
        tier, number, is_new = home
        for named in self._homes.all[self._named :]:
            space = named.namespace
            self._table.name(space.id, named.root, space.kv_group, space.block_tokens, not space.lora)
            self._named += 1
        if is_new:
            yield NamespaceNamed(self._homes.all[number].namespace)
        count, width = len(event.keys), event.width or event.block_tokens
        tokens = event.tokens if len(event.tokens) == count * width else ()
        try:
            self._table.store(number, tier, event.keys, event.parent, tokens, width, event.extra)
        except IllegalEventError:
            raise
        except (KvbmError, TypeError, ValueError, OverflowError):  # a token that is none
            self.refuse(EventRefusal.MALFORMED)

    def _remove(self, event: Removed) -> None:
        if not event.medium:
            self._removed += len(event.keys)
            self._table.remove_anywhere(event.group, event.keys)
            return
        tier = self.tier(event.medium, event.ownership)
        if tier is not None:
            self._removed += len(event.keys)
            self._table.remove(tier, event.group, event.keys)


class TableLedger(DeclaredNamespaces):
    """As `HeldLedger`, whose table's blocks record by themselves.

    Args:
        table: as the blocks', made for these pools.
    """

    def __init__(self, table: ForeignTable, pools: Sequence[PoolStated], said: Said) -> None:
        super().__init__(pools, said)
        self._table = table

    @property
    def epoch(self) -> Epoch:
        """The epoch its newest events belong to."""
        return Epoch(self._table.epoch)

    @property
    def applied(self) -> Offset:
        """The offset its next event gets."""
        return Offset(self._table.applied)

    @property
    def digest(self) -> int:
        """Of what is held."""
        return self._table.digest

    @property
    def stopped(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._table.stopped

    def record(self, fact: Gained | Arrived | Lost | Emptied) -> None:
        """Nobody has a fact for it: see the module."""
        raise AssertionError(f"a fact of other blocks: {fact!r:.100}")

    def forget(self) -> None:
        """The next epoch begins with nothing: what its blocks held they have dropped."""
        assert self._table.is_empty

    def start(self, epoch: Epoch) -> None:
        """Begin the first epoch."""
        self.restart(epoch)

    def restart(self, epoch: Epoch) -> Offset:
        """Begin another epoch with a snapshot of all that is held. Gives the offset after it."""
        self._table.begin(self.started(epoch), len(self._namespaces))
        return self.applied

    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """End the stream."""
        if not self.stopped:
            self._table.stop(reason)

    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]:
        """The events recorded since the last call, cut into frames."""
        return self._table.take_frames(instance, wall_time_ns)

    def begin_snapshot(self) -> bool:
        """Begin a snapshot of what is held, tier by tier; False when one is under way, or the stream has ended."""
        return self._table.begin_snapshot()

    def step_snapshot(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """List up to `limit` blocks more; whether the snapshot goes on."""
        return self._table.step_snapshot(limit)

    def counts(self, tier: Tier) -> TierCounts:
        """How many blocks a tier holds. How many fit is not known."""
        return TierCounts(0, 0, self._table.held(tier), 0, 0)

    def held(self, tier: Tier) -> bytes:
        """Packed hashes of what a tier holds, in no order."""
        return self._table.hashes(tier)


def engine_table(
    new_table: NewForeignTable,
    instance: InstanceId,
    source: ForeignSource,
    pools: Sequence[PoolStated],
    said: Said,
    takes_messages: bool,
    clears_all: bool = False,
) -> tuple[TableBlocks, TableLedger]:
    """Both sides of a new table.

    Args:
        pools: the instance's. What lies in one of cluster reach is a claim, which nobody lists.
        takes_messages, clears_all: as `TableBlocks`.
    """
    own = [pool.tier for pool in pools if pool.reach is not Reach.CLUSTER and pool.tier != Tier.OBJECT]
    table = new_table(instance, source.most_blocks, source.most_gone, source.counts_copies, own)
    return TableBlocks(source, table, takes_messages, clears_all), TableLedger(table, pools, said)
