"""One part's process: it measures step by step, and writes down what it has after each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_parts.report import Found

_WORDS = 600  # of an error, at most


class Steps:
    """Steps of a part.

    One that fails is noted, and the others go on; once the time is up, those left are noted as cut.
    """

    def __init__(self, path: Path, until: float) -> None:
        """Begin; `until` is on `time.time`'s clock."""
        self.found = Found()
        self._path = path
        self._until = until
        self._write()

    def step(self, name: str, work: Callable[[], object]) -> bool:
        """Do it, if there is time; whether it was done."""
        done = False
        if time.time() >= self._until:
            self.found.cut.append(name)
        else:
            try:
                work()
                done = True
            except Exception as error:  # noqa: BLE001  whatever a device's library raises: the other steps go on
                traceback.print_exc()
                words = f"{type(error).__name__}: {error}"
                self.found.troubles.append(f"{name}: {words[:_WORDS]}")
        self._write()
        return done

    def trouble(self, words: str) -> None:
        """Note what is wrong without ending a step."""
        self.found.troubles.append(words[:_WORDS])

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self.found))
        fresh.replace(self._path)


def read(path: Path) -> Found:
    """What a part has written down; nothing where it never began."""
    return msgspec.json.decode(path.read_bytes(), type=Found) if path.exists() else Found()
