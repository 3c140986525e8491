"""An instance says what it holds: in snapshots, run by run between other commands, and as a whole when an epoch
begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kvbm.core.errors import LedgerError
from kvbm.core.events import MAX_RUN_BLOCKS, InstanceStarted, ResidenciesListed, SnapshotEnded
from kvbm.core.ids import DURABLE_TIERS, Tier, pack_slots
from kvbm.core.results import SNAPSHOT_LOOKS, Recovered
from kvbm.reference.recorder import Recorder
from kvbm.reference.slots import TierSlots


class _SnapshotLeft(NamedTuple):
    """What is left to state of a tier's snapshot.

    Attributes:
        at: the slot it goes on with.
        listed: blocks listed so far.
    """

    tier: Tier
    at: int
    listed: int


class Snapshots:
    """The snapshots of one ledger.

    Args:
        recorder: where statements go.
        tiers: the pools with slots, in the order snapshots go through them.
    """

    def __init__(self, recorder: Recorder, tiers: Mapping[Tier, TierSlots]) -> None:
        self._recorder, self._tiers = recorder, tiers
        self._held = recorder.residencies.held
        self._snapshot = 0
        self._left: deque[_SnapshotLeft] = deque()

    def state_recovered(self, recovered: Mapping[Tier, Sequence[Recovered]]) -> None:
        """The first snapshot of the first epoch: what durable tiers have kept.

        Raises: LedgerError: a recovered slot does not exist.
        """
        self._snapshot = 1
        for tier, state in self._tiers.items():
            kept = recovered.get(tier, [])
            state.reserve([entry.slot for entry in kept])
            self._state_all(tier, kept, followed=True)
            for entry in kept:
                state.policy.gain(entry.hash, pinned=False)

    def begin_epoch(self, event: InstanceStarted) -> None:
        """Begin a later epoch, with a snapshot of what every tier holds now: by namespace, within one by slot.

        A snapshot under way is dropped. A slot of a durable tier that holds nothing now may have held something as far
        as the last epoch's journal goes, so it counts as withdrawn when this snapshot ends.
        """
        dropped = self._recorder.begin(event)
        self._left.clear()
        self._snapshot = 1
        for tier in self._tiers:
            held = [
                Recovered(block, namespace, slot)
                for of, block, namespace, slot in dropped
                if of == tier and slot is not None
            ]
            self._state_all(tier, sorted(held, key=lambda entry: (entry.namespace, entry.slot)), followed=False)
        for tier, state in self._tiers.items():
            if tier in DURABLE_TIERS:
                state.withdraw_unheld(self._recorder.applied)

    def begin(self) -> bool:
        """Begin a snapshot of what is held, tier by tier. False when one is under way already, or after an overflow."""
        if self._left or self._recorder.overflowed:
            return False
        self._snapshot += 1
        self._left.extend(_SnapshotLeft(tier, 0, 0) for tier in self._tiers)
        return True

    def step(self, limit: int) -> bool:
        """State up to `limit` blocks more, by slot number, a run for each stretch of one namespace; cut here and now.

        A tier's snapshot begins at its first step: what is gained before it is listed, what is gained later needs no
        statement. A step looks at no more than `SNAPSHOT_LOOKS` held slots, and at one tier, so that no engine waits
        for it.

        Returns: whether the snapshot goes on. An overflow ends it.
        Raises: LedgerError: `limit` is below 1.
        """
        if limit < 1:
            raise LedgerError(f"limit is {limit}; a step of a snapshot states at least 1 block")
        if self._recorder.overflowed:
            self._left.clear()
        if not self._left:
            return False
        tier, at, count = self._left.popleft()
        runs, at = self._next_runs(tier, at, min(limit, MAX_RUN_BLOCKS))
        for run in runs:
            self._state_run(tier, run, counted=True, followed=True)
            count += len(run)
        if at < self._tiers[tier].unused:
            self._left.appendleft(_SnapshotLeft(tier, at, count))
        else:
            self._recorder.record(SnapshotEnded(tier=tier, snapshot=self._snapshot, count=count))
        return bool(self._left) and not self._recorder.overflowed

    def _next_runs(self, tier: Tier, at: int, limit: int) -> tuple[list[list[Recovered]], int]:
        """Blocks to state next, from slot `at` on, and the held slot to go on with, or where used slots end."""
        held, state = self._held[tier], self._tiers[tier]
        runs: list[list[Recovered]] = []
        looks = listed = 0
        for slot in range(at, state.unused):
            block = state.owner(slot)
            if block is None:
                continue
            if listed == limit or looks == SNAPSHOT_LOOKS:
                return runs, slot
            looks += 1
            entry = held[block]
            if entry.snapshot == self._snapshot:
                continue  # gained since the snapshot began
            listed += 1
            if not runs or runs[-1][-1].namespace != entry.namespace:
                runs.append([])
            runs[-1].append(Recovered(block, entry.namespace, slot))
        return runs, state.unused

    def _state_all(self, tier: Tier, entries: Sequence[Recovered], followed: bool) -> None:
        """State blocks in the order given and end the tier's snapshot. Never an overflow, since pools bound it."""
        for run in _runs(entries):
            self._state_run(tier, run, counted=False, followed=followed)
        self._recorder.record(SnapshotEnded(tier=tier, snapshot=self._snapshot, count=len(entries)), counted=False)

    def _state_run(self, tier: Tier, run: Sequence[Recovered], counted: bool, followed: bool) -> None:
        self._recorder.record(
            ResidenciesListed(
                namespace=run[0].namespace,
                tier=tier,
                snapshot=self._snapshot,
                hashes=b"".join(entry.hash for entry in run),
                slots=pack_slots(entry.slot for entry in run),
            ),
            counted,
            followed,
        )


def _runs(entries: Sequence[Recovered]) -> Iterable[list[Recovered]]:
    """Stretches of one namespace, as long as an event may be."""
    for _, group in groupby(entries, key=lambda entry: entry.namespace):
        run = list(group)
        for at in range(0, len(run), MAX_RUN_BLOCKS):
            yield run[at : at + MAX_RUN_BLOCKS]
