"""The process an engine runs in: it does what comes over a pipe until the pipe ends, and answers each command once."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.engines.vllm.harness.data_parallel import ServedByCores
from tests.engines.vllm.harness.host import node_of, start_host
from tests.engines.vllm.harness.words import BLOCK_TOKENS, TOP, Answer, Ask, Group, Setup
from tests.servers import free_port

EXTENSION = "tests.engines.vllm.harness.access.TestAccess"


def serve(pipe: Connection, setup: Setup, log: str) -> None:
    """Start an engine and obey. Its log has what it and its children print, and where all threads are after SIGUSR1."""
    os.setsid()  # so that all of its processes can be killed together
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update(setup.environment)
    began = time.monotonic()
    try:
        for name in setup.patches:
            called(name)()
        if setup.cores > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("0" for _ in range(setup.cores))
            _let_platform(setup)
        engine = Served(setup) if setup.cores == 1 else ServedByCores(setup)
    except Exception:  # noqa: BLE001 - the test is told
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, time.monotonic() - began))
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = True, getattr(engine, command)(*arguments)
        except Exception:  # noqa: BLE001 - the test is told
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if command == "stop":
            break
    # What is left in this process is vLLM's; children end when it does.


def called(name: str) -> Callable[..., Any]:
    """The function named "module:name"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


class Served:
    """An engine and the commands it obeys."""

    def __init__(self, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if setup.core == "process" else "0"
        port = free_port()
        node = node_of(0, setup.hosts, port) if setup.hosts > 1 else {}
        if (workers := setup.ranks * setup.stages) > 1:
            cores = len(os.sched_getaffinity(0))
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(workers))
        _let_platform(setup)
        _let_tests_in()
        if setup.stages > 1:
            _let_stages_begin()
        self._setup = setup
        self._node, self._port = node, port
        self._llm = self._started()

    def drop(self) -> None:
        """End the engine as a program does that goes on with something else: nothing refers to it any more."""
        self._llm = None
        gc.collect()

    def start_anew(self) -> None:
        """Make the same engine again, in this process."""
        self._llm = self._started()

    def kept_of_kvbm(self, folder: str) -> list[str]:
        """What this process has of kvbm: threads, files open below a folder, and HOST's memory, open or mapped."""
        tasks = (_read(f"/proc/self/task/{task}/comm").strip() for task in os.listdir("/proc/self/task"))
        names = [*tasks, *(thread.name for thread in threading.enumerate())]
        files = [name for fd in os.listdir("/proc/self/fd") if (name := _link(f"/proc/self/fd/{fd}"))]
        maps = [line for line in _read("/proc/self/maps").splitlines() if "kvbm" in line]
        return [name for name in names if name.startswith("kvbm")] + [
            name for name in files + maps if name.startswith(folder) or "memfd:kvbm" in name
        ]

    def connections(self, ports: Sequence[int]) -> int:
        """How many TCP connections this process has to servers at these ports."""
        own = {_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        lines = [line.split() for line in _read("/proc/self/net/tcp").splitlines()[1:]]
        return sum(int(line[2].partition(":")[2], 16) in ports and f"socket:[{line[9]}]" in own for line in lines)

    def _started(self) -> Any:
        from vllm import LLM

        setup = self._setup
        connector: dict[str, Any] = {"kv_transfer_config": dict(setup.connector)} if setup.connector else {}
        arguments: dict[str, Any] = {
            "model": setup.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,  # of which num_gpu_blocks_override takes what it needs
            "num_gpu_blocks_override": setup.hbm_blocks,
            "enable_prefix_caching": setup.prefix_caching,
            "max_model_len": setup.context_tokens,
            "max_num_batched_tokens": setup.step_tokens,
            "max_num_seqs": setup.requests,
            "tensor_parallel_size": setup.ranks,
            "pipeline_parallel_size": setup.stages,
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": False,
            **connector,
            **self._node,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            **setup.options,
        }
        for host in range(1, setup.hosts):
            start_host(arguments | node_of(host, setup.hosts, self._port))
        return LLM(**arguments)

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them at once, answered in their order."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompts: list[Any] = [
            {"prompt_token_ids": list(ask.tokens)} | ({"cache_salt": ask.salt} if ask.salt else {}) for ask in asks
        ]
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=ask.output_tokens,
                ignore_eos=True,
                logprobs=TOP,
                detokenize=False,
                extra_args={"kv_transfer_params": dict(ask.transfer)} if ask.transfer else None,
            )
            for ask in asks
        ]
        loras = [LoRARequest(os.path.basename(ask.lora[1]), *ask.lora) if ask.lora else None for ask in asks]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False, lora_request=loras if any(loras) else None)
        return [_answer(output) for output in outputs]

    def load_adapter(self, number: int, folder: str, in_place: bool = False) -> bool:
        """Have an adapter loaded, as a server does that is told to."""
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(os.path.basename(folder), number, folder, load_inplace=in_place)
        return bool(self._llm.llm_engine.add_lora(adapter))

    def unload_adapter(self, number: int) -> bool:
        """Have it let go of."""
        return bool(self._llm.llm_engine.remove_lora(number))

    def settle(self, wait_s: float) -> bool:
        """Let the engine finish what it does between requests; whether it did in time."""
        core = self._core()
        if core is None:
            return True  # a core of its own goes on by itself
        deadline = time.monotonic() + wait_s
        while core.scheduler.has_requests():
            if time.monotonic() > deadline:
                return False
            self._llm.llm_engine.step()
            time.sleep(0.001)
        return True

    def forget(self, with_connector: bool, wait_s: float) -> bool:
        """Empty the engine's own prefix cache, and the connector's where asked;

        False when blocks were in use all the time.
        """
        deadline = time.monotonic() + wait_s
        while not self._llm.reset_prefix_cache(reset_connector=with_connector):
            if time.monotonic() > deadline:
                return False
            self.settle(wait_s)
            time.sleep(0.01)
        return True

    def overwrite_kv(self) -> list[int]:
        """Overwrite all device KV with garbage; gives the bytes of each rank."""
        return self._llm.collective_rpc("overwrite_kv")

    def kv_groups(self) -> list[Group]:
        """Of the first rank."""
        return self._llm.collective_rpc("kv_groups")[0]

    def metrics(self) -> dict[str, float]:
        """All of vLLM's and the connector's counters and gauges: name{label=value,…} → value."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                labels = ",".join(f"{name}={said}" for name, said in sorted(sample.labels.items()) if name not in _OUR)
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    def in_core(self, name: str, *arguments: Any) -> Any:
        """Call "module:name" with vLLM's EngineCore, in the process that has it. Not where that was spawned."""
        client = self._llm.llm_engine.engine_core
        core = self._core()
        return client.call_utility(_CALL, name, arguments) if core is None else called(name)(core, *arguments)

    def on_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a worker's method on every rank."""
        return self._llm.collective_rpc(method, args=arguments)

    def stop(self) -> None:
        """End the engine as a server would."""
        self._llm.llm_engine.engine_core.shutdown()

    def _core(self) -> Any:
        """The engine core of this process; None when it has its own."""
        return getattr(self._llm.llm_engine.engine_core, "engine_core", None)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


