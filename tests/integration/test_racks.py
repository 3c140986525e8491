"""Two managers in two racks: whether the second reads what the first has computed follows what their link carries."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.bench.rack_link import FAR, link_racks
from tests.extras import needed
from tests.rack_instances import DEPTH, RackReader, Wanted, line_of, started

needed("torch", "engine")

FAST_BITS, SLOW_BITS = 1_000_000_000, 20_000_000  # a prompt of 2 MiB takes 17 ms, and 0.84 s
QUICK, LATE = 5_000.0, 500.0  # tokens a second of the reader's engine: a prompt takes 0.1 s to compute, and 1 s
FORGOTTEN_S = 600.0


@pytest.mark.nightly
def test_whether_blocks_come_from_another_rack_follows_what_the_link_was_seen_to_carry(tmp_path: Path) -> None:
    with ExitStack() as opened:
        if (link := link_racks(FAST_BITS, opened)) is None:
            pytest.skip("two network namespaces take root, ip and tc")
        owner = started("owner", tmp_path, link.far, FAR, opened)
        reader = RackReader(tmp_path, link.near, line_of(owner).decode().strip(), opened)
        assert reader.serve(Wanted(0, QUICK)) == DEPTH
        link.limit(SLOW_BITS)
        assert reader.serve(Wanted(1, QUICK)) == DEPTH, "nobody knows yet that the link is slow"
        assert reader.serve(Wanted(2, QUICK)) == 0, "it is read though computing is quicker"
        assert reader.serve(Wanted(2, LATE)) == DEPTH, "it is computed though reading is quicker"
        assert reader.serve(Wanted(3, QUICK)) == 0
        link.limit(FAST_BITS)
        assert reader.serve(Wanted(3, QUICK)) == 0, "what was measured counts no more at once"
        assert reader.serve(Wanted(3, QUICK, FORGOTTEN_S)) == DEPTH, "the link is never tried again"
        assert reader.serve(Wanted(4, QUICK)) == DEPTH
