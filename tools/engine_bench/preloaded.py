"""What every engine imports, imported once: engines are forked from a process that has it.

Only imports; nothing here starts a thread.
"""

from __future__ import annotations

import gc
import importlib

for part in (
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "transformers.models.llama.modeling_llama",
    "kvbm.assembly",
):
    importlib.import_module(part)
gc.collect()
gc.freeze()  # or every collection in a child would walk, and so copy, all of this
