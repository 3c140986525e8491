"""A reader's connection to an owner that lends over RDMA or NIXL: proved over TCP, to ask for leases of slots.

Every namespace that the reader knows is opened on it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from kvbm.core.errors import KvbmError, NixlError, PeerWireError, VerbsError
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, Tier
from kvbm.transport.base import RootOf
from kvbm.transport.leased import LeasedRun
from kvbm.transport.sockets import receive_exactly, send_message
from kvbm.transport.tcp import looked_up, split_address
from kvbm.transport.wire import (
    HEAD_BYTES,
    KEY_ASKED,
    MOST_HANDLES,
    NIXL,
    NONCE_BYTES,
    RDMA,
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
    Prove,
    ProvingSide,
    decode_body,
    decode_head,
    encode,
    key_proof,
    open_proof,
)

_MARGIN_MS, _MARGIN_SHARE = 1, 64  # a lease is taken to end a little early: the clock is read before it is over
_END_S = 0.5  # for a word that waits for no answer
_Said = TypeVar("_Said", Hello, Prove, NamespaceOpened)


class LeasedOver(NamedTuple):
    """What the slots that are leased are read over.

    Attributes:
        word: for people. bit: of `Hello.transports`. transport: of `Ask`.
        error: what a connection raises that is of no use for it.
    """

    word: str
    bit: int
    transport: GrantTransport
    error: type[KvbmError]

    def not_opened(self) -> KvbmError:
        """What to raise where a namespace is not open on a connection."""
        return self.error(
            f"it does not open the namespace over {self.word}: it does not know it, or its tenant's secret is another"
        )


OVER_RDMA = LeasedOver("RDMA", RDMA, GrantTransport.RDMA, VerbsError)
OVER_NIXL = LeasedOver("NIXL", NIXL, GrantTransport.NIXL, NixlError)


class ReaderProof(NamedTuple):
    """Who reads, and what proves that it may.

    Attributes:
        key: shared with the owner.
        namespaces: all that it knows, with a root; no more than MOST_HANDLES are opened.
    """

    instance: InstanceId
    key: bytes
    root_of: RootOf
    namespaces: Callable[[], Sequence[Namespace]]


class LeasingConnection:
    """As `transport.leased.ProvedConnection`. One thread."""

    def __init__(self, over: LeasedOver, tcp: str, owner: InstanceId, reader: ReaderProof, until_s: float) -> None:
        """Connect, prove, and open.

        Args:
            tcp: host:port of the owner.
            until_s: of `time.monotonic`.
        Raises: OSError, PeerWireError, `over.error`: nobody is there, it is another, or it lends nothing that way.
        """
        host, port = split_address(tcp)
        ip = looked_up(host, max(0.0, until_s - time.monotonic()))
        if not ip:
            raise PeerWireError(f"the name {host} is not known")
        self._over, self._owner, self._reader = over, owner, reader
        self._handles: dict[NamespaceId, int] = {}
        self._request = 0
        self._socket = socket.create_connection((ip, port), timeout=max(0.001, until_s - time.monotonic()))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open(*self._shake_hands(until_s), until_s)
        except BaseException:
            self._socket.close()
            raise

    @property
    def socket(self) -> socket.socket:
        """The TCP connection."""
        return self._socket

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        """As `ProvedConnection.ask`.

        Raises `over.error`: the namespace is not open on this connection, which is to be made anew.
        """
        asked_s = time.monotonic()
        handle = self._handles.get(namespace.id)
        if handle is None:
            raise self._over.not_opened()  # it may open it on the next connection, and the secret may be another then
        self._request += 1
        left_ms = max(1, round(1000 * (until_s - asked_s)))
        send_message(
            self._socket,
            encode(Ask(self._request, handle, self._over.transport, min(left_ms, 1 << 31), hashes)),
            until_s,
        )
        answer = self._receive(until_s)
        if not isinstance(answer, Grant | Busy | Gone) or answer.request != self._request:
            raise PeerWireError(f"a {type(answer).__name__} answers no question")
        if isinstance(answer, Busy):
            return _nothing("", answer.retry_ms / 1000)
        if isinstance(answer, Gone) and answer.reason is GoneReason.NOT_OPENED:
            raise self._over.not_opened()
        if isinstance(answer, Gone):
            is_missing = answer.reason is GoneReason.NOT_HELD
            return _nothing("" if is_missing else f"it lends nothing over {self._over.word} now: {answer.reason.name}")
        if not answer.lease or any(tier != Tier.HOST for tier in answer.tiers):
            raise PeerWireError(f"a grant over {self._over.word} is a lease of slots in HOST")
        lasts_ms = answer.lease_ms - _MARGIN_MS - answer.lease_ms // _MARGIN_SHARE
        slots, checksums = (np.frombuffer(column, dtype="<u4") for column in (answer.slots, answer.checksums))
        return LeasedRun(answer.lease, asked_s + max(0, lasts_ms) / 1000, slots, checksums)

    def end(self, namespace: Namespace, lease: int, failed: bytes) -> None:
        """As `ProvedConnection.end`."""
        handle = self._handles.get(namespace.id, 0)
        send_message(self._socket, encode(End(lease, handle, failed)), time.monotonic() + _END_S)

    def close(self) -> None:
        """As `ProvedConnection.close`."""
        with suppress(OSError):  # a forked child may have it too
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _shake_hands(self, until_s: float) -> tuple[bytes, bytes]:
        """HELLO and PROVE of both: the nonces, the reader's and the owner's."""
        own = secrets.token_bytes(NONCE_BYTES)
        send_message(self._socket, encode(Hello(own, 0, self._over.bit, 0, self._reader.instance)), until_s)
        hello = self._expect(Hello, until_s)
        if hello.instance != self._owner:
            raise PeerWireError(f"{hello.instance!r} answers where {self._owner!r} should")
        if not hello.flags & KEY_ASKED or hello.nonce == own:
            raise PeerWireError("it asks for no key")
        key = self._reader.key
        send_message(
            self._socket, encode(Prove(key_proof(key, ProvingSide.READER, own, hello.nonce, self._owner))), until_s
        )
        proved = self._expect(Prove, until_s)
        if not hmac.compare_digest(proved.proof, key_proof(key, ProvingSide.OWNER, own, hello.nonce, self._owner)):
            raise PeerWireError("its key is another")
        if not hello.transports & self._over.bit:
            raise self._over.error(f"it lends nothing over {self._over.word} any more")
        return own, hello.nonce

    def _open(self, own: bytes, nonce: bytes, until_s: float) -> None:
        """Every namespace that can be: the owner's memory is for who has proved all that it has."""
        known = list(self._reader.namespaces())[:MOST_HANDLES]
        wishes = [
            Open(handle, one.id, open_proof(self._reader.root_of(one), own, nonce, one.id, self._owner))
            for handle, one in enumerate(known)
        ]
        send_message(self._socket, b"".join(encode(wish) for wish in wishes), until_s)
        for wish in wishes:
            opened = self._expect(NamespaceOpened, until_s)
            if opened.handle != wish.handle:
                raise PeerWireError(f"OPENED {opened.handle} answers {wish.handle}")
            if opened.is_open:
                self._handles[NamespaceId(wish.namespace)] = wish.handle

    def _expect(self, kind: type[_Said], until_s: float) -> _Said:
        message = self._receive(until_s)
        if not isinstance(message, kind):
            raise PeerWireError(f"a {type(message).__name__} where a {kind.__name__} is due")
        return message

    def _receive(self, until_s: float) -> Message:
        head = decode_head(receive_exactly(self._socket, HEAD_BYTES, until_s))
        message = decode_body(head.kind, receive_exactly(self._socket, head.body_bytes, until_s))
        if isinstance(message, Bye):
            raise PeerWireError(f"it hangs up: {message.words}")
        return message


def _nothing(trouble: str, retry_s: float = 0.0) -> LeasedRun:
    none = np.zeros(0, dtype=np.uint32)
    return LeasedRun(0, 0.0, none, none, trouble, retry_s)
