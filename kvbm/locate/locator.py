"""How a manager asks the catalog: trouble is an answer of zero, and nobody waits for one that is away."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvbm.core.answers import MAX_HASHES, FindAnswer, PresenceAnswer
from kvbm.core.errors import ArgumentError, CatalogError, CatalogRefusedError
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.core.questions import checked_place
from kvbm.locate.base import NOTHING_FOUND, FoundElsewhere
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.joined import joined_bits
from kvbm.locate.parts import catalogs_at
from kvbm.safe_log import SafeLog

log = SafeLog()

BACK_OFF_FIRST_S = 0.5
BACK_OFF_MOST_S = 5.0
_UNKNOWN = (403, 404, 405)  # a catalog of an older kvbm has no such question
_OLDER_S = 60.0
A = TypeVar("A")


class HttpLocator:
    """A `Locator` that asks a catalog, or those of all parts. Any thread may call it.

    While the catalog is away nobody waits for it: after a failure it is not asked for a while that doubles up to 5 s.

    Args:
        url, credentials: as those of `catalogs_at`.
        clock: seconds, for the back-off.
        asker: the instance that asks. topology: where it stands, outermost first.
    """

    def __init__(
        self,
        url: str,
        credentials: CatalogCredentials = NO_CREDENTIALS,
        clock: Callable[[], float] = time.monotonic,
        asker: str = "",
        topology: Sequence[str] = (),
    ) -> None:
        self._client = catalogs_at(url, credentials=credentials)
        self._clock = clock
        self._guard = threading.Lock()
        self._back_off_s = 0.0  # 0 while the catalog answers
        self._ask_again_s = 0.0
        self._asker, self._topology = asker, _place(topology)
        self._find_again_s = -math.inf  # before it the catalog is asked as one of an older kvbm

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        """See `Locator.find`."""
        answer = self._ask(partial(self._find, first, instance), namespace, hashes, timeout_s)
        if answer is None:
            return NOTHING_FOUND
        return FoundElsewhere(next((one.depth for one in answer.pools if one.pool == pool), 0), tuple(answer.peers))

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        """See `Locator.claimed`."""
        answer = self._ask(self._presence, namespace, hashes, timeout_s)
        masks = (
            [] if answer is None else [one.bits() for one in answer.holders if (one.name, one.kind) == (pool, "pool")]
        )
        return joined_bits(masks)

    def close(self) -> None:
        """See `Locator.close`."""
        self._client.close()

    def _find(self, first: int, instance: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> FindAnswer:
        if self._clock() >= self._find_again_s:
            begin = min(first, MAX_HASHES)
            try:
                if instance:
                    return self._client.find(
                        namespace,
                        hashes,
                        begin,
                        self._asker,
                        self._topology,
                        timeout_s=timeout_s,
                        instances=[instance],
                    )
                return self._client.find_many(namespace, [hashes], [begin], self._asker, self._topology, timeout_s)[0]
            except CatalogRefusedError as error:
                if error.status not in _UNKNOWN:
                    raise
                self._find_again_s = self._clock() + _OLDER_S
        found = self._client.lookup(namespace, hashes, timeout_s=timeout_s, limit=1)
        return FindAnswer(
            namespace=found.namespace, blocks=found.blocks, pools=found.pools, peers=[], missed=found.missed
        )

    def _presence(self, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> PresenceAnswer:
        return self._client.presence_many(namespace, [hashes], timeout_s, limit=1)[0]  # the binary form

    def _ask(self, ask: Callable[..., A], namespace: NamespaceId, hashes: bytes, timeout_s: float) -> A | None:
        """The answer; None: nobody has given one, or is asked now."""
        if not hashes or (self._back_off_s and self._clock() < self._ask_again_s):
            return None
        try:
            answer = ask(namespace, hashes[: MAX_HASHES * HASH_BYTES], timeout_s=timeout_s)
        except CatalogError as error:
            self._fail(error)
            return None
        self._succeed()
        return answer

    def _fail(self, error: CatalogError) -> None:
        with self._guard:
            is_new = not self._back_off_s
            self._back_off_s = BACK_OFF_FIRST_S if is_new else min(2 * self._back_off_s, BACK_OFF_MOST_S)
            self._ask_again_s = self._clock() + self._back_off_s
        if is_new:
            log.warning("catalog.lost", url=self._client.url, why=str(error))

    def _succeed(self) -> None:
        if not self._back_off_s:
            return
        with self._guard:
            was_away, self._back_off_s = bool(self._back_off_s), 0.0
        if was_away:
            log.info("catalog.found", url=self._client.url)


def _place(topology: Sequence[str]) -> tuple[str, ...]:
    """A place as the catalog takes it; empty where it takes none like that: an engine that starts serves."""
    try:
        return tuple(checked_place(topology))
    except ArgumentError as error:
        log.warning("catalog.place_unsaid", why=str(error), notice="near instances are not asked before others")
        return ()
