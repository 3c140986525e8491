"""What namespaces are, and which of them an instance has said that it serves: by its start, and by its heartbeats.

Four things are told apart. It has named these. It has named some, and they were erased: it serves nothing until it names one again. Its start was
read and names none, nor does a heartbeat: it has declared nothing. Nothing was read or heard: it is not known yet what it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvbm.core.ids import Namespace, NamespaceId, namespace_in

MOST_TOLD = (
    1024  # of which its heartbeats have told, beside those used last; of more the one told of first is forgotten
)
_MOST_AT_ONCE = 16  # that one heartbeat may tell of; what is more is not looked at
_MOST_WORDS = 1 << 14  # of what heartbeats told, whose ids are remembered


class KnownNamespaces:
    """The namespaces whose fields some instance has told, by id. One thread.

    Attributes:
        fields: in the order they became known.
        erased: grows when some are to be known no more.
        on_told: given those that heartbeats told of and nobody had told of before.
    """

    def __init__(self, namespaces: Iterable[Namespace] = ()) -> None:
        self.fields = {namespace.id: namespace for namespace in namespaces}
        self.erased = 0
        self.on_told: Callable[[Mapping[NamespaceId, Namespace]], None] | None = None
        self._names: dict[bytes, NamespaceId] = {}

    def told(self, every: Sequence[bytes]) -> list[NamespaceId]:
        """The namespaces that a heartbeat tells of, which are known from now on. What is no namespace's fields is left out."""
        names, new = [], dict[NamespaceId, Namespace]()
        for words in every[:_MOST_AT_ONCE]:
            name = self._names.get(words)
            if name is None or name not in self.fields:
                found = namespace_in(words)
                if found is None:
                    continue
                if len(self._names) >= _MOST_WORDS:
                    self._names.clear()
                name = self._names[words] = found.id
                if name not in self.fields:
                    self.fields[name] = new[name] = found
            names.append(name)
        if new and self.on_told is not None:
            self.on_told(new)
        return names

    def erase(self, names: frozenset[NamespaceId]) -> None:
        """These are known no more, until somebody tells of them again."""
        self.erased += 1
        self._names.clear()
        for name in names:
            self.fields.pop(name, None)


class NamedNamespaces:
    """The namespaces of one instance. One thread.

    Args:
        started, named_none: as a checkpoint has them.

    Attributes:
        started: those its newest start named, without those that were erased since. named_none: it named none.
        all: these, and those that heartbeats name.
    """

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

    def hear(self, used: tuple[NamespaceId, ...], told: Iterable[NamespaceId]) -> bool:
        """Take a heartbeat: what it has used last, and what it tells of. Whether it names others than before."""
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

    def erase(self, names: frozenset[NamespaceId]) -> None:
        """These are named no more, until they are named again."""
        if self.all.isdisjoint(names):
            return
        self.started -= names
        self._used = tuple(name for name in self._used if name not in names)
        for name in names:
            self._told.pop(name, None)
        self._join()

    def _join(self) -> None:
        self.all = self.started.union(self._used, self._told)
