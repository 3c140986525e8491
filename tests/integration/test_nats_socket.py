"""Bytes of a connection, read and written with deadlines by the thread that asks. TLS is in `test_asks.py`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvbm.locate.nats_socket import PlainSocket

WAIT_S = 60.0
MUCH = bytes(range(256)) * (64 << 10)  # 16 MiB: more than the system takes at once


@pytest.fixture
def ends() -> Iterator[tuple[PlainSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        made = PlainSocket(ours)
        yield made, theirs
        made.close()
        made.close()


def test_what_has_come_is_read_and_an_end_is_told_from_nothing(ends: tuple[PlainSocket, socket.socket]) -> None:
    ours, theirs = ends
    assert ours.read() is None
    theirs.sendall(b"one")
    assert ours.read() == b"one"
    theirs.sendall(b"two")
    assert ours.wait(WAIT_S) == b"two"
    theirs.close()
    assert ours.read() == b""
    assert ours.wait(WAIT_S) == b""


def test_what_comes_later_is_waited_for_and_nothing_is_only_so_long(ends: tuple[PlainSocket, socket.socket]) -> None:
    ours, theirs = ends
    threading.Timer(0.05, theirs.sendall, (b"late",)).start()
    assert ours.wait(float("inf")) == b"late"
    for timeout_s in (0.01, 0.0, -1.0):
        with pytest.raises(TimeoutError):
            ours.wait(timeout_s)


def test_more_than_the_system_takes_at_once_is_sent_whole(ends: tuple[PlainSocket, socket.socket]) -> None:
    ours, theirs = ends
    got = bytearray()

    def take() -> None:
        while len(got) < len(MUCH):
            got.extend(theirs.recv(1 << 20))

    taking = threading.Thread(target=take)
    taking.start()
    ours.send(MUCH, time.monotonic() + WAIT_S)
    taking.join(WAIT_S)
    assert got == MUCH


def test_what_nobody_takes_is_given_up_at_the_deadline(ends: tuple[PlainSocket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send(MUCH, time.monotonic() + 0.05)


def test_who_is_gone_is_an_error_of_the_system(ends: tuple[PlainSocket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(OSError):
        ours.send(MUCH, time.monotonic() + WAIT_S)
