"""Follows the stream: reads messages, has the sequencer apply them, tells what has changed, and knows how far it has
come.

`StreamFollower` is ready once the stream was read up to its end as of the start and live instances are whole, or had
time to be.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.follow.message_applier import MessageApplier
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.snapshots import SnapshotRequests
from kvbm.core.errors import StreamError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventReader, Position

log = SafeLog()

FETCH_WAIT_S = 0.25
RETRY_S = 0.1


FIRST = Position(Epoch(1), Offset(0))  # before it nothing is known of an instance


def not_reached(instance: str, wanted: Position, reached: Position | None) -> str:
    """That a position is not reached, in words.

    Args:
        reached: the position that is; None: whoever asks may not know.
    """
    if reached is None:
        return f"instance {instance!r} is not yet at offset {wanted.offset} of epoch {wanted.epoch}"
    if reached < FIRST:
        return f"no instance {instance!r} is known here"
    at = f"instance {instance!r} is at offset {reached.offset} of epoch {reached.epoch} here"
    return f"{at}, not yet at offset {wanted.offset} of epoch {wanted.epoch}"


class Consequences(Protocol):
    """What follows from what was read, beside the index: rows of SQL, and nothing for who has no SQL."""

    def on_reader(self) -> None:
        """A reader has begun; the server may be another."""

    def on_changes(self, changes: Changes) -> None:
        """Messages were applied."""


class StreamFollower:
    """Follows one stream. One asyncio loop.

    Args:
        lag: how much of the stream is not read yet.
        requests: begun once the stream was read up to its end as of the start.
        consequences: None for none.
        applying: held while messages are applied.
        whole_wait_s: how long readiness waits for live instances to be whole, once the stream was read.

    Attributes:
        is_ready: the stream was read up to its end as of the start, and live instances were whole then, or had time to
            be.
    """

    def __init__(
        self,
        reader: EventReader,
        lag: StreamLag,
        sequencer: Sequencer,
        heartbeats: HeartbeatFollower,
        requests: SnapshotRequests,
        applying: asyncio.Lock,
        degraded: Degraded,
        whole_wait_s: float,
        consequences: Consequences | None = None,
    ) -> None:
        self.is_ready = False
        self._reader, self._lag = reader, lag
        self._sequencer, self._heartbeats, self._requests = sequencer, heartbeats, requests
        self._consequences = consequences
        self._degraded = degraded
        self._whole_wait_s = whole_wait_s
        self._caught_up_s: float | None = None
        self._moved = asyncio.Event()  # another one each time that something has moved
        self._applier = MessageApplier(sequencer, applying, self._take)

    # -- tasks --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read for ever."""
        begun = 0  # also at the start: between SQL's answer and the reader's first the server may have gone
        while True:
            try:
                messages = await self._reader.fetch(FETCH_WAIT_S)
            except StreamError as error:
                self._degraded.note("NATS", str(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._degraded.clear("NATS")
            if self._reader.begun != begun:
                begun = self._reader.begun
                if self._consequences is not None:
                    self._consequences.on_reader()
            await self._applier.apply(messages, self._reader.at_end)
            self._lag.confirmation.read(max(self._sequencer.sequence, self._reader.reached))
            if not self.is_ready:
                self._check_ready()

    async def wait_for(self, instance: InstanceId, position: Position, timeout_s: float) -> Position:
        """Wait until a place in an instance's stream is in the index. Returns where it is, in time or not."""
        deadline_s = time.monotonic() + timeout_s
        while (reached := self._sequencer.position(instance)) < position:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._moved.wait()
            except TimeoutError:
                return self._sequencer.position(instance)
        return reached

    def close(self) -> None:
        """End what it has begun. Idempotent."""
        self._applier.close()

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def is_caught_up(self) -> bool:
        """Whether the stream was read up to its end as of the start."""
        return self._caught_up_s is not None

    def why_unready(self) -> str:
        """Why it is not ready, in words; "" when it is."""
        if self.is_ready:
            return ""
        if self.is_caught_up:
            return (
                "the stream is read; waiting for snapshots of suspect instances: "
                f"{', '.join(sorted(self._requests.unhealed())[:5])}"
            )
        return f"reading the stream: at message {self._sequencer.sequence} of {self._lag.start_end}"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, changes: Changes) -> None:
        if self._consequences is not None:
            self._consequences.on_changes(changes)
        for instance in changes.advanced:
            self._heartbeats.on_progress(instance)
        self._requests.look()
        if changes.advanced or changes.gaps:
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

    def _check_ready(self) -> None:
        now_s = time.monotonic()
        if self._caught_up_s is None and (self._sequencer.sequence >= self._lag.start_end or self._reader.at_end):
            self._caught_up_s = now_s
            self._requests.begin()
            log.info("catalog.caught_up", stream_sequence=self._sequencer.sequence)
        if self._caught_up_s is not None:
            has_waited = now_s - self._caught_up_s >= self._whole_wait_s
            self.is_ready = has_waited or not self._requests.unhealed()
