"""What an owner says to one reader: the readable twin of the native server's sessions. No socket, no thread, no clock.

A session begins with HELLO of both; where a key is asked for, the reader proves that it has it, then the owner does.
From then on the reader opens namespaces and asks. Whoever does not keep to that is told why and hung up on.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.errors import PeerWireError
from kvbm.transport.lending import Leases, PinnedRun
from kvbm.transport.wire import (
    KEY_ASKED,
    MEMORY,
    NONCE_BYTES,
    TCP,
    Ask,
    Busy,
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
    key_proof,
    open_proof,
)

_ONCE_READY = frozenset({PeerMessageKind.OPEN, PeerMessageKind.ASK, PeerMessageKind.END, PeerMessageKind.BYE})


class Reply(NamedTuple):
    """What an owner sends.

    Attributes:
        has_memory: the descriptor of HOST's memory rides along.
        lease: ends once the rows have been sent, or could not be; 0: none does.
        rows: bytes of blocks that follow the message at once.
        within_s: after which nobody waits for it any more.
    """

    message: Message
    has_memory: bool = False
    lease: int = 0
    rows: Sequence[np.ndarray] = ()
    within_s: float = 2.0


class LenderIdentity(NamedTuple):
    """Who lends, and how: its instance id and epoch, the key it asks for (empty: none), and whether the socket is a
    unix socket.
    """

    instance: str
    epoch: int
    key: bytes
    is_unix: bool


class _Opening(NamedTuple):
    namespace: bytes
    root: bytes
    block_bytes: int


class OwnerSession:
    """One reader's connection, as its owner sees it. One thread.

    Attributes:
        awaits: kinds of messages that may come next; another one is refused before its body is awaited.
        leases: that this reader has, some of which may be over.
    """

    def __init__(self, leases: Leases, identity: LenderIdentity, nonce: bytes = b"") -> None:
        self._all, self._identity = leases, identity
        self._lender = leases.lender
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._reader_nonce = b""
        self._open: dict[int, _Opening] = {}
        self._memory_is_known = False
        self.awaits: frozenset[PeerMessageKind] = frozenset({PeerMessageKind.HELLO})
        self.leases: list[int] = []

    def hello(self) -> Hello:
        """What is said first, whatever the reader says."""
        transports = TCP | (MEMORY if self._has_memory else 0)
        flags, epoch = (KEY_ASKED, 0) if self._identity.key else (0, self._identity.epoch)  # nothing is proved yet
        return Hello(self._nonce, epoch, transports, flags, self._identity.instance)

    @property
    def is_ready(self) -> bool:
        """The reader is who it may be."""
        return self.awaits is _ONCE_READY

    def step(self, message: Message, now_s: float) -> list[Reply]:
        """Answer a message of a kind that is awaited.

        Raises PeerWireError: the reader does not keep to the protocol.
        """
        match message:
            case Hello(nonce):
                self._reader_nonce = nonce
                self.awaits = frozenset({PeerMessageKind.PROVE}) if self._identity.key else _ONCE_READY
                return []
            case Prove(proof):
                return [Reply(self._proved(proof))]
            case Open(handle, namespace, proof):
                return [Reply(self._opened(handle, namespace, proof))]
            case Ask():
                return self._answer(message, now_s)
            case End(lease, handle, hashes):
                self._end(lease, handle, hashes)
                return []
            case _:
                raise PeerWireError(f"a {type(message).__name__} is for readers")

    def end(self) -> None:
        """The connection has ended, and with it what was lent over it."""
        for lease in self.leases:
            self._all.end(lease)
        self.leases.clear()

    @property
    def _has_memory(self) -> bool:
        return self._identity.is_unix and self._lender.memory is not None

    def _proof(self, role: ProvingSide) -> bytes:
        return key_proof(self._identity.key, role, self._reader_nonce, self._nonce, self._identity.instance)

    def _proved(self, proof: bytes) -> Prove:
        if not hmac.compare_digest(proof, self._proof(ProvingSide.READER)):
            raise PeerWireError("the key is another")
        self.awaits = _ONCE_READY
        return Prove(self._proof(ProvingSide.OWNER))

    def _opened(self, handle: int, namespace: bytes, proof: bytes) -> NamespaceOpened:
        found = self._lender.opening(namespace)
        root, block_bytes = found or (secrets.token_bytes(16), 0)  # unknown and wrong take the same time
        wanted = open_proof(root, self._reader_nonce, self._nonce, namespace, self._identity.instance)
        if not hmac.compare_digest(proof, wanted) or not found:
            self._open.pop(handle, None)
            return NamespaceOpened(handle, False, 0)
        self._open[handle] = _Opening(namespace, root, block_bytes)
        return NamespaceOpened(handle, True, block_bytes)

    def _answer(self, ask: Ask, now_s: float) -> list[Reply]:
        opening = self._open.get(ask.handle)
        if self._all.is_fenced:
            return [Reply(Gone(ask.request, GoneReason.FENCED))]
        if ask.transport is GrantTransport.MEMORY and not self._has_memory:
            raise PeerWireError("memory is asked for where none is offered")
        if opening is None or self._lender.opening(opening.namespace) != opening[1:]:
            self._open.pop(ask.handle, None)
            return [Reply(Gone(ask.request, GoneReason.NOT_OPENED))]
        if ask.transport in (GrantTransport.RDMA, GrantTransport.NIXL):  # which this twin does not offer
            raise PeerWireError("slots are asked for by who cannot read them")
        lent = self._all.lend(opening.namespace, ask.hashes)
        if lent is None:
            return [Reply(Gone(ask.request, GoneReason.NOT_HELD))]
        in_host = lent.host_blocks() if ask.transport is GrantTransport.MEMORY else 0
        if in_host:
            lent, others = lent.cut(in_host)
            self._lender.give_back(others)
        lease = self._all.begin(lent, now_s, is_timed=bool(in_host))
        if not lease:
            return [Reply(Busy(ask.request, round(self._all.limits.retry_s * 1000)))]
        return self._granted(ask, lent, lease, bool(in_host))

    def _granted(self, ask: Ask, lent: PinnedRun, lease: int, is_memory: bool) -> list[Reply]:
        lease_ms = int(self._all.limits.lease_s * 1000) if is_memory else 0
        checksums = lent.checksums.astype("<u4").tobytes()
        grant = Grant(
            ask.request, lease if is_memory else 0, lease_ms, bytes(lent.tiers), lent.packed_slots(), checksums
        )
        if not is_memory:
            return [Reply(grant, lease=lease, rows=lent.rows, within_s=ask.time_left_ms / 1000)]
        self.leases.append(lease)
        memory = self._lender.memory
        if self._memory_is_known or memory is None:
            return [Reply(grant)]
        self._memory_is_known = True
        return [Reply(memory.shape, has_memory=True), Reply(grant)]

    def _end(self, lease: int, handle: int, failed: bytes) -> None:
        is_ours = lease in self.leases
        if is_ours:
            self.leases.remove(lease)
            self._all.end(lease)
        opening = self._open.get(handle)
        if failed and opening and (is_ours or not lease):
            self._lender.suspect(opening.namespace, failed)
