"""Where a manager and its publisher meet: what the publisher reports and asks for, and what it offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvbm.core.ids import Epoch, InstanceId
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.prompt_samples import SampleSink
from kvbm.manager.record.snapshot_policy import Asked, Input, Learned
from kvbm.streams.base import ORIGIN, AccessSample, Heartbeat, Position, StreamState


class Publishing(NamedTuple):
    """What the publisher thread offers.

    Attributes:
        notify: the journal has more.
        published: how far the stream has come.
        stop: publish the rest within a timeout; whether all of it is published.
        snapshot_began: what comes next in the journal is a snapshot.
        trouble: what the stream does not take now, in words; "" when all is well.
        place: which other process has the instance's place on the stream; "" while none has.
    """

    notify: Callable[[], None]
    published: Callable[[], Position]
    stop: Callable[[float], bool]
    snapshot_began: Callable[[], None] = lambda: None
    trouble: Callable[[], str] = lambda: ""
    place: Callable[[], str] = lambda: ""


class PublisherPort:
    """A `streams.base.PublisherOwner`.

    The publisher reports in its own thread; the event writer reads in its turns.

    Args:
        run: of this process.
        heartbeat: the sign of life to send, for how far the stream has come.
        samples: prompts to send on; None: nobody takes any.
        has_stream: whether a publisher says how far the stream has come.

    Attributes:
        publishing: the publisher; None: events stay in the journal.
        published: how far the stream has come, as the publisher has said.
        fenced_by: an epoch of another run that has the fence; the event writer begins one above it, and clears it.
        awaits_room: the journal takes nothing: the event writer wants a turn when more is published.
    """

    def __init__(
        self,
        instance: InstanceId,
        cluster: str,
        run: str,
        stream: LedgerStream,
        heartbeat: Callable[[Position], Heartbeat],
        samples: SampleSink | None = None,
        has_stream: bool = False,
    ) -> None:
        self.run, self.heartbeat = run, heartbeat
        self.publishing: Publishing | None = None
        self.published = ORIGIN
        self.fenced_by: Epoch | None = None
        self.awaits_room = False
        self._instance, self._cluster, self._stream = instance, cluster, stream
        self._samples, self._has_stream = samples, has_stream
        self._asked = False
        self._state: StreamState | None = None

    # -- the publisher, in its own thread -----------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        """See `PublisherOwner.epoch`."""
        return self._stream.ledger.epoch

    def on_published(self, position: Position) -> None:
        """See `PublisherOwner.on_published`."""
        if position > self.published:
            self.published = position
            if self.awaits_room or self._stream.waits_for(position):
                self._stream.wake.set()

    def on_fenced(self, newer: Epoch) -> None:
        """See `PublisherOwner.on_fenced`."""
        self.fenced_by = max(newer, self.fenced_by or newer)
        self._stream.wake.set()

    def on_snapshot_asked(self) -> None:
        """See `PublisherOwner.on_snapshot_asked`."""
        self._asked = True
        self._stream.wake.set()

    def on_stream_state(self, state: StreamState) -> None:
        """See `PublisherOwner.on_stream_state`."""
        self._state = state
        self._stream.wake.set()

    def is_silent(self) -> bool:
        """See `PublisherOwner.is_silent`: a manager speaks for itself."""
        return False

    def take_samples(self) -> list[AccessSample]:
        """The sampled prompts since the last call."""
        if self._samples is None:
            return []
        rate = self._samples.rate
        return [
            AccessSample(
                instance=self._instance,
                cluster=self._cluster,
                wall_time_ns=one.wall_time_ns,
                namespace=one.namespace,
                hashes=one.hashes,
                depth=one.depth,
                rate=rate,
            )
            for one in self._samples.take()
        ]

    def drop_samples(self) -> None:
        """Forget the prompts that were sampled and not sent on yet: they may name what is erased."""
        if self._samples is not None:
            self._samples.take()

    # -- the event writer, in its turns -------------------------------------------------------------------------------

    def confirmed(self) -> Position | None:
        """How far the stream has come; None where there is none."""
        return self.published if self._has_stream else None

    def take_news(self) -> list[Input]:
        """What the stream and its readers have said since the last call."""
        news: list[Input] = []
        if self._asked:
            self._asked = False
            news.append(Asked())
        if self._state is not None:
            news.append(Learned(self._state))
            self._state = None
        return news
