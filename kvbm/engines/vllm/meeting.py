"""Where the processes of one engine leave word for each other while it starts, when vLLM has no call for it yet.

A folder below the system's for temporary files, named after vLLM's id of the engine, its owner's alone. Words are small
and plain, and nothing is done on a word alone: what a worker says decides a namespace, and where HOST is, each plan
says again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvbm.core.errors import PoolError
from kvbm.files import FOLDER_MODE, open_plain, read_plain
from kvbm.safe_log import SafeLog

log = SafeLog()

_MOST_BYTES = 16 << 20  # of a word: what a model with thousands of layers has resolved
_NAP_S = 0.05


class Meeting:
    """The folder of one engine.

    Args:
        engine: vLLM's `KVTransferConfig.engine_id`, equal in all processes of an engine.
        below: where the folder is; the system's for temporary files when None.
    """

    def __init__(self, engine: str, below: Path | None = None) -> None:
        """Nothing is made yet."""
        name = hashlib.sha256(f"kvbm.vllm.meeting.v1\0{os.getuid()}\0{engine}".encode()).hexdigest()[:32]
        self._folder = (below or Path(tempfile.gettempdir())) / f"kvbm-{name}"
        self._lock = self._folder.with_suffix(".lock")
        self._lock_fd: int | None = None

    def claim(self) -> bool:
        """Have the folder for this engine alone, by the scheduler, until `release`;

        False, and a warning: another engine has it.

        A device that knows no locks gives it to everybody.
        """
        try:
            fd = open_plain(self._lock, os.O_RDWR | os.O_CREAT)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                return True
            log.warning(
                "engine_id.shared",
                why="another engine on this host runs with the same engine_id, and their processes "
                "may take each"
                " other's words for their own",
                remedy="give each engine an engine_id of its own, or none",
            )
            return False
        self._lock_fd = fd
        return True

    def release(self) -> None:
        """Let others have it. Idempotent."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            self._lock.unlink(missing_ok=True)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked has the descriptor, too
            os.close(fd)

    def leave(self, name: str, word: Any) -> None:
        """Put a word there, in place of an older one.

        Raises PoolError: the folder is another's, or cannot be written.
        """
        try:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=FOLDER_MODE)
            self._require_own()
            part = self._folder / f".{name}.{os.getpid()}"
            fd = open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(word))
            part.rename(self._folder / name)
        except OSError as error:
            raise PoolError(f"{self._folder}: a word for this engine's processes cannot be left ({error})") from None

    def find(self, name: str) -> Any:
        """A word that was left; None: there is none, or nothing that can be believed."""
        try:
            self._require_own()
            return msgspec.json.decode(read_plain(self._folder / name, _MOST_BYTES))
        except (OSError, msgspec.DecodeError):
            return None

    def wait(self, name: str, until: Callable[[], bool], timeout_s: float) -> Any:
        """A word once it is there; None: `until` said that it is no longer waited for, or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while (word := self.find(name)) is None and not until() and time.monotonic() < deadline_s:
            time.sleep(_NAP_S)
        return word

    def forget(self, name: str) -> None:
        """Take a word away, such as one that an earlier engine of this id has left. Raises PoolError: it stays."""
        try:
            (self._folder / name).unlink(missing_ok=True)
        except (NotADirectoryError, FileNotFoundError):
            pass
        except OSError as error:
            raise PoolError(f"{self._folder / name}: an old word cannot be taken away ({error})") from None

    def close(self) -> None:
        """Take away all of it. Idempotent; what cannot be taken away stays."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _require_own(self) -> None:
        """Raises OSError: the folder is not there, or not this user's alone."""
        found = self._folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{self._folder} is not a folder of this user alone")
