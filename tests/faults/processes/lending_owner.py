"""Lends some blocks from a native server until it is killed: lending_owner.py UNIX TCP FOLDER.

Says its TCP address once it lends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvbm.transport.lending import LentLimits
from tests.lenders import blocks_of, hashes_of
from tests.native_owner import NativeLender

BLOCKS, BLOCK = 40, 200_000


def main(unix: str, tcp: str, folder: str) -> None:
    lender = NativeLender(BLOCKS, BLOCK, Path(folder), nvme=False)
    lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
    print(lender.listen(unix, tcp, LentLimits()).tcp, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
