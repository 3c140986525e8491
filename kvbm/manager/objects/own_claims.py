"""Which objects of the object pool this instance has put, as far as it remembers: they are not put again.

No thread, clock or pool here.
"""

from __future__ import annotations

from collections import OrderedDict

from kvbm.core.ids import HASH_BYTES, SequenceHash, split_hashes
from kvbm.manager.objects.object_groups import groups_of


class OwnClaims:
    """See the module. Runs are packed hashes of whole objects.

    Args:
        blocks: of an object.
        most: objects that are remembered.
    """

    def __init__(self, blocks: int = 1, most: int = 1 << 20) -> None:
        self._blocks, self._most = blocks, most
        self._objects: OrderedDict[SequenceHash, None] = OrderedDict()  # by the last block of each

    def lacking(self, hashes: bytes) -> bytes:
        """Those objects of a run that are not remembered."""
        if not self._objects:
            return hashes
        objects = groups_of(hashes, self._blocks)
        return b"".join(group for group in objects if group[-HASH_BYTES:] not in self._objects)

    def add(self, hashes: bytes) -> None:
        """The object pool holds these objects."""
        for group in groups_of(hashes, self._blocks):
            self._objects[SequenceHash(group[-HASH_BYTES:])] = None
        while len(self._objects) > self._most:
            self._objects.popitem(last=False)

    def drop(self, hashes: bytes) -> None:
        """The object pool does not hold the objects that these blocks are of."""
        for block in split_hashes(hashes):
            self._objects.pop(block, None)
