"""Long requests give what short ones give, and those that are too long are refused before they take memory."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from kvbm.catalog.limits import LARGE_BODY_BYTES, LimitError
from kvbm.catalog.long_requests import decode_request
from kvbm.core.answers import MAX_HASHES, MAX_TOKENS, LookupRequest, RouteRequest
from kvbm.core.errors import LayoutError

FIELDS = {"model": "m", "block_tokens": 16}


def body(long: bool = True, **fields: object) -> bytearray:
    text = json.dumps({"namespace": FIELDS} | fields)
    return bytearray(text.encode() + b" " * (LARGE_BODY_BYTES if long else 0))


@pytest.mark.parametrize(
    "fields",
    [
        {"hashes": "00" * 16 * 9000, "input_tokens": 5}, {"hashes": ["00" * 16] * 9000}, {"hashes": ""}, {"hashes": []}, {},
        {"hashes": None, "tokens": None}, {"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 9, "timeout_s": 2},
    ],
)  # fmt: skip
def test_a_long_request_is_read_as_a_short_one(fields: dict[str, object]) -> None:
    assert decode_request(body(**fields), RouteRequest) == msgspec.json.decode(body(**fields), type=RouteRequest)


@pytest.mark.parametrize("tokens", [[], [7], list(range(100_000)), [0, (1 << 32) - 1]])
@pytest.mark.parametrize("indent", [None, 1])
def test_tokens_become_an_array(tokens: list[int], indent: int | None) -> None:
    text = json.dumps({"namespace": FIELDS, "tokens": tokens}, indent=indent).encode()
    found = decode_request(bytearray(text + b" " * LARGE_BODY_BYTES), LookupRequest).tokens
    assert isinstance(found, np.ndarray)
    assert found.tolist() == tokens


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": [1, -1]}, LayoutError), ({"tokens": [1 << 32]}, LayoutError), ({"tokens": [1 << 70]}, OverflowError),
        ({"tokens": [[1, 2], [3]]}, msgspec.DecodeError), ({"tokens": [1.5]}, msgspec.ValidationError),
        ({"tokens": "1,2"}, msgspec.ValidationError), ({"tokens": {"1": 2}}, msgspec.ValidationError),
        ({"tokens": [1] * (MAX_TOKENS + 1)}, LimitError), ({"hashes": ["a"] * (MAX_HASHES + 1)}, LimitError),
        ({"hashes": [1]}, msgspec.ValidationError), ({"surprise": 1}, msgspec.ValidationError),
        ({"namespace": {"model": "m" * (1 << 20), "block_tokens": 1}}, LimitError), ({"namespace": 1}, msgspec.ValidationError),
        ({"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 10_000}, LimitError),
        ({"at_least": [{"instance": "a", "epoch": 1, "offset": 2}] * 300}, msgspec.ValidationError),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_request(body(**fields), LookupRequest)
