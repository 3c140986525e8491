"""What objects hold: their headers proved, their blocks decoded into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.object.coding import BlockCoder
from kvbm.pools.object.envelope import ObjectEnvelope, newer_object
from kvbm.pools.object.header import OBJECT_VERSION, ObjectHeaders, decode_object_headers, header_bytes, newer_version
from kvbm.pools.stores.base import Got, Refusal


class Described(NamedTuple):
    """What an object holds, by a header that is proved by itself, by the object's name and by its size.

    Attributes:
        hashes: packed, k of them, in the order of their chain.
    """

    namespace: NamespaceId
    hashes: bytes
    epoch: Epoch
    size_bytes: int


class FoundObject(NamedTuple):
    """An object that a store has answered with.

    Attributes:
        at: its position among the objects that were asked for.
        got: all of it, or its beginning.
    """

    at: int
    name: str
    got: Got


class WantedBlocks:
    """Blocks that are wanted of m objects.

    Attributes:
        chain: packed hashes of all blocks of the objects.
        targets: (m, k): the row of each block, below 0 where it is not wanted.
        outcomes, sums: (m, k): how each read ended, and its checksum.
        object_bytes: size of the last object that was read whole; 0: none yet.
    """

    def __init__(self, namespace: NamespaceId, chain: bytes, blocks: int, rows: np.ndarray) -> None:
        self.namespace = namespace
        self.chain = chain
        self.rows = rows
        self._step = blocks * HASH_BYTES
        self.targets = np.full((len(chain) // self._step, blocks), -1, dtype=np.int64)
        self.outcomes = np.full(self.targets.shape, ReadOutcome.FAILED, dtype=np.uint8)
        self.sums = np.zeros(self.targets.shape, dtype=np.uint32)
        self.object_bytes = 0

    def hashes(self, index: int) -> bytes:
        """Of one object's blocks."""
        return self.chain[index * self._step : (index + 1) * self._step]

    def hashes_of(self, part: slice) -> bytes:
        """Of the blocks of some objects."""
        return self.chain[part.start * self._step : part.stop * self._step]

    def is_corrupt(self, index: int) -> bool:
        """Whether one of an object's wanted blocks is not what it should be."""
        return bool(((self.outcomes[index] == ReadOutcome.CORRUPT) & (self.targets[index] >= 0)).any())


class ObjectReader:
    """Proves and decodes objects of k blocks. It asks no store; any thread may call it."""

    def __init__(self, blocks: int, block_bytes: int, checksums: ChecksumRows, coder: BlockCoder) -> None:
        """Args: blocks: k, blocks of an object."""
        self._blocks, self._block_bytes, self._header_bytes = blocks, block_bytes, header_bytes(blocks)
        self._checksum_rows, self._coder = checksums, coder

    def fill(self, envelope: ObjectEnvelope, wanted: WantedBlocks, found: Sequence[FoundObject]) -> list[str]:
        """Fill rows from whole objects and set their outcomes.

        Returns a sentence for each object that cannot be opened.
        """
        headers, unopened = self._headers(envelope, found, self._block_bytes)
        for position, (index, name, got) in enumerate(found):
            if position in unopened:
                continue
            wanted.outcomes[index] = ReadOutcome.CORRUPT
            same = headers.whole[position] and headers.namespaces[position] == wanted.namespace
            if not (same and headers.hashes[position] == wanted.hashes(index) and len(got.body) == got.size_bytes):
                continue
            body = envelope.open_blocks(name, got.body)
            if body is None:
                continue
            wanted.object_bytes = got.size_bytes
            lengths, codings = headers.lengths[position], headers.codings[position]
            good, sums = self._coder.decode(body, lengths, codings, wanted.rows, wanted.targets[index])
            wanted.sums[index] = sums
            wanted.outcomes[index][good & (sums == headers.checksums[position])] = ReadOutcome.GOOD
        return [refusal.words for refusal in unopened.values()]

    def same_blocks(
        self, envelope: ObjectEnvelope, proof: Proof, found: Sequence[FoundObject]
    ) -> tuple[list[int], list[str]]:
        """Indexes of the objects that hold the same blocks as a run, and a sentence for each that does not."""
        headers, unopened = self._headers(envelope, found, self._block_bytes)
        step = self._blocks * HASH_BYTES
        same, troubles = [], []
        for position, (index, name, got) in enumerate(found):
            if refusal := unopened.get(position):
                troubles.append(refusal.words)
            elif not headers.whole[position]:
                troubles.append(f"{name} is there with {got.size_bytes} bytes that are no whole object; delete it")
            elif (
                headers.namespaces[position] != proof.namespace
                or headers.hashes[position] != proof.hashes[index * step : (index + 1) * step]
            ):
                troubles.append(f"{name} is there and holds other blocks; delete it")
            else:
                same.append(index)
        return same, troubles

    def describe(self, envelope: ObjectEnvelope, name: str, got: Got) -> Described | Refusal | None:
        """What an object holds, of whatever block_bytes; None when it is not what its name says."""
        headers, unopened = self._headers(envelope, [FoundObject(0, name, got)], None)
        if unopened:
            return unopened[0]
        namespace, hashes = NamespaceId(headers.namespaces[0]), headers.hashes[0]
        if not headers.whole[0] or envelope.names(namespace, [hashes[-HASH_BYTES:]]) != [name]:
            return None
        return Described(namespace, hashes, Epoch(int(headers.epochs[0])), got.size_bytes)

    def _headers(
        self, envelope: ObjectEnvelope, found: Sequence[FoundObject], block_bytes: int | None
    ) -> tuple[ObjectHeaders, dict[int, Refusal]]:
        """The headers of objects, or of their beginnings; and by position why some cannot be opened."""
        room = bytearray(self._header_bytes * len(found))
        unopened = {}
        for position, (_, name, got) in enumerate(found):
            header = envelope.open_header(name, got.body)
            if isinstance(header, Refusal):
                unopened[position] = header
            elif version := newer_version(header, self._checksum_rows):
                unopened[position] = newer_object(name, version, OBJECT_VERSION)
            elif len(header) == self._header_bytes:
                room[position * self._header_bytes : (position + 1) * self._header_bytes] = header
        headers = np.frombuffer(room, dtype=np.uint8).reshape(len(found), self._header_bytes)
        sizes = [one.got.size_bytes - envelope.extra_bytes for one in found]
        return decode_object_headers(headers, sizes, self._blocks, block_bytes, self._checksum_rows), unopened
