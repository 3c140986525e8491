"""Messages between a lender and its readers: Python and C++ write the same bytes and refuse the same, whatever
comes.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core.errors import PeerWireError
from kvbm.core.ids import HASH_BYTES, Tier
from kvbm.transport.wire import (
    HEAD_BYTES,
    MOST_HASHES,
    ArenaShape,
    Ask,
    Busy,
    Bye,
    End,
    Gone,
    GoneReason,
    Grant,
    GrantTransport,
    Hello,
    Message,
    NamespaceOpened,
    Open,
    PeerMessageKind,
    Prove,
    ProvingSide,
    decode_body,
    decode_head,
    encode,
    key_proof,
    open_proof,
)
from tests.examples import examples

GOLDEN = (Path(__file__).parents[1] / "golden" / "peer_wire_v1.bin").read_bytes()
CLASSES = (Hello, Prove, Open, NamespaceOpened, ArenaShape, Ask, Grant, Busy, Gone, End, Bye)

u8, u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
handles = st.integers(0, 63)
thirty_two = st.binary(min_size=32, max_size=32)
sixteen = st.binary(min_size=16, max_size=16)
lent_tiers = st.lists(st.sampled_from([Tier.HOST, Tier.NVME]), min_size=1, max_size=9).map(bytes)


def grant_of(request: int, lease: int, lease_ms: int, tiers: bytes, seed: int) -> Grant:
    rng = random.Random(seed)
    return Grant(request, lease, lease_ms, tiers, rng.randbytes(4 * len(tiers)), rng.randbytes(4 * len(tiers)))


messages = st.one_of(
    st.builds(Hello, thirty_two, u64, u8, u8, st.text(max_size=60)),
    st.builds(Prove, thirty_two),
    st.builds(Open, handles, sixteen, thirty_two),
    st.builds(lambda handle, size: NamespaceOpened(handle, size > 0, size), handles, u32),
    st.builds(
        lambda slots, stride, more: ArenaShape(slots * stride + more, slots, stride),
        *[st.integers(1, 1 << 30)] * 2,
        u16,
    ),
    st.builds(
        Ask, u32, handles, st.sampled_from(GrantTransport), u32, st.lists(sixteen, min_size=1, max_size=5).map(b"".join)
    ),
    st.builds(grant_of, u32, u64, u32, lent_tiers, u32),
    st.builds(Busy, u32, u32),
    st.builds(Gone, u32, st.sampled_from(GoneReason)),
    st.builds(End, u64, handles, st.lists(sixteen, max_size=5).map(b"".join)),
    st.builds(Bye, st.text(max_size=100)),
)


def decode(data: bytes) -> Message:
    head = decode_head(data[:HEAD_BYTES])
    if len(data) != HEAD_BYTES + head.body_bytes:
        raise PeerWireError("half a message, or more than one")
    return decode_body(head.kind, data[HEAD_BYTES:])


def natively(data: bytes) -> Message:
    kind, fields = _native.decode_peer_message(data)
    return CLASSES[kind - 1](*fields)


def split(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = HEAD_BYTES + decode_head(data[:HEAD_BYTES]).body_bytes
        found.append(data[:size])
        data = data[size:]
    return found


def both_refuse_or_agree(data: bytes) -> None:
    try:
        readable: Message | None = decode(data)
    except PeerWireError:
        readable = None
    try:
        native: Message | None = natively(data)
    except PeerWireError:
        native = None
    assert readable == native


def test_golden_bytes_are_read_and_written_by_both() -> None:
    pieces = split(GOLDEN)
    assert {decode_head(piece[:HEAD_BYTES]).kind for piece in pieces} == set(PeerMessageKind)
    for piece in pieces:
        message = decode(piece)
        assert natively(piece) == message
        assert encode(message) == piece
        assert _native.encode_peer_message(CLASSES.index(type(message)) + 1, tuple(message)) == piece


@settings(deadline=None, max_examples=examples(400))
@given(message=messages)
def test_a_message_has_the_same_bytes_in_both_and_comes_back(message: Message) -> None:
    data = encode(message)
    assert _native.encode_peer_message(CLASSES.index(type(message)) + 1, tuple(message)) == data
    if not isinstance(message, Bye):
        assert decode(data) == message
    assert natively(data) == decode(data)


@settings(deadline=None, max_examples=examples(400))
@given(message=messages, seed=st.integers(0, 1 << 32))
def test_damaged_messages_are_refused_by_both_or_by_neither(message: Message, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(message))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(2)] = rng.choice([b"", b"\0", b"\xff", rng.randbytes(1)])
        if not data:
            data = bytearray(b"\0")
    both_refuse_or_agree(bytes(data))
    if len(data) > HEAD_BYTES:  # the length made right, so that it is the body that is judged
        struct.pack_into("<IB", data, 0, len(data) - 4, 1)
        both_refuse_or_agree(bytes(data))


@pytest.mark.parametrize(
    "message",
    [
        Hello(bytes(31), 0, 1, 0, "a"),
        Hello(bytes(32), 0, 1, 0, "a" * 256),
        Hello(bytes(32), 0, 1, 0, "\udc80"),
        Hello(bytes(32), 1 << 64, 1, 0, "a"),
        Hello(bytes(32), -1, 1, 0, "a"),
        Open(64, bytes(16), bytes(32)),
        Open(0, bytes(15), bytes(32)),
        NamespaceOpened(0, True, 0),
        NamespaceOpened(0, False, 1),
        ArenaShape(100, 11, 10),
        ArenaShape(100, 0, 10),
        Ask(0, 0, GrantTransport.TCP, 0, b""),
        Ask(0, 0, GrantTransport.TCP, 0, bytes(17)),
        Ask(0, 0, GrantTransport.TCP, 0, bytes(HASH_BYTES * (MOST_HASHES + 1))),
        Grant(0, 0, 0, b"\0", bytes(4), bytes(4)),
        Grant(0, 0, 0, b"\1", bytes(4), bytes(8)),
        Grant(0, 0, 0, b"", b"", b""),
        End(0, 64, b""),
    ],
)
def test_a_senseless_message_is_sent_by_neither(message: Message) -> None:
    with pytest.raises(PeerWireError):
        encode(message)
    with pytest.raises(PeerWireError):
        _native.encode_peer_message(CLASSES.index(type(message)) + 1, tuple(message))


@settings(deadline=None, max_examples=50)
@given(key=st.binary(max_size=200), reader=thirty_two, owner=thirty_two, namespace=sixteen, name=st.text(max_size=20))
def test_proofs_are_the_same_in_both(key: bytes, reader: bytes, owner: bytes, namespace: bytes, name: str) -> None:
    for role in ProvingSide:
        assert _native.peer_key_proof(key, role, reader, owner, name) == key_proof(key, role, reader, owner, name)
    proof = open_proof(key, reader, owner, namespace, name)
    assert _native.peer_open_proof(key, reader, owner, namespace, name) == proof
    assert proof == hmac.digest(key, b"kvbm-open-1" + reader + owner + namespace + name.encode(), hashlib.sha256)
