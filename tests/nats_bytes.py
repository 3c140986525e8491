"""What a NATS server may send, as bytes."""

from __future__ import annotations

import random

MINE = 7  # a subscription


def said(rng: random.Random) -> bytes:
    """One thing a server says."""
    kind = rng.randrange(9)
    payload = rng.randbytes(rng.choice([0, 1, 5, 40, 3000])) + rng.choice([b"", b"\r\nMSG x 7 5\r\n", b"PING\r\n"])
    head = b"NATS/1.0\r\nA: b\r\n\r\n" if rng.random() < 0.7 else b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"
    sid, reply = rng.choice([MINE, MINE, 3]), rng.choice([b"", b"$JS.ACK.S.C.1.2.3.4.5 "])
    if kind < 3:
        return b"MSG some.subject %d %b%d\r\n%b\r\n" % (sid, reply, len(payload), payload)
    if kind < 6:
        size = len(head) + len(payload)
        return b"HMSG some.subject %d %b%d %d\r\n%b%b\r\n" % (sid, reply, len(head), size, head, payload)
    return [b"PING\r\n", b"-ERR 'Permissions Violation'\r\n", b'INFO {"a": "%b"}\r\n' % (b"x" * rng.choice([1, 9000]))][
        kind - 6
    ]
