"""A worker process and what is said with it, in lines of JSON."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.workload.processes import Child

ROOT = Path(__file__).parents[3]
ANSWER_S = 120.0  # only who hangs takes it


class ToldWorker(Child):
    """A `worker` process, which does what it is told.

    Args:
        rate: prompts a second that it serves by itself.
        wrong: takes what it was given wrong.
    """

    def __init__(
        self,
        name: str,
        logs: Path,
        seed: int,
        rate: float,
        flags: Mapping[str, object],
        wrong: list[dict[str, Any]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "tests.faults.processes.worker", str(seed), str(rate)]
        command += [f"{key}={value}" for key, value in flags.items()]
        super().__init__(name, command, logs, {"PYTHONPATH": str(ROOT), **(environment or {})}, spoken=True)
        self.wrong = wrong
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"listen-{name}", daemon=True).start()

    def send(self, **command: object) -> None:
        """One command; a dead worker takes it without a word."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def ask(self, wait_s: float = ANSWER_S, **command: object) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises ProcessError."""
        self.send(**command)
        return self.expect(wait_s, str(command["op"]))

    def expect(self, wait_s: float, what: str) -> dict[str, Any]:
        """The next answer. Raises ProcessError: it died, or says nothing within the time."""
        try:
            answer = self._answers.get(timeout=wait_s)
        except queue.Empty:
            raise self.failure(f"did not answer {what!r} within {wait_s:g} s") from None
        if answer["event"] == "died":
            raise self.failure(f"died at {what!r}")
        return answer

    def _listen(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                answer = msgspec.json.decode(line)
                if answer["event"] == "wrong_bytes":
                    self.wrong.append(answer)
                else:
                    self._answers.put(answer)
        except ValueError:
            pass  # the pipe was closed, or a line was cut by kill -9
        self._answers.put({"event": "died"})
