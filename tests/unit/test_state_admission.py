"""Which states are stored: those behind which prompts end, part, or have passed before."""

from __future__ import annotations

import pytest

from kvbm.core.ids import SequenceHash
from kvbm.core.state_admission import STATE_POLICIES, StateAdmission


def block(number: int) -> SequenceHash:
    return SequenceHash(number.to_bytes(16, "little"))


@pytest.mark.parametrize(
    ("policy", "first", "end", "parting"),
    [("all", True, True, True), ("ends", False, True, True), ("second_use", False, False, False)],
)
def test_a_policy_wants_what_its_name_says(policy: str, first: bool, end: bool, parting: bool) -> None:
    admission = StateAdmission(policy)
    assert [admission.uses(block(1), False, False) for _ in range(3)] == [1 if first else 0, 2, 3]
    assert admission.uses(block(2), True, False) == end
    assert admission.uses(block(3), False, True) == parting


@pytest.mark.parametrize("policy", STATE_POLICIES)
def test_boundaries_seen_longest_ago_are_forgotten(policy: str) -> None:
    admission = StateAdmission(policy, remembered=2)
    for number in (1, 2, 1, 3):
        admission.uses(block(number), False, False)
    assert admission.uses(block(1), False, False) == 3
    assert admission.uses(block(2), False, False) == (policy == "all")
