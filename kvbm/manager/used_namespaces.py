"""Which namespaces an instance uses now, as its heartbeats name them: those used last, so that names clients choose make no heartbeat large."""

from __future__ import annotations

from kvbm.core.ids import NamespaceId

MOST_USED = 1024  # 18 bytes each in every heartbeat


class UsedNamespaces:
    """The namespaces that were used last. Under the manager's lock.

    Args:
        most: how many are remembered.
    """

    def __init__(self, most: int = MOST_USED) -> None:
        self._most = most
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
        """It is not used until it is used again."""
        self._used.pop(namespace, None)

    def named(self) -> tuple[NamespaceId, ...]:
        """All of them, by id: the same ones are named alike, whichever was used last."""
        return tuple(sorted(self._used))
