"""What instances say to one another when one, the owner, lends blocks to another, the reader: version 1.

A message is a head of 8 bytes (u32 length of what follows it, u8 version, u8 kind, u16 zero) and a body; all numbers
are little-endian. A head is judged before its body is awaited, so a stranger can announce no more than a message of its
kind may have. `native/src/peer_wire.cpp` is the same in C++; tests/golden/peer_wire_v1.bin has every kind.

HELLO is sent by both at once, PROVE by both where the owner asks for a key (the reader first). OPEN (a namespace, with
a proof of its root) is answered by OPENED; ASK (the blocks wanted, in the order of their chain) by GRANT, BUSY or GONE.
ARENA comes once, with the descriptor of HOST's memory, before the first GRANT of memory. END says that a lease ends;
BYE why the connection does. Where instances have certificates all of it comes under TLS over TCP, and only a BYE to who
did not begin with TLS comes plainly. The messages by which readers over RDMA and NIXL are let into
HOST have kinds of their own: `rdma_hello`, `nixl_hello`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from kvbm.core.errors import PeerWireError
from kvbm.core.ids import HASH_BYTES, SLOT_BYTES, Tier

VERSION = 1
HEAD_BYTES = 8
MOST_HASHES = 8192  # of one ASK, GRANT or END
MOST_HANDLES = 64  # namespaces open on one connection
MOST_NAME_BYTES = 255  # of an instance id
MOST_WORDS_BYTES = 1024  # of a BYE
NONCE_BYTES = 32
PROOF_BYTES = 32
MEMORY, TCP, RDMA, NIXL = 1, 2, 4, 8  # bits of Hello.transports
KEY_ASKED = 1  # bit of Hello.flags


class PeerMessageKind(IntEnum):
    """Which message."""

    HELLO = 1
    PROVE = 2
    OPEN = 3
    OPENED = 4
    ARENA = 5
    ASK = 6
    GRANT = 7
    BUSY = 8
    GONE = 9
    END = 10
    BYE = 11


class ProvingSide(IntEnum):
    """Who proves that it has the key."""

    READER = 0
    OWNER = 1


class GrantTransport(IntEnum):
    """How the bytes of a grant come."""

    MEMORY = 0
    TCP = 1
    RDMA = 2
    NIXL = 3


class GoneReason(IntEnum):
    """Why an owner grants nothing."""

    NOT_HELD = 0
    CLOSING = 1
    FENCED = 2
    NOT_OPENED = 3


class Hello(NamedTuple):
    """Who is there.

    Attributes:
        nonce: 32 bytes, fresh for this connection.
        epoch: of the owner; 0 from a reader, and from an owner that asks for a key, which nobody has proved yet.
        transports: MEMORY, TCP, RDMA and NIXL, what the sender can do.
        flags: KEY_ASKED, from an owner.
        instance: its id, at most 255 bytes as UTF-8.
    """

    nonce: bytes
    epoch: int
    transports: int
    flags: int
    instance: str


class Prove(NamedTuple):
    """`key_proof`, 32 bytes."""

    proof: bytes


class Open(NamedTuple):
    """A namespace (16 bytes) and `open_proof` of its root; from here on it is the reader's `handle`, below
    MOST_HANDLES.
    """

    handle: int
    namespace: bytes
    proof: bytes


class NamespaceOpened(NamedTuple):
    """Whether a namespace is open; unknown and wrongly proved are not told apart. `block_bytes`: 0 where it is not."""

    handle: int
    is_open: bool
    block_bytes: int


class ArenaShape(NamedTuple):
    """HOST's memory: bytes of the mapping, slots in it, bytes from one slot to the next. The descriptor rides along."""

    bytes: int
    slots: int
    stride: int


class Ask(NamedTuple):
    """Which blocks are wanted: packed hashes, 1 to MOST_HASHES. After `time_left_ms` nobody waits for an answer."""

    request: int
    handle: int
    transport: GrantTransport
    time_left_ms: int
    hashes: bytes


class Grant(NamedTuple):
    """The longest run from the first hash on.

    Attributes:
        lease: 0: the bytes of the blocks follow the message at once, and nothing is lent beyond them.
        lease_ms: counted by the reader from before its ASK, by the owner from after this message.
        tiers: a byte for each block, HOST or NVME.
        slots, checksums: packed u32, one for each block; CRC-32C.
    """

    request: int
    lease: int
    lease_ms: int
    tiers: bytes
    slots: bytes
    checksums: bytes


