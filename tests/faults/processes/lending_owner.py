"""Lends some blocks until it is killed: lending_owner.py WAY UNIX TCP FOLDER.

WAY is one of `tests.peer_ways.WAYS`. FOLDER holds the certificate, where the way needs one. Says its TCP address once
it lends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvbm.transport.lending import LentLimits
from tests.lenders import blocks_of, hashes_of
from tests.native_owner import NativeLender
from tests.nixl_site import NixlSite
from tests.peer_ways import NIXL, TLS, new_nixl_process, tls_in

BLOCKS, BLOCK = 40, 200_000


def main(way: str, unix: str, tcp: str, folder: str) -> None:
    lender = NativeLender(BLOCKS, BLOCK, Path(folder), nvme=False)
    lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
    if way == NIXL:
        processes = new_nixl_process(), new_nixl_process()
        print(NixlSite(lender, LentLimits(), Path(unix).parent, processes, tcp=tcp).tcp, flush=True)
    else:
        tls = tls_in(Path(folder)) if way == TLS else None
        print(lender.listen(unix, tcp, LentLimits(), tls=tls).tcp, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
