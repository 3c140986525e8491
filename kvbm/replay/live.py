"""The stream on NATS as a source, up to where it ended when reading began."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvbm.core.backend import Backend
from kvbm.core.errors import StreamError
from kvbm.replay.scan import CORRUPT, TORN, Damage, scan
from kvbm.replay.source import FramePlace, Located, SourceError
from kvbm.streams.base import EVENTS_PREFIX, EventReader, StreamMessage, fence_of, is_fence, subject_names
from kvbm.streams.fence_records import FenceRecord
from kvbm.streams.holders import Holders
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.stream import NatsStream


class StreamSource:
    """All instances' events, in the order the stream stored them: a `Source`.

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
        """See `Source.read`."""
        order = self.done = 0
        holders = Holders()
        with asyncio.Runner() as runner:
            stream = runner.run(
                NatsStream.connect(self._url, self._timeout_s, credentials=self._credentials, makes=False)
            )
            try:
                last, reader = runner.run(self._begin(stream))
                at = 0
                while at < last and not reader.at_end:
                    for message in runner.run(self._fetch(reader)):
                        at = message.sequence
                        if at > last:
                            break
                        for located in self._frames(message, holders, backend, order):
                            yield located
                            order += 1
                        self.done += 1
                if not order:
                    raise SourceError(f"the stream at {self.name} holds no events")
            finally:
                runner.run(stream.close())

    async def _begin(self, stream: NatsStream) -> tuple[int, EventReader]:
        last = await stream.last_sequence(self._timeout_s)
        first = await stream.first_sequence(self._timeout_s)
        if first > last:
            raise SourceError(f"the stream at {self.name} holds no events")
        self.total = last - first + 1
        return last, await stream.pull(0, None, self._timeout_s)

    async def _fetch(self, reader: EventReader) -> list[StreamMessage]:
        messages = await reader.fetch(self._timeout_s)
        if not messages and not reader.at_end:
            raise StreamError(
                f"the stream at {self.name} sent nothing for {self._timeout_s:g} s, {self.done:,} of {self.total:,} messages "
                "were read; try again, or raise --timeout"
            )
        return messages

    def _frames(self, message: StreamMessage, holders: Holders, backend: Backend, order: int) -> Iterator[Located]:
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
