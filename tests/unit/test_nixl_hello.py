"""The two messages by which reader and owner join over NIXL: bytes, bounds, and what a stranger can send."""

from __future__ import annotations

import socket
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.errors import PeerWireError
from kvbm.transport.nixl_hello import (
    MOST_METADATA_BYTES,
    NO_MEMORY,
    NixlLentMemory,
    NixlReady,
    NixlStatus,
    decode_ready,
    encode_hello,
    encode_ready,
    is_hello,
    receive_ready,
)

MEMORY = NixlLentMemory(0x7F00_0000_0000, 1 << 20, 16, 1 << 16)
READY = NixlReady(NixlStatus.READY, b"agent", MEMORY)


def test_the_bytes_are_fixed() -> None:
    assert encode_hello().hex() == "04000000010e0000"
    assert encode_ready(READY).hex() == (
        "2d000000010f0000000000001000000005000000000000000" + "07f000000001000000000000000010000000000" + "6167656e74"
    )


def test_what_is_sent_is_what_is_understood() -> None:
    assert is_hello(encode_hello())
    for ready in (READY, NixlReady(NixlStatus.FULL, b"", NO_MEMORY), NixlReady(NixlStatus.NOT_PROVED, b"", NO_MEMORY)):
        assert decode_ready(encode_ready(ready)[8:]) == ready


@pytest.mark.parametrize(
    "ready",
    [
        READY._replace(metadata=b""),
        READY._replace(metadata=bytes(MOST_METADATA_BYTES + 1)),
        READY._replace(memory=NO_MEMORY),
        READY._replace(memory=MEMORY._replace(slots=17)),
        READY._replace(memory=MEMORY._replace(stride=0)),
        READY._replace(memory=MEMORY._replace(address=0)),
        READY._replace(memory=MEMORY._replace(address=(1 << 64) - 1)),
        READY._replace(status=NixlStatus.FULL),
        NixlReady(NixlStatus.FULL, b"x", NO_MEMORY),
    ],
)
def test_what_makes_no_sense_is_not_sent(ready: NixlReady) -> None:
    with pytest.raises(PeerWireError):
        encode_ready(ready)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    try:
        assert encode_ready(decode_ready(body))[8:] == body
    except PeerWireError:
        pass


@pytest.mark.parametrize(
    "head", [(1 << 32) - 1, MOST_METADATA_BYTES + 100, 3], ids=["4 GiB", "a little more than may be", "too little"]
)
def test_a_length_that_no_answer_has_is_refused_before_its_body_is_awaited(head: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<IBBH", head, 1, 15, 0))
        with pytest.raises(PeerWireError, match="15 of 36 to 65572 is awaited"):
            receive_ready(ours, time.monotonic() + 10)
