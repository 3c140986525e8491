"""HOST on a host that the scheduler is not on: as many rows as the scheduler's pool has, of the parts of the ranks
there.

The first rank of that host takes the memory, in a thread of its own, because that may last while the engine serves.
Rows there have no ledger: the scheduler's says what each row holds, on all hosts at once.
"""

from __future__ import annotations

import os
from threading import Thread

from kvbm.assembly import NATIVE_ARENA, RowCopier
from kvbm.core.errors import KvbmError
from kvbm.engines.vllm.metadata import HostShare
from kvbm.pools.host.pool import HostPool

_CLOSE_S = 10.0  # what is not taken by then goes with the process


class HostPart:
    """The memory of one host. Owner thread only.

    Args:
        wanted: the scheduler's share.
        host: which host this is.
    """

    def __init__(self, wanted: HostShare, host: int) -> None:
        self._wanted, self._host = wanted, host
        self._pool: HostPool | None = None
        self._why = ""
        self._is_told = False
        self._thread = Thread(target=self._open, name="kvbm-host", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives none
            self._why = f"host {host} has no HOST: {error}"

    @property
    def is_untold(self) -> bool:
        """Whether somebody still has to `take` it."""
        return not self._is_told

    def take(self) -> tuple[HostShare | None, str]:
        """Once it is there, where it is, or why it is not; before that, and after, neither."""
        if self._is_told or self._thread.is_alive():
            return None, ""
        self._is_told = True
        if self._pool is None:
            return None, self._why
        return self._wanted._replace(
            pid=os.getpid(), fd=self._pool.fd, mapped_bytes=self._pool.mapped_bytes, host=self._host
        ), ""

    def close(self) -> None:
        """Let go of it; who has mapped it keeps it."""
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _open(self) -> None:
        wanted = self._wanted
        row_bytes = wanted.ranks.row_bytes_on(self._host)
        try:
            self._pool = HostPool(wanted.rows, row_bytes, NATIVE_ARENA, RowCopier(0), huge_pages=wanted.huge_pages)
        except (KvbmError, OSError, RuntimeError) as error:
            self._why = f"host {self._host} has no room for HOST: {error}"
