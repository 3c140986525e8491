"""Frames as they lie → steps in the order of offsets: repeats known as such, frames beyond a hole kept in a reorder
buffer until it is filled.

Where a frame lies is the rule of `streams/frame_order.py`, which the catalog follows too. A publisher that goes back
stores 0 1 3 4 2 3 4, so a hole is one only when it is still there at the end, or when more lies beyond it than any
publisher has in flight.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from kvbm.core.codec import ScannedFrame, decode_frame, scanned
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.replay.scan import Damage
from kvbm.replay.source import FramePlace, Located
from kvbm.streams.base import ORIGIN, Fence, Position, is_other_life
from kvbm.streams.fence_records import FenceRecord
from kvbm.streams.frame_order import Order, order_of

_CHECKSUM = struct.Struct("<I")  # the last bytes of a frame
_MASK = (1 << 64) - 1
_BEFORE = (Order.STALE, Order.REPEAT, Order.OVERLAP)
# Per instance: so much is looked at before a trimmed source is taken to begin at an offset that is not 0.
BEGIN_BYTES = 8 << 20
REORDER_BYTES = 64 << 20  # per instance; a publisher's window is far smaller


class StreamKey(NamedTuple):
    """One instance's stream. `group` differs for two instances of one name, and is mostly empty."""

    group: str
    instance: InstanceId


class Next(NamedTuple):
    """A frame to fold: it continues the stream."""

    located: Located
    frame: ScannedFrame


class Missing(NamedTuple):
    """Events [first, next) of an epoch are in no good frame. `after` is the frame beyond the hole.

    Attributes:
        since: order of the last frame before the hole, -1 for none.
    """

    epoch: Epoch
    first: Offset
    next: Offset
    since: int
    after: Located


class Begins(NamedTuple):
    """A trimmed source begins here, at an offset that is not 0; nothing before it is known."""

    epoch: Epoch
    offset: Offset
    located: Located


class Repeat(NamedTuple):
    """A frame that was seen before, byte by byte; or one before the beginning of what is known."""

    located: Located


class LateEnd(NamedTuple):
    """The end of an older epoch, stored once more by a publisher that went back; the first time it was lost.

    It is not folded.
    """

    located: Located


class Conflict(NamedTuple):
    """A frame for offsets that were seen, with other bytes."""

    located: Located
    frame: ScannedFrame


class WentBack(NamedTuple):
    """A frame of an older epoch that was not seen before: of a process that was replaced. `epoch` is the newer one."""

    located: Located
    frame: ScannedFrame
    epoch: Epoch


class LifeBegins(NamedTuple):
    """What was seen before is of another life of the instance: its journal, or the stream's end, was lost.

    See `catalog/follow/instance_sequence.py`.

    Attributes:
        ended: the last epoch of the other life.
    """

    located: Located
    fence: Fence
    ended: Epoch


class DamagedBytes(NamedTuple):
    """Bytes that are no good frame."""

    located: Located
    damage: Damage


def life_text(key: StreamKey, step: LifeBegins) -> str:
    """A life's beginning, for people."""
    return (
        f"instance {key.instance} begins another life at {step.located.place}, as run {step.fence.run} in epoch "
        f"{step.fence.epoch}: "
        f"its journal, or the stream's end, was lost after epoch {step.ended}; what it held before counts no more"
    )


Step = Next | Missing | Begins | Repeat | LateEnd | Conflict | WentBack | LifeBegins


def in_order(source: Iterable[Located], is_trimmed: bool) -> Iterator[tuple[StreamKey, Step] | DamagedBytes]:
    """Each instance's stream, step by step."""
    ordering = FrameOrdering(is_trimmed)
    yield from ordering.steps(source)
    yield from ordering.finish()


class KeptFrame(NamedTuple):
    """A frame that waits, as bytes and where it lies."""

    data: bytes
    source: str
    sequence: int | None
    at: int
    group: str
    order: int


