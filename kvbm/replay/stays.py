"""A source's events → stays: since when and until when each block was held, of all instances, in batches of rows.

Rows of several instances share the numbers of namespaces and names. Where events are missing, stays go on as they were
until a snapshot or the next start says more, and the hole is told beside them. Events that are illegal count as far as
they make sense; `verify` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.codec import ScannedFrame
from kvbm.core.columns import NO_ROW
from kvbm.core.events import InstanceStarted, InstanceStopped, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.core.stays import RESTARTED, NewStayFold, StayFold, StayState
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.order import (
    Begins,
    DamagedBytes,
    FrameOrdering,
    LifeBegins,
    Missing,
    Next,
    OrderState,
    Step,
    StreamKey,
    life_text,
)
from kvbm.replay.source import Located

_Key = TypeVar("_Key")
_BATCH_ROWS = 1 << 18


class Incarnation(NamedTuple):
    """One epoch of an instance, as its log tells it.

    Attributes:
        group: what differs for two instances of one name, as in `StreamKey`.
        life: from 0; another one begins where the instance's journal, or the stream's end, was lost.
        began_ns, ended_ns: wall times of its first and last frame, by the instance's clock.
        stopped: the reason of InstanceStopped in lower case; "" where it did not stop cleanly, or goes on.
        pools, engine, version, topology: as the start says; empty where the start is missing.
    """

    instance: InstanceId
    group: str
    life: int
    epoch: Epoch
    began_ns: int
    ended_ns: int
    stopped: str
    pools: tuple[PoolStated, ...]
    engine: str
    version: str
    topology: tuple[str, ...]


class EventHole(NamedTuple):
    """Events [first, next) of an epoch that no frame has.

    Attributes:
        since_ns, until_ns: wall times of the frames before and behind it; 0 where there is none before.
    """

    instance: InstanceId
    group: str
    epoch: Epoch
    first: Offset
    next: Offset
    since_ns: int
    until_ns: int


class StayRows(NamedTuple):
    """Some stays of one life of an instance: STAY_ROW, with `namespace` and `from` as in `SourceStays`.

    Attributes:
        since: those that began in an epoch and at an offset from here on have begun since `SourceStays.mark`.
        is_kept: they stay as they are, however the source goes on.
    """

    instance: InstanceId
    group: str
    life: int
    stays: np.ndarray
    since: tuple[int, int]
    is_kept: bool


class Told(msgspec.Struct, kw_only=True):
    """What a source tells beside stays.

    Attributes:
        incarnations, holes: in the order they were met.
        last_ns: the latest wall time met; first_ns: the earliest, 0 before any.
    """

    incarnations: list[Incarnation] = []
    holes: list[EventHole] = []
    notes: list[str] = []
    findings: list[ReplayFinding] = []
    last_ns: int = 0
    first_ns: int = 0

    def copy(self) -> Told:
        """Another one with the same in it."""
        return Told(
            incarnations=[*self.incarnations],
            holes=[*self.holes],
            notes=[*self.notes],
            findings=[*self.findings],
            last_ns=self.last_ns,
            first_ns=self.first_ns,
        )


class FoldedStream(NamedTuple):
    """Where one life of an instance stands: for another `SourceStays` to go on from.

    Attributes:
        before: the life it takes the place of, until it is known when.
        last: the last frame of the epoch; its bytes, "" where it has ended.
        start: the frame that the epoch's start is the first event of; empty without one.
    """

    key: StreamKey
    life: int
    epoch: int
    last: bytes
    start: bytes
    began_ns: int
    ended_ns: int
    place: tuple[int, int]
    since: tuple[int, int]
    fold: StayState
    before: FoldedStream | None


class SourceState(NamedTuple):
    """Where a `SourceStays` stands. `orders` is of its streams."""

    streams: list[FoldedStream]
    orders: list[tuple[StreamKey, OrderState]]
    told: Told
    namespaces: list[NamespaceId]
    fields: list[tuple[NamespaceId, Namespace]]
    names: list[InstanceId]


class _Stream:
    """One life of an instance."""

    def __init__(self, fold: StayFold, life: int, before: _Stream | None = None) -> None:
        self.fold, self.life = fold, life
        self.before = before  # the life it takes the place of, until it is known when
        self.epoch = Epoch(0)
        self.last = b""  # the last frame of the epoch
        self.first = b""  # the frame that its start is the first event of
        self.start: InstanceStarted | None = None
        self.began_ns = self.ended_ns = 0
        self.place = (0, 0)  # the epoch, and the offset of what comes next
        self.since = (0, 0)  # what began before is marked
        self.has_rows = False  # that nobody has taken
        self.namespace_rows = np.empty(0, dtype=np.uint32)  # of the fold's rows
        self.name_rows = np.empty(0, dtype=np.uint32)

    def state(self, key: StreamKey) -> FoldedStream:
        """For `of`."""
        before = self.before.state(key) if self.before is not None else None
        times = (self.began_ns, self.ended_ns)
        return FoldedStream(
            key,
            self.life,
            self.epoch,
            self.last,
            self.first,
            *times,
            self.place,
            self.since,
            self.fold.state(),
            before,
        )

    @classmethod
    def of(cls, state: FoldedStream, backend: Backend, new_fold: NewStayFold) -> _Stream:
        """One that goes on from there."""
        fold = new_fold()
        fold.resume(state.fold)
        made = cls(fold, state.life, None if state.before is None else cls.of(state.before, backend, new_fold))
        made.epoch, made.last, made.first, made.since = Epoch(state.epoch), state.last, state.start, state.since
        made.place = state.place
        made.began_ns, made.ended_ns = state.began_ns, state.ended_ns
        if state.start:
            first = backend.decode_frame(state.start)[0].events[0]
            made.start = first if isinstance(first, InstanceStarted) else None
        return made


class SourceStays:
    """See the module. Stays of what was read are had in two parts: `kept`, which nothing that comes changes, and
    `tail`, which is so until more was read: what lasts, and what an end of the source here would mean. Both again when
    the source goes on.

    Attributes:
        namespaces: ids by the number rows have for them.
        fields: of those that a start has told.
        names: of instances, by the number rows have for them.
        told: by what was read so far. After `tail`, `tail_told` has what it would be if the source ended here.
    """

    def __init__(
        self, is_trimmed: bool, backend: Backend, new_fold: NewStayFold, before: SourceStays | None = None
    ) -> None:
        """
        Args:
            before: another one, which this one goes on from; it stays as it is, but for numbers of names.
        """
        self._is_trimmed, self._backend, self._new_fold = is_trimmed, backend, new_fold
        self._before = before
        self._streams: dict[StreamKey, _Stream] = {}
        self.namespaces: dict[NamespaceId, int] = before.namespaces if before is not None else {}
        self.fields: dict[NamespaceId, Namespace] = before.fields if before is not None else {}
        self.names: dict[InstanceId, int] = before.names if before is not None else {}
        self._ordering: FrameOrdering = FrameOrdering(is_trimmed, before._ordering if before is not None else None)
        self.told: Told = before.told.copy() if before is not None else Told()
        self.tail_told: Told = self.told

    def kept(self, located: Iterable[Located]) -> Iterator[StayRows]:
        """Go on with what comes next of the source. Gives stays that have ended."""
        yield from self._folded(self._ordering.steps(located))
        yield from self._taken()

    def mark(self) -> Iterator[StayRows]:
        """What lasts and has begun since the last mark; it counts as marked from here on."""
        for key, stream in self._streams.items():
            for one in _chain(stream):
                if one.fold.count():
                    rows = self._rows(key, one, one.fold.lasting())
                    yield rows._replace(stays=rows.stays[begun_since(rows.stays, rows.since)])
                one.since = one.place

    def tail(self, unsettled: Iterable[Located] = ()) -> Iterator[StayRows]:
        """The stays that are not kept; nothing of this one changes.

        Args:
            unsettled: what was read beyond, and may yet turn out to be something else.
        """
        fork = SourceStays(self._is_trimmed, self._backend, self._new_fold, self)
        yield from fork._folded(fork._ordering.steps(unsettled))
        yield from fork._folded(fork._ordering.finish())
        yield from fork._taken()
        for key, before in self._streams.items():
            if key not in fork._streams and before.before is not None:
                fork._stream(key)
        for key in [*self._streams, *(key for key in fork._streams if key not in self._streams)]:
            stream = fork._streams.get(key) or self._streams[key]
            fork._end_epoch(key, stream)
            if stream.before is not None:
                yield from fork._replaced(key, stream, None)
            yield fork._rows(key, stream, stream.fold.lasting())._replace(is_kept=False)
        self.tail_told = fork.told

    def state(self) -> SourceState:
        """Where this stands."""
        return SourceState(
            [stream.state(key) for key, stream in self._streams.items()],
            self._ordering.states(),
            self.told,
            list(self.namespaces),
            list(self.fields.items()),
            list(self.names),
        )

    def resume(self, state: SourceState) -> None:
        """Go on where another one stood; once, before anything else."""
        self._ordering.resume(state.orders)
        for one in state.streams:
            self._streams[one.key] = _Stream.of(one, self._backend, self._new_fold)
        self.told = state.told
        self.namespaces.update((one, number) for number, one in enumerate(state.namespaces))
        self.names.update((one, number) for number, one in enumerate(state.names))
        self.fields.update(state.fields)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _folded(self, steps: Iterable[tuple[StreamKey, Step] | DamagedBytes]) -> Iterator[StayRows]:
        untaken = 0  # block events since rows were taken, of all
        for key, step in undamaged(steps, self.told.notes, self.told.findings):
            stream = self._streams.get(key) or self._stream(key)
            if isinstance(step, Next):
                if stream.before is not None:
                    yield from self._replaced(key, stream, step.frame)
                untaken += self._take(key, stream, step.frame, step.located)
                if untaken >= _BATCH_ROWS:
                    yield from self._taken()
                    untaken = 0
            elif isinstance(step, Missing | Begins):
                self._miss(key, stream, step)
            elif isinstance(step, LifeBegins):
                self.told.notes.append(life_text(key, step))
                self._end_epoch(key, stream)
                stream.last = b""
                self._streams[key] = _Stream(self._new_fold(), stream.life + 1, stream)

    def _stream(self, key: StreamKey) -> _Stream:
        before = self._before._streams.get(key) if self._before is not None else None
        if before is None:
            made = _Stream(self._new_fold(), 0)
        else:
            made = _Stream.of(before.state(key), self._backend, self._new_fold)
        self._streams[key] = made
        return made

    def _take(self, key: StreamKey, stream: _Stream, frame: ScannedFrame, located: Located) -> int:
        """Fold a frame. Returns how many blocks its events name."""
        if frame.epoch != stream.epoch:
            self._end_epoch(key, stream)
            stream.epoch, stream.began_ns = frame.epoch, frame.wall_time_ns
            first = self._backend.decode_frame(located.data)[0].events[0]
            stream.start = first if isinstance(first, InstanceStarted) else None
            stream.first = located.data if stream.start is not None else b""
            for one in stream.start.namespaces if stream.start is not None else ():
                self.fields.setdefault(one.id, one)
        stream.last, stream.ended_ns = located.data, frame.wall_time_ns
        stream.place = (frame.epoch, frame.next_offset)
        self.told.last_ns = max(self.told.last_ns, frame.wall_time_ns)
        self.told.first_ns = min(self.told.first_ns or frame.wall_time_ns, frame.wall_time_ns)
        stream.fold.evolve_frame(located.data)
        stream.has_rows = True
        return sum(frame.blocks)

    def _taken(self) -> Iterator[StayRows]:
        """What has ended of all instances."""
        for key, stream in self._streams.items():
            for one in _chain(stream):
                if one.has_rows:
                    one.has_rows = False
                    yield self._rows(key, one, one.fold.take_ended())

    def _replaced(self, key: StreamKey, stream: _Stream, frame: ScannedFrame | None) -> Iterator[StayRows]:
        """What a life held ends where the next one's first frame was cut; without any, with its own last frame."""
        before, stream.before = stream.before, None
        assert before is not None
        if before.before is not None:  # it had no frame itself
            stream.before, before.before = before.before, None
            yield from self._replaced(key, stream, frame)
        yield self._rows(key, before, before.fold.take_ended())
        lasting = before.fold.lasting()
        lasting["end"], lasting["end_ns"] = RESTARTED, before.ended_ns if frame is None else frame.wall_time_ns
        lasting["end_epoch"] = before.epoch if frame is None else frame.epoch
        lasting["end_offset"] = 0 if frame is None else frame.first_offset
        yield self._rows(key, before, lasting)

    def _miss(self, key: StreamKey, stream: _Stream, step: Missing | Begins) -> None:
        stream.fold.miss_events()
        after = step.after if isinstance(step, Missing) else step.located
        first, following = (step.first, step.next) if isinstance(step, Missing) else (Offset(0), step.offset)
        until_ns = after.found.wall_time_ns if isinstance(after.found, ScannedFrame) else 0
        self.told.holes.append(
            EventHole(key.instance, key.group, step.epoch, first, following, stream.ended_ns, until_ns)
        )

    def _end_epoch(self, key: StreamKey, stream: _Stream) -> None:
        """Say what is known of an epoch, as it stands."""
        if not stream.last:
            return
        last = self._backend.decode_frame(stream.last)[0].events[-1]
        start = stream.start or InstanceStarted(epoch=stream.epoch)
        self.told.incarnations.append(
            Incarnation(
                key.instance,
                key.group,
                stream.life,
                stream.epoch,
                stream.began_ns,
                stream.ended_ns,
                last.reason.name.lower() if isinstance(last, InstanceStopped) else "",
                start.pools,
                start.engine,
                start.version,
                start.topology,
            )
        )

    def _rows(self, key: StreamKey, stream: _Stream, stays: np.ndarray) -> StayRows:
        """Rows with the numbers that all instances share."""
        stream.namespace_rows = _numbered(stream.namespace_rows, stream.fold.namespaces, self.namespaces)
        stream.name_rows = _numbered(stream.name_rows, stream.fold.names, self.names)
        if len(stays):
            stays["namespace"] = stream.namespace_rows[stays["namespace"]]
            fetched = stays["from"] != NO_ROW
            stays["from"][fetched] = stream.name_rows[stays["from"][fetched]]
        return StayRows(key.instance, key.group, stream.life, stays, stream.since, self._before is None)


def begun_since(stays: np.ndarray, since: tuple[int, int]) -> np.ndarray:
    """Which have begun in that epoch and at that offset, or later."""
    epoch, offset = since
    begun: np.ndarray = (stays["epoch"] > epoch) | ((stays["epoch"] == epoch) & (stays["begin_offset"] >= offset))
    return begun


def _chain(stream: _Stream | None) -> Iterator[_Stream]:
    """A life, and those it takes the place of."""
    while stream is not None:
        yield stream
        stream = stream.before


def _numbered(known: np.ndarray, keys: tuple[_Key, ...], shared: dict[_Key, int]) -> np.ndarray:
    """The shared number of each key; those `known` already have theirs."""
    fresh = [shared.setdefault(key, len(shared)) for key in keys[len(known) :]]
    return np.concatenate([known, np.array(fresh, dtype=np.uint32)]) if fresh else known
