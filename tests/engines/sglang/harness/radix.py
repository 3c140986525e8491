"""SGLang's own radix cache with its controller's threads on a CPU, in the fixtures it ships.

What only a GPU has is replaced: pinning of host memory does nothing, and the copies between device and host pool are
torch's, page by page as SGLang's kernels would leave them. All else is SGLang's: tree, keys, threads, host pool.
"""

from __future__ import annotations

import json
from array import array
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

CONFIG = CacheConfig(page_size=4, num_layers=3, head_num=2, head_dim=16, kv_size=512, max_context_len=512)


def _to_host(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer in range(self.layer_num):
        at = _tokens(self, layer, host_indices)
        self.k_data_refs[layer][at] = self.device_k_buffers[layer][device_indices]
        self.v_data_refs[layer][at] = self.device_v_buffers[layer][device_indices]


def _to_device(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **more: Any
) -> None:
    at = _tokens(self, layer_id, host_indices)
    self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][at]
    self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][at]


def _tokens(pool: Any, layer: int, indices: Any) -> tuple[Any, ...]:
    """Where tokens of a layer lie in the host pool: by token, or by page and token in it."""
    if pool.k_data_refs[layer].dim() == 3:
        return (indices,)
    return indices // pool.page_size, indices % pool.page_size


class RadixCache(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """One test's caches; each is SGLang's UnifiedRadixCache over a storage of ours. Use it with `with`."""

    __test__ = False
    cfg = CONFIG

    def runTest(self) -> None:  # unittest's word
        raise AssertionError("a holder of fixtures; no test")

    def __enter__(self) -> RadixCache:
        for patch in (
            mock.patch.object(common, "_cuda_host_register", return_value=None),
            mock.patch.object(common, "_cuda_host_unregister", return_value=None),
            mock.patch.object(MHATokenToKVPoolHost, "backup_from_device_all_layer", _to_host),
            mock.patch.object(MHATokenToKVPoolHost, "load_to_device_per_layer", _to_device),
            mock.patch.object(fixtures, "get_device", return_value="cpu"),
            get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1),
        ):
            self.enterContext(patch)
        return self

    def __exit__(self, *exc: object) -> None:
        self.doCleanups()

    def opened(self, extra: dict[str, Any], layout: str = "page_first", **more: Any) -> tuple[Any, Any, Any]:
        """A fresh cache over a storage; the tree, its allocator, and its requests' pool.

        Args:
            more: of ServerArgs.
        """
        made = fixtures.build_fixture(self.cfg)
        cache = made[0]
        given = {"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": True} | extra
        args = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="kernel",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(given),
            hicache_storage_prefetch_policy="wait_complete",
            **more,
        )
        set_global_server_args_for_scheduler(args)
        cache.init_hicache(args, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        return made

    def close(self, cache: Any) -> None:
        """Detach the storage, as SGLang does when it ends."""
        cache.cache_controller.detach_storage_backend()

    def produce(self, made: tuple[Any, Any, Any], tokens: list[int]) -> list[torch.Tensor]:
        """Compute a prompt, and have it written to the storage; what is in each layer of the device."""
        cache, allocator, requests = made
        self._insert(cache, allocator, requests, tokens)
        leaf = fixtures.match_prefix(cache, tokens).last_device_node
        indices = cache.path_device_indices(leaf)
        draw = torch.Generator().manual_seed(len(tokens) + tokens[0])
        for buffer in self.buffers(allocator):
            buffer[indices] = torch.randn(buffer[indices].shape, generator=draw).to(buffer.dtype)
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache, 60.0)
        return [buffer[indices].clone() for buffer in self.buffers(allocator)]

    def prefetch(self, made: tuple[Any, Any, Any], tokens: list[int], name: str) -> list[torch.Tensor]:
        """Ask the storage for a prompt, load what came to the device, and give what is in each layer there."""
        cache, allocator, _ = made
        handle = CacheRequestHandle(name, 0)
        cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(cache, handle, 60.0)
        match = fixtures.match_prefix(cache, tokens)
        if match.last_host_node == cache.root_node_handle():
            return []
        self._load_back_node(cache, match.last_host_node)
        indices = cache.path_device_indices(match.last_host_node)
        return [buffer[indices].clone() for buffer in self.buffers(allocator)]

    def buffers(self, allocator: Any) -> list[torch.Tensor]:
        """Keys and values of each layer on the device."""
        pool = self._get_full_kv_pool(allocator)
        return [*pool.k_buffer, *pool.v_buffer]
