"""Recovery from journals that were let go behind snapshots, torn and damaged, held to the whole history."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.backend import NewFold
from kvbm.core.codec import Frame, FrameBytes
from kvbm.core.errors import JournalError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.fold import Residencies
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier, pack_slots
from kvbm.streams.base import Position
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from tests.readable import recover

INSTANCE = InstanceId("instance-0")
NAMESPACE = NamespaceId(bytes(range(16)))
SLOTS = 24
POOL = "pool-1"
Slots = dict[SequenceHash, int | None]


class Writing:
    """Writes one epoch's frames to a journal, as a ledger would: events, and snapshots between them."""

    def __init__(self, journal: Journal, rng: random.Random, carried: Slots) -> None:
        self.journal, self.rng = journal, rng
        self.fold = Residencies(strict=True)
        self.held_at: dict[Offset, Slots] = {Offset(0): {}}  # after each frame
        self.snapshots: list[tuple[Offset, Offset]] = []  # where each completed snapshot began and ended
        self.nvme_parts: list[tuple[Offset, Offset]] = []  # and the part of it that is about NVME
        self.first_snapshot_end = Offset(0)
        self._events: list[Event] = []
        self._offset = Offset(0)  # of the frame that gathers
        self._number = 0
        self._unlisted: dict[
            Tier, list[SequenceHash] | None
        ] = {}  # a snapshot under way; None before a tier's first step
        self._began = self._nvme_began = Offset(0)
        self._listed = 0
        epoch = Epoch(journal.epoch + 1)
        journal.begin_epoch(epoch, POOL)
        pools = (PoolStated(Tier.HBM, SLOTS, 64, Reach.INSTANCE), PoolStated(Tier.NVME, SLOTS, 64, Reach.INSTANCE))
        self._say(InstanceStarted(epoch=epoch, pools=pools))
        for block, slot in carried.items():
            assert slot is not None
            self._say(self._stating(Tier.NVME, [block], pack_slots([slot]), 1))
        self._say(SnapshotEnded(tier=Tier.HBM, snapshot=1, count=0))
        self._say(SnapshotEnded(tier=Tier.NVME, snapshot=1, count=len(carried)))
        self._number = 1
        self.first_snapshot_end = Offset(self._offset + len(self._events))

    def step(self) -> None:
        """Say something."""
        chance = self.rng.random()
        if self._unlisted and chance < 0.3:
            self._step_snapshot()
        elif not self._unlisted and chance < 0.06:
            self._begin_snapshot()
        elif chance < 0.6:
            self.create()
        else:
            self._evict()
        if self.rng.random() < 0.4:
            self.cut()

    def cut(self) -> None:
        """Make a frame of what has gathered."""
        if not self._events:
            return
        frame = Frame(
            instance=INSTANCE,
            epoch=self.fold.epoch,
            first_offset=self._offset,
            wall_time_ns=0,
            digest=self.fold.digest,
            events=tuple(self._events),
        )
        self.journal.append(FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, NATIVE.encode_frame(frame)))
        self._events, self._offset = [], frame.next_offset
        self.held_at[frame.next_offset] = self.held()

    def held(self) -> Slots:
        return {block: held.slot for block, held in self.fold.held[Tier.NVME].items()}

    def truncate(self) -> None:
        """As the manager does: behind the last completed snapshot that is durable and, here by chance, published."""
        published = self.rng.choice([self._offset, Offset(self.rng.randrange(self._offset + 1))])
        began = [begin for begin, end in self.snapshots if end <= published]
        self.journal.truncate(
            Position(self.fold.epoch, published), Position(self.fold.epoch, max(began, default=Offset(0)))
        )

    def _say(self, event: Event) -> None:
        self.fold.evolve(event)
        self._events.append(event)

    def _free(self, tier: Tier) -> list[int]:
        return [slot for slot in range(SLOTS) if self.fold.slot_owner(tier, slot) is None]

    def create(self) -> None:
        """Gain some blocks."""
        tier = self.rng.choice([Tier.HBM, Tier.NVME, Tier.NVME])
        free = self._free(tier)
        names = [SequenceHash(n.to_bytes(16, "little")) for n in self.rng.sample(range(1, 60), 3)]
        names = [name for name in names if name not in self.fold.held[tier]][: len(free)]
        if names:
            slots = pack_slots(self.rng.sample(free, len(names)))
            self._say(BlocksCreated(namespace=NAMESPACE, tier=tier, hashes=b"".join(names), slots=slots))

    def _evict(self) -> None:
        tier = self.rng.choice([Tier.HBM, Tier.NVME])
        held = list(self.fold.held[tier])
        gone = self.rng.sample(held, min(len(held), self.rng.randrange(1, 4)))
        if gone:
            self._say(BlocksEvicted(namespace=NAMESPACE, tier=tier, reason=EvictReason.CAPACITY, hashes=b"".join(gone)))

    def _begin_snapshot(self) -> None:
        if self.rng.random() < 0.5:
            self.cut()  # else the snapshot begins in the middle of a frame
        self.journal.roll()
        self._number += 1
        self._began = Offset(self._offset + len(self._events))
        self._unlisted = {Tier.HBM: None}
        self._listed = 0
        self._step_snapshot()

    def _step_snapshot(self) -> None:
        tier, left = next(iter(self._unlisted.items()))
        held = self.fold.held[tier]
        blocks = list(held) if left is None else [block for block in left if block in held]
        there, self._unlisted[tier] = blocks[:4], blocks[4:]
        if there:
            slots = [held[block].slot or 0 for block in there]
            self._listed += len(there)
            self._say(self._stating(tier, there, pack_slots(slots), self._number))
        if self._unlisted[tier]:
            return
        self._say(SnapshotEnded(tier=tier, snapshot=self._number, count=self._listed))
        self._listed = 0
        if tier == Tier.HBM:
            self._unlisted = {Tier.NVME: None}
            self._nvme_began = Offset(self._offset + len(self._events))
        else:
            self._unlisted = {}
            end = Offset(self._offset + len(self._events))
            self.snapshots.append((self._began, end))
            self.nvme_parts.append((self._nvme_began, end))

    def _stating(self, tier: Tier, blocks: list[SequenceHash], slots: bytes, number: int) -> ResidenciesListed:
        return ResidenciesListed(namespace=NAMESPACE, tier=tier, snapshot=number, hashes=b"".join(blocks), slots=slots)


