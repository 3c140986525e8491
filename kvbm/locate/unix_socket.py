"""HTTP over a unix socket, for a catalog on the same machine."""

from __future__ import annotations

import socket

import urllib3
from urllib3.connection import HTTPConnection


def unix_pool(path: str, connections: int) -> urllib3.HTTPConnectionPool:
    """Connections to the server that listens on a path.

    Args:
        connections: kept at most.
    """

    class UnixConnection(HTTPConnection):
        def connect(self) -> None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(self.timeout if isinstance(self.timeout, int | float) else None)
                sock.connect(path)
            except TimeoutError:
                sock.close()
                raise urllib3.exceptions.ConnectTimeoutError(self, f"{path} does not take the connection") from None
            except OSError as error:
                sock.close()
                raise urllib3.exceptions.NewConnectionError(self, f"{path}: {error.strerror or error}") from None
            self.sock = sock

    pool = urllib3.HTTPConnectionPool("localhost", maxsize=connections, retries=False)
    pool.ConnectionCls = UnixConnection
    return pool
