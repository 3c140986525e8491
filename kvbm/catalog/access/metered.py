"""What something that is awaited takes of the loop's time: its own steps, and nothing of what it waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any


class Metered:
    """Something that is awaited, with word of the time that each of its steps takes."""

    def __init__(self, work: Awaitable[None], tell: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._work, self._tell, self._clock = work, tell, clock

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        step: Callable[[Any], Any] = steps.send
        value: Any = None
        while True:
            begin_s = self._clock()
            try:
                waits_for = step(value)
            except StopIteration:
                return
            finally:
                self._tell(self._clock() - begin_s)
            try:
                value, step = (yield waits_for), steps.send
            except BaseException as error:  # noqa: BLE001  # it is for whoever waits within
                value, step = error, steps.throw
