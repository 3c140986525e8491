"""What became of reads of blocks, wherever they were read from."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np


class ReadOutcome(IntEnum):
    """What became of one block's read. Only GOOD bytes may be used; everything else is a miss."""

    GOOD = 0
    MISSING = 1  # nothing there
    CORRUPT = 2  # bytes or header are not those of the block
    FAILED = 3  # the device or store did not answer or refused


class ReadResult(NamedTuple):
    """Outcome of each row, and the checksums that travel on with the good ones.

    Attributes:
        outcomes: n entries.
        checksums: n CRC-32C, u32; those of rows that are not GOOD mean nothing.
    """

    outcomes: list[ReadOutcome]
    checksums: np.ndarray
