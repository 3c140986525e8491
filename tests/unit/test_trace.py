"""Reading a workload trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.core.errors import KvbmError, TraceError
from kvbm.workload.trace import TRACE_BLOCK_TOKENS, TraceRequest, full_blocks, read_trace

GOOD = {"timestamp": 0, "input_length": 1_100, "output_length": 7, "hash_ids": [0, 1, 2]}


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def line(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def test_a_line_becomes_a_request_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "", line(), "   ", line(timestamp=3_000, hash_ids=[0, 1]), "")
    assert list(read_trace(path)) == [
        TraceRequest(timestamp_ms=0, input_tokens=1_100, output_tokens=7, hash_ids=(0, 1, 2)),
        TraceRequest(timestamp_ms=3_000, input_tokens=1_100, output_tokens=7, hash_ids=(0, 1)),
    ]


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert list(read_trace(write(tmp_path, ""))) == []


def test_only_full_blocks_have_identity() -> None:
    request = TraceRequest(0, 2 * TRACE_BLOCK_TOKENS + 1, 1, (5, 6, 7))
    assert full_blocks(request) == (5, 6)
    assert full_blocks(request._replace(input_tokens=3 * TRACE_BLOCK_TOKENS)) == (5, 6, 7)
    assert full_blocks(request._replace(input_tokens=511)) == ()
    assert full_blocks(TraceRequest(0, 9, 1, (1, 2, 3)), block_tokens=4) == (1, 2)


def test_requests_may_arrive_at_the_same_time(tmp_path: Path) -> None:
    assert len(list(read_trace(write(tmp_path, line(timestamp=5), line(timestamp=5))))) == 2


@pytest.mark.parametrize("key", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_key_is_named_with_its_line_and_the_remedy(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, line(), "", json.dumps({name: value for name, value in GOOD.items() if name != key}))
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    remedy = "each line needs timestamp, input_length, output_length, hash_ids"
    assert str(caught.value) == f'{path} line 3: "{key}" is missing; {remedy}'
    assert (caught.value.path, caught.value.line_number) == (str(path), 3)
    assert isinstance(caught.value, KvbmError)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ('{"timestamp": 0,', "is not JSON"),
        (b'{"timestamp": "\xff\xfe"}', "is not JSON"),
        ('{"timestamp": ' + "9" * 5_000 + "}", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[1, 2]", "is a list, not an object"),
        ("17", "is the number 17, not an object"),
        (line(timestamp="0"), '"timestamp" is a string; it must be a whole number, 0 or more'),
        (line(timestamp=1.5), '"timestamp" is the number 1.5; it must be a whole number'),
        (line(output_length=True), '"output_length" is true; it must be a whole number'),
        (line(output_length=None), '"output_length" is null; it must be a whole number'),
        (line(input_length=-1), '"input_length" is -1; it must be 0 or more'),
        (line(timestamp=-1), '"timestamp" is -1; it must be 0 or more'),
        (line(hash_ids={}), '"hash_ids" is an object; it must be a list'),
        (line(hash_ids=[0, "1", 2]), '"hash_ids[1]" is a string; it must be a whole number'),
        (line(hash_ids=[0, 1, -2]), '"hash_ids[2]" is -2; it must be 0 or more'),
        (line(hash_ids=[0]), '"hash_ids" has 1 ids where 1100 input tokens need 2 or 3; one id covers 512 tokens'),
        (line(hash_ids=[0, 1, 2, 3]), '"hash_ids" has 4 ids where 1100 input tokens need 2 or 3'),
        (line(input_length=1_024), '"hash_ids" has 3 ids where 1024 input tokens need 2;'),
    ],
)
def test_a_broken_line_is_refused_in_words(tmp_path: Path, broken: str | bytes, why: str) -> None:
    path = write(tmp_path, line(), broken)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert why in str(caught.value)


def test_arrivals_that_go_backwards_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, line(timestamp=3_000), line(timestamp=2_999))
    with pytest.raises(TraceError, match='line 2: "timestamp" is 2999, after 3000 before it; sort the lines'):
        list(read_trace(path))


def test_lines_before_a_broken_one_are_given(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, line(), "broken"))
    assert next(requests).input_tokens == 1_100
    with pytest.raises(TraceError):
        next(requests)


def test_a_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "nowhere.jsonl"))
