"""A store in a dictionary, for tests and for managers of one process that share a pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvbm.pools.stores.base import Body, Get, Got, Listed, Put, Refusal, StoreTrouble


class MemoryStore:
    """See the module. `close` keeps what is there for the others.

    Attributes:
        objects: name → body and when it was put; a test may change it.
    """

    def __init__(self, name: str = "memory://objects", clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.name = name
        self.forgets = False
        self.objects: dict[str, tuple[bytes, int]] = {}
        self._clock_ns = clock_ns
        self._lock = threading.Lock()

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.put`."""
        answers: list[Refusal | None] = []
        for put in puts:
            offered = (bytes(put.flat()), self._clock_ns())
            with self._lock:
                held = self.objects.setdefault(put.name, offered)
            answers.append(None if held is offered else Refusal(StoreTrouble.TAKEN, f"{put.name} is there"))
        return answers

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `ObjectStore.get`."""
        return [self._read(get) for get in gets]

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.delete`."""
        with self._lock:
            for name in names:
                self.objects.pop(name, None)
        return [None] * len(names)

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `ObjectStore.listed`."""
        with self._lock:
            found = [(name, *kept) for name, kept in self.objects.items() if name.startswith(prefix) and name > after]
        for name, body, put_ns in sorted(found):
            yield Listed(name, len(body), put_ns)

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `ObjectStore.replace`."""
        with self._lock:
            held = self.objects.get(name)
            if (held is None) != (expected is None) or (held and expected is not None and held[0] != bytes(expected)):
                return Refusal(StoreTrouble.TAKEN, f"{name} has changed")
            self.objects[name] = (bytes(body), self._clock_ns())
        return None

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """As `ObjectStore.ignored_conditions`: none, by its lock."""
        return ()

    def close(self) -> None:
        """Nothing to give back."""

    def _read(self, get: Get) -> Got | Refusal:
        with self._lock:
            held = self.objects.get(get.name)
        if held is None:
            return Refusal(StoreTrouble.ABSENT, f"nothing is named {get.name}")
        body = held[0]
        end = len(body) if get.count is None else get.first + get.count
        part = body[get.first : end]
        return get.refuse(len(part)) or Got(part, len(body))
