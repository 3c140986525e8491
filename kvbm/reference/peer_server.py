"""An owner that lends over sockets, in Python: the readable twin of the native server, which tests hold to the same.

A thread for each connection, which is enough for tests and shows what is to happen; an engine's owner must answer while
its engine has the GIL, so it is native.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvbm.core.errors import KvbmError, PeerWireError
from kvbm.safe_log import SafeLog
from kvbm.transport.lending import Leases
from kvbm.transport.session import LenderIdentity, OwnerSession, Reply
from kvbm.transport.wire import HEAD_BYTES, Bye, Message, PeerMessageKind, decode_body, decode_head, encode

log = SafeLog()

_HANDSHAKE_S = 2.0
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # where there is no descriptor for who comes
_CONNECTIONS = 64
_BACKLOG = 64
_BYE_S = 0.1  # for a last word
_MOST_DRAINED_BYTES = 1 << 20


class ReadableOwner:
    """Lends what a lender has, over a unix socket, TCP or both. Any thread.

    Attributes:
        tcp: host:port that it listens on; empty: none.
    """

    def __init__(
        self,
        leases: Leases,
        instance: str,
        epoch: int,
        unix: str = "",
        tcp: str = "",
        key: bytes = b"",
        connections: int = _CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
        handshake_s: float = _HANDSHAKE_S,
    ) -> None:
        """Begin to lend.

        Args:
            unix: path of a socket that only this user can connect to.
            tcp: host:port; port 0: any. Needs a key.
            connections: at once, at most.
            handshake_s: as of `LendingOptions`.
        Raises: KvbmError: TCP without a key. OSError: an address cannot be had.
        """
        if tcp and not key:
            raise KvbmError("blocks are lent over TCP to whoever has a key; name one")
        self._leases, self._clock, self._connections = leases, clock, connections
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._unix = unix
        self._listeners: list[socket.socket] = []
        self.tcp = ""
        if unix:
            self._listen(_unix_listener(unix), LenderIdentity(instance, epoch, b"", True))
        if tcp:
            listener = _tcp_listener(tcp)
            host, port = listener.getsockname()[:2]
            self.tcp = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._listen(listener, LenderIdentity(instance, epoch, key, False))

    def close(self) -> None:
        """End all connections and leases, and wait for the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            sockets = [*self._listeners, *self._open]
        for one in sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has gone by itself
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()
        if self._unix:
            Path(self._unix).unlink(missing_ok=True)
            self._unix = ""

    def _listen(self, listener: socket.socket, identity: LenderIdentity) -> None:
        self._listeners.append(listener)
        self._start(self._accept, listener, identity)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="kvbm-lend", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _accept(self, listener: socket.socket, identity: LenderIdentity) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in _NO_MORE and not self._is_closed:
                    time.sleep(_PAUSE_S)  # until somebody gives one back
                    continue
                return  # closed
            with self._lock:
                is_welcome = not self._is_closed and len(self._open) < self._connections
                if is_welcome:
                    self._open.add(connection)
            if is_welcome:
                try:
                    self._start(self._serve, connection, identity)
                except RuntimeError:  # the system gives no thread; who comes later may get one
                    with self._lock:
                        self._open.discard(connection)
                    _hang_up(connection, "no thread")
            else:
                _hang_up(connection, "as many connections as there may be")

    def _serve(self, connection: socket.socket, identity: LenderIdentity) -> None:
        session = OwnerSession(self._leases, identity)
        words = "closing"
        try:
            if identity.is_unix and _user_of(connection) != os.geteuid():
                raise PeerWireError("another user's process")
            self._converse(connection, session)
        except PeerWireError as error:
            words = str(error)
            log.warning("peer.refused", why=words)
        except OSError as error:
            words = f"too late or gone: {error}"
        finally:
            session.end()
            _hang_up(connection, words)
            with self._lock:
                self._open.discard(connection)

    def _converse(self, connection: socket.socket, session: OwnerSession) -> None:
        until_s = self._clock() + self._handshake_s
        _send(connection, encode(session.hello()), until_s - self._clock())
        while True:
            if not session.is_ready:
                message = self._receive(connection, session, until_s - self._clock())
            else:
                message = self._receive_idle(connection, session)
            if message is None or isinstance(message, Bye):
                return
            for reply in session.step(message, self._clock()):
                self._reply(connection, reply)

    def _receive_idle(self, connection: socket.socket, session: OwnerSession) -> Message | None:
        """The next message, whenever it begins; leases run out meanwhile."""
        while True:
            end_s = self._leases.next_end_s(session.leases)
            connection.settimeout(None if end_s is None else max(0.001, end_s - self._clock()))
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    return None
                return self._receive(connection, session, self._handshake_s)
            except TimeoutError:
                self._leases.expire(self._clock())

    def _receive(self, connection: socket.socket, session: OwnerSession, within_s: float) -> Message | None:
        """A message that has begun, or must within the time.

        None: the reader has gone. Raises PeerWireError, OSError.
        """
        until_s = self._clock() + within_s
        head = self._exactly(connection, HEAD_BYTES, until_s)
        if head is None:
            return None
        kind, body_bytes = decode_head(head)
        if kind not in session.awaits:
            raise PeerWireError(f"a {PeerMessageKind(kind).name} is not awaited")
        body = self._exactly(connection, body_bytes, until_s)
        return None if body is None else decode_body(kind, body)

    def _exactly(self, connection: socket.socket, count: int, until_s: float) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            connection.settimeout(max(0.001, until_s - self._clock()))
            try:
                piece = connection.recv(min(1 << 16, count - len(data)))
            except TimeoutError:
                raise PeerWireError("half a message, and then nothing") from None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _reply(self, connection: socket.socket, reply: Reply) -> None:
        until_s = self._clock() + reply.within_s
        try:
            data, memory = encode(reply.message), self._leases.lender.memory
            if reply.has_memory and memory is not None:
                connection.settimeout(reply.within_s)
                sent = socket.send_fds(connection, [data], [memory.fd])
                data = data[sent:]
            _send(connection, data, until_s - self._clock())
            for row in reply.rows:
                _send(connection, row.data, until_s - self._clock())
        finally:
            if reply.lease:
                self._leases.end(reply.lease)


