"""The namespaces whose fields are known: bounded, whoever declares them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from kvbm.catalog.instance_sequence import Changes, Counters, InstanceSequence
from kvbm.catalog.sql_rows import InstanceStatus
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

    def __init__(
        self,
        namespaces: Iterable[Namespace] = (),
        instances: Collection[InstanceSequence] = (),
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Args: instances: those that may declare some, as they are at each call."""
        self.by_id: dict[NamespaceId, Namespace] = {}
        self.let_go: set[NamespaceId] = set()
        self._instances, self._most, self._most_bytes = instances, most, most_bytes
        self._bytes = 0
        self._ids: list[NamespaceId] | None = None
        self._remarks = Seldom()
        self.add(namespaces)

    def add(self, namespaces: Iterable[Namespace]) -> None:
        """Know these too, as far as there is room."""
        unused: Iterator[NamespaceId] | None = None
        refused = 0
        for namespace in namespaces:
            if namespace.id in self.by_id:
                continue
            size = len(namespace.canonical())
            if not self._has_room(size):
                if unused is None:
                    used = self._declared()
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

    def take(self, changes: Changes, counters: Counters) -> None:
        """Know those that a step has found; rows of those for which there is no room are given out to nobody."""
        if not changes.namespaces:
            return
        self.add(row.fields for _, row in changes.namespaces)
        kept = [(at, row) for at, row in changes.namespaces if row.id in self.by_id]
        counters.namespaces_refused += len(changes.namespaces) - len(kept)
        changes.namespaces = kept

    def undeclared(self) -> set[NamespaceId]:
        """Those that no instance has declared. There are none while what an instance that runs declares is not known: its start was not read."""
        for followed in self._instances:
            if followed.joined_midstream and not followed.declared and followed.row.state is InstanceStatus.LIVE:
                return set()
        return self.by_id.keys() - self._declared()

    def remove(self, names: Iterable[NamespaceId]) -> None:
        """Know no more what these are."""
        for name in names:
            gone = self.by_id.pop(name, None)
            if gone is not None:
                self._bytes -= len(gone.canonical())
                self._ids = None

    def take_let_go(self) -> set[NamespaceId]:
        """Those that had to go because there were too many, since the last call."""
        gone, self.let_go = self.let_go, set()
        return gone

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

    def _declared(self) -> set[NamespaceId]:
        """What the newest starts of all instances named."""
        return set().union(*(followed.declared for followed in self._instances))
