"""The two messages by which an RDMA connection is made: bytes, bounds, and what a stranger can send."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.errors import PeerWireError
from kvbm.transport.rdma_hello import (
    NO_MEMORY,
    NOWHERE,
    RDMA_HELLO,
    RDMA_READY,
    RdmaLentMemory,
    RdmaReady,
    RdmaStatus,
    decode_hello,
    decode_ready,
    encode_hello,
    encode_ready,
)
from kvbm.verbs.queue_pair import RemoteEnd

END = RemoteEnd(bytes(range(16)), 3, 17, 0xABCDEF, 5, 16)
MEMORY = RdmaLentMemory(0x7F00_0000_0000, 1 << 20, 0x1234, 16, 1 << 16)


def test_the_bytes_are_fixed() -> None:
    assert encode_hello(END).hex() == "20000000010c0000000102030405060708090a0b0c0d0e0f11000000efcdab0003000510"
    ready = encode_ready(RdmaReady(RdmaStatus.READY, END, MEMORY))
    assert ready.hex() == (
        "44000000010d00000005100000010203040506070809"
        "0a0b0c0d0e0f11000000efcdab0003000000341200001000000000000000007f000000001000000000000000010000000000"
    )


def test_what_is_sent_is_what_is_understood() -> None:
    assert decode_hello(encode_hello(END)[8:]) == END
    for ready in (RdmaReady(RdmaStatus.READY, END, MEMORY), RdmaReady(RdmaStatus.FULL, NOWHERE, NO_MEMORY)):
        assert decode_ready(encode_ready(ready)[8:]) == ready


@pytest.mark.parametrize(
    "end",
    [
        END._replace(gid=bytes(16)),
        END._replace(gid=b"short"),
        END._replace(number=1),
        END._replace(number=1 << 24),
        END._replace(psn=1 << 24),
        END._replace(mtu=0),
        END._replace(mtu=6),
        END._replace(reads=0),
        END._replace(reads=129),
        END._replace(lid=1 << 16),
    ],
)
def test_an_end_that_is_none_is_refused(end: RemoteEnd) -> None:
    with pytest.raises(PeerWireError, match="no end of a connection"):
        encode_hello(end)
    with pytest.raises(PeerWireError):
        encode_ready(RdmaReady(RdmaStatus.READY, end, MEMORY))


@pytest.mark.parametrize(
    "memory",
    [
        MEMORY._replace(slots=17),
        MEMORY._replace(slots=0),
        MEMORY._replace(stride=0),
        MEMORY._replace(address=0),
        MEMORY._replace(address=(1 << 64) - (1 << 20)),
    ],
)
def test_memory_that_is_none_is_refused(memory: RdmaLentMemory) -> None:
    with pytest.raises(PeerWireError, match="memory"):
        encode_ready(RdmaReady(RdmaStatus.READY, END, memory))


@given(st.binary(max_size=80))
def test_garbage_is_refused_or_makes_sense(body: bytes) -> None:
    for decode, encode in ((decode_hello, encode_hello), (decode_ready, encode_ready)):
        try:
            message = decode(body)  # type: ignore[operator]
        except PeerWireError:
            continue
        assert encode(message)[8:] == body  # type: ignore[operator]


def test_a_refusal_carries_nothing() -> None:
    body = bytearray(encode_ready(RdmaReady(RdmaStatus.FULL, NOWHERE, NO_MEMORY))[8:])
    body[-1] = 1
    with pytest.raises(PeerWireError, match="FULL with"):
        decode_ready(bytes(body))
    body[0] = 9
    with pytest.raises(PeerWireError, match="status 9"):
        decode_ready(bytes(body))


def test_kinds_and_sizes_are_those_of_the_head() -> None:
    for message, kind in (
        (encode_hello(END), RDMA_HELLO),
        (encode_ready(RdmaReady(RdmaStatus.READY, END, MEMORY)), RDMA_READY),
    ):
        assert struct.unpack("<IBBH", message[:8]) == (len(message) - 4, 1, kind, 0)
