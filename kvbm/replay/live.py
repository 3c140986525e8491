"""The stream on NATS as a source, up to where it ended when reading began, or followed without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from kvbm.core.backend import Backend
from kvbm.core.errors import StreamError
from kvbm.replay.scan import CORRUPT, TORN, Damage, scan
from kvbm.replay.source import FramePlace, Located, SourceError
from kvbm.streams.base import EVENTS_PREFIX, EventReader, StreamMessage, fence_of, is_fence, subject_names
from kvbm.streams.fence_owner import FenceOwners
from kvbm.streams.fence_records import FenceRecord
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.stream import NatsStream

_LOOK_S = 0.1  # between two looks for a stream that is not there yet


class StreamSource:
    """All instances' events, in the order the stream stored them: a `FrameSource`.

    Args:
        timeout_s: how long the server may keep silent.
        credentials: of a user who may read.
    """

    def __init__(self, url: str, timeout_s: float, credentials: Credentials) -> None:
        self.name = shown(url)
        self.is_trimmed = True
        self.total = 0
        self.done = 0
        self._url = url
        self._timeout_s = timeout_s
        self._credentials = credentials

    def read(self, backend: Backend) -> Iterator[Located]:
        """See `FrameSource.read`."""
        return self._read(backend, follows=False)

    def follow(self, backend: Backend) -> Iterator[Located]:
        """All frames, fences and damage, and those that come, without end; also of a stream that is made within the
        time. Raises StreamError.
        """
        return self._read(backend, follows=True)

    def _read(self, backend: Backend, follows: bool) -> Iterator[Located]:
        order = self.done = 0
        holders = FenceOwners()
        with asyncio.Runner() as runner:
            stream = runner.run(self._connect(waits=follows))
            try:
                last, reader = runner.run(self._begin(stream, follows))
                at = 0
                while follows or (at < last and not reader.at_end):
                    for message in runner.run(self._fetch(reader, follows)):
                        at = message.sequence
                        if at > last and not follows:
                            break
                        for located in self._frames(message, holders, backend, order):
                            yield located
                            order += 1
                        self.done += 1
                if not order and not follows:
                    raise SourceError(f"the stream at {self.name} holds no events")
            finally:
                runner.run(stream.close())

    async def _connect(self, waits: bool) -> NatsStream:
        """`waits`: for whoever makes the stream."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return await NatsStream.connect(self._url, self._timeout_s, credentials=self._credentials, makes=False)
            except StreamError:
                if not waits or time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(_LOOK_S)

    async def _begin(self, stream: NatsStream, follows: bool) -> tuple[int, EventReader]:
        last = await stream.last_sequence(self._timeout_s)
        first = await stream.first_sequence(self._timeout_s)
        if first > last and not follows:
            raise SourceError(f"the stream at {self.name} holds no events")
        self.total = last - first + 1
        return last, await stream.pull(0, None, self._timeout_s)

    async def _fetch(self, reader: EventReader, follows: bool) -> list[StreamMessage]:
        messages = await reader.fetch(self._timeout_s)
        if not messages and not reader.at_end and not follows:
            raise StreamError(
                f"the stream at {self.name} sent nothing for {self._timeout_s:g} s, {self.done:,} of {self.total:,} "
                "messages "
                "were read; try again, or raise --timeout",
                timeout_s=self._timeout_s,
            )
        return messages

    def _frames(self, message: StreamMessage, holders: FenceOwners, backend: Backend, order: int) -> Iterator[Located]:
        data, group = message.data, message.subject.rpartition(".")[0]
        counts, fence = holders.take(message)
        if not counts:  # here as in the catalog
            return
        cluster, instance = subject_names(message.subject)
        if is_fence(message.subject):
            fence = fence_of(data, message.sequence, f"message {message.sequence}")
        if fence is not None:
            record = FenceRecord(cluster=cluster, instance=instance, fence=fence)
            yield Located(record, FramePlace(self.name, message.sequence, 0), b"", f"{EVENTS_PREFIX}.{cluster}", order)
            order += 1
        if is_fence(message.subject):
            return
        for piece in scan(lambda at, size: data[at : at + size], len(data), backend):
            found = piece.found
            if isinstance(found, Damage) and found.kind == TORN:
                found = found._replace(kind=CORRUPT)  # a message is whole frames
            yield Located(found, FramePlace(self.name, message.sequence, piece.at), piece.data, group, order)
            order += 1
