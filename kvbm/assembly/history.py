"""A catalog's history: the commands of the processes beside it, and the one that keeps it going."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.assembly.native import NATIVE, NATIVE_STAYS
from kvbm.config import Settings
from kvbm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from kvbm.catalog.history.past import HistoryOptions


def history_options(settings: Settings) -> HistoryOptions | None:
    """What keeps a catalog's history going, and what answers; None where it keeps none.

    Raises: ConfigError: there is no archive. MissingExtraError.
    """
    from kvbm.catalog.history.past import HistoryOptions

    catalog, limits = settings.catalog, settings.catalog.limits
    if not catalog.history:
        return None
    if not catalog.archive:
        raise ConfigError("catalog.history is of an archive: set catalog.archive to its folder, too")
    folder, archive = (str(Path(one).absolute()) for one in (catalog.history, catalog.archive))
    if Path(folder) in (Path(archive), *Path(archive).parents) or Path(archive) in Path(folder).parents:
        raise ConfigError(f"catalog.history {catalog.history} and catalog.archive {catalog.archive} lie in each other")
    try:
        import duckdb  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtraError("the libraries of a history (duckdb, pyarrow)", "sql") from None
    python = (sys.executable, "-P", "-m")  # what lies in the working folder is not ours
    return HistoryOptions(
        folder=folder,
        keeper=(*python, "kvbm.assembly.history", archive, folder, str(limits.history_keeper_bytes)),
        reader=(*python, "kvbm.replay.history_reader", folder, archive, str(limits.history_bytes)),
    )


def main(arguments: Sequence[str]) -> None:
    """`python -m kvbm.assembly.history ARCHIVE FOLDER MEMORY_BYTES`: keep a history until standard input ends."""
    from kvbm.replay.history import Maker
    from kvbm.replay.history_keeper import NothingYetError, keep_beside
    from kvbm.replay.opening import open_source
    from kvbm.replay.source import ARCHIVE_SUFFIX, FrameSource

    archive, folder, memory_bytes = arguments

    def opened() -> FrameSource:
        if not any(Path(archive).glob(f"*{ARCHIVE_SUFFIX}")):
            raise NothingYetError(f"the archive {archive} has nothing yet")
        return open_source(archive)

    keep_beside(opened, Path(folder), Maker(NATIVE, NATIVE_STAYS), int(memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1:])
