"""What a NATS server sends, taken apart: bytes in, operations out. Memory is bounded whatever comes."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.errors import CatalogError

MOST_LINE_BYTES = 4096  # of an operation, but for INFO, which names all servers of a cluster
MOST_INFO_BYTES = 256 << 10
MOST_MESSAGE_BYTES = 64 << 20  # what nats-server lets max_payload be
_MOST_DIGITS = 9
_SIMPLE = (b"PING", b"PONG", b"+OK")


class WireError(CatalogError):
    """What came is not NATS's protocol. The connection is of no more use."""


class NatsMessage(NamedTuple):
    """A message.

    Attributes:
        status: that the server has put before the headers, such as b"503"; b"" for none.
        headers: as they came, b"" for none.
    """

    subject: bytes
    status: bytes
    headers: bytes
    body: bytes


class Word(NamedTuple):
    """An operation without a message: INFO, PING, PONG, +OK or -ERR, and what stands behind it."""

    name: bytes
    rest: bytes


class _Head(NamedTuple):
    """The line before a message.

    Attributes:
        begin: where the message's bytes begin. headers: bytes of them that are headers. size: of both.
    """

    subject: bytes
    begin: int
    headers: int
    size: int


class Parser:
    """Bytes of one connection.

    Args:
        most_bytes: of a message.
    """

    def __init__(self, most_bytes: int = MOST_MESSAGE_BYTES) -> None:
        self.most_bytes = most_bytes
        self._held = bytearray()
        self._head: _Head | None = None  # of the message whose bytes are not all there

    def feed(self, data: bytes | memoryview) -> None:
        """What was read. Take what it has completed with `next` before more is fed."""
        self._held += data

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that was not taken."""
        return not self._held

    def next(self) -> NatsMessage | Word | None:
        """The next operation; None: it is not complete. Raises WireError."""
        if not self._held:
            return None
        if self._head is None:
            end = self._held.find(b"\r\n")
            if end < 0:
                if len(self._held) > self._most_line():
                    raise WireError(f"a line of more than {self._most_line()} bytes")
                return None
            if end > self._most_line():
                raise WireError(f"a line of {end} bytes")
            line = bytes(self._held[:end])
            name, _, rest = line.partition(b" ")
            upper = name.upper()
            if upper not in (b"MSG", b"HMSG"):
                del self._held[: end + 2]
                return _word(upper, rest)
            self._head = self._message_head(line, upper == b"HMSG", end + 2)
        head = self._head
        end = head.begin + head.size
        if len(self._held) < end + 2:
            return None
        if self._held[end : end + 2] != b"\r\n":
            raise WireError("a message is longer than its line says")
        headers = bytes(self._held[head.begin : head.begin + head.headers])
        body = bytes(memoryview(self._held)[head.begin + head.headers : end])
        del self._held[: end + 2]
        self._head = None
        return NatsMessage(head.subject, _status(headers) if headers else b"", headers, body)

    def _most_line(self) -> int:
        return MOST_INFO_BYTES if self._held[:4].upper() == b"INFO" else MOST_LINE_BYTES

    def _message_head(self, line: bytes, has_headers: bool, begin: int) -> _Head:
        parts = line.split()
        count = len(parts) - 2 if has_headers else len(parts) - 1  # of words before the numbers
        if count not in (3, 4) or not _is_number(parts[-1]) or not _is_number(parts[count]):
            raise WireError(f"a message begins with {line[:80]!r}")
        headers, size = int(parts[count]) if has_headers else 0, int(parts[-1])
        if size > self.most_bytes or headers > size:
            raise WireError(f"a message of {size} bytes, {headers} of them headers; {self.most_bytes} are the most")
        return _Head(parts[1], begin, headers, size)


def header(headers: bytes, name: bytes) -> bytes:
    """The value of a header, as kvbm writes its name; b"" where there is none."""
    at = headers.find(b"\r\n" + name + b": ")
    if at < 0:
        return b""
    begin = at + len(name) + 4
    end = headers.find(b"\r\n", begin)
    return headers[begin:end].strip() if end >= 0 else b""


def _is_number(word: bytes) -> bool:
    return len(word) <= _MOST_DIGITS and word.isdigit()


def _word(name: bytes, rest: bytes) -> Word:
    if name in _SIMPLE or name in (b"INFO", b"-ERR"):
        return Word(name, rest.strip())
    raise WireError(f"an operation {name[:20]!r}")


def _status(headers: bytes) -> bytes:
    first = headers[: headers.find(b"\r\n")] if b"\r\n" in headers else headers
    if not first.startswith(b"NATS/1.0"):
        raise WireError(f"headers begin with {first[:20]!r}")
    return first[8:].strip()[:3]
