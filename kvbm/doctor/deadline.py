"""Every probe ends in time, whatever it asks: a thread or a process that does not is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

PROBE_S = 5.0

T = TypeVar("T")
_KILLED_WAIT_S = 0.5


class LateProbe(Exception):
    """A probe has not answered in time."""


class PendingProbe(Generic[T]):
    """Work under way in a thread that nobody has to wait for."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._done: list[T] = []
        self._failed: list[BaseException] = []
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-doctor-{name}", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> T:
        """What the work returned or raised. Raises LateProbe: it is not over so long after it has begun."""
        self._thread.join(max(0.0, self._begun_s + timeout_s - time.monotonic()))
        if self._failed:
            raise self._failed[0]
        if not self._done:
            raise LateProbe
        return self._done[0]

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is asked for
            self._failed.append(error)


def run_probe(name: str, question: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
    """What a probe of `probes/` answers, as a process that is killed when it is late.

    Args:
        timeout_s: None for `PROBE_S`.
    Raises: Late. RuntimeError: it ended otherwise; the message has its last line.
    """
    script = Path(__file__).parent / "probes" / f"{name}.py"
    arguments = [] if question is None else [json.dumps(dict(question))]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            said, complaint = process.communicate(timeout=PROBE_S if timeout_s is None else timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            _leave(process)
            raise LateProbe from None
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(lines[-1])
    answer: dict[str, Any] = json.loads(said)
    return answer


def _leave(process: subprocess.Popen[bytes]) -> None:
    """A process in a dead disk's hands does not even die; do not wait for it at the end of the block either."""
    try:
        process.wait(_KILLED_WAIT_S)
    except subprocess.TimeoutExpired:
        process.returncode = -9
