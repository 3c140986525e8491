"""Bytes and hashes fixed for both languages: what was once written is read for ever, and written the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbm import _native
from kvbm.core import checksum, codec, hashing, residency
from kvbm.core.ids import Tier

HERE = Path(__file__).parent
BOTH = pytest.mark.parametrize("language", ["python", "c++"])

FUNCTIONS: dict[str, dict[str, Any]] = {
    "python": {
        "sequence_hashes": hashing.sequence_hashes,
        "crc32c": checksum.crc32c,
        "residency_mix": residency.residency_mix,
        "encode_frame": codec.encode_frame,
        "decode_frame": codec.decode_frame,
    },
    "c++": {
        "sequence_hashes": _native.sequence_hashes,
        "crc32c": _native.crc32c,
        "residency_mix": _native.residency_mix,
        "encode_frame": _native.encode_frame,
        "decode_frame": _native.decode_frame,
    },
}


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def plain(value: object) -> object:
    """A frame as frame_v*.json shows it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__struct_fields__"):
        fields = {field: plain(getattr(value, field)) for field in value.__struct_fields__}
        return {"type": type(value).__name__} | fields
    return getattr(value, "name", value)


@BOTH
@pytest.mark.parametrize("case", cases("sequence_hashes.json"), ids=lambda case: case["name"])
def test_sequence_hashes_are_what_they_were(language: str, case: dict[str, Any]):
    keys = [bytes.fromhex(key) for key in case["extra_keys"]]
    root = bytes.fromhex(case["root"])
    hashes = FUNCTIONS[language]["sequence_hashes"](case["tokens"], case["block_tokens"], root, keys)
    assert hashes.hex() == case["hashes"]


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
@pytest.mark.parametrize("version", [1])
def test_a_frame_of_every_version_is_read_and_written_the_same(language: str, version: int):
    data = (HERE / f"frame_v{version}.bin").read_bytes()
    frame, end = FUNCTIONS[language]["decode_frame"](data)
    assert end == len(data)
    assert plain(frame) == json.loads((HERE / f"frame_v{version}.json").read_text(encoding="utf-8"))
    if version == codec.VERSION:
        assert FUNCTIONS[language]["encode_frame"](frame) == data


def test_the_golden_frame_has_every_kind_of_event():
    frame, _ = codec.decode_frame((HERE / f"frame_v{codec.VERSION}.bin").read_bytes())
    assert {type(event) for event in frame.events} == set(codec.Event.__args__)


def test_the_tool_that_wrote_these_files_would_write_them_again():
    tool = HERE.parent.parent / "tools" / "write_golden.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
