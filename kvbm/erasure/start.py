"""The start of an instance with regard to erasures: what it leaves out of what an earlier process left, and the watch
that it begins.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, split_hashes
from kvbm.core.results import Recovered
from kvbm.erasure.instance import DONE_FILE, DoneErasures, InstanceErasures
from kvbm.erasure.manager import ErasableManager
from kvbm.erasure.record import Matcher, Record
from kvbm.erasure.watch import ErasureWatch, InstanceErasureLog, WatchOptions
from kvbm.manager.base import ManagerParts
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.safe_log import SafeLog

log = SafeLog()


class StartErasures:
    """What a start leaves out of what the journal says NVME has kept: all that is meant by erasures this instance has
    not done.

    Blocks of namespaces that the engine does not name at its start are left out, too: nobody here can tell whose they
    are.

    Args:
        tenants: the namespaces the engine names, and whose each is.
    """

    def __init__(self, record: Record, done: DoneErasures, tenants: dict[NamespaceId, str]) -> None:
        self.left_out = 0
        self._tenants = tenants
        self._matchers = [Matcher(one) for one in record.erasures if one.number not in done.at_ns]

    def keeps(self, one: Recovered) -> bool:
        """Whether a block may be held and served."""
        tenant = self._tenants.get(one.namespace)
        for matcher in self._matchers:
            is_meant = tenant is None or matcher.namespace(one.namespace, tenant)
            if is_meant and matcher.block(one.hash):
                self.left_out += 1
                return False
        return True

    def keeps_run(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        """The same, for each block of a run of one namespace."""
        if not self._matchers:
            return np.ones(len(hashes) // HASH_BYTES, dtype=bool)
        return np.array([self.keeps(Recovered(one, namespace, 0)) for one in split_hashes(hashes)], dtype=bool)


class WatchedErasures:
    """What a manager has to do with erasures: what its start leaves out, and the thread that hears of others.

    Args:
        record: what is to be erased; None: the stream did not say.
        revisioned: the namespaces the engine names, and whose each is.
        folder: where the instance keeps its journal; None: it has none.
    """

    def __init__(
        self, instance: InstanceId, record: Record | None, revisioned: RevisionedNamespaces, folder: Path | None
    ) -> None:
        self._instance, self._record, self._revisioned = instance, record, revisioned
        self._done = DoneErasures(None if folder is None else folder / DONE_FILE)
        self._start = StartErasures(record or Record(), self._done, revisioned.tenants)
        self._recovered = 0

    def kept(self, found: Sequence[Recovered]) -> list[Recovered]:
        """What of the blocks that an earlier process left may be held."""
        kept = [one for one in found if self.keeps(one)]
        self._recovered = len(kept)
        if self._start.left_out:
            log.info("erasure.left_out", instance=self._instance, blocks=self._start.left_out)
        return kept

    def keeps(self, one: Recovered) -> bool:
        """Whether a block that an earlier process left may be held."""
        return not self._revisioned.must_not(one.namespace) and self._start.keeps(one)

    def keeps_run(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        """The same, for each block of a run of one namespace."""
        if self._revisioned.must_not(namespace):
            return np.zeros(len(hashes) // HASH_BYTES, dtype=bool)
        return self._start.keeps_run(namespace, hashes)

    def expect_more(self) -> None:
        """Blocks of earlier processes come back later, too."""
        self._recovered += 1

    def watching(
        self, parts: ManagerParts, connect: Callable[[], Awaitable[InstanceErasureLog]], options: WatchOptions
    ) -> ErasureWatch:
        """What watches the record once it is started; `connect` opens the log, and raises StreamError."""
        manager = ErasableManager(parts)
        erasures = InstanceErasures(manager, self._done, self._record, time.time_ns)
        is_known = self._record is not None or not self._recovered or not options.hold_s
        return ErasureWatch(self._instance, erasures, connect, manager.hold_back, is_known, options)
