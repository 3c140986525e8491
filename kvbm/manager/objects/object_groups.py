"""Which blocks make whole objects: k consecutive blocks of a chain, from a position that is a multiple of k.

No bytes here.

An engine that decodes creates its blocks one by one, so the unfinished group at the end of a chain is remembered under
the hash of its last block: who goes on from that block finishes it. Where a prompt forks, each branch goes on from the
same remembered group. A finished group waits until the tier it leaves from holds every block of it, and watches one
that is missing: when that block arrives, it either is whole or watches the next one. Both memories are bounded, and
forget what was not used for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId


class ObjectGroup(NamedTuple):
    """The blocks of one object.

    Attributes:
        hashes: k of them, packed, in the order of their chain.
    """

    namespace: NamespaceId
    hashes: bytes


def groups_of(hashes: bytes, blocks: int) -> Iterator[bytes]:
    """The groups of a run that is whole groups, one after the other."""
    group_bytes = blocks * HASH_BYTES
    return (hashes[at : at + group_bytes] for at in range(0, len(hashes), group_bytes))


class Groups:
    """See the module.

    Args:
        blocks: k, at least 1.
        unfinished: groups at the ends of chains that are remembered.
        waiting: groups that may wait for blocks.
    """

    def __init__(self, blocks: int, unfinished: int = 16_384, waiting: int = 8192) -> None:
        self.blocks = blocks
        self._group_bytes = blocks * HASH_BYTES
        self._unfinished_most, self._waiting_most = unfinished, waiting
        self._unfinished: OrderedDict[bytes, bytes] = OrderedDict()  # last hash → the group so far
        self._waiting: OrderedDict[bytes, list[ObjectGroup]] = OrderedDict()  # a block that is missing → who watches it
        self._waiting_groups = 0

    def follow(self, parent: bytes, start: int, hashes: bytes) -> tuple[bytes, bytes]:
        """A chain goes on behind `parent` at position `start`.

        Returns: the groups it finishes, and those of its blocks that belong to a group whose beginning nobody
            remembers.
        """
        lost = b""
        if begun := start % self.blocks:
            head = self._unfinished.get(parent, b"")
            if len(head) == begun * HASH_BYTES:
                hashes = head + hashes
            else:
                lost = hashes[: (self.blocks - begun) * HASH_BYTES]
                hashes = hashes[len(lost) :]
        whole_bytes = len(hashes) - len(hashes) % self._group_bytes
        if whole_bytes < len(hashes):
            self._remember(hashes[whole_bytes:])
        return hashes[:whole_bytes], lost

    def watch(self, group: ObjectGroup, missing: bytes) -> list[ObjectGroup]:
        """Let a group wait for the last of the blocks its tier lacks. Returns the groups that are forgotten for it."""
        watchers = self._waiting.setdefault(missing[-HASH_BYTES:], [])
        if group in watchers:
            return []
        watchers.append(group)
        self._waiting_groups += 1
        forgotten: list[ObjectGroup] = []
        while self._waiting_groups > self._waiting_most:
            oldest = self._waiting.popitem(last=False)[1]
            self._waiting_groups -= len(oldest)
            forgotten += oldest
        return forgotten

    def arrived(self, block: bytes) -> list[ObjectGroup]:
        """A block has arrived: who watched it, and does no more."""
        if not self._waiting:
            return []
        watchers = self._waiting.pop(block, [])
        self._waiting_groups -= len(watchers)
        return watchers

    def forget_waiting(self) -> None:
        """No group waits for blocks any more."""
        self._waiting.clear()
        self._waiting_groups = 0

    def _remember(self, group: bytes) -> None:
        last = group[-HASH_BYTES:]
        self._unfinished[last] = group
        self._unfinished.move_to_end(last)
        if len(self._unfinished) > self._unfinished_most:
            self._unfinished.popitem(last=False)
