"""What readers ask of native code: one client for one other instance, which needs no GIL while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvbm.core.ids import Namespace
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.transport.base import PeerRead, RootOf, check_wish

MOST_DEADLINE_S = 1e6


class PeerClient(Protocol):
    """Reads from one other instance over a few connections, which it makes when they are needed. Any thread."""

    def read(
        self, namespace: bytes, root: bytes, hashes: bytes, rows: np.ndarray, at: np.ndarray | None, deadline_s: float
    ) -> tuple[bytes, np.ndarray, str, float, bool]:
        """As `PeerReader.read`: outcomes as bytes, checksums, what went wrong, seconds until to come again, whether the
        namespace is shut.
        """

    def close(self) -> None:
        """End reads under way, wait for them. Idempotent."""


class PeerTls(Protocol):
    """TLS 1.3 of an instance with others: its certificate, and whom it trusts.

    Its server and its clients share it. Any thread.

    Files that are replaced are read by the next connection; where they cannot be used, those before stay in use.
    """


class NewPeerTls(Protocol):
    """Reads the files of an instance's certificate."""

    def __call__(self, cert: str, key: str, ca: str, library: str = ...) -> PeerTls:
        """What connections over TCP are secured with.

        Args:
            cert, key, ca: files (PEM): this instance's certificate, its key, and who signs all instances' certificates.
            library: OpenSSL's, as the system finds it.
        Raises: ConfigError: there is no OpenSSL 3, or a file cannot be used.
        """


class NewPeerClient(Protocol):
    """Makes a client; nothing is connected yet."""

    def __call__(
        self,
        is_tcp: bool,
        address: str,
        port: int,
        reader: str,
        owner: str,
        key: bytes,
        streams: int,
        *,
        tls: PeerTls | None = None,
    ) -> PeerClient:
        """A client.

        Args:
            address: path of a unix socket, or an IP address in digits; port: with the latter.
            reader, owner: instance ids, of this one and of whom is to answer; whoever else answers is refused.
            key: shared with the owner.
            streams: connections, at most.
            tls: what connections over TCP are secured with; None: bytes come as they are.
        Raises: LayoutError: a name is too long, or the port is none.
        """


def read_natively(
    client: PeerClient,
    root_of: RootOf,
    namespace: Namespace,
    hashes: bytes,
    rows: np.ndarray,
    at: Sequence[int] | None,
    deadline_s: float,
) -> PeerRead:
    """As `PeerReader.read`."""
    check_wish(hashes, rows, at)
    indexes = None if at is None else np.ascontiguousarray(at, dtype=np.int64)
    outcomes, checksums, trouble, retry_s, is_shut = client.read(
        namespace.id, root_of(namespace), hashes, rows, indexes, deadline_s
    )
    return PeerRead(ReadResult([ReadOutcome(outcome) for outcome in outcomes], checksums), trouble, retry_s, is_shut)
