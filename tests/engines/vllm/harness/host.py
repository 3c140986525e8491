"""Another host of an engine: what `vllm serve --headless --node-rank N` does, in a process of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import get_context
from typing import Any


def node_of(rank: int, hosts: int, port: int) -> dict[str, Any]:
    """vLLM's arguments of one of several hosts."""
    return {
        "nnodes": hosts,
        "node_rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "distributed_executor_backend": "mp",
    }


def start_host(arguments: Mapping[str, Any]) -> None:
    """Begin to run its workers; they end with the engine's processes."""
    get_context("fork").Process(target=_run, args=(dict(arguments),)).start()


def _run(arguments: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if given := arguments.pop("kv_transfer_config", None):
        arguments["kv_transfer_config"] = KVTransferConfig(**given)
    config = EngineArgs(**arguments).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
