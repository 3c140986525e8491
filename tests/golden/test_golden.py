"""Bytes and hashes fixed for both languages: what was once written is read for ever, and written the same."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm import _native
from kvbm.core import checksum, codec, hashing
from kvbm.core import fold as residency
from kvbm.core.ids import Epoch, Namespace, Tier, split_hashes
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.object.coding import Coding
from kvbm.pools.stores.base import Put
from kvbm.pools.stores.memory import MemoryStore
from kvbm.reference.block_coding import decode_block, encode_block
from tests.coded_blocks import golden_cases
from tests.object_pools import memory_objects

HERE = Path(__file__).parent
BOTH = pytest.mark.parametrize("language", ["python", "c++"])

FUNCTIONS: dict[str, dict[str, Any]] = {
    "python": {
        "sequence_hashes": hashing.sequence_hashes,
        "derived_hashes": hashing.derived_hashes,
        "crc32c": checksum.crc32c,
        "residency_mix": residency.residency_mix,
        "encode_frame": codec.encode_frame,
        "decode_frame": codec.decode_frame,
    },
    "c++": {
        "sequence_hashes": _native.sequence_hashes,
        "derived_hashes": _native.derived_hashes,
        "crc32c": _native.crc32c,
        "residency_mix": _native.residency_mix,
        "encode_frame": _native.encode_frame,
        "decode_frame": _native.decode_frame,
    },
}


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def vectors(kind: str) -> Any:
    """Of docs/hash.md, those in the package."""
    found = json.loads(files("kvbm").joinpath("hash_vectors.json").read_text(encoding="utf-8"))
    return pytest.mark.parametrize("case", found[kind], ids=lambda case: case["name"])


def plain(value: object) -> object:
    """A frame as frame_v*.json shows it."""
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


@BOTH
@vectors("prompts")
def test_sequence_hashes_are_what_they_were(language: str, case: dict[str, Any]):
    keys = [bytes.fromhex(key) for key in case["extra_keys"]]
    root = bytes.fromhex(case["root"])
    hashes = FUNCTIONS[language]["sequence_hashes"](case["tokens"], case["block_tokens"], root, keys)
    assert hashes.hex() == "".join(case["hashes"])


@BOTH
@vectors("derived")
def test_derived_hashes_are_what_they_were(language: str, case: dict[str, Any]):
    digests = [bytes.fromhex(digest) for digest in case["digests"]]
    hashes = FUNCTIONS[language]["derived_hashes"](bytes.fromhex(case["root"]), digests)
    assert hashes.hex() == "".join(case["hashes"])


@BOTH
@pytest.mark.parametrize("case", cases("checksums.json"), ids=lambda case: case["name"])
def test_checksums_are_those_of_the_rfc(language: str, case: dict[str, Any]):
    assert f"{FUNCTIONS[language]['crc32c'](bytes.fromhex(case['data'])):08x}" == case["crc32c"]


@BOTH
def test_residencies_mix_to_the_same_bits(language: str):
    for case in cases("digests.json"):
        mix = FUNCTIONS[language]["residency_mix"](Tier[case["tier"]], bytes.fromhex(case["hash"]))
        assert f"{mix:016x}" == case["mix"]


@BOTH
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_frame_of_every_version_is_read_and_written_the_same(language: str, version: int):
    data = (HERE / f"frame_v{version}.bin").read_bytes()
    frame, end = FUNCTIONS[language]["decode_frame"](data)
    assert end == len(data)
    assert plain(frame) == json.loads((HERE / f"frame_v{version}.json").read_text(encoding="utf-8"))
    assert data[4:6] == version.to_bytes(2, "little")
    assert FUNCTIONS[language]["encode_frame"](frame) == data  # the lowest version that suffices


@vectors("namespaces")
def test_ids_and_roots_of_namespaces_are_what_they_were(case: dict[str, Any]):
    made = Namespace(**case["fields"])
    secret = bytes.fromhex(case["secret"])
    assert set(case["fields"]) == set(Namespace.__struct_fields__)
    assert (made.canonical().decode(), made.id.hex()) == (case["canonical"], case["id"])
    assert made.root(secret).hex() == case["root"]


@vectors("seeds")
def test_seeds_that_no_double_holds_are_hashed_as_they_are(case: dict[str, Any]):
    made = Namespace(**case["fields"] | {"scheme_seed": int(case["fields"]["scheme_seed"])})
    assert abs(made.scheme_seed) > 2**53
    assert (made.canonical().decode(), made.id.hex()) == (case["canonical"], case["id"])
    assert made.root(bytes.fromhex(case["secret"])).hex() == case["root"]


def test_the_golden_frame_has_every_kind_of_event():
    frame, _ = codec.decode_frame((HERE / f"frame_v{codec.VERSION}.bin").read_bytes())
    assert {type(event) for event in frame.events} == set(codec.Event.__args__)


def coded_blocks() -> list[tuple[int, int, int, bytes]]:
    """Coding asked for and got, CRC-32C of the block, its coded bytes."""
    data, at, found = (HERE / "coded_blocks_v1.bin").read_bytes(), 0, []
    while at < len(data):
        asked, got, _, coded_bytes, crc = struct.unpack_from("<BBIII", data, at)
        at += struct.calcsize("<BBIII") + coded_bytes
        found.append((asked, got, crc, data[at - coded_bytes : at]))
    return found


@pytest.mark.parametrize("number", range(len(golden_cases())), ids=[case.name for case in golden_cases()])
@BOTH
def test_coded_blocks_are_read_and_written_the_same(language: str, number: int):
    asked, got, crc, coded = coded_blocks()[number]
    block = golden_cases()[number].block
    assert checksum.crc32c(block.tobytes()) == crc
    if language == "python":
        assert encode_block(block, Coding(asked)) == (coded, got)
        assert decode_block(coded, Coding(got), len(block)) == block.tobytes()
        return
    one = np.zeros(1, dtype=np.int64)
    encoded = _native.encode_blocks(block[None], one, asked)
    assert (encoded.body.tobytes(), encoded.codings.tolist()) == (coded, [got])
    rows = np.zeros_like(block[None])
    good, sums = _native.decode_blocks(encoded.body, encoded.lengths, encoded.codings, rows, one)
    assert (good.tolist(), sums.tolist()) == ([True], [crc]) and np.array_equal(rows[0], block)


def test_the_tool_that_wrote_these_files_would_write_them_again():
    tool = HERE.parent.parent / "tools" / "write_golden.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_object_is_read_as_it_was_written_and_written_the_same():
    """Version 2: four raw blocks of 24 bytes. Offsets as object_header.py has them."""
    golden = (HERE / "object_v2.bin").read_bytes()
    namespace = Namespace(
        model="golden/model", block_tokens=4, revision="r1", kv_dtype="bfloat16", layout="LHTD", tenant=""
    )
    hashes = hashing.sequence_hashes(range(16), 4, namespace.root(b"secret"))
    assert golden[:8] == b"KVBO\x02\x00\x04\x00"
    assert golden[8:24] == namespace.id
    assert golden[24:40] == hashes[48:]
    assert golden[40:64] == struct.pack("<QIIQ", 7, 24, 68 + 4 * 28, 96)
    assert [golden[64 + 28 * at : 80 + 28 * at] for at in range(4)] == split_hashes(hashes)
    assert golden[176:180] == struct.pack("<I", checksum.crc32c(golden[:176]))
    rows = np.frombuffer(golden, dtype=np.uint8)[180:].reshape(4, 24)
    assert (rows.ravel() == np.arange(96) ** 2 % 251).all()
    read = np.zeros_like(rows)
    store = MemoryStore()
    pool = memory_objects(24, blocks=4, store=store)
    [name] = pool.names(namespace.id, [hashes[48:]])
    assert name == f"4/{namespace.id.hex()}/{hashes[48:].hex()}"
    store.put([Put(name, golden)], 1.0)
    result = pool.get(namespace.id, hashes, read)
    assert result.outcomes == [ReadOutcome.GOOD] * 4
    assert (read == rows).all()
    store.delete([name], 1.0)
    assert pool.put(rows, Proof(namespace.id, Epoch(7), hashes, result.checksums)) == [True] * 4
    assert store.objects[name][0] == golden
