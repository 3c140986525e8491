"""Names that are about to be deleted, as the janitor writes them into the store for every instance of every cluster to
see.

Whoever has the pool open looks at them every third of the grace or oftener and neither reads nor puts what they name: a
read is `missing`, a put is refused. A list is text: a line that says what it is, then a name a line. A list that cannot
be read names nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvbm.core.errors import PoolError
from kvbm.pools.stores.base import Get, Got, ObjectStore

KEPT_PREFIX = ".kvbm/"  # what a store holds besides blocks
WITHDRAWN_PREFIX = f"{KEPT_PREFIX}withdrawn/"
LEASE_NAME = f"{KEPT_PREFIX}janitor"
LIST_BYTES = 8 << 20  # of one list, which has 4,096 names
_FIRST_LINE = "kvbm withdrawn 1"


def encode_list(names: Iterable[str]) -> bytes:
    """A list of names as it lies in the store."""
    return "\n".join([_FIRST_LINE, *names, ""]).encode()


def decode_list(body: bytes | bytearray | memoryview) -> list[str]:
    """The names of a list; none where it is no such list."""
    lines = bytes(body).decode(errors="replace").split("\n")
    return [line for line in lines[1:] if line] if lines[0] == _FIRST_LINE else []


def read_lists(store: ObjectStore, deadline_s: float) -> dict[str, list[str]]:
    """The withdrawn names by the name of their list. Raises PoolError: the store refused or did not answer."""
    listed = [entry.name for entry in store.listed(WITHDRAWN_PREFIX, deadline_s)]
    answers = store.get([Get(name, most_bytes=LIST_BYTES) for name in listed], deadline_s) if listed else []
    return {name: decode_list(got.body) for name, got in zip(listed, answers, strict=True) if isinstance(got, Got)}


class Tombstones:
    """The withdrawn names as an instance knows them, looked at where they are needed, so that they are not older than
    said.

    Any thread may ask; while one looks the others go by what was known. A pool asks oftener than that by itself, so
    that hardly a request has to look. A look that fails changes nothing, and is tried again at the next.

    Args:
        every_s: the oldest an answer may be: a third of the grace.
    """

    def __init__(
        self, store: ObjectStore, every_s: float, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._every_s, self._deadline_s, self._clock = store, every_s, deadline_s, clock
        self._names: frozenset[str] = frozenset()
        self._looked_s = -every_s
        self._lock = threading.Lock()
        self._order = threading.Lock()  # of the two numbers below
        self._begun, self._known = 0, 0  # looks that have begun, and the one whose names are known

    def among(self, names: Sequence[str]) -> set[str]:
        """Which of these are withdrawn."""
        if self._clock() - self._looked_s >= self._every_s and self._lock.acquire(blocking=False):
            try:
                self.look()
            finally:
                self._lock.release()
        return set(self._names.intersection(names)) if self._names else set()

    def look(self) -> None:
        """Look now. Of several at a time the one that began last counts: an earlier one may have seen less."""
        with self._order:
            self._begun += 1
            number = self._begun
        self._looked_s = self._clock()
        try:
            lists = read_lists(self._store, self._deadline_s)
        except PoolError:
            return  # a store that does not answer gives no blocks either
        names = frozenset(name for found in lists.values() for name in found)
        with self._order:
            if number > self._known:
                self._known, self._names = number, names
