"""A source's events → stays: since when and until when each block was held, of all instances, in batches of rows.

Rows of several instances share the numbers of namespaces and names. Where events are missing, stays go on as they were
until a snapshot or the next start says more, and the hole is told beside them. Events that are illegal count as far as
they make sense; `verify` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.codec import ScannedFrame
from kvbm.core.columns import NO_ROW
from kvbm.core.events import InstanceStarted, InstanceStopped, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.core.stays import RESTARTED, NewStayFold, StayFold
from kvbm.replay.findings import ReplayFinding, undamaged
from kvbm.replay.order import Begins, LifeBegins, Missing, Next, StreamKey, in_order, life_text
from kvbm.replay.source import FrameSource, Located, only

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
    """Some stays of one life of an instance: STAY_ROW, with `namespace` and `from` as in `SourceStays`."""

    instance: InstanceId
    group: str
    life: int
    stays: np.ndarray


class _Stream:
    """One life of an instance."""

    def __init__(self, fold: StayFold, life: int, before: _Stream | None = None) -> None:
        self.fold, self.life = fold, life
        self.before = before  # the life it takes the place of, until it is known when
        self.epoch = Epoch(0)
        self.last: Located | None = None  # the last frame of the epoch
        self.start: InstanceStarted | None = None
        self.began_ns = self.ended_ns = 0
        self.has_rows = False  # that nobody has taken
        self.namespace_rows = np.empty(0, dtype=np.uint32)  # of the fold's rows
        self.name_rows = np.empty(0, dtype=np.uint32)


class SourceStays:
    """See the module. `rows` is gone through once; what the attributes say is whole then.

    Attributes:
        namespaces: ids by the number rows have for them.
        fields: of those that a start has told.
        names: of instances, by the number rows have for them.
        incarnations, holes: in the order they were met.
        last_ns: the latest wall time met.
    """

    def __init__(self, source: FrameSource, backend: Backend, new_fold: NewStayFold) -> None:
        self.namespaces: dict[NamespaceId, int] = {}
        self.fields: dict[NamespaceId, Namespace] = {}
        self.names: dict[InstanceId, int] = {}
        self.incarnations: list[Incarnation] = []
        self.holes: list[EventHole] = []
        self.notes: list[str] = []
        self.findings: list[ReplayFinding] = []
        self.last_ns = 0
        self._source, self._backend, self._new_fold = source, backend, new_fold
        self._streams: dict[StreamKey, _Stream] = {}

    def rows(self, instance: str | None = None, located: Iterable[Located] | None = None) -> Iterator[StayRows]:
        """All stays: those that have ended as they end, those that last at the end.

        Args:
            instance: only this one.
            located: what was read from the source, where somebody watches it pass.
        """
        read = self._source.read(self._backend) if located is None else located
        steps = in_order(only(read, instance), self._source.is_trimmed)
        untaken = 0  # block events since rows were taken, of all
        for key, step in undamaged(steps, self.notes, self.findings):
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = _Stream(self._new_fold(), 0)
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
                self.notes.append(life_text(key, step))
                self._end_epoch(key, stream)
                self._streams[key] = _Stream(self._new_fold(), stream.life + 1, stream)
        yield from self._taken()
        for key, stream in self._streams.items():
            self._end_epoch(key, stream)
            if stream.before is not None:
                yield from self._replaced(key, stream, None)
            yield self._rows(key, stream, stream.fold.lasting())

    def _take(self, key: StreamKey, stream: _Stream, frame: ScannedFrame, located: Located) -> int:
        """Fold a frame. Returns how many blocks its events name."""
        if frame.epoch != stream.epoch:
            self._end_epoch(key, stream)
            stream.epoch, stream.began_ns = frame.epoch, frame.wall_time_ns
            first = self._backend.decode_frame(located.data)[0].events[0]
            stream.start = first if isinstance(first, InstanceStarted) else None
            for one in stream.start.namespaces if stream.start is not None else ():
                self.fields.setdefault(one.id, one)
        stream.last, stream.ended_ns = located, frame.wall_time_ns
        self.last_ns = max(self.last_ns, frame.wall_time_ns)
        stream.fold.evolve_frame(located.data)
        stream.has_rows = True
        return sum(frame.blocks)

    def _taken(self) -> Iterator[StayRows]:
        """What has ended of all instances."""
        for key, stream in self._streams.items():
            if stream.has_rows:
                stream.has_rows = False
                yield self._rows(key, stream, stream.fold.take_ended())

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
        self.holes.append(EventHole(key.instance, key.group, step.epoch, first, following, stream.ended_ns, until_ns))

    def _end_epoch(self, key: StreamKey, stream: _Stream) -> None:
        if stream.last is None:
            return
        last = self._backend.decode_frame(stream.last.data)[0].events[-1]
        start = stream.start or InstanceStarted(epoch=stream.epoch)
        self.incarnations.append(
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
        stream.last = None

    def _rows(self, key: StreamKey, stream: _Stream, stays: np.ndarray) -> StayRows:
        """Rows with the numbers that all instances share."""
        stream.namespace_rows = _numbered(stream.namespace_rows, stream.fold.namespaces, self.namespaces)
        stream.name_rows = _numbered(stream.name_rows, stream.fold.names, self.names)
        if len(stays):
            stays["namespace"] = stream.namespace_rows[stays["namespace"]]
            fetched = stays["from"] != NO_ROW
            stays["from"][fetched] = stream.name_rows[stays["from"][fetched]]
        return StayRows(key.instance, key.group, stream.life, stays)


def _numbered(known: np.ndarray, keys: tuple[_Key, ...], shared: dict[_Key, int]) -> np.ndarray:
    """The shared number of each key; those `known` already have theirs."""
    fresh = [shared.setdefault(key, len(shared)) for key in keys[len(known) :]]
    return np.concatenate([known, np.array(fresh, dtype=np.uint32)]) if fresh else known
