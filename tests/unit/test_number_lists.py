"""Numbers of a JSON list are read as far as they are plain, in Python and in C++ alike."""

from __future__ import annotations

import numpy as np
import pytest

from kvbm.assembly.native import NATIVE
from kvbm.core.backend import REFERENCE, ReadNumberList

READS = pytest.mark.parametrize(
    "read", [NATIVE.read_number_list, REFERENCE.read_number_list], ids=["native", "reference"]
)


@READS
def test_numbers_are_read_as_far_as_they_are_plain(read: ReadNumberList) -> None:
    for text, at, room, found, end in (
        (b"1,2,3", 0, 9, [1, 2, 3], 5),
        (b"1,2,3", 0, 2, [1, 2], 4),
        (b"1,2,3", 4, 9, [3], 5),
        (b"1,2,", 0, 9, [1], 2),
        (b" 1 , 22\n,x", 0, 9, [1, 22], 9),
        (b"4294967295,4294967296", 0, 9, [4294967295], 11),
        (b"007", 0, 9, [], 0),
        (b"1, ,2", 0, 9, [1], 2),
        (b"", 0, 9, [], 0),
        (b"5", 0, 0, [], 0),
        (b"1,18446744073709551617", 0, 9, [1], 2),
        (b"3", 1, 9, [], 1),
    ):
        into = np.full(room, 77, np.uint32)
        assert (*read(text, at, into)[:1], into[: len(found)].tolist(), read(text, at, into)[1]) == (
            len(found),
            found,
            end,
        ), text
        assert (into[len(found) :] == 77).all()