class Life(NamedTuple):
    """What one epoch said, for comparison."""

    held_at: dict[Offset, Slots]
    snapshots: list[tuple[Offset, Offset]]
    nvme_parts: list[tuple[Offset, Offset]]
    first_snapshot_end: Offset


def recovered(folder: Path, fold: NewFold) -> Slots:
    journal = Journal.open(folder, INSTANCE, NATIVE)
    try:
        found = recover(journal, Tier.NVME, SLOTS, POOL, fold).blocks
        assert len({one.slot for one in found}) == len(found)
        return {one.hash: one.slot for one in found}
    finally:
        journal.close()


def kept_frames(folder: Path) -> tuple[dict[Epoch, list[tuple[Offset, Offset]]], set[Epoch]]:
    """What is left after the repair, and which epochs were cut."""
    journal = Journal.open(folder, INSTANCE, NATIVE)
    try:
        epochs = range(1, journal.epoch + 1)
        frames = {Epoch(e): [(f.first_offset, f.next_offset) for f, _ in journal.frames(Epoch(e))] for e in epochs}
        return frames, {Epoch(e) for e in epochs if journal.was_cut(Epoch(e))}
    finally:
        journal.close()


def expected(folder: Path, lives: dict[Epoch, Life]) -> tuple[Slots, str]:
    """What recovery should find, from the history and from where the kept frames lie alone; and by which rule."""
    kept, cut = kept_frames(folder)
    for epoch in sorted(kept, reverse=True):
        frames, life = kept[epoch], lives[epoch]
        if not frames:
            if epoch in cut:
                return {}, "cut"
            continue
        unbroken = frames[-1][0]  # from here to the end no frame is missing
        for first, end in reversed(frames):
            if end != unbroken and first != frames[-1][0]:
                break
            unbroken = first
        end = frames[-1][1]
        if unbroken == 0 and end >= life.first_snapshot_end:
            return life.held_at[end], "whole epoch"
        if any(unbroken <= begin and done <= end for begin, done in life.snapshots):
            return life.held_at[end], "later snapshot"
        if any(unbroken <= begin and done <= end for begin, done in life.nvme_parts):
            return life.held_at[end], "part of a snapshot"  # or nothing, as long as other tiers' digests do not agree
        if unbroken or epoch in cut:
            return {}, "no snapshot"
    return {}, "nothing"


