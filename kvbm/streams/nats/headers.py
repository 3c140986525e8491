"""Headers of messages: what a publish names and expects, and what a reader finds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvbm.core.ids import Epoch, Offset
from kvbm.streams.base import Fence, Position
from kvbm.streams.nats.messages import fence_words

FENCE_HEADER = "Kvbm-Fence"  # <sequence>:<epoch>:<run> of the fence that a message of events names
ACKED_HEADER = "Kvbm-Safe"  # <epoch>:<offset>, see `Tail.acked`

HEADERS_BEGIN = b"NATS/1.0\r\n"  # of headers without a status
_STATUS_BEGIN = b"NATS/1.0 "
_MOST_FENCE_WORDS = 200


class MessageHeaders(dict[str, str]):
    """Headers of a message, taken apart when first looked at: readers of events never do.

    `Status` is never among them.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw
        self._is_apart = False

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        self._take_apart()
        return super().__contains__(name)

    def __missing__(self, name: str) -> str:
        if name not in self:  # which takes them apart
            raise KeyError(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._take_apart()
        return super().get(name, default)

    def items(self) -> Any:
        self._take_apart()
        return super().items()

    def _take_apart(self) -> None:
        if self._is_apart:
            return
        self._is_apart = True
        for line in self.raw.decode(errors="replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon:
                self[name] = value.strip()


def expecting(sequence: int, subject: str) -> dict[str, str]:
    """Headers that have the server refuse a message when the last one of `subject` is not at `sequence`."""
    return {
        "Nats-Expected-Last-Subject-Sequence": str(sequence),
        "Nats-Expected-Last-Subject-Sequence-Subject": subject,
    }


def status_in(headers: bytes) -> dict[str, str] | None:
    """What headers with a status say, as `Status`, `Description` and the rest by name; None: they have none."""
    if not headers.startswith(_STATUS_BEGIN):
        return None
    first, *lines = headers[len(_STATUS_BEGIN) :].decode(errors="replace").split("\r\n")
    status, _, words = first.strip().partition(" ")
    found = {"Status": status, "Description": words.strip()}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name] = value.strip()
    return found


def fence_in(headers: bytes) -> Fence | None:
    """The fence that headers as they came name; those of one fence are one object."""
    words = fence_words(headers)
    return None if words is None else fence_named(words)


@lru_cache(1024)
def fence_named(words: bytes) -> Fence | None:
    """The fence that the value of a header names; None: it is another program's."""
    sequence, _, rest = words.partition(b":")
    epoch, _, run = rest.partition(b":")
    if not (sequence.isdigit() and epoch.isdigit() and run and len(words) <= _MOST_FENCE_WORDS):
        return None
    named = Fence(Epoch(int(epoch)), run.decode(errors="replace"), int(sequence))
    return (
        named if max(named.epoch, named.sequence) < 1 << 63 else None
    )  # no server gives such numbers, no file holds them


def position_in(words: str | None) -> Position | None:
    epoch, _, offset = (words or "").partition(":")
    return Position(Epoch(int(epoch)), Offset(int(offset))) if epoch.isdecimal() and offset.isdecimal() else None
