"""Connecting a queue pair without the GIL, which pyverbs keeps in every call: on Ethernet the kernel takes a second to
find that nobody is there.

pyverbs tells nobody where its C structs lie: right behind the part that its objects inherit. So what is found there is
first held to what pyverbs says of the object, and is read through the kernel, which answers a wrong address with an
error. Where anything differs, nothing is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from typing import Any

from kvbm.core.errors import VerbsError

_POINTER_BYTES = 8
# struct ibv_qp: context, user's word, pd, send cq, recv cq, srq; handle, number, state, type
_PAIR = struct.Struct("<6Q4I")
# struct ibv_qp_attr begins: state, current state, mtu, mig state, qkey, rq psn, sq psn, destination
_ATTRIBUTES = struct.Struct("<8I")
_ATTRIBUTES_BYTES = 144
_RELIABLE = 2  # IBV_QPT_RC


def modify(pair: Any, attributes: Any, parts: int) -> None:
    """`pair.modify(attributes, parts)` of pyverbs, without the GIL: nobody may destroy the queue pair meanwhile.

    Raises: VerbsError: the system refuses, or this pyverbs is made otherwise than known.
    """
    trouble = _library()(_pair_at(pair), _attributes_at(attributes), parts)
    if trouble:
        raise VerbsError(f"{os.strerror(trouble)} (errno {trouble})")


@functools.cache
def _library() -> Callable[[int, int, int], int]:
    try:
        call = ctypes.CDLL("libibverbs.so.1").ibv_modify_qp
    except (OSError, AttributeError) as error:
        raise VerbsError(f"libibverbs cannot be used: {error}") from None
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    found: Callable[[int, int, int], int] = call
    return found


def _pair_at(pair: Any) -> int:
    """Where the struct ibv_qp of a reliable queue pair lies: its pointer comes right behind what `QP` inherits."""
    place = _own_part(pair, "QP")
    (address,) = struct.unpack("<Q", ctypes.string_at(place, _POINTER_BYTES))
    context, _, domain, send_queue, receive_queue, srq, _, number, _, kind = _PAIR.unpack(_read(address, _PAIR.size))
    is_one = number == pair.qp_num and kind == _RELIABLE and context and domain and not srq
    if not is_one or not send_queue or send_queue != receive_queue:
        raise _strange(f"no queue pair {pair.qp_num} lies where one should")
    return int(address)


def _attributes_at(attributes: Any) -> int:
    """Where the struct ibv_qp_attr lies: it is all that `QPAttr` has beside what it inherits."""
    place = _own_part(attributes, "QPAttr")
    if id(attributes) + type(attributes).__basicsize__ - place != _ATTRIBUTES_BYTES:
        raise _strange(f"attributes do not have {_ATTRIBUTES_BYTES} bytes")
    found = _ATTRIBUTES.unpack(ctypes.string_at(place, _ATTRIBUTES.size))
    said = (attributes.qp_state, attributes.path_mtu, attributes.rq_psn, attributes.sq_psn, attributes.dest_qp_num)
    if said != (found[0], found[2], found[5], found[6], found[7]):
        raise _strange(f"attributes {said} lie as {found}")
    return place


def _own_part(one: Any, name: str) -> int:
    """Where an object's own part begins, behind what its class inherits."""
    kind = type(one)
    if kind.__name__ != name or not kind.__base__ or kind.__basicsize__ < kind.__base__.__basicsize__ + _POINTER_BYTES:
        raise _strange(f"a {kind.__name__} is no {name} of its own")
    return id(one) + int(kind.__base__.__basicsize__)


def _read(address: int, size: int) -> bytes:
    """Bytes of this process, from an address that may be none: no write to a pipe takes what cannot be read."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        write = ctypes.CDLL(None).write
        write.argtypes, write.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_ssize_t
        if write(writing, address, size) != size:
            raise _strange("no queue pair lies where one should")
        return os.read(reading, size)
    finally:
        os.close(reading)
        os.close(writing)


def _strange(what: str) -> VerbsError:
    return VerbsError(f"this pyverbs cannot be used: {what}")