class OrderState(NamedTuple):
    """Where one instance's stream stands, for another one to go on from. Fields as in `_Order`.

    Attributes:
        seen: epoch → packed first offsets and fingerprints (u64), and the offset after the last.
    """

    is_trimmed: bool
    place: tuple[int, int]
    last_order: int
    seen: dict[int, tuple[bytes, bytes, int]]
    unknown: dict[int, list[tuple[int, int]]]
    buffer: list[KeptFrame]
    late: list[KeptFrame]
    runs: dict[int, str]


class FrameOrdering:
    """`in_order` for a source that goes on: `steps` again with what has come, `finish` when nothing more will."""

    def __init__(self, is_trimmed: bool, before: FrameOrdering | None = None) -> None:
        """
        Args:
            before: another one, which this one goes on from and leaves as it is.
        """
        self._is_trimmed = is_trimmed
        self._before = before
        self._streams: dict[StreamKey, _Order] = {}

    def steps(self, source: Iterable[Located]) -> Iterator[tuple[StreamKey, Step] | DamagedBytes]:
        """What frames make possible."""
        for located in source:
            found = located.found
            if isinstance(found, Damage):
                yield DamagedBytes(located, found)
                continue
            key = StreamKey(located.group, found.instance)
            stream = self._streams.get(key) or self._begun(key)
            if isinstance(found, FenceRecord):
                if stream.is_other_life(found.fence):
                    for step in stream.finish():
                        yield key, step
                    yield key, LifeBegins(located, found.fence, stream.epoch)
                    # it may go on where an earlier one of its log had ended
                    self._streams[key] = stream = _Order(is_trimmed=True)
                stream.pass_fence(found.fence)
                continue
            following = stream.follow(located, found)
            if following is not None:
                yield key, following
                continue
            for step in stream.take(located, found):
                yield key, step

    def finish(self) -> Iterator[tuple[StreamKey, Step]]:
        """The holes that nothing has filled, and what lies beyond them."""
        if self._before is not None:
            for key, stream in self._before._streams.items():
                if stream.waits and key not in self._streams:
                    self._begun(key)
        for key, stream in self._streams.items():
            for step in stream.finish():
                yield key, step

    def waits(self, key: StreamKey) -> bool:
        """Whether frames of an instance wait for others."""
        return key in self._streams and self._streams[key].waits

    def states(self) -> list[tuple[StreamKey, OrderState]]:
        """For `resume`."""
        return [(key, stream.state()) for key, stream in self._streams.items()]

    def resume(self, states: Iterable[tuple[StreamKey, OrderState]]) -> None:
        """Go on where another one stood."""
        self._streams.update((key, _Order.of(state)) for key, state in states)

    def _begun(self, key: StreamKey) -> _Order:
        before = self._before._streams.get(key) if self._before is not None else None
        stream = self._streams[key] = _Order(self._is_trimmed) if before is None else _Order.of(before.state())
        return stream


class _Seen:
    """The frames of one epoch that were folded: their first offsets, ascending, and a fingerprint of each."""

    def __init__(self) -> None:
        self.firsts = array("Q")
        self.prints = array("Q")
        self.end = Offset(0)  # the offset after the last of them

    def add(self, frame: ScannedFrame, data: bytes) -> None:
        self.firsts.append(frame.first_offset)
        self.prints.append(fingerprint(frame, data))
        self.end = frame.next_offset

    def is_same(self, frame: ScannedFrame, data: bytes) -> bool:
        at = bisect_left(self.firsts, frame.first_offset)
        return (
            at < len(self.firsts)
            and self.firsts[at] == frame.first_offset
            and self.prints[at] == fingerprint(frame, data)
        )


def fingerprint(frame: ScannedFrame, data: bytes) -> int:
    """64 bits that two different good frames of one offset hardly share: the checksum over all of it, which a scan has
    proven, and the digest of what is held after it.
    """
    checksum: int = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0]
    return ((checksum << 32) ^ frame.digest ^ len(data)) & _MASK


