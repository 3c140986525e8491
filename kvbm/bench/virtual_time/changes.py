"""What changes in the middle of a run: an instance that becomes slower or quicker, one whose HBM shrinks, one that is
drained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvbm.core.errors import ConfigError

EXAMPLE = "60:1:speed=0.25, 60:1:slots=0.5 or 60:1:drain"


class What(Enum):
    """What becomes of an instance."""

    SPEED = "speed"
    SLOTS = "slots"
    DRAIN = "drain"


class ModelChange(NamedTuple):
    """One change.

    Attributes:
        at_s: virtual time.
        instance: its number, from 0.
        share: of what the instance began with, which it has from then on; of a drained one nothing.
    """

    at_s: float
    instance: int
    what: What
    share: float = 0.0


def parse_changes(text: str) -> tuple[ModelChange, ...]:
    """`--change`: TIME:INSTANCE:WHAT, with commas between. Raises ConfigError: it makes no sense."""
    return tuple(_parse(one) for one in text.split(","))


def check_changes(changes: Sequence[ModelChange], instances: int) -> None:
    """Raises ConfigError: a change is of an instance that there is not, or leaves nobody to route to."""
    for change in changes:
        if change.instance >= instances:
            raise ConfigError(f"--change: there is no instance {change.instance}; they are 0 to {instances - 1}")
    if len({change.instance for change in changes if change.what is What.DRAIN}) == instances:
        raise ConfigError("--change drains all instances; leave one")


def _parse(text: str) -> ModelChange:
    at, _, rest = text.partition(":")
    number, _, word = rest.partition(":")
    name, equals, value = word.partition("=")
    try:
        what = What(name)
        share = float(value) if equals else 0.0
        change = ModelChange(float(at), int(number), what, share)
    except ValueError:
        raise ConfigError(f"--change {text!r} is none; write TIME:INSTANCE:WHAT, such as {EXAMPLE}") from None
    if not 0 <= change.at_s < math.inf or change.instance < 0:
        raise ConfigError(f"--change {text!r}: times are seconds from 0 on, instances are counted from 0")
    if bool(equals) == (what is What.DRAIN) or (equals and not 0 < share <= 100):
        raise ConfigError(f"--change {text!r}: give speed and slots a share above 0, of 100 at most, and drain none")
    return change
