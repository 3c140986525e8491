"""Write the golden files of tests/golden, and kvbm/hash_vectors.json: bytes and hashes fixed for all languages.

Run by hand, and only when a format gains a version: a golden file that has been released is never rewritten.

    python tools/write_golden.py [--rewrite]
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm.core.backend import reference_checksums
from kvbm.core.checksum import crc32c
from kvbm.core.codec import VERSION, Frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
    UsageRow,
)
from kvbm.core.fold import residency_mix
from kvbm.core.hashing import derived_hashes, sequence_hashes
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Reach, SequenceHash, Tier, pack_slots, split_hashes
from kvbm.pools.base import Proof
from kvbm.pools.object.header import OBJECT_VERSION, encode_object_headers
from kvbm.reference.block_coding import encode_block
from tests.coded_blocks import golden_cases

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
VECTORS = Path(str(files("kvbm").joinpath("hash_vectors.json")))


def namespace(tenant: str = "") -> Namespace:
    """The namespace of the golden files, for one tenant."""
    return Namespace(
        model="golden/model", block_tokens=4, revision="r1", kv_dtype="bfloat16", layout="LHTD", tenant=tenant
    )


ATTRIBUTES = {"pool.endpoint": b"tcp://10.0.0.7:9000", "é": b"\x00\xff", "of nothing": b""}


def hash_cases() -> list[dict[str, object]]:
    """Token sequences and their hashes."""
    root = namespace().root(b"secret")
    keys = [b"", b"image", bytes(100)]
    return [
        {
            "name": name,
            "root": root.hex(),
            "block_tokens": block_tokens,
            "tokens": tokens,
            "extra_keys": [key.hex() for key in extra],
            "hashes": [block.hex() for block in split_hashes(sequence_hashes(tokens, block_tokens, root, extra))],
        }
        for name, tokens, block_tokens, extra in (
            ("empty", [], 4, []),
            ("a partial block has no hash", [1, 2, 3], 4, []),
            ("one full block", [1, 2, 3, 4], 4, []),
            ("three blocks and a rest", list(range(14)), 4, []),
            ("one token a block, the least and the largest ids", [0, 1, 2**31, 2**32 - 1], 1, []),
            ("sixteen tokens a block", [(7 * index) ** 3 % 128_000 for index in range(64)], 16, []),
            ("extra keys, the first one empty", list(range(12)), 4, keys),
            ("an extra key amid plain blocks, and a rest", list(range(15)), 4, [b"", b"image", b""]),
        )
    ]


def derived_cases() -> list[dict[str, object]]:
    """Another engine's block hashes, and what they are in kvbm."""
    root = namespace().root(b"secret")
    digests = [bytes(range(32)), b"\xff" * 32, b"a digest of any length"]
    hashes = split_hashes(derived_hashes(root, digests))
    return [
        {
            "name": "three of an engine",
            "root": root.hex(),
            "digests": [digest.hex() for digest in digests],
            "hashes": [block.hex() for block in hashes],
        }
    ]


def checksum_cases() -> list[dict[str, object]]:
    """Buffers and their CRC-32C; those of RFC 3720 appendix B.4 first, with the values printed there."""
    scsi_read = bytes.fromhex(
        "01c00000000000000000000000000000140000000000040000000014000000182800000000000000" + "0200000000000000"
    )
    printed = [
        ("RFC 3720: 32 bytes of zeroes", bytes(32), 0x8A9136AA),
        ("RFC 3720: 32 bytes of ones", b"\xff" * 32, 0x62A8AB43),
        ("RFC 3720: 32 bytes of incrementing 00..1f", bytes(range(32)), 0x46DD794E),
        ("RFC 3720: 32 bytes of decrementing 1f..00", bytes(range(31, -1, -1)), 0x113FDB5C),
        ("RFC 3720: an iSCSI SCSI Read (10) command PDU", scsi_read, 0xD9963A56),
        ("the check value", b"123456789", 0xE3069283),
    ]
    for name, data, value in printed:
        if crc32c(data) != value:
            sys.exit(f"{name}: {crc32c(data):08x} computed, {value:08x} printed")
    own = [("empty", b""), ("three long lanes", bytes(index * index % 251 for index in range(12_299)))]
    cases = [(name, data, value) for name, data, value in printed] + [(name, data, crc32c(data)) for name, data in own]
    return [{"name": name, "data": data.hex(), "crc32c": f"{value:08x}"} for name, data, value in cases]


