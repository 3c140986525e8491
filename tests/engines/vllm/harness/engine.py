"""A test's end of the pipe to an engine in a process of its own: a crash is seen, a hang is ended."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.engines.vllm.harness import child, models
from tests.engines.vllm.harness.words import Answer, Ask, Group, Setup

START_WAIT_S = 280.0  # what is sure to come is waited for generously, and less than half of a test's limit
ANSWER_WAIT_S = 200.0
SETTLE_WAIT_S = 120.0
_STOP_WAIT_S = 120.0
_TAIL_BYTES = 6000
_PRELOADED = "tests.engines.vllm.harness.preloaded"
CORE_ACCESS = "tests.engines.vllm.harness.core_access"
_NUMBERS = itertools.count()


class EngineError(AssertionError):
    """An engine refused a command; the message has its traceback."""


class EngineDiedError(EngineError):
    """An engine ended, or did not answer in time and was killed; the message has the end of its log."""


class Engines:
    """Starts engines. All are forked from one process that has imported vLLM.

    Args:
        folder: for models, which stay for the next time.
        logs: for what engines print.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder, self._logs = folder, logs
        os.environ.update(_ENVIRONMENT)  # for the forked ones too; OpenMP reads its own when it is loaded
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOADED])
        self._models: dict[str, str] = {}
        self._started: list[Engine] = []
        atexit.register(self.close)

    def model(self, kind: str) -> str:
        """The folder of a model, made when it is first asked for."""
        if kind not in self._models:
            self._folder.mkdir(parents=True, exist_ok=True)
            ours, theirs = self._context.Pipe()
            maker = self._context.Process(target=_make_model, args=(theirs, kind, str(self._folder)))
            maker.start()
            theirs.close()
            try:
                if not ours.poll(START_WAIT_S):
                    raise EngineDiedError(f"the model {kind!r} was not made within {START_WAIT_S:.0f} s")
                self._models[kind] = ours.recv()
            except EOFError:
                raise EngineDiedError(f"the model {kind!r} could not be made; see what is printed above") from None
            finally:
                maker.kill()
                maker.join()
        return self._models[kind]

    @contextmanager
    def running(self, setup: Setup) -> Iterator[Engine]:
        """An engine that is gone afterwards."""
        engine = self.start(setup)
        try:
            yield engine
        finally:
            engine.close()

    def start(self, setup: Setup) -> Engine:
        """An engine that is ready; whoever starts it closes it. Raises EngineError, EngineDiedError."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"engine-{os.getpid()}-{next(_NUMBERS)}.log"
        log.touch()
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=child.serve, args=(theirs, setup, str(log)))
        process.start()
        theirs.close()
        engine = Engine(process, ours, log)
        self._started.append(engine)
        try:
            engine.started_in_s = engine.answer(START_WAIT_S)
        except BaseException:
            engine.close()
            raise
        return engine

    def close(self) -> None:
        """End all that were started."""
        while self._started:
            self._started.pop().close()


class Engine:
    """A running engine.

    Attributes:
        started_in_s: how long vLLM took to be ready.
        log: file with what it prints.
    """

    def __init__(self, process: BaseProcess, pipe: Connection, log: Path) -> None:
        self.started_in_s = 0.0
        self.log = log
        self._process, self._pipe = process, pipe

    def generate(self, asks: Sequence[Ask], wait_s: float = ANSWER_WAIT_S) -> list[Answer]:
        """Have all of them answered at once."""
        self.begin("generate", list(asks))
        return self.answered(wait_s)

    def answered(self, wait_s: float = ANSWER_WAIT_S) -> list[Answer]:
        """What comes of a `begin("generate", …)`."""
        answers: list[Answer] = self.answer(wait_s)
        return answers

    def forget(self, with_connector: bool = False, wait_s: float = SETTLE_WAIT_S) -> None:
        """Empty the engine's prefix cache and overwrite all device KV with garbage: what comes next has to be computed
        or loaded.
        """
        self.settle(wait_s)
        self.begin("forget", with_connector, wait_s)
        assert self.answer(ANSWER_WAIT_S), f"blocks were in use for {wait_s:.0f} s after the last request"
        overwritten = self.ask("overwrite_kv")
        assert overwritten
        assert all(overwritten)

    def settle(self, wait_s: float = SETTLE_WAIT_S) -> None:
        """Wait until the engine has nothing left to do."""
        self.begin("settle", wait_s)
        assert self.answer(ANSWER_WAIT_S), f"the engine was still at work {wait_s:.0f} s after the last request"

    def offload(self, wait_s: float = SETTLE_WAIT_S) -> None:
        """Wait until all that was computed has reached every tier it goes to.

        The engine goes on meanwhile: copies end in its steps.
        """
        deadline = time.monotonic() + wait_s
        self.settle(wait_s)
        while not self.in_core("settled", 0.02):
            assert time.monotonic() < deadline, f"blocks were on their way to a colder tier after {wait_s:.0f} s"
            self.settle(wait_s)

    def kv_groups(self) -> list[Group]:
        """The KV cache groups it has made."""
        groups: list[Group] = self.ask("kv_groups")
        return groups

    def metrics(self) -> Mapping[str, float]:
        """vLLM's counters and gauges, and the connector's: name{label=value,…} → value."""
        found: Mapping[str, float] = self.ask("metrics")
        return found

    def in_core(self, name: str, *arguments: Any) -> Any:
        """Call a function of `core_access` with vLLM's EngineCore as its first argument, in the process that has it."""
        return self.ask("in_core", f"{CORE_ACCESS}:{name}", *arguments)

    def ask(self, command: str, *arguments: Any) -> Any:
        """A command's answer."""
        self.begin(command, *arguments)
        return self.answer(ANSWER_WAIT_S)

    def begin(self, command: str, *arguments: Any) -> None:
        """Give a command without waiting; `answer` is next."""
        self._pipe.send((command, arguments))

    def answer(self, wait_s: float) -> Any:
        """What comes of the command before. Raises EngineError, EngineDiedError."""
        try:
            if not self._pipe.poll(wait_s):
                self._say_where_it_is()
                self.kill()
                raise EngineDiedError(f"no answer within {wait_s:.0f} s, so it was killed{self._tail()}")
            is_well, said = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.kill()
            raise EngineDiedError(f"it ended with status {self._process.exitcode}{self._tail()}") from None
        if not is_well:
            raise EngineError(f"{said}{self._tail()}")
        return said

    def printed(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """End it as a server would, and wait."""
        self.begin("stop")
        self.answer(_STOP_WAIT_S)
        self._process.join(_STOP_WAIT_S)
        self.close()

    def kill(self) -> None:
        """SIGKILL to all of its processes at once: no file is closed, nothing is said."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_STOP_WAIT_S)

    def close(self) -> None:
        """Have it gone."""
        self.kill()
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _say_where_it_is(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return f"; the end of {self.log}:\n{file.read().decode(errors='replace')}"


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the few functions vLLM decorates takes longer than all they do here
    "OMP_NUM_THREADS": "1",  # the models are tiny and the machine is shared
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
}


def _make_model(pipe: Connection, kind: str, folder: str) -> None:
    sys.stdout = sys.stderr
    pipe.send(models.make(kind, folder))
