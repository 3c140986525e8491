"""Owners that lend over NIXL, and readers of theirs: what is said comes over the readable owner's unix socket, bytes by
NIXL.

Owners and readers have a process of NIXL each, for all tests of a run: one takes a second to start.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.core.errors import PeerWireError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.reference.peer_server import ReadableOwner
from kvbm.transport.base import PeerReader, RootOf
from kvbm.transport.lending import Leases, LentLimits
from kvbm.transport.memory import MemoryReader
from kvbm.transport.nixl import NixlReader
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_hello import encode_hello, encode_ready
from kvbm.transport.nixl_owner import NixlOwner
from kvbm.transport.rdma import LeasedRun
from kvbm.transport.rdma_hello import send_message
from kvbm.transport.session import OwnerSession
from kvbm.transport.wire import (
    HEAD_BYTES,
    MEMORY,
    NONCE_BYTES,
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
    decode_body,
    decode_head,
    encode,
    open_proof,
)
from tests.lenders import (
    COPIER,
    EPOCH,
    KEY,
    NAMESPACE,
    OTHER,
    OWNER,
    READER,
    MemoryLender,
    SocketSite,
    new_client,
    root_of,
)

NIXL_S = 60.0  # the machine has other work


class _Owner(ReadableOwner):
    """The readable owner, which answers NIXL_HELLO too, and hangs up on who reads over NIXL when a namespace is
    added.
    """

    def __init__(self, nixl: NixlOwner, lender: MemoryLender, *more: Any, **options: Any) -> None:
        self.nixl, self._lender = nixl, lender
        self._admitted: dict[socket.socket, int] = {}
        super().__init__(*more, **options)

    def revoke(self) -> None:
        self.nixl.revoke()
        for connection in list(self._admitted):
            connection.shutdown(socket.SHUT_RDWR)

    def _converse(self, connection: socket.socket, session: OwnerSession) -> None:
        try:
            super()._converse(connection, session)
        finally:
            self.nixl.dismiss(self._admitted.pop(connection, 0))

    def _receive_idle(self, connection: socket.socket, session: OwnerSession) -> Message | None:
        while True:
            connection.settimeout(0.2)
            try:
                head = connection.recv(HEAD_BYTES, socket.MSG_PEEK)
            except TimeoutError:
                self._leases.expire(self._clock())
                continue
            if head != encode_hello():
                return super()._receive_idle(connection, session)
            connection.recv(HEAD_BYTES)
            self._join(connection, session)

    def _join(self, connection: socket.socket, session: OwnerSession) -> None:
        revoked = self.nixl.revoked
        opened = {one.namespace for one in session._open.values() if self._lender.opening(one.namespace) == one[1:]}
        admission = self.nixl.admit(self._lender.namespaces <= opened, revoked, NIXL_S)
        if admission.number:
            self._admitted[connection] = admission.number
        send_message(connection, encode_ready(admission.ready), time.monotonic() + NIXL_S)


class Connection:
    """As `ProvedConnection`: over the owner's unix socket, where what is asked for through memory is a lease of
    slots.
    """

    def __init__(self, unix: str, owner: str, namespaces: Sequence[Namespace], roots: RootOf, until_s: float) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self._until_s = until_s
        self._handles: dict[bytes, int] = {}
        self._block_bytes: dict[int, int] = {}
        try:
            self.socket.settimeout(max(0.001, until_s - time.monotonic()))
            self.socket.connect(unix)
            own = secrets.token_bytes(NONCE_BYTES)
            self._say(Hello(own, 0, MEMORY, 0, READER))
            hello = self._hear()
            assert isinstance(hello, Hello)
            if hello.instance != owner:
                raise PeerWireError(f"another instance answers: {hello.instance}")
            for handle, one in enumerate(namespaces):
                self._say(Open(handle, one.id, open_proof(roots(one), own, hello.nonce, one.id, owner)))
                opened = self._hear()
                if isinstance(opened, NamespaceOpened) and opened.is_open:
                    self._handles[one.id], self._block_bytes[handle] = handle, opened.block_bytes
        except BaseException:
            self.socket.close()
            raise

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        self._until_s, asked_s = until_s, time.monotonic()
        handle = self._handles.get(namespace.id)
        if handle is None:
            return _nothing("it does not open the namespace")
        left_ms = max(1, round(1000 * (until_s - asked_s)))
        self._say(Ask(1, handle, GrantTransport.MEMORY, left_ms, hashes))
        answer = self._hear()
        while isinstance(answer, ArenaShape):
            answer = self._hear()
        if isinstance(answer, Busy):
            return _nothing("it is busy", answer.retry_ms / 1000)
        if isinstance(answer, Gone):
            return _nothing("" if answer.reason is GoneReason.NOT_HELD else f"gone: {answer.reason.name}")
        assert isinstance(answer, Grant)
        if not answer.lease:  # NVME's bytes follow
            self._exactly(self._block_bytes[handle] * len(answer.tiers))
            return _nothing("")
        slots, checksums = (np.frombuffer(column, dtype="<u4") for column in (answer.slots, answer.checksums))
        return LeasedRun(answer.lease, asked_s + answer.lease_ms / 1000, slots, checksums)

    def end(self, namespace: Namespace, lease: int, failed: bytes) -> None:
        self._say(End(lease, self._handles[namespace.id], failed))

    def close(self) -> None:
        self.socket.close()

    def _say(self, message: Message) -> None:
        send_message(self.socket, encode(message), self._until_s)

    def _hear(self) -> Message:
        kind, size = decode_head(self._exactly(HEAD_BYTES))
        message = decode_body(kind, self._exactly(size))
        if isinstance(message, Bye):
            raise PeerWireError(f"it hangs up: {message.words}")
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.socket.settimeout(max(0.001, self._until_s - time.monotonic()))
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the other end closed the connection")
            data += piece
        return bytes(data)


def nixl_reader(
    process: NixlProcess,
    unix: str,
    owner: InstanceId = OWNER,
    roots: RootOf = root_of,
    known: Sequence[Namespace] = (NAMESPACE, OTHER),
    **more: Any,
) -> NixlReader:
    """A reader of the owner at a unix socket that reads with this process.

    Args:
        known: namespaces that it opens.
        more: options of `NixlReader`.
    """

    def connect(until_s: float) -> Connection:
        return Connection(unix, owner, known, roots, until_s)

    return NixlReader(process, connect, COPIER, **{"handshake_s": NIXL_S} | more)


class NixlSite(SocketSite):
    """An owner that lends over NIXL beside its sockets. What does not come over NIXL comes through memory.

    Args:
        processes: of the owner and of its readers.
        falls_back: False: readers read over NIXL alone.
    """

    def __init__(
        self,
        lender: MemoryLender,
        limits: LentLimits,
        folder: Path,
        processes: tuple[NixlProcess, NixlProcess],
        falls_back: bool = True,
    ) -> None:
        self.lends, self.reads = processes
        self._falls_back, self._admit = falls_back, lender.admit
        lender.admit = self._admit_namespace  # type: ignore[method-assign]
        super().__init__("nixl", lender, limits, folder, NIXL_S)

    def start(self) -> None:
        """Listen, where it listened before."""
        assert self.lender.memory is not None
        self.leases = Leases(self.lender, EPOCH, self._limits)
        self.nixl = NixlOwner(self.lends, self.lender.memory, most_readers=100)
        self.owner = _Owner(
            self.nixl, self.lender, self.leases, OWNER, EPOCH, self.unix, connections=200, handshake_s=self._handshake_s
        )

    def stop(self) -> None:
        self.owner.close()
        self.nixl.revoke()

    def reader(
        self,
        owner: InstanceId = OWNER,
        root_of: RootOf = root_of,
        key: bytes = KEY,
        streams: int = 2,
        **more: Any,
    ) -> PeerReader:
        known = more.pop("namespaces", (NAMESPACE, OTHER))
        others = MemoryReader(new_client, self.unix, READER, owner, root_of, streams) if self._falls_back else None
        made = nixl_reader(self.reads, self.unix, owner, root_of, known, others=others, **more)
        self._readers.append(made)
        return made

    def _admit_namespace(self, namespace: Namespace, root: bytes = b"") -> None:
        self.owner.revoke()
        self._admit(namespace, root)


def _nothing(trouble: str, retry_s: float = 0.0) -> LeasedRun:
    none = np.zeros(0, dtype=np.uint32)
    return LeasedRun(0, 0.0, none, none, trouble, retry_s)