class Busy(NamedTuple):
    """As much is lent as may be; ask again after `retry_ms`."""

    request: int
    retry_ms: int


class Gone(NamedTuple):
    """There is nothing to grant."""

    request: int
    reason: GoneReason


class End(NamedTuple):
    """The reader is done with a lease (0: of a grant whose bytes came behind it).

    `hashes`: packed, blocks whose checksum failed.
    """

    lease: int
    handle: int
    hashes: bytes


class Bye(NamedTuple):
    """Why the sender closes, in printable ASCII."""

    words: str


Message = Hello | Prove | Open | NamespaceOpened | ArenaShape | Ask | Grant | Busy | Gone | End | Bye
_MESSAGES: tuple[type[Message], ...] = (
    Hello,
    Prove,
    Open,
    NamespaceOpened,
    ArenaShape,
    Ask,
    Grant,
    Busy,
    Gone,
    End,
    Bye,
)


def _grant_bytes(blocks: int) -> int:
    return 20 + (blocks + 3) // 4 * 4 + 8 * blocks


# (least, most) bytes of a body
_BODY_BYTES: dict[PeerMessageKind, tuple[int, int]] = {
    PeerMessageKind.HELLO: (44, 44 + MOST_NAME_BYTES),
    PeerMessageKind.PROVE: (PROOF_BYTES, PROOF_BYTES),
    PeerMessageKind.OPEN: (52, 52),
    PeerMessageKind.OPENED: (9, 9),
    PeerMessageKind.ARENA: (20, 20),
    PeerMessageKind.ASK: (20 + HASH_BYTES, 20 + HASH_BYTES * MOST_HASHES),
    PeerMessageKind.GRANT: (_grant_bytes(1), _grant_bytes(MOST_HASHES)),
    PeerMessageKind.BUSY: (8, 8),
    PeerMessageKind.GONE: (5, 5),
    PeerMessageKind.END: (16, 16 + HASH_BYTES * MOST_HASHES),
    PeerMessageKind.BYE: (2, 2 + MOST_WORDS_BYTES),
}


class Head(NamedTuple):
    """What follows a head: which message, and bytes of its body, no more than such a message may have."""

    kind: PeerMessageKind
    body_bytes: int


def decode_head(head: bytes) -> Head:
    """Judge the 8 bytes that begin a message.

    Raises PeerWireError: another version, no kind, or a length no such message has.
    """
    if len(head) != HEAD_BYTES:
        raise PeerWireError(f"a head of {len(head)} bytes; it has {HEAD_BYTES}")
    length, version, kind, zero = struct.unpack("<IBBH", head)
    if version != VERSION:
        raise PeerWireError(f"version {version} of the protocol; this is version {VERSION}")
    if not PeerMessageKind.HELLO <= kind <= PeerMessageKind.BYE:
        raise PeerWireError(f"no message has kind {kind}")
    if zero:
        raise PeerWireError("the last two bytes of a head are not zero")
    least, most = (bytes_ + HEAD_BYTES - 4 for bytes_ in _BODY_BYTES[PeerMessageKind(kind)])
    if not least <= length <= most:
        raise PeerWireError(f"{PeerMessageKind(kind).name}: {length} bytes are announced; {least} to {most} can be")
    return Head(PeerMessageKind(kind), length - HEAD_BYTES + 4)


def decode_body(kind: PeerMessageKind, body: bytes) -> Message:
    """The message of a body, all of it. Raises PeerWireError: it makes no sense."""
    reader = _Body(kind, body)
    try:
        message = _DECODE[kind](reader)
    except ValueError as error:  # an enum's
        raise PeerWireError(f"{kind.name}: {error}") from None
    reader.end()
    _check(kind, message)
    return message


