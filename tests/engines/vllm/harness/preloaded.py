"""What every engine needs, imported once: engines are forked from a process that has it, and start in seconds.

Only imports; nothing here may compute or start a thread, because threads do not survive a fork.
"""

from __future__ import annotations

import gc
import importlib

PARTS = (
    "vllm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "kvbm.assembly",
)

for part in PARTS:
    importlib.import_module(part)
gc.collect()
gc.freeze()  # or every collection in a child would walk, and so copy, all of this
