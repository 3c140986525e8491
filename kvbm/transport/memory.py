"""Blocks from the memory of another instance of this user on this machine: mapped once, copied, and held to their
checksums here.

What the owner has on NVME alone it sends over the same unix socket.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbm.core.ids import InstanceId, Namespace
from kvbm.transport.base import PeerRead, RootOf
from kvbm.transport.native import NewPeerClient, read_natively

_STREAMS = 2


class MemoryReader:
    """A reader of one instance's memory.

    Args:
        unix: path of the owner's socket.
        instance, owner: who reads, and who is to answer.
        streams: reads under way at once, at most; others wait for them.
    """

    transport = "memory"

    def __init__(
        self,
        new_client: NewPeerClient,
        unix: str,
        instance: InstanceId,
        owner: InstanceId,
        root_of: RootOf,
        streams: int = _STREAMS,
    ) -> None:
        self._root_of = root_of
        self._client = new_client(False, unix, 0, instance, owner, b"", streams)

    def read(
        self,
        namespace: Namespace,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> PeerRead:
        """As `PeerReader.read`."""
        return read_natively(self._client, self._root_of, namespace, hashes, rows, at, deadline_s)

    def close(self) -> None:
        """As `PeerReader.close`."""
        self._client.close()
