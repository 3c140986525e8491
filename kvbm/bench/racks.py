"""The part of `kvbm bench fetch` with a link between the two: each in a network namespace of its own, and the link no
quicker than told.

    python -m kvbm.bench.racks LENDER FOLDER BLOCKS BLOCK_BYTES SEED READS

is the reader's process: it prints the seconds of each read as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvbm.bench.bare_sockets import BareAddress
from kvbm.bench.fetch_sides import BenchReader, Lender, ProcessPlace, start_lender
from kvbm.bench.lender import LenderPlace
from kvbm.bench.measure import Found, row_of
from kvbm.bench.rack_link import FAR, link_racks, said_by
from kvbm.core.errors import KvbmError
from kvbm.streams.child import python
from kvbm.workload.processes import ProcessError

_MIB = 1 << 20
_RATE_BITS = 1_000_000_000
_START_S, _READ_S = 60.0, 5.0


def bench_racks(folder: Path, opened: ExitStack, blocks: int, samples: int, seed: int) -> Found:
    """Reads over TCP through a link of a limited rate, as a share of it; a note where there can be no such link."""
    name = "tcp_link_share"
    try:
        if (link := link_racks(_RATE_BITS, opened)) is None:
            return Found([], {name: None}, (f"{name}: not measured; two network namespaces take root, ip and tc",))
        lent = start_lender(folder, blocks, _MIB, seed, opened, ProcessPlace(FAR, link.far)).lent
        told = msgspec.json.encode(lent).decode()
        words = [told, str(folder), str(blocks), str(_MIB), str(seed), str(samples + 1)]
        said = said_by([*link.near, *python("-m", "kvbm.bench.racks", *words)], _START_S + _READ_S * samples)
    except ProcessError as error:
        return Found([], {name: None}, (f"{name}: not measured; {error}",))
    taken_s = msgspec.json.decode(said, type=list[float])[1:]
    what = f"fetch over TCP through a link of {_RATE_BITS / 1e9:g} Gbit/s, {blocks} blocks of 1 MiB: share of the link"
    row = row_of(what, "", [blocks * _MIB * 8 / _RATE_BITS / one for one in taken_s])
    return Found([row], {name: row.value})


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
