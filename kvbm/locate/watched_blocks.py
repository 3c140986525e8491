"""What a feed of the catalog comes to: who holds which blocks, kept up to date by its events."""

from __future__ import annotations

from kvbm.core.ids import HASH_BYTES
from kvbm.core.watch_events import (
    BlockChange,
    BlockChanges,
    InstanceChange,
    KnownInstances,
    Missed,
    WatchBegun,
    WatchEvent,
)

Block = tuple[str, str]  # namespace and hash, in hex


class _Tier:
    """Blocks of one tier of an instance, and in which snapshot each was gained or listed last."""

    def __init__(self) -> None:
        self.blocks: dict[Block, int] = {}
        self.begun = 0  # snapshots
        self.snapshot: int | None = None

    def enter(self, snapshot: int) -> None:
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self.begun += 1


class WatchedBlocks:
    """Begin a feed, ask for what you want to know, `add` it, then `apply` each event. One thread.

    An event that comes again changes nothing in the end, and neither does one of before the question.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, dict[str, _Tier]] = {}
        self._pools: dict[str, set[Block]] = {}
        self._states: dict[str, InstanceChange] = {}
        self._known: set[str] = set()

    def add(self, holder: str, is_pool: bool, tier: str, namespace: str, block: str) -> None:
        """A block is held, as an answer says.

        Args:
            tier: its name. namespace, block: 32 hex digits each.
        """
        if is_pool:
            self._pools.setdefault(holder, set()).add((namespace, block))
        else:
            found = self._tier(holder, tier)
            found.blocks.setdefault((namespace, block), found.begun)

    def apply(self, event: WatchEvent) -> bool:
        """Take one event; whether something was missed, so that you have to ask again: of its instance, or of
        everybody.
        """
        match event:
            case WatchBegun():
                self._states.clear()
                self._known.clear()
            case BlockChanges(holder=holder, is_pool=is_pool, changes=changes):
                for change in changes:
                    self._change_pool(holder, change) if is_pool else self._change(holder, change)
            case InstanceChange(instance=instance, what="state"):
                self._states[instance] = event
            case InstanceChange(instance=instance, what="started" | "emptied"):
                self._tiers.pop(instance, None)
            case InstanceChange(instance=instance, what="dropped"):
                self._tiers.pop(instance, None)
                self._states.pop(instance, None)
            case KnownInstances(instances=instances, is_last=is_last):
                self._known.update(instances)
                if is_last:
                    self._tiers = {name: tiers for name, tiers in self._tiers.items() if name in self._known}
                    self._known.clear()
            case Missed(instance=""):
                self._tiers.clear()
                self._pools.clear()
                return True
            case Missed(instance=instance):
                self._tiers.pop(instance, None)
                return True
            case _:
                pass
        return False

    def tiers(self, instance: str, namespace: str, block: str) -> list[str]:
        """The tiers in which an instance has a block, as answers would name them."""
        state = self._states.get(instance)
        return [
            name
            for name, tier in self._tiers.get(instance, {}).items()
            if (namespace, block) in tier.blocks and (state is None or name not in state.hidden)
        ]

    def holders(self, namespace: str, block: str) -> list[tuple[str, str]]:
        """The instances that have a block, each with a tier, in no order; what is excluded is left out."""
        return [(name, tier) for name in self._tiers for tier in self.tiers(name, namespace, block)]

    def pools(self, namespace: str, block: str) -> list[str]:
        """The pools of cluster reach that are claimed to have a block."""
        return [pool for pool, blocks in self._pools.items() if (namespace, block) in blocks]

    def is_suspect(self, instance: str) -> bool:
        """Whether an instance may hold more or less than is known."""
        state = self._states.get(instance)
        return state is not None and state.suspect

    # -- inside -------------------------------------------------------------------------------------------------------

    def _tier(self, instance: str, tier: str) -> _Tier:
        return self._tiers.setdefault(instance, {}).setdefault(tier, _Tier())

    def _change(self, instance: str, change: BlockChange) -> None:
        tier, blocks = self._tier(instance, change.tier), _blocks(change)
        match change.what:
            case "gained":
                tier.blocks.update(dict.fromkeys(blocks, tier.begun))
            case "listed":
                tier.enter(change.snapshot)
                tier.blocks.update(dict.fromkeys(blocks, tier.begun))
            case "lost":
                for block in blocks:
                    tier.blocks.pop(block, None)
            case "ended":
                tier.enter(change.snapshot)
                tier.blocks = {block: begun for block, begun in tier.blocks.items() if begun == tier.begun}

    def _change_pool(self, pool: str, change: BlockChange) -> None:
        known = self._pools.setdefault(pool, set())
        if change.what == "lost":
            known.difference_update(_blocks(change))
        else:
            known.update(_blocks(change))


def _blocks(change: BlockChange) -> list[Block]:
    digits = 2 * HASH_BYTES
    return [(change.namespace, change.hashes[at : at + digits]) for at in range(0, len(change.hashes), digits)]
