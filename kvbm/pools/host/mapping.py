"""The HOST pool's memory in another process of this machine: an engine's worker, which copies between it and its own
tensors.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from contextlib import suppress

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.pools.host.pool import register, unregister
from kvbm.safe_log import SafeLog

log = SafeLog()


def map_host(pid: int, fd: int, mapped_bytes: int, pins: bool = True) -> np.ndarray:
    """All bytes of a HOST pool's memory, uint8, to read and to write; in huge pages where the pool's are.

    They stay mapped, also after the process that made them is gone, until the last view of them is.

    Args:
        pid: of the process that has the pool; it may be this one.
        fd: `HostPool.fd` there.
        mapped_bytes: `HostPool.mapped_bytes` there.
        pins: where this process uses CUDA, all of it is registered before this returns; else that is the caller's
            affair (`pinning.py`).
    Raises: PoolError: there is no such memory, it is smaller, or this process may not open it.
    """
    memory = np.frombuffer(_map(pid, fd, mapped_bytes), dtype=np.uint8)
    if not pins:
        return memory
    pinned, notice = register(memory)
    if notice:
        log.warning("pool.opened", tier="HOST", notice=notice)
    if pinned:
        weakref.finalize(memory, unregister, memory.ctypes.data).atexit = False
    return memory


def _map(pid: int, fd: int, mapped_bytes: int) -> mmap.mmap:
    name = f"HOST pool: the memory of process {pid}, descriptor {fd}"
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PoolError(f"{name}, is not there; the process has ended, or this one does not see it (hostPID)") from None
    except OSError as error:
        raise PoolError(
            f"{name}, cannot be opened ({error.strerror}); run both processes as one user, in one container"
        ) from None
    try:
        there = os.fstat(opened)
        if not stat.S_ISREG(there.st_mode) or there.st_size < mapped_bytes or mapped_bytes < 1:
            raise PoolError(f"{name}, has {there.st_size} bytes, {mapped_bytes} are wanted; both need the same kvbm")
        memory = mmap.mmap(opened, mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    except (OSError, ValueError, OverflowError) as error:
        raise PoolError(f"{name}, cannot be mapped ({error}); free memory, or raise the limit of addresses") from None
    finally:
        os.close(opened)
