"""Keeps this instance's claims of the object pool true: it withdraws those whose objects turn out to be gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvbm.core.events import MAX_RUN_BLOCKS, EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier, split_hashes
from kvbm.manager.objects.claims import Claimed, ObjectClaims
from kvbm.manager.objects.object_groups import groups_of
from kvbm.manager.objects.own_claims import OwnClaims
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.pools.base import ObjectPool

RUN_BYTES = MAX_RUN_BLOCKS * HASH_BYTES
_IDLE_LOOK_S = 1.0  # between two looks while nothing is offloaded
_IDLE_LOOKS = 512  # objects
_SLOW_LOOK_S, _REST_S = 0.5, 30.0  # a pool that took so long is not asked again for a while


class ClaimWatch:
    """See the module. It looks for itself only where the pool forgets, which drops objects and tells nobody.

    Args:
        pool: the object pool; None: there is none.
        own: what is not put again.
    """

    def __init__(
        self, stream: LedgerStream, pool: ObjectPool | None, own: OwnClaims, clock: Callable[[], float]
    ) -> None:
        self._stream, self._pool, self._own, self._clock = stream, pool, own, clock
        self._claims = ObjectClaims() if pool is not None and pool.forgets else None
        self._look_s = self._idle_look_s = 0.0  # not before; not before while nothing is offloaded

    @property
    def pool_forgets(self) -> bool:
        """Whether an object that is gone is nothing unusual."""
        return self._claims is not None

    def seen_locked(self, namespace: NamespaceId, objects: Iterable[bytes]) -> None:
        """The object pool had these objects just now."""
        if self._claims is not None:
            self._claims.add(Claimed(namespace, hashes) for hashes in objects)

    def lost_locked(self, namespace: NamespaceId, objects: bytes, reason: EvictReason) -> None:
        """Withdraw the claims of whole objects, packed, that could not be read."""
        assert self._pool is not None
        self._own.drop(objects)
        self._stream.ledger.forget(Tier.OBJECT, namespace, objects, reason)
        if self._claims is not None:
            self._claims.drop(Claimed(namespace, hashes) for hashes in groups_of(objects, self._pool.blocks))

    def look(self, at_least: int = 0) -> None:
        """Ask the pool for objects whose turn it is, and for so many though nothing was claimed. Outside the lock."""
        pool, begun_s = self._pool, self._clock()
        if self._claims is None or pool is None or begun_s < self._look_s:
            return
        due: dict[NamespaceId, list[Claimed]] = {}
        with self._stream.lock:
            for one in () if self._stream.closing else self._claims.due(at_least):
                due.setdefault(one.namespace, []).append(one)
        for namespace, objects in due.items():
            is_gone = pool.absent(namespace, [one.last for one in objects])
            gone = [one for one, absent in zip(objects, is_gone, strict=True) if absent]
            if gone:
                self._withdraw(self._claims, namespace, gone)
        if self._clock() - begun_s > _SLOW_LOOK_S:
            self._look_s = self._clock() + _REST_S  # the threads are for copies

    def look_idle(self) -> None:
        """The same while nothing is offloaded: a few objects, now and then."""
        if self._claims is not None and self._clock() >= self._idle_look_s:
            self._idle_look_s = self._clock() + _IDLE_LOOK_S
            self.look(_IDLE_LOOKS)

    def _withdraw(self, claims: ObjectClaims, namespace: NamespaceId, objects: Sequence[Claimed]) -> None:
        """Say that the object pool has dropped these objects."""
        hashes = b"".join(dict.fromkeys(split_hashes(b"".join(one.hashes for one in objects))))
        with self._stream.lock:
            if self._stream.ended:
                return
            claims.drop(objects)
            self._own.drop(hashes)
            for at in range(0, len(hashes), RUN_BYTES):
                self._stream.ledger.forget(Tier.OBJECT, namespace, hashes[at : at + RUN_BYTES], EvictReason.MISSING)
        self._stream.recorded()
