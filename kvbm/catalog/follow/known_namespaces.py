"""The namespaces whose fields are known, from starts and from heartbeats: bounded, whoever names them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvbm.catalog.follow.instance_sequence import Changes, InstanceSequence, SequenceCounters
from kvbm.catalog.sql.rows import InstanceStatus
from kvbm.core.ids import Namespace, NamespaceId, namespace_id_of, namespace_in
from kvbm.safe_log import RateLimitedLog

MOST = 65_536  # of all instances together
MOST_BYTES = 64 << 20  # of their fields
_MOST_AT_ONCE = 16  # that one heartbeat may tell of; what is more is not looked at


class KnownNamespaces:
    """Namespaces by id. When there are too many, those that nobody names any more go, the oldest first. One thread.

    Attributes:
        by_id: in the order in which they became known. Read only.
        removals: grows when some are known no more.
        let_go: those that went because there were too many, until somebody takes them.
        on_told: given those that heartbeats told of and that were not known before.
        on_gone: given those that are known no more.
    """

    def __init__(
        self,
        namespaces: Iterable[Namespace] = (),
        instances: Collection[InstanceSequence] = (),
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Args: instances: those that may name some, as they are at each call."""
        self.by_id: dict[NamespaceId, Namespace] = {}
        self.removals = 0
        self.let_go: set[NamespaceId] = set()
        self.on_told: Callable[[Mapping[NamespaceId, Namespace]], None] | None = None
        self.on_gone: Callable[[Collection[NamespaceId]], None] | None = None
        self._instances, self._most, self._most_bytes = instances, most, most_bytes
        self._bytes = 0
        self._unswept = 0  # so many more are refused before it is looked again for some that nobody names
        self._ids: list[NamespaceId] | None = None
        self._limited_log = RateLimitedLog()
        self.add(namespaces)

    # -- input --------------------------------------------------------------------------------------------------------

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
                    unused = self._sweep()
                self._let_go(unused, 1, size)
            if not self._has_room(size):
                refused += 1
                continue
            self.by_id[namespace.id] = namespace
            self.let_go.discard(namespace.id)
            self._bytes += size
            self._ids = None
        if refused:
            self._unswept = max(0, self._unswept - refused)
            self._limited_log.warn(
                "namespaces.too_many",
                refused=refused,
                known=len(self.by_id),
                bytes=self._bytes,
                what_to_do="find who declares so many; instances serve theirs, but the catalog can neither show nor "
                "hash for them",
            )

    def take(self, changes: Changes, counters: SequenceCounters) -> None:
        """Know those that a step has found; rows of those for which there is no room are given out to nobody."""
        if not changes.namespaces:
            return
        self.add(row.fields for _, row in changes.namespaces)
        kept = [(at, row) for at, row in changes.namespaces if row.id in self.by_id]
        counters.namespaces_refused += len(changes.namespaces) - len(kept)
        changes.namespaces = kept

    def hear(self, told: Sequence[bytes], counters: SequenceCounters) -> list[NamespaceId]:
        """Know those that a heartbeat tells of. What is no namespace's fields is left out.

        Returns: the ids of those told of, also of those for which there is no room.
        """
        names, new = [], dict[NamespaceId, Namespace]()
        for words in told[:_MOST_AT_ONCE]:
            name = namespace_id_of(words)
            if name not in self.by_id:
                found = namespace_in(words)
                if found is None:
                    continue
                new[name] = found
            names.append(name)
        if new:
            self.add(new.values())
            counters.namespaces_refused += sum(name not in self.by_id for name in new)
            self.tell(new)
        return names

    def tell(self, names: Iterable[NamespaceId]) -> None:
        """Have `on_told` take those of these that are known."""
        known = {name: self.by_id[name] for name in names if name in self.by_id}
        if known and self.on_told is not None:
            self.on_told(known)

    def remove(self, names: Collection[NamespaceId]) -> None:
        """Know no more what these are, until somebody tells of them again."""
        if not names:
            return
        for name in names:
            gone = self.by_id.pop(name, None)
            if gone is not None:
                self._bytes -= len(gone.canonical())
        self.removals += 1
        self._unswept, self._ids = 0, None
        if self.on_gone is not None:
            self.on_gone(names)

    def take_let_go(self) -> set[NamespaceId]:
        """Those that had to go because there were too many, since the last call."""
        gone, self.let_go = self.let_go, set()
        return gone

    # -- what is known ------------------------------------------------------------------------------------------------

    def undeclared(self) -> set[NamespaceId]:
        """Those that no instance names.

        There are none while what an instance that runs declares is not known: its start was not read.
        """
        for followed in self._instances:
            if followed.joined_midstream and not followed.names.started and followed.row.state is InstanceStatus.LIVE:
                return set()
        return self.by_id.keys() - self._declared()

    def behind(self, count: int) -> list[NamespaceId]:
        """Those that became known behind the first `count`, in order; it is for who has seen these, and no removal
        since.
        """
        newest = list(islice(reversed(self.by_id), max(0, len(self.by_id) - count)))
        return newest[::-1]

    def ids(self) -> Sequence[NamespaceId]:
        """All ids, ascending."""
        if self._ids is None:
            self._ids = sorted(self.by_id)
        return self._ids

    # -- inside -------------------------------------------------------------------------------------------------------

    def _has_room(self, size: int) -> bool:
        return len(self.by_id) < self._most and self._bytes + size <= self._most_bytes

    def _sweep(self) -> Iterator[NamespaceId]:
        """Let go of some that nobody names, to have room for a while. Returns the others that nobody names.

        It looks at everything. Where it finds little, it is not done again for each that has no room.
        """
        if self._unswept:
            return iter(())
        used = self._declared()
        unused = iter([name for name in self.by_id if name not in used])
        if not self._let_go(unused, self._most // 4, self._most_bytes // 4):
            self._unswept = self._most // 64
        return unused

    def _let_go(self, unused: Iterator[NamespaceId], room: int, room_bytes: int) -> bool:
        """Let go of some that nobody names, until there is so much room. Returns whether there is."""
        gone, count, size = [], len(self.by_id), self._bytes
        while count + room > self._most or size + room_bytes > self._most_bytes:
            if (name := next(unused, None)) is None:
                break
            gone.append(name)
            count, size = count - 1, size - len(self.by_id[name].canonical())
        self.remove(gone)
        self.let_go.update(gone[: self._most - len(self.let_go)])  # rows of more are found at the next start
        return count + room <= self._most and size + room_bytes <= self._most_bytes

    def _declared(self) -> set[NamespaceId]:
        """What all instances have named, by their newest starts and by heartbeats."""
        return set().union(*(followed.names.all for followed in self._instances))
