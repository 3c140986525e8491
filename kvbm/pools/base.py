"""What a pool promises.

A pool keeps bytes and their proofs; which slot holds what, and when it may be written, is the ledger's.

Rows are C-contiguous uint8 arrays of shape (m, block_bytes). Block i of a run is row `at[i]` of them, and row i where
`at` is None (then m = n). So a copy between two pools needs no third place: the `memory` of one is the rows of the
other. Calls block and release the GIL where bytes move; the manager makes them outside its lock, for slots that are
pinned or its own (a slot in copy belongs to the copy).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Reach, Tier
from kvbm.core.reads import ReadOutcome, ReadResult

__all__ = [
    "NamespaceBytes",
    "ObjectPool",
    "ObjectStats",
    "PodPool",
    "PodRun",
    "Proof",
    "ReadOutcome",
    "ReadResult",
    "SlotPool",
]


class Proof(NamedTuple):
    """What proves a run of blocks: kept beside its bytes, checked when they are read.

    Attributes:
        hashes: n packed sequence hashes.
        checksums: n CRC-32C of the rows, u32.
        generation: that of the pool when they set out for it, where it keeps any; None: as it is when they are written.
    """

    namespace: NamespaceId
    epoch: Epoch
    hashes: bytes
    checksums: np.ndarray
    generation: int | None = None


class SlotPool(Protocol):
    """A pool with a fixed number of slots, one writer, sized when it is made.

    Attributes:
        memory: the slots themselves, (slots, block_bytes) uint8, where the CPU can reach them: a copy may then read and
            write them in place, with `checksums` and `seal` for the proofs. None: only `read` and `write` get at the
            bytes.
    """

    tier: Tier
    slots: int
    block_bytes: int
    reach: Reach

    @property
    def memory(self) -> np.ndarray | None: ...

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put rows into slots, durable as far as the tier is.

        Raises PoolError: the device refused; the slots then hold nothing.
        """

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots that should hold these blocks. Trouble is an outcome, never an exception.

        Rows whose outcome is not GOOD hold anything afterwards.
        """

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """CRC-32C of what slots of `memory` hold, u32: as it was when it left HBM, and computed where that is here."""

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Keep the proofs of blocks that somebody else has put into `memory` at these slots."""

    def close(self) -> None:
        """Give back memory, files and locks. Idempotent."""


class NamespaceBytes(NamedTuple):
    """What was put of a namespace: bytes as in memory, and as they lie in the store.

    The first over the second is the ratio.
    """

    raw_bytes: int = 0
    stored_bytes: int = 0


class ObjectStats(NamedTuple):
    """What a pool has counted since it was made.

    Attributes:
        put_objects: put by this pool.
        put_bytes: their bytes, of all namespaces together.
        found_objects: that were there already when they were to be put.
        refused_objects: that were not put for some trouble.
        got_objects, missing_objects, corrupt_objects, failed_objects: how reads ended.
        namespaces: bytes put, by namespace: of the 4096 that were put last.
        away: why its store, or a part of it, has not answered yet since the start; "" once it has.
    """

    put_objects: int = 0
    found_objects: int = 0
    refused_objects: int = 0
    got_objects: int = 0
    missing_objects: int = 0
    corrupt_objects: int = 0
    failed_objects: int = 0
    namespaces: dict[NamespaceId, NamespaceBytes] = {}  # noqa: RUF012  # never changed in place
    away: str = ""
    put_bytes: NamespaceBytes = NamespaceBytes()


class ObjectPool(Protocol):
    """A pool of cluster reach: no slots, no owner, blocks are found by namespace and hash.

    An object holds `blocks` consecutive blocks of a chain, from a position that is a multiple of `blocks`, and is named
    by namespace and the hash of its last one. `put` is conditional and content-named: putting what is there already is
    a success once it proves to be the same blocks.

    Attributes:
        blocks: k, blocks of an object, at least 1.
        name: the store, the same for every instance that uses it with the same k; claims are kept under it.
        forgets: whether the store drops objects by itself: one that is gone is then nothing to warn of.
    """

    tier: Tier
    block_bytes: int
    reach: Reach
    name: str
    blocks: int
    forgets: bool

    def admit(self, namespaces: Iterable[Namespace]) -> None:
        """Learn how the blocks of these namespaces are coded and whose they are; those of others stay raw."""

    def absent(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[bool]:
        """For each object, by the hash of its last block, whether a pool that forgets has it no more, for certain."""

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        """For each block whether the store now holds it. Trouble is False, never an exception.

        The run is whole objects: every k blocks from its first one are consecutive in their chain and begin at a
        multiple of k. They need not belong to one chain. Raises LayoutError: the run is no multiple of k.
        """

    def get(
        self,
        namespace: NamespaceId,
        chain: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
        first: int = 0,
    ) -> ReadResult:
        """Fill rows with n blocks of a chain, verified. Trouble is an outcome, never an exception.

        Args:
            chain: packed hashes of whole objects, of which the blocks from `first` to before `first` + n are wanted.
            at: as everywhere; n is its length, or the number of rows.
        Raises: LayoutError: the chain is no multiple of k, or has fewer than `first` + n blocks.
        """

    def stats(self) -> ObjectStats:
        """What was counted since the pool was made."""

    def close(self) -> None:
        """Give back connections. Idempotent."""


class PodRun(NamedTuple):
    """Consecutive blocks of a chain that one instance of the pod seems to have.

    Attributes:
        slots: of its NVME pool, one for each block.
    """

    instance: InstanceId
    slots: tuple[int, ...]


class PodPool(Protocol):
    """The NVME pools of the other instances of a pod, whether these run or not.

    Nobody is asked: each block proves itself.
    """

    def find(self, namespace: NamespaceId, hashes: bytes) -> list[PodRun]:
        """Who seems to have these blocks, from the first on without a hole.

        From memory, at once; it may have changed since.
        """

    def present(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        """Which of these blocks somebody seems to have, each by itself: a bool for each. As `find`."""

    def read(
        self,
        instance: InstanceId,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots of an instance; what these do not prove to hold any more is MISSING.

        Trouble is an outcome.
        """

    def close(self) -> None:
        """Give back files and threads. Idempotent."""
