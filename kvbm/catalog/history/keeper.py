"""Keeps a history of the archive going, in a process beside the catalog that is started again when it dies."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.history.processes import Beside
from kvbm.catalog.history.wire import REPORT, KeeperReport
from kvbm.catalog.threads import in_thread
from kvbm.core.errors import CatalogError
from kvbm.safe_log import SafeLog

log = SafeLog()

FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0  # one that has run so long begins with the first pause again
_DATA = "data-*"
_MANIFEST = "history.json"
_UNDONE = f".{_MANIFEST}.*"  # of a manifest that was being put in its place


class HistoryKeeper:
    """See the module. One asyncio loop.

    Args:
        command: starts the process, which says after each look how it went.
        folder: of the history.

    Attributes:
        read_s: Unix time at which the archive had last been read to its end; 0: it has not yet.
        trouble: why it cannot; "" when all is well.
    """

    def __init__(self, command: Sequence[str], folder: Path, degraded: Degraded) -> None:
        self.read_s, self.trouble = 0.0, ""
        self._command, self._folder, self._degraded = command, folder, degraded
        self._process: Beside | None = None
        self._has_looked = False  # the process has said how its first look went
        self._is_ended = False  # the process, by us
        self._erasing = 0
        self._renewed_s = -STEADY_S
        self._alone = asyncio.Lock()  # held while the process may write

    async def run(self) -> None:
        """Keep it going for ever."""
        pause_s = FIRST_PAUSE_S
        while True:
            begin_s = time.monotonic()
            async with self._alone:
                why = await self._follow()
            if time.monotonic() - begin_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._note(why)
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    def look_again(self) -> None:
        """Have it look whether all its files are good, as it does when it begins: somebody could not read one.

        One that has not ended its first look is left alone: it may be making all of it anew.
        """
        if self._has_looked and time.monotonic() - self._renewed_s >= STEADY_S:
            self._renewed_s = time.monotonic()
            self._end()

    async def erase(self) -> None:
        """Remove all of the history; it is made anew. Raises CatalogError: something of it cannot be removed."""
        self._erasing += 1
        try:
            self._end()
            async with self._alone:
                await in_thread(_remove, self._folder)
        except OSError as error:
            why = f"the history {self._folder} cannot be removed ({error.strerror or error})"
            raise CatalogError(why) from None
        finally:
            self._erasing -= 1
        self.read_s = 0.0

    async def _follow(self) -> str:
        """Run the process until it ends. Returns why it has; "" where it was ended here."""
        try:
            process = self._process = await Beside.start(self._command)
        except CatalogError as error:
            return str(error)
        self._has_looked = self._is_ended = False
        if self._erasing:  # since before there was anything to end
            self._end()
        said = ""
        try:
            while True:
                kind, part = await process.receive()
                if kind == REPORT:
                    said = self._take(msgspec.json.decode(part, type=KeeperReport))
        except CatalogError as error:
            return "" if self._is_ended else said or str(error)
        finally:
            self._process, self._has_looked = None, False
            with suppress(CatalogError):
                await asyncio.shield(process.close())

    def _end(self) -> None:
        """End the process by force; another one is started."""
        if self._process is not None:
            self._is_ended = True
            self._process.kill()

    def _take(self, report: KeeperReport) -> str:
        """Returns what does not work."""
        self._has_looked = True
        self.read_s = report.read_s or self.read_s
        self._note(report.trouble)
        return report.trouble

    def _note(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble:
            self._degraded.note("history", f"history: {trouble}")
        else:
            self._degraded.clear("history")


def _remove(folder: Path) -> None:
    (folder / _MANIFEST).unlink(missing_ok=True)
    for path in folder.glob(_UNDONE):
        path.unlink(missing_ok=True)
    for path in folder.glob(_DATA):
        shutil.rmtree(path)
