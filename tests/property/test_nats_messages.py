"""What a NATS server sends is taken apart by the native code as by the specification in Python, whatever comes and
however it is cut.
"""

from __future__ import annotations

import random
import time

import pytest

from kvbm.assembly import NATIVE_MESSAGES
from kvbm.streams.nats.messages import ReadableMessages
from tests.nats_bytes import MINE, said


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, left out or put in."""
    found = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(found))
        what = rng.choice([b"", b" ", b"\r\n", b"9", b".", b"\xff", rng.randbytes(3)])
        found[at : at + rng.randrange(3)] = what
    return bytes(found)


@pytest.mark.parametrize("seed", range(300))
def test_both_take_apart_the_same_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    count = 1
    parts = []
    for _ in range(rng.randrange(1, 40)):
        kind = rng.random()
        if kind < 0.3:
            parts.append(said(rng))
            continue
        count = count + 1 if rng.random() < 0.9 else rng.choice([0, 10**18, 1 << 63, 10**19])
        domain = rng.choice([b"", b"", b"hub.account."])
        reply = b"$JS.ACK.%bS.C.1.%d.%d.%d.%d%b" % (
            domain,
            2 * count,
            count,
            time.time_ns(),
            5,
            b".x" if domain else b"",
        )
        head = rng.choice(
            [b"", b"NATS/1.0\r\nKvbm-Fence: 1:2:run\r\nKvbm-Safe: 1:2\r\n\r\n", b"NATS/1.0\r\nKvbm-Fence: 1"]
        )
        payload = rng.randbytes(rng.choice([0, 3, 500]))
        size = len(head) + len(payload)
        line = b"HMSG s%d %d %b %d %d" % (rng.randrange(3), rng.choice([MINE, MINE, 8]), reply, len(head), size)
        parts.append(line + b"\r\n" + head + payload + b"\r\n")
    data = damaged(rng, b"".join(parts))
    readable, native = ReadableMessages(), NATIVE_MESSAGES()
    for one in (readable, native):
        one.watch(MINE)
        one.watch(8)
        one.forget(9)
    at = 0
    while at < len(data):
        step = rng.choice([1, 50, 5000])
        expected = readable.take(data[at : at + step])
        assert native.take(data[at : at + step]) == expected
        if expected[1]:
            return
        at += step
