"""Memory that an RDMA device may reach: pinned and mapped by it from here until it is closed."""

from __future__ import annotations

import mmap

import numpy as np

from kvbm.core.errors import VerbsError
from kvbm.verbs.device import Device


class RegisteredMemory:
    """An array that the device reaches by `key`. It keeps the array alive, which must not be unmapped meanwhile.

    Attributes:
        array: the memory, C-contiguous uint8.
        address: of its first byte, in this process.
        key: for queue pairs of this process. remote_key: for queue pairs of others; of use only where they may read.
    """

    def __init__(self, device: Device, array: np.ndarray, is_lent: bool) -> None:
        """Register it.

        Args:
            is_lent: others may READ it, and nobody may write; False: this process's READs may write it, and others
                reach nothing.
        Raises: VerbsError: the system refuses, most often for the limit of locked memory.
        """
        if array.dtype != np.uint8 or not array.flags.c_contiguous or not array.nbytes:
            raise VerbsError(f"memory to register is {array.nbytes} bytes of {array.dtype}; give contiguous uint8")
        enums = device.verbs.enums
        access = enums.IBV_ACCESS_REMOTE_READ if is_lent else enums.IBV_ACCESS_LOCAL_WRITE
        self._error = device.verbs.error
        self.array = array
        self.address = int(array.ctypes.data)
        try:
            self._region = device.verbs.mr.MR(device.domain, array.nbytes, access, address=self.address)
        except self._error as error:
            raise VerbsError(
                f"{array.nbytes} bytes cannot be registered with {device.name}: {error}; raise the limit of locked "
                "memory "
                "(ulimit -l, LimitMEMLOCK)"
            ) from error
        self.key, self.remote_key = int(self._region.lkey), int(self._region.rkey)

    def close(self) -> None:
        """The device reaches it no more. Idempotent. Raises VerbsError: it is still in use; nothing changed."""
        try:
            self._region.close()
        except self._error as error:
            raise VerbsError(f"{self.array.nbytes} bytes are still in use by the device: {error}") from error


def new_memory(size: int) -> np.ndarray:
    """Fresh memory that begins at a page, and lives as long as views of it."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=np.uint8)[:size]
