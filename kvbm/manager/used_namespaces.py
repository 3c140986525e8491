"""Which namespaces an instance uses now, as its heartbeats name them: those used last, so that names clients choose
make no heartbeat large.

Heartbeats also tell what namespaces are, a few at a time and in turn: those its start has named, and those that are
used. So a catalog learns of a namespace that came after the start, of one that it had to forget, and of one whose start
it has not read. What was erased is told of again when it is used again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from kvbm.core.ids import MAX_FIELDS_BYTES, Namespace, NamespaceId

MOST_USED = 1024  # 18 bytes each in every heartbeat
TOLD = 4  # namespaces that one heartbeat tells of
TOLD_BYTES = 4096  # their fields take so many bytes at most, but for a single one's


class UsedNamespaces:
    """The namespaces that were used last. Under the manager's lock.

    Args:
        most: how many are remembered.
        fields: of the namespaces that are known; the caller adds to them.
        begun_with: those that the start of the epoch has named.
    """

    def __init__(
        self,
        most: int = MOST_USED,
        fields: Mapping[NamespaceId, Namespace] | None = None,
        begun_with: Iterable[NamespaceId] = (),
    ) -> None:
        self._most, self._fields = most, {} if fields is None else fields
        self._begun = dict.fromkeys(begun_with)
        self._told: NamespaceId | None = None  # the last of those told of
        self._used: dict[NamespaceId, None] = {}  # the one used last is the last

    def __contains__(self, namespace: NamespaceId) -> bool:
        return namespace in self._used

    def use(self, namespace: NamespaceId) -> None:
        """It is used now. Of too many the one goes that was not used for longest."""
        self._used.pop(namespace, None)
        self._used[namespace] = None
        if len(self._used) > self._most:
            del self._used[next(iter(self._used))]

    def forget(self, namespace: NamespaceId) -> None:
        """It is neither used nor told of until it is used again."""
        self._used.pop(namespace, None)
        self._begun.pop(namespace, None)

    def named(self) -> tuple[NamespaceId, ...]:
        """All of them, by id: the same ones are named alike, whichever was used last."""
        return tuple(sorted(self._used))

    def told(self) -> tuple[bytes, ...]:
        """The fields of those whose turn it is, each as `Namespace.canonical` has them."""
        known = sorted(one for one in {**self._begun, **self._used} if one in self._fields)
        first = 0 if self._told is None else bisect_right(known, self._told)
        found, size = list[bytes](), 0
        for one in [*known[first:], *known[:first]][:TOLD]:
            words = self._fields[one].canonical()
            if len(words) <= MAX_FIELDS_BYTES:  # longer ones, of texts that are written with escapes, nobody would read
                size += len(words)
                if found and size > TOLD_BYTES:
                    break
                found.append(words)
            self._told = one
        return tuple(found)