def live(folder: Path, rng: random.Random, truncates: bool) -> dict[Epoch, Life]:
    """Some epochs of an instance; each ends with its process."""
    lives: dict[Epoch, Life] = {}
    for number in range(rng.randrange(1, 4)):
        carried = recovered(folder, NATIVE_FOLD) if number else {}
        journal = Journal.open(
            folder, INSTANCE, NATIVE, JournalOptions(segment_bytes=rng.choice([1, 300, 2000, 1 << 20]))
        )
        writing = Writing(journal, rng, carried)
        for _ in range(rng.choice([0, 10, 60, 120])):
            writing.step()
            if truncates and rng.random() < 0.03:
                writing.truncate()
        if rng.random() < 0.8:
            writing.cut()
        lives[writing.fold.epoch] = Life(
            writing.held_at, writing.snapshots, writing.nvme_parts, writing.first_snapshot_end
        )
        journal.close()
    return lives


def check(folder: Path, seed: int, damage: str) -> str:
    """Live, damage what is left, and hold recovery to the history. Gives the rule that decided."""
    rng = random.Random(seed)
    lives = live(folder, rng, truncates=seed % 4 != 0)
    segments = sorted(folder.glob("*.kvbj"))
    if damage == "torn" and segments:
        data = segments[-1].read_bytes()
        segments[-1].write_bytes(data[: rng.randrange(len(data))])
    elif damage == "missing" and segments:
        rng.choice(segments).unlink()
    is_version_flipped = False
    if damage == "flipped":
        for path in rng.sample(segments, min(len(segments), rng.randrange(1, 3))):
            flipped = bytearray(path.read_bytes())
            if flipped:
                at = rng.randrange(len(flipped))
                is_version_flipped = is_version_flipped or at in (4, 5)
                flipped[at] ^= 1 << rng.randrange(8)
                path.write_bytes(flipped)
    if is_version_flipped:  # of a segment's first frame: nobody can tell that from a newer kvbm's
        with contextlib.suppress(JournalError):
            recovered(folder, NATIVE_FOLD)
        return "newer"
    found = recovered(folder, NATIVE_FOLD)
    assert found == recovered(folder, Residencies)
    wanted, rule = expected(folder, lives)
    assert found == wanted or (rule == "part of a snapshot" and not found), f"seed {seed}, {damage}: {rule}"
    if damage == "none":
        lasting = [life for _, life in sorted(lives.items()) if max(life.held_at) >= life.first_snapshot_end]
        held = lasting[-1].held_at if lasting else {Offset(0): dict[SequenceHash, int | None]()}
        assert wanted == held[max(held)], f"seed {seed}: letting go has lost something"
    return rule


@pytest.mark.parametrize("block", range(6))
def test_recovery_gives_what_the_history_says_or_nothing(tmp_path: Path, block: int) -> None:
    rules = {
        check(tmp_path / f"{seed}-{damage}", seed, damage)
        for seed in range(8 * block, 8 * block + 8)
        for damage in ("none", "torn", "missing", "flipped")
    }
    assert len(rules & {"whole epoch", "later snapshot", "no snapshot"}) >= 2, "the histories are too much alike"


def test_an_epoch_that_has_lost_its_snapshot_hides_the_one_before_it(tmp_path: Path) -> None:
    lives = []
    for seed in range(2):
        journal = Journal.open(tmp_path, INSTANCE, NATIVE, JournalOptions(segment_bytes=1))
        writing = Writing(journal, random.Random(seed), lives[-1] if lives else {})
        writing.cut()
        for _ in range(4):
            writing.create()
            writing.cut()
        writing.cut()
        lives.append(writing.held())
        journal.close()
    assert recovered(tmp_path, NATIVE_FOLD) == lives[1]
    second = sorted(tmp_path.glob("0000000002-*.kvbj"))
    assert len(second) > 1
    second[0].unlink()  # the later ones may have withdrawn and overwritten what the first epoch held
    assert recovered(tmp_path, NATIVE_FOLD) == {}
