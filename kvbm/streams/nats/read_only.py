"""A stream that is followed with the rights of a reader: nothing is sent that others hear, nothing is made, nothing is
left on the server.

A catalog knows that it hears everybody because its own pulses come back. A reader sends none. In place of a pulse it
asks the stream's leader where the heartbeats end, and hears "its pulse" once it has read that far: then it has read
every heartbeat stored before the question.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvbm.core.errors import StreamError
from kvbm.core.ids import InstanceId
from kvbm.core.parts import ALL_PARTS
from kvbm.safe_log import SafeLog
from kvbm.streams.base import PULSE_PREFIX, START, Heartbeat, Mark, Notice, part_filters, read_subjects
from kvbm.streams.nats.api import stream_info
from kvbm.streams.nats.batch_reader import LOOK_S, BatchReader
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.heartbeats import heartbeat_in
from kvbm.streams.nats.messages import NewMessages, ReadableMessages
from kvbm.streams.nats.reader import NatsReader
from kvbm.streams.nats.setup import PULSE, STREAM, StreamOptions, open_ready
from kvbm.streams.nats.shared import RECONNECT_MOST_S, SharedConnection
from kvbm.streams.nats.stream import NatsStream

log = SafeLog()

EVENTS_LOOK_S = 0.02  # between two looks for events, for who has no consumer to be told of them
ASK_END_S = 1.0
_MOST_ECHOES = 16


class ReadOnlyStream(NatsStream):
    """An `EventStream` for who only reads. One asyncio loop; it owns its connection."""

    def __init__(self, connections: SharedConnection) -> None:
        super().__init__(connections)
        self._echoes: deque[tuple[int, Heartbeat]] = deque()  # each is heard once the heartbeats are read so far
        self._pulses: BatchReader | None = None  # of them
        self._created = ""  # when their stream was made

    @classmethod
    async def follow(
        cls, url: str, timeout_s: float, credentials: Credentials, new_messages: NewMessages = ReadableMessages
    ) -> ReadOnlyStream:
        """Connect. Raises StreamError: nothing answers in time, refuses, or has no events.

        Args:
            new_messages: as in `NatsStream.connect`.
        """
        options = StreamOptions(makes=False, new_messages=new_messages)
        return cls(SharedConnection(url, await open_ready(url, timeout_s, options, credentials), options, credentials))

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> NatsReader | BatchReader:
        """See `EventLog.pull`. By one consumer; by direct gets where consumers are lent to nobody."""
        if not self._connections.now.is_lent:
            return await super().pull(after_sequence, cluster, timeout_s, fingerprint, parts)
        after = Mark(after_sequence, fingerprint)
        reader = BatchReader(self._connections, STREAM, read_subjects(cluster, parts), after, EVENTS_LOOK_S)
        await reader.begin(timeout_s)
        return reader

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """Nothing is sent;

        `watch_pulses` gives it out once all heartbeats that are stored by now are read. Raises StreamError.
        """
        info = await stream_info(self._connections.now, PULSE, ASK_END_S)
        state = info.state
        if self._pulses is not None and (info.created != self._created or state.last_seq < self._pulses.reached):
            self._echoes.clear()
            await self._pulses.check_store(ASK_END_S)
        self._created = info.created
        if len(self._echoes) == _MOST_ECHOES:
            self._echoes.popleft()
        self._echoes.append((state.last_seq if state.messages else 0, heartbeat))

    async def send_notice(self, notice: Notice) -> None:
        """Nobody is told: catalogs do that."""

    async def ask_snapshot(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        """Nobody is asked: catalogs do that."""
        return False

    async def watch_pulses(
        self, cluster: str | None = None, parts: tuple[int, ...] = ALL_PARTS
    ) -> AsyncIterator[Heartbeat]:
        """See `Heartbeats.watch_pulses`."""
        reader = self._pulses = BatchReader(self._connections, PULSE, part_filters(PULSE_PREFIX, cluster, parts), START)
        try:
            while not self._connections.is_closed:
                try:
                    messages = await reader.fetch(LOOK_S)
                except StreamError as error:
                    log.debug("stream.pulses_unreachable", why=str(error))
                    await asyncio.sleep(RECONNECT_MOST_S)
                    continue
                for message in messages:
                    if (heartbeat := heartbeat_in(message)) is not None:
                        yield heartbeat
                while self._echoes and self._echoes[0][0] <= reader.reached:
                    yield self._echoes.popleft()[1]
        finally:
            self._pulses = None
            await reader.close()