def encode(message: Message) -> bytes:
    """A message, head and all.

    What a BYE cannot say becomes "?", and its end is cut. Raises PeerWireError when decoding it would.
    """
    kind = PeerMessageKind(_MESSAGES.index(type(message)) + 1)
    if isinstance(message, Bye):
        said = message.words.encode(errors="replace")[:MOST_WORDS_BYTES]
        message = Bye("".join(chr(byte) if _is_printable(byte) else "?" for byte in said))
    _check(kind, message)
    try:
        body = _ENCODE[kind](message)
    except (struct.error, UnicodeEncodeError) as error:
        raise PeerWireError(f"{kind.name}: {error}") from None
    return struct.pack("<IBBH", len(body) + HEAD_BYTES - 4, VERSION, kind, 0) + body


def key_proof(key: bytes, role: ProvingSide, reader_nonce: bytes, owner_nonce: bytes, owner: str) -> bytes:
    """What shows that both have the key, bound to this connection and the owner's instance id: 32 bytes."""
    said = b"kvbm-peer-1" + bytes([role]) + reader_nonce + owner_nonce + owner.encode()
    return hmac.new(key, said, hashlib.sha256).digest()


def open_proof(root: bytes, reader_nonce: bytes, owner_nonce: bytes, namespace: bytes, owner: str) -> bytes:
    """What shows that a reader has a namespace's root, bound to this connection and the owner's instance id: 32 bytes.

    Without the id, an owner that lacks the root could hand what a reader proves to it on to one that has it.
    """
    said = b"kvbm-open-1" + reader_nonce + owner_nonce + namespace + owner.encode()
    return hmac.new(root, said, hashlib.sha256).digest()


class _Body:
    """A body, taken apart from its beginning."""

    def __init__(self, kind: PeerMessageKind, data: bytes) -> None:
        self._kind = kind
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise PeerWireError(f"{self._kind.name}: {count} bytes more are due, {len(taken)} are there")
        self._at += count
        return taken

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def zeros(self, count: int) -> None:
        if any(self.take(count)):
            raise PeerWireError(f"{self._kind.name}: a byte that is zero is not")

    def count(self, least: int) -> int:
        (blocks,) = self.numbers("I")
        if not least <= blocks <= MOST_HASHES:
            raise PeerWireError(f"{self._kind.name}: {blocks} blocks; {least} to {MOST_HASHES} may be named")
        return int(blocks)

    def end(self) -> None:
        if self._at < len(self._data):
            raise PeerWireError(f"{self._kind.name}: {len(self._data) - self._at} bytes after its end")


def _decode_hello(body: _Body) -> Hello:
    nonce = body.take(NONCE_BYTES)
    epoch, transports, flags, size = body.numbers("QBBH")
    return Hello(nonce, epoch, transports, flags, body.take(size).decode())


def _decode_opened(body: _Body) -> NamespaceOpened:
    handle, status, block_bytes = body.numbers("IBI")
    if status > 1:
        raise PeerWireError(f"OPENED: status {status}")
    return NamespaceOpened(handle, status == 0, block_bytes)


def _decode_ask(body: _Body) -> Ask:
    request, handle, transport = body.numbers("IIB")
    body.zeros(3)
    (time_left_ms,) = body.numbers("I")
    return Ask(request, handle, GrantTransport(transport), time_left_ms, body.take(HASH_BYTES * body.count(1)))


def _decode_grant(body: _Body) -> Grant:
    request, lease, lease_ms = body.numbers("IQI")
    blocks = body.count(1)
    tiers = body.take(blocks)
    body.zeros(-blocks % 4)
    return Grant(request, lease, lease_ms, tiers, body.take(SLOT_BYTES * blocks), body.take(4 * blocks))


def _decode_gone(body: _Body) -> Gone:
    request, reason = body.numbers("IB")
    return Gone(request, GoneReason(reason))


def _decode_end(body: _Body) -> End:
    lease, handle = body.numbers("QI")
    return End(lease, handle, body.take(HASH_BYTES * body.count(0)))


_DECODE: dict[PeerMessageKind, Callable[[_Body], Message]] = {
    PeerMessageKind.HELLO: _decode_hello,
    PeerMessageKind.PROVE: lambda body: Prove(body.take(PROOF_BYTES)),
    PeerMessageKind.OPEN: lambda body: Open(body.numbers("I")[0], body.take(HASH_BYTES), body.take(PROOF_BYTES)),
    PeerMessageKind.OPENED: _decode_opened,
    PeerMessageKind.ARENA: lambda body: ArenaShape(*body.numbers("QIQ")),
    PeerMessageKind.ASK: _decode_ask,
    PeerMessageKind.GRANT: _decode_grant,
    PeerMessageKind.BUSY: lambda body: Busy(*body.numbers("II")),
    PeerMessageKind.GONE: _decode_gone,
    PeerMessageKind.END: _decode_end,
    PeerMessageKind.BYE: lambda body: Bye(body.take(body.numbers("H")[0]).decode()),
}


