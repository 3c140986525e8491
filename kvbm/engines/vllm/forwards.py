"""Behind which of the engine's forwards a copy begins: the last one that may touch its blocks, and no later one.

The scheduler's half numbers the steps and knows who had a block last (`LastTouches`); a rank has an event behind the
forwards of each step (`Forwards`). vLLM launches a step's forward before it asks for the step's copies, so a copy
behind all that is queued would stand behind that forward, which has nothing to do with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvbm.core.errors import LayoutError

UNKNOWN = -1  # any step before the plan's own may touch it

Taken = tuple[str, Sequence[Sequence[int]]]  # a request and blocks that it got, by vLLM's group


def taken_blocks(scheduler_output: Any) -> Iterator[Taken]:
    """The blocks that the requests of a step did not have at their last one, from vLLM's SchedulerOutput."""
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids
    others = scheduler_output.scheduled_cached_reqs
    for request_id, groups in zip(others.req_ids, others.new_block_ids, strict=True):
        if groups:
            yield request_id, groups


class Touches(Protocol):
    """What `LastTouches` offers, and its native implementation."""

    @property
    def step(self) -> int: ...
    def plan(self, taken: Iterable[Taken]) -> int: ...
    def leave(self, request: str) -> None: ...
    def of(self, ids: Sequence[int]) -> int: ...


class LastTouches:
    """The last step whose forward may touch each block of HBM. Owner thread only. Assembly has it natively.

    A block that a scheduled request got is held until that request ends or is preempted, and may be touched by any step
    meanwhile. What a request loses otherwise, as behind a window that moves on, counts as its own until then.

    Attributes:
        step: planned last; they count from 1.
    """

    def __init__(self, blocks: int) -> None:
        self.step = 0
        self._steps = [0] * blocks
        self._holders = [0] * blocks
        self._held: dict[str, list[int]] = {}  # request → its blocks, as it got them

    def plan(self, taken: Iterable[Taken]) -> int:
        """Number another step; `taken` are the blocks that its requests did not have at their last step.

        Raises: LayoutError: a block that HBM does not have.
        """
        self.step += 1
        for request, groups in taken:
            for ids in groups:
                self._check(ids)
                self._held.setdefault(request, []).extend(ids)
                for id in ids:
                    self._holders[id] += 1
        return self.step

    def leave(self, request: str) -> None:
        """A request has lost its blocks: the steps planned so far may still touch those that no other has."""
        for id in self._held.pop(request, ()):
            self._holders[id] -= 1
            if not self._holders[id]:
                self._steps[id] = self.step

    def of(self, ids: Sequence[int]) -> int:
        """The last step that may touch any of these blocks;

        UNKNOWN: each that was planned so far may. Raises LayoutError as `plan`.
        """
        self._check(ids)
        return UNKNOWN if any(self._holders[id] for id in ids) else max((self._steps[id] for id in ids), default=0)

    def _check(self, ids: Sequence[int]) -> None:
        for id in ids:
            if not 0 <= id < len(self._steps):
                raise LayoutError(f"block {id} of an HBM of {len(self._steps)} blocks")


class Forwards:
    """Marks of a rank's device, each behind the forwards of all steps before one. Owner thread only.

    Args:
        mark: a mark behind all that the engine has queued so far.
        is_passed: whether the device has passed one.
    """

    def __init__(self, mark: Callable[[], Any], is_passed: Callable[[Any], bool]) -> None:
        self._mark, self._is_passed = mark, is_passed
        self._step = 0
        self._marks: deque[tuple[int, Any]] = deque()  # the first is the newest that was passed, if any was

    def begin(self, step: int) -> None:
        """Before the forward of a step is launched; once a step. 0: a step without a number, after all others."""
        step = step or self._step + 1
        if step == self._step:
            return
        while len(self._marks) > 1 and self._is_passed(self._marks[1][1]):
            self._marks.popleft()
        self._marks.append((step - 1, self._mark()))
        self._step = step

    def behind(self, step: int) -> Any:
        """The mark behind the forward of a step and of all before it; UNKNOWN: of all before the one that has begun."""
        if step == UNKNOWN or step >= self._step:
            return self._marks[-1][1]
        return next(mark for number, mark in self._marks if number >= step)
