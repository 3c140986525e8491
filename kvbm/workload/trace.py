"""Requests of a recorded workload, read from a trace in Mooncake's JSONL format.

A line is one request: when it arrived, how many tokens came in and went out, and one hash id for each block of 512
input tokens. Ids are chained over prefixes: an equal id means equal tokens up to and including that block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from kvbm.core.errors import TraceError

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of the format covers."""

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_REMEDY = "each line needs timestamp, input_length, output_length, hash_ids"


class TraceRequest(NamedTuple):
    """One request of a workload.

    Attributes:
        timestamp_ms: arrival, in milliseconds since the trace began.
        input_tokens, output_tokens: lengths of the prompt and of the answer.
        hash_ids: one id for each started block of the prompt, in prompt order; the last may stand for a partial block.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def full_blocks(request: TraceRequest, block_tokens: int = TRACE_BLOCK_TOKENS) -> tuple[int, ...]:
    """The ids of the request's full blocks, in prompt order. A partial last block cannot be shared and has no identity.

    Args:
        request: one request of a trace.
        block_tokens: tokens that one of its ids covers, at least 1.
    Returns: input_tokens // block_tokens ids.
    """
    return request.hash_ids[: request.input_tokens // block_tokens]


def read_trace(path: str | os.PathLike[str]) -> Iterator[TraceRequest]:
    """The requests of a trace file, in file order, read as they are consumed. Blank lines are skipped.

    Arrivals may coincide but not go backwards: a replay feeds them in file order into virtual time, and sorting here
    would both hide a damaged file and need all of it in memory.

    Args:
        path: a JSONL file.
    Raises:
        TraceError: a line cannot be used; raised when that line is reached.
        OSError: the file cannot be read.
    Source: kvcache-ai/Mooncake, FAST25-release/traces.
    """
    name = os.fspath(path)
    latest_ms = 0
    with open(name, "rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                request = _parse(line)
            except _BrokenLineError as broken:
                raise TraceError(name, line_number, str(broken)) from None
            if request.timestamp_ms < latest_ms:
                why = f'"timestamp" is {request.timestamp_ms}, after {latest_ms} before it; sort the lines by timestamp'
                raise TraceError(name, line_number, why)
            latest_ms = request.timestamp_ms
            yield request


class _BrokenLineError(Exception):
    """Why a line cannot be used; read_trace adds where."""


def _parse(line: bytes) -> TraceRequest:
    """One request from one line. Raises _BrokenLineError."""
    try:
        fields: object = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number of thousands of digits
        raise _BrokenLineError(f"is not JSON ({error}); {_REMEDY}") from None
    if not isinstance(fields, dict):
        raise _BrokenLineError(f"is {_kind(fields)}, not an object; {_REMEDY}")
    for key in _KEYS:
        if key not in fields:
            raise _BrokenLineError(f'"{key}" is missing; {_REMEDY}')
    timestamp_ms, input_tokens, output_tokens = (_whole_number(key, fields[key]) for key in _KEYS[:3])
    hash_ids = _hash_ids(fields["hash_ids"])

    # full blocks <= ids <= started blocks: the format gives a partial last block an id, which a writer may leave out
    full = input_tokens // TRACE_BLOCK_TOKENS
    started = -(-input_tokens // TRACE_BLOCK_TOKENS)
    if not full <= len(hash_ids) <= started:
        wanted = str(full) if full == started else f"{full} or {started}"
        raise _BrokenLineError(
            f'"hash_ids" has {len(hash_ids)} ids where {input_tokens} input tokens need {wanted};'
            f" one id covers {TRACE_BLOCK_TOKENS} tokens"
        )
    return TraceRequest(timestamp_ms, input_tokens, output_tokens, hash_ids)


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _BrokenLineError(f'"hash_ids" is {_kind(value)}; it must be a list of whole numbers, 0 or more')
    return tuple(_whole_number(f"hash_ids[{index}]", item) for index, item in enumerate(value))


def _whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BrokenLineError(f'"{key}" is {_kind(value)}; it must be a whole number, 0 or more')
    if value < 0:
        raise _BrokenLineError(f'"{key}" is {value}; it must be 0 or more')
    return value


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
