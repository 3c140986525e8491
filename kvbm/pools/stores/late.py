"""A store that does not answer yet: an engine starts without it, and has it from the moment on when it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvbm.core.errors import PoolError
from kvbm.pools.stores.base import (
    Body,
    DirectRequests,
    DirectStore,
    ForgetfulStore,
    Get,
    Got,
    Listed,
    ObjectStore,
    Put,
    Refusal,
    StoreAwayError,
    StoreTrouble,
)

AGAIN_S = 5.0  # between two tries to open it
_CLOSE_S = 1.0


class LateStore:
    """A `ObjectStore` that is opened again and again until it is there.

    Until then whatever is asked of it is SILENT. Any thread.

    Args:
        away: why it could not be opened.
        reopen: opens it. Raises as `open_store`.
        on_came: told once, of the store that has come.
        on_trouble: told in words why it cannot be opened, each time that changes.
    """

    def __init__(
        self,
        away: StoreAwayError,
        reopen: Callable[[], ObjectStore],
        on_came: Callable[[ObjectStore], None] = lambda store: None,
        on_trouble: Callable[[str], None] = lambda words: None,
        again_s: float = AGAIN_S,
    ) -> None:
        self.name, self.forgets = away.name, away.forgets
        self._away = str(away)
        self._reopen, self._on_came, self._on_trouble, self._again_s = reopen, on_came, on_trouble, again_s
        self._store: ObjectStore | None = None
        self._lock = threading.Lock()  # of the store and whether it is closed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._open, name="kvbm-store-late", daemon=True)
        self._thread.start()

    @property
    def away(self) -> str:
        """Why it is not there yet; "" from the moment on when it is."""
        return self._away if self._store is None else ""

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.put`."""
        store = self._store
        return [self._refusal()] * len(puts) if store is None else store.put(puts, deadline_s)

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `ObjectStore.get`."""
        store = self._store
        return [self._refusal()] * len(gets) if store is None else store.get(gets, deadline_s)

    def direct(
        self, names: Sequence[str], expected_bytes: int, deadline_s: float
    ) -> AbstractContextManager[DirectRequests | None]:
        """As `DirectStore.direct`."""
        store: object = self._store
        return store.direct(names, expected_bytes, deadline_s) if isinstance(store, DirectStore) else nullcontext()

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.delete`."""
        store = self._store
        return [self._refusal()] * len(names) if store is None else store.delete(names, deadline_s)

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `ObjectStore.listed`."""
        store = self._store
        if store is None:
            raise PoolError(self._away)
        return store.listed(prefix, deadline_s, after)

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `ObjectStore.replace`."""
        store = self._store
        return self._refusal() if store is None else store.replace(name, body, expected, deadline_s)

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """As `ObjectStore.ignored_conditions`."""
        store = self._store
        return self._refusal() if store is None else store.ignored_conditions(name, deadline_s)

    def absent(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """As `ForgetfulStore.absent`; nobody knows of a store that forgets nothing, or is not there."""
        store: object = self._store
        return store.absent(names, deadline_s) if isinstance(store, ForgetfulStore) else [False] * len(names)

    def close(self) -> None:
        """As `ObjectStore.close`."""
        with self._lock:
            self._closed.set()
            store = self._store
        self._thread.join(_CLOSE_S)  # a try that is under way ends by its own timeouts, and closes what it has opened
        if store is not None:
            store.close()

    def _refusal(self) -> Refusal:
        return Refusal(StoreTrouble.SILENT, "it has not answered since the start")

    def _open(self) -> None:
        while not self._closed.wait(self._again_s):
            try:
                store = self._reopen()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next try may succeed
                if str(error) != self._away:
                    self._away = str(error)
                    self._on_trouble(self._away)
                continue
            with self._lock:
                is_wanted = not self._closed.is_set()
                self._store = store if is_wanted else None
            if is_wanted:
                self._on_came(store)
            else:
                store.close()
            return
