"""The specification, for tests and readers alone, of the 64 bytes before a block in a slot of NVME.

Native code writes and reads them.

Objects have pools/object/header.py.

All integers are little-endian.

    at  bytes  field
     0      4  magic: "KVBS"
     4      2  version: 1, or 2 where a seal follows, drawn in sealing.py
     6      2  block_count: blocks that follow, 1 in this version
     8     16  namespace id
    24     16  sequence hash, of the last block where there are several
    40      8  epoch of the writer
    48      4  block_bytes
    52      4  CRC-32C of the block's bytes
    56      4  generation of the pool when it was written, as in generations.py; 0 where the pool keeps none
    60      4  CRC-32C of the 60 bytes above

Whatever part of a write is lost, a reader notices: a torn header fails its own CRC, and a whole one beside other bytes
fails theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.pools.base import Proof

HEADER_BYTES = 64
SEAL_BYTES = 64
VERSION = 1
SEALED_VERSION = 2
SLOT_MAGIC = b"KVBS"

_PROVED_BYTES = 60  # what the header's own CRC covers
_HEADER = np.dtype(
    [
        ("magic", "u1", 4),
        ("version", "<u2"),
        ("block_count", "<u2"),
        ("namespace", "u1", HASH_BYTES),
        ("hash", "u1", HASH_BYTES),
        ("epoch", "<u8"),
        ("block_bytes", "<u4"),
        ("checksum", "<u4"),
        ("generation", "<u4"),
        ("crc", "<u4"),
    ]
)


class Verdict(NamedTuple):
    """Which rows are proved to be the blocks that were asked for.

    Attributes:
        good: n booleans.
        checksums: n CRC-32C of the rows, u32.
    """

    good: np.ndarray
    checksums: np.ndarray


def empty_headers(count: int) -> np.ndarray:
    """Room for n headers, (n, 64) uint8. All zeros prove nothing, so what a short read leaves out counts as wrong."""
    return np.zeros((count, HEADER_BYTES), dtype=np.uint8)


def encode_headers(
    magic: bytes, proof: Proof, block_bytes: int, checksums: ChecksumRows, generation: int = 0
) -> np.ndarray:
    """The headers of a run of blocks, (n, 64) uint8."""
    hashes = np.frombuffer(proof.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
    headers = empty_headers(len(hashes))
    fields = headers.view(_HEADER)[:, 0]
    fields["magic"] = np.frombuffer(magic, dtype=np.uint8)
    fields["version"] = VERSION
    fields["block_count"] = 1
    fields["namespace"] = np.frombuffer(proof.namespace, dtype=np.uint8)
    fields["hash"] = hashes
    fields["epoch"] = proof.epoch
    fields["block_bytes"] = block_bytes
    fields["checksum"] = proof.checksums
    fields["generation"] = generation
    fields["crc"] = checksums(np.ascontiguousarray(headers[:, :_PROVED_BYTES]))
    return headers


def verify(
    magic: bytes,
    headers: np.ndarray,
    rows: np.ndarray,
    namespace: NamespaceId,
    hashes: bytes,
    checksums: ChecksumRows,
) -> Verdict:
    """Hold headers and rows to what was asked for: every field, the header's CRC, and the CRC of the bytes.

    Args:
        headers: (n, 64) uint8.
        rows: (n, block_bytes) uint8.
        hashes: n packed hashes that were asked for.
    """
    fields = headers.view(_HEADER)[:, 0]
    sums = checksums(rows)
    good = fields["crc"] == checksums(np.ascontiguousarray(headers[:, :_PROVED_BYTES]))
    good &= (fields["magic"] == np.frombuffer(magic, dtype=np.uint8)).all(axis=1)
    good &= (fields["version"] == VERSION) & (fields["block_count"] == 1) & (fields["block_bytes"] == rows.shape[1])
    good &= (fields["namespace"] == np.frombuffer(namespace, dtype=np.uint8)).all(axis=1)
    good &= (fields["hash"] == np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)).all(axis=1)
    good &= fields["checksum"] == sums
    return Verdict(good, sums)


class FoundHeaders(NamedTuple):
    """What n headers say; of one that is not whole nothing is meant.

    Attributes:
        whole: uint8, whether each is the header of a block of the pool's size.
        namespaces, hashes: packed.
        epochs: u64. generations: u32. sealed: uint8.
    """

    whole: np.ndarray
    namespaces: bytes
    hashes: bytes
    epochs: np.ndarray
    generations: np.ndarray
    sealed: np.ndarray


def read_headers(magic: bytes, headers: np.ndarray, block_bytes: int, checksums: ChecksumRows) -> FoundHeaders:
    """What headers say by themselves, (n, 64) uint8."""
    fields = headers.view(_HEADER)[:, 0]
    whole = fields["crc"] == checksums(np.ascontiguousarray(headers[:, :_PROVED_BYTES]))
    whole &= (fields["magic"] == np.frombuffer(magic, dtype=np.uint8)).all(axis=1)
    whole &= (fields["block_count"] == 1) & (fields["block_bytes"] == block_bytes)
    whole &= (fields["version"] == VERSION) | (fields["version"] == SEALED_VERSION)
    return FoundHeaders(
        whole.astype(np.uint8),
        fields["namespace"].tobytes(),
        fields["hash"].tobytes(),
        fields["epoch"].astype(np.uint64),
        fields["generation"].astype(np.uint32),
        (fields["version"] == SEALED_VERSION).astype(np.uint8),
    )
