"""Sampled accesses as files: how a catalog's archive keeps them, and how `kvbm-replay whatif` reads them.

A file is a row of records and nothing else, so that appending is all there is to writing:

    length u32, CRC-32 of the body u32 (both little-endian), body: one `AccessSample` in MessagePack

Samples may be lost without harm: a record that is damaged is left out, and a torn tail ends the file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbm.core.ids import HASH_BYTES
from kvbm.files import opener
from kvbm.streams.base import AccessSample

SUFFIX = ".samples"
MAX_SAMPLE_BYTES = 16 << 20  # a longer one is damage: a prompt of a million blocks is no prompt
_HEAD = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AccessSample)


def encode_sample(sample: AccessSample) -> bytes:
    """A sample as one record."""
    body = _ENCODER.encode(sample)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def refused(sample: AccessSample) -> str:
    """Why it is no sample, though it reads as one; "" when it is. Whoever may send one may send anything."""
    blocks, rest = divmod(len(sample.hashes), HASH_BYTES)
    if len(sample.namespace) != HASH_BYTES or rest or len(sample.hashes) > MAX_SAMPLE_BYTES // 2:
        return f"{len(sample.hashes)} bytes of hashes, {len(sample.namespace)} of a namespace's id"
    if not 0 <= sample.depth <= blocks or not 0 < sample.rate <= 1:
        return f"{sample.depth} of {blocks} blocks, a share of {sample.rate}"
    return ""


def read_samples(path: Path) -> Iterator[AccessSample]:
    """The samples of one file in the order in which they were heard, or of a folder's files by name. Raises OSError."""
    if path.is_dir():
        for file in sorted(path.glob(f"*{SUFFIX}")):
            yield from read_samples(file)
        return
    with open(path, "rb", opener=opener) as data:
        while len(head := data.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if not 0 < length <= MAX_SAMPLE_BYTES:  # zeros: a hole
                return
            body = data.read(length)
            if len(body) < length:
                return
            if zlib.crc32(body) != checksum:
                continue
            try:
                sample = _DECODER.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if not refused(sample):
                yield sample


def whole_bytes(path: Path) -> int:
    """Bytes of the file's whole records: where a writer that was cut off goes on. Raises OSError."""
    size, end = path.stat().st_size, 0
    with open(path, "rb", opener=opener) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length = _HEAD.unpack(head)[0]
            if not 0 < length <= MAX_SAMPLE_BYTES or end + _HEAD.size + length > size:
                break
            end += _HEAD.size + length
            file.seek(end)
    return end
