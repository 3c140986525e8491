"""Which forward a copy has to wait for, and which mark stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbm.assembly import last_touches
from kvbm.core.errors import LayoutError
from kvbm.engines.vllm.forwards import UNKNOWN, Forwards, LastTouches, Touches, taken_blocks

Kind = Callable[[int], Touches]


@pytest.fixture(params=[LastTouches, last_touches], ids=["readable", "native"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return cast(Kind, request.param)


def test_a_block_that_no_request_has_had_waits_for_nothing(kind: Kind) -> None:
    touches = kind(8)
    assert [touches.plan([]), touches.plan([])] == [1, 2]
    assert touches.of([3, 4]) == 0
    assert touches.of([]) == 0


def test_a_block_waits_for_the_last_step_that_was_planned_when_its_request_ended(kind: Kind) -> None:
    touches = kind(8)
    touches.plan([("a", ([3], [4])), ("b", [(5,)])])
    touches.plan([])
    assert touches.of([3]) == UNKNOWN  # it is still somebody's
    touches.leave("a")
    touches.plan([])
    touches.leave("b")
    assert touches.of([3, 4]) == 2
    assert touches.of([3, 5]) == 3
    assert touches.of((3, 7)) == 2
    assert touches.step == 3


def test_a_block_that_others_have_too_stays_unknown_until_its_last_request_ends(kind: Kind) -> None:
    touches = kind(8)
    touches.plan([("a", [[3, 4]]), ("b", [[3, 6]])])
    touches.plan([("a", [[0, 0, 5]])])
    touches.leave("a")
    assert touches.of([4, 0, 5]) == 2
    assert touches.of([3]) == UNKNOWN
    touches.plan([])
    touches.leave("b")
    touches.leave("b")  # preempted, then ended
    assert touches.of([3]) == 3


def test_a_request_that_had_no_step_leaves_its_blocks_to_those_that_run(kind: Kind) -> None:
    touches = kind(8)
    touches.plan([("a", [[3]])])
    touches.leave("another")  # with a block of a's, found in HBM
    assert touches.of([3]) == UNKNOWN


@pytest.mark.parametrize("block", [8, -1, 1 << 40, "3", None])
def test_a_block_that_hbm_does_not_have_is_refused(block: Any) -> None:
    touches = last_touches(8)
    with pytest.raises(LayoutError):
        touches.plan([("a", [[block]])])
    with pytest.raises(LayoutError):
        touches.of([block])
    with pytest.raises(LayoutError, match="give a list"):
        touches.of(cast(Any, {3}))


def test_the_blocks_of_a_step_are_those_of_new_requests_and_what_the_others_got() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([1, 2], [3]))],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b", "c"], new_block_ids=[None, ([4], [])]),
    )
    assert list(taken_blocks(output)) == [("a", ([1, 2], [3])), ("c", ([4], []))]


class Device:
    """Marks are numbers; the device has passed those up to one."""

    def __init__(self) -> None:
        self.made = 0
        self.passed = 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def is_passed(self, mark: int) -> bool:
        return mark <= self.passed


def test_a_mark_stands_behind_the_forwards_before_the_step_that_begins() -> None:
    device = Device()
    forwards = Forwards(device.mark, device.is_passed)
    for step in (1, 2, 3, 4):
        forwards.begin(step)  # the mark of the same number: behind all steps before
    forwards.begin(4)
    assert device.made == 4
    assert forwards.behind(UNKNOWN) == 4
    assert [forwards.behind(step) for step in (0, 1, 2, 3)] == [1, 2, 3, 4]
    assert [forwards.behind(step) for step in (4, 9)] == [4, 4]  # a step's own forward is not waited for


def test_what_is_long_over_is_not_waited_for_and_not_kept() -> None:
    device = Device()
    forwards = Forwards(device.mark, device.is_passed)
    for step in range(1, 51):
        forwards.begin(step)
        device.passed = step - 2
    assert len(forwards._marks) <= 4
    assert device.is_passed(forwards.behind(7))
    assert device.is_passed(forwards.behind(46))
    assert not device.is_passed(forwards.behind(48))


def test_steps_without_numbers_follow_each_other() -> None:
    device = Device()
    forwards = Forwards(device.mark, device.is_passed)
    forwards.begin(0)
    forwards.begin(0)
    assert forwards.behind(UNKNOWN) == 2


def test_a_step_that_a_rank_did_not_see_is_covered_by_the_next_one() -> None:
    device = Device()
    forwards = Forwards(device.mark, device.is_passed)
    forwards.begin(1)
    forwards.begin(5)
    assert [forwards.behind(step) for step in (0, 1, 3, 4)] == [1, 2, 2, 2]
