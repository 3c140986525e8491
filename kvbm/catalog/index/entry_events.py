"""What an entry of the change log says to who watches: its frame's events as block changes, within what the watcher may
know of.

A snapshot's end withdraws what the snapshot did not list. That is told as such where all of the snapshot's lists were
told; else the watcher has missed something of the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbm.catalog.index.change_log import LogEntry
from kvbm.core.backend import DecodeFrame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    RunEvent,
    SnapshotEnded,
)
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, Tier
from kvbm.core.watch_events import (
    MAX_CHANGED_HASHES,
    BlockChange,
    BlockChanges,
    InstanceChange,
    Missed,
)

_MOST_BYTES = MAX_CHANGED_HASHES * HASH_BYTES


class _Open(NamedTuple):
    """A snapshot under way, as far as it was seen.

    Attributes:
        is_broken: events of the instance were missed since it began: its end says nothing.
    """

    number: int
    listed: int
    is_broken: bool = False


class EntryReader:
    """Takes the entries of one watch apart, in order.

    Args:
        may_see: whether the watch is of a namespace.
    """

    def __init__(self, decode: DecodeFrame, may_see: Callable[[NamespaceId], bool]) -> None:
        self._decode, self.may_see = decode, may_see
        self._open: dict[tuple[InstanceId, Tier], _Open] = {}

    def begin_anew(self) -> None:
        """Entries were passed over."""
        self._open.clear()

    def frame(self, entry: LogEntry) -> Iterator[BlockChanges | InstanceChange | Missed]:
        """What a frame says, in order. A `Missed` has no positions yet."""
        frame = entry.frame(self._decode)
        cluster = {one.tier for one in entry.claims}
        changes: list[BlockChange] = []
        for event in frame.events[entry.skip :]:
            match event:
                case InstanceStarted():
                    yield from _packed(frame.instance, frame.epoch, changes)
                    changes = []
                    self.forget(frame.instance)
                    yield InstanceChange(instance=frame.instance, what="started", epoch=frame.epoch)
                case InstanceStopped():
                    yield from _packed(frame.instance, frame.epoch, changes)
                    changes = []
                    yield InstanceChange(instance=frame.instance, what="stopped", epoch=frame.epoch)
                case SnapshotEnded():
                    ended = self._ended(frame.instance, event)
                    if ended is True:
                        changes.append(BlockChange(what="ended", tier=event.tier.name, snapshot=event.snapshot))
                    elif ended is None:
                        yield from _packed(frame.instance, frame.epoch, changes)
                        changes = []
                        why = f"a snapshot of {event.tier.name} that had begun before has ended"
                        yield Missed(after="", until="", why=why, instance=frame.instance)
                case _:
                    changes += self._run(frame.instance, event, cluster)
        yield from _packed(frame.instance, frame.epoch, changes)
        yield from self.claims(entry)

    def claims(self, entry: LogEntry) -> Iterator[BlockChanges]:
        """What an entry says of pools."""
        for one in entry.claims:
            if one.pool and one.hashes and self.may_see(one.namespace):
                change = BlockChange(
                    what="lost" if one.withdrawn else "gained",
                    tier=one.tier.name if one.tier is not None else "",
                    namespace=one.namespace.hex(),
                    hashes=one.hashes.hex(),
                )
                yield from _packed(InstanceId(one.pool), 0, [change], is_pool=True)

    def forget(self, instance: InstanceId) -> None:
        """The instance holds nothing."""
        for tier in Tier:
            self._open.pop((instance, tier), None)

    def miss(self, instance: InstanceId) -> None:
        """Events of it were missed: what its snapshots under way list is not all."""
        for tier in Tier:
            if (known := self._open.get((instance, tier))) is not None:
                self._open[instance, tier] = known._replace(is_broken=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(self, instance: InstanceId, event: Event, cluster: set[Tier | None]) -> Iterator[BlockChange]:
        if isinstance(event, ResidenciesListed):
            known = self._enter(instance, event.tier, event.snapshot)
            self._open[instance, event.tier] = known._replace(listed=known.listed + len(event.hashes) // HASH_BYTES)
        if not isinstance(event, RunEvent) or not self.may_see(event.namespace):
            return
        namespace, hashes = event.namespace.hex(), event.hashes.hex()
        match event:
            case BlocksCreated(tier=tier):
                found = [BlockChange(what="gained", tier=tier.name, namespace=namespace, hashes=hashes)]
            case BlocksEvicted(tier=tier):
                found = [BlockChange(what="lost", tier=tier.name, namespace=namespace, hashes=hashes)]
            case ResidenciesListed(tier=tier, snapshot=number):
                found = [
                    BlockChange(what="listed", tier=tier.name, namespace=namespace, hashes=hashes, snapshot=number)
                ]
            case BlocksMigrated(source=source, target=target, kept=kept):
                found = [BlockChange(what="gained", tier=target.name, namespace=namespace, hashes=hashes)]
                if isinstance(source, Tier) and not kept:
                    found.append(BlockChange(what="lost", tier=source.name, namespace=namespace, hashes=hashes))
        yield from (one for one in found if Tier[one.tier] not in cluster)

    def _enter(self, instance: InstanceId, tier: Tier, number: int) -> _Open:
        known = self._open.get((instance, tier))
        if known is None or known.number != number:
            known = self._open[instance, tier] = _Open(number, 0)
        return known

    def _ended(self, instance: InstanceId, event: SnapshotEnded) -> bool | None:
        """Whether a snapshot withdraws what it did not list; None: not all of it was seen."""
        known = self._enter(instance, event.tier, event.snapshot)
        del self._open[instance, event.tier]
        if known.is_broken:
            return False
        return True if known.listed == event.count else None


def _packed(
    holder: InstanceId, epoch: int, changes: list[BlockChange], is_pool: bool = False
) -> Iterator[BlockChanges]:
    """Changes in events of bounded size."""
    packed: list[BlockChange] = []
    size = 0
    for change in changes:
        at, most = 0, 2 * _MOST_BYTES  # digits
        while at < len(change.hashes) or (at == 0 and not change.hashes):
            if size >= most or len(packed) >= MAX_CHANGED_HASHES:
                yield BlockChanges(holder=holder, is_pool=is_pool, epoch=epoch, changes=packed)
                packed, size = [], 0
            part = change.hashes[at : at + most - size]
            packed.append(
                change
                if part == change.hashes
                else BlockChange(
                    what=change.what,
                    tier=change.tier,
                    namespace=change.namespace,
                    hashes=part,
                    snapshot=change.snapshot,
                )
            )
            size += len(part)
            at += max(1, len(part))
    if packed:
        yield BlockChanges(holder=holder, is_pool=is_pool, epoch=epoch, changes=packed)
