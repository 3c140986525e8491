"""Whether blocks may leave for a colder tier now: they go, wait for room, or are skipped.

Numbers in, a verdict out: no thread, clock or pool here.

HOST is the way to what is colder. Blocks that only pass through it are judged by where they end: they go there as fast
as others leave it again, and not at all while they could not go on. Else they would push out the beginning of their own
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from kvbm.core.ids import DURABLE_TIERS, Tier


class Skipped(StrEnum):
    """Why blocks that a policy wanted in a colder tier were not offloaded.

    Each is offered again when it is next used.
    """

    QUEUE = "queue"  # too many waited: the copies do not keep up with the engine
    JOURNAL = "journal"  # it takes no events, so nobody would know of the blocks
    STAGING = "staging"  # no memory for the copy became free
    BUDGET = "budget"  # the device or store has been written enough for now
    PARTIAL = "partial"  # not every block of the object is known or where it would be taken from
    # So far from its prompt's beginning that the tier, or its tenant's part of it, cannot hold all before it
    BEYOND = "beyond"
    GONE = "gone"  # it had left the tier it was to be taken from when its turn came
    ROOM = "room"  # everything in the tier is pinned or on its way


class Leaving(NamedTuple):
    """Blocks whose turn has come.

    Attributes:
        blocks: how many.
        block_bytes: of one.
        ends_in: the tiers that they leave for: their target, or those behind HOST where they only pass through it.
        passes_host: whether they only pass through HOST, which goes for all of them or for none.
        unit_blocks: what is never cut apart: the blocks of an object, else one.
    """

    blocks: int
    block_bytes: int
    ends_in: tuple[Tier, ...]
    passes_host: bool = False
    unit_blocks: int = 1


class Counts(NamedTuple):
    """What an instance can take now.

    Attributes:
        takes_events: whether its journal does.
        host_room: blocks that HOST could take without giving up one that is to go on.
        host_empties: whether blocks are on their way through HOST, so that waiting makes room.
    """

    takes_events: bool
    host_room: int = 0
    host_empties: bool = False


class Go(NamedTuple):
    """So many of the blocks leave, from the first on; the rest is over budget."""

    blocks: int


class Wait(NamedTuple):
    """They wait until others have left HOST."""


class Skip(NamedTuple):
    """They do not leave now."""

    why: Skipped


Verdict = Go | Wait | Skip


def admit(leaving: Leaving, counts: Counts, budgets: Mapping[Tier, int]) -> Verdict:
    """Decide.

    Args:
        budgets: bytes that may be written now, of tiers whose device has a budget.
    """
    if not counts.takes_events and not DURABLE_TIERS.isdisjoint(leaving.ends_in):
        return Skip(Skipped.JOURNAL)
    unit_bytes = leaving.unit_blocks * leaving.block_bytes
    left = [budgets[tier] // unit_bytes * leaving.unit_blocks for tier in leaving.ends_in if tier in budgets]
    may_blocks = min([leaving.blocks, *left])
    if may_blocks < (leaving.blocks if leaving.passes_host else min(1, leaving.blocks)):
        return Skip(Skipped.BUDGET)
    if leaving.passes_host and counts.host_empties and counts.host_room < leaving.blocks:
        return Wait()
    return Go(may_blocks)
