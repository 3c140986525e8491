"""Whole messages on a proved connection: what is awaited and nothing else, in time or not at all."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvbm.core.errors import PeerWireError
from kvbm.transport.sockets import HEAD, is_hung_up, receive_body, receive_exactly
from kvbm.transport.wire import VERSION, Bye, encode

Ends = tuple[socket.socket, socket.socket]
WAIT_S = 60.0
KIND, SIZES = 99, range(2, 5)


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def message(body: bytes, kind: int = KIND, version: int = VERSION, zero: int = 0) -> bytes:
    return HEAD.pack(HEAD.size - 4 + len(body), version, kind, zero) + body


def received(ends: Ends, sent: bytes) -> bytes:
    ends[1].sendall(sent)
    return receive_body(ends[0], KIND, SIZES, time.monotonic() + WAIT_S)


@pytest.mark.parametrize("body", [b"ab", b"abc", b"abcd"])
def test_what_is_awaited_is_received_and_what_follows_is_left(ends: Ends, body: bytes) -> None:
    assert received(ends, message(body) + b"next") == body
    assert receive_exactly(ends[0], 4, time.monotonic() + WAIT_S) == b"next"


@pytest.mark.parametrize(
    "sent",
    [
        message(b"a"),
        message(b"abcde"),
        message(b"ab", kind=KIND + 1),
        message(b"ab", version=VERSION + 1),
        message(b"ab", zero=1),
        HEAD.pack(0, VERSION, KIND, 0),
        HEAD.pack(0xFFFF_FFFF, VERSION, KIND, 0),
    ],
)
def test_another_message_is_refused_before_its_body_is_awaited(ends: Ends, sent: bytes) -> None:
    with pytest.raises(PeerWireError, match="99 of 2 to 4 is awaited"):
        received(ends, sent)


def test_who_hangs_up_with_a_word_is_heard(ends: Ends) -> None:
    with pytest.raises(PeerWireError, match="it hangs up: no more"):
        received(ends, encode(Bye("no more")))


def test_an_end_is_noticed_and_no_message(ends: Ends) -> None:
    assert not is_hung_up(ends[0])
    ends[1].close()
    assert is_hung_up(ends[0])
    with pytest.raises(ConnectionResetError):
        receive_body(ends[0], KIND, SIZES, time.monotonic() + WAIT_S)


def test_bytes_that_come_one_at_a_time_do_not_move_a_deadline(ends: Ends) -> None:
    ends[1].sendall(b"late")
    with pytest.raises(TimeoutError):
        receive_exactly(ends[0], 4, time.monotonic() - 0.001)
