"""The history of a catalog's archive as the catalog has it: what keeps it going, and what answers questions to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.history.keeper import HistoryKeeper
from kvbm.catalog.history.readers import HistoryReaders, HistoryReply
from kvbm.catalog.history.wire import HistoryAsk
from kvbm.config.settings import LimitSettings

DEFAULT_S = 10.0  # a question has so long


class HistoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a history going, and what answers.

    Attributes:
        folder: of the history.
        keeper, reader: commands.
    """

    folder: str
    keeper: tuple[str, ...]
    reader: tuple[str, ...]


class PastAnswers:
    """See the module. One asyncio loop."""

    def __init__(self, options: HistoryOptions, limits: LimitSettings, degraded: Degraded) -> None:
        self.limits = limits
        self.keeper = HistoryKeeper(options.keeper, Path(options.folder), degraded)
        self._readers = HistoryReaders(
            options.reader, limits.history_processes, limits.history_waiting, self.keeper.look_again
        )

    def ask(
        self, kind: str, arguments: dict[str, Any], within_s: float | None = None
    ) -> AbstractAsyncContextManager[HistoryReply]:
        """As `HistoryReaders.ask`."""
        if kind == "status":
            arguments = arguments | {"read_s": self.keeper.read_s, "trouble": self.keeper.trouble}
        most_s = self.limits.history_s
        within_s = min(most_s, DEFAULT_S) if within_s is None else within_s
        return self._readers.ask(HistoryAsk(kind=kind, arguments=arguments, within_s=within_s))

    async def erase(self) -> None:
        """Remove all of the history; it is made anew of what the archive has then. Raises CatalogError."""
        await self.keeper.erase()
        self._readers.renew()

    async def close(self) -> None:
        """End what answers. The keeper ends with its task."""
        await self._readers.close()


async def whole(body: AsyncIterator[bytes]) -> bytes:
    """All of an answer."""
    return b"".join([part async for part in body])
