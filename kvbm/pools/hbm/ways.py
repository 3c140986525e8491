"""Which way a run goes, by the size of a block's segments: a kernel where they are small, copy engines where they are
large.

Where the two meet depends on the GPU and its bus, so it is measured there once and kept in a file. Without a
measurement the defaults hold, which are a guess: they have been measured on no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.files import make_folder, read_small, replace_file
from kvbm.safe_log import SafeLog

log = SafeLog()

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes of a segment that are measured
NEVER = 1 << 62
_ENGINES_GAIN = 1.0  # at equal speed copy engines: they leave the GPU's cores to the engine


class Ways(NamedTuple):
    """From how many bytes of a segment on copy engines copy a run.

    Attributes:
        gather_bytes, scatter_bytes: for runs from the device, and to it.
        of: the GPU it was measured on; "" for the defaults.
    """

    gather_bytes: int
    scatter_bytes: int
    of: str = ""

    def engines_gather(self, segment_bytes: float) -> bool:
        """Whether copy engines read blocks of such segments."""
        return segment_bytes >= self.gather_bytes

    def engines_scatter(self, segment_bytes: float) -> bool:
        """Whether copy engines write blocks of such segments."""
        return segment_bytes >= self.scatter_bytes


UNMEASURED = Ways(64 << 10, 64 << 10)

Rate = Callable[
    [str, bool, int], float
]  # way ("kernel" or "batch"), whether it gathers, bytes of a segment → bytes a second


def measure_ways(gpu: str, rate: Rate, sizes: Sequence[int] = SIZES) -> Ways:
    """The ways of a GPU, from measured rates.

    Args:
        gpu: its name.
    """

    def begins(gathers: bool) -> int:
        """The smallest size from which on copy engines are at least as quick at every size."""
        best = NEVER
        for size in sorted(sizes, reverse=True):
            if rate("batch", gathers, size) < _ENGINES_GAIN * rate("kernel", gathers, size):
                break
            best = size
        return best

    return Ways(begins(True), begins(False), gpu)


def known_ways(gpu: str, measure: Callable[[], Ways] | None = None, file: Path | None = None) -> Ways:
    """What was measured on such a GPU before; else what is measured now, which is kept; else the defaults.

    Args:
        gpu: its name, with what else a measurement depends on.
        measure: None: nothing is measured now.
        file: where measurements are kept.
    """
    file = file or ways_file()
    kept = _read(file)
    if gpu in kept:
        return kept[gpu]
    if measure is None:
        return UNMEASURED
    try:
        ways = measure()
    except Exception as error:  # noqa: BLE001  whatever a device's library raises; copies work without
        log.warning("hbm.unmeasured", gpu=gpu, why=str(error), gather_bytes=UNMEASURED.gather_bytes)
        return UNMEASURED
    log.info("hbm.measured", gpu=gpu, gather_bytes=ways.gather_bytes, scatter_bytes=ways.scatter_bytes)
    try:
        make_folder(file.parent)
        replace_file(file, msgspec.json.encode({**kept, gpu: ways}))
    except OSError as error:
        log.warning("hbm.not_kept", file=str(file), why=str(error), notice="it is measured again at the next start")
    return ways


def ways_file() -> Path:
    """Where measurements are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbm" / "hbm_ways.json"


def _read(file: Path) -> dict[str, Ways]:
    try:
        return msgspec.json.decode(read_small(file), type=dict[str, Ways])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return {}