def namespace_cases() -> list[dict[str, object]]:
    """Namespaces by all of their fields, with their canonical forms, ids, and roots under a secret."""
    given: list[tuple[str, dict[str, Any], bytes]] = [
        (
            "nothing but a model and a block size, all else as by default; no secret",
            {"model": "m", "block_tokens": 16},
            b"",
        ),
        (
            "every field",
            {
                "model": "org/model",
                "block_tokens": 32,
                "revision": "0f3c",
                "kv_dtype": "bfloat16",
                "layout": "paged",
                "kv_group": 2,
                "ranks": "tp2",
                "lora": "a",
                "tenant": "acme",
                "scheme": "vllm-sha256",
                "scheme_seed": -7,
            },
            b"secret",
        ),
        (
            "a quote, a backslash, a slash, and what HTML would escape",
            {"model": "a\"b\\c/d<e>f&g'h", "block_tokens": 1, "tenant": "é"},
            "schlüssel".encode(),
        ),
        (
            "control characters",
            {"model": "\b\f\n\r\t\x00\x01\x0b\x1f\x7f", "block_tokens": 1},
            b"\x00",
        ),
        (
            "characters beyond ASCII: U+00E9, U+2028, U+2029, U+FFFF, U+1F600",
            {"model": "\u00e9\u2028\u2029\uffff\U0001f600", "block_tokens": 1},
            b"",
        ),
        ("a secret longer than a block of SHA-256", {"model": "m", "block_tokens": 16}, bytes(range(100))),
        (
            "the largest whole number that is safe in a double",
            {"model": "m", "block_tokens": 16, "scheme_seed": 2**53 - 1},
            b"",
        ),
    ]
    return [namespace_case(*one) for one in given]


def seed_cases() -> list[dict[str, object]]:
    """Namespaces whose seed no double holds: it is a text in the file."""
    seeds = {
        "the first whole number that no double holds": 2**53 + 1,
        "the same below zero": -(2**53) - 1,
        "the largest of 64 bits": 2**64 - 1,
        "the least of 64 bits": -(2**63),
    }
    found = [
        namespace_case(name, {"model": "m", "block_tokens": 16, "scheme_seed": seed}, b"secret")
        for name, seed in seeds.items()
    ]
    for one in found:
        one["fields"] = {
            name: str(value) if name == "scheme_seed" else value for name, value in dict(one["fields"]).items()
        }
    return found


def namespace_case(name: str, fields: dict[str, Any], secret: bytes) -> dict[str, Any]:
    """One namespace with what is made of it."""
    return {
        "name": name,
        "fields": {field: getattr(Namespace(**fields), field) for field in Namespace.__struct_fields__},
        "canonical": Namespace(**fields).canonical().decode(),
        "id": Namespace(**fields).id.hex(),
        "secret": secret.hex(),
        "root": Namespace(**fields).root(secret).hex(),
    }


def vectors() -> bytes:
    """kvbm/hash_vectors.json: one line a case."""
    told = {"namespaces": namespace_cases(), "seeds": seed_cases(), "prompts": hash_cases(), "derived": derived_cases()}
    parts = []
    for name, cases in told.items():
        lines = ",\n".join(f"  {json.dumps(case)}" for case in cases)
        parts.append(f' "{name}": [\n{lines}\n ]')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def digest_cases() -> list[dict[str, object]]:
    """Residencies and their 64 bits."""
    blocks = [bytes(16), bytes(range(16)), b"\xff" * 16, sequence_hashes(range(4), 4, namespace().root())]
    return [
        {"tier": tier.name, "hash": block.hex(), "mix": f"{residency_mix(tier, block):016x}"}
        for tier in Tier
        for block in blocks
    ]


USAGE = UsageRecorded(
    since_ms=1_790_000_000_123,
    until_ms=1_790_002_800_000,
    block_bytes=(4096, 0, 4096, 4096),
    rows=(
        UsageRow("", (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), 13, 14, 15),
        UsageRow('äcme, "ltd"\n', (2**64 - 1, 0, 0, 0)),
    ),
    is_last=True,
)


