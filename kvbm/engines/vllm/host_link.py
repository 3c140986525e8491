"""HOST in a rank's process: found, mapped and registered with CUDA in a thread beside the engine's start, never in a
step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import msgspec
import numpy as np

from kvbm.core.errors import KvbmError
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import HostShare
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pinning import Pinning, Registrar
from kvbm.safe_log import SafeLog

log = SafeLog()

_WORD = "host"
_WORD_S = 3600.0  # for the scheduler's word: an engine's start, with all the graphs it captures
_FIND_S = 5.0  # the scheduler has said where HOST is by the time anybody waits for it
_LAST_PIECE_S = 10.0  # beyond the bound, for the piece under way
_CLOSING_S = 30.0


def leave_host(meeting: Meeting, share: HostShare, pin_s: float) -> None:
    """Say to all ranks where HOST is, and how long they may take to register it.

    Raises PoolError: it cannot be said.
    """
    meeting.leave(_WORD, {"share": share, "pin_s": pin_s})


def forget_host(meeting: Meeting) -> None:
    """Take away what an engine before this one has said. Raises PoolError: it stays."""
    meeting.forget(_WORD)


class HostLink:
    """One rank's view of HOST. Owner thread only; its own thread maps and registers.

    Args:
        new_registrar: CUDA's part; None: this rank's tensors are on no GPU, and nothing is registered.
    """

    def __init__(self, meeting: Meeting, new_registrar: Callable[[], Registrar] | None) -> None:
        """Begin to wait for the scheduler's word."""
        self._meeting, self._new_registrar = meeting, new_registrar
        self._closed, self._mapped, self._over = threading.Event(), threading.Event(), threading.Event()
        self._is_late = threading.Event()  # a plan has come first: there is nothing to wait for any more
        self._share: HostShare | None = None
        self._memory: np.ndarray | None = None
        self._pin_s = 0.0
        self._thread = threading.Thread(target=self._work, name="kvbm-host", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives none
            self._over.set()
            _warn_not_found(error)

    def settle(self) -> bool:
        """Wait until HOST is as it will be, in bounded time; whether it is.

        The engine's start waits here, so that no request does.
        """
        if self._thread.ident is None:
            return False
        if not self._mapped.wait(_FIND_S):
            log.warning(
                "host.not_found",
                waited_s=_FIND_S,
                notice="it is mapped at the first copy, and not registered with CUDA",
            )
            return False
        if not self._over.wait(self._pin_s + _LAST_PIECE_S):
            log.warning(
                "host.unpinned", waited_s=self._pin_s, why="CUDA does not answer", notice="copies take a detour"
            )
            return False
        return True

    def memory_of(self, share: HostShare) -> np.ndarray:
        """The memory that a plan names; mapped now, and not registered, where the thread has another or none yet.

        Raises PoolError.
        """
        if self._mapped.is_set() and self._share == share and self._memory is not None:
            return self._memory
        self._is_late.set()
        return map_host(share.pid, share.fd, share.mapped_bytes, pins=False)

    def close(self) -> None:
        """End the thread and let go of HOST.

        Idempotent. It stays registered until its last view is gone: a copy that never ends has one.
        """
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSING_S)
        self._memory = None

    def _work(self) -> None:
        try:
            word = self._meeting.wait(_WORD, lambda: self._closed.is_set() or self._is_late.is_set(), _WORD_S)
            if word is None:
                return
            share = msgspec.convert(word["share"], HostShare)
            self._pin_s = float(word["pin_s"])
            memory = self._memory = map_host(share.pid, share.fd, share.mapped_bytes, pins=False)
            self._share = share
            self._mapped.set()
            if self._new_registrar is not None:
                pinning = Pinning(memory, share.row_bytes, self._new_registrar(), self._pin_s)
                weakref.finalize(memory, pinning.undo).atexit = False
                pinning.run(lambda: not self._closed.is_set())
        except (KvbmError, RuntimeError, OSError, TypeError, KeyError, ValueError, msgspec.ValidationError) as error:
            _warn_not_found(error)
        finally:
            self._over.set()


def _warn_not_found(error: Exception) -> None:
    log.warning("host.not_found", why=str(error), notice="it is mapped at the first copy, and not registered with CUDA")
