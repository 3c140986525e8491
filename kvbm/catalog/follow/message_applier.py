"""Messages → sequencer: runs of plain frames beside the loop, the rest one after the other on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.index.cluster_index import PlainApplied
from kvbm.catalog.index.plain_frames import Applier, applier_of
from kvbm.streams.base import StreamMessage

SLICE_BYTES = 64 << 10  # messages that are applied on the loop between two questions


class MessageApplier:
    """Applies fetched messages to a sequencer. Belongs to one loop.

    Args:
        applying: held while messages are applied.
        on_changes: told each change before anything else can run, so that nobody sees positions without what led to
            them.
        applier: how runs are applied; None: the best way the index has.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        applying: asyncio.Lock,
        on_changes: Callable[[Changes], None],
        applier: Applier | None = None,
    ) -> None:
        self._sequencer, self._applying, self._on_changes = sequencer, applying, on_changes
        self._applier = applier_of(sequencer.index) if applier is None else applier

    async def apply(self, messages: Sequence[StreamMessage], at_end: bool) -> None:
        """Apply messages in stream order.

        Args:
            at_end: the reader had fetched everything when it returned these.
        """
        at = 0
        while at < len(messages):
            async with self._applying:
                at += await self._apply_run(messages, at)
                if at < len(messages):
                    at = self._apply_slice(messages, at)
            await asyncio.sleep(0)
        if at_end or not messages:
            async with self._applying:
                self._on_changes(self._sequencer.step(time.monotonic(), (), at_end))

    def close(self) -> None:
        """End what it has begun. Idempotent."""
        self._applier.close()

    async def _apply_run(self, messages: Sequence[StreamMessage], at: int) -> int:
        """Apply what is plain from a message on; how many messages that was."""
        run = self._sequencer.plain_run(messages, at)
        if not run.messages:
            return 0
        taken = 0

        def take(applied: PlainApplied) -> None:
            nonlocal taken
            taken = applied.messages + (applied.diverged_at is not None)
            self._on_changes(self._sequencer.take_plain(messages[at : at + taken], run, applied))

        await self._applier.apply(run, take)
        return taken

    def _apply_slice(self, messages: Sequence[StreamMessage], at: int) -> int:
        """Apply a message that is not plain, and those behind it that cannot be; where the next one is."""
        end, size = at + 1, len(messages[at].data)
        while end < len(messages) and not self._sequencer.goes_on(messages[end]):
            size += len(messages[end].data)
            if size > SLICE_BYTES:
                break
            end += 1
        self._on_changes(self._sequencer.step(time.monotonic(), messages[at:end]))
        return end


def slices(messages: Sequence[StreamMessage]) -> list[Sequence[StreamMessage]]:
    """Messages in parts of about SLICE_BYTES; one empty part when there are none."""
    parts: list[Sequence[StreamMessage]] = []
    begin = size = 0
    for at, message in enumerate(messages):
        if size and size + len(message.data) > SLICE_BYTES:
            parts.append(messages[begin:at])
            begin, size = at, 0
        size += len(message.data)
    parts.append(messages[begin:])
    return parts
