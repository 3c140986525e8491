"""Registers HOST's memory with CUDA piece by piece, within a bound on time, so that a GPU copies to and from it without
a detour.

CUDA walks over every page, and whoever calls it meanwhile may wait. So it belongs to an engine's start, in a thread
beside it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

from kvbm.safe_log import SafeLog

log = SafeLog()

PIECE_BYTES = 1 << 30
_LONGEST_PIECE_BYTES = 4 << 30
_PAGES = (2 << 20, 4 << 10)  # what pieces are multiples of, where rows let them
_REPORT_S = 5.0  # between two lines about how far it is
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Registrar(Protocol):
    """What of CUDA is asked, from one thread."""

    def begin(self) -> None:
        """Before anything else, in that thread. Raises RuntimeError: CUDA cannot be used."""

    def register(self, address: int, size: int) -> str:
        """Register memory; "" or why not."""

    def unregister(self, address: int) -> None:
        """Take back what was registered from this address on."""


class CudaRegistrar:
    """CUDA's, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """As `Registrar.begin`.

        An engine may capture graphs meanwhile, which calls of other threads would end: unless they are relaxed.
        """
        import torch

        torch.cuda.set_device(self._device)
        mode = ctypes.c_int(_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def register(self, address: int, size: int) -> str:
        """As `Registrar.register`."""
        import torch

        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
        except RuntimeError as refusal:
            return str(refusal)
        return f"cudaHostRegister answers {error}" if error else ""

    def unregister(self, address: int) -> None:
        """As `Registrar.unregister`."""
        import torch

        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Pinning:
    """Memory that is being registered, or is. One thread runs it; any may ask.

    Attributes:
        pinned_bytes: registered so far.
        why: in words, why not all of it was; "" while it goes on, and when it was.
    """

    def __init__(
        self,
        memory: np.ndarray,
        row_bytes: int,
        registrar: Registrar,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know where the memory is; nothing is registered yet. It stays the caller's, who keeps it while `run` does.

        Args:
            memory: uint8, from a page's beginning on.
            row_bytes: no row lies in two pieces, because one copy must not.
            seconds: after these no further piece is begun.
        """
        self.pinned_bytes = 0
        self.why = ""
        self._begin, self._bytes = memory.ctypes.data, memory.nbytes
        self._piece_bytes = piece_bytes(row_bytes, memory.nbytes)
        self._registrar, self._seconds, self._clock = registrar, seconds, clock
        self._pieces: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether all of it is registered."""
        return self.pinned_bytes == self._bytes

    def run(self, is_wanted: Callable[[], bool]) -> None:
        """Register piece after piece, until `is_wanted` is false.

        What cannot be registered is said once, and left as it is.
        """
        began_s = report_s = self._clock()
        try:
            self._registrar.begin()
        except (RuntimeError, OSError, AttributeError) as error:  # no driver, or one without the call
            self.why = str(error)
        begin, wanted_bytes = self._begin, self._bytes
        while not self.why and not self.is_whole and is_wanted():
            if (now_s := self._clock()) - began_s >= self._seconds:
                self.why = f"it was not over after {self._seconds:g} s (pools.host.pin_s)"
                break
            if now_s - report_s >= _REPORT_S:
                report_s = now_s
                log.info("host.pinning", bytes=self.pinned_bytes, of=wanted_bytes, elapsed_s=round(now_s - began_s, 1))
            size = min(self._piece_bytes, wanted_bytes - self.pinned_bytes)
            self.why = self._registrar.register(begin + self.pinned_bytes, size)
            if not self.why:
                self._pieces.append(begin + self.pinned_bytes)
                self.pinned_bytes += size
        elapsed_s = round(self._clock() - began_s, 1)
        if self.is_whole:
            log.info("host.pinned", bytes=wanted_bytes, pieces=len(self._pieces), elapsed_s=elapsed_s)
        elif self.why:
            log.warning(
                "host.unpinned",
                bytes=self.pinned_bytes,
                of=wanted_bytes,
                why=self.why,
                elapsed_s=elapsed_s,
                notice="copies to and from the GPU take a detour; raise the limit of locked memory (ulimit -l) or "
                "pools.host.pin_s",
            )

    def undo(self) -> None:
        """Take back all that was registered. Idempotent; `run` must be over."""
        while self._pieces:
            self._registrar.unregister(self._pieces.pop())
        self.pinned_bytes = 0


def piece_bytes(row_bytes: int, wanted_bytes: int) -> int:
    """How much is registered at a time: whole pages and whole rows, about a GiB; all of it where those do not meet
    before 4 GiB.
    """
    for page in _PAGES:
        step = math.lcm(row_bytes, page)
        if step <= _LONGEST_PIECE_BYTES:
            return min(wanted_bytes, -(-PIECE_BYTES // step) * step)
    return wanted_bytes
