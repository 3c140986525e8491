"""Which blocks of a prompt were held at a moment: a question of SQL to an open history, whose memory is bounded by the
number of holders and not of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np

from kvbm.replay.history_tables import TIERS
from kvbm.replay.sql import HistoryDatabase

_ASKED = "asked AS (SELECT unnest(?::VARCHAR[]) AS block, unnest(range({blocks}))::INTEGER AS place)"
_BITS = "bitstring_agg(place, 0, {last})"
_WHO = "instance, stream, life, epoch"
_HELD = f"""
WITH {_ASKED},
tiers AS (
    SELECT instance, stream, tier, {_BITS} AS bits FROM residencies_at(?) JOIN asked USING (block)
    WHERE namespace = ? GROUP BY ALL),
holders AS (SELECT instance, stream, bit_or(bits) AS bits FROM tiers GROUP BY ALL),
best AS (
    SELECT instance, stream, count(*) OVER () AS holders,
        row_number() OVER (ORDER BY depth DESC, bit_count(bits) DESC, instance, stream) AS rank
    FROM (SELECT *, CASE position WHEN 0 THEN {{blocks}} ELSE position - 1 END AS depth
        FROM (SELECT *, bit_position('0'::BIT, bits) AS position FROM holders)))
SELECT instance, stream, tier, bits::VARCHAR, holders FROM best JOIN tiers USING (instance, stream)
    WHERE rank <= ? ORDER BY rank, tier
"""
# The latest word on each block of each pool counts, as in `claimed_objects_at`, which would look at all blocks
_CLAIMED = f"""
WITH {_ASKED},
claimed AS (
    SELECT name, tier, place FROM history JOIN asked USING (block)
    LEFT JOIN (SELECT {_WHO}, tier, name FROM pools) USING ({_WHO}, tier)
    WHERE kind <> 'residency' AND namespace = ? AND began <= ? GROUP BY ALL
    HAVING arg_max(kind, (began, epoch, begin_offset)) = 'claim')
SELECT name, {_BITS}::VARCHAR FROM claimed GROUP BY ALL ORDER BY ALL
"""


class HeldAt(NamedTuple):
    """What one instance held of a prompt: of each tier, hottest first, which blocks, as bool."""

    instance: str
    stream: str
    tiers: dict[str, np.ndarray]


class PromptAt(NamedTuple):
    """Who held which blocks of a prompt.

    Attributes:
        holders: the deepest first. all_holders: how many there were.
        pools: of the cluster, by name, which blocks were claimed; None: whose name no start has told.
    """

    holders: list[HeldAt]
    all_holders: int
    pools: dict[str | None, np.ndarray]


def prompt_at(history: HistoryDatabase, moment: datetime, namespace: str, hashes: Sequence[str], most: int) -> PromptAt:
    """Who held which blocks of a prompt at a moment, in UTC without a zone. Raises SourceError.

    Args:
        hashes: of its full blocks, 32 lower-case digits each; at least one.
        most: name so many holders.
    """
    sizes = {"blocks": len(hashes), "last": len(hashes) - 1}
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    all_holders = 0
    rows = history.ask(_HELD.format(**sizes), [list(hashes), moment, namespace, most]).rows
    for instance, stream, tier, bits, holders in rows:
        all_holders = holders
        found.setdefault((instance, stream), {})[tier] = _bits(bits)
    claimed = history.ask(_CLAIMED.format(**sizes), [list(hashes), namespace, moment]).rows
    return PromptAt(
        holders=[
            HeldAt(instance, stream, {tier: tiers[tier] for tier in TIERS if tier in tiers})
            for (instance, stream), tiers in found.items()
        ],
        all_holders=all_holders,
        pools={pool: _bits(bits) for pool, bits in claimed},
    )


def run_of(bits: np.ndarray) -> int:
    """How many are set from the first on."""
    return len(bits) if bits.all() else int(bits.argmin())


def hottest_of(tiers: dict[str, np.ndarray], depth: int) -> dict[str, int]:
    """Of the first so many blocks, how many each tier holds and none before it."""
    left = np.ones(depth, dtype=bool)
    found = {}
    for tier, bits in tiers.items():
        if count := int((bits[:depth] & left).sum()):
            found[tier] = count
        left &= ~bits[:depth]
    return found


def packed_hex(bits: np.ndarray) -> str:
    """The first is the lowest bit of the first byte, in hex."""
    return np.packbits(bits, bitorder="little").tobytes().hex()


def _bits(text: str) -> np.ndarray:
    """Of a bit string as DuckDB writes it, whose first bit is its first digit."""
    return np.array(np.frombuffer(text.encode(), dtype=np.uint8) == ord("1"))
