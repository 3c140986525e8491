"""Which namespaces an instance has said that it serves: by its start, and by its heartbeats.

Four things are told apart. It has named these. It has named some, and they were forgotten: it serves nothing until it
names one again. Its start was read and names none, nor does a heartbeat: it has declared nothing. Nothing was read or
heard: it is not known yet what it serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvbm.core.ids import NamespaceId

# Of which its heartbeats have told, beside those used last; of more the one told of first is forgotten.
MOST_TOLD = 1024


class NamedNamespaces:
    """The namespaces of one instance. One thread.

    Args:
        started, named_none: as a checkpoint has them.

    Attributes:
        started: those its newest start named, without those that were forgotten since. named_none: it named none.
        all: these, and those that heartbeats name.
    """

    __slots__ = ("_told", "_used", "all", "named_none", "started")

    def __init__(self, started: Iterable[NamespaceId] = (), named_none: bool = False) -> None:
        self.started, self.named_none = frozenset(started), named_none
        self.all = self.started
        self._used: tuple[NamespaceId, ...] = ()
        self._told: dict[NamespaceId, None] = {}

    @property
    def declares_nothing(self) -> bool:
        """Whether it has said that it names none: who may send prompts to all may send it any."""
        return self.named_none and not self.all

    def start(self, names: Iterable[NamespaceId]) -> None:
        """Take a start."""
        self.started = frozenset(names)
        self.named_none = not self.started
        self._told.clear()
        self._join()

    def hear(self, used: tuple[NamespaceId, ...], told: Collection[NamespaceId]) -> bool:
        """Take a heartbeat: what it has used last, and what it tells of. Whether it names others than before."""
        if not told and used == self._used:
            return False
        new = [name for name in told if name not in self._told]
        if not new and used == self._used:
            return False
        self._used = used
        self._told.update(dict.fromkeys(new))
        while len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        before = self.all
        self._join()
        return self.all != before

    def forget(self, names: frozenset[NamespaceId]) -> None:
        """These are named no more, until they are named again."""
        if self.all.isdisjoint(names):
            return
        self.started -= names
        self._used = tuple(name for name in self._used if name not in names)
        for name in names:
            self._told.pop(name, None)
        self._join()

    def _join(self) -> None:
        more = [name for name in (*self._used, *self._told) if name not in self.started]
        self.all = self.started.union(more) if more else self.started  # mostly the very same set
