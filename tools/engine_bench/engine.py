"""A vLLM engine in a child process: it obeys commands that come over a pipe, and times itself.

Frontend, scheduler and worker are in that one process, so its CPU time is all there is, and a step can be driven from
outside.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine_bench.model import Shape, make

BLOCK_TOKENS = 32  # the CPU backend takes multiples of 32
_START_WAIT_S = 600.0
_ANSWER_WAIT_S = 600.0
_QUIET_S = 0.05
_QUIET_CPU_S = 0.004
_MOST_QUIET_S = 30.0
_WATCHED = "vllm:prompt_tokens_cached_by_source"


class EngineError(Exception):
    """An engine did not start, refused a command, or ended; the message has the end of what it said."""


@dataclass(frozen=True)
class Setup:
    """How to start an engine.

    Attributes:
        shape: of the model, which is made where it is not there.
        folder: for models and logs.
        extra: `kv_connector_extra_config`; None: no connector.
        hbm_blocks: blocks of device KV.
        threads: that compute, on a CPU.
        requests, step_tokens: the most of a step.
    """

    shape: Shape
    folder: str
    hbm_blocks: int
    context_tokens: int
    extra: Mapping[str, Any] | None = None
    threads: int = 1
    requests: int = 8
    step_tokens: int = 2048
    environment: Mapping[str, str] = field(default_factory=dict)


class Ran(NamedTuple):
    """What some requests took.

    Attributes:
        wall_s: until the last answer.
        cpu_s: all threads, until the engine and its connector had nothing left to do.
        outputs, cached_tokens: of each request.
    """

    wall_s: float
    cpu_s: float
    outputs: list[list[int]]
    cached_tokens: list[int]


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM's hashes begin with it; two engines share blocks only where it is the same
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engines:
    """Starts engines. On a CPU all are forked from one process that has imported vLLM."""

    def __init__(self, folder: Path, threads: int) -> None:
        os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)})
        self._folder = folder
        self._count = 0
        if Path("/dev/nvidiactl").exists():
            self._context: Any = get_context("spawn")
        else:
            self._context = get_context("forkserver")
            self._context.set_forkserver_preload(["engine_bench.preloaded"])

    def start(self, name: str, setup: Setup) -> Engine:
        """An engine that is ready. Raises EngineError."""
        self._count += 1
        log = self._folder / f"engine-{self._count}-{name}.log"
        log.touch()
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, setup, str(log)), daemon=True)
        process.start()
        theirs.close()
        return Engine(name, process, ours, log)


class Engine:
    """A running engine; leaving its context ends it."""

    def __init__(self, name: str, process: Any, pipe: Connection, log: Path) -> None:
        self._name, self._process, self._pipe, self._log = name, process, pipe, log
        try:
            self._answer(_START_WAIT_S)
        except EngineError:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Ran:
        """Answer all prompts at once, greedily, so many tokens each."""
        return Ran(*self._ask("run", [list(prompt) for prompt in prompts], output_tokens))

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the connector's tiers stay."""
        self._ask("forget")

    def connect(self, is_connected: bool) -> None:
        """Have the connector take part from now on, or have the engine run as if it had none; its own prefix cache is
        empty then.

        Two processes with the same engine differ by more in speed than the connector costs, by where their memory came
        to lie. So what is compared is one process with itself.
        """
        self._ask("connect", is_connected)

    def cached_by_source(self) -> dict[str, float]:
        """Prompt tokens not computed since the last call, by what vLLM calls their source."""
        found: dict[str, float] = self._ask("cached_by_source")
        return found

    def stop(self) -> None:
        """End it as a server would, or at once when it does not answer. Idempotent."""
        if self._pipe.closed:
            return
        with suppress(EngineError, OSError):
            self._ask("stop")
            self._process.join(_MOST_QUIET_S)
        self.kill()

    def kill(self) -> None:
        """Have it gone."""
        self._process.kill()
        self._process.join(_MOST_QUIET_S)
        self._pipe.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        return self._answer(_ANSWER_WAIT_S)

    def _answer(self, wait_s: float) -> Any:
        try:
            if not self._pipe.poll(wait_s):
                raise EngineError(f"{self._name}: no answer within {wait_s:.0f} s; {self._tail()}")
            is_well, said = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(1)
            raise EngineError(f"{self._name} ended with {self._process.exitcode}; {self._tail()}") from None
        if not is_well:
            raise EngineError(f"{self._name}: {said.strip().splitlines()[-1]}; log: {self._log}\n{said}")
        return said

    def _tail(self) -> str:
        words = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        return f"{' / '.join(words) or 'it said nothing'}; log: {self._log}"


