"""Files on disk as kvbm treats them: plain ones alone are opened, a read has a bound, and what is made is its owner's
alone.

A FIFO without a writer would block an open for ever, a device never ends, a sparse file is larger than memory: each is
an OSError at once. Names of tenants and instances, hashes and events stand in what kvbm writes, so files have mode 0600
and folders 0700, whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvbm.safe_log import SafeLog

log = SafeLog()

FILE_MODE = 0o600
FOLDER_MODE = 0o700
SMALL_BYTES = 1 << 20  # of a file that people write: settings, keys, seeds
LOCK_WAIT_S = 20.0  # for another process that does what one does alone
_LOCK_LOOK_S = 0.02
_OTHERS = 0o077
_OPEN = 0o066  # whoever may only pass through a folder learns no name there
_ENTRIES_MOST = 65_536  # of a tree that are looked at for what others may read
_PIECE_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000  # no clock that files are stamped with ticks more slowly


def open_plain(path: Path, flags: int = os.O_RDONLY, follows: bool = False) -> int:
    """A file descriptor of a plain file; one that is made (O_CREAT) is its owner's alone.

    Args:
        follows: a link is followed, to a plain file too. For files that people name and mount, not for folders others
            write into.
    Raises: OSError: there is none, or something else has its name.
    """
    try:
        no_link = 0 if follows else os.O_NOFOLLOW
        fd = os.open(path, flags | os.O_NONBLOCK | no_link | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _no_plain_file(error.errno, path) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _no_plain_file(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, path)
    return fd


def make_plain(path: Path) -> None:
    """Make a plain file, its owner's alone, where there is none; a link is followed.

    One that is there is not opened: closing it would end the locks that this process has on it elsewhere.

    Raises: OSError: it cannot be made, or something else has its name.
    """
    path = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        try:
            os.close(open_plain(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another made it just now
    else:
        if not stat.S_ISREG(mode):
            raise _no_plain_file(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, path)


def opener(path: str, flags: int) -> int:
    """For `open(…, opener=…)`: a plain file, which is its owner's alone when it is made."""
    return open_plain(Path(path), flags, follows=True)


