"""History: the events of one instance → since when and until when each block was held, and why that began and ended.

What is held is what `core.fold.Residencies` says, leniently: an event that contradicts it counts as far as it makes
sense. A stay begins where a residency is gained and ends where it is lost. In a pool of the cluster nobody holds
anything: each claim on a block is a row by itself (`end` is CLAIMED), and so is each end of a claim (`begin` is
NO_CODE); both end as they begin.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbm.core.codec import decode_frame
from kvbm.core.columns import NO_CODE, NO_ROW, NO_SLOT
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.fold import Change, Delta, Held, Residencies
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.stays import (
    CLAIMED,
    CREATED,
    LASTING,
    LISTED,
    MOVED,
    REPLACED,
    RESTARTED,
    STAY_ROW,
    TIER_STATE_ROW,
    UNLISTED,
    StayState,
)


class StayHistory:
    """See the module. Rows are STAY_ROW."""

    def __init__(self) -> None:
        self._fold = _Watched(self)
        self._stays: dict[tuple[Tier, SequenceHash], np.void] = {}
        self._ended: list[np.void] = []
        self._namespaces: dict[NamespaceId, int] = {}
        self._names: dict[InstanceId, int] = {}
        self._event: Event = InstanceStarted(epoch=Epoch(0))
        self._next = 0  # of the event's blocks, the first that was not asked for yet
        self._at = (0, 0, 0)  # wall time, epoch and offset of the event

    @property
    def namespaces(self) -> tuple[NamespaceId, ...]:
        """By the rows that name them."""
        return tuple(self._namespaces)

    @property
    def names(self) -> tuple[InstanceId, ...]:
        """Of instances that blocks were fetched from, by the rows that name them."""
        return tuple(self._names)

    def evolve_frame(self, data: bytes, at: int = 0) -> None:
        """Take in the events of the frame at a position. An epoch that begins without a start begins blind.

        Raises: FrameError: no good frame is there.
        """
        frame, _ = decode_frame(data, at)
        for offset, event in enumerate(frame.events, frame.first_offset):
            self._at = (frame.wall_time_ns, frame.epoch, offset)
            if isinstance(event, InstanceStarted):
                self._evolve(InstanceStarted(epoch=frame.epoch, pools=event.pools))
            else:
                if self._fold.epoch != frame.epoch:
                    self._evolve(InstanceStarted(epoch=frame.epoch))
                self._evolve(event)

    def miss_events(self) -> None:
        """Events were missed: what is held is as of before, until a snapshot or the next start says more."""
        self._fold.miss_events()

    def take_ended(self) -> np.ndarray:
        """The stays that have ended since the last call, in the order they ended."""
        rows, self._ended = self._ended, []
        return _rows(rows)

    def lasting(self) -> np.ndarray:
        """Those that last, tier by tier, in the order they began."""
        return _rows([self._stays[tier, block] for tier in Tier for block in self._fold.held[tier]])

    def count(self) -> int:
        """How many last."""
        return self._fold.count()

    def state(self) -> StayState:
        """Where it stands: another one, given it, goes on as this one would. What has ended and was not taken is not
        in it.
        """
        return StayState(
            self._fold.epoch,
            self._fold.tier_states(),
            self.namespaces,
            self.names,
            self.lasting(),
            np.array([held.snapshot for tier in Tier for held in self._fold.held[tier].values()], dtype="<u4"),
        )

    def resume(self, state: StayState) -> None:
        """Go on where another one stood; once, before anything else."""
        self._namespaces = {one: row for row, one in enumerate(state.namespaces)}
        self._names = {one: row for row, one in enumerate(state.names)}
        self._fold.resume(state)
        for row in state.lasting:
            self._stays[Tier(int(row["tier"])), SequenceHash(row["hash"].tobytes())] = row.copy()

    def begun(self, change: Change) -> None:
        """A residency was gained."""
        row = self._row(change.tier, change.hash, change.namespace)
        row["slot"] = NO_SLOT if change.slot is None else change.slot
        self._describe_begin(row, self._event, change)
        self._stays[change.tier, change.hash] = row

    def over(self, change: Change) -> None:
        """A residency was lost."""
        row = self._stays.pop((change.tier, change.hash))
        row["end_ns"], row["end_epoch"], row["end_offset"] = self._at
        match self._event:
            case InstanceStarted():
                row["end"] = RESTARTED
            case BlocksEvicted(tier=change.tier):
                row["end"] = self._event.reason
            case BlocksMigrated(source=change.tier, target=target, kept=False):
                row["end"], row["target"] = MOVED, target
            case SnapshotEnded():
                row["end"] = UNLISTED
            case _:
                row["end"] = REPLACED
        self._ended.append(row)

    def _evolve(self, event: Event) -> None:
        self._event, self._next = event, 0
        if isinstance(event, BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed):
            self._namespaces.setdefault(event.namespace, len(self._namespaces))
            self._claim(event)
        self._fold.evolve(event)

    def _claim(self, event: BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed) -> None:
        match event:
            case BlocksCreated(tier=tier) | ResidenciesListed(tier=tier):
                self._claim_in(event, tier, CLAIMED)
            case BlocksMigrated(source=source, target=target, kept=kept):
                if not isinstance(source, Tier):
                    self._names.setdefault(source, len(self._names))
                self._claim_in(event, target, CLAIMED)
                if isinstance(source, Tier):
                    self._claim_in(event, source, CLAIMED if kept else MOVED)
            case BlocksEvicted(tier=tier, reason=reason):
                self._claim_in(event, tier, reason)

    def _claim_in(
        self, event: BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed, tier: Tier, end: int
    ) -> None:
        """A row for each block of the event, where the tier's pool is the cluster's."""
        if not self._fold.is_cluster(tier):
            return
        for index, block in enumerate(split_hashes(event.hashes)):
            row = self._row(tier, block, event.namespace)
            row["end_ns"], row["end_epoch"], row["end_offset"] = self._at
            row["end"] = end
            if end == CLAIMED:
                self._next = index
                self._describe_begin(row, event, Change(tier, block, event.namespace, None))
                row["source"] = NO_CODE if row["source"] == tier else row["source"]
            elif isinstance(event, BlocksMigrated):
                row["target"] = event.target
            self._ended.append(row)
        self._next = 0

    def _row(self, tier: Tier, block: SequenceHash, namespace: NamespaceId) -> np.void:
        row: np.void = np.zeros(1, dtype=STAY_ROW)[0]
        row["begin_ns"], row["epoch"], row["begin_offset"] = self._at
        row["hash"] = np.frombuffer(block, dtype=np.uint8)
        row["namespace"], row["tier"] = self._namespaces[namespace], tier
        row["slot"], row["position"], row["from"] = NO_SLOT, NO_ROW, NO_ROW
        row["begin"] = row["source"] = row["target"] = NO_CODE
        row["end"] = LASTING
        return row

    def _describe_begin(self, row: np.void, event: Event, change: Change) -> None:
        match event:
            case BlocksCreated(start=start):
                blocks = split_hashes(event.hashes)
                self._next = blocks.index(change.hash, self._next)
                row["begin"], row["position"] = CREATED, (start + self._next) & NO_ROW
            case BlocksMigrated(source=source, cause=cause):
                row["begin"] = cause
                if isinstance(source, Tier):
                    row["source"] = source
                else:
                    row["from"] = self._names[source]
            case _:
                row["begin"] = LISTED


class _Watched(Residencies):
    """Says what is gained and lost as it happens: one event may do both to one block."""

    def __init__(self, history: StayHistory) -> None:
        super().__init__(strict=False)
        self._history = history
        self._clusters: dict[Tier, bool] = {}  # of an epoch whose start another one has read

    def is_cluster(self, tier: Tier) -> bool:
        return self._clusters.get(tier, super().is_cluster(tier))

    def _begin(self, event: InstanceStarted, delta: Delta) -> None:
        super()._begin(event, delta)
        self._clusters.clear()

    def tier_states(self) -> np.ndarray:
        """TIER_STATE_ROW, a row a tier."""
        return np.array(
            [
                (self._listed[one], self._snapshots[one], self._open[one], self._whole[one], self.is_cluster(one), 0)
                for one in Tier
            ],
            dtype=TIER_STATE_ROW,
        )

    def resume(self, state: StayState) -> None:
        """See `StayHistory.resume`."""
        self.epoch = state.epoch
        for tier, row in zip(Tier, state.tiers, strict=True):
            self._listed[tier], self._snapshots[tier] = int(row["listed"]), int(row["snapshot"])
            self._open[tier], self._whole[tier] = bool(row["is_open"]), bool(row["is_whole"])
            self._clusters[tier] = bool(row["is_cluster"])
        for stay, snapshot in zip(state.lasting, state.snapshots, strict=True):
            tier, block = Tier(int(stay["tier"])), SequenceHash(stay["hash"].tobytes())
            slot = None if stay["slot"] == NO_SLOT else int(stay["slot"])
            self.held[tier][block] = Held(state.namespaces[stay["namespace"]], slot, int(snapshot))
            if slot is not None:
                self._occupied[tier][slot] = block

    def _gain(self, tier: Tier, block: SequenceHash, namespace: NamespaceId, slot: int | None, delta: Delta) -> None:
        super()._gain(tier, block, namespace, slot, delta)
        self._history.begun(Change(tier, block, namespace, slot))

    def _relist(
        self, tier: Tier, block: SequenceHash, namespace: NamespaceId, slot: int | None, delta: Delta, rule: str | None
    ) -> None:
        before = self.held[tier][block]
        super()._relist(tier, block, namespace, slot, delta, rule)
        if (before.namespace, before.slot) != (namespace, slot):
            self._history.over(Change(tier, block, before.namespace, before.slot))
            self._history.begun(Change(tier, block, namespace, slot))

    def _lose(self, tier: Tier, block: SequenceHash, delta: Delta) -> None:
        held = self.held[tier][block]
        super()._lose(tier, block, delta)
        self._history.over(Change(tier, block, held.namespace, held.slot))


def _rows(rows: Sequence[np.void]) -> np.ndarray:
    return np.array(rows, dtype=STAY_ROW) if rows else np.empty(0, dtype=STAY_ROW)
