"""Who is there, as `liveness` has decided: the sets that questions are answered from, kept as instances come and go."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvbm.core.ids import InstanceId

STOPPING = "stopping"
_CHANGES = 4096
_MOST_STOPPING = 64  # of which one answer may have to say that they are


class Roster:
    """See the module. `Liveness` keeps it; belongs to its thread.

    Attributes:
        changes: the instances of which something has changed that decides who may be sent prompts, the last of all;
            `changes_counted` counts them.
    """

    def __init__(self) -> None:
        self.changes: deque[InstanceId] = deque(maxlen=_CHANGES)
        self.changes_counted = 0
        self._present: dict[InstanceId, None] = {}  # heard, not silent, not ended
        self._live: dict[InstanceId, None] = {}  # of these, those that are not about to stop
        self._awaited: dict[InstanceId, None] = {}  # known, and not heard yet
        self._excluded: dict[InstanceId, str] = {}  # and why

    # -- asking -------------------------------------------------------------------------------------------------------

    def is_gone(self, instance: InstanceId) -> bool:
        """Whether an instance is stopped, silent or unheard, as of the last step."""
        return instance not in self._present

    def hears_anybody(self) -> bool:
        """Whether anybody is heard: else all may be there, and prompts go to whoever is known and not stopped."""
        return bool(self._present)

    def is_live(self, instance: InstanceId) -> bool:
        """Whether an instance is heard and is not about to stop."""
        return instance in self._live

    def may_serve(self, instance: InstanceId) -> bool:
        """Whether an instance is live or awaited."""
        return instance in self._live or instance in self._awaited

    def serving(self) -> list[InstanceId]:
        """The instances of which `may_serve` is true."""
        return [*self._live, *self._awaited]

    @property
    def leaves_out(self) -> bool:
        """Whether anybody is left out: see `why_left_out`."""
        return bool(self._excluded) or len(self._live) < len(self._present)

    def why_left_out(self, instance: InstanceId) -> str:
        """Why an instance's blocks do not count, or no prompt is sent there though it is heard;

        "" where neither is so.
        """
        is_stopping = instance in self._present and instance not in self._live
        return self._excluded.get(instance, STOPPING if is_stopping else "")

    def stopping(self, most: int = _MOST_STOPPING) -> list[InstanceId]:
        """Some of the instances that are heard and about to stop."""
        if len(self._live) == len(self._present):
            return []
        return list(islice((one for one in self._present if one not in self._live), most))

    # -- keeping ------------------------------------------------------------------------------------------------------

    def note(self, instance: InstanceId) -> None:
        """Something has changed that decides whether the instance may be sent prompts."""
        self.changes.append(instance)
        self.changes_counted += 1

    def _set_present(self, instance: InstanceId, is_present: bool, is_live: bool) -> None:
        _set(self._present, instance, is_present)
        if _set(self._live, instance, is_live):
            self.note(instance)

    def _set_awaited(self, instance: InstanceId, is_awaited: bool) -> None:
        if _set(self._awaited, instance, is_awaited):
            self.note(instance)

    def _drop(self, instance: InstanceId) -> None:
        for known in (self._present, self._live, self._awaited, self._excluded):
            known.pop(instance, None)
        self.note(instance)


def _set(known: dict[InstanceId, None], instance: InstanceId, is_in: bool) -> bool:
    """Have an instance in a set, or not; whether that is new."""
    if is_in == (instance in known):
        return False
    if is_in:
        known[instance] = None
    else:
        del known[instance]
    return True
