"""What a cluster used lately, for the janitors of other clusters that share the store.

A catalog knows the claims and uses of its own cluster alone, so a janitor would find old what another cluster reads
every minute. So each run leaves, in one object for its cluster, when its objects were last claimed or used there; who
decides what is old takes the latest of all. What a cluster that is gone has left ages as everything does. Entries are
16 bytes: 8 of a digest of the name, and the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvbm.pools.object.tombstones import KEPT_PREFIX

USED_PREFIX = f"{KEPT_PREFIX}used/"
_FIRST_LINE = b"kvbm used 1\n"
_ENTRY = np.dtype([("name", "<u8"), ("last_ns", "<i8")])


class UsedList(NamedTuple):
    """What another cluster left.

    Attributes:
        written_ns: by the store's clock; nothing in it is taken to be later.
    """

    body: bytes
    written_ns: int


class UsedBy:
    """What other clusters used lately."""

    def __init__(self, lists: Iterable[UsedList]) -> None:
        parts = [_decode(body, written_ns) for body, written_ns in lists]
        entries = np.concatenate(parts) if parts else np.empty(0, dtype=_ENTRY)
        entries.sort(order=("name", "last_ns"))
        self._names, self._last_ns = np.ascontiguousarray(entries["name"]), np.ascontiguousarray(entries["last_ns"])

    def last_ns(self, name: str) -> int:
        """When an object was last used elsewhere; 0 for never."""
        row = int(np.searchsorted(self._names, np.uint64(_digest(name)), side="right")) - 1
        return int(self._last_ns[row]) if row >= 0 and int(self._names[row]) == _digest(name) else 0


class UsedHere:
    """What this cluster used, as a run comes by it."""

    def __init__(self) -> None:
        self._entries = bytearray(_FIRST_LINE)

    def add(self, name: str, last_ns: int) -> None:
        """An object, and when it was last claimed or used here."""
        self._entries += _digest(name).to_bytes(8, "little") + last_ns.to_bytes(8, "little")

    def body(self) -> bytes:
        """What is left for the others."""
        return bytes(self._entries)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _decode(body: bytes, written_ns: int) -> np.ndarray:
    """The entries of a list; none where it is no such list."""
    if not body.startswith(_FIRST_LINE) or (len(body) - len(_FIRST_LINE)) % _ENTRY.itemsize:
        return np.empty(0, dtype=_ENTRY)
    entries = np.frombuffer(body, dtype=_ENTRY, offset=len(_FIRST_LINE)).copy()
    entries["last_ns"] = np.minimum(entries["last_ns"], written_ns)
    return entries
