"""What does not work though answers are good: a word on each, logged when it begins and when it ends."""

from __future__ import annotations

import structlog

log = structlog.get_logger()


class Degraded:
    """The parts of a catalog that do not work now. One asyncio loop."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def note(self, what: str, words: str) -> None:
        """A part does not work, and why."""
        if what not in self._words:
            log.warning("catalog.degraded", what=what, why=words)
        self._words[what] = words

    def clear(self, what: str) -> None:
        """It works."""
        if self._words.pop(what, None) is not None:
            log.info("catalog.recovered", what=what)

    def __bool__(self) -> bool:
        return bool(self._words)

    def __str__(self) -> str:
        return "; ".join(self._words[what] for what in sorted(self._words))
