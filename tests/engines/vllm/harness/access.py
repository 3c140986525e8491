"""What tests reach inside a worker by `collective_rpc`: vLLM mixes this class into its own (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.vllm.harness.words import Group

# As float32 13,323,083: far from any KV, yet 0 times it is 0, which NaN would not be where blocks are partly filled
GARBAGE = 0x4B


class TestAccess:
    """Methods of a worker, on each rank."""

    model_runner: Any

    def overwrite_kv(self) -> int:
        """Overwrite all device KV, whatever it is used for; gives how many bytes that were."""
        bytes_overwritten = 0
        for storage in self._kv_storages():
            torch.tensor([], dtype=torch.uint8).set_(storage).fill_(GARBAGE)
            bytes_overwritten += storage.nbytes()
        return bytes_overwritten

    def load_into_model(self, folder: str) -> None:
        """Load weights into the model itself, as a trainer does; of the norms alone, as a CPU's backend keep the others
        elsewhere.
        """
        from pathlib import Path

        from safetensors.torch import load_file

        for file in sorted(Path(folder).glob("*.safetensors")):
            norms = [(name, tensor) for name, tensor in load_file(file).items() if "norm" in name]
            self.model_runner.model.load_weights(norms)

    def kv_groups(self) -> list[Group]:
        """The KV cache groups of this engine."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return [
            Group(type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, len(group.layer_names))
            for group in groups
        ]

    def _kv_storages(self) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:  # the parts of a state
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
        return list(found.values())
