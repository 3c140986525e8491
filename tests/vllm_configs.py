"""vLLM's KVCacheConfig as it lays KV out, of classes with the names and attributes of vLLM's own; and the tensors that
go with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.extras import needed

if TYPE_CHECKING:
    import torch
else:
    torch = needed("torch", "engine")

# Physical orders of [layer, block, head, token, content].
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 4
    num_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    padding_bytes: int = 0
    sliding_window: int | None = None

    @property
    def head_bytes(self) -> int:
        """K and V of a block's tokens, one head."""
        return self.block_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return 2 * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.num_heads * self.head_bytes + self.padding_bytes


class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class MambaSpec:
    """A state in a page as large as that of the attention beside it."""

    block_size: int = 4
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (2, 4, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    page_size_padded: int = 256
    mamba_type: str = "gdn"
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False
    num_heads: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8  # of a view of the bytes; vLLM's class has none

    @property
    def head_bytes(self) -> int:
        return self.page_size_bytes

    @property
    def token_bytes(self) -> int:
        return self.page_size_bytes // self.block_size

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


@dataclass
class Placed:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool = False
    enable_kv_transfer: bool = True
    is_eagle_group: bool = False


@dataclass
class Config:
    num_blocks: int
    kv_cache_tensors: list[Placed]
    kv_cache_groups: list[Group]
    kv_cache_layout: str | None = None
    kv_tp_replicas: int = 1
    kernel_blocks: int = 1  # pieces that the engine's backend see of each block
    tail_bytes: int = field(default=0)  # of the allocation behind all blocks


def config_of(layout: str, groups: list[list[Any]], blocks: int = 6, kernel_blocks: int = 1) -> Config:
    """A config of KV groups, each the specs of its layers in order, as vLLM lays them out.

    Block-outermost layouts pack a block's pages; the others give each layer, or each head of one, a region.
    """
    outermost = layout.startswith("B")
    packed = max(sum(spec.page_size_bytes for spec in group) for group in groups)
    size = packed * blocks
    placed: list[Placed] = []
    named: list[Group] = []
    for at, group in enumerate(groups):
        names = [f"group{at}.layer{layer}" for layer in range(len(group))]
        alike: dict[Any, list[str]] = {}
        for name, spec in zip(names, group, strict=True):
            alike.setdefault(spec, []).append(name)
        offset = 0
        for spec, layers in alike.items():
            page, cell = spec.page_size_bytes, spec.head_bytes
            if layout == "BHLNC":
                strides = (cell, packed)
            elif layout == "LHBNC":
                strides = (page * blocks, cell)
            elif outermost:
                strides = (page, packed)
            else:
                strides = (page * blocks, page)
            placed.append(Placed(size, layers, *strides, offset))
            offset += len(layers) * (page if outermost else page * blocks)
        own = dict(zip(names, group, strict=True))
        named.append(Group(names, group[0] if len(alike) == 1 else UniformTypeKVCacheSpecs(own)))
    return Config(blocks, placed, named, layout, kernel_blocks=kernel_blocks)


def tensors_of(config: Config, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The views an engine has of its layers, [blocks, heads, tokens, content], over one allocation of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = config.kv_cache_tensors[0].size + config.tail_bytes
    memory = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator).to(device)
    views: dict[str, torch.Tensor] = {}
    specs = {name: spec for group in config.kv_cache_groups for name, spec in _specs(group)}
    for tensor in config.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        if config.kernel_blocks > 1:
            spec = replace(spec, block_size=spec.block_size // config.kernel_blocks)
        for layer, name in enumerate(tensor.layers):
            shape = (config.num_blocks * config.kernel_blocks, spec.num_heads, spec.block_size, spec.token_bytes)
            strides = _strides(config, tensor, spec)
            view = memory.as_strided(shape, strides, tensor.offset + layer * tensor.layer_stride)
            views[name] = view.view(spec.dtype)
    return views


def _strides(config: Config, tensor: Placed, spec: Any) -> tuple[int, int, int, int]:
    token = spec.token_bytes
    block = tensor.block_stride // config.kernel_blocks
    match config.kv_cache_layout:
        case "LBNHC" | "BLNHC":
            return block, token, spec.num_heads * token, 1
        case "LHBNC":
            return block, config.num_blocks * spec.head_bytes, token, 1
        case "BHLNC":
            return block, len(tensor.layers) * spec.head_bytes, token, 1
        case _:
            return block, spec.head_bytes, token, 1


def _specs(group: Group) -> list[tuple[str, Any]]:
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return list(group.kv_cache_spec.kv_cache_specs.items())
    return [(name, group.kv_cache_spec) for name in group.layer_names]
