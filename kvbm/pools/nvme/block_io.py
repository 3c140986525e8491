"""What the NVME pool asks of the engine that moves its blocks: runs in, one outcome for each block out.

A slot is found in file `slot % len(fds)`, as its slot `slot // len(fds)`:

    file    0  4096 bytes that are the pool's own; then slots, each `stride` apart
    slot    0  4096      the block's header as in slot_header.py (magic "KVBS"), its seal if it has one, then zeros
         4096  …         the block's bytes, then nothing up to a multiple of 4,096

The engine holds every header and every byte to what was asked for, in native threads and without the GIL, while the
device goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

PAGE_BYTES = 4096


def stride_of(block_bytes: int) -> int:
    """Bytes from one slot to the next: the header's page and the block, in whole pages."""
    return PAGE_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class BlockIoOptions(NamedTuple):
    """How an engine moves blocks; the meanings and choices are those of `NvmeSettings`.

    Attributes:
        encrypted: whether the engine seals them.
    """

    io: str = "auto"
    direct: str = "auto"
    depth: int = 32
    offload_share: float = 0.25
    encrypted: bool = False


class BlockEngine(Protocol):
    """Moves blocks between rows and files. Any number of calls at a time; each blocks until its whole run has ended.

    Reads are urgent and go first; writes are background, and while there are urgent transfers, or were a moment ago,
    they use only `offload_share` of the depth, and few bytes. A transfer that the device never ends keeps its call.

    Attributes:
        io: "io_uring" or "threads": what moves the bytes.
        refusal: why io_uring was wanted and is not used, "" when it is.
    """

    @property
    def io(self) -> str: ...
    @property
    def refusal(self) -> str: ...

    def read(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, namespace: bytes, hashes: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill row `at[i]` from slot `slots[i]`, both i64. Once closed everything has FAILED.

        Returns: n `ReadOutcome`, uint8: GOOD, CORRUPT or FAILED; n CRC-32C of the rows, u32, which mean nothing where a
            row is not GOOD.
        """

    def write(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        epoch: int,
        checksums: np.ndarray,
        generation: int = 0,
    ) -> np.ndarray:
        """Put row `at[i]` and its header into slot `slots[i]`, with the pool's generation.

        Returns n numbers as in `errno`, i32; 0: it is there.
        """

    def scan(
        self, slots: np.ndarray, depth: int
    ) -> tuple[np.ndarray, bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
        """Read headers alone, `depth` at a time of each file: the columns of `pool.Headers`.

        Reads and writes of blocks do not wait for it.
        """

    def close(self, timeout_s: float) -> bool:
        """Refuse what has not begun, wait for what the device has.

        False: it still has something, and rows and files must stay.

        Idempotent.
        """


class OpenEngine(Protocol):
    """Makes an engine over open files, which stay the caller's.

    `io` is "auto", "io_uring" or "threads"; `direct`: the files are open past the page cache, so positions, lengths and
    memory must be aligned. Raises OSError: io_uring was asked for by name and is refused.
    """

    def __call__(
        self, fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
    ) -> BlockEngine: ...
