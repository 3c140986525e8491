"""Keeps a history going while its source does: `kvbm-replay history SOURCE DIR --follow`, and what a catalog starts
beside itself (`catalog/history/keeper.py`).

Each writing costs what was read and what lasts, so the pause after it is some times as long as it took: with much that
lasts a history is written seldom, and never takes much of a core.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvbm.catalog.history.wire import REPORT, KeeperReport, packed
from kvbm.core.errors import KvbmError
from kvbm.replay.history import HistoryWriter, Maker
from kvbm.replay.history_manifest import HistoryManifest
from kvbm.replay.source import FrameSource, SourceError

LEAST_PAUSE_S = 2.0
PAUSE_RATIO = 4.0  # of the time a writing took
MOST_PAUSE_S = 300.0
_NICE = 15


class NothingYetError(SourceError):
    """A source has nothing yet: no trouble."""


def keep(
    open_source: Callable[[], FrameSource],
    folder: Path,
    maker: Maker,
    on_written: Callable[[HistoryManifest], object],
    on_trouble: Callable[[str], object],
    wait: Callable[[float], bool],
    instance: str | None = None,
) -> None:
    """Have a history go on until `wait` says so.

    Args:
        open_source: the source as it is by now. Raises SourceError.
        on_written: told after each look, also when nothing was new. on_trouble: told why one could not be made; ""
            where the source has nothing yet.
        wait: waits so many seconds; gives whether to end.
    Raises: SourceError: the folder is of something else, or another process writes it. MissingExtraError.
    """
    with HistoryWriter(folder, maker, instance, beyond=False) as writer:
        while True:
            begin_s = time.monotonic()
            try:
                on_written(writer.write(open_source()))
            except NothingYetError:
                on_trouble("")
            except (KvbmError, OSError) as error:
                on_trouble(str(error))
            took_s = time.monotonic() - begin_s
            if wait(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, PAUSE_RATIO * took_s))):
                return


def keep_beside(open_source: Callable[[], FrameSource], folder: Path, maker: Maker, memory_bytes: int) -> None:
    """Keep a history as a process that another one has started, until that closes our standard input.

    Args:
        memory_bytes: what the process may take; it ends where it needs more.
    """
    os.nice(_NICE)
    with suppress(ValueError, OSError):  # a smaller limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes,) * 2)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no report
    threading.Thread(target=_end_with_input, daemon=True).start()

    def report(read_s: float, trouble: str) -> None:
        try:
            out.write(packed(REPORT, msgspec.json.encode(KeeperReport(read_s=read_s, trouble=trouble))))
        except OSError:
            os._exit(0)  # nobody is there any more

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    try:
        keep(
            open_source,
            folder,
            maker,
            lambda history: report(time.time(), ""),
            lambda trouble: report(0.0, trouble),
            wait,
        )
    except KvbmError as error:
        report(0.0, str(error))
        sys.exit(2)
    except MemoryError:
        report(0.0, f"it needs more than {memory_bytes >> 20:,} MiB of memory; raise limits.history_keeper_bytes")
        os._exit(3)


def _end_with_input() -> None:
    """A write that is cut short leaves an older history as it was."""
    with os.fdopen(os.dup(0), "rb") as source:
        while source.read(1 << 10):
            pass
    os._exit(0)
