"""For how long instances are gone: in time in which the catalog itself has listened.

A state machine: no thread, clock or socket.

Time in which the catalog was away, cut off or frozen counts for nobody: who was heard in it is not known. What was
counted before is kept in SQL and goes on, so that a catalog that is restarted every day forgets as well. At a start
nobody is forgotten before the catalog has listened for a while, however long somebody was gone before: he may be back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvbm.catalog.sql.rows import AbsenceRow
from kvbm.core.ids import InstanceId

FORGET_S = 7 * 86_400.0  # longer than the stream keeps events, and than a machine is usually away for repair
LISTEN_FIRST_S = 60.0  # instances are heard every second; those that come back with the catalog need a while to start


class _Downtime(NamedTuple):
    """Since when an instance is gone, by the time that was listened; its last message."""

    since_s: float
    spoke: int


class Downtimes:
    """Counts downtimes. `now_s` is on one clock that only grows.

    Args:
        forget_s: who is gone for so long is due. first_s: nobody is before so much was listened since the start.
        most_step_s: a longer pause between two steps counts as this: whoever was frozen has heard nothing.

    Attributes:
        listened_s: time listened since the start.
    """

    def __init__(self, forget_s: float, first_s: float = LISTEN_FIRST_S, most_step_s: float = 10.0) -> None:
        self.listened_s = 0.0
        self._forget_s, self._first_s, self._most_step_s = forget_s, min(first_s, forget_s), most_step_s
        self._gone: dict[InstanceId, _Downtime] = {}
        self._returned: dict[InstanceId, None] = {}  # who had been noted in SQL
        self._stored: set[InstanceId] = set()
        self._last_s: float | None = None  # when it listened last; None: it did not

    def load(self, instances: Iterable[InstanceId], rows: Iterable[AbsenceRow]) -> None:
        """Take what SQL has: everyone that it knows, and how long some of these are gone.

        Who is heard is here again.
        """
        for instance in instances:
            self._gone.setdefault(instance, _Downtime(self.listened_s, 0))
        for row in rows:
            known = self._gone.get(row.instance)
            if known is not None:
                self._stored.add(row.instance)
                since_s = min(known.since_s, self.listened_s - row.unheard_s)
                self._gone[row.instance] = _Downtime(since_s, max(known.spoke, row.sequence))

    def listen(self, now_s: float, is_listening: bool) -> None:
        """Time has passed; whether the catalog hears the stream, and has since the last call."""
        if is_listening and self._last_s is not None:
            self.listened_s += min(now_s - self._last_s, self._most_step_s)
        self._last_s = now_s if is_listening else None

    def note(self, instance: InstanceId, is_gone: bool, spoke: int) -> None:
        """What is known of an instance now.

        Args:
            spoke: sequence of its last message. A later one than before is a sign of life.
        """
        known = self._gone.get(instance)
        if not is_gone:
            if known is not None:
                del self._gone[instance]
            if instance in self._stored:
                self._returned[instance] = None
        elif known is None or (known.spoke and spoke > known.spoke):
            self._gone[instance] = _Downtime(self.listened_s, spoke)
        elif spoke and spoke != known.spoke:
            self._gone[instance] = known._replace(spoke=spoke)

    def gone(self) -> list[InstanceId]:
        """Who is gone, whether for long or not."""
        return list(self._gone)

    def __len__(self) -> int:
        return len(self._gone)

    def __contains__(self, instance: object) -> bool:
        return instance in self._gone

    def unheard_s(self, instance: InstanceId) -> float:
        """For how long an instance is gone; 0 when it is not."""
        known = self._gone.get(instance)
        return 0.0 if known is None else self.listened_s - known.since_s

    def due(self, most: int) -> list[InstanceId]:
        """Who is to be forgotten, so many at most, the longest gone first."""
        if self.listened_s < self._first_s:
            return []
        found = [(known.since_s, instance) for instance, known in self._gone.items()]
        last_s = self.listened_s - self._forget_s
        return [instance for _, instance in sorted(one for one in found if one[0] <= last_s)[:most]]

    def forget(self, instance: InstanceId) -> None:
        """It was forgotten."""
        self._gone.pop(instance, None)
        self._returned.pop(instance, None)
        self._stored.discard(instance)

    def rows(self, least_s: float) -> tuple[list[AbsenceRow], list[InstanceId]]:
        """What SQL should have: who is gone for at least this long; and who of those it has was here since."""
        gone = [
            AbsenceRow(instance=instance, unheard_s=int(self.listened_s - known.since_s), sequence=known.spoke)
            for instance, known in self._gone.items()
            if self.listened_s - known.since_s >= least_s
        ]
        return gone, list(self._returned)  # one that returned and is gone again is counted anew

    def stored(self, gone: Iterable[AbsenceRow], here: Iterable[InstanceId]) -> None:
        """SQL has what `rows` gave."""
        for instance in here:
            self._stored.discard(instance)
            self._returned.pop(instance, None)
        self._stored |= {row.instance for row in gone}
