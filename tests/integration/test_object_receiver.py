"""Objects received straight into rows: what comes whole is taken, anything else never counts, and nothing is written
late.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from kvbm.assembly import CODER, NATIVE
from kvbm.assembly.native import NEW_OBJECT_RECEIVER
from kvbm.core.errors import LayoutError
from kvbm.pools.object.coding import Coding
from kvbm.pools.object.direct import ObjectReceiver
from kvbm.pools.object.header import encode_object_headers, header_bytes
from tests.coded_blocks import bfloat16
from tests.eventually import eventually
from tests.pool_runs import Run, random_run
from tests.scripted_http import Answer, ScriptedServer, scripted, sends

BLOCK_BYTES, K = 3 << 10, 3
WAIT_S = 60.0
SHORT_S = 0.3  # of calls that nobody answers
UNTOUCHED = 0xA5


class Found(NamedTuple):
    """What a receiver has said, and the rows it had."""

    whole: list[bool]
    statuses: list[int]
    sizes: list[int]
    sums: np.ndarray
    rows: np.ndarray


def objects_of(run: Run, coding: Coding = Coding.RAW) -> list[bytes]:
    """A run as objects of K blocks."""
    encoded = CODER.encode(run.rows, np.arange(len(run.rows)), coding)
    headers = encode_object_headers(run.proof, encoded.lengths, encoded.codings, K, run.rows.shape[1], NATIVE.checksums)
    ends = np.cumsum(encoded.lengths)[K - 1 :: K].tolist()
    return [
        header.tobytes() + encoded.body[begin:end].tobytes()
        for header, begin, end in zip(headers, [0, *ends[:-1]], ends, strict=True)
    ]


def answered(body: bytes, status: str = "200 OK", fields: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{fields}\r\n".encode() + body


def receive(
    receiver: ObjectReceiver,
    port: int,
    run: Run,
    rows: np.ndarray | None = None,
    at: np.ndarray | None = None,
    connections: int = 2,
    deadline_s: float = WAIT_S,
    silence_s: float = WAIT_S,
) -> Found:
    count = len(run.rows) // K
    rows = run.room() if rows is None else rows
    at = np.arange(count * K).reshape(count, K) if at is None else at
    requests = [f"GET /{index} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for index in range(count)]
    whole, statuses, sizes, sums = receiver.receive(
        ["127.0.0.1"], port, requests, run.namespace, run.hashes, rows, at, connections, deadline_s, WAIT_S, silence_s
    )
    return Found(whole.tolist(), statuses.tolist(), sizes.tolist(), sums, rows)


@pytest.fixture
def receiver() -> Iterator[ObjectReceiver]:
    made = NEW_OBJECT_RECEIVER()
    yield made
    made.close()


@contextmanager
def serving(objects: list[bytes]) -> Iterator[ScriptedServer]:
    """A server that has these objects under their numbers."""
    with scripted(lambda path: sends(answered(objects[int(path[1:])]))) as server:
        yield server


@pytest.mark.parametrize("coding", [Coding.RAW, Coding.PLANES_16])
@pytest.mark.parametrize("connections", [1, 3, 16])
def test_objects_that_come_whole_are_in_their_rows(receiver: ObjectReceiver, coding: Coding, connections: int) -> None:
    run = random_run(5 * K, BLOCK_BYTES)
    if coding is not Coding.RAW:
        rows = bfloat16(5 * K << 15, seed=1).reshape(5 * K, -1)
        run = Run(rows, run.proof._replace(checksums=NATIVE.checksums(rows)))
    objects = objects_of(run, coding)
    with serving(objects) as server:
        for _ in range(2):
            found = receive(receiver, server.port, run, connections=connections)
            assert found.whole == [True] * 5
            assert found.statuses == [200] * 5
            assert found.sizes == [len(one) for one in objects]
            assert (found.rows == run.rows).all()
            assert (found.sums == run.proof.checksums).all()
        assert server.connections <= min(connections, 5) * 2
        assert sorted(server.asked) == sorted([f"/{index}" for index in range(5)] * 2)


def test_a_body_that_comes_in_crumbs_is_as_good(receiver: ObjectReceiver) -> None:
    run = random_run(K, 64)
    [one] = objects_of(run)
    whole = answered(one)
    with scripted(lambda path: sends(*(whole[at : at + 1] for at in range(len(whole))))) as server:
        found = receive(receiver, server.port, run)
    assert found.whole == [True]
    assert (found.rows == run.rows).all()


def test_rows_that_are_not_wanted_stay_as_they_are_and_others_go_where_they_should(receiver: ObjectReceiver) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    rows = np.full((8, 2 * BLOCK_BYTES), UNTOUCHED, dtype=np.uint8)[:, :BLOCK_BYTES]  # rows with a gap between
    at = np.array([[-1, 6, 1], [3, -1, -1]], dtype=np.int64)
    with serving(objects_of(run)) as server:
        found = receive(receiver, server.port, run, rows, at)
    assert found.whole == [True, True]
    assert (rows[[6, 1, 3]] == run.rows[[1, 2, 3]]).all()
    assert (rows[[0, 2, 4, 5, 7]] == UNTOUCHED).all()
    assert (np.asarray(rows.base)[:, BLOCK_BYTES:] == UNTOUCHED).all()
    assert (found.sums[[1, 2, 3]] == run.proof.checksums[[1, 2, 3]]).all()


def _flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]


HEAD = header_bytes(K)
WRONG: dict[str, Callable[[bytes, bytes], Answer]] = {  # of the object that was asked for, and another of its namespace
    "garbage": lambda good, other: sends(b"\x00\xff" * 5000),
    "a head without an end": lambda good, other: sends(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000),
    "half a head": lambda good, other: sends(answered(good)[:30], stays=False),
    "nothing": lambda good, other: sends(stays=False),
    "no length": lambda good, other: sends(b"HTTP/1.1 200 OK\r\n\r\n" + good, stays=False),
    "chunks": lambda good, other: sends(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(good) + good + b"\r\n0\r\n\r\n"
    ),
    "two lengths": lambda good, other: sends(answered(good, fields="Content-Length: 5\r\n")),
    "compressed": lambda good, other: sends(answered(good, fields="Content-Encoding: gzip\r\n")),
    "4 GiB announced": lambda good, other: sends(b"HTTP/1.1 200 OK\r\nContent-Length: 4294967296\r\n\r\n" + good),
    "less than a header": lambda good, other: sends(answered(good[: HEAD - 1])),
    "one byte less": lambda good, other: sends(answered(good[:-1])),
    "one byte more": lambda good, other: sends(answered(good + b"x")),
    "an early end": lambda good, other: sends(answered(good)[:-1], stays=False),
    "a part": lambda good, other: sends(answered(good, "206 Partial Content")),
    "an error": lambda good, other: sends(answered(good, "503 Slow Down")),
    "nothing there": lambda good, other: sends(answered(good, "404 Not Found")),
    "another object": lambda good, other: sends(answered(other)),
    "a flipped bit in the header": lambda good, other: sends(answered(_flipped(good, 70))),
    "a flipped bit in the first block": lambda good, other: sends(answered(_flipped(good, HEAD))),
    "a flipped bit in the last block": lambda good, other: sends(answered(_flipped(good, len(good) - 1))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_object_is_never_taken_and_does_not_spoil_the_next(
    receiver: ObjectReceiver, wrong: str
) -> None:
    run = random_run(2 * K, BLOCK_BYTES)
    good, other = objects_of(run)
    rows = np.full((K + 2, BLOCK_BYTES), UNTOUCHED, dtype=np.uint8)
    asked = Run(run.rows[:K], run.proof._replace(hashes=run.hashes[: len(run.hashes) // 2]))
    with scripted(lambda path: WRONG[wrong](good, other)) as server:
        found = receive(receiver, server.port, asked, rows[1:-1])
        assert found.whole == [False]
        assert found.sizes[0] in (0, len(good))
        assert (rows[[0, -1]] == UNTOUCHED).all()
        server.answer = lambda path: sends(answered(good))
        again = receive(receiver, server.port, asked)
    assert again.whole == [True]
    assert (again.rows == run.rows[:K]).all()


@pytest.mark.parametrize(("status", "asked_for"), [("404 Not Found", 6), ("503 Slow Down", 1), ("403 Forbidden", 1)])
def test_a_store_that_refuses_is_asked_no_more_and_one_that_lacks_an_object_is(
    receiver: ObjectReceiver, status: str, asked_for: int
) -> None:
    with scripted(lambda path: sends(answered(b"no", status))) as server:
        found = receive(receiver, server.port, random_run(6 * K, BLOCK_BYTES), connections=1)
        assert len(server.asked) == asked_for
    assert found.whole == [False] * 6
    assert found.statuses == [int(status[:3])] * asked_for + [0] * (6 - asked_for)


def test_a_connection_that_was_closed_meanwhile_costs_nothing(receiver: ObjectReceiver) -> None:
    run = random_run(K, BLOCK_BYTES)
    [one] = objects_of(run)
    ended = threading.Event()

    def answer_and_end(connection: socket.socket) -> bool:
        connection.sendall(answered(one))
        ended.wait(WAIT_S)
        # not a FIN, which shows before the next request: an end that only the next request finds
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    with scripted(lambda path: answer_and_end) as server:
        assert receive(receiver, server.port, run).whole == [True]
        server.answer = lambda path: sends(answered(one))
        ended.set()
        found = receive(receiver, server.port, run)
        assert found.whole == [True]
        assert (found.rows == run.rows).all()
        assert server.connections == 2


@pytest.mark.parametrize("silent", ["before the head", "in the head", "in a block"])
@pytest.mark.parametrize("by", ["deadline", "silence"])
def test_a_store_that_falls_silent_is_left_in_time_and_writes_no_row_afterwards(
    receiver: ObjectReceiver, silent: str, by: str
) -> None:
    run = random_run(K, 1 << 20)
    [one] = objects_of(run)
    whole = answered(one)
    cut = {"before the head": 0, "in the head": 20, "in a block": len(whole) - (1 << 19)}[silent]
    late = threading.Event()
    hung_up: list[bool] = []

    def stall(connection: socket.socket) -> bool:
        connection.sendall(whole[:cut])
        late.wait(WAIT_S)
        try:
            connection.sendall(whole[cut:])
            hung_up.append(connection.recv(1) == b"")
        except OSError:
            hung_up.append(True)
        return False

    with scripted(lambda path: stall) as server:
        times = {"deadline_s": SHORT_S} if by == "deadline" else {"silence_s": SHORT_S}
        found = receive(receiver, server.port, run, **times)
        assert found.whole == [False]
        given_back = found.rows.copy()
        late.set()
        eventually(lambda: hung_up == [True], "the connection is still open")
        assert (found.rows == given_back).all()


def test_a_drip_of_bytes_does_not_outlast_the_deadline(receiver: ObjectReceiver) -> None:
    run = random_run(K, BLOCK_BYTES)
    whole = answered(objects_of(run)[0])
    stopped = threading.Event()

    def drip(connection: socket.socket) -> bool:
        for at in range(len(whole)):
            connection.sendall(whole[at : at + 1])
            if stopped.wait(0.02):
                return False
        return True

    with scripted(lambda path: drip) as server:
        assert receive(receiver, server.port, run, deadline_s=SHORT_S).whole == [False]
        stopped.set()


def test_a_store_that_nobody_runs_is_no_store(receiver: ObjectReceiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = receive(receiver, port, random_run(4 * K, BLOCK_BYTES))
    assert found.whole == [False] * 4
    assert found.statuses == [0] * 4


def test_close_ends_what_is_under_way_and_nothing_is_received_after() -> None:
    receiver, run = NEW_OBJECT_RECEIVER(), random_run(4 * K, BLOCK_BYTES)
    found: list[Found] = []

    def wait(connection: socket.socket) -> bool:
        server.goes_on.wait(WAIT_S)
        return False

    with scripted(lambda path: wait) as server:
        asking = threading.Thread(target=lambda: found.append(receive(receiver, server.port, run)), daemon=True)
        asking.start()
        eventually(lambda: len(server.asked) == 2, "nobody asks")
        receiver.close()
        asking.join(WAIT_S)
        assert [one.whole for one in found] == [[False] * 4]
        receiver.close()
        assert receive(receiver, server.port, run).whole == [False] * 4
        assert len(server.asked) == 2


def test_calls_of_many_threads_share_the_connections(receiver: ObjectReceiver) -> None:
    runs = [random_run(4 * K, BLOCK_BYTES, seed) for seed in range(4)]
    objects = {number: objects_of(run) for number, run in enumerate(runs)}
    by_size = [one for number in objects for one in objects[number]]
    found: dict[int, list[Found]] = {number: [] for number in objects}
    with serving(by_size) as server:

        def ask(number: int) -> None:
            run = runs[number]
            requests = [f"GET /{4 * number + index} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for index in range(4)]
            at = np.arange(4 * K).reshape(4, K)
            for _ in range(10):
                rows = run.room()
                whole, statuses, sizes, sums = receiver.receive(
                    ["127.0.0.1"], server.port, requests, run.namespace, run.hashes, rows, at, 2, WAIT_S, WAIT_S, WAIT_S
                )
                found[number].append(Found(whole.tolist(), statuses.tolist(), sizes.tolist(), sums, rows))

        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in objects]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert server.connections <= 2 * len(threads)
    for number, calls in found.items():
        assert len(calls) == 10
        assert all(call.whole == [True] * 4 and (call.rows == runs[number].rows).all() for call in calls)


def test_parts_that_do_not_fit_each_other_are_refused(receiver: ObjectReceiver) -> None:
    run = random_run(K, BLOCK_BYTES)
    rows, at = run.room(), np.arange(K).reshape(1, K)
    good = (["127.0.0.1"], 1, [b"x"], run.namespace, run.hashes, rows, at, 1, 1.0, 1.0, 1.0)
    for place, value in (
        (0, []),
        (1, 65536),
        (2, [b"x", b"y"]),
        (3, b"short"),
        (4, run.hashes[:-16]),
        (5, rows[:-1]),
        (6, at + 1),
    ):
        with pytest.raises(LayoutError):
            receiver.receive(*good[:place], value, *good[place + 1 :])  # type: ignore[arg-type]
