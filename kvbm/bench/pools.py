"""`kvbm bench pools`: the pools of this machine beside what its device and its memory can do, each ratio from one run
in turn.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvbm.bench.coding import CodingOptions, bench_coding, steps_of
from kvbm.bench.fio import Fio, FioError, find_fio
from kvbm.bench.hbm import HbmOptions, bench_hbm
from kvbm.bench.host import Memory
from kvbm.bench.measure import Found, Row, percentile, row_of
from kvbm.bench.metadata import bench_metadata
from kvbm.bench.nvme import CALLERS, Latencies, Slots, rates_beside_fio
from kvbm.bench.objects import ObjectsOptions, bench_objects
from kvbm.bench.objects import steps_of as objects_steps
from kvbm.bench.salvage import scan_rates
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.progress import bars_are_shown

_MIB = 1 << 20
_BLOCKS_BYTES = (_MIB, 4 * _MIB)
_SPARE_BYTES = 256 << 20  # for journal and file system
_HOST_BYTES = 512 << 20
_READS = 1000
_GOALS = {
    "nvme_read_over_fio": "≥ 0.90",
    "nvme_write_over_fio": "≥ 0.90",
    "checksum_cost": "≤ 0.10",
    "nvme_encryption_cost": "≤ 0.15",
    "host_copy_over_memcpy": "≥ 0.85",
    "hbm_over_memcpy": "≥ 0.90",
    "metadata_blocks_per_s": "≥ 1 M",
    "nvme_read_p99_over_p50_loaded": "≤ 3",
    "nvme_scan_over_fio": "≥ 0.80",
}


class PoolsOptions(NamedTuple):
    """Where and how much.

    Attributes:
        folder: on the device that is measured; made if need be. None: `tmp` in the data folder.
        file_bytes: of the pool's file, which fio works on too.
        depth: blocks in flight, ours and fio's.
        objects: where the object store is; None: it is left out.
    """

    folder: Path | None = None
    file_bytes: int = 2 << 30
    depth: int = 32
    objects: ObjectsOptions | None = None


def bench_pools(options: PoolsOptions, pairs: int, seed: int) -> Found:
    """Everything, with a bar on the terminal. Raises ConfigError: no room there."""
    with scratch_folder(options.folder, options.file_bytes + _SPARE_BYTES) as folder, _bar() as part:
        run = _Run(options, pairs, seed, folder, part)
        run.nvme()
        run.host()
        run.hbm()
        run.metadata()
        run.coding()
        run.objects()
        return Found(run.rows, run.numbers, tuple(run.notes))


class _Run:
    """One run and what it has found.

    Args:
        part: told the name of a part and its steps, gives what to call after each.
    """

    def __init__(
        self,
        options: PoolsOptions,
        pairs: int,
        seed: int,
        folder: Path,
        part: Callable[[str, int], Callable[[], object]],
    ) -> None:
        self.rows: list[Row] = []
        self.numbers: dict[str, float | None] = {}
        self.notes: list[str] = []
        self._options, self._pairs, self._seed, self._folder, self._part = options, pairs, seed, folder, part

    def nvme(self) -> None:
        """Reads and writes beside fio, checksums on and off, then single reads under load."""
        fio: Fio | None = None
        try:
            fio = find_fio(self._folder)
            self.notes.append(f"limit of NVME: {fio.words()}, on {_device(self._folder)}")
        except FioError as error:
            self.notes.append(f"{error}; the ratios over fio are left out")
        reads: list[float] = []
        writes: list[float] = []
        costs: list[float] = []
        for block_bytes in _BLOCKS_BYTES:
            read, write, cost = self._nvme_of(block_bytes, fio)
            reads += read
            writes += write
            costs.append(cost)
        self.numbers["nvme_read_over_fio"] = min(reads, default=None)
        self.numbers["nvme_write_over_fio"] = min(writes, default=None)
        self.numbers["checksum_cost"] = max(costs)
        self._salvage(fio)

    def _salvage(self, fio: Fio | None) -> None:
        """What a start without its journal reads of slots' headers, beside fio."""
        step = self._part("NVME, slots scanned", self._pairs * (2 if fio else 1))
        folder, depth = self._folder / "salvage", self._options.depth
        try:
            found = scan_rates(folder, self._options.file_bytes, depth, fio, self._pairs, step)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for what, rates in (
            ("blocks brought back by a scan of slots", found.ours),
            ("fio, pages at the same places", found.fio),
        ):
            if rates:
                self.rows.append(row_of(f"NVME, {found.slots:,} slots: {what}", "k/s", [rate / 1e3 for rate in rates]))
        ratio = self._ratios("NVME scan over fio", found.ours, found.fio, "nvme_scan_over_fio")
        self.numbers["nvme_scan_over_fio"] = min(ratio, default=None)

    def _nvme_of(self, block_bytes: int, fio: Fio | None) -> tuple[list[float], list[float], float]:
        """The medians of one block size: reads and writes over fio, if it is there, and what verifying costs."""
        mib, depth = block_bytes // _MIB, self._options.depth
        steps = self._pairs * (6 if fio else 4)
        step = self._part(f"NVME, {mib} MiB blocks", steps)
        pool_file = self._folder / "nvme.pool"
        slots = Slots(pool_file, self._options.file_bytes, block_bytes, depth)
        try:
            how = f"{mib} MiB blocks"
            rates = rates_beside_fio(slots, fio, depth, self._pairs, step)
            self.notes.append(
                f"NVME, {mib} MiB: {slots.words()}, depth {depth}; {slots.count:,} slots, {CALLERS} threads with runs "
                f"of {slots.run_blocks} in"
                f" random order, memory of a HOST pool in pages of {slots.pages()}; fio has the same file and the same "
                "memory"
            )
            self._rates(f"NVME, {how}: verified reads", rates.reads)
            self._rates(f"NVME, {how}: fio reads", rates.fio_reads)
            self._rates(f"NVME, {how}: writes, checksums brought along", rates.writes)
            self._rates(f"NVME, {how}: writes that compute checksums", rates.computed)
            self._rates(f"NVME, {how}: fio writes", rates.fio_writes)
            for kind, rate in zip(("reads", "writes"), rates.fio_alone, strict=False):
                what = f"NVME, {how}: fio {kind} with memory of its own, once"
                self.rows.append(Row(what=what, unit="MB/s", value=rate / 1e6))
            read = self._ratios(f"NVME reads over fio, {how}", rates.reads, rates.fio_reads, "nvme_read_over_fio")
            write = self._ratios(f"NVME writes over fio, {how}", rates.writes, rates.fio_writes, "nvme_write_over_fio")
            if rates.fio_writes:
                pairs = zip(rates.computed, rates.fio_writes, strict=True)
                what = f"NVME writes that compute checksums over fio, {how}"
                self.rows.append(row_of(what, "", [one / other for one, other in pairs]))
            costs = [1 - on / off for on, off in zip(rates.reads, rates.unverified, strict=True)]
            low, cost, high = statistics.quantiles(costs, n=4)
            self.rows.append(
                Row(
                    what=f"checksum cost, share of reads that check nothing, {how}",
                    unit="",
                    value=cost,
                    noise=(high - low) / 2,
                    goal=_GOALS["checksum_cost"],
                )
            )
            self._encryption(slots, how)
            if block_bytes == _MIB:
                self._latencies(slots)
        finally:
            slots.close()
            pool_file.unlink(missing_ok=True)
        return read, write, cost

    def _encryption(self, slots: Slots, how: str) -> None:
        """What encrypted blocks take longer than plain ones."""
        name = "nvme_encryption_cost"
        step = self._part(f"NVME, {how}, encrypted", 2 * (self._pairs + 1))
        try:
            found = slots.encryption(self._pairs, step)
        except MissingExtraError as error:
            self.notes.append(f"encrypted NVME was left out: {error}")
            return
        for kind, plain, encrypted in (
            ("reads", found.plain_reads, found.encrypted_reads),
            ("writes", found.plain_writes, found.encrypted_writes),
        ):
            costs = [longer / base - 1 for longer, base in zip(encrypted, plain, strict=True)]
            row = row_of(f"NVME, {how}: time that encrypted {kind} take more", "", costs)
            if kind == "reads":
                row.goal = _GOALS[name]
                self.numbers[name] = max(row.value, self.numbers.get(name) or row.value)
            self.rows.append(row)

    def _latencies(self, slots: Slots) -> None:
        reads = min(_READS, 10 * slots.count)
        self._part("NVME, reads of one block", 1)
        times: Latencies = slots.latencies(reads)
        for name, values in (("alone", times.alone), ("beside offloads", times.loaded)):
            for share in (0.5, 0.99):
                what = f"NVME, verified read of one 1 MiB block {name}: p{share * 100:.0f} of {reads:,}"
                self.rows.append(Row(what=what, unit="ms", value=percentile(values, share) * 1e3))
        self.rows.append(Row(what="NVME, offloads meanwhile", unit="MB/s", value=times.written_bytes_s / 1e6))
        name = "nvme_read_p99_over_p50_loaded"
        value = percentile(times.loaded, 0.99) / percentile(times.loaded, 0.5)
        self.numbers[name] = value
        self.rows.append(Row(what="the same beside offloads, p99 over p50", unit="", value=value, goal=_GOALS[name]))

    def host(self) -> None:
        """Copies into and out of a HOST pool beside memcpy."""
        total = min(_HOST_BYTES, self._options.file_bytes)
        step = self._part("HOST", self._pairs + 1)
        memory = Memory(total, _MIB)
        try:
            copies = memory.measure(self._pairs, step)
        finally:
            memory.close()
        self.notes.append(
            f"HOST: {total // _MIB} MiB in 1 MiB blocks, {memory.threads} threads; the limit is memcpy between the "
            "same two memories by as"
            f" many threads: {copies.ways}"
        )
        for what, values in (
            ("writes", copies.writes),
            ("memcpy into it", copies.memcpy_in),
            ("reads", copies.reads),
            ("memcpy out of it", copies.memcpy_out),
            ("writes that compute checksums", copies.sealed),
        ):
            self._rates(f"HOST: {what}", values)
        name = "host_copy_over_memcpy"
        into = self._ratios("HOST writes over memcpy", copies.writes, copies.memcpy_in, name)
        out = self._ratios("HOST reads over memcpy", copies.reads, copies.memcpy_out, name)
        sealed = [ours / limit for ours, limit in zip(copies.sealed, copies.memcpy_in, strict=True)]
        self.rows.append(row_of("HOST writes that compute checksums, over memcpy", "", sealed))
        self.numbers[name] = min(into + out)

    def hbm(self) -> None:
        """Between an engine's tensors and a HOST pool: on CUDA where it is, else CPU tensors."""
        self._part("HBM", 1)
        options = HbmOptions()
        if self._options.file_bytes < _HOST_BYTES:  # a small run has small tensors
            options = options._replace(layers=4, slots=32)
        try:
            rows, numbers = bench_hbm(self._pairs, self._seed, options)
        except MissingExtraError as error:
            self.notes.append(f"HBM was left out: {error}")
            return
        for row in rows:
            if row.what.endswith(" over memcpy"):
                row.goal = _GOALS["hbm_over_memcpy"]
        self.rows += rows
        self.numbers |= numbers

    def metadata(self) -> None:
        """Blocks a second through the manager."""
        self._part("metadata", 1)
        row = bench_metadata(self._folder / "manager", self._pairs, self._seed)
        row.goal = _GOALS["metadata_blocks_per_s"]
        self.rows.append(row)
        self.numbers["metadata_blocks_per_s"] = row.value * 1e6

    def coding(self) -> None:
        """Lossless coding of KV: how much smaller, how fast a core."""
        options = CodingOptions()
        if self._options.file_bytes < _HOST_BYTES:  # a small run codes little
            options = CodingOptions(layers=4, blocks=2, steps=2)
        step = self._part("coding", steps_of(options))
        found = bench_coding(self._pairs, self._seed, options, step)
        self.rows += found.rows
        self.numbers |= found.numbers
        self.notes += found.notes

    def objects(self) -> None:
        """Puts and gets of the object pool beside the bare client."""
        if self._options.objects is None:
            self.notes.append("OBJECT: no store was named (--s3 s3://bucket/prefix), so its rows are left out")
            return
        step = self._part("OBJECT", objects_steps(self._pairs))
        found = bench_objects(self._options.objects, self._pairs, self._seed, step)
        self.rows += found.rows
        self.numbers |= found.numbers
        self.notes += found.notes

    def _rates(self, what: str, values: Sequence[float]) -> None:
        if values:
            self.rows.append(row_of(what, "MB/s", [value / 1e6 for value in values]))

    def _ratios(self, what: str, ours: Sequence[float], limit: Sequence[float], goal: str) -> list[float]:
        """A row of pairwise ratios. Returns its median, or nothing where there is no limit."""
        if not limit:
            return []
        ratios = [one / other for one, other in zip(ours, limit, strict=True)]
        row = row_of(what, "", ratios)
        row.goal = _GOALS[goal]
        self.rows.append(row)
        return [row.value]


