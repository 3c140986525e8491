"""A fast store that forgets before a slow one that keeps: put goes to both, get asks the first first.

What is put is put once the store behind has it. The front gets the same bytes, on the side: from puts, and from gets that it could not
answer. Nobody waits for that, and nobody hears when it goes wrong.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvbm.pools.stores.base import Body, Get, Got, Listed, Put, Refusal, Store, Trouble

_WAITING_BYTES = 256 << 20  # of puts that the front has not taken yet; more are left out
_FRONT_WAIT_S = 0.5  # for the front's answers; what it has not answered then is read behind it
_FILL_WAIT_S = 5.0
_REST_S = 5.0  # how long a front is left alone that did not answer
_RUN_PUTS = 16


class FrontedStore:
    """A `Store` made of two. Names, listings, deletes, leases and headers are those of the store behind.

    Attributes:
        name: of the store behind.
    """

    def __init__(
        self,
        front: Store,
        behind: Store,
        on_trouble: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = behind.name
        self.forgets = behind.forgets
        self.front = front
        self.behind = behind
        self._on_trouble = on_trouble
        self._clock = clock
        self._rests_until = 0.0
        self._lock = threading.Condition()
        self._waiting: deque[Put] = deque()
        self._waiting_bytes = 0
        self._filling = False  # whether the thread has puts in its hands
        self._closed = False
        self._filler = threading.Thread(target=self._fill, name="kvbm-front", daemon=True)
        self._filler.start()

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `Store.put`, of the store behind."""
        answers = self.behind.put(puts, deadline_s)
        self._offer([put for put, refusal in zip(puts, answers, strict=True) if refusal is None])
        return answers

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `Store.get`. Parts of objects are read behind: who wants only those asks what is kept."""
        ends = self._clock() + deadline_s
        answers: dict[int, Got | Refusal] = {}
        whole = [index for index, get in enumerate(gets) if get.first == 0 and get[2] is None]
        if whole and self._clock() >= self._rests_until:
            wait_s = min(_FRONT_WAIT_S, deadline_s / 2)
            for index, answer in zip(whole, self.front.get([gets[index] for index in whole], wait_s), strict=True):
                if isinstance(answer, Got):
                    answers[index] = answer
                else:
                    self._note(answer)
        rest = [index for index in range(len(gets)) if index not in answers]
        if rest:
            behind = self.behind.get([gets[index] for index in rest], max(0.0, ends - self._clock()))
            answers.update(zip(rest, behind, strict=True))
            lacked = set(rest).intersection(whole)
            self._offer([Put(gets[index].name, got.body) for index in lacked if isinstance(got := answers[index], Got)])
        return [answers[index] for index in range(len(gets))]

    def doubted(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """What lies behind, of objects that were read and are not what they should be. The front forgets them."""
        ends = self._clock() + deadline_s
        self.front.delete([get.name for get in gets], min(_FRONT_WAIT_S, deadline_s / 2))
        return self.behind.get(gets, max(0.0, ends - self._clock()))

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `Store.delete`, in both."""
        answers = self.behind.delete(names, deadline_s)
        for refusal in self.front.delete(names, _FRONT_WAIT_S):
            if refusal is not None:
                self._note(refusal)
        return answers

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `Store.listed`, of the store behind."""
        return self.behind.listed(prefix, deadline_s, after)

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `Store.replace`, of the store behind."""
        return self.behind.replace(name, body, expected, deadline_s)

    def settle(self, wait_s: float) -> bool:
        """Wait until the front has been offered everything, for tests and measurements. False: not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and not self._filling, wait_s)

    def close(self) -> None:
        """Drop what the front has not taken, close both. Idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._lock.notify_all()
        self._filler.join(_FILL_WAIT_S + _FRONT_WAIT_S)
        self.front.close()
        self.behind.close()

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
                for refusal in self.front.put(puts, _FILL_WAIT_S):
                    if refusal is not None:
                        self._note(refusal)
            with self._lock:
                self._waiting_bytes -= sum(put.size_bytes for put in puts)
                self._filling = False
                self._lock.notify_all()

    def _note(self, refusal: Refusal) -> None:
        """Leave a front alone that is in trouble, and say so once each time."""
        if refusal.trouble in (Trouble.ABSENT, Trouble.TAKEN):
            return
        with self._lock:
            now_s = self._clock()
            is_new = now_s >= self._rests_until
            self._rests_until = now_s + _REST_S
        if is_new:
            self._on_trouble(
                f"front of the object pool {self.front.name}: {refusal.words}; it is left alone for {_REST_S:g} s"
            )
