"""Follows the stream: reads messages, has the sequencer apply them and the collector gather their rows, and knows how far it has come.

`StreamFollower` is ready once the stream was read up to its end as of the start and live instances are whole, or had time to be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.heartbeats import HeartbeatFollower
from kvbm.catalog.lag import StreamLag
from kvbm.catalog.row_collector import RowCollector
from kvbm.catalog.sequencer import Sequencer
from kvbm.catalog.snapshots import SnapshotRequests
from kvbm.catalog.sql_writer import SqlWriter, slices
from kvbm.core.errors import StreamError
from kvbm.core.ids import InstanceId
from kvbm.streams.base import EventReader, Position, StreamMessage

log = structlog.get_logger()

FETCH_WAIT_S = 0.25
RETRY_S = 0.1


class StreamFollower:
    """Follows one stream. One asyncio loop.

    Args:
        lag: how much of the stream is not read yet.
        writer: brings the gathered rows to SQL.
        applying: held while messages are applied.
        whole_wait_s: how long readiness waits for live instances to be whole, once the stream was read.

    Attributes:
        is_ready: the stream was read up to its end as of the start, and live instances were whole then, or had time to be.
    """

    def __init__(
        self,
        reader: EventReader,
        lag: StreamLag,
        sequencer: Sequencer,
        rows: RowCollector,
        writer: SqlWriter,
        heartbeats: HeartbeatFollower,
        requests: SnapshotRequests,
        applying: asyncio.Lock,
        degraded: Degraded,
        whole_wait_s: float,
    ) -> None:
        self.is_ready = False
        self._reader, self._lag = reader, lag
        self._sequencer, self._rows, self._writer = sequencer, rows, writer
        self._heartbeats, self._requests = heartbeats, requests
        self._applying, self._degraded = applying, degraded
        self._whole_wait_s = whole_wait_s
        self._caught_up_s: float | None = None
        self._moved = asyncio.Condition()
        self._waiters = 0

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
                self._writer.check_place()
            parts = slices(messages)
            for part in parts[:-1]:
                await self._apply(part, at_end=False)
            await self._apply(parts[-1], at_end=self._reader.at_end)
            self._lag.confirmation.read(max(self._sequencer.sequence, self._reader.reached))
            if not self.is_ready:
                self._check_ready()

    async def wait_for(self, instance: InstanceId, position: Position, timeout_s: float) -> Position:
        """Wait until a place in an instance's stream is in the index. Returns where it is, in time or not."""
        deadline_s = time.monotonic() + timeout_s
        self._waiters += 1
        try:
            async with self._moved:
                while (reached := self._sequencer.position(instance)) < position:
                    try:
                        async with asyncio.timeout(deadline_s - time.monotonic()):
                            await self._moved.wait()
                    except TimeoutError:
                        return self._sequencer.position(instance)
                return reached
        finally:
            self._waiters -= 1

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def is_caught_up(self) -> bool:
        """Whether the stream was read up to its end as of the start."""
        return self._caught_up_s is not None

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _apply(self, messages: Sequence[StreamMessage], at_end: bool) -> None:
        async with self._applying:
            changes = self._sequencer.step(time.monotonic(), messages, at_end)
            self._rows.take(changes)
            for instance in changes.advanced:
                self._heartbeats.on_progress(instance)
            if changes.renumbered:
                self._writer.begin_anew()
        self._writer.bound()
        self._requests.look()
        if self._waiters and (changes.advanced or changes.gaps):
            async with self._moved:
                self._moved.notify_all()
        await asyncio.sleep(0)

    def _check_ready(self) -> None:
        now_s = time.monotonic()
        if self._caught_up_s is None and (self._sequencer.sequence >= self._lag.start_end or self._reader.at_end):
            self._caught_up_s = now_s
            self._requests.begin()
            log.info("catalog.caught_up", stream_sequence=self._sequencer.sequence)
        if self._caught_up_s is not None:
            has_waited = now_s - self._caught_up_s >= self._whole_wait_s
            self.is_ready = has_waited or not self._requests.unhealed()
