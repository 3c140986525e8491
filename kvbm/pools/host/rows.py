"""Rows that are copied at the speed of memory, and the shared memory they lie in: what pools ask of native code."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class RowCopies(Protocol):
    """Copies and checksums of many rows of one size.

    Any thread; several at once share the threads. The GIL is released.

    Rows are 2-D uint8 arrays whose rows have their bytes side by side; the rows themselves may lie any distance apart,
    so a view such as `staging[:, 64 : 64 + block_bytes]` will do. `at` is a C-contiguous int64 array of row indexes, or
    None for every row.
    """

    @property
    def threads(self) -> int: ...

    def copy_rows(
        self,
        target: np.ndarray,
        target_at: np.ndarray | None,
        source: np.ndarray,
        source_at: np.ndarray | None,
        checksums: np.ndarray | None = None,
    ) -> None:
        """Copy row source_at[i] of `source` to row target_at[i] of `target`, for each i.

        Rows of `target` must be named once each and share no byte with those of `source`.

        Args:
            checksums: room for n CRC-32C, u32, of the rows that were copied; computed while they are in the cache.
        Raises: LayoutError: shapes disagree or an index is outside; not a byte has moved.
        """

    def checksum_rows(self, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """CRC-32C of each row `at` names, u32. Raises LayoutError: an index is outside."""


class Arena(Protocol):
    """Memory that other processes can map by its file descriptor, every page of it there already.

    It lives as long as views of it.

    Attributes:
        fd: its memfd, closed with the arena; -1 where the system has none. Sealed: it neither shrinks nor grows.
        bytes: its size, whole pages.
        page_bytes: size of one page as it was asked for: those of the huge page pool, or the system's.
        memory: all its bytes, uint8; begins at a multiple of 4,096, of 2 MiB where large enough.
    """

    @property
    def fd(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def memory(self) -> np.ndarray: ...


class NewArena(Protocol):
    """Makes an arena."""

    def __call__(
        self,
        name: str,
        bytes: int,
        huge_pages: bool = False,
        advise: bool = True,
        numa_node: int = -1,
        threads: int = 1,
    ) -> Arena:
        """Take the memory, every page of it.

        Args:
            name: what tools show for it.
            bytes: at least 1; rounded up to whole pages.
            huge_pages: from the system's pool of huge pages, or not at all.
            advise: else, transparent huge pages, as far as the machine makes them by request.
            numa_node: node that every page must be of; -1: any.
            threads: that touch the pages.
        Raises: OSError: the system refuses; nothing was taken.
        """
