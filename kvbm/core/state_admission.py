"""Which states of recurrent layers are worth a slot. Soft state only; nothing here is an event.

A state is as large as a block of attention and serves one prefix alone: the one that ends at its very boundary. Most
boundaries are never looked for again; those where prompts end, or part from each other, are.

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4.1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvbm.core.ids import SequenceHash

REMEMBERED = 1 << 16  # boundaries whose first sight is remembered


class Boundary(NamedTuple):
    """A boundary between blocks of a prompt, behind which there is a state.

    Attributes:
        is_end: the last one that the prompt itself can be read up to, or one of what was generated behind it.
        is_parting: what is held of the prompt ends here, while no state is held here.
        sights: how often a state was offered here, this time counted.
    """

    is_end: bool
    is_parting: bool
    sights: int


class AdmissionPolicy(Protocol):
    """Says of a state whether it should be stored."""

    def __call__(self, boundary: Boundary, /) -> bool: ...


def every_state(boundary: Boundary) -> bool:
    """All that are offered."""
    return True


def ends_and_partings(boundary: Boundary) -> bool:
    """Where prompts end or part, and where a second prompt has passed."""
    return boundary.is_end or boundary.is_parting or boundary.sights >= 2


def second_sight(boundary: Boundary) -> bool:
    """Where a second prompt has passed."""
    return boundary.sights >= 2


STATE_POLICIES: dict[str, AdmissionPolicy] = {
    "all": every_state,
    "ends": ends_and_partings,
    "second_use": second_sight,
}


class StateAdmission:
    """A policy and what it needs to remember of boundaries.

    Args:
        policy: a key of STATE_POLICIES.
        remembered: boundaries that are remembered; those seen longest ago are forgotten.
    """

    def __init__(self, policy: str, remembered: int = REMEMBERED) -> None:
        self._wants: Callable[[Boundary], bool] = STATE_POLICIES[policy]
        self._remembered = remembered
        self._sights: OrderedDict[SequenceHash, int] = OrderedDict()

    def uses(self, boundary: SequenceHash, is_end: bool, is_parting: bool) -> int:
        """How often the state behind this block was offered, this time counted; 0: it should not be stored.

        Args:
            boundary: hash of the block before it.
        """
        sights = self._sights.pop(boundary, 0) + 1
        self._sights[boundary] = sights
        if len(self._sights) > self._remembered:
            self._sights.popitem(last=False)
        return sights if self._wants(Boundary(is_end, is_parting, sights)) else 0
