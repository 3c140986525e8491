"""The device's limit as fio finds it: the same file, block size, depth and memory, past the page cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kvbm.core.errors import KvbmError

_ENGINES = ("io_uring", "libaio", "psync")  # the first the kernel lets us use
_VERSION_S = 10.0
_PAGE_BYTES = 4096
_LEAST_BYTES_S = 20 << 20  # a device that is slower is not waited for


class FioError(KvbmError):
    """fio is not there or did not measure; the message says why and what to do."""


class Fio(NamedTuple):
    """An fio that works in a folder.

    Attributes:
        engine: its I/O engine.
        direct: whether it goes past the page cache.
        memory: a file of shared memory that its buffers lie in, as many bytes as are in flight. "": memory of its own.
    """

    path: str
    version: str
    engine: str
    direct: bool
    memory: str = ""

    def words(self) -> str:
        """How it is called, for a report."""
        return f"{self.version}, --ioengine={self.engine} --direct={int(self.direct)}"

    def rate(
        self,
        kind: Literal["read", "write"],
        file: Path,
        file_bytes: int,
        block_bytes: int,
        depth: int,
        first: int = 0,
        blocks: int | None = None,
    ) -> float:
        """Bytes a second of reading or writing blocks of a file in random order, none of them twice. Raises FioError.

        Args:
            file_bytes: the stretch of the file that blocks are drawn from.
            first: the byte it begins at.
            blocks: how many; None: every one.
        """
        blocks = file_bytes // block_bytes if blocks is None else blocks
        job = self._job(kind, file, f"rand{kind}", block_bytes, depth, first, file_bytes, blocks)
        return float((job.read if kind == "read" else job.write).bw_bytes)

    def pages(self, file: Path, stride: int, count: int, depth: int) -> float:
        """Pages a second of reading the first page of every stretch of a file, behind the file's own first page.

        Raises FioError.

        Args:
            stride: bytes of a stretch.
        """
        skipping = f"read:{stride - _PAGE_BYTES}"
        job = self._job("read", file, skipping, _PAGE_BYTES, depth, _PAGE_BYTES, count * stride, count)
        return float(job.read.bw_bytes) / _PAGE_BYTES

    def _job(
        self,
        kind: Literal["read", "write"],
        file: Path,
        how: str,
        block_bytes: int,
        depth: int,
        first: int,
        size: int,
        blocks: int,
    ) -> _Job:
        command = [
            self.path,
            "--name=limit",
            f"--filename={file}",
            f"--rw={how}",
            f"--bs={block_bytes}",
            f"--offset={first}",
            f"--size={size}",
            f"--io_size={blocks * block_bytes}",
            f"--iodepth={depth}",
            f"--ioengine={self.engine}",
            f"--direct={int(self.direct)}",
            "--randrepeat=0",
            "--fallocate=none",
            "--overwrite=0",
            "--output-format=json",
            *([f"--iomem=mmapshared:{self.memory}"] if self.memory else []),
        ]
        job = _run(command, 30.0 + blocks * block_bytes / _LEAST_BYTES_S)
        side = job.read if kind == "read" else job.write
        if side.total_ios != blocks or not side.bw_bytes:
            raise FioError(f"fio did {side.total_ios} of {blocks} {kind}s on {file}")
        return job


class _Side(msgspec.Struct):
    bw_bytes: int
    total_ios: int


class _Job(msgspec.Struct):
    read: _Side
    write: _Side
    error: int = 0


class _Said(msgspec.Struct):
    jobs: list[_Job]


def find_fio(folder: Path) -> Fio:
    """The fio of this machine, with the best engine and O_DIRECT where this folder's file system has it.

    Raises FioError.
    """
    path = shutil.which("fio")
    if path is None:
        raise FioError("fio is not installed, so nothing says what the device can do: `apt-get install fio`")
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise FioError(f"fio at {path} does not run ({error}): `apt-get install --reinstall fio`") from None
    probe, why = folder / "fio-probe", ""
    try:
        for direct in (True, False):
            for engine in _ENGINES:
                fio = Fio(path, said.stdout.strip(), engine, direct)
                try:
                    fio.rate("write", probe, 1 << 20, 1 << 20, 1)
                except FioError as error:
                    why = why or str(error)
                else:
                    return fio
    finally:
        probe.unlink(missing_ok=True)
    raise FioError(why)


def _run(command: list[str], timeout_s: float) -> _Job:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise FioError(f"fio was not done after {timeout_s:.0f} s: the device is too slow, or busy") from None
    except OSError as error:
        raise FioError(f"fio does not run ({error.strerror})") from None
    try:
        job = msgspec.json.decode(done.stdout[done.stdout.index("{") :], type=_Said).jobs[0]
    except (ValueError, IndexError):
        raise FioError(f"fio failed: {_last_words(done.stderr or done.stdout)}") from None
    if done.returncode or job.error:
        raise FioError(f"fio failed with {job.error or done.returncode}: {_last_words(done.stderr)}")
    return job


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