def frame(attributes: dict[str, bytes] | None = None, usage: UsageRecorded | None = None) -> Frame:
    """One frame with every kind of event and every optional field there and not there.

    Args:
        attributes: of its InstanceStarted; with any it is of version 2. usage: with it, of version 3.
    """
    spaces = (namespace(), namespace("acme"))
    first, second = (space.id for space in spaces)
    run = sequence_hashes(range(16), 4, spaces[0].root(b"secret"))
    pools = (
        PoolStated(Tier.HBM, 8, 4096),
        PoolStated(Tier.NVME, 64, 4096, Reach.POD),
        PoolStated(Tier.OBJECT, 0, 4096, Reach.CLUSTER, "s3://bucket/kv"),
    )
    events = (
        InstanceStarted(
            epoch=Epoch(7),
            pools=pools,
            namespaces=spaces,
            topology=("zone-a", "rack-3", "host-17"),
            engine="golden",
            version="0.1.0",
            attributes=attributes or {},
        ),
        BlocksCreated(namespace=first, tier=Tier.HBM, hashes=run[:32], slots=pack_slots([5, 2**32 - 1])),
        BlocksCreated(namespace=first, tier=Tier.HBM, hashes=run[32:], parent=SequenceHash(run[16:32]), start=2),
        BlocksMigrated(
            namespace=first,
            source=Tier.HBM,
            target=Tier.NVME,
            kept=True,
            cause=MigrateCause.OFFLOAD,
            hashes=run[:32],
            slots=pack_slots([0, 1]),
        ),
        BlocksMigrated(
            namespace=first, source=Tier.NVME, target=Tier.HOST, kept=False, cause=MigrateCause.ONBOARD, hashes=run[:16]
        ),
        BlocksMigrated(
            namespace=second,
            source=InstanceId("wörker-2"),
            target=Tier.HOST,
            kept=True,
            cause=MigrateCause.FETCH,
            hashes=run[48:],
            slots=pack_slots([9]),
        ),
        BlocksEvicted(namespace=first, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=run[32:]),
        BlocksEvicted(namespace=second, tier=Tier.OBJECT, reason=EvictReason.SHUTDOWN, hashes=run[48:]),
        ResidenciesListed(namespace=first, tier=Tier.HBM, snapshot=3, hashes=run[:32], slots=pack_slots([5, 6])),
        ResidenciesListed(namespace=second, tier=Tier.HOST, snapshot=2**32 - 1, hashes=run[48:]),
        SnapshotEnded(tier=Tier.HBM, snapshot=3, count=2),
        *([] if usage is None else [usage]),
        InstanceStopped(reason=StopReason.OVERFLOW),
    )
    return Frame(
        instance=InstanceId("wörker-1"),
        epoch=Epoch(7),
        first_offset=Offset(0),
        wall_time_ns=1_790_000_000_123_456_789,
        digest=0xFEDCBA9876543210,
        events=events,
    )


def object_bytes() -> bytes:
    """An object of four raw blocks of 24 bytes."""
    rows = (np.arange(96, dtype=np.uint16) ** 2 % 251).astype(np.uint8).reshape(4, 24)
    run = sequence_hashes(range(16), 4, namespace().root(b"secret"))
    proof = Proof(namespace().id, Epoch(7), run, reference_checksums(rows))
    lengths, codings = np.full(4, 24, dtype=np.uint32), np.zeros(4, dtype=np.uint32)
    return encode_object_headers(proof, lengths, codings, 4, 24, reference_checksums).tobytes() + rows.tobytes()


def coded_blocks() -> bytes:
    """Each block of `golden_cases`: coding asked for and got (u8), bytes, coded bytes and CRC-32C of the block (u32),
    the coded bytes.
    """
    parts = []
    for case in golden_cases():
        coded, coding = encode_block(case.block, case.coding)
        sizes = struct.pack("<BBIII", case.coding, coding, len(case.block), len(coded), crc32c(case.block.tobytes()))
        parts += [sizes, coded]
    return b"".join(parts)


def plain(value: object) -> object:
    """A frame as plain values that JSON can show, so that a person can review it: bytes in hex, members by name."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__struct_fields__"):
        known = {field: getattr(value, field) for field in value.__struct_fields__}
        fields = {field: plain(known[field]) for field in known if field != "attributes" or known[field]}
        return {"type": type(value).__name__} | fields
    return getattr(value, "name", value)


def golden_files() -> dict[str | Path, bytes]:
    """Every golden file's contents, by its name in GOLDEN; by its path where it lies elsewhere."""

    def text(value: object) -> bytes:
        return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()

    return {
        VECTORS: vectors(),
        "checksums.json": text(checksum_cases()),
        "digests.json": text(digest_cases()),
        "coded_blocks_v1.bin": coded_blocks(),
        "frame_v1.bin": encode_frame(frame()),
        "frame_v1.json": text(plain(frame())),
        "frame_v2.bin": encode_frame(frame(ATTRIBUTES)),
        "frame_v2.json": text(plain(frame(ATTRIBUTES))),
        f"frame_v{VERSION}.bin": encode_frame(frame(ATTRIBUTES, USAGE)),
        f"frame_v{VERSION}.json": text(plain(frame(ATTRIBUTES, USAGE))),
        f"object_v{OBJECT_VERSION}.bin": object_bytes(),
    }


def main() -> None:
    """Write the files that are not there yet; with --rewrite also those that differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rewrite", action="store_true", help="also rewrite files that differ: a break of the format")
    rewrite = parser.parse_args().rewrite
    refused: list[str] = []
    for name, contents in golden_files().items():
        path = GOLDEN / name
        if path.exists() and path.read_bytes() == contents:
            continue
        if path.exists() and not rewrite:
            refused.append(path.name)
            continue
        path.write_bytes(contents)
        print(f"wrote {path}, {len(contents)} bytes")
    if refused:
        sys.exit(
            f"{', '.join(refused)} would change; a format that changes needs a new version, or --rewrite before release"
        )


if __name__ == "__main__":
    main()
