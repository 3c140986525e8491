"""When an instance takes a snapshot of what it holds: a state machine without thread, clock or I/O.

The event writer drives it.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from kvbm.streams.base import StreamState

_SHARE = 4  # a completed snapshot in every quarter of what the stream retains, and of what the journal holds


class Asked(NamedTuple):
    """A reader has missed events."""


class Learned(NamedTuple):
    """What the stream holds and keeps."""

    state: StreamState


class JournalSize(NamedTuple):
    """How large the journal is, and how much was written to it since the process began."""

    used_bytes: int
    written_bytes: int


class Began(NamedTuple):
    """A snapshot has begun, for whatever reason. The first snapshot of an epoch begins with it."""


class Ended(NamedTuple):
    """The snapshot that began last is whole."""


class Dropped(NamedTuple):
    """The snapshot that began last will not end: an overflow, or a new epoch."""


class Ticked(NamedTuple):
    """Time has passed."""


Input = Asked | Learned | JournalSize | Began | Ended | Dropped | Ticked


class BeginSnapshot(NamedTuple):
    """Begin a snapshot. Answer with Began; asked for again at each step until then."""


class WakeAt(NamedTuple):
    """Step with Ticked at this time, if nothing comes before."""

    at_s: float


Effect = BeginSnapshot | WakeAt


class _Mark(NamedTuple):
    """What was true when a snapshot began."""

    at_s: float
    sequence: int | None  # the stream's last, as far as it was known


class SnapshotPolicy:
    """Decides when a snapshot begins.

    It begins when a reader asked, if the last snapshot that was asked for began `least_s` ago; an ask in between is
    served then. It begins when a quarter of what the stream retains has passed since the last completed snapshot began,
    so that a reader who comes late finds one: by time where the stream forgets by age, by messages where it is nearly
    full. And it begins when the journal is half full, so that what lies before can go. One snapshot that is whole
    serves all of these; one at a time is under way.

    Args:
        least_s: between snapshots that readers ask for.
        capacity_bytes: what the journal may hold; 0 for no limit.
    """

    def __init__(self, least_s: float, capacity_bytes: int = 0) -> None:
        self._least_s, self._capacity_bytes = least_s, capacity_bytes
        self._asked = False
        self._asked_begun_s = float("-inf")
        self._state: StreamState | None = None
        self._used_bytes = self._written_bytes = 0
        self._written_at_end = 0  # of the last completed snapshot, so that a large snapshot does not call for the next
        self._under_way: _Mark | None = None
        self._whole: _Mark | None = None

    @property
    def is_half_full(self) -> bool:
        """Whether the journal has used half its room."""
        return 0 < self._capacity_bytes <= 2 * self._used_bytes

    def step(self, now_s: float, happened: Input) -> list[Effect]:
        """Take one input; gives what to do about it."""
        match happened:
            case Asked():
                self._asked = True
            case Learned(state):
                self._learn(state)
            case JournalSize(used_bytes, written_bytes):
                self._used_bytes, self._written_bytes = used_bytes, written_bytes
            case Began():
                self._begin(now_s)
            case Ended():
                self._whole, self._under_way = self._under_way or self._whole, None
                self._written_at_end = self._written_bytes
            case Dropped():
                self._under_way = None
            case Ticked():
                pass
            case _:
                assert_never(happened)
        if self._under_way is not None:
            return []
        wake_s = self._wake_s()
        if (wake_s is not None and now_s >= wake_s) or self._is_pushed_out() or self._is_crowded():
            return [BeginSnapshot()]
        return [] if wake_s is None else [WakeAt(wake_s)]

    def _learn(self, state: StreamState) -> None:
        if self._state is not None and state.created != self._state.created:
            self._asked = True  # the old store's snapshots are gone with it
            self._whole = self._whole and self._whole._replace(sequence=None)
        self._state = state
        if self._whole is not None and self._whole.sequence is None:
            self._whole = self._whole._replace(sequence=state.last_sequence)

    def _begin(self, now_s: float) -> None:
        sequence = self._state.last_sequence if self._state else None
        self._under_way = _Mark(now_s, sequence)
        if self._asked and now_s >= self._asked_begun_s + self._least_s:
            self._asked, self._asked_begun_s = False, now_s

    def _wake_s(self) -> float | None:
        """When time alone makes a snapshot due; None: never."""
        times = [self._asked_begun_s + self._least_s] if self._asked else []
        if self._state is not None and self._state.max_age_s > 0 and self._whole is not None:
            times.append(self._whole.at_s + self._state.max_age_s / _SHARE)
        return min(times, default=None)

    def _is_pushed_out(self) -> bool:
        """Whether the stream is nearly full and a quarter of it is newer than the last completed snapshot."""
        state, whole = self._state, self._whole
        if state is None or whole is None or whole.sequence is None or state.max_bytes <= 0:
            return False
        length = state.last_sequence - state.first_sequence + 1
        is_nearly_full = state.bytes >= state.max_bytes * 3 / 4
        return is_nearly_full and (state.last_sequence - whole.sequence) * _SHARE >= max(length, _SHARE)

    def _is_crowded(self) -> bool:
        """Whether the journal is half full, and a quarter of it written since the last completed snapshot."""
        if not self.is_half_full:
            return False
        return (self._written_bytes - self._written_at_end) * _SHARE >= self._capacity_bytes
