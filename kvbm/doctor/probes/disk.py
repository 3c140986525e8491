"""What a disk is and can do, at a folder, a file or a block device.

Run as a script with one JSON argument; prints JSON.

Files are made without a name, or lose it at once, so nothing is left whatever happens. A block device is only read.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PAGE = 4096
_PIECE_BYTES = 1 << 20
_SPEED_BYTES = 256 << 20  # written at most
_SPEED_S = 0.45  # of writing, and again of reading
_SYNCS = 30
_SYNC_S = 0.4


def probe(path: str, is_file: bool, speed: bool, syncs: bool) -> dict[str, Any]:
    """What was found; keys that could not be found out are absent.

    `kind` file, folder, device or absent; `folder` the nearest that is there; `mount` and `system` of the file system;
    `number` of the device (major:minor), `rotational`; `free_bytes`, `total_bytes`, `held_bytes` of it what the file,
    or the folder's files, take; `write`, `direct` "" or the name of an error; `write_bytes_s`, `read_bytes_s`; `sync_s`
    sorted.

    Args:
        is_file: the path is a file or device, else a folder.
    """
    found: dict[str, Any] = {"path": path, "kind": "absent", "write": "", "direct": ""}
    target = Path(path)
    try:
        status: os.stat_result | None = target.stat()
    except FileNotFoundError:
        status = None
    except OSError as error:
        return found | {"write": _name(error), "folder": path}
    if status is not None:
        modes = ((stat.S_ISBLK, "device"), (stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"))
        found["kind"] = next((word for is_so, word in modes if is_so(status.st_mode)), "other")
    if found["kind"] == "device" and status is not None:
        found["number"] = _number(status.st_rdev)
        found["rotational"] = _rotational(status.st_rdev)
        return found | _device(path, speed)
    found["held_bytes"] = _held_bytes(target, is_file)
    folder = target if not is_file else target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found["folder"] = str(folder)
    found["number"] = _number(folder.stat().st_dev)
    found["rotational"] = _rotational(folder.stat().st_dev)
    found |= _mount(folder)
    room = os.statvfs(folder)
    found["free_bytes"], found["total_bytes"] = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    if not folder.is_dir():
        return found | {"write": "ENOTDIR"}
    if found["kind"] == "file" and not os.access(path, os.R_OK | os.W_OK):
        return found | {"write": "EACCES"}
    return found | _folder(str(folder), found["free_bytes"], speed, syncs)


def _held_bytes(target: Path, is_file: bool) -> int:
    """What a file, or the files of a folder, take of the disk."""
    try:
        files = [target] if is_file else list(target.iterdir())
        return sum(file.stat().st_blocks * 512 for file in files if file.is_file())
    except OSError:
        return 0


def _folder(folder: str, free_bytes: int, speed: bool, syncs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        fd = _nameless(folder, 0)
    except OSError as error:
        return {"write": _name(error)}
    try:
        os.pwrite(fd, bytes(_PAGE), 0)
        if syncs:
            found["sync_s"] = _sync_times(fd)
    except OSError as error:
        return {"write": _name(error)}
    finally:
        os.close(fd)
    try:
        fd = _nameless(folder, getattr(os, "O_DIRECT", 0) or _fail())
    except OSError as error:
        found["direct"] = _name(error)
        fd = _nameless(folder, 0)
    try:
        if not found.get("direct"):
            found["direct"] = _try_direct(fd)
        if speed:
            most = min(_SPEED_BYTES, free_bytes // 10 // _PIECE_BYTES * _PIECE_BYTES)
            found |= _speeds(fd, most, bool(found["direct"]))
    finally:
        os.close(fd)
    return found


def _nameless(folder: str, flags: int) -> int:
    """A file that nobody else sees and that ends with its descriptor."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (
            errno.EOPNOTSUPP,
            errno.EISDIR,
            errno.EINVAL,
            errno.ENOENT,
        ):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".kvbm-doctor-", dir=folder)
    try:
        os.close(descriptor)
        return os.open(name, os.O_RDWR | flags)
    finally:
        os.unlink(name)


