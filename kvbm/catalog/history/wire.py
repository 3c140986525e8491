"""What a catalog and the processes beside it send each other through a socket: parts with their kind and length.

    u32 length of what follows, little-endian · u8 kind · the part

A question is one ASK and maybe a CANCEL. Its answer is one HEAD, BODY after BODY, and an END; or one REFUSAL. What is
sent after a cancelled question ends in END or REFUSAL, too. A keeper sends REPORTs.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

ASK, CANCEL, HEAD, BODY, END, REFUSAL, REPORT = range(7)
MOST_BYTES = 8 << 20  # of a part
PREFIX = struct.Struct("<IB")


class HistoryAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A question.

    Attributes:
        kind: a method of `replay.history_answers.HistoryAnswers`, or "sql". arguments: its.
        within_s: for all of it, sending included.
    """

    kind: str
    arguments: dict[str, Any] = {}
    within_s: float = 10.0


class HistoryHead(msgspec.Struct, frozen=True, kw_only=True):
    """An answer begins."""

    content_type: str = "application/json"
    headers: dict[str, str] = {}


class HistoryRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """There is no answer. Fields as in the error that callers are sent."""

    status: int
    code: str
    message: str
    what_to_do: str


class KeeperReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper says of each look at the archive.

    Attributes:
        read_s: Unix time at which it had read all there was; 0: it has not yet. trouble: why it cannot; "" when all is
            well.
    """

    read_s: float = 0.0
    trouble: str = ""


def packed(kind: int, part: bytes) -> bytes:
    """A part as it is sent."""
    return PREFIX.pack(len(part) + 1, kind) + part
