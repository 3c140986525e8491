"""The claims of a batch, brought to what stands at its end: in columns, because a batch may have a million."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.catalog.sql.rows import ClaimRun
from kvbm.catalog.sql.tables import LARGEST_COUNT, stored_words
from kvbm.core.ids import HASH_BYTES, NamespaceId, hash_count

COLUMN = f"S{HASH_BYTES}"  # of hashes


class NetClaims(NamedTuple):
    """What a batch does to the claims of one pool and namespace.

    Attributes:
        withdrawn: hashes, ascending: their claims were taken back at some point.
        claimed: hashes, ascending: they are claimed at the end.
        by: of each of these, who claimed it first since it was last taken back: a row of `names`.
        first_ns, last_ns: when that was, and when it was claimed last.
    """

    pool: str
    namespace: NamespaceId
    names: list[str]
    withdrawn: np.ndarray
    claimed: np.ndarray
    by: np.ndarray
    first_ns: np.ndarray
    last_ns: np.ndarray

    def parts(self, blocks: int) -> Iterator[NetClaims]:
        """What is claimed, so many blocks at a time."""
        for at in range(0, len(self.claimed), blocks):
            yield self.where(slice(at, at + blocks))

    def where(self, rows: slice | np.ndarray) -> NetClaims:
        """Some of what is claimed."""
        return self._replace(
            withdrawn=self.withdrawn[:0],
            claimed=self.claimed[rows],
            by=self.by[rows],
            first_ns=self.first_ns[rows],
            last_ns=self.last_ns[rows],
        )


def net_claims(runs: Sequence[ClaimRun]) -> list[NetClaims]:
    """Runs in the order of the stream → what stands after the last one, by pool and namespace, in order.

    Raises LayoutError: half a hash.
    """
    grouped: dict[tuple[str, NamespaceId], list[ClaimRun]] = {}
    for run in runs:
        hash_count(run.hashes)
        grouped.setdefault((stored_words(run.pool), run.namespace), []).append(run)
    return [_net(pool, namespace, grouped[pool, namespace]) for pool, namespace in sorted(grouped)]


def _net(pool: str, namespace: NamespaceId, runs: Sequence[ClaimRun]) -> NetClaims:
    hashes = np.frombuffer(b"".join(run.hashes for run in runs), dtype=COLUMN)
    run_of = np.repeat(np.arange(len(runs)), [len(run.hashes) // HASH_BYTES for run in runs])
    order = np.argsort(hashes, kind="stable")  # what was said of one block stays in the order of the stream
    hashes, run_of = hashes[order], run_of[order]
    withdrawn = hashes[:0]
    if any(run.withdrawn for run in runs):
        is_withdrawn, row = np.array([run.withdrawn for run in runs])[run_of], np.arange(len(hashes))
        begins = _begins(hashes)
        last_gone = _largest(np.where(is_withdrawn, row, -1), begins)
        withdrawn = hashes[begins[last_gone >= 0]]
        stands = row > np.repeat(last_gone, np.diff(begins, append=len(hashes)))
        hashes, run_of = hashes[stands], run_of[stands]
    begins = _begins(hashes)
    numbers: dict[str, int] = {}
    name_of = np.array([numbers.setdefault(stored_words(run.instance), len(numbers)) for run in runs])
    at_ns = np.array([min(run.at_ns, LARGEST_COUNT) for run in runs], dtype=np.int64)[run_of]
    first = run_of[begins]
    return NetClaims(
        pool,
        namespace,
        list(numbers),
        withdrawn,
        hashes[begins],
        name_of[first],
        at_ns[begins],
        _largest(at_ns, begins),
    )


def _begins(hashes: np.ndarray) -> np.ndarray:
    """Where each hash is for the first time in a sorted column."""
    return np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])


def _largest(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The largest value of each part of a column."""
    return np.maximum.reduceat(values, begins) if len(begins) else values[:0]
