"""Pages of SGLang's host pool, stored in and brought from the tiers of one block manager.

HOST of ours is where pages pass through: a page that SGLang gives is copied to a row there, with its checksum, and goes
on to NVME and OBJECT by itself; a page that SGLang wants is brought to a row, verified, and copied to SGLang's memory.
SGLang says nothing of what its own memory holds and drops, so in HBM, which is the engine's, a page counts as held only
while it is copied to HOST: an event begins a block's life in the tier of who computed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.backend import DerivedHashes
from kvbm.core.errors import PoolError
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, SequenceHash, Tier
from kvbm.engines.sglang.host_pages import HostPages
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.pools.host.pool import HostPool
from kvbm.safe_log import SafeLog

log = SafeLog()

MOST_PAGES = 128  # of one call of SGLang's
_NOWHERE = 0xFF  # as `EngineHbmManager.holders`
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0001, 0.002


class RowChecksums(Protocol):
    """CRC-32C of each row that `at` names, u32, as `RowCopies.checksum_rows`."""

    def __call__(self, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray: ...


class PageTiers:
    """See the module. Any thread; SGLang has one that asks, one that reads and one that writes.

    Args:
        manager: opened for `namespace`; closed with this.
        namespace: of the pool's pages.
        root: what its hashes are derived from.
        checksums: of rows of HOST.
        wait_s: the longest that a call waits for bytes, or for room.

    Attributes:
        corrupt_pages: rows of HOST whose bytes were not those that had been put there.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        namespace: Namespace,
        root: SequenceHash,
        pages: HostPages,
        derive: DerivedHashes,
        checksums: RowChecksums,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host = manager.pools.slots[Tier.HOST]
        assert isinstance(host, HostPool)
        self.manager, self.namespace = manager, namespace
        self.corrupt_pages = 0
        self._root, self._pages, self._derive, self._checksums = root, pages, derive, checksums
        self._host, self._wait_s, self._clock = host, wait_s, clock
        self._most = max(
            1, min(MOST_PAGES, host.slots // 4)
        )  # pages at a time: a reader and a writer fit beside others
        self._unsettled = 0  # pages stored since nothing waited to be offloaded; the writer's thread alone

    def hashes(self, keys: Sequence[str]) -> bytes:
        """Our hashes of SGLang's keys, packed."""
        return self._derive(self._root, [key.encode() for key in keys])

    def exists(self, keys: Sequence[str]) -> int:
        """How many pages, from the first on, some tier seems to hold."""
        hashes = self.hashes(keys)
        depth = _leading(self._present(hashes))
        if depth < len(keys) and self.manager.pools.peers is not None:
            depth += self._brought_by_peers(hashes, depth)
        return depth

    def present(self, keys: Sequence[str]) -> list[bool]:
        """For each page whether some tier of this instance, the pod or the object pool seems to hold it."""
        return [bool(held) for held in self._present(self.hashes(keys))]

    def get(self, keys: Sequence[str], host_indices: object) -> list[bool]:
        """Fill SGLang's pages; for each whether its bytes are there, verified. Behind a miss all are misses.

        Raises: LayoutError: indices that are no pages; nothing was written.
        """
        hashes, pages = self.hashes(keys), self._pages.numbers(host_indices, len(keys))
        until_s, done = self._clock() + self._wait_s, 0
        while done < len(keys):
            end = min(done + self._most, len(keys))
            got = self._get(hashes[done * HASH_BYTES : end * HASH_BYTES], pages[done:end], until_s)
            done += got
            if done < end:
                break
        return [at < done for at in range(len(keys))]

    def set(self, keys: Sequence[str], host_indices: object, before: Sequence[str] = ()) -> list[bool]:
        """Store SGLang's pages; for each whether some tier holds it now. Behind one that has no room none is tried.

        Args:
            before: keys of the pages before these in their chain; empty where SGLang does not tell.
        Raises: LayoutError: indices that are no pages; nothing was stored.
        """
        hashes, pages = self.hashes(keys), self._pages.numbers(host_indices, len(keys))
        start = len(before)
        parent = self.hashes(before[-1:]) if before else NO_PARENT
        until_s, done = self._clock() + self._wait_s, 0
        while done < len(keys):
            end = min(done + self._most, len(keys))
            run = _Run(parent, start + done, hashes[done * HASH_BYTES : end * HASH_BYTES], pages[done:end])
            stored = self._set(run, until_s)
            done += stored
            if done < end:
                break
            parent = run.hashes[-HASH_BYTES:]
        return [at < done for at in range(len(keys))]

    def clear(self) -> int:
        """Empty this instance's own tiers; objects, and what other instances hold, stay. How many pages they held."""
        return self.manager.clear()

    def close(self) -> None:
        """Close the manager. Idempotent; no call may be under way."""
        self.manager.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _present(self, hashes: bytes) -> np.ndarray:
        held = self._held(hashes)
        depth = _leading(held)
        if depth < len(held) and self.manager.looks_beyond:
            held = held.copy()
            held[depth:] |= self._found_beyond(hashes[depth * HASH_BYTES :])
        return held

    def _found_beyond(self, hashes: bytes) -> np.ndarray:
        """For each page whether the pod or the object pool is said to have it."""
        nobody = np.zeros(len(hashes) // HASH_BYTES, dtype=bool)
        finding = self.manager.begin_find([(self.namespace.id, hashes)])
        if finding is None:
            return nobody
        nap_s = _SHORTEST_NAP_S
        while not finding.done:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        found = finding.result()
        return np.frombuffer(found[0], dtype=np.uint8) != _NOWHERE if found else nobody

    def _brought_by_peers(self, hashes: bytes, depth: int) -> int:
        """Pages that other instances lend, behind `depth`: they are brought to HOST, since only that proves them."""
        end = min(len(hashes) // HASH_BYTES, depth + self._most)
        bringing = self.manager.begin_acquire(self.namespace.id, hashes[: end * HASH_BYTES], self._wait_s, depth)
        try:
            self._wait_for(bringing.poll)
            return bringing.depth
        finally:
            bringing.release()

    def _get(self, hashes: bytes, pages: np.ndarray, until_s: float) -> int:
        """Pages filled, from the first on."""
        bringing = self.manager.begin_acquire(self.namespace.id, hashes, max(0.0, until_s - self._clock()))
        try:
            self._wait_for(bringing.poll)
            slots = np.array(bringing.slots, dtype=np.int64)
            rows = self._rows()
            good = _leading(self._checksums(rows, slots) == self._host.checksums(bringing.slots))
            self._pages.scatter(pages[:good], rows, slots[:good])
        finally:
            bringing.release()
        if good < len(slots):
            self._withdraw(hashes[good * HASH_BYTES : (good + 1) * HASH_BYTES])
        return good

    def _withdraw(self, hashes: bytes) -> None:
        """What lies in HOST is not what was put there: it is held no more."""
        self.corrupt_pages += 1
        self.manager.evict(Tier.HOST, hashes, EvictReason.CORRUPT)
        log.warning(
            "page.corrupt", tier="HOST", block=hashes[:4].hex(), notice="it is a miss; look at this host's memory"
        )

    def _set(self, run: _Run, until_s: float) -> int:
        """Pages that are stored, from the first on."""
        if all(self._held(run.hashes)):
            return len(run.pages)
        if not self._has_settled(len(run.pages), until_s):
            return 0
        self.manager.engine_stored(self.namespace.id, run.parent, run.start, run.hashes)
        try:
            nap_s = _SHORTEST_NAP_S
            while True:
                store = self.manager.begin_store(self.namespace.id, run.parent, run.start, run.hashes)
                if store is not None:
                    self._fill(store, run.pages)
                held = self._held(run.hashes)
                if all(held) or self._clock() >= until_s:
                    return _leading(held)
                if store is None:  # HOST is full of what is pinned, or another call brings the page
                    time.sleep(nap_s)
                    nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        finally:
            self.manager.engine_removed(run.hashes)

    def _has_settled(self, pages: int, until_s: float) -> bool:
        """Whether HOST has room for pages beside those that have to go on to what is colder, after some waiting.

        A page that is not stored is a miss later; one that HOST gave up on its way would be one that SGLang was told is
        there.
        """
        if self._unsettled + pages > self._host.slots // 2:
            if not self.manager.settle(max(0.0, until_s - self._clock())):
                return False
            self._unsettled = 0
        self._unsettled += pages
        return True

    def _fill(self, store: Store, pages: np.ndarray) -> None:
        """Copy pages to the rows of a store, and end it."""
        count = len(store.slots)
        arrived, sums = [False] * count, np.zeros(count, dtype=np.uint32)
        try:
            sums = self._pages.gather(pages[store.at], self._rows(), np.array(store.slots, dtype=np.int64))
            arrived = [True] * count
        finally:
            self.manager.end_store(store, arrived, sums)

    def _held(self, hashes: bytes) -> np.ndarray:
        held: np.ndarray = np.frombuffer(self.manager.holders(hashes, self.namespace.id), dtype=np.uint8) != _NOWHERE
        return held

    def _rows(self) -> np.ndarray:
        rows = self._host.memory
        if rows is None:
            raise PoolError("HOST pool: it is closed")
        return rows

    def _wait_for(self, is_over: Callable[[], bool]) -> None:
        """Wait for what ends in time by itself."""
        nap_s = _SHORTEST_NAP_S
        while not is_over():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)


class _Run(NamedTuple):
    """Consecutive pages of a chain.

    Attributes:
        parent: our hash of the page before.
        start: position of the first page.
        hashes: packed. pages: where each lies in SGLang's pool.
    """

    parent: bytes
    start: int
    hashes: bytes
    pages: np.ndarray


def _leading(held: np.ndarray) -> int:
    """How many are true, from the first on."""
    missing = np.flatnonzero(~held)
    return int(missing[0]) if len(missing) else len(held)
