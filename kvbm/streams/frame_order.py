"""Where a frame lies, seen from the place that a reader has reached in its instance's stream: the rule of whoever
follows a stream.

The catalog and `kvbm-replay` ask it of every frame that does not simply come next, and of every frame in their reorder
buffers. What each makes of the answer is its own: the catalog goes on with what is there, and replay waits until
nothing more can come.
"""

from __future__ import annotations

from enum import Enum, auto

from kvbm.core.codec import ScannedFrame
from kvbm.streams.base import Position


class Order(Enum):
    """Where a frame lies.

    A reader's place is (epoch, next offset). A publisher that lost an acknowledgement goes back and sends again, so
    that its frames may lie as 0 1 3 4 2 3 4.
    """

    STALE = auto()  # its epoch is older than the place's
    REPEAT = auto()  # all of its events were read
    OVERLAP = auto()  # it begins before the place and ends beyond: the same events, cut in another way
    NEXT = auto()  # it begins at the place
    BEYOND = auto()  # it begins beyond the place: what lies between is a hole
    START = auto()  # the first frame of a newer epoch: the one before is over
    MIDSTREAM = auto()  # a later frame of a newer epoch: its start is no longer, or not yet, on the stream


def order_of(frame: ScannedFrame, place: Position) -> Order:
    """Where a frame lies, seen from a place; who has read nothing is at ORIGIN."""
    epoch, offset = place
    if frame.epoch != epoch:
        if frame.epoch < epoch:
            return Order.STALE
        return Order.MIDSTREAM if frame.first_offset else Order.START
    if frame.first_offset > offset:
        return Order.BEYOND
    if frame.first_offset == offset:
        return Order.NEXT
    return Order.OVERLAP if frame.next_offset > offset else Order.REPEAT