def _serve(pipe: Connection, setup: Setup, log: str) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(setup.environment)
    try:
        engine = _Served(setup)
    except Exception:  # noqa: BLE001 - told to the parent, whatever it is
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = True, getattr(engine, command)(*arguments)
        except Exception:  # noqa: BLE001 - told to the parent, whatever it is
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if command == "stop":
            break
    sys.stdout.flush()


class _Served:
    """The engine, in its process."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM

        connector: dict[str, Any] = {}
        if setup.extra is not None:
            connector["kv_transfer_config"] = {
                "kv_connector": "KvbmConnector",
                "kv_connector_module_path": "kvbm.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(setup.extra),
            }
        self._llm = LLM(
            model=make(setup.shape, setup.folder),
            skip_tokenizer_init=True,
            dtype=setup.shape.dtype,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            kv_cache_memory_bytes=(setup.hbm_blocks + 1) * BLOCK_TOKENS * setup.shape.kv_bytes_per_token,
            num_gpu_blocks_override=setup.hbm_blocks,
            max_model_len=setup.context_tokens,
            max_num_batched_tokens=max(setup.step_tokens, 2048),
            max_num_seqs=setup.requests,
            disable_log_stats=False,
            **connector,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._sources: dict[str, float] = {}
        self._aside: tuple[Any, Any, Any] | None = None  # what `connect` has taken out

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, float, list[list[int]], list[int]]:
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - wall_s
        self._settle()
        cpu_s = time.process_time() - cpu_s
        return (
            wall_s,
            cpu_s,
            [list(output.outputs[0].token_ids) for output in outputs],
            [output.num_cached_tokens or 0 for output in outputs],
        )

    def forget(self) -> None:
        deadline_s = time.monotonic() + _MOST_QUIET_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"blocks were in use for {_MOST_QUIET_S:.0f} s after the last request")
            self._settle()

    def connect(self, is_connected: bool) -> None:
        import vllm.distributed.kv_transfer.kv_transfer_state as state

        self.forget()  # vLLM's map of blocks is a new one then, to which nobody listens yet
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        if is_connected and self._aside is not None:
            scheduler.connector, state._KV_CONNECTOR_AGENT, pool.cache_full_blocks = self._aside
            self._aside = None
        elif not is_connected and self._aside is None:
            self._aside = scheduler.connector, state._KV_CONNECTOR_AGENT, pool.cache_full_blocks
            scheduler.connector = state._KV_CONNECTOR_AGENT = None
            del pool.cache_full_blocks  # the listener; the class has the plain one

    def cached_by_source(self) -> dict[str, float]:
        now: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if metric.name == _WATCHED:
                source = metric.labels.get("source", "")
                now[source] = now.get(source, 0) + metric.value
        before, self._sources = self._sources, now
        return {source: count - before.get(source, 0) for source, count in now.items() if count > before.get(source, 0)}

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _settle(self) -> None:
        """Let the engine take the steps it wants, then wait until no thread of the process works any more."""
        deadline_s = time.monotonic() + _MOST_QUIET_S
        while time.monotonic() < deadline_s:
            while self._core.scheduler.has_requests() and time.monotonic() < deadline_s:
                self._core.step_fn()
            before_s = time.process_time()
            time.sleep(_QUIET_S)
            if time.process_time() - before_s < _QUIET_CPU_S and not self._core.scheduler.has_requests():
                return
        raise TimeoutError(f"the engine was still at work {_MOST_QUIET_S:.0f} s after the last request")
