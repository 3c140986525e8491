"""Whether this process may use io_uring: set one up, send a no-op through it, register a buffer.

Run as a script; prints JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture of Linux
# struct io_uring_params; the two 64-bit addresses at the end of each part as pairs
_PARAMS = struct.Struct("=7I3I 10I 10I")
_SQES_AT = 0x10000000
_CQ_AT = 0x8000000
_SINGLE_MMAP = 1
_GET_EVENTS = 1
_REGISTER_BUFFERS = 0
_MARK = 0x6B76626D
_REGISTERED_BYTES = 1 << 20


def probe() -> dict[str, Any]:
    """What works, as far as it goes: `setup`, `nop`, `register` are "" or the name of an error;

    `disabled` is the sysctl or -1.
    """
    found: dict[str, Any] = {"setup": "", "nop": "", "register": "", "disabled": _disabled()}
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        call = libc.syscall
    except (OSError, AttributeError):
        return found | {"setup": "ENOSYS"}
    call.restype = ctypes.c_long

    def system_call(number: int, *arguments: Any) -> int:
        done = int(call(ctypes.c_long(number), *arguments))
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return done

    params = ctypes.create_string_buffer(_PARAMS.size)
    try:
        ring = system_call(_SETUP, ctypes.c_long(2), params)
    except OSError as error:
        return found | {"setup": _name(error)}
    try:
        try:
            found["nop"] = _nop(ring, _PARAMS.unpack(params.raw), system_call)
        except OSError as error:
            found["nop"] = _name(error)
        try:
            with mmap.mmap(-1, _REGISTERED_BYTES) as memory:
                address = ctypes.c_char.from_buffer(memory)
                vector = struct.pack("=QQ", ctypes.addressof(address), _REGISTERED_BYTES)
                try:
                    system_call(
                        _REGISTER, ctypes.c_long(ring), ctypes.c_long(_REGISTER_BUFFERS), vector, ctypes.c_long(1)
                    )
                finally:
                    del address
        except OSError as error:
            found["register"] = _name(error)
    finally:
        os.close(ring)
    return found


def _nop(ring: int, params: tuple[int, ...], system_call: Any) -> str:
    sq_entries, cq_entries, features = params[0], params[1], params[5]
    _, sq_tail, sq_mask, _, _, _, sq_array = params[10:17]
    cq_head, cq_tail, cq_mask, _, _, cqes = params[20:26]
    sq_bytes, cq_bytes = sq_array + 4 * sq_entries, cqes + 16 * cq_entries
    shared = bool(features & _SINGLE_MMAP)
    sq = mmap.mmap(ring, max(sq_bytes, cq_bytes) if shared else sq_bytes)
    cq = sq if shared else mmap.mmap(ring, cq_bytes, offset=_CQ_AT)
    sqes = mmap.mmap(ring, 64 * sq_entries, offset=_SQES_AT)
    try:
        tail = _u32(sq, sq_tail)
        at = tail & _u32(sq, sq_mask)
        sqes[64 * at : 64 * at + 64] = struct.pack("=32xQ24x", _MARK)  # operation 0 is the no-op
        struct.pack_into("=I", sq, sq_array + 4 * at, at)
        struct.pack_into("=I", sq, sq_tail, (tail + 1) & 0xFFFFFFFF)
        flags = ctypes.c_long(_GET_EVENTS)
        system_call(_ENTER, ctypes.c_long(ring), ctypes.c_long(1), ctypes.c_long(1), flags, None, ctypes.c_long(0))
        head = _u32(cq, cq_head)
        if head == _u32(cq, cq_tail):
            return "no completion"
        mark, result = struct.unpack_from("=Qi", cq, cqes + 16 * (head & _u32(cq, cq_mask)))
        return "" if (mark, result) == (_MARK, 0) else f"completion {mark:x} with {result}"
    finally:
        for mapped in {id(sq): sq, id(cq): cq, id(sqes): sqes}.values():
            mapped.close()


def _u32(mapped: mmap.mmap, at: int) -> int:
    return int.from_bytes(mapped[at : at + 4], "little")


def _disabled() -> int:
    try:
        return int(Path("/proc/sys/kernel/io_uring_disabled").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


if __name__ == "__main__":
    print(json.dumps(probe()))
