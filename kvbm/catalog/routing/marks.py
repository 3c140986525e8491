"""Where prompts that were routed are noted: at some of their depths, which stand for all.

The first 256 are noted each; beyond those the depth that is found is less than 1 % too small, and that of the same
prompt is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbm.core.answers import MAX_HASHES

EXACT_BLOCKS = 256
Depths = npt.NDArray[np.int64]


def _marks() -> Depths:
    """Depths at which a chain is noted: all at first, then 128 between each two powers of two."""
    depths = list(range(1, EXACT_BLOCKS + 1))
    while depths[-1] < MAX_HASHES:
        first = depths[-1]
        step = 2 * first // EXACT_BLOCKS
        depths += range(first + step, 2 * first + 1, step)
    return np.array(depths, np.int64)


_MARKS = _marks()


def marked_depths(first: int, blocks: int) -> Depths:
    """Depths behind `first` at which a prompt of so many full blocks is noted, ascending; the last is all of it."""
    depths = _MARKS[: int(np.searchsorted(_MARKS, blocks, side="right"))]
    if blocks and (not len(depths) or depths[-1] != blocks):
        depths = np.append(depths, blocks)
    return depths[int(np.searchsorted(depths, first, side="right")) :]
