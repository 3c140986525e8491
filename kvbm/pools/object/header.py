"""What an object begins with: the first bytes of it alone prove which blocks it holds, and the rest of it, block by
block, their bytes.

All integers are little-endian; k is `block_count`.

    at      bytes  field
     0          4  magic: "KVBO"
     4          2  version: 2
     6          2  block_count: k, blocks of the object
     8         16  namespace id
    24         16  sequence hash of the last block
    40          8  epoch of the writer
    48          4  block_bytes: bytes of each block as it is in memory
    52          4  header_bytes: 68 + 28 k
    56          8  body_bytes: of all encoded blocks
    64       28 k  for each block, in the order of the chain:
                     0  16  sequence hash
                    16   4  CRC-32C of the block's bytes, decoded
                    20   4  encoded bytes
                    24   1  coding, a number of `coding.Coding`
                    25   3  zero
    64+28k      4  CRC-32C of all the bytes above

In every version to come magic, version, header_bytes and the checksum at the header's end stay where they are.

Behind it follow the encoded blocks, one behind the other, and nothing more. The same object may be computed twice and
differ in checksums, lengths and codings: namespace, hashes, k and block_bytes say what it is, the rest proves its own
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.ids import HASH_BYTES
from kvbm.pools.base import Proof

OBJECT_VERSION = 2
OBJECT_MAGIC = b"KVBO"
MOST_BLOCKS = (1 << 16) - 1

_FIXED = [
    ("magic", "S4"),
    ("version", "<u2"),
    ("block_count", "<u2"),
    ("namespace", "V16"),
    ("hash", "V16"),
    ("epoch", "<u8"),
    ("block_bytes", "<u4"),
    ("header_bytes", "<u4"),
    ("body_bytes", "<u8"),
]
_BLOCK = np.dtype([("hash", "V16"), ("checksum", "<u4"), ("length", "<u4"), ("coding", "u1"), ("zero", "u1", 3)])
_CRC_BYTES = 4
_LEAST_BYTES = 68  # of a header, without its table


class ObjectHeaders(NamedTuple):
    """What the headers of m objects say. Of an object that is not `whole` nothing means anything.

    Attributes:
        whole: m booleans: the header proves itself, is of this k and block_bytes, and the object has the size it says.
        namespaces: m namespace ids.
        hashes: m packed runs of k hashes.
        epochs: m epochs of writers.
        checksums, lengths: (m, k) u32.
        codings: (m, k) u8.
        body_bytes: m sizes of bodies.
    """

    whole: np.ndarray
    namespaces: list[bytes]
    hashes: list[bytes]
    epochs: np.ndarray
    checksums: np.ndarray
    lengths: np.ndarray
    codings: np.ndarray
    body_bytes: np.ndarray


def header_bytes(blocks: int) -> int:
    """Bytes before an object's encoded blocks, of which it has `blocks`."""
    return _layout(blocks).itemsize


def encode_object_headers(
    proof: Proof, lengths: np.ndarray, codings: np.ndarray, blocks: int, block_bytes: int, checksums: ChecksumRows
) -> np.ndarray:
    """The headers of a run of m objects, (m, header_bytes) uint8.

    Args:
        proof: of their m * k blocks.
        lengths, codings: of these as they are encoded.
        blocks: k.
    """
    layout = _layout(blocks)
    count = len(lengths) // blocks
    headers = np.zeros((count, layout.itemsize), dtype=np.uint8)
    fields = headers.view(layout)[:, 0]
    table = fields["blocks"]
    hashes = np.frombuffer(proof.hashes, dtype="V16").reshape(count, blocks)
    fields["magic"] = OBJECT_MAGIC
    fields["version"] = OBJECT_VERSION
    fields["block_count"] = blocks
    fields["namespace"] = np.void(proof.namespace)
    fields["hash"] = hashes[:, -1]
    fields["epoch"] = proof.epoch
    fields["block_bytes"] = block_bytes
    fields["header_bytes"] = layout.itemsize
    fields["body_bytes"] = lengths.reshape(count, blocks).sum(axis=1, dtype=np.uint64)
    table["hash"] = hashes
    table["checksum"] = proof.checksums.reshape(count, blocks)
    table["length"] = lengths.reshape(count, blocks)
    table["coding"] = codings.reshape(count, blocks)
    fields["crc"] = checksums(np.ascontiguousarray(headers[:, :-_CRC_BYTES]))
    return headers


def newer_version(header: bytes, checksums: ChecksumRows) -> int:
    """The version of an object that a newer kvbm has put; 0 of any other, and of one whose version damage has changed.

    Args:
        header: what its first bytes are, as many as a header of this version has.
    """
    if header[: len(OBJECT_MAGIC)] != OBJECT_MAGIC or len(header) < _LEAST_BYTES:
        return 0
    version = int.from_bytes(header[4:6], "little")
    end = int.from_bytes(header[52:56], "little") - _CRC_BYTES
    if version <= OBJECT_VERSION or end < _LEAST_BYTES - _CRC_BYTES:
        return 0
    if end + _CRC_BYTES > len(header):
        return version  # its checksum is not at hand
    proved = np.frombuffer(header[:end], dtype=np.uint8).reshape(1, -1)
    is_whole = int(checksums(proved)[0]) == int.from_bytes(header[end : end + _CRC_BYTES], "little")
    return version if is_whole else 0


def decode_object_headers(
    headers: np.ndarray, sizes: Sequence[int], blocks: int, block_bytes: int | None, checksums: ChecksumRows
) -> ObjectHeaders:
    """What these headers say, each held to its own CRC and to the size of its object.

    Args:
        headers: (m, header_bytes) uint8.
        sizes: m, bytes of the whole objects.
        block_bytes: None: whatever they say.
    """
    layout = _layout(blocks)
    fields = headers.view(layout)[:, 0]
    table = fields["blocks"]
    body_bytes = fields["body_bytes"].astype(np.int64)
    whole = fields["crc"] == checksums(np.ascontiguousarray(headers[:, :-_CRC_BYTES]))
    whole &= (fields["magic"] == OBJECT_MAGIC) & (fields["version"] == OBJECT_VERSION)
    whole &= fields["block_count"] == blocks
    whole &= block_bytes is None or fields["block_bytes"] == block_bytes
    whole &= (fields["header_bytes"] == layout.itemsize) & (fields["hash"] == table["hash"][:, -1])
    whole &= body_bytes == table["length"].sum(axis=1, dtype=np.int64)
    whole &= np.asarray(sizes, dtype=np.int64) == layout.itemsize + body_bytes
    packed = np.ascontiguousarray(table["hash"]).tobytes()
    step = blocks * HASH_BYTES
    return ObjectHeaders(
        whole,
        [fields["namespace"][index].tobytes() for index in range(len(headers))],
        [packed[at : at + step] for at in range(0, len(packed), step)],
        fields["epoch"],
        np.ascontiguousarray(table["checksum"]),
        np.ascontiguousarray(table["length"]),
        np.ascontiguousarray(table["coding"]),
        body_bytes,
    )


@cache
def _layout(blocks: int) -> np.dtype[np.void]:
    return np.dtype([*_FIXED, ("blocks", _BLOCK, (blocks,)), ("crc", "<u4")])
