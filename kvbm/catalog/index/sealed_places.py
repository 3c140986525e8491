"""Places in the change log as callers of some tenants are told them: without how much the whole cluster says.

A place counts the messages of all tenants. Such a caller gets it encrypted under a key of this process: it can give it
back here, and read nothing in it. The 16 bytes in front are a keyed hash of what follows, so one place has one text,
and a text that was made up is none.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from hmac import compare_digest

_PREFIX = "s."
_BYTES = 16  # of the hash, and of the place


class SealedPlaces:
    """Seals places of one log."""

    def __init__(self) -> None:
        self._key, self._mask_key = secrets.token_bytes(32), secrets.token_bytes(32)

    def seal(self, sequence: int, serial: int, run: str) -> str:
        """A place's text."""
        place = sequence.to_bytes(8, "little") + serial.to_bytes(8, "little")
        tag = self._tag(place, run)
        return _PREFIX + (tag + self._masked(tag, place)).hex()

    def unseal(self, text: str, run: str) -> tuple[int, int] | None:
        """Sequence and serial of a text that was made here, of the same run of the log; None: it was not."""
        if not text.startswith(_PREFIX) or len(text) != len(_PREFIX) + 4 * _BYTES:
            return None
        try:
            data = bytes.fromhex(text[len(_PREFIX) :])
        except ValueError:
            return None
        if len(data) != 2 * _BYTES:
            return None
        tag, place = data[:_BYTES], self._masked(data[:_BYTES], data[_BYTES:])
        if not compare_digest(tag, self._tag(place, run)):
            return None
        return int.from_bytes(place[:8], "little"), int.from_bytes(place[8:], "little")

    def _tag(self, place: bytes, run: str) -> bytes:
        return blake2b(place + run.encode(), digest_size=_BYTES, key=self._key).digest()

    def _masked(self, tag: bytes, place: bytes) -> bytes:
        mask = blake2b(tag, digest_size=_BYTES, key=self._mask_key).digest()
        return bytes(one ^ other for one, other in zip(place, mask, strict=True))
