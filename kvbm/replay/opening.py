"""Finds the source that a user names: a capture file, an archive, a journal, a folder of journals, or the live
stream.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvbm.catalog.follow.archive import settled_end
from kvbm.replay.live import StreamSource
from kvbm.replay.source import ARCHIVE_SUFFIX, FileSource, FrameSource, SourceError, SourceFile
from kvbm.streams.journal.history import KEPT_SUFFIX
from kvbm.streams.journal.segments import SEGMENT_SUFFIX, segment_files
from kvbm.streams.nats.credentials import Credentials

OPEN = Credentials()  # of a server that asks nobody who it is


def open_source(name: str, timeout_s: float = 5.0, credentials: Credentials = OPEN) -> FrameSource:
    """The source a user names: a path, or a URL such as nats://host:4222.

    Args:
        credentials: for a URL.
    Raises: SourceError: there is nothing of the kind. JournalError: a folder with a file that is no segment.
    """
    scheme, is_url, _ = name.partition("://")
    if is_url:
        if scheme.lower() not in ("nats", "tls"):
            raise SourceError(f"{scheme}:// is no kind of source; use a path, or nats://host:port")
        return StreamSource(name, timeout_s, credentials)
    path = Path(name)
    if path.is_dir():
        return _open_folder(name, path)
    if not path.exists():
        raise SourceError(f"{name} does not exist; give a capture file, a journal folder, or a nats:// URL")
    if path.suffix in (SEGMENT_SUFFIX, KEPT_SUFFIX):
        return FileSource(name, [SourceFile(path, "", may_tear=True)], is_trimmed=True)
    return FileSource(name, [SourceFile(path, "", may_tear=False)], is_trimmed=False)


def _open_folder(name: str, folder: Path) -> FileSource:
    files = [SourceFile(path, "", may_tear=True) for path in sorted(folder.glob(f"*{ARCHIVE_SUFFIX}"))]
    settled = partial(settled_end, folder) if files else lambda: None
    if not files:
        files = _journal_files(folder)
    if not files:
        raise SourceError(
            f"{name} holds no journal: no *{SEGMENT_SUFFIX} file in it or in the folders below; and no "
            f"*{ARCHIVE_SUFFIX} file of an "
            "archive in it"
        )
    source = FileSource(name, files, is_trimmed=True, settled=settled)
    source.total = sum(file.path.stat().st_size for file in files if file.path.exists())
    return source


def _journal_files(folder: Path) -> list[SourceFile]:
    files: list[SourceFile] = []
    suffixes = (SEGMENT_SUFFIX, KEPT_SUFFIX)
    journals = sorted({path.parent for suffix in suffixes for path in folder.rglob(f"*{suffix}")})
    for journal in journals:
        segments = sorted(segment for suffix in suffixes for segment in segment_files(journal, suffix))
        group = "" if journal == folder else str(journal.relative_to(folder))
        last = len(segments) - 1
        files += [SourceFile(path, group, index == last) for index, (_, _, path) in enumerate(segments)]
    return files
