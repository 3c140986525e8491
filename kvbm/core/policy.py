"""Choices as small pure pieces: which block to evict, what to offload. Soft state only; nothing here is an event."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvbm.core.ids import SequenceHash, Tier

MAX_USES = 3  # what S3-FIFO counts up to
OTHERS = "*"  # the tenant that stands for all who have no share of their own


class Share(NamedTuple):
    """What one tenant may have of an instance's pools.

    Attributes:
        tenant: whose; OTHERS for all that are not named.
        weight: its part of every pool that is full is weight over the sum of weights, at least 1.
        quota_slots: slots it may fill at most in a tier that others' copies fill too; a tier that is not named has no
            quota.
    """

    tenant: str
    weight: int = 1
    quota_slots: Mapping[Tier, int] = {}


class EvictionPolicy(Protocol):
    """The order in which a tier's blocks are given up.

    It knows every block the tier holds, and which of them are *held back*: pinned, or kept, so not to be evicted.
    """

    def gain(self, block: SequenceHash, pinned: bool) -> None:
        """The block has entered the tier, held back if pinned. Neither that pin nor the gain counts as a use."""

    def hold(self, block: SequenceHash) -> None:
        """The block was used, and is held back from now on. A block that is held back already was used once more."""

    def free(self, block: SequenceHash) -> None:
        """Nobody holds the block back any more."""

    def lose(self, block: SequenceHash) -> None:
        """The block was withdrawn. One that `victims` has given up is not known any more, and ignored."""

    def victims(self, count: int) -> list[SequenceHash]:
        """Give up exactly `count` blocks, the first to go first; [] and no change when fewer may be evicted."""

    def __len__(self) -> int:
        """How many blocks may be evicted now."""


class LeastRecentlyUsed:
    """Evicts what was let go longest ago."""

    def __init__(self, slots: int) -> None:
        self._order: OrderedDict[SequenceHash, None] = OrderedDict()  # those that may be evicted, the next victim first

    def gain(self, block: SequenceHash, pinned: bool) -> None:
        if not pinned:
            self._order[block] = None

    def hold(self, block: SequenceHash) -> None:
        self._order.pop(block, None)

    def free(self, block: SequenceHash) -> None:
        self._order[block] = None

    def lose(self, block: SequenceHash) -> None:
        self._order.pop(block, None)

    def victims(self, count: int) -> list[SequenceHash]:
        if count > len(self._order):
            return []
        return [self._order.popitem(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._order)


class S3Fifo:
    """Evicts what was used once before what was used again: three queues, no reordering on use.

    New blocks enter the *small* queue, a tenth of the pool. Who was not used again when it reaches the head is evicted,
    and its hash is remembered as a *ghost*; who was moves on to the *main* queue, as does who comes back while it is a
    ghost. In main a block goes round once for each use, three at most, before it is evicted. What is held back is
    passed over.

    Args:
        slots: of the tier's pool.
    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
    """

    def __init__(self, slots: int) -> None:
        self._small_slots = max(1, slots // 10)
        self._ghosts = slots - self._small_slots  # as many as main has slots
        self._small: OrderedDict[SequenceHash, None] = OrderedDict()
        self._main: OrderedDict[SequenceHash, None] = OrderedDict()
        self._ghost: OrderedDict[SequenceHash, None] = OrderedDict()
        self._uses: dict[SequenceHash, int] = {}  # of every block in small or main, since it was last looked at
        self._held: set[SequenceHash] = set()  # held back
        self._main_free: set[SequenceHash] = set()  # in main and not held back

    def gain(self, block: SequenceHash, pinned: bool) -> None:
        self._uses[block] = 0
        if pinned:
            self._held.add(block)
        if block in self._ghost:
            del self._ghost[block]
            self._append_main(block)
        else:
            self._small[block] = None

    def hold(self, block: SequenceHash) -> None:
        self._uses[block] = min(MAX_USES, self._uses[block] + 1)
        self._held.add(block)
        self._main_free.discard(block)

    def free(self, block: SequenceHash) -> None:
        self._held.discard(block)
        if block in self._main:
            self._main_free.add(block)

    def lose(self, block: SequenceHash) -> None:
        if block in self._uses:
            del (self._main if block in self._main else self._small)[block]
            self._forget(block)

    def victims(self, count: int) -> list[SequenceHash]:
        return [self._victim() for _ in range(count)] if count <= len(self) else []

    def __len__(self) -> int:
        return len(self._uses) - len(self._held)

    def _victim(self) -> SequenceHash:
        """Look at heads until one may go.

        Ends, because at least one block is not held back: small only gets shorter, and main is looked at only while it
        has such a block, whose uses run out.
        """
        while True:
            if len(self._small) > self._small_slots or not self._main_free:
                block = self._small.popitem(last=False)[0]
                if block not in self._held and not self._uses[block]:
                    self._forget(block)
                    self._remember(block)
                    return block
                self._uses[block] = 0
            else:
                block = self._main.popitem(last=False)[0]
                if block not in self._held:
                    if not self._uses[block]:
                        self._forget(block)
                        return block
                    self._uses[block] -= 1
            self._append_main(block)

    def _append_main(self, block: SequenceHash) -> None:
        self._main[block] = None
        if block not in self._held:
            self._main_free.add(block)

    def _forget(self, block: SequenceHash) -> None:
        del self._uses[block]
        self._held.discard(block)
        self._main_free.discard(block)

    def _remember(self, block: SequenceHash) -> None:
        self._ghost[block] = None
        if len(self._ghost) > self._ghosts:
            self._ghost.popitem(last=False)


class FairShares:
    """A policy for each share of a pool.

    Who is farthest above its share gives up first: the one with the most blocks for its weight that has any to give, so
    that a tenant that wants much takes from itself before it takes from others, and room nobody else wants is
    anybody's.

    Args:
        slots: of the tier's pool.
        eviction: name of the policy within a share, which is told a pool as large as the share.
        weights: of the shares.
        share_of: the share a block of the tier belongs to, asked when it enters.
    """

    def __init__(
        self, slots: int, eviction: str, weights: Sequence[int], share_of: Callable[[SequenceHash], int]
    ) -> None:
        self._parts = [EVICTION_POLICIES[eviction](max(1, slots * weight // sum(weights))) for weight in weights]
        self._weights, self._share_of = list(weights), share_of
        self._shares: dict[SequenceHash, int] = {}  # of every block the tier holds
        self.held = [0] * len(
            weights
        )  # blocks of each share, those that `victims` gave up among them until they are lost

    def gain(self, block: SequenceHash, pinned: bool) -> None:
        share = self._shares[block] = self._share_of(block)
        self.held[share] += 1
        self._parts[share].gain(block, pinned)

    def hold(self, block: SequenceHash) -> None:
        self._parts[self._shares[block]].hold(block)

    def free(self, block: SequenceHash) -> None:
        self._parts[self._shares[block]].free(block)

    def lose(self, block: SequenceHash) -> None:
        share = self._shares.pop(block, None)
        if share is not None:
            self.held[share] -= 1
            self._parts[share].lose(block)

    def victims(self, count: int, comes: int = -1, coming: int = 0) -> list[SequenceHash]:
        """As `EvictionPolicy.victims`.

        Args:
            comes, coming: the share the room is for, and how many blocks of it come; -1 where nobody knows.
        """
        if count > len(self):
            return []
        held = list(self.held)
        if comes >= 0:
            held[comes] += coming
        given_up = []
        for _ in range(count):
            share = self._farthest_above(held)
            held[share] -= 1
            given_up += self._parts[share].victims(1)
        return given_up

    def victims_of(self, share: int, count: int) -> list[SequenceHash]:
        """As `victims`, of one share alone."""
        return self._parts[share].victims(count)

    def evictable(self, share: int) -> int:
        """How many blocks of one share may be evicted now."""
        return len(self._parts[share])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def _farthest_above(self, held: list[int]) -> int:
        """The share with the most blocks for its weight, of those that can give one up; of two alike the first."""
        farthest = -1
        for share, weight in enumerate(self._weights):
            if len(self._parts[share]) and (
                farthest < 0 or held[share] * self._weights[farthest] > held[farthest] * weight
            ):
                farthest = share
        return farthest


class OffloadPolicy(Protocol):
    """What goes to a colder tier, decided when a block was created or used in the hotter one."""

    def wants(self, uses: int) -> bool:
        """Whether a block with so many uses (1: just created) should be offloaded now."""


class WriteThrough:
    """Every block, as soon as it is there."""

    def wants(self, uses: int) -> bool:
        return uses >= 1


class SecondUse:
    """A block that was used again after it was created: what is used twice will be used a third time."""

    def wants(self, uses: int) -> bool:
        return uses >= 2


class WriteBudget:
    """How much may be written to a device whose endurance is finite: so much a second in the long run.

    What is not used is saved up, a day's worth at most, so that quiet hours pay for busy ones. A process begins with
    nothing saved but a minute's worth, so that one that is restarted again and again stays within its budget too.

    Args:
        bytes_s: bytes a second, above 0.
        saved_s: seconds whose worth may be saved up.
    """

    def __init__(self, bytes_s: int, saved_s: float = 86_400.0, begin_s: float = 60.0) -> None:
        self._bytes_s, self._most_bytes = bytes_s, bytes_s * saved_s
        self._left_bytes = min(bytes_s * begin_s, self._most_bytes)
        self._at_s: float | None = None  # when it was last counted

    def left_bytes(self, now_s: float) -> int:
        """What may be written now.

        Args:
            now_s: on a clock that only grows; one that goes back earns nothing.
        """
        if self._at_s is not None:
            earned = max(0.0, now_s - self._at_s) * self._bytes_s
            self._left_bytes = min(self._left_bytes + earned, self._most_bytes)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        return max(0, int(self._left_bytes))

    def spend(self, written_bytes: int) -> None:
        """So much is being written."""
        self._left_bytes -= written_bytes


OFFLOAD_POLICIES: dict[str, Callable[[], OffloadPolicy]] = {
    "write_through": WriteThrough,
    "second_use": SecondUse,
}
NO_OFFLOAD = "never"  # in the place of a policy's name: nothing goes to that tier
EVICTION_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {  # name → policy of a pool with so many slots
    "lru": LeastRecentlyUsed,
    "s3fifo": S3Fifo,
}
