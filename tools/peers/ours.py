"""Our side: the cluster index and the ledger behind the calls that peers have too."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import numpy as np
from peers.measure import Served, Service, serve
from peers.workload import BLOCK_TOKENS, INSTANCES, POOL_SLOTS, RUN_BLOCKS, Life, Part, Step, hashes, tokens

from kvbm.assembly import NATIVE, NATIVE_INDEX, NATIVE_LEDGER
from kvbm.core.codec import Frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    PoolStated,
    SnapshotEnded,
)
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, SequenceHash, Tier

NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=BLOCK_TOKENS)
_NAMESPACE_ID = NAMESPACE.id
_FRAME_BLOCKS = 256
_POOL = PoolStated(tier=Tier.HBM, slots=POOL_SLOTS, block_bytes=1 << 20)


# -- what a side is called by: the two classes that change when another index or ledger is to be measured --------------


class Index:
    """The catalog's index: frames in, depths out."""

    def __init__(self) -> None:
        self.native = NATIVE_INDEX(1 << 28)

    def apply(self, frame: bytes) -> None:
        """Take one frame in, as it comes off the wire."""
        self.native.apply(frame)

    def query(self, packed: bytes) -> dict[str, int]:
        """How much of a prefix each instance has."""
        return {found.instance: found.depth for found in self.native.prefixes(_NAMESPACE_ID, packed).instances}


