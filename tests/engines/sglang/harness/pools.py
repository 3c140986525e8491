"""SGLang's own host pools on a CPU, and backends that its own factory makes for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYERS, HEADS, DIM = 2, 2, 16
PAGE_TOKENS = 4


def mha_pool(layout: str, pages: int, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPoolHost:
    """A host pool of keys and values."""
    device = MHATokenToKVPool(
        size=pages * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return _host_pool(MHATokenToKVPoolHost, device, layout, pages)


def mla_pool(layout: str, pages: int) -> MLATokenToKVPoolHost:
    """A host pool of latents, which every tensor rank has a copy of."""
    device = MLATokenToKVPool(
        size=pages * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return _host_pool(MLATokenToKVPoolHost, device, layout, pages, target_layer_num=LAYERS)


def _host_pool(kind: Any, device: Any, layout: str, pages: int, **more: Any) -> Any:
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=pages * PAGE_TOKENS,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        **more,
    )


def config_of(
    extra: dict[str, Any], *, rank: int = 0, ranks: int = 1, is_mla: bool = False, **more: Any
) -> HiCacheStorageConfig:
    """What SGLang's controller tells a backend of its rank."""
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="test",
        extra_config=extra,
        **more,
    )


def extra_of(folder: Path, **settings: Any) -> dict[str, Any]:
    """The extra config that names kvbm, as a user writes it."""
    return {
        "backend_name": "kvbm",
        "module_path": "kvbm.engines.sglang",
        "class_name": "KvbmHiCache",
        "interface_v1": 1,
        "instance.id": "sglang-test",
        "instance.data_dir": str(folder),
        "pools.host.slots": 32,
        "pools.nvme.slots": 256,
        "onboard.wait_s": 30.0,
        "model": "test",
        "revision": "r1",
        **settings,
    }


def backend_of(pool: Any, extra: dict[str, Any], **place: Any) -> HiCacheStorage:
    """A backend that SGLang's factory makes, with its pool registered as the controller does."""
    made = StorageBackendFactory.create_backend("dynamic", config_of(extra, **place), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def file_backend(pool: Any, folder: Path) -> HiCacheStorage:
    """SGLang's own file backend."""
    made = StorageBackendFactory.create_backend("file", config_of({"file_storage_path": str(folder)}), pool)
    made.register_mem_pool_host(pool)
    return made


def indices_of(pages: Sequence[int]) -> torch.Tensor:
    """The tokens of pages, as SGLang names them."""
    return torch.tensor([page * PAGE_TOKENS + at for page in pages for at in range(PAGE_TOKENS)], dtype=torch.int64)


def set_pages(backend: HiCacheStorage, pool: Any, keys: list[str], pages: Sequence[int]) -> bool:
    """Store pages as SGLang's controller does it with this backend; whether all are stored."""
    if not isinstance(backend, HiCacheFile):
        return all(backend.batch_set_v1(keys, indices_of(pages)))
    return bool(backend.batch_set(keys, [pool.get_data_page(page * PAGE_TOKENS) for page in pages]))


def get_pages(backend: HiCacheStorage, pool: Any, keys: list[str], pages: Sequence[int]) -> list[bool]:
    """Fill pages as SGLang's controller does it with this backend; for each whether the backend gave it."""
    if not isinstance(backend, HiCacheFile):
        return backend.batch_get_v1(keys, indices_of(pages))
    found = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for page, flat in zip(pages, found, strict=True):
        if flat is not None:
            pool.set_from_flat_data_page(page * PAGE_TOKENS, flat)
    return [flat is not None for flat in found]


def chain(prompt: int, pages: int) -> list[str]:
    """The keys that SGLang gives the pages of a prompt."""
    from sglang.srt.mem_cache.utils import get_hash_str

    keys, before = [], None
    for at in range(pages):
        before = get_hash_str([prompt * 1000 + at * PAGE_TOKENS + one for one in range(PAGE_TOKENS)], before)
        keys.append(before)
    return keys


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes of a page as SGLang itself reads them."""
    flat = pool.get_data_page(page * PAGE_TOKENS, flat=True)
    return bytes(flat.contiguous().view(torch.uint8).numpy().tobytes())


def fill(pool: Any, pages: Sequence[int], keys: Sequence[str]) -> list[bytes]:
    """Give pages the bytes that belong to keys, by SGLang's own hand; them."""
    for page, key in zip(pages, keys, strict=True):
        flat = pool.get_dummy_flat_data_page()
        seed = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)
        count = flat.numel() * flat.element_size()
        some = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
        pool.set_from_flat_data_page(page * PAGE_TOKENS, torch.from_numpy(some).view(flat.dtype))
    return [page_bytes(pool, page) for page in pages]


def wipe(pool: Any) -> None:
    """Empty a pool's memory."""
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    for buffer in buffers:
        buffer.zero_()
