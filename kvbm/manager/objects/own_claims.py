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
        self._objects: OrderedDict[SequenceHash, bytes] = OrderedDict()  # by the last block of each, while followed all
        self._held: set[SequenceHash] | None = None  # blocks of them, where somebody asks

    def follow_blocks(self) -> None:
        """Answer `has` from now on, for what is put from now on."""
        self._held = set()

    def has(self, block: SequenceHash) -> bool:
        """Whether one of these objects has a block."""
        return self._held is not None and block in self._held

    def lacking(self, hashes: bytes) -> bytes:
        """Those objects of a run that are not remembered."""
        if not self._objects:
            return hashes
        objects = groups_of(hashes, self._blocks)
        return b"".join(group for group in objects if group[-HASH_BYTES:] not in self._objects)

    def add(self, hashes: bytes) -> None:
        """The object pool holds these objects."""
        for group in groups_of(hashes, self._blocks):
            self._objects[SequenceHash(group[-HASH_BYTES:])] = b"" if self._held is None else group
            if self._held is not None:
                self._held.update(split_hashes(group))
        while len(self._objects) > self._most:
            self._leave(self._objects.popitem(last=False)[1])

    def drop(self, hashes: bytes) -> None:
        """The object pool does not hold the objects that these blocks are of."""
        for block in split_hashes(hashes):
            self._leave(self._objects.pop(block, b""))

    def _leave(self, group: bytes) -> None:
        if self._held is not None:
            self._held.difference_update(split_hashes(group))
