"""Whose addresses an owner tries to reach: each try may take a second, in which it serves no other reader that
comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from kvbm.core.fetching import LeftAlone

_FIRST_S = 5.0
_MOST_KNOWN = 1024
_WITHIN_S = 60.0


class RdmaReach:
    """Leaves alone who could not be reached, and everybody new while too many could not. Under its owner's lock.

    Args:
        most_failures: within a minute; above that only addresses that were reached before are tried.
    """

    def __init__(self, most_failures: int = 12) -> None:
        self._alone = LeftAlone(first_s=_FIRST_S)
        self._reached: OrderedDict[bytes, None] = OrderedDict()
        self._failures: deque[float] = deque(maxlen=most_failures)

    def may(self, now_s: float, gid: bytes) -> bool:
        """Whether to try this address."""
        if not self._alone.may(now_s, gid.hex()):
            return False
        has_room = len(self._failures) < (self._failures.maxlen or 0) or now_s - self._failures[0] >= _WITHIN_S
        return has_room or gid in self._reached

    def worked(self, gid: bytes) -> None:
        """It was reached."""
        self._alone.worked(gid.hex())
        self._reached.pop(gid, None)
        self._reached[gid] = None
        if len(self._reached) > _MOST_KNOWN:
            self._reached.popitem(last=False)

    def failed(self, now_s: float, gid: bytes) -> None:
        """It was not."""
        self._alone.failed(now_s, gid.hex())
        self._failures.append(now_s)
        self._reached.pop(gid, None)
