"""What the disk under a folder does, measured in the same minutes as what is held to it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from kvbm.bench.fio import FioError, find_fio
from kvbm.doctor.probes.disk import probe

_DEPTH = 32  # as the pool has it
_HUGE_PAGES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"
}  # for fio's memory, where the system gives them to who asks: in small pages a disk is asked for half as much


class Speed(NamedTuple):
    """Bytes a second of reads and of writes."""

    reads: float
    writes: float

    @property
    def both(self) -> float:
        """Of the two together."""
        return self.reads + self.writes


def speed_alone(folder: Path) -> Speed:
    """Of nothing but reads and of nothing but writes, 1 MiB at a time, as `kvbm doctor` finds them. 0 for what it could
    not find out.
    """
    found = probe(str(folder), is_file=False, speed=True, syncs=False)
    return Speed(found.get("read_bytes_s", 0.0), found.get("write_bytes_s", 0.0))


def speed_of_mix(folder: Path, file_bytes: int, block_bytes: int, read_share: float, seconds: float) -> Speed | None:
    """Of reads and writes at once, blocks in random order, many at a time, as fio does them;

    None where there is no fio.

    Args:
        file_bytes: of the file they are in, all of it written before.
        read_share: of the blocks, 0 to 1.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="fio-") as temporary:
        file = Path(temporary) / "mix"
        try:
            fio = find_fio(Path(temporary))
            fio.rate("write", file, file_bytes, block_bytes, _DEPTH)  # a block never written reads as nothing
        except FioError:
            return None
        command = [
            fio.path,
            "--name=mix",
            f"--filename={file}",
            "--rw=randrw",
            f"--rwmixread={round(100 * read_share)}",
            f"--bs={block_bytes}",
            f"--size={file_bytes}",
            f"--iodepth={_DEPTH}",
            f"--ioengine={fio.engine}",
            f"--direct={int(fio.direct)}",
            "--time_based",
            f"--runtime={seconds:g}",
            "--randrepeat=0",
            "--output-format=json",
        ]
        said = subprocess.run(
            command, env=os.environ | _HUGE_PAGES, capture_output=True, text=True, timeout=seconds + 60.0, check=True
        ).stdout
        job = json.loads(said[said.index("{") :])["jobs"][0]
    return Speed(job["read"]["bw_bytes"], job["write"]["bw_bytes"])
