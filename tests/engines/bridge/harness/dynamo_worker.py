"""A test's end of the line to Dynamo's own publishers of KV events, which are a process of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import stop_process

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / "build" / "routers" / ".venv" / "bin" / "python"
_PROCESS = Path(__file__).with_name("dynamo_process.py")
_ANSWER_S = 120.0


class DynamoWorker:
    """Lives from its making to `close`.

    Args:
        url: of Dynamo's NATS.
        component: NAMESPACE.COMPONENT.ENDPOINT.
        number: Dynamo's number of the worker; 0: Dynamo gives it one.
        ranks: data-parallel ranks.
        engine: where it takes vLLM's events from, which it passes on; "" for nowhere.
        python: of the environment with ai-dynamo-runtime.

    Attributes:
        number: Dynamo's number of the worker.

    Raises:
        AssertionError: there is no such environment, or the process ended or said nothing for two minutes.
    """

    def __init__(
        self,
        url: str,
        component: str,
        block_tokens: int,
        number: int = 0,
        ranks: int = 1,
        engine: str = "",
        python: Path = PYTHON,
    ) -> None:
        assert python.exists(), f"this needs ai-dynamo-runtime in {python}; run: make test-bridge"
        flags = ["--worker", str(number), "--ranks", str(ranks), *(["--engine", engine] if engine else [])]
        self._process = subprocess.Popen(
            [str(python), str(_PROCESS), component, str(block_tokens), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"NATS_SERVER": url, "DYN_LOG": "error"},
        )
        self._rest = b""
        try:
            self.number: int = self._answer()["worker"]
        except BaseException:
            self.close()
            raise

    def publish(self, call: str, rank: int = 0, **given: Any) -> None:
        """Call a method of a rank's `KvEventPublisher`."""
        self._ask({"call": call, "rank": rank, "with": given})

    def hashes(self, tokens: list[int], **given: Any) -> list[int]:
        """Dynamo's own hashes of the full blocks of a prompt."""
        found: list[int] = self._ask({"call": "hashes", "with": {"tokens": tokens, **given}})["hashes"]
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            stop_process(self._process)
        self._process.stdout.close()

    def __enter__(self) -> DynamoWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer; others are Dynamo's log."""
        assert self._process.stdout is not None
        until = time.monotonic() + _ANSWER_S
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                if line.startswith(b"{"):
                    return dict(json.loads(line))
                continue
            left_s = until - time.monotonic()
            assert left_s > 0, f"Dynamo's worker said nothing for {_ANSWER_S} s"
            if select.select([self._process.stdout], [], [], left_s)[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                assert data, f"Dynamo's worker has ended: exit status {self._process.wait(30)}; see its standard error"
                self._rest += data
