"""A bounded wait for work that has no bound of its own, such as looking up credentials and names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvbm.core.errors import MissingExtraError

Answer = TypeVar("Answer")


class Silent(NamedTuple):
    """Work that ended in an exception, or, with None, has not ended in time."""

    error: Exception | None


def within(wait_s: float, work: Callable[[], Answer]) -> Answer | Silent:
    """What work gives, or why not; what is not done in time goes on behind us.

    Raises MissingExtraError, if work does.
    """
    ended: list[Answer | Silent] = []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as error:  # noqa: BLE001 - judged by whoever waits
            ended.append(Silent(error))

    thread = threading.Thread(target=run, name="kvbm-object-open", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system gives no thread
        return Silent(error)
    thread.join(wait_s)
    answer = ended[0] if ended else Silent(None)
    if isinstance(answer, Silent) and isinstance(answer.error, MissingExtraError):
        raise answer.error
    return answer