def _fail() -> int:
    raise OSError(errno.EINVAL, "no O_DIRECT on this system")


def _try_direct(fd: int) -> str:
    with mmap.mmap(-1, _PAGE) as out, mmap.mmap(-1, _PAGE) as back:
        out[:] = os.urandom(_PAGE)
        try:
            os.pwrite(fd, out, 0)
            os.preadv(fd, [back], 0)
        except OSError as error:
            return _name(error)
        return "" if out[:] == back[:] else "other bytes came back"


def _speeds(fd: int, most_bytes: int, buffered: bool) -> dict[str, Any]:
    """Bytes a second of writes and reads of 1 MiB, one at a time."""
    if most_bytes < 4 * _PIECE_BYTES:
        return {}
    with mmap.mmap(-1, _PIECE_BYTES) as piece:
        piece[:] = os.urandom(_PIECE_BYTES)
        try:
            os.posix_fallocate(fd, 0, most_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                return {"write": _name(error)}
        try:
            begin = time.perf_counter()
            written = 0
            while written < most_bytes and time.perf_counter() - begin < _SPEED_S:
                written += os.pwrite(fd, piece, written)
            if buffered:
                os.fsync(fd)
            write_s = time.perf_counter() - begin
            begin = time.perf_counter()
            count = 0
            while count < written and time.perf_counter() - begin < _SPEED_S:
                count += os.preadv(fd, [piece], count) or written
            read_s = time.perf_counter() - begin
        except OSError as error:
            return {"write": _name(error)}
    speeds = {"write_bytes_s": int(written / write_s)}
    return speeds if buffered else speeds | {"read_bytes_s": int(count / read_s)}  # else it would be the cache's


def _sync_times(fd: int) -> list[float]:
    times = []
    until = time.perf_counter() + _SYNC_S
    for number in range(_SYNCS):
        os.pwrite(fd, bytes(_PAGE), (number + 1) * _PAGE)
        begin = time.perf_counter()
        os.fdatasync(fd)
        times.append(time.perf_counter() - begin)
        if time.perf_counter() > until:
            break
    return sorted(times)


def _device(path: str, speed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"system": "block device", "folder": path, "mount": _mounted_at(path)}
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return found | {"write": _name(error)}
    try:
        found["free_bytes"] = found["total_bytes"] = os.lseek(fd, 0, os.SEEK_END)
        if not os.access(path, os.W_OK):
            return found | {"write": "EACCES"}
        with mmap.mmap(-1, _PIECE_BYTES) as piece:
            os.preadv(fd, [piece], 0)
            begin = time.perf_counter()
            count = 0
            while speed and time.perf_counter() - begin < _SPEED_S and count < found["total_bytes"] - _PIECE_BYTES:
                count += os.preadv(fd, [piece], count) or found["total_bytes"]
            if count:
                found["read_bytes_s"] = int(count / (time.perf_counter() - begin))
    except OSError as error:
        found["direct"] = _name(error)
    finally:
        os.close(fd)
    return found


def _mount(folder: Path) -> dict[str, Any]:
    """Mount point and kind of the file system a folder is on: the longest mount point above it, the last
    mounted there.
    """
    place, best, system = os.path.realpath(folder), "", ""
    for fields, kind in _mounts():
        point = fields[4]
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, system = point, kind
    return {"mount": best, "system": system}


def _mounted_at(path: str) -> str:
    number = _number(os.stat(path).st_rdev)
    return next((fields[4] for fields, _ in _mounts() if fields[2] == number), "")


def _mounts() -> list[tuple[list[str], str]]:
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = [field.encode().decode("unicode_escape") for field in before.split()]
        if len(fields) > 4 and after:
            found.append((fields, after.split()[0]))
    return found


def _rotational(device: int) -> bool:
    base = Path("/sys/dev/block") / _number(device)
    for queue in (base / "queue", base.resolve().parent / "queue"):
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


if __name__ == "__main__":
    print(json.dumps(probe(**json.loads(sys.argv[1]))))
