"""What one foreign engine holds, as a ledger without slots: facts → events, folded at once, waiting to be cut into
frames.

It has of a ledger what a stream of events needs (frames, snapshots, another epoch) and none of what needs slots: nobody
allocates here, nothing is pinned or copied, for not a byte is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, assert_never

from kvbm.core.backend import EncodeFrame, Fold, NewFold
from kvbm.core.codec import FrameBytes, cut_frames
from kvbm.core.errors import IllegalEventError
from kvbm.core.events import (
    MAX_RUN_BLOCKS,
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.fold import TierBlocks
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, SequenceHash, Tier
from kvbm.core.results import TierCounts
from kvbm.streams.foreign.blocks import Arrived, Emptied, Gained, Lost
from kvbm.streams.foreign.declared import DeclaredNamespaces, Said

_TWICE = frozenset({"created-twice", "migrated-twice", "repeated-in-run"})


class _Listing(NamedTuple):
    """What is left of a snapshot of one tier: what it held as the snapshot began, and how far that was looked
    through.
    """

    tier: Tier
    blocks: TierBlocks
    at: int
    listed: int


class HeldLedger(DeclaredNamespaces):
    """See the module. One thread at a time, under the lock of its `LedgerStream`. `bridge.table.TableLedger` is the
    native implementation.

    Args:
        instance: whose events these are.
        pools: its tiers; of how many slots and bytes is not known.

    Attributes:
        stopped: nothing is recorded any more.
    """

    def __init__(
        self,
        instance: InstanceId,
        pools: Sequence[PoolStated],
        new_fold: NewFold,
        encode_frame: EncodeFrame,
        said: Said,
    ) -> None:
        super().__init__(pools, said)
        self.applied = Offset(0)
        self.stopped = False
        self._instance, self._encode_frame = instance, encode_frame
        self._fold: Fold = new_fold()
        self._waiting: list[Event] = []
        self._digests: list[int] = []
        self._surplus: dict[tuple[Tier, SequenceHash], int] = {}  # how often more a block was gained than it is held
        self._snapshot = 0
        self._left: list[Tier] = []  # tiers that the snapshot under way has not begun with, last first
        self._listing: _Listing | None = None
        self._is_forgotten = False
        self._evicted: set[SequenceHash] = set()  # since the listing began

    @property
    def epoch(self) -> Epoch:
        """The epoch its newest events belong to."""
        return self._fold.epoch

    @property
    def digest(self) -> int:
        """Of what is held."""
        return self._fold.digest

    # -- facts ---------------------------------------------------------------------------------------------------------

    def record(self, fact: Gained | Arrived | Lost | Emptied) -> None:
        """Record what has changed."""
        match fact:
            case Gained(namespace, tier, parent, start, hashes):
                self.gain(namespace, tier, parent, start, hashes)
            case Lost(namespace, tier, reason, hashes):
                self.lose(namespace, tier, reason, hashes)
            case Arrived(namespace, tier, hashes):
                self.arrive(namespace, tier, hashes)
            case Emptied(tier):
                self.empty(tier)
            case _:
                assert_never(fact)

    def gain(self, namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes) -> None:
        """A tier has a run of a chain now. What it had already is gained once more, and has to be lost as often."""

        def event(run: bytes, at: int) -> Event:
            before = SequenceHash(hashes[(at - 1) * HASH_BYTES : at * HASH_BYTES]) if at else parent
            return BlocksCreated(namespace=namespace, tier=tier, hashes=run, parent=before, start=start + at)

        self._gain(tier, hashes, event)

    def arrive(self, namespace: NamespaceId, tier: Tier, hashes: bytes) -> None:
        """As `gain`, where nothing is said of the chain."""

        def event(run: bytes, at: int) -> Event:
            return BlocksMigrated(
                namespace=namespace,
                source=self._instance,
                target=tier,
                kept=True,
                cause=MigrateCause.OFFLOAD,
                hashes=run,
            )

        self._gain(tier, hashes, event)

    def _gain(self, tier: Tier, hashes: bytes, event: Callable[[bytes, int], Event]) -> None:
        try:
            self._record(event(hashes, 0))
        except IllegalEventError as error:
            if error.rule not in _TWICE:
                raise
        else:
            return
        for at in range(len(hashes) // HASH_BYTES):  # two hashes of the engine's that mean one block of ours
            block = SequenceHash(hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            try:
                self._record(event(block, at))
            except IllegalEventError as error:
                if error.rule not in _TWICE:
                    raise
                self._surplus[tier, block] = self._surplus.get((tier, block), 0) + 1

    def lose(self, namespace: NamespaceId, tier: Tier, reason: EvictReason, hashes: bytes) -> None:
        """A tier has these blocks no more."""
        run = self._without_surplus(tier, hashes) if self._surplus else hashes
        if self._fold.is_cluster(tier):  # where nobody counts, two hashes of the engine's may mean one claim
            run = b"".join(dict.fromkeys(_split(run)))
        if run:
            if self._listing is not None and self._listing.tier == tier:
                self._evicted.update(_split(run))
            self._record(BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=run))

    def _without_surplus(self, tier: Tier, hashes: bytes) -> bytes:
        kept = bytearray()
        for block in _split(hashes):
            if left := self._surplus.pop((tier, block), 0):
                if left > 1:
                    self._surplus[tier, block] = left - 1
            else:
                kept += block
        return bytes(kept)

    def empty(self, tier: Tier) -> None:
        """A tier has nothing any more."""
        self._surplus = {key: count for key, count in self._surplus.items() if key[0] != tier}
        for namespace, run in _runs(self._fold.blocks(tier)):
            self.lose(namespace, tier, EvictReason.CLEARED, run)

    def forget(self) -> None:
        """Let the next epoch begin with nothing. No fact may come before it."""
        self._is_forgotten = True

    # -- the stream ----------------------------------------------------------------------------------------------------

    def start(self, epoch: Epoch) -> None:
        """Begin the first epoch: nothing is held."""
        self._begin(epoch, [])

    def restart(self, epoch: Epoch) -> Offset:
        """Begin another epoch with a snapshot of all that is held. Gives the offset after it."""
        held = [] if self._is_forgotten else [(pool.tier, self._fold.blocks(pool.tier)) for pool in self._slotless()]
        if self._is_forgotten:
            self._surplus.clear()
        self._is_forgotten = False
        self._begin(epoch, held)
        return self.applied

    def _begin(self, epoch: Epoch, held: Sequence[tuple[Tier, TierBlocks]]) -> None:
        self._waiting.clear()
        self._digests.clear()
        self._left.clear()
        self._listing = None
        self._evicted.clear()
        self.applied, self._snapshot = Offset(0), 1
        self._record(self.started(epoch))
        listed = dict(held)
        for pool in self._slotless():
            blocks = listed.get(pool.tier, TierBlocks(b"", b"", []))
            for namespace, run in _runs(blocks):
                self._list(pool.tier, namespace, run)
            self._end_listing(pool.tier, len(blocks.hashes) // HASH_BYTES)

    def stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """End the stream."""
        if not self.stopped:
            self._record(InstanceStopped(reason=reason))
            self.stopped = True

    def take_frames(self, instance: InstanceId, wall_time_ns: int) -> list[FrameBytes]:
        """The events recorded since the last call, cut into frames."""
        if not self._waiting:
            return []
        first = Offset(self.applied - len(self._waiting))
        frames = [
            FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, self._encode_frame(frame))
            for frame in cut_frames(instance, self.epoch, first, self._waiting, self._digests, wall_time_ns)
        ]
        self._waiting, self._digests = [], []
        return frames

    def _record(self, event: Event) -> None:
        """Fold an event and let it wait. Raises IllegalEventError: nothing has changed then."""
        self._fold.evolve(event)
        self._waiting.append(event)
        self._digests.append(self._fold.digest)
        self.applied = Offset(self.applied + 1)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def begin_snapshot(self) -> bool:
        """Begin a snapshot of what is held, tier by tier; False when one is under way, or the stream has ended."""
        if self._left or self._listing is not None or self.stopped:
            return False
        self._snapshot += 1
        self._left = [pool.tier for pool in reversed(self._slotless())]
        return True

    def step_snapshot(self, limit: int = MAX_RUN_BLOCKS) -> bool:
        """List up to `limit` blocks more; whether the snapshot goes on."""
        if self.stopped:
            self._left, self._listing = [], None
        if self._listing is None:
            if not self._left:
                return False
            tier = self._left.pop()
            self._listing = _Listing(tier, self._fold.blocks(tier), 0, 0)
            self._evicted.clear()
        tier, blocks, at, listed = self._listing
        namespace, run = _run_at(blocks, at, min(limit, MAX_RUN_BLOCKS))
        at += len(run) // HASH_BYTES
        if self._evicted:
            run = b"".join(block for block in _split(run) if block not in self._evicted)
        if run:
            self._list(tier, namespace, run)
        listed += len(run) // HASH_BYTES
        self._listing = _Listing(tier, blocks, at, listed)
        if at * HASH_BYTES == len(blocks.hashes):
            self._end_listing(tier, listed)
            self._listing = None
        return self._listing is not None or bool(self._left)

    def _list(self, tier: Tier, namespace: NamespaceId, run: bytes) -> None:
        self._record(ResidenciesListed(namespace=namespace, tier=tier, snapshot=self._snapshot, hashes=run))

    def _end_listing(self, tier: Tier, count: int) -> None:
        self._record(SnapshotEnded(tier=tier, snapshot=self._snapshot, count=count))

    def counts(self, tier: Tier) -> TierCounts:
        """How many blocks a tier holds. How many fit is not known."""
        held = self._fold.count(tier)
        return TierCounts(0, 0, held, 0, 0)

    def held(self, tier: Tier) -> bytes:
        """Packed hashes of what a tier holds."""
        return self._fold.blocks(tier).hashes

    def _slotless(self) -> list[PoolStated]:
        """The pools that are the engine's own: what lies in the others is a claim, and nobody's to list."""
        return [pool for pool in self.pools if not self._fold.is_cluster(pool.tier) and pool.tier != Tier.OBJECT]


def _split(hashes: bytes) -> list[SequenceHash]:
    return [SequenceHash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]


def _run_at(blocks: TierBlocks, at: int, limit: int) -> tuple[NamespaceId, bytes]:
    """The blocks from the `at`-th on that are of one namespace, `limit` at most; none behind the last."""
    begin = 0
    for namespace, count in blocks.namespaces:
        if at < begin + count:
            end = min(begin + count, at + limit)
            return namespace, blocks.hashes[at * HASH_BYTES : end * HASH_BYTES]
        begin += count
    return NamespaceId(b""), b""


def _runs(blocks: TierBlocks) -> Iterator[tuple[NamespaceId, bytes]]:
    at, count = 0, len(blocks.hashes) // HASH_BYTES
    while at < count:
        namespace, run = _run_at(blocks, at, MAX_RUN_BLOCKS)
        yield namespace, run
        at += len(run) // HASH_BYTES
