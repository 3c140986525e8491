"""The part of `kvbm bench fetch` with a link between the two: each in a network namespace of its own, and the link no
quicker than told.

It takes root, `ip` and `tc`. Nothing of the machine's own network is changed: the link lies between the two namespaces,
which go afterwards.

    python -m kvbm.bench.racks LENDER FOLDER BLOCKS BLOCK_BYTES SEED READS

is the reader's process: it prints the seconds of each read as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.bench.bare_sockets import BareAddress
from kvbm.bench.fetch_sides import BenchReader, Lender, ProcessPlace, start_lender
from kvbm.bench.lender import LenderPlace
from kvbm.bench.measure import Found, row_of
from kvbm.core.errors import KvbmError
from kvbm.streams.child import python
from kvbm.workload.processes import ProcessError

_MIB = 1 << 20
_RATE_BITS = 1_000_000_000
_READER, _LENDER = "10.231.77.1", "10.231.77.2"
_COMMAND_S, _START_S, _READ_S = 10.0, 60.0, 5.0


class _Tools(NamedTuple):
    ip: str
    tc: str


def bench_racks(folder: Path, opened: ExitStack, blocks: int, samples: int, seed: int) -> Found:
    """Reads over TCP through a link of a limited rate, as a share of it; a note where there can be no such link."""
    name = "tcp_link_share"
    if (tools := _tools()) is None:
        return Found([], {name: None}, (f"{name}: not measured; two network namespaces take root, ip and tc",))
    try:
        reader, lender = _linked(tools, opened)
        inside = [tools.ip, "netns", "exec"]
        lent = start_lender(folder, blocks, _MIB, seed, opened, ProcessPlace(_LENDER, (*inside, lender))).lent
        told = msgspec.json.encode(lent).decode()
        words = [told, str(folder), str(blocks), str(_MIB), str(seed), str(samples + 1)]
        command = [*inside, reader, *python("-m", "kvbm.bench.racks", *words)]
        said = _said(command, _START_S + _READ_S * samples)
    except ProcessError as error:
        return Found([], {name: None}, (f"{name}: not measured; {error}",))
    taken_s = msgspec.json.decode(said, type=list[float])[1:]
    what = f"fetch over TCP through a link of {_RATE_BITS / 1e9:g} Gbit/s, {blocks} blocks of 1 MiB: share of the link"
    row = row_of(what, "", [blocks * _MIB * 8 / _RATE_BITS / one for one in taken_s])
    return Found([row], {name: row.value})


def _tools() -> _Tools | None:
    ip, tc = shutil.which("ip"), shutil.which("tc")
    return _Tools(ip, tc) if ip and tc and os.geteuid() == 0 else None


def _linked(tools: _Tools, opened: ExitStack) -> tuple[str, str]:
    """Two network namespaces with a link between them;

    `opened` removes them. Raises ProcessError: the system makes none.
    """
    ends = [f"kvbm-bench-{os.getpid()}-{side}" for side in ("reader", "lender")]
    for end in ends:
        opened.callback(_removed, tools, end)
        _said([tools.ip, "netns", "add", end])
    _said(
        [tools.ip, "link", "add", "link0", "netns", ends[0], "type", "veth", "peer", "name", "link0", "netns", ends[1]]
    )
    for end, address in zip(ends, (_READER, _LENDER), strict=True):
        _said([tools.ip, "-n", end, "address", "add", f"{address}/30", "dev", "link0"])
        for device in ("lo", "link0"):
            _said([tools.ip, "-n", end, "link", "set", device, "up"])
        limit = ["rate", f"{_RATE_BITS}bit", "burst", "256kb", "latency", "50ms"]
        _said([tools.ip, "netns", "exec", end, sys.executable, "-I", "-S", "-c", ""])
        _said([tools.tc, "-n", end, "qdisc", "add", "dev", "link0", "root", "tbf", *limit])
    return ends[0], ends[1]


def _removed(tools: _Tools, end: str) -> None:
    """Remove a network namespace, where there is one."""
    with suppress(ProcessError):
        _said([tools.ip, "netns", "del", end])


def _said(command: Sequence[str], within_s: float = _COMMAND_S) -> bytes:
    """What a program prints. Raises ProcessError: it failed, or took longer."""
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=within_s).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProcessError(f"{' '.join(command[:4])} … did not run: {error}") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise ProcessError(f"{' '.join(command[:4])} … ended with {error.returncode}: {' / '.join(words)}") from None


def main(lent: str, folder: Path, blocks: int, block_bytes: int, seed: int, reads: int) -> int:
    """See the module."""
    lender = Lender(msgspec.json.decode(lent, type=LenderPlace), BareAddress(0, ""), blocks * block_bytes)
    reader = BenchReader(lender, folder, blocks, block_bytes, seed)
    try:
        print(json.dumps([reader.read_s("tcp") for _ in range(reads)]))
    finally:
        reader.close()
    return 0


if __name__ == "__main__":
    try:
        numbers = [int(one) for one in sys.argv[3:7]]
        raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), *numbers))
    except KvbmError as error:
        raise SystemExit(str(error)) from None
