"""What does not work though answers are good: a reason for each, logged when it begins and when it ends."""

from __future__ import annotations

from kvbm.safe_log import SafeLog

log = SafeLog()


class Degraded:
    """The parts of a catalog that do not work now. One asyncio loop."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def note(self, what: str, why: str) -> None:
        """A part does not work, and why."""
        if what not in self._reasons:
            log.warning("catalog.degraded", what=what, why=why)
        self._reasons[what] = why

    def clear(self, what: str) -> None:
        """It works."""
        if self._reasons.pop(what, None) is not None:
            log.info("catalog.recovered", what=what)

    def parts(self) -> list[str]:
        """Names of those that do not work."""
        return list(self._reasons)

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __str__(self) -> str:
        """Each part that does not work, with why."""
        said = sorted(self._reasons.items())
        return "; ".join(why if why.startswith(what) else f"{what}: {why}" for what, why in said)
