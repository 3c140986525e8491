"""Blocks from another instance over TCP, in up to two streams for a read: received into their rows and held to their
checksums there.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvbm.core.errors import ConfigError
from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.base import PeerRead, RootOf, check_wish, failed_read
from kvbm.transport.native import NewPeerClient, PeerClient, PeerTls, read_natively

_STREAMS = 2


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port or [IPv6]:port. Raises ConfigError: it is neither."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is no host:port")
    return host, int(port)


class TcpReader:
    """A reader of one instance over TCP.

    Args:
        tcp: host:port of the owner. A name is looked up when it is needed, and anew after trouble.
        instance, owner: who reads, and who is to answer.
        key: shared with the owner; each proves to the other that it has it. With `tls` there may be none; where there
            is one, the owner must have it too.
        streams: connections, at most; a read uses two of them, and others wait.
        tls: what connections are secured with; an owner without it is not read from. None: bytes come as they are.
    Raises: ConfigError: the address is none, or there is neither a key nor TLS.
    """

    transport = "tcp"

    def __init__(
        self,
        new_client: NewPeerClient,
        tcp: str,
        instance: InstanceId,
        owner: InstanceId,
        root_of: RootOf,
        key: bytes,
        streams: int = _STREAMS,
        tls: PeerTls | None = None,
    ) -> None:
        if not key and tls is None:
            raise ConfigError(f"blocks are read over TCP with a key that both sides have; there is none for {tcp}")
        self._host, self._port = split_address(tcp)
        self._new_client, self._root_of = new_client, root_of
        self._instance, self._owner, self._key, self._streams, self._tls = instance, owner, key, streams, tls
        self._lock = threading.Lock()
        self._client_of: tuple[str, PeerClient] | None = None  # of an IP address
        self._is_closed = False
        self._ip = ip_of(self._host)

    def read(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> PeerRead:
        """As `PeerReader.read`."""
        count = check_wish(hashes, rows, at)
        until_s = time.monotonic() + deadline_s
        ip = self._ip or looked_up(self._host, deadline_s)
        client = self._client(ip) if ip else None
        if client is None:
            return failed_read(count, "this reader is closed" if ip else f"the name {self._host} is not known")
        self._ip = ip
        found = read_natively(client, self._root_of, namespace, hashes, rows, at, max(0.0, until_s - time.monotonic()))
        if found.trouble and not found.retry_s:
            self._ip = ip_of(self._host)
        return found

    def close(self) -> None:
        """As `PeerReader.close`."""
        with self._lock:
            self._is_closed = True
            last = self._client_of
        if last:
            last[1].close()

    def _client(self, ip: str) -> PeerClient | None:
        """The client of an address;

        None: this is closed. Reads from another address, where the name was before, are ended.
        """
        with self._lock:
            if self._is_closed:
                return None
            before = self._client_of
            if before is None or before[0] != ip:
                client = self._new_client(
                    True, ip, self._port, self._instance, self._owner, self._key, self._streams, tls=self._tls
                )
                self._client_of = (ip, client)
            else:
                return before[1]
        if before:
            before[1].close()
        return client


def ip_of(host: str) -> str:
    """The host where it is an IP address; empty: it is a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def looked_up(host: str, within_s: float) -> str:
    """An address of a name; empty: there is none, or not in time.

    The system's lookup has no deadline, so it gets a thread.
    """
    found: list[str] = []

    def look_up() -> None:
        try:
            found.append(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
        except (OSError, UnicodeError):
            pass  # nothing is found

    thread = threading.Thread(target=look_up, name="kvbm-name", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system gives no thread
        return ""
    thread.join(within_s)
    return found[0] if found else ""
