"""A UsageRecorded as bytes of a frame; `codec` draws them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from kvbm.core.errors import LayoutError, MalformedFrameError
from kvbm.core.events import MAX_USAGE_ROWS, UsageRecorded, UsageRow
from kvbm.core.ids import MAX_NAME_BYTES

_HEAD = struct.Struct("<BHQQ4Q")  # behind the kind
_NUMBERS = struct.Struct("<15Q")
_LAST = 1  # a flag


class UsageFields(Protocol):
    """What reading one takes of a frame's reader."""

    def take(self, count: int) -> bytes: ...
    def unpack(self, layout: struct.Struct) -> tuple[int, ...]: ...
    def malformed(self, why: str) -> MalformedFrameError: ...


def encode_usage(event: UsageRecorded) -> bytes:
    """What follows its kind; the native codec takes it from here. Raises LayoutError."""
    try:
        tenants = [row.tenant.encode() for row in event.rows]
    except UnicodeEncodeError as error:
        raise LayoutError(f"UsageRecorded does not encode: a tenant's name has no UTF-8: {error}") from None
    why = ""
    if len(event.rows) > MAX_USAGE_ROWS:
        why = f"{len(event.rows)} rows; at most {MAX_USAGE_ROWS} fit"
    elif any(len(name) > MAX_NAME_BYTES or b"\0" in name for name in tenants):
        why = f"a tenant's name has NUL, or more than {MAX_NAME_BYTES} bytes"
    elif any(one >= other for one, other in pairwise(tenants)):
        why = "its tenants are not in order"
    elif event.until_ms < event.since_ms:
        why = "it ends before it begins"
    if why:
        raise LayoutError(f"UsageRecorded does not encode: {why}")
    flags = _LAST if event.is_last else 0
    try:
        head = _HEAD.pack(flags, len(event.rows), event.since_ms, event.until_ms, *event.block_bytes)
        return head + b"".join(
            bytes([len(name)]) + name + _NUMBERS.pack(*_usage_numbers(row))
            for name, row in zip(tenants, event.rows, strict=True)
        )
    except struct.error as error:
        raise LayoutError(f"UsageRecorded does not encode: {error}") from None


def _usage_numbers(row: UsageRow) -> tuple[int, ...]:
    rest = (row.saved_tokens, row.unrated_tokens, row.saved_us)
    return (*row.block_ms, *row.put_blocks, *row.read_blocks, *rest)


def take_usage(reader: UsageFields) -> UsageRecorded:
    """The event that a reader stands at. Raises MalformedFrameError."""
    reader.take(1)  # the kind
    flags, count, since_ms, until_ms, *block_bytes = reader.unpack(_HEAD)
    if flags & ~_LAST:
        raise reader.malformed(f"unknown flags {flags:#x}")
    if until_ms < since_ms:
        raise reader.malformed("a usage ends before it begins")
    if count > MAX_USAGE_ROWS:
        raise reader.malformed(f"a usage of {count} rows; at most {MAX_USAGE_ROWS} fit")
    rows: list[UsageRow] = []
    before = b""
    for number in range(count):
        name = reader.take(reader.take(1)[0])
        numbers = reader.unpack(_NUMBERS)
        try:
            tenant = name.decode()
        except UnicodeDecodeError:
            tenant = "\0"
        if "\0" in tenant:
            raise reader.malformed("a tenant's name in a usage is not UTF-8 without NUL")
        if number and name <= before:
            raise reader.malformed("the tenants of a usage are not in order")
        rows.append(UsageRow(tenant, _four(numbers, 0), _four(numbers, 4), _four(numbers, 8), *numbers[12:]))
        before = name
    return UsageRecorded(
        since_ms=since_ms,
        until_ms=until_ms,
        block_bytes=_four(block_bytes, 0),
        rows=tuple(rows),
        is_last=bool(flags & _LAST),
    )


def _four(numbers: Sequence[int], at: int) -> tuple[int, int, int, int]:
    one, two, three, four = numbers[at : at + 4]
    return one, two, three, four
