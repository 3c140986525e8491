"""What a block's KV depends on beside its tokens, as the bytes that `sequence_hashes` takes for it.

Whoever stores blocks and whoever asks for them must write the same bytes, so there is one way to write each part: a
letter, its length as u32, its bytes; in the order salt, media, embeddings, tokens ahead. All integers are
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_PART = struct.Struct("<cI")
_OFFSET = struct.Struct("<q")
_TOKEN = struct.Struct("<I")


class Media(NamedTuple):
    """An image, a sound or the like of which a block has a part.

    Attributes:
        name: what the engine knows it by, such as its digest.
        offset: where it begins in the prompt, in tokens from the block's first; below 0 when it begins before the
            block.
    """

    name: str
    offset: int


def extra_key(
    salt: str = "", media: Sequence[Media] = (), embeds: Sequence[bytes] = (), ahead: Sequence[int] = ()
) -> bytes:
    """The extra key of one block; empty where its KV depends on its tokens and those before alone.

    Args:
        salt: of the request; only its first block has it.
        media: those that the block has a part of, in the order of the prompt.
        embeds: digests of embeddings that stand in the place of tokens.
        ahead: token ids behind the block that its KV depends on, each in [0, 2**32).
    Raises: struct.error: a number does not fit.
    """
    parts = [_part(b"s", salt.encode())] if salt else []
    parts += [_part(b"m", _OFFSET.pack(one.offset) + one.name.encode()) for one in media]
    parts += [_part(b"e", digest) for digest in embeds]
    if ahead:
        parts.append(_part(b"a", b"".join(map(_TOKEN.pack, ahead))))
    return b"".join(parts)


def salted(salt: str, blocks: int) -> list[bytes]:
    """The extra keys of a prompt of so many full blocks whose request has a salt; none without one."""
    return [extra_key(salt), *[b""] * (blocks - 1)] if salt and blocks else []


def _part(letter: bytes, data: bytes) -> bytes:
    return _PART.pack(letter, len(data)) + data
