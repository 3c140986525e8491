"""Which blocks a scan brings back: the rule as it reads, block by block, against what is done for whole columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.manager.recovery.salvage import SlotHeaders, namespace_runs

NOBODY = bytes(HASH_BYTES)
names = st.sampled_from([NOBODY, *(bytes([n]) * 15 + bytes([last]) for n in (1, 2) for last in (0, 9))])
headers = st.lists(st.tuples(st.booleans(), names, names), max_size=24)
refused = st.sets(st.tuples(names, names), max_size=6)


def plainly(
    found: list[tuple[bool, bytes, bytes]], refused: set[tuple[bytes, bytes]]
) -> dict[bytes, list[tuple[int, bytes]]]:
    """A block comes back that is usable, somebody's, not refused, and has come back in no slot before."""
    runs: dict[bytes, list[tuple[int, bytes]]] = {}
    seen: set[bytes] = set()
    for place, (usable, owner, block) in enumerate(found):
        if usable and owner != NOBODY and (owner, block) not in refused and block not in seen:
            seen.add(block)
            runs.setdefault(owner, []).append((place, block))
    return runs


@given(headers, refused)
def test_whole_columns_bring_back_what_the_rule_says(
    found: list[tuple[bool, bytes, bytes]], refused: set[tuple[bytes, bytes]]
) -> None:
    def keeps(namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        blocks = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return np.array([(namespace, block) not in refused for block in blocks], dtype=bool)

    judged = SlotHeaders(
        np.array([usable for usable, _, _ in found], dtype=bool),
        b"".join(owner for _, owner, _ in found),
        b"".join(block for _, _, block in found),
        np.zeros(len(found), dtype=np.uint32),
    )
    runs = namespace_runs(judged, keeps)
    assert {run.namespace: (run.places.tolist(), run.hashes) for run in runs} == {
        owner: ([place for place, _ in blocks], b"".join(block for _, block in blocks))
        for owner, blocks in plainly(found, refused).items()
    }
    assert len(runs) == len({run.namespace for run in runs})
