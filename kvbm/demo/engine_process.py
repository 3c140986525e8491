"""An engine of the demo as a child process: commands in and events out, as `engine/worker.py` has them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.streams.child import python
from kvbm.workload.processes import START_WAIT_S, Child

_ENGINE_DIED: dict[str, Any] = {"event": "finished", "failed": "engine died", "tokens": []}


class EngineProcess(Child):
    """The demo's engine in a process of its own, spoken to in JSON lines."""

    def __init__(
        self, name: str, flags: Mapping[str, object], folder: Path, environment: Mapping[str, str], threads: int = 1
    ) -> None:
        sets = [f"--set={key}={value}" for key, value in flags.items()]
        command = python("-m", "kvbm", "engine", f"--threads={threads}", *sets)
        super().__init__(name, command, folder, {"OMP_NUM_THREADS": str(threads), **environment}, spoken=True)
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._has_died = False
        self._guard = threading.Lock()
        threading.Thread(target=self._listen, name=f"listen-{name}", daemon=True).start()

    def submit(
        self,
        request_id: str,
        tokens: list[int],
        max_new_tokens: int,
        reuse: bool,
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        """Ask for tokens; `done` is called from another thread with the answer, or with failed="engine died"."""
        with self._guard:
            has_died = self._has_died
            if not has_died:
                self._handlers[request_id] = done
        if has_died:
            done(dict(_ENGINE_DIED))
            return
        self.send(op="submit", id=request_id, tokens=tokens, max_new_tokens=max_new_tokens, reuse=reuse)

    def send(self, **command: object) -> None:
        """Send one command; a dead engine takes it without a word, its listener tells."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def ask(self, timeout_s: float = START_WAIT_S, **command: object) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises ProcessError: none within the time."""
        self.send(**command)
        return self.expect(timeout_s, f"did not answer {command.get('op')!r}")

    def expect(self, timeout_s: float, what: str) -> dict[str, Any]:
        """The next event that is not a finished request. Raises ProcessError."""
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            raise self.failure(f"{what} within {timeout_s:g} s") from None
        if event["event"] in ("died", "error"):
            raise self.failure(f"{what}: {event.get('message', 'it died')}")
        return event

    def _listen(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._take(msgspec.json.decode(line, type=dict[str, Any]))
        except ValueError:
            pass  # the pipe was closed by stop(), or a line was cut by kill -9
        with self._guard:
            self._has_died = True
            waiting, self._handlers = self._handlers, {}
        for done in waiting.values():
            done(dict(_ENGINE_DIED))
        self.events.put({"event": "died"})

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] != "finished":
            self.events.put(event)
            return
        with self._guard:
            done = self._handlers.pop(event["id"], None)
        if done is not None:
            done(event)
