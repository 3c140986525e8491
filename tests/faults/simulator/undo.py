"""What a kind of fault is: it happens to a cluster, with chances of its own, and gives what undoes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None] | None  # None where it is over at once
FaultKind = Callable[[Any, random.Random], Undo]  # of `Faults`


def NOTHING() -> None:
    """What a fault gives that cannot happen now."""
    return
