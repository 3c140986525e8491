"""What this instance has claimed of an object pool that forgets: looked at again in turn, so that claims do not outlive
their objects.

Such a pool drops objects by itself and tells nobody. Each object that is claimed has two others looked at, those that
were not looked at for longest, so that under any load no more is claimed than about twice what the pool holds; and a
few now and then while nothing is claimed. What other instances have claimed they look after; those that are gone leave
it to the janitor. No thread, clock or pool here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId

LOOKS_A_CLAIM = 2


class Claimed(NamedTuple):
    """An object; `hashes` are all its blocks, packed."""

    namespace: NamespaceId
    hashes: bytes

    @property
    def last(self) -> bytes:
        """The hash of its last block, which names it."""
        return self.hashes[-HASH_BYTES:]


class ObjectClaims:
    """See the module.

    Args:
        most: objects that are remembered; those beyond are the janitor's.
    """

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._objects: OrderedDict[tuple[NamespaceId, bytes], Claimed] = OrderedDict()  # looked at longest ago first
        self._due = 0

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, objects: Iterable[Claimed]) -> None:
        """These were claimed; the pool had them just now."""
        for one in objects:
            self._objects[one.namespace, one.last] = one
            self._objects.move_to_end((one.namespace, one.last))
            self._due += LOOKS_A_CLAIM
        while len(self._objects) > self._most:
            self._objects.popitem(last=False)

    def due(self, idle: int = 0) -> list[Claimed]:
        """Those to look at now; `idle`: so many though nothing was claimed."""
        count = min(max(self._due, idle), len(self._objects))
        self._due = 0
        taken = [self._objects.popitem(last=False)[1] for _ in range(count)]
        self._objects.update({(one.namespace, one.last): one for one in taken})
        return taken

    def drop(self, objects: Iterable[Claimed]) -> None:
        """These are claimed no more."""
        for one in objects:
            self._objects.pop((one.namespace, one.last), None)
