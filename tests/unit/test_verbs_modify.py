"""Where pyverbs' C structs are taken to lie: objects that are made otherwise are refused.

No device; `make test-rdma` has real ones.
"""

from __future__ import annotations

import pytest

from kvbm.core.errors import VerbsError
from kvbm.verbs import modify


class Base:
    __slots__ = ()


class QP(Base):
    """As pyverbs' has, a pointer behind what it inherits; here to bytes, whose head has a count, a type, a size and a
    hash that is not known.
    """

    __slots__ = ("struct",)
    qp_num = 0x1234

    def __init__(self, number: int, kind: int, srq: int) -> None:
        words = (
            b"\xff" * 8,
            srq.to_bytes(8, "little"),
            bytes(4),
            number.to_bytes(4, "little"),
            bytes(4),
            kind.to_bytes(4, "little"),
        )
        self.struct = b"".join(words)


def test_a_pointer_is_believed_where_it_leads_to_this_queue_pair() -> None:
    pair = QP(0x1234, 2, 0)
    assert modify._pair_at(pair) == id(pair.struct)


@pytest.mark.parametrize("words", [(0x1235, 2, 0), (0x1234, 4, 0), (0x1234, 2, 1)])
def test_a_pointer_to_something_else_is_refused(words: tuple[int, int, int]) -> None:
    with pytest.raises(VerbsError, match="no queue pair 4660"):
        modify._pair_at(QP(*words))


@pytest.mark.parametrize("address", [0, 16, (1 << 64) - 4096])
def test_a_pointer_to_nothing_is_an_error_and_no_crash(address: int) -> None:
    with pytest.raises(VerbsError, match="no queue pair lies"):
        modify._read(address, 64)


def test_an_object_of_another_class_is_refused() -> None:
    for one in (object(), Base(), type("QP", (QP,), {"__slots__": ()})(0x1234, 2, 0)):
        with pytest.raises(VerbsError, match="of its own"):
            modify._pair_at(one)
