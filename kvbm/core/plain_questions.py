"""Lookups and routes as most come over HTTP, read in one step. What is not plain is for the parsers of HTTP and JSON,
which say what is wrong with it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from kvbm.core.answers import MAX_INPUT_TOKENS, MAX_LIMIT
from kvbm.core.ids import HASH_BYTES, NamespaceId

MOST_BODY_BYTES = 32 << 10
_LINE = re.compile(rb"POST /v1/(lookup|route) HTTP/1\.1\r\n")
_HEADER = re.compile(rb"([^:\r]*): ?([!-~](?:[ -~]*[!-~])?)\r\n")
_HEX = re.compile(r"(?:[0-9a-fA-F]{32})+")
_DIGITS = re.compile(rb"(?:0|[1-9][0-9]{0,7})")
_ESCAPE = b"\\"
_ONCE = {b"host", b"content-type", b"content-length", b"authorization", b"connection"}
_UNREAD = {b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"x-request-id"}


class PlainQuestion(NamedTuple):
    """What a plain request asks.

    Attributes:
        request_bytes: head and body. body_bytes: the body alone.
        is_route: else it is a lookup.
        authorization, host: the headers; None without them.
        namespace: its id. hashes: packed, at least one.
        limit: 0 where none is given. input_tokens: 0 of a lookup.
    """

    request_bytes: int
    body_bytes: int
    is_route: bool
    authorization: bytes | None
    host: bytes | None
    namespace: NamespaceId
    hashes: bytes
    limit: int
    input_tokens: int


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    namespace: str
    hashes: str | list[str]
    limit: int = 0
    input_tokens: int = -1


def read_plain_question(data: bytes | bytearray | memoryview, begin: int, end: int) -> PlainQuestion | None:
    """The request that begins at a place; None: it is not plain, or not all of it is there.

    Plain is a POST of HTTP/1.1 to /v1/lookup or /v1/route that stays connected, with printable headers of a few names,
    those that count once each, one of them content-length, and a body of JSON, if its type is told at all. The body has
    at most 32 KiB, and each field once: namespace, its id; hashes, one at least; limit; of a route input_tokens. No
    text of it has an escape.
    """
    came = bytes(data[begin:end])
    line = _LINE.match(came)
    if line is None:
        return None
    at, said = line.end(), dict[bytes, bytes]()
    while not came.startswith(b"\r", at):
        header = _HEADER.match(came, at)
        if header is None:
            return None
        name = header[1].lower()
        if name in said or name not in _ONCE | _UNREAD:
            return None
        if name in _ONCE:
            said[name] = header[2]
        at = header.end()
    length = said.get(b"content-length", b"")
    if (
        not came.startswith(b"\r\n", at)
        or _DIGITS.fullmatch(length) is None
        or not 0 < int(length) <= MOST_BODY_BYTES
        or said.get(b"content-type", b"application/json").lower() != b"application/json"
        or said.get(b"connection", b"keep-alive").lower() != b"keep-alive"
    ):
        return None
    body = came[at + 2 : at + 2 + int(length)]
    asked = _asked(body, line[1] == b"route") if len(body) == int(length) else None
    if asked is None:
        return None
    namespace, hashes, limit, tokens = asked
    texts = said.get(b"authorization"), said.get(b"host")
    return PlainQuestion(
        at + 2 + len(body), len(body), line[1] == b"route", *texts, NamespaceId(namespace), hashes, limit, tokens
    )


def _asked(body: bytes, is_route: bool) -> tuple[bytes, bytes, int, int] | None:
    """Namespace, hashes, limit and input tokens of a body."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    given = found.hashes if isinstance(found.hashes, list) else [found.hashes]
    are_hashes = all(_HEX.fullmatch(one) and (one is found.hashes or len(one) == 2 * HASH_BYTES) for one in given)
    names = re.findall(rb'"(namespace|hashes|limit|input_tokens)"', body)
    if (
        _ESCAPE in body
        or len(set(names)) < len(names)
        or not (given and are_hashes)
        or len(found.namespace) != 2 * HASH_BYTES
        or _HEX.fullmatch(found.namespace) is None
        or (b"limit" in names and not 1 <= found.limit <= MAX_LIMIT)
        or (b"input_tokens" in names) != is_route
        or (is_route and not 0 <= found.input_tokens <= MAX_INPUT_TOKENS)
        or re.search(rb":[ \n\t\r]*[0-9]+[.eE]|:[ \n\t\r]*-", body) is not None
    ):
        return None
    return bytes.fromhex(found.namespace), bytes.fromhex("".join(given)), found.limit, max(0, found.input_tokens)
