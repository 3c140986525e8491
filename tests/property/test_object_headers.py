"""The native reader of object headers takes those that the specification in Python takes, and reads them alike."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbm._native import kept_blocks
from kvbm.assembly import NATIVE
from kvbm.core.checksum import crc32c
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof
from kvbm.pools.object.coding import Coding
from kvbm.pools.object.header import decode_object_headers, encode_object_headers, header_bytes

BLOCK_BYTES = 1000


def taken(header: bytes, proof: Proof, size_bytes: int) -> list[tuple[int, int, int]] | None:
    """What the specification says of a header: how each block is kept. None: it is no object of these blocks."""
    blocks = len(proof.hashes) // HASH_BYTES
    if len(header) != header_bytes(blocks):
        return None
    room = np.frombuffer(header, dtype=np.uint8).reshape(1, -1)
    found = decode_object_headers(room, [size_bytes], blocks, BLOCK_BYTES, NATIVE.checksums)
    if not found.whole[0] or found.namespaces[0] != proof.namespace or found.hashes[0] != proof.hashes:
        return None
    kept = list(zip(found.checksums[0].tolist(), found.lengths[0].tolist(), found.codings[0].tolist(), strict=True))
    # No decoder makes a block of others: the reader in Python finds that when it decodes them.
    decodable = all(
        length == BLOCK_BYTES if coding == Coding.RAW else length <= BLOCK_BYTES and coding in list(Coding)
        for _, length, coding in kept
    )
    return kept if decodable else None


@pytest.mark.parametrize("seed", range(400))
def test_both_take_the_same_headers_and_read_the_same_of_them(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.randrange(1, 6)
    proof = Proof(
        NamespaceId(rng.randbytes(16)),
        Epoch(rng.randrange(1 << 40)),
        rng.randbytes(blocks * HASH_BYTES),
        np.array([rng.randrange(1 << 32) for _ in range(blocks)], dtype=np.uint32),
    )
    codings = np.array([rng.choice([0, 0, 1, 2, 3, rng.randrange(256)]) for _ in range(blocks)], dtype=np.uint8)
    lengths = np.array(
        [rng.choice([BLOCK_BYTES, BLOCK_BYTES if coding == 0 else rng.randrange(1002)]) for coding in codings],
        dtype=np.uint32,
    )
    header = encode_object_headers(proof, lengths, codings, blocks, BLOCK_BYTES, NATIVE.checksums).tobytes()
    size_bytes = len(header) + int(lengths.sum())
    if rng.random() < 0.5:  # something is not as it should be; mostly its checksum is right all the same
        damaged = bytearray(header)
        damaged[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.8:
            damaged[-4:] = crc32c(bytes(damaged[:-4])).to_bytes(4, "little")
        header = bytes(damaged)
    if rng.random() < 0.2:
        size_bytes += rng.choice([-1, 1, 1000, 1 << 33, -size_bytes])
    wanted = proof
    if rng.random() < 0.2:
        other = bytearray(proof.hashes)
        other[rng.randrange(len(other))] ^= 1
        wanted = rng.choice(
            [proof._replace(namespace=NamespaceId(rng.randbytes(16))), proof._replace(hashes=bytes(other))]
        )
    expected = taken(header, wanted, size_bytes)
    assert kept_blocks(header, wanted.namespace, wanted.hashes, BLOCK_BYTES, size_bytes) == expected
    assert kept_blocks(header[:-1], wanted.namespace, wanted.hashes, BLOCK_BYTES, size_bytes) is None


def test_a_header_with_any_bit_flipped_is_not_taken() -> None:
    rng = random.Random(1)
    proof = Proof(NamespaceId(bytes(16)), Epoch(1), rng.randbytes(32), np.zeros(2, dtype=np.uint32))
    lengths, codings = np.array([BLOCK_BYTES, 7], dtype=np.uint32), np.array([0, 1], dtype=np.uint8)
    header = encode_object_headers(proof, lengths, codings, 2, BLOCK_BYTES, NATIVE.checksums).tobytes()
    size_bytes = len(header) + BLOCK_BYTES + 7
    assert kept_blocks(header, proof.namespace, proof.hashes, BLOCK_BYTES, size_bytes) == [(0, 1000, 0), (0, 7, 1)]
    for at in range(len(header)):  # every byte counts
        for bit in range(8):
            damaged = bytearray(header)
            damaged[at] ^= 1 << bit
            assert kept_blocks(bytes(damaged), proof.namespace, proof.hashes, BLOCK_BYTES, size_bytes) is None