class Slots:
    """The manager's ledger: the life of a run of blocks."""

    def __init__(self) -> None:
        self._ledger = NATIVE_LEDGER([_POOL], "lru", 64 << 20)
        self._ledger.start(Epoch(1), [NAMESPACE])

    def live(self, matched: bytes, created: bytes) -> int:
        """Match and pin one run, allocate and create another, unpin both. Returns how many blocks were matched."""
        ledger = self._ledger
        match = ledger.match(matched, True)
        allocation = ledger.allocate(Tier.HBM, len(created) // HASH_BYTES)
        if allocation is None:
            raise LookupError("the pool gave no slots though nothing is pinned")
        held = ledger.create(_NAMESPACE_ID, Tier.HBM, NO_PARENT, 0, created, allocation.slots)
        ledger.unpin(Tier.HBM, match.slots + held)
        return match.depth

    def drain(self) -> None:
        """Take the recorded events as frames, as the thread that writes them does."""
        self._ledger.take_frames(InstanceId("bench"), 0)


# -- the same as peers see it ------------------------------------------------------------------------------------------


class OurStreams:
    """The streams of all instances as they write them: offsets, digests, frames."""

    def __init__(self) -> None:
        self._streams = [_Stream(str(instance)) for instance in range(INSTANCES)]

    def beginnings(self) -> list[bytes]:
        """The first frame of every instance."""
        snapshot_ended = SnapshotEnded(tier=Tier.HBM, snapshot=1, count=0)
        return [
            stream.encode([InstanceStarted(epoch=Epoch(1), pools=(_POOL,), namespaces=(NAMESPACE,)), snapshot_ended])
            for stream in self._streams
        ]

    def ends(self) -> list[Offset]:
        """Where the stream of every instance ends."""
        return [stream.end for stream in self._streams]

    def mail(self, step: Step, form: str) -> list[bytes]:
        """Frames of 256 blocks, half created and half evicted, in runs of 16 ("runs", "cut") or 1 ("singles"); or of
        one event.
        """
        stream = self._streams[step.instance]
        run = RUN_BLOCKS if form in ("runs", "cut") else 1
        created = [] if step.created is None else _runs(step.created, run)
        withdrawn = [] if step.withdrawn is None else _runs(step.withdrawn, run)[::-1]
        each = 1 if form == "alone" else _FRAME_BLOCKS // run // (2 if created and withdrawn else 1)
        frames: list[bytes] = []
        for at in range(0, max(len(created), len(withdrawn)), each):
            new, old = created[at : at + each], withdrawn[at : at + each]
            for some, others in [(new, old)] if form != "alone" else [(new, []), ([], old)]:
                if some or others:
                    frames.append(stream.frame(some, others))
        return frames


class OurDirectory:
    """A Directory over the index."""

    def __init__(self) -> None:
        self._index = Index()
        self._streams = OurStreams()
        for frame in self._streams.beginnings():
            self._index.apply(frame)

    def mail(self, step: Step, form: str) -> list[bytes]:
        """See `OurStreams.mail`."""
        return self._streams.mail(step, form)

    def apply(self, message: bytes) -> None:
        """Take one frame in."""
        self._index.apply(message)

    def question(self, chain: Part) -> bytes:
        """The chain's hashes, packed."""
        return hashes(chain).tobytes()

    def ask(self, question: bytes) -> dict[str, int]:
        """Depth by instance."""
        return self._index.query(question)

    def depths(self, answer: dict[str, int]) -> list[int]:
        """Depth by instance."""
        return [answer.get(str(instance), 0) for instance in range(INSTANCES)]


class _Stream:
    """The stream of one instance."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = 0
        self._offset = 0

    @property
    def end(self) -> Offset:
        """Where its next frame begins."""
        return Offset(self._offset)

    def frame(self, created: list[Part], withdrawn: list[Part]) -> bytes:
        """The next frame."""
        self.digest += sum(_digest(part) for part in created) - sum(_digest(part) for part in withdrawn)
        return self.encode([*map(_created, created), *map(_evicted, withdrawn)])

    def encode(self, events: list[Event]) -> bytes:
        """A frame of these events."""
        first = self._offset
        self._offset += len(events)
        return NATIVE.encode_frame(
            Frame(
                instance=InstanceId(self.name),
                epoch=Epoch(1),
                first_offset=Offset(first),
                wall_time_ns=0,
                digest=self.digest % (1 << 64),
                events=tuple(events),
            )
        )


def _runs(part: Part, blocks: int) -> list[Part]:
    end = part.first + part.count
    return [Part(part.chain, first, min(blocks, end - first)) for first in range(part.first, end, blocks)]


def _created(part: Part) -> BlocksCreated:
    parent = hashes(Part(part.chain, part.first - 1, 1)).tobytes() if part.first else NO_PARENT
    return BlocksCreated(
        namespace=_NAMESPACE_ID,
        tier=Tier.HBM,
        hashes=hashes(part).tobytes(),
        parent=SequenceHash(parent),
        start=part.first,
    )


def _evicted(part: Part) -> BlocksEvicted:
    return BlocksEvicted(
        namespace=_NAMESPACE_ID, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=hashes(part).tobytes()
    )


def _digest(part: Part) -> int:
    """What a part adds to a digest: `core.residency.residency_mix` of all its blocks at once."""
    low, high = hashes(part).T
    mixed = _finalise(_finalise(low + np.uint64(0x9E3779B97F4A7C15 * (Tier.HBM + 1))) + high)
    return int(np.add.reduce(mixed, dtype=np.uint64))


def _finalise(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


class _Prepared(NamedTuple):
    matched: bytes
    created: bytes
    expected: int


class OurPool:
    """A Pool over the ledger."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._root = NAMESPACE.root()
        self._hashes: dict[int, bytes] = {}

    def prepare(self, life: Life) -> _Prepared:
        """The hashes of both runs."""
        created = NATIVE.sequence_hashes(tokens(life.created, life.blocks), BLOCK_TOKENS, self._root)
        self._hashes[life.created] = created
        matched = b"" if life.reused is None else self._hashes[life.reused][: life.blocks * HASH_BYTES]
        return _Prepared(matched, created, len(matched) // HASH_BYTES)

    def live(self, step: _Prepared) -> None:
        """One step."""
        if self._slots.live(step.matched, step.created) != step.expected:
            raise LookupError("a run was evicted too early")

    def settle(self) -> None:
        """Forget the events."""
        self._slots.drain()


def main(side: str = "directory") -> OurDirectory | OurPool | Service | Served:
    """A side, by name."""
    if side == "served":
        from peers.our_service import OurService

        return OurService()
    if side == "wire":
        from peers.our_reader import OurReader

        return OurReader()
    return OurPool() if side == "pool" else OurDirectory()


if __name__ == "__main__":
    serve("kvbm", version("kvbm-ledger"), main)