def _encode_hello(hello: Hello) -> bytes:
    name = hello.instance.encode()
    return hello.nonce + struct.pack("<QBBH", hello.epoch, hello.transports, hello.flags, len(name)) + name


def _encode_grant(grant: Grant) -> bytes:
    blocks = len(grant.tiers)
    head = struct.pack("<IQII", grant.request, grant.lease, grant.lease_ms, blocks)
    return head + grant.tiers + bytes(-blocks % 4) + grant.slots + grant.checksums


_ENCODE: dict[PeerMessageKind, Callable[[Any], bytes]] = {
    PeerMessageKind.HELLO: _encode_hello,
    PeerMessageKind.PROVE: lambda prove: prove.proof,
    PeerMessageKind.OPEN: lambda open_: struct.pack("<I", open_.handle) + open_.namespace + open_.proof,
    PeerMessageKind.OPENED: lambda opened: struct.pack("<IBI", opened.handle, not opened.is_open, opened.block_bytes),
    PeerMessageKind.ARENA: lambda arena: struct.pack("<QIQ", *arena),
    PeerMessageKind.ASK: lambda ask: struct.pack("<IIB3xII", *ask[:4], len(ask.hashes) // HASH_BYTES) + ask.hashes,
    PeerMessageKind.GRANT: _encode_grant,
    PeerMessageKind.BUSY: lambda busy: struct.pack("<II", *busy),
    PeerMessageKind.GONE: lambda gone: struct.pack("<IB", *gone),
    PeerMessageKind.END: lambda end: (
        struct.pack("<QII", end.lease, end.handle, len(end.hashes) // HASH_BYTES) + end.hashes
    ),
    PeerMessageKind.BYE: lambda bye: struct.pack("<H", len(bye.words)) + bye.words.encode(),
}


def _check(kind: PeerMessageKind, message: Message) -> None:
    """A message must make sense by itself, in both directions. Raises PeerWireError."""
    if not _makes_sense(message):
        raise PeerWireError(f"{kind.name}: its fields make no sense: {_shown(message)}")


def _makes_sense(message: Message) -> bool:
    match message:
        case Hello(nonce, _, _, _, instance):
            return len(nonce) == NONCE_BYTES and len(instance.encode(errors="replace")) <= MOST_NAME_BYTES
        case Prove(proof):
            return len(proof) == PROOF_BYTES
        case Open(handle, namespace, proof):
            return handle < MOST_HANDLES and len(namespace) == HASH_BYTES and len(proof) == PROOF_BYTES
        case NamespaceOpened(handle, is_open, block_bytes):
            return handle < MOST_HANDLES and is_open == (block_bytes > 0)
        case ArenaShape(size, slots, stride):
            return slots > 0 and stride > 0 and slots * stride <= size
        case Ask(_, handle, _, _, hashes):
            return handle < MOST_HANDLES and _are_hashes(hashes, 1)
        case Grant(_, _, _, tiers, slots, checksums):
            lent = all(tier in (Tier.HOST, Tier.NVME) for tier in tiers)
            blocks = len(tiers)
            return lent and 1 <= blocks <= MOST_HASHES and len(slots) == len(checksums) == SLOT_BYTES * blocks
        case End(_, handle, hashes):
            return handle < MOST_HANDLES and _are_hashes(hashes, 0)
        case Bye(words):
            return len(words) <= MOST_WORDS_BYTES and all(_is_printable(ord(character)) for character in words)
        case _:
            return True


def _is_printable(byte: int) -> bool:
    return 0x20 <= byte <= 0x7E


def _are_hashes(hashes: bytes, least: int) -> bool:
    return not len(hashes) % HASH_BYTES and least <= len(hashes) // HASH_BYTES <= MOST_HASHES


def _shown(message: Message) -> str:
    text = repr(message)
    return text if len(text) <= 200 else f"{text[:200]}…"