def _send(connection: socket.socket, data: bytes | memoryview, within_s: float) -> None:
    """Send all of it. Raises OSError: not in time, or the reader has gone."""
    until_s = time.monotonic() + max(0.001, within_s)
    connection.setblocking(False)
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            _wait_for_room(connection, until_s)


def _wait_for_room(connection: socket.socket, until_s: float) -> None:
    """A TCP reader that has hung up with its window shut still acknowledges whatever the system tries, for a minute and
    more: no room would come, and no error. Raises OSError: as `_send`.
    """
    ends = 0 if connection.family == socket.AF_UNIX else select.POLLRDHUP  # a unix socket's end is an error at once
    poller = select.poll()
    poller.register(connection, select.POLLOUT | ends)
    left_s = until_s - time.monotonic()
    found = poller.poll(1000 * left_s) if left_s > 0 else []
    if not found:
        raise TimeoutError("the reader takes nothing more in time")
    if found[0][1] & (select.POLLOUT | select.POLLRDHUP) == select.POLLRDHUP:
        raise ConnectionResetError("the reader has hung up")


def _hang_up(connection: socket.socket, words: str) -> None:
    try:
        connection.settimeout(_BYE_S)
        connection.send(encode(Bye(words)), socket.MSG_DONTWAIT)
        connection.shutdown(socket.SHUT_WR)
        left = _MOST_DRAINED_BYTES  # what is still on its way here would have the system throw away what we said
        while left > 0 and (piece := connection.recv(1 << 16)):
            left -= len(piece)
    except OSError:
        pass  # it goes unsaid
    connection.close()


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _unix_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or _answers(path):
                raise
            Path(path).unlink()  # of an owner that was killed
            listener.bind(path)
        Path(path).chmod(0o600)  # before anybody can connect
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) != errno.ECONNREFUSED


def _tcp_listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return socket.create_server(
        (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
    )
