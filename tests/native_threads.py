"""A system that gives no native thread, in this process and for a while: as where `ulimit -u` or a container's pids
limit is reached.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NO_STACK_BYTES = 1 << 47  # more than an address space has: pthread_create gives EAGAIN
_PYTHON_STACK_BYTES = 8 << 20  # named for each of Python's own threads, which start as ever
_ATTRIBUTE_BYTES = 64  # at least sizeof(pthread_attr_t)


@contextmanager
def no_native_threads() -> Iterator[None]:
    """Every std::thread that anybody starts is refused with EAGAIN; Python's threads are not.

    Threads that are begun with default attributes get a stack that no address space has room for.
    """
    libc = ctypes.CDLL(None)
    before, none = ctypes.create_string_buffer(_ATTRIBUTE_BYTES), ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    for attribute in (before, none):
        _check(libc.pthread_getattr_default_np(attribute))
    _check(libc.pthread_attr_setstacksize(none, ctypes.c_size_t(_NO_STACK_BYTES)))
    of_python = threading.stack_size(_PYTHON_STACK_BYTES)
    _check(libc.pthread_setattr_default_np(none))
    try:
        yield
    finally:
        _check(libc.pthread_setattr_default_np(before))
        threading.stack_size(of_python)


def _check(error: int) -> None:
    if error:
        raise OSError(error, "a thread's attributes were refused")
