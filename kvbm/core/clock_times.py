"""Times of day, as all commands understand them: 13:19 or 13:19:05, in UTC where no zone is said. One that is asked
about alone, or from which on, is the last one that has been; up to which, the first one after that.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta

DAY_US = 86_400_000_000
_UNIX_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_CLOCK = re.compile(r"([0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?)(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?")


def clock_us(text: str) -> int | None:
    """A time of day in microseconds after midnight UTC; None: no clock shows it."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None
    try:
        moment = time.fromisoformat(("0" if found[1][1] == ":" else "") + text)
    except ValueError:
        return None
    since = datetime.combine(_UNIX_BEGIN, moment, moment.tzinfo or UTC) - _UNIX_BEGIN
    return since // timedelta(microseconds=1) % DAY_US


def last_at(clock: int, last_us: int) -> int:
    """The last moment up to a time at which a clock shows so many microseconds after midnight; Unix time."""
    time_us = last_us - last_us % DAY_US + clock
    return time_us if time_us <= last_us else time_us - DAY_US


def first_after(clock: int, since_us: int) -> int:
    """The first moment after a time at which a clock shows so many microseconds after midnight; Unix time."""
    return last_at(clock, since_us) + DAY_US
