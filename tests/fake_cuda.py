"""NVIDIA's driver standing in (native/tests/fake_cuda.cpp): compiled once, loaded by native rings, made slow, broken or
dead from here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

import numpy as np

from kvbm import _native
from kvbm.pools.hbm.rings import NewRing

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "native" / "tests" / "fake_cuda.cpp", ROOT / "native" / "cuda" / "ring_kernel.cu"


class FakeCuda:
    """The driver. Its state is the process's: one test at a time uses it, and begins with `reset`."""

    def __init__(self) -> None:
        self.path = _compiled()
        self._library = ctypes.CDLL(str(self.path))
        self._library.fake_cuda_count.restype = self._library.fake_cuda_live.restype = ctypes.c_longlong
        self._library.fake_cuda_log.restype = ctypes.c_char_p
        self.reset()
        context = ctypes.c_void_p()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._context = context

    def reset(self) -> None:
        """A device that works."""
        self._library.fake_cuda_reset()

    def set(self, name: str, value: int) -> None:
        """Such as "held", "capturing", "die_after": see the source."""
        self._library.fake_cuda_set(name.encode(), ctypes.c_longlong(value))

    def refuse(self, call: str, which: int, result: int) -> None:
        """The coming call of this number answers so; -1: each does, 0: none."""
        self._library.fake_cuda_fail(call.encode(), ctypes.c_longlong(which), result)

    def count(self, call: str) -> int:
        """How often it was called."""
        return int(self._library.fake_cuda_count(call.encode()))

    @property
    def log(self) -> list[str]:
        """What the device has done."""
        return self._library.fake_cuda_log().decode().splitlines()  # type: ignore[no-any-return]

    def pin(self, rows: np.ndarray) -> None:
        """Register memory, instead of what was."""
        self.set("rows begin", rows.ctypes.data)
        self.set("rows end", rows.ctypes.data + rows.nbytes)

    def stream(self) -> int:
        """A new stream of the engine's."""
        made = ctypes.c_void_p()
        self._in_context(self._library.cuStreamCreateWithPriority, ctypes.byref(made), 1, 0)
        return made.value or 0

    def event(self, stream: int) -> int:
        """A new event, behind what is on a stream."""
        made = ctypes.c_void_p()
        self._in_context(self._library.cuEventCreate, ctypes.byref(made), 2)
        self._in_context(self._library.cuEventRecord, made, ctypes.c_void_p(stream))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Record an event again."""
        self._in_context(self._library.cuEventRecord, ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def live(self) -> int:
        """Memory, events, streams and modules that nobody has freed."""
        return int(self._library.fake_cuda_live())

    def block(self, stream: int) -> None:
        """The engine computes there, until `unblock`."""
        self._library.fake_cuda_block(ctypes.c_void_p(stream))

    def unblock(self) -> None:
        """All that the engine computes is over."""
        self._library.fake_cuda_unblock()

    def rings(self, programs: int = 0, lot_bytes: int = 16 << 20) -> NewRing:
        """Rings over this driver."""
        copier = _native.RowCopier(1)

        def made(
            addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int, device: int, ring_bytes: int
        ) -> _native.DeviceRing:
            return _native.DeviceRing(
                addresses, strides, sizes, slots, copier, device, ring_bytes, lot_bytes, programs, str(self.path)
            )

        return made

    def _in_context(self, call: object, *arguments: object) -> None:
        left = ctypes.c_void_p()
        self._library.cuCtxPushCurrent_v2(self._context)
        answer = call(*arguments)  # type: ignore[operator]
        self._library.cuCtxPopCurrent_v2(ctypes.byref(left))
        assert answer == 0


def _compiled() -> Path:
    words = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    library = ROOT / "build" / "fake-cuda" / f"libcuda-{words}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCES[0])]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except FileNotFoundError:
            raise RuntimeError("no C++ compiler here; apt install g++") from None
        assert ran.returncode == 0, ran.stderr
        made.replace(library)
    return library
