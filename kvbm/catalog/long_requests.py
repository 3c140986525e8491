"""Long requests, parsed in bounded memory: a list of a million Python numbers would take 40 MB, of positions or short texts more.

What is in a long request stays text until its length is known; tokens become an array a piece at a time.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvbm.catalog.limits import LARGE_BODY_BYTES, LimitError
from kvbm.core.answers import MAX_HASHES, MAX_POSITIONS, MAX_TOKENS, LookupRequest
from kvbm.core.errors import LayoutError

_PIECE_BYTES = 256 << 10
_MOST_OTHER_BYTES = 256 << 10  # of a long request, what is neither hashes nor tokens
_MOST_HASH_BYTES = 64 * MAX_HASHES  # 32 digits each, and room for quotes, commas and blanks
_COMMA = re.compile(rb",")
_LARGEST_TOKEN = (1 << 32) - 1
R = TypeVar("R", bound=LookupRequest)


def decode_request(body: bytes | bytearray, kind: type[R]) -> R:
    """A lookup or a route. Of a long one the tokens are an array.

    Raises: msgspec.MsgspecError, UnicodeDecodeError, RecursionError: as `msgspec.json.decode`. LayoutError, OverflowError: a token is
        none. LimitError: something is too long.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return msgspec.json.decode(body, type=kind)
    parts = msgspec.structs.asdict(msgspec.json.decode(body, type=_parts(kind)))
    hashes, tokens = memoryview(parts.pop("hashes")), memoryview(parts.pop("tokens"))
    rest = {name: part for name, part in parts.items() if memoryview(part).nbytes}
    if sum(memoryview(part).nbytes for part in rest.values()) > _MOST_OTHER_BYTES:
        raise LimitError(
            422, "invalid_request", f"what is neither hashes nor tokens has more than {_MOST_OTHER_BYTES} bytes",
            f"give at most {MAX_POSITIONS} positions, and names of ordinary length",
        )  # fmt: skip
    asked = msgspec.json.decode(msgspec.json.encode(rest), type=kind)
    long: dict[str, Any] = {}
    if hashes.nbytes > _MOST_HASH_BYTES:
        raise _too_many("hashes", MAX_HASHES)
    if (text := bytes(hashes)) not in (b"", b"null"):
        if text.count(b",") >= MAX_HASHES:
            raise _too_many("hashes", MAX_HASHES)
        long["hashes"] = msgspec.json.decode(text, type=str | list[str])
    if tokens.nbytes and bytes(tokens[:4]) != b"null":
        long["tokens"] = _tokens(tokens)
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


def _tokens(text: memoryview) -> np.ndarray:
    """Token ids, of the text of a JSON list."""
    end = len(text) - 1
    if text[0] != ord("[") or not bytes(text[1 : min(end, 64)]).strip():
        return np.array(msgspec.json.decode(text, type=list[int]), np.uint32)
    count, at = 0, 1
    tokens = np.empty(min(_count(text), MAX_TOKENS), np.uint32)
    while at < end:
        comma = _COMMA.search(text, at + _PIECE_BYTES, end)
        until = comma.start() if comma is not None else end
        piece = np.array(msgspec.json.decode(b"[%b]" % bytes(text[at:until]), type=list[int]), np.int64)
        if piece.min() < 0 or piece.max() > _LARGEST_TOKEN:
            raise LayoutError(f"tokens has {piece.min() if piece.min() < 0 else piece.max()}, which is no token id")
        if count + len(piece) > MAX_TOKENS:
            raise _too_many("tokens", MAX_TOKENS)
        tokens[count : count + len(piece)] = piece
        count += len(piece)
        at = until + 1
    return tokens[:count]


def _count(text: memoryview) -> int:
    """Elements of a JSON list of numbers."""
    parts = (bytes(text[at : at + _PIECE_BYTES]) for at in range(0, len(text), _PIECE_BYTES))
    return 1 + sum(part.count(b",") for part in parts)