def _kept(step: Next) -> KeptFrame:
    located = step.located
    place = located.place
    return KeptFrame(located.data, place.source, place.sequence, place.at, located.group, located.order)


def _read_again(kept: KeptFrame) -> Next:
    frame, end = decode_frame(kept.data)
    found = scanned(frame, 0, end)
    place = FramePlace(kept.source, kept.sequence, kept.at)
    return Next(Located(found, place, kept.data, kept.group, kept.order), found)


class _Order:
    """One instance's stream so far."""

    def __init__(self, is_trimmed: bool) -> None:
        self._is_trimmed = is_trimmed
        self._place = ORIGIN  # what comes next
        self._last_order = -1
        self._seen: dict[Epoch, _Seen] = {}
        self._unknown: dict[Epoch, list[tuple[Offset, Offset]]] = {}  # holes given up, and what is before the beginning
        self._buffer: dict[Position, Next] = {}  # beyond a hole
        self._heap: list[Position] = []  # its keys
        self._buffer_bytes = 0
        self._late: list[Next] = []  # the end of an older epoch, until it is known whether its publisher went back
        self._runs: dict[Epoch, str] = {}  # which process began an epoch, as fences name it

    @classmethod
    def of(cls, state: OrderState) -> _Order:
        """One that goes on from there."""
        made = cls(state.is_trimmed)
        made._place = Position(Epoch(state.place[0]), Offset(state.place[1]))
        made._last_order = state.last_order
        for epoch, (firsts, prints, end) in state.seen.items():
            seen = made._seen[Epoch(epoch)] = _Seen()
            seen.firsts.frombytes(firsts)
            seen.prints.frombytes(prints)
            seen.end = Offset(end)
        made._unknown = {
            Epoch(epoch): [(Offset(first), Offset(end)) for first, end in holes]
            for epoch, holes in state.unknown.items()
        }
        made._runs = {Epoch(epoch): run for epoch, run in state.runs.items()}
        made._late = [_read_again(one) for one in state.late]
        for one in state.buffer:
            step = _read_again(one)
            place = Position(step.frame.epoch, step.frame.first_offset)
            made._buffer[place] = step
            heappush(made._heap, place)
            made._buffer_bytes += len(one.data)
        return made

    def state(self) -> OrderState:
        """For another one to go on from."""
        return OrderState(
            self._is_trimmed,
            (self._place.epoch, self._place.offset),
            self._last_order,
            {epoch: (seen.firsts.tobytes(), seen.prints.tobytes(), seen.end) for epoch, seen in self._seen.items()},
            {epoch: list(holes) for epoch, holes in self._unknown.items()},
            [_kept(step) for step in self._buffer.values()],
            [_kept(step) for step in self._late],
            {int(epoch): run for epoch, run in self._runs.items()},
        )

    @property
    def waits(self) -> bool:
        """Whether frames wait for what has not come."""
        return bool(self._buffer or self._late)

    @property
    def epoch(self) -> Epoch:
        """The one that was reached; 0 before the first."""
        return self._place.epoch

    def is_other_life(self, fence: Fence) -> bool:
        """Whether what was seen is not of the log whose events a fence lets follow."""
        return is_other_life(self.epoch, self._runs.get(self.epoch, ""), fence)

    def pass_fence(self, fence: Fence) -> None:
        """From here on events are those of this fence."""
        for epoch, run in (*fence.log, (fence.epoch, fence.run)):
            self._runs.setdefault(epoch, run)

    def follow(self, located: Located, frame: ScannedFrame) -> Next | None:
        """The step of a frame that simply comes next, as nearly all do; None for `take` to judge."""
        if (
            frame.first_offset != self._place.offset
            or frame.epoch != self._place.epoch
            or self._buffer
            or self._late
            or not self._seen
        ):
            return None
        return self._accept(Next(located, frame))

    def take(self, located: Located, frame: ScannedFrame) -> Iterator[Step]:
        """The steps that this frame makes possible."""
        order = order_of(frame, self._place)
        if order is Order.NEXT and not self._buffer and self._seen:
            yield from self._condemn()
            yield self._accept(Next(located, frame))
            return
        if order in _BEFORE:
            yield from self._judge_old(located, frame)
            return
        place = Position(frame.epoch, frame.first_offset)
        waiting = self._buffer.get(place)
        if waiting is not None:
            yield Repeat(located) if waiting.located.data == located.data else Conflict(located, frame)
            return
        self._buffer[place] = Next(located, frame)
        heappush(self._heap, place)
        self._buffer_bytes += len(located.data)
        yield from self._drain()
        while self._buffer_bytes > REORDER_BYTES:
            yield from self._give_up()

    def finish(self) -> Iterator[Step]:
        """The holes that nothing has filled, and what lies beyond them."""
        while self._buffer:
            yield from self._give_up()
        yield from self._condemn()

    def _accept(self, step: Next) -> Next:
        located, frame = step
        self._place = Position(frame.epoch, frame.next_offset)
        seen = self._seen.get(frame.epoch)
        if seen is None:
            seen = self._seen[frame.epoch] = _Seen()
        seen.add(frame, located.data)
        self._last_order = max(self._last_order, located.order)
        return step

    def _judge_old(self, located: Located, frame: ScannedFrame) -> Iterator[Step]:
        """A frame before the place that was reached."""
        seen = self._seen.get(frame.epoch) or _Seen()
        if seen.is_same(frame, located.data):
            if frame.epoch == self.epoch and frame.first_offset == 0:  # the publisher went back over the epoch's start
                yield from (LateEnd(late.located) for late in self._late)
                self._late = []
            yield Repeat(located)
        elif any(
            first <= frame.first_offset and frame.next_offset <= end for first, end in self._unknown_of(frame.epoch)
        ):
            yield Repeat(located)
        elif frame.first_offset > seen.end:
            yield WentBack(located, frame, self.epoch)
        elif frame.epoch < self.epoch and frame.first_offset == seen.end:
            self._late.append(Next(located, frame))
            self._seen.setdefault(frame.epoch, seen).add(frame, located.data)
        else:
            yield Conflict(located, frame)

    def _unknown_of(self, epoch: Epoch) -> list[tuple[Offset, Offset]]:
        return self._unknown.get(epoch, [])

    def _condemn(self) -> Iterator[Step]:
        """What an older epoch wrote while the newer one went on: its publisher had not gone back."""
        late, self._late = self._late, []
        yield from (WentBack(step.located, step.frame, self.epoch) for step in late)

    def _drain(self, may_wait: bool = True) -> Iterator[Step]:
        """Go on with frames of the reorder buffer, as far as there is no hole before them."""
        if self._is_trimmed and not self._seen:
            epoch, first = self._heap[0]
            if first and may_wait and self._buffer_bytes <= BEGIN_BYTES:
                return  # what comes before may have been lost at first, and be sent again
            if first:
                self._unknown[epoch] = [(Offset(0), first)]
                yield Begins(epoch, first, self._buffer[Position(epoch, first)].located)
            self._place = Position(epoch, first)
        while self._heap:
            step = self._buffer[self._heap[0]]
            order = order_of(step.frame, self._place)
            if order in (Order.BEYOND, Order.MIDSTREAM):
                return
            del self._buffer[heappop(self._heap)]
            self._buffer_bytes -= len(step.located.data)
            if order in _BEFORE:
                yield from self._judge_old(*step)
            else:
                yield from self._condemn()
                yield self._accept(step)

    def _give_up(self) -> Iterator[Step]:
        """Take the first hole for missing and go on after it."""
        if self._is_trimmed and not self._seen:
            yield from self._drain(may_wait=False)
            return
        epoch, first = self._heap[0]
        hole_first = self._place.offset if epoch == self.epoch else Offset(0)
        self._unknown.setdefault(epoch, []).append((hole_first, first))
        yield Missing(epoch, hole_first, first, self._last_order, self._buffer[Position(epoch, first)].located)
        self._place = Position(epoch, first)
        yield from self._drain()