_OUR = ("model_name", "engine")
_CALL = "call_for_tests"


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    likely = tuple({token: said.logprob for token, said in position.items()} for position in completion.logprobs)
    return Answer(tuple(completion.token_ids), likely, output.num_cached_tokens or 0, completion.finish_reason or "")


def _let_platform(setup: Setup) -> None:
    """Have the CPU platform take asynchronous scheduling and forked processes; by itself it forbids the one and spawns
    the others.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    checked = platform.check_and_update_config

    def check(config: Any) -> None:
        checked(config)
        if setup.asynchronous:
            config.scheduler_config.async_scheduling = True
        if setup.start == "fork":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check)


def _let_stages_begin() -> None:
    """Have later pipeline stages make the tensors they take over from the one before; vLLM does that in a warm-up,
    which engines here leave out.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gathered(self: Any, *arguments: Any, **more: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments, **more)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gathered


def _let_tests_in() -> None:
    """Give the engine core a method for tests, which a core in a process of its own has after the fork as well."""
    from vllm.v1.engine.core import EngineCore

    def call(core: Any, name: str, arguments: Sequence[Any]) -> Any:
        try:
            return called(name)(core, *arguments)
        except Exception:  # noqa: BLE001
            raise RuntimeError(traceback.format_exc()) from None  # the message is all that leaves the process

    setattr(EngineCore, _CALL, call)
