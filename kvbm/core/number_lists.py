"""Numbers of a JSON list, read as far as they are plain; what is not is for a JSON parser, which says what is wrong
with it.
"""

from __future__ import annotations

import re

import numpy as np

_ELEMENT = re.compile(rb"[ \n\t\r]*(0|[1-9][0-9]*)[ \n\t\r]*(,(?=[ \n\t\r]*[^ \n\t\r])|\Z)")
_LARGEST = (1 << 32) - 1


def read_number_list(text: bytes | bytearray | memoryview, at: int, into: np.ndarray) -> tuple[int, int]:
    """Read unsigned numbers of 32 bits: digits, blanks around them, commas between.

    It stops where the room is full, and before an element that is anything else, or whose comma nothing follows.

    Args:
        text: what stands between the brackets of the list.
        at: where an element begins in it.
        into: u32, takes the numbers from its start on.
    Returns: how many were read, and where the next element begins; the text's length when all were read.
    """
    count = 0
    while count < len(into):
        found = _ELEMENT.match(text, at)
        if found is None or int(found[1]) > _LARGEST:
            break
        into[count] = int(found[1])
        count, at = count + 1, found.end()
        if found[2] == b"":
            break
    return count, at
