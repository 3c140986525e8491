"""The protocol of NATS as a client reads it: bytes as they came, cut anywhere, become messages and lines. No I/O.

What JetStream gives a reader is most of what comes. Messages of watched subscriptions that name their place in the
stream are joined to runs, so that a reader takes many at a time. `ReadableMessages` says what the native implementation
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

LINE_END = b"\r\n"
_MESSAGE, _HEADED, _INFO = b"MSG ", b"HMSG ", b"INFO"
_ACK = b"$JS.ACK."
_FENCE_LINE = b"Kvbm-Fence: "  # as in `headers.FENCE_HEADER`
MOST_CONTROL_LINE = 4096  # bytes of a line that is no message's, as nats.protocol.parser has it
MOST_MESSAGE_BYTES = 128 << 20  # no server takes more than 64 MiB
_MOST_DIGITS = 18  # of a number in a line

# What is given: a line with its end as it came; a message, as subscription, subject, reply, headers and payload; or a
# run of messages of a watched subscription, as subscription, the consumer's count of the first, how many it had left
# after the last, and the messages.
Message = tuple[int, bytes, bytes, bytes, bytes]
# Sequence in the stream, subject, payload, when it was stored in nanoseconds since 1970, and the value of the header
# Kvbm-Fence.
Delivered = tuple[int, str, bytes, int, bytes | None]
Run = tuple[int, int, int, list[Delivered]]
Item = bytes | Message | Run


class NatsMessages(Protocol):
    """Takes apart what a server sends on one connection."""

    def watch(self, subscription: int) -> None:
        """Join messages of this subscription to runs."""

    def forget(self, subscription: int) -> None:
        """Do so no longer. Idempotent."""

    def reset(self) -> None:
        """Forget what is there of a message."""

    def take(self, data: bytes) -> tuple[list[Item], bool]:
        """What is whole now, in order, and whether what follows is nothing that a server sends."""


NewMessages = Callable[[], NatsMessages]


class ReadableMessages:
    """See `NatsMessages`."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._rest = b""
        self._needed = 0  # bytes of it before it is worth a look; 0: not known

    def watch(self, subscription: int) -> None:
        """See `NatsMessages.watch`."""
        self._watched.add(subscription)

    def forget(self, subscription: int) -> None:
        """See `NatsMessages.forget`."""
        self._watched.discard(subscription)

    def reset(self) -> None:
        """See `NatsMessages.reset`."""
        self._rest, self._needed = b"", 0

    def take(self, data: bytes) -> tuple[list[Item], bool]:
        """See `NatsMessages.take`."""
        data = self._rest + data
        self._rest = data
        items: list[Item] = []
        if len(data) < self._needed:
            return items, False
        at = self._needed = 0
        is_malformed = False
        while (end := data.find(LINE_END, at)) >= 0:
            after = end + len(LINE_END)
            if not data.startswith((_MESSAGE, _HEADED), at):
                items.append(data[at:after])
                at = after
                continue
            words = _words_of(data[at:end])
            if words is None:
                is_malformed = True
                break
            subscription, subject, reply, head, size = words
            begin, after = after, after + size + len(LINE_END)
            if after > len(data):
                self._needed = after - at
                break
            message = (subscription, subject, reply, data[begin : begin + head], data[begin + head : begin + size])
            if not self._extend(items, message):
                items.append(message)
            at = after
        if end < 0 and len(data) - at > MOST_CONTROL_LINE and not data.startswith(_INFO, at):
            is_malformed = True
        self._rest = data[at:]
        return items, is_malformed

    def _extend(self, items: list[Item], message: Message) -> bool:
        """Add a message to the run that ends the items, or begin one; False: it belongs to none."""
        subscription, subject, reply, head, payload = message
        place = place_in(reply) if subscription in self._watched else None
        if place is None:
            return False
        sequence, count, stored_ns, pending = place
        try:
            delivered = (sequence, subject.decode(), payload, stored_ns, fence_words(head))
        except UnicodeDecodeError:
            return False
        last = items[-1] if items else b""
        if isinstance(last, tuple) and len(last) == 4 and (last[0], last[1] + len(last[3])) == (subscription, count):
            last[3].append(delivered)
            items[-1] = (subscription, last[1], pending, last[3])
        else:
            items.append((subscription, count, pending, [delivered]))
        return True


def _words_of(line: bytes) -> tuple[int, bytes, bytes, int, int] | None:
    """Subscription, subject, reply, bytes of headers, and of headers and payload; None: no server sends such."""
    kind, *words = line.split()
    numbers = 2 if kind == _HEADED.strip() else 1
    if len(words) - numbers not in (2, 3):
        return None
    found = [number_in(word, _MOST_DIGITS) for word in (words[1], *words[-numbers:])]
    subscription, head, size = found[0], 0 if numbers == 1 else found[1], found[-1]
    if subscription is None or head is None or size is None or not head <= size <= MOST_MESSAGE_BYTES:
        return None
    return subscription, words[0], words[2] if len(words) - numbers == 3 else b"", head, size


def place_in(reply: bytes) -> tuple[int, int, int, int] | None:
    """Sequence in the stream, the consumer's count, time of storage and what the consumer had left;

    None: the reply subject says none.

    $JS.ACK.<stream>.<consumer>.<times>.<sequence>.<count>.<time>.<left>; a longer form has domain and account before
    the stream, and one more part at its end.
    """
    if not reply.startswith(_ACK):
        return None
    parts = reply.split(b".")
    at = 5 if len(parts) == 9 else 7
    numbers = [number_in(part, _MOST_DIGITS + 1) for part in parts[at : at + 4]]
    if len(numbers) < 4 or any(number is None or number >> 63 for number in numbers):
        return None
    sequence, count, stored_ns, left = numbers
    return sequence or 0, count or 0, stored_ns or 0, left or 0


def number_in(word: bytes, most_digits: int) -> int | None:
    """A number of digits alone, at most so many; None: it is none."""
    return int(word) if word.isdigit() and len(word) <= most_digits else None


def fence_words(headers: bytes) -> bytes | None:
    """The value of the header Kvbm-Fence as it came; None: there is none."""
    _, found, rest = headers.partition(_FENCE_LINE)
    value, is_ended, _ = rest.partition(LINE_END)
    return value if found and is_ended else None