@contextmanager
def scratch_folder(parent: Path | None, wanted_bytes: int) -> Iterator[Path]:
    """A new folder with so much room, gone with all its files afterwards, also when the run is interrupted or told to
    end.

    Args:
        parent: the folder it is made in, made if need be; None: `tmp` in the data folder.
    Raises: ConfigError: it cannot be made, or lacks the room.
    """
    if parent is None:
        parent = Path(load_settings(environment=os.environ).instance.data_dir) / "tmp"
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    with ExitStack() as opened:
        opened.callback(_remove_empty, made)
        opened.enter_context(_ended_by_sigterm())
        try:
            parent.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(parent).free
            if free_bytes < wanted_bytes:
                raise ConfigError(
                    f"--dir {parent}: {wanted_bytes} bytes wanted, {free_bytes} bytes free; free the disk, give "
                    "another --dir or"
                    " a smaller --file-mib"
                )
            name = opened.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"--dir {parent} cannot be used ({error.strerror}); give a folder on the device"
            ) from None
        yield Path(name)


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that files go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _bar() -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """A bar on the terminal for each part; nothing where standard error is none."""
    columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not bars_are_shown()) as progress:

        def part(name: str, steps: int) -> Callable[[], object]:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        yield part


def _device(folder: Path) -> str:
    """What a folder lies on, in words."""
    found = ("", "unknown file system", "unknown device")
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            device, place, kind = line.split()[:3]
            if str(folder.resolve()).startswith(place) and len(place) > len(found[0]):
                found = (place, kind, device)
    return f"{found[1]} of {found[2]}"
