"""A cache tier: a fast store that forgets, in front of a backing store that keeps.

A put goes to both, a get asks the cache first.

A put is done once the backing store has it. The cache gets the same bytes in the background: from puts, and from gets
that it could not answer. Nobody waits for that, and nobody is told when it fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvbm.pools.stores.base import Body, Get, Got, Listed, ObjectStore, Put, Refusal, StoreTrouble

_WAITING_BYTES = 256 << 20  # of puts that the cache has not taken yet; more are left out
_CACHE_WAIT_S = 0.5  # for the cache's answers; what it has not answered by then is read from the backing store
_FILL_WAIT_S = 5.0
_REST_S = 5.0  # how long a cache is left alone that did not answer
_RUN_PUTS = 16


class CachedStore:
    """A `ObjectStore` made of two. Names, listings, deletes, leases and headers are those of the backing store.

    Attributes:
        name: of the backing store.
    Raises: RuntimeError: the system gives no thread; both stores stay the caller's.
    """

    def __init__(
        self,
        cache: ObjectStore,
        backing: ObjectStore,
        on_trouble: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = backing.name
        self.forgets = backing.forgets
        self.cache = cache
        self.backing = backing
        self._on_trouble = on_trouble
        self._clock = clock
        self._rests_until = 0.0
        self._told_unusable = False
        self._lock = threading.Condition()
        self._waiting: deque[Put] = deque()
        self._waiting_bytes = 0
        self._filling = False  # whether the thread has puts in its hands
        self._closed = False
        self._filler = threading.Thread(target=self._fill, name="kvbm-front", daemon=True)
        self._filler.start()

    @property
    def away(self) -> str:
        """As `LateStore.away`, of either store."""
        return "; ".join(filter(None, (getattr(store, "away", "") for store in (self.backing, self.cache))))

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.put`, of the backing store."""
        answers = self.backing.put(puts, deadline_s)
        self._offer([put for put, refusal in zip(puts, answers, strict=True) if refusal is None])
        return answers

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `ObjectStore.get`. Parts of objects come from the backing store: who wants parts asks what is kept."""
        ends = self._clock() + deadline_s
        answers: dict[int, Got | Refusal] = {}
        unusable: list[str] = []
        whole = [index for index, get in enumerate(gets) if get.first == 0 and get[2] is None]
        if whole and self._clock() >= self._rests_until:
            wait_s = min(_CACHE_WAIT_S, deadline_s / 2)
            for index, answer in zip(whole, self.cache.get([gets[index] for index in whole], wait_s), strict=True):
                if isinstance(answer, Got):
                    answers[index] = answer
                    continue
                self._note(answer)
                if answer.trouble is StoreTrouble.UNUSABLE:
                    unusable.append(gets[index].name)
            if unusable:  # so that the object itself can have its name there again
                self.cache.delete(unusable, wait_s)
        rest = [index for index in range(len(gets)) if index not in answers]
        if rest:
            kept = self.backing.get([gets[index] for index in rest], max(0.0, ends - self._clock()))
            answers.update(zip(rest, kept, strict=True))
            lacked = set(rest).intersection(whole)
            self._offer([Put(gets[index].name, got.body) for index in lacked if isinstance(got := answers[index], Got)])
        return [answers[index] for index in range(len(gets))]

    def reread(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """Objects from the backing store, after what was read was not what it should be. The cache forgets them."""
        ends = self._clock() + deadline_s
        self.cache.delete([get.name for get in gets], min(_CACHE_WAIT_S, deadline_s / 2))
        return self.backing.get(gets, max(0.0, ends - self._clock()))

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.delete`, in both."""
        answers = self.backing.delete(names, deadline_s)
        for refusal in self.cache.delete(names, _CACHE_WAIT_S):
            if refusal is not None:
                self._note(refusal)
        return answers

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `ObjectStore.listed`, of the backing store."""
        return self.backing.listed(prefix, deadline_s, after)

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `ObjectStore.replace`, of the backing store."""
        return self.backing.replace(name, body, expected, deadline_s)

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """As `ObjectStore.ignored_conditions`, of the backing store."""
        return self.backing.ignored_conditions(name, deadline_s)

    def settle(self, wait_s: float) -> bool:
        """Wait until the cache has been offered everything, for tests and measurements. False: not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and not self._filling, wait_s)

    def close(self) -> None:
        """Drop what the cache has not taken, close both. Idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._lock.notify_all()
        self._filler.join(_FILL_WAIT_S + _CACHE_WAIT_S)
        self.cache.close()
        self.backing.close()

    def _offer(self, puts: Sequence[Put]) -> None:
        with self._lock:
            for put in puts:
                if self._closed or self._waiting_bytes + put.size_bytes > _WAITING_BYTES:
                    return
                self._waiting.append(put)
                self._waiting_bytes += put.size_bytes
            self._lock.notify_all()

    def _fill(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                puts = [self._waiting.popleft() for _ in range(min(_RUN_PUTS, len(self._waiting)))]
                self._filling = True
            if self._clock() >= self._rests_until:
                for refusal in self.cache.put(puts, _FILL_WAIT_S):
                    if refusal is not None:
                        self._note(refusal)
            with self._lock:
                self._waiting_bytes -= sum(put.size_bytes for put in puts)
                self._filling = False
                self._lock.notify_all()

    def _note(self, refusal: Refusal) -> None:
        """Leave a cache alone that is in trouble, and report it once each time.

        What is the matter with one name is no trouble of the cache.
        """
        if refusal.trouble in (StoreTrouble.ABSENT, StoreTrouble.TAKEN):
            return
        if refusal.trouble is StoreTrouble.UNUSABLE:
            with self._lock:
                is_new, self._told_unusable = not self._told_unusable, True
            if is_new:
                self._on_trouble(
                    f"front of the object pool {self.cache.name}: {refusal.words}; it and others like it are removed "
                    "there and read"
                    " from the backing store; let nobody else write under this prefix"
                )
            return
        with self._lock:
            now_s = self._clock()
            is_new = now_s >= self._rests_until
            self._rests_until = now_s + _REST_S
        if is_new:
            self._on_trouble(
                f"front of the object pool {self.cache.name}: {refusal.words}; it is left alone for {_REST_S:g} s"
            )
