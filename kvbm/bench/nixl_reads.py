"""Bare reads by NIXL of what a lender has in HOST, for `kvbm bench fetch`: one transfer for all blocks, no lease and no
checksum.

Both ends are processes of NIXL. UCX moves the bytes over TCP in segments of 1 MiB, or through shared memory.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from kvbm.bench.fetch_sides import Lender, timed_s
from kvbm.core.errors import KvbmError, MissingExtraError, NixlError
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_process import Fetch, Fetched, Join, receive, send

TCP = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m", "UCX_NET_DEVICES": "lo"}
SHARED_MEMORY = {"UCX_TLS": "shm"}
# UCX cannot tell through shared memory that the other end has died, which NIXL asks of it otherwise.
_TRUSTING = {"ucx_error_handling_mode": "none"}
_START_S, _READ_S = 30.0, 60.0


class NixlReads:
    """Reads all blocks of a lender, by NIXL alone. `opened` ends it.

    Args:
        environment: TCP or SHARED_MEMORY.
    Raises: MissingExtraError: NIXL is not installed. NixlError: it does not work here.
    """

    def __init__(
        self, lender: Lender, blocks: int, block_bytes: int, environment: Mapping[str, str], opened: ExitStack
    ) -> None:
        options = _TRUSTING if environment is SHARED_MEMORY else {}
        owner, reader = (NixlProcess(environment, options) for _ in range(2))
        opened.callback(owner.close)
        opened.callback(reader.close)
        until_s, size = time.monotonic() + _START_S, blocks * block_bytes
        there = os.open(lender.memory_path, os.O_RDONLY | os.O_CLOEXEC)
        here = os.memfd_create("kvbm-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(here, size)
            self.rows = np.frombuffer(mmap.mmap(here, size), dtype=np.uint8).reshape(blocks, block_bytes)
            lent, told = owner.lend(there, size, until_s)
            opened.callback(lent.close)
            self._way = reader.join(Join(told.metadata, blocks, block_bytes), here, until_s)
            opened.callback(self._way.close)
        finally:
            os.close(there)
            os.close(here)
        self._way.settimeout(_READ_S)
        self._all = Fetch([told.address + block * block_bytes for block in range(blocks)], list(range(blocks)))

    def read_s(self, wanted: np.ndarray) -> float:
        """Seconds to read all blocks.

        Raises NixlError: NIXL does not. ProcessError: they are others than wanted, flat uint8.
        """
        return timed_s(self._read, self.rows, wanted)

    def _read(self, _: np.ndarray) -> None:
        send(self._way, self._all)
        if not isinstance(answer := receive(self._way), Fetched):
            raise NixlError(f"a read by NIXL failed: {answer}")


def open_nixl(
    lender: Lender, blocks: int, block_bytes: int, opened: ExitStack
) -> tuple[dict[str, NixlReads], tuple[str, ...]]:
    """Reads by what name they have in numbers, "tcp_over_nixl" and "memory_over_nixl", and why there are none of a
    kind.
    """
    reads: dict[str, NixlReads] = {}
    notes: list[str] = []
    for name, environment in (("memory_over_nixl", SHARED_MEMORY), ("tcp_over_nixl", TCP)):
        try:
            reads[name] = NixlReads(lender, blocks, block_bytes, environment, opened)
        except MissingExtraError as error:
            return {}, (f"memory_over_nixl, tcp_over_nixl: not measured; {error}",)
        except (KvbmError, OSError) as error:
            notes.append(f"{name}: not measured; {error}")
    return reads, tuple(notes)
