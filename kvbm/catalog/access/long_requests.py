"""Long requests, parsed in bounded memory: a list of a million Python numbers would take 40 MB, of positions or short
texts more.

What is in a long request stays text until its length is known; tokens become an array a piece at a time.
"""

from __future__ import annotations

import re
import time
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvbm.catalog.access.limits import LARGE_BODY_BYTES, LimitError
from kvbm.core.answers import MAX_HASHES, MAX_POSITIONS, MAX_TOKENS, LookupRequest
from kvbm.core.backend import ReadNumberList
from kvbm.core.errors import LayoutError

_PIECE_BYTES = 16 << 10  # that are parsed while nothing else of the process runs
_PAUSE_S = 0.0005  # after each, for what waits
_MOST_OTHER_BYTES = 256 << 10  # of a long request, what is neither hashes nor tokens
_MOST_HASH_BYTES = 64 * MAX_HASHES  # 32 digits each, and room for quotes, commas and blanks
_COMMA = re.compile(rb",")
_TEXT = re.compile(rb"[^ \n\t\r]")
_LARGEST_TOKEN = (1 << 32) - 1
R = TypeVar("R", bound=LookupRequest)


def decode_request(body: bytes | bytearray, kind: type[R], read: ReadNumberList) -> R:
    """A lookup or a route. Of a long one the tokens are an array.

    Args:
        read: reads its tokens.

    Raises: msgspec.MsgspecError, UnicodeDecodeError, RecursionError: as `msgspec.json.decode`. LayoutError,
        OverflowError: a token is none. LimitError: something is too long.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return msgspec.json.decode(body, type=kind)
    parts = msgspec.structs.asdict(msgspec.json.decode(body, type=_parts(kind)))
    hashes, tokens = memoryview(parts.pop("hashes")), memoryview(parts.pop("tokens"))
    rest = {name: part for name, part in parts.items() if memoryview(part).nbytes}
    if sum(memoryview(part).nbytes for part in rest.values()) > _MOST_OTHER_BYTES:
        raise LimitError(
            422,
            "invalid_request",
            f"what is neither hashes nor tokens has more than {_MOST_OTHER_BYTES} bytes",
            f"give at most {MAX_POSITIONS} positions, and names of ordinary length",
        )
    asked = msgspec.json.decode(msgspec.json.encode(rest), type=kind)
    long: dict[str, Any] = {}
    if hashes.nbytes > _MOST_HASH_BYTES:
        raise _too_many("hashes", MAX_HASHES)
    if (text := bytes(hashes)) not in (b"", b"null"):
        if text.count(b",") >= MAX_HASHES:
            raise _too_many("hashes", MAX_HASHES)
        long["hashes"] = msgspec.json.decode(text, type=str | list[str])
    if tokens.nbytes and bytes(tokens[:4]) != b"null":
        long["tokens"] = _tokens(tokens, read)
    return msgspec.structs.replace(asked, **long)


@cache
def _parts(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A request whose fields are not parsed."""
    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _too_many(name: str, most: int) -> LimitError:
    return LimitError(
        422, f"too_many_{name}", f"more than {most} {name} are given; at most {most} are taken", "give fewer"
    )


def _tokens(text: memoryview, read: ReadNumberList) -> np.ndarray:
    """Token ids, of the text of a JSON list."""
    inside = text[1:-1]
    if text[0] != ord("[") or _TEXT.search(inside) is None:
        return np.array(msgspec.json.decode(text, type=list[int]), np.uint32)
    tokens = np.empty(min(len(inside), MAX_TOKENS), np.uint32)
    count, at = read(inside, 0, tokens)
    while at < len(inside):
        if count == len(tokens):
            raise _too_many("tokens", MAX_TOKENS)
        odd, at = _odd_tokens(inside, at)
        if count + len(odd) > MAX_TOKENS:
            raise _too_many("tokens", MAX_TOKENS)
        tokens[count : count + len(odd)] = odd
        more, at = read(inside, at, tokens[count + len(odd) :])
        count += len(odd) + more
    return tokens[:count]


def _pause() -> None:
    """Let what else the process does go on."""
    time.sleep(_PAUSE_S)


def _odd_tokens(inside: memoryview, at: int) -> tuple[np.ndarray, int]:
    """Some tokens from where one is not written as plain digits, and where the next one begins."""
    comma = _COMMA.search(inside, at + _PIECE_BYTES)
    is_last = comma is None or _TEXT.search(inside, comma.end()) is None
    until = len(inside) if comma is None or is_last else comma.start()
    # What stands before and behind a comma has to be an element, also where the pieces end.
    text = b"[%b%b%b]" % (b"0," if at else b"", bytes(inside[at:until]), b"" if is_last else b",0")
    piece = np.array(msgspec.json.decode(text, type=list[int]), np.int64)[bool(at) : None if is_last else -1]
    if piece.min() < 0 or piece.max() > _LARGEST_TOKEN:
        raise LayoutError(f"tokens has {piece.min() if piece.min() < 0 else piece.max()}, which is no token id")
    _pause()
    return piece, min(until + 1, len(inside))
