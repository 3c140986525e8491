"""The namespaces whose fields are known: bounded, whoever declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from kvbm.core.ids import Namespace, NamespaceId
from kvbm.remarks import Seldom

MOST = 65_536  # of all instances together
MOST_BYTES = 64 << 20  # of their fields


class KnownNamespaces:
    """Namespaces by id. When there are too many, those that nobody declares any more go, the oldest first.

    Attributes:
        by_id: in the order in which they became known. Read only.
        let_go: those that went so, until somebody takes them.
    """

    def __init__(self, namespaces: Iterable[Namespace] = (), most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.by_id: dict[NamespaceId, Namespace] = {}
        self.let_go: set[NamespaceId] = set()
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._ids: list[NamespaceId] | None = None
        self._remarks = Seldom()
        self.add(namespaces, frozenset)

    def add(self, namespaces: Iterable[Namespace], declared: Callable[[], Set[NamespaceId]]) -> None:
        """Know these too, as far as there is room.

        Args:
            declared: tells what instances declare now; asked only when there is no room.
        """
        unused: Iterator[NamespaceId] | None = None
        refused = 0
        for namespace in namespaces:
            if namespace.id in self.by_id:
                continue
            size = len(namespace.canonical())
            if not self._has_room(size):
                if unused is None:
                    used = declared()
                    unused = iter([name for name in self.by_id if name not in used])
                    self._let_go(unused, self._most // 4, self._most_bytes // 4)
                self._let_go(unused, 1, size)
            if not self._has_room(size):
                refused += 1
                continue
            self.by_id[namespace.id] = namespace
            self.let_go.discard(namespace.id)
            self._bytes += size
            self._ids = None
        if refused:
            self._remarks.warn(
                "namespaces.too_many", refused=refused, known=len(self.by_id), bytes=self._bytes,
                what_to_do="find who declares so many; instances serve theirs, but the catalog can neither show nor hash for them",
            )  # fmt: skip

    def remove(self, names: Iterable[NamespaceId]) -> None:
        """Know no more what these are."""
        for name in names:
            gone = self.by_id.pop(name, None)
            if gone is not None:
                self._bytes -= len(gone.canonical())
                self._ids = None

    def ids(self) -> Sequence[NamespaceId]:
        """All ids, ascending."""
        if self._ids is None:
            self._ids = sorted(self.by_id)
        return self._ids

    def _has_room(self, size: int) -> bool:
        return len(self.by_id) < self._most and self._bytes + size <= self._most_bytes

    def _let_go(self, unused: Iterator[NamespaceId], room: int, room_bytes: int) -> None:
        """Let go of some that nobody declares, until there is so much room."""
        while len(self.by_id) + room > self._most or self._bytes + room_bytes > self._most_bytes:
            if (name := next(unused, None)) is None:
                return
            self.remove((name,))
            self.let_go.add(name)