def read_plain(path: Path, most_bytes: int, follows: bool = False) -> bytes:
    """The first bytes of a plain file, `most_bytes` at most. Raises OSError: as `open_plain`, or it cannot be read."""
    fd = open_plain(path, follows=follows)
    try:
        return _read(fd, min(most_bytes, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def read_small(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """All of a plain file, which a link may lead to.

    Raises OSError: as `open_plain`, or it has more bytes: none is read then.
    """
    fd = open_plain(path, follows=True)
    try:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, {most_bytes} are the most", str(path))
        return _read(fd, most_bytes)  # not its size: files of /proc say 0
    finally:
        os.close(fd)


def data_pieces(fd: int, most_bytes: int = _PIECE_BYTES) -> Iterator[tuple[int, bytes]]:
    """What a file holds, piece by piece with its position; the holes of a sparse file are left out. Raises OSError."""
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        at = next_data(fd, at)
        data = os.pread(fd, most_bytes, at)
        if not data:
            return
        yield at, data
        at += len(data)


def next_data(fd: int, at: int) -> int:
    """The first position from `at` on that is in no hole of a sparse file; its size where only a hole follows.

    Raises OSError.
    """
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return max(at, os.fstat(fd).st_size)
        if error.errno == errno.EINVAL:  # the file system knows no holes
            return at
        raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, for its owner alone; one that is there stays as it is. Raises OSError."""
    missing = []
    above = path
    while not above.exists():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # says what is wrong with one that is no folder


def write_new(path: Path, data: bytes) -> None:
    """Write a whole file, its owner's alone also where a wider one had the name; it is on the device.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def replace_file(path: Path, data: bytes, keeps_owner: bool = True, keeps_mode: bool = False) -> None:
    """Put a whole file in the place of another in one step; it is its owner's alone.

    Args:
        keeps_owner: it belongs to whom the other belonged, not to whoever writes it. Not for what that one must not
            read.
        keeps_mode: it is readable to whom the other was.
    Raises: OSError: nothing has changed then.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", opener=opener) as file:
            with suppress(FileNotFoundError):
                found = os.stat(path)
                if keeps_owner:
                    with suppress(PermissionError):
                        os.fchown(file.fileno(), found.st_uid, found.st_gid)
                if keeps_mode:
                    os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def stamp(path: str | Path) -> tuple[int, ...] | None:
    """What differs when a file has changed; None when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def settled_stamp(path: str | Path) -> tuple[int, ...] | None:
    """As `stamp`, of a file that is read now: it differs once more when some seconds have passed since the file was
    written.

    For who remembers it beside what was read. Within a tick of the system's clock, which may be ten milliseconds, a
    file can be written again without another stamp; of one that is older than that nothing is missed.
    """
    found = stamp(path)
    return found and (*found, int(_is_settled(found)))


class WatchedFiles:
    """Files that others replace.

    One that is being written is not taken by halves: a change counts once it has stayed as it is for a time.

    One thread. `take` what was read after `has_changed`. What is there at the beginning counts as taken where it has
    been as it is for some seconds. Otherwise it is to be read once more: the first reading may have met it while it was
    written.
    """

    def __init__(self, *paths: str | Path) -> None:
        self._paths = paths
        self._seen = self._stamps()
        self._taken = self._seen if all(one is None or _is_settled(one) for one in self._seen) else None
        self._since_s = float("-inf")

    @property
    def seen(self) -> object:
        """Differs when the files were found changed."""
        return self._seen

    @property
    def seen_bytes(self) -> int:
        """How long they were together."""
        return sum(0 if one is None else one[2] for one in self._seen)

    def has_changed(self, now_s: float, stays_s: float) -> bool:
        """Look, and tell whether they differ from what was taken, and have not changed for so long.

        Args:
            now_s: of a clock that only grows.
        """
        return self.has_stayed(now_s, stays_s) and self._seen != self._taken

    def has_stayed(self, now_s: float, stays_s: float) -> bool:
        """Look, and tell whether they have not changed for so long."""
        found = self._stamps()
        if found != self._seen:
            self._seen, self._since_s = found, now_s
        return now_s - self._since_s >= stays_s

    def is_as_seen(self) -> bool:
        """Whether they are as the last look found them: what was read since then is what was looked at."""
        return self._stamps() == self._seen

    def take(self) -> None:
        """What was seen last is what counts."""
        self._taken = self._seen

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(stamp, self._paths))


def _is_settled(found: tuple[int, ...]) -> bool:
    """Whether a file was written so long ago that what is written from now on has another stamp."""
    return time.time_ns() - max(found[0], found[1]) >= _SETTLED_NS


def stranger(found: os.stat_result) -> int | None:
    """The user a file belongs to, where that is neither who runs this process nor root; None otherwise."""
    return found.st_uid if found.st_uid not in (0, os.geteuid()) else None


def is_kept_secret(found: os.stat_result) -> bool:
    """Whether nobody but its owner reads a file, and root's nobody but its group: so Kubernetes mounts Secrets for a
    process that is not root (`fsGroup`).
    """
    return not found.st_mode & (0o037 if found.st_uid == 0 != os.geteuid() else _OTHERS)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While no other process does this in the folder, which is made if it is not there.

    Whoever may read the folder can lock it, too, so it is waited for `LOCK_WAIT_S` at most. Raises OSError: also then.
    """
    make_folder(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + LOCK_WAIT_S
        while not _locks(fd):
            if time.monotonic() >= until_s:
                why = (
                    f"another process has had its folder locked for {LOCK_WAIT_S:g} s, lslocks names it; if it is "
                    "another user's, run: "
                    f"chmod go-rx {shlex.quote(str(folder))}"
                )
                raise OSError(errno.EAGAIN, why, str(folder))
            time.sleep(_LOCK_LOOK_S)
        yield
    finally:
        os.close(fd)


class Exposed(NamedTuple):
    """What of some trees others may read or write.

    Attributes:
        paths: the first few. entries: how many, of those that were looked at. roots: the trees they are in.
    """

    paths: tuple[str, ...]
    entries: int
    roots: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """The command that mends it."""
        return f"run: chmod -R go= {shlex.join(self.roots)}" if self.roots else ""


def exposed(roots: Sequence[Path], shown: int = 3) -> Exposed:
    """Files, and what lies under folders, that others may read or write. The folders given are their maker's choice.

    Files in a closed folder are closed. 65,536 names at most are looked at; what is not there, or cannot be looked at,
    counts as none.
    """
    paths: list[str] = []
    count = 0
    of: dict[str, None] = {}
    for root, path in islice(_look(roots), _ENTRIES_MOST):
        if path:
            count += 1
            of[root] = None
            if len(paths) < shown:
                paths.append(path)
    return Exposed(tuple(paths), count, tuple(of))


def warn_exposed(what: str, *roots: Path) -> None:
    """One warning where others may read or write something of ours: a copy, or somebody's command, has left it so."""
    found = exposed(roots)
    if found.entries:
        log.warning(
            "files.open_to_others",
            what=what,
            path=found.paths[0],
            entries=found.entries,
            remedy=found.remedy,
            effect="other users of this machine may learn names, hashes and events",
        )


def narrow(path: Path) -> int:
    """Make a file its owner's alone; gives the mode it had where that was wider, else 0.

    Raises OSError: it is another user's.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return 0
    if not mode & _OTHERS:
        return 0
    os.chmod(path, FILE_MODE)
    return mode


def _look(roots: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Each path with its root; "" for one that others may not read or write."""
    for root in map(str, dict.fromkeys(roots)):
        waiting = [root]
        while waiting:
            path = waiting.pop()
            try:
                mode = os.stat(path).st_mode if path == root else os.lstat(path).st_mode
            except OSError:
                continue
            is_folder, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
            is_open = bool(mode & _OPEN) and (is_file or (is_folder and path != root))
            yield root, path if is_open else ""
            if is_folder and mode & 0o011:  # whoever may not pass through reaches nothing in it
                with suppress(OSError), os.scandir(path) as entries:
                    waiting += sorted((entry.path for entry in islice(entries, _ENTRIES_MOST)), reverse=True)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int, wanted: int) -> bytes:
    parts: list[bytes] = []
    while wanted > 0 and (part := os.read(fd, min(wanted, _PIECE_BYTES))):
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


def _no_plain_file(number: int, path: Path) -> OSError:
    kind = "a directory, no plain file" if number == errno.EISDIR else "no plain file"
    return OSError(number, f"it is {kind}", str(path))
