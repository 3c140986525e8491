"""Objects received straight into the rows of their blocks, where the store's requests can be sent by others.

Native code takes what is whole and proved, and nothing else. The rest is asked for again by the store itself: its
answers say what is wrong with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kvbm.pools.base import ReadOutcome
from kvbm.pools.object.reader import WantedBlocks
from kvbm.pools.stores.base import DirectStore, ObjectStore

_LOT = 64  # objects that are asked for together: between lots the places of their requests are free for others
_REST_S = 30.0  # how long nothing is received so, after a store has refused it or has not answered
_OK, _ABSENT = 200, 404


class ObjectReceiver(Protocol):
    """Receives objects over plain HTTP, by connections of its own, which it keeps. Any thread, no GIL."""

    def receive(
        self,
        addresses: Sequence[str],
        port: int,
        requests: Sequence[bytes],
        namespace: bytes,
        hashes: bytes,
        rows: np.ndarray,
        at: np.ndarray,
        connections: int,
        deadline_s: float,
        connect_s: float,
        silence_s: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Receive m objects of k blocks; nobody writes the rows any more when it has returned.

        After the first request that the store has refused or not answered no other is sent.

        Args:
            addresses: IP addresses in digits, at least one. port: of all of them.
            requests: m, each whole.
            namespace, hashes: of the objects' m * k blocks.
            rows: (r, block_bytes) uint8. at: (m, k) i64, below 0 for what is not wanted.
            connections: how many requests may be under way at a time.
            connect_s, silence_s: until a connection stands; without a byte.
        Returns: for each object whether the wanted rows have its blocks, proved by the object's header and their
            checksums; its status, 0 where there was no answer, or a part of one; and its bytes, of those that are
            whole; then the checksums of all m * k rows.
        Raises: LayoutError: the parts do not fit each other.
        """

    def close(self) -> None:
        """End calls under way, wait for them. Idempotent."""


NewObjectReceiver: TypeAlias = Callable[[], ObjectReceiver]


class DirectReads:
    """Fills rows of objects by a receiver, as far as the store lends its requests. Any thread."""

    def __init__(self, receiver: ObjectReceiver, clock: Callable[[], float] = time.monotonic) -> None:
        """Close the receiver with this."""
        self._receiver = receiver
        self._clock = clock
        self._lock = threading.Lock()
        self._rests_until = float("-inf")

    def fill(
        self,
        store: ObjectStore,
        wanted: WantedBlocks,
        names: Sequence[str],
        expected_bytes: int,
        left_s: Callable[[], float],
    ) -> list[int]:
        """Receive the objects of these names, and set the outcomes of those that are whole: GOOD.

        Args:
            expected_bytes: how large an object probably is, 0 for unknown.
            left_s: until the call's deadline.
        Returns: the indexes of all others, in order. Their rows hold anything.
        """
        rest: list[int] = []
        begin = 0
        while begin < len(names) and isinstance(store, DirectStore) and left_s() > 0 and not self._rests():
            end = min(begin + _LOT, len(names))
            whole = self._receive(store, wanted, slice(begin, end), names[begin:end], expected_bytes, left_s)
            if whole is None:
                break
            rest += [begin + index for index in np.flatnonzero(~whole).tolist()]
            begin = end
        return [*rest, *range(begin, len(names))]

    def close(self) -> None:
        """End what is under way. Idempotent."""
        self._receiver.close()

    def _receive(
        self,
        store: DirectStore,
        wanted: WantedBlocks,
        lot: slice,
        names: Sequence[str],
        expected_bytes: int,
        left_s: Callable[[], float],
    ) -> np.ndarray | None:
        """Which objects of a lot are whole; None: the store lends no requests for them."""
        with store.direct(names, expected_bytes, left_s()) as asked:
            if asked is None:
                return None
            whole, statuses, sizes, sums = self._receiver.receive(
                asked.addresses,
                asked.port,
                asked.requests,
                wanted.namespace,
                wanted.hashes_of(lot),
                wanted.rows,
                wanted.targets[lot],
                asked.connections,
                left_s(),
                asked.limits.connect_timeout_s,
                asked.limits.read_timeout_s,
            )
        wanted.outcomes[lot][whole] = ReadOutcome.GOOD
        wanted.sums[lot] = sums.reshape(len(names), -1)
        if whole.any():
            wanted.object_bytes = int(sizes[whole][-1])
        if not np.isin(statuses, (_OK, _ABSENT)).all():
            with self._lock:
                self._rests_until = self._clock() + _REST_S
        return whole

    def _rests(self) -> bool:
        with self._lock:
            return self._clock() < self._rests_until
