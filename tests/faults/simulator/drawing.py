"""When faults come, and which of them together.

Two faults meet when the second begins while the first still works, or what it has left is being mended: that is what
draws of single moments seldom give, and what machines do, since one fault often brings the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from tests.faults.simulator.faults import KINDS, Fault, Happened
from tests.faults.simulator.limit_faults import LIMIT_KINDS
from tests.faults.simulator.peer_faults import PEER_KINDS

AFTERMATH_S = 0.5  # so long is what a fault has left being mended, at least
LONGEST_PARTY = 3
_MOVES = ("zombie", "twin", "lose_disk")  # an instance goes on where its journal is not
FORGETS = ("trim", "hide_messages", "cut_server_power")  # the stream may lose the fence
_LOSES = (
    "cut_server_power",
    "recreate_stream",
    "restore_database",
)  # who remembers an epoch, or a place, may forget it
_WEIGHTS = {
    "kill": 3,
    "kill_in_write": 2,
    "kill_catalog": 2,
    "spoil_index": 2,
    "zombie": 2,
    **dict.fromkeys(PEER_KINDS, 3),
    **dict.fromkeys(LIMIT_KINDS, 3),
}
_GENERIC_WEIGHTS = _WEIGHTS | dict.fromkeys((*_MOVES, *_LOSES), 3)


class Draw(NamedTuple):
    """How the faults of a run are drawn.

    Attributes:
        mix: kinds to draw single faults from; () for any.
        together: kinds that meet, one of each, again and again; () for any two or three, and single ones between.
        begin_s: no single fault of `mix` begins earlier.
    """

    mix: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    begin_s: float = 1.0


def pairs() -> list[tuple[str, ...]]:
    """Every two kinds."""
    return list(combinations(KINDS, 2))


def triples() -> list[tuple[str, ...]]:
    """Every three kinds."""
    return list(combinations(KINDS, 3))


def draw(rng: random.Random, end_s: float, how: Draw) -> list[Fault]:
    """A schedule until a time, in its order."""
    if how.mix:
        faults = _single(rng, how.begin_s, end_s, how.mix)
    elif how.together:
        faults = []
        for _ in range(rng.randint(2, 4)):
            faults += _meeting(rng, rng.uniform(0.4, end_s - 0.2), end_s, how.together)
    else:
        faults = _any(rng, end_s)
    return sorted(faults, key=lambda fault: fault.at_s)


def _single(rng: random.Random, begin_s: float, end_s: float, kinds: Sequence[str]) -> list[Fault]:
    weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
    return [
        Fault(kind, rng.uniform(begin_s, end_s), _lasts_s(rng), rng.getrandbits(32))
        for kind in rng.choices(kinds, weights, k=rng.randint(7, 16))
    ]


def _any(rng: random.Random, end_s: float) -> list[Fault]:
    kinds = list(
        dict.fromkeys(rng.choices(list(KINDS), [_GENERIC_WEIGHTS.get(kind, 1) for kind in KINDS], k=rng.randint(4, 40)))
    )
    weights = [_GENERIC_WEIGHTS.get(kind, 1) for kind in kinds]
    count = rng.randint(7, 16)
    faults: list[Fault] = []
    while len(faults) < count:
        size = min(rng.choice((1, 2, 2, 3)), len(kinds))
        party: list[str] = []
        while len(party) < size:
            (kind,) = rng.choices(kinds, weights)
            if kind not in party:
                party.append(kind)
        faults += _meeting(rng, rng.uniform(0.6, end_s), end_s, party)
    return faults


def _meeting(rng: random.Random, at_s: float, end_s: float, kinds: Sequence[str]) -> list[Fault]:
    """One fault of each kind, in any order, each begun while the last one works or shortly after it; mostly of one
    instance.
    """
    victim = rng.getrandbits(16) if rng.random() < 0.7 else None
    faults: list[Fault] = []
    for kind in rng.sample(list(kinds), len(kinds)):
        for_s = _lasts_s(rng)
        faults.append(Fault(kind, min(at_s, end_s), for_s, rng.getrandbits(32), victim))
        during_s = rng.choice((0.003, min(for_s, 0.5), min(for_s, 1.5))) * rng.random()
        after_s = for_s + rng.uniform(0.0, 0.4 * AFTERMATH_S)
        at_s += after_s if for_s < 1.0 and rng.random() < 0.3 else during_s
    return faults


def _lasts_s(rng: random.Random) -> float:
    return rng.choice((0.1, 0.5, 2.0, 6.0)) * rng.uniform(0.5, 1.5)


def met(happened: Sequence[Happened], kinds: Sequence[str]) -> bool:
    """Whether faults of all these kinds were at work at one moment, or the aftermath of some of them."""
    for moment in happened:
        at_s = moment.begin_s
        here = {fault.kind for fault in happened if fault.begin_s <= at_s <= fault.end_s + AFTERMATH_S}
        if here.issuperset(kinds):
            return True
    return False
