"""vLLM's KVCacheConfig → where the bytes of one block lie in the one allocation that holds the KV of a rank, without a
tensor.

vLLM places a layer's page of block b at `offset + layer * layer_stride + b * block_stride`. Pages lie whole, or split
into heads when heads are outside of blocks or layers. KV groups of a hybrid model overlay each other: a block id
belongs to one group at a time, so equal bytes count once, and every group's block is as large as all of them together.

Only attributes of vLLM's classes are used, and their names: the scheduler, which has no tensors, sizes HOST's rows by
this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvbm.core.errors import LayoutError

# The kinds of KV that are served, by the names of vLLM's classes: a block of them is whole once its tokens are
# computed, and says nothing of other blocks. A state is a block too: all that recurrent layers remember behind its last
# token. Whatever is not here is refused, a new class too.
_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding-window",
    "SlidingWindowMLASpec": "sliding-window-mla",
    "ChunkedLocalAttentionSpec": "chunked-local",
    "MambaSpec": "state",
}
# Kinds that are known and not served.
_REFUSED = {
    "RSWASpec": "what a request generates is computed under a window, so its blocks are others than those of a prompt "
    "with the same tokens",
    "SinkFullAttentionSpec": "vLLM 0.32 cannot schedule such a model",
    "CrossAttentionSpec": "its blocks are of the encoder's input, which no hash of the prompt covers",
    "EncoderOnlyAttentionSpec": "it keeps no KV",
    "HiddenStateCacheSpec": "hidden states are handed out, not read again",
}
_STATES = frozenset({"MambaSpec"})
_ALIGNED = "align"  # vLLM's only mode that keeps states at block boundaries, apart from each other
# What of a kind decides how its bytes are read, or what they were computed from.
_WORDS = {
    "block_size": "tokens",
    "num_heads": "heads",
    "head_size": "head_size",
    "head_size_v": "head_size_v",
    "dtype": "dtype",
    "cache_dtype_str": "cache_dtype",
    "kv_quant_mode": "quantized",
    "tokens_per_state": "tokens_per_state",
    "sliding_window": "window",
    "attention_chunk_size": "chunk",
    "page_size_bytes": "page",
    "mamba_type": "recurrence",
    "shapes": "shapes",
    "dtypes": "dtypes",
    "tp_replicated": "replicated",
}


class PlacedLayers(Protocol):
    """vLLM's KVCacheTensor: layers of one shape in the allocation."""

    @property
    def size(self) -> int: ...
    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def layer_stride(self) -> int: ...
    @property
    def block_stride(self) -> int: ...
    @property
    def offset(self) -> int: ...


class LayerGroup(Protocol):
    """vLLM's KVCacheGroupSpec: layers that share block ids."""

    @property
    def layer_names(self) -> Sequence[str]: ...
    @property
    def kv_cache_spec(self) -> Any: ...


class CacheConfig(Protocol):
    """What we ask of vLLM's KVCacheConfig."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_cache_tensors(self) -> Sequence[PlacedLayers]: ...
    @property
    def kv_cache_groups(self) -> Sequence[LayerGroup]: ...


class Region(NamedTuple):
    """Bytes that every block has: block b has them at `offset + b * stride` of the allocation.

    Attributes:
        bytes: how many.
    """

    offset: int
    stride: int
    bytes: int


class BlockRegions(NamedTuple):
    """A block on one rank.

    Attributes:
        regions: its pieces in the order they have in a row, no byte in two of them.
        blocks: how many blocks there are.
        allocation_bytes: of everything.
    """

    regions: tuple[Region, ...]
    blocks: int
    allocation_bytes: int

    @property
    def part_bytes(self) -> int:
        """What a block has on one rank."""
        return sum(region.bytes for region in self.regions)


def block_regions(config: CacheConfig) -> BlockRegions:
    """Where a block's bytes lie.

    Raises: LayoutError: KV that is not served, named with its reason; or places that make no block.
    """
    specs, tensors = layer_specs(config), served_tensors(config)
    if not tensors:
        raise LayoutError("vLLM keeps no KV for this model that prompts share; kvbm has nothing to do")
    sizes = {tensor.size for tensor in tensors}
    if len(sizes) > 1:
        raise LayoutError(f"vLLM's KV lies in allocations of {sorted(sizes)} bytes; one allocation is served")
    found: set[Region] = set()
    for tensor in tensors:
        pages = {specs[name].page_size_bytes for name in tensor.layers}
        if len(pages) != 1:
            raise LayoutError(
                f"vLLM places layers of {sorted(pages)} bytes a block with one stride: {list(tensor.layers)}"
            )
        found.update(_placed(tensor, specs[tensor.layers[0]], config.num_blocks))
    regions = tuple(_overlaid(sorted(found), config.num_blocks))
    ends = max(region.offset + (config.num_blocks - 1) * region.stride + region.bytes for region in regions)
    size = sizes.pop()
    if ends > size:
        raise LayoutError(f"vLLM's blocks end at byte {ends} of an allocation of {size}")
    return BlockRegions(regions, config.num_blocks, size)


def layout_words(config: CacheConfig, group: int, parts: int) -> str:
    """The bytes of a KV group's blocks in words, for a namespace's `layout` field: blocks of other words are not ours.

    How many blocks an engine has is no part of it.

    Args:
        parts: of a block, that ranks of the same layers as this one hold.
    """
    specs = layer_specs(config)
    members = set(config.kv_cache_groups[group].layer_names)
    kind, part_bytes = getattr(config, "kv_cache_layout", None) or "unnamed", block_regions(config).part_bytes
    words = [f"vllm {kind} parts={parts} part_bytes={part_bytes}"]
    for tensor in served_tensors(config):
        if members.isdisjoint(tensor.layers):
            continue
        spec = specs[tensor.layers[0]]
        named = ((word, getattr(spec, attribute, None)) for attribute, word in _WORDS.items())
        known = (f"{word}={_plain(value)}" for word, value in named if value is not None)
        words.append(" ".join([f"layers={len(tensor.layers)} {_KINDS[type(spec).__name__]}", *known]))
    return "; ".join(words)


def why_group_not_served(index: int, group: LayerGroup) -> str:
    """Why a KV group's blocks are not ours to keep, in words; "" when they are."""
    for spec in specs_of(group.kv_cache_spec):
        if type(spec).__name__ not in _KINDS:
            name = type(spec).__name__
            why = _REFUSED.get(name, f"served are {', '.join(_KINDS)}")
            return f"KV group {index} has layers of kind {name}; {why}"
        if is_state(spec) and (mode := getattr(spec, "mamba_cache_mode", None)) != _ALIGNED:
            return (
                f"KV group {index} keeps its states in mode {mode!r}, so none is left behind at a block boundary; "
                f'served is "{_ALIGNED}"'
            )
    if getattr(group, "host_resident", False):
        return f"KV group {index} lies in the host's memory (HiSparse)"
    return ""


def served_groups(config: CacheConfig) -> list[int]:
    """vLLM's indices of the groups that a prefix is made of; what the others hold is a request's own, and is filled
    anew for each.

    Source: vLLM's `KVCacheConfig.prefix_cacheable_group_ids`.
    """
    return [
        index
        for index, group in enumerate(config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True) and getattr(group.kv_cache_spec, "prefix_cacheable", True)
    ]


def served_tensors(config: CacheConfig) -> list[PlacedLayers]:
    """vLLM's placements of layers of those groups."""
    served = {name for index in served_groups(config) for name in config.kv_cache_groups[index].layer_names}
    known = {name for group in config.kv_cache_groups for name in group.layer_names}
    lost = [name for tensor in config.kv_cache_tensors for name in tensor.layers if name not in known]
    if lost:
        raise LayoutError(f"vLLM places KV of {', '.join(lost[:4])}, which no KV group has")
    return [tensor for tensor in config.kv_cache_tensors if not served.isdisjoint(tensor.layers)]


def has_mixed_layers(config: CacheConfig) -> bool:
    """Whether layers of one group differ in kind or size: vLLM places those of each by themselves. In the scheduler's
    config such a group has the kind of its first layer alone.

    Source: vLLM's `get_kv_cache_config_from_groups`, `generate_scheduler_kv_cache_config`.
    """
    return any(
        sum(
            not set(config.kv_cache_groups[index].layer_names).isdisjoint(tensor.layers)
            for tensor in config.kv_cache_tensors
        )
        > 1
        for index in served_groups(config)
    )


def is_state(spec: Any) -> bool:
    """Whether layers of this kind keep a state at block boundaries, and nothing of single tokens."""
    return type(spec).__name__ in _STATES


def tokens_of(spec: Any, decode: int) -> int:
    """Tokens of a group's block.

    Where ranks of decode context parallelism share its tokens, each has `block_size` of them.

    Source: vLLM's `resolve_dcp_kv_block_size`.
    """
    return int(spec.block_size) * (decode if getattr(spec, "dcp_sharded", False) else 1)


def specs_of(spec: Any) -> Iterator[Any]:
    """The specs of a group's layers: itself, or those of a group of uniform type."""
    inner = getattr(spec, "kv_cache_specs", None)
    yield from inner.values() if inner else (spec,)


def layer_specs(config: CacheConfig) -> Mapping[str, Any]:
    """The kind of each layer of the groups that a prefix is made of.

    Raises LayoutError: one that is not served, in words.
    """
    specs: dict[str, Any] = {}
    for tensor in served_tensors(config):
        if getattr(tensor, "host_resident", False):
            raise LayoutError(
                f"vLLM keeps KV of {', '.join(tensor.layers[:2])}… in the host's memory (HiSparse); not served"
            )
    for index in served_groups(config):
        group = config.kv_cache_groups[index]
        if why := why_group_not_served(index, group):
            raise LayoutError(why)
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = group.kv_cache_spec if of_layers is None else of_layers[name]
    return specs


def _placed(tensor: PlacedLayers, spec: Any, blocks: int) -> Iterator[Region]:
    """The pieces of one placement."""
    layers, page = len(tensor.layers), int(spec.page_size_bytes)
    offset, block_stride, layer_stride = tensor.offset, tensor.block_stride, tensor.layer_stride
    heads = int(getattr(spec, "num_heads", 1))
    firsts = [offset + layer * layer_stride for layer in range(layers)]
    if page <= block_stride and (layers == 1 or page <= layer_stride):
        yield from (Region(first, block_stride, page) for first in firsts)
    elif layers * page <= block_stride and page == heads * layer_stride:
        yield Region(
            offset, block_stride, layers * page
        )  # [block, head, layer, …]: a block's layers lie in one another
    elif page == heads * block_stride and (layers == 1 or layer_stride == heads * blocks * block_stride):
        for first in firsts:  # [layer, head, block, …]
            yield from (
                Region(first + head * blocks * block_stride, block_stride, block_stride) for head in range(heads)
            )
    else:
        raise LayoutError(
            f"vLLM places {layers} layers of {heads} heads and {page} bytes a block at strides of {layer_stride} a "
            "layer and"
            f" {block_stride} a block ({blocks} blocks); that is no layout kvbm knows"
        )


def _overlaid(found: Iterable[Region], blocks: int) -> Iterator[Region]:
    """Regions by offset with every byte once: those that reach into one another belong to KV groups that overlay each
    other.
    """
    ends = -1
    together: list[Region] = []
    for region in found:
        if together and region.offset >= ends:
            yield from _merged(together)
            together = []
        together.append(region)
        ends = max(ends, region.offset + (blocks - 1) * region.stride + region.bytes)
    yield from _merged(together)


def _merged(together: list[Region]) -> Iterator[Region]:
    first = together[0]
    strides = {region.stride for region in together}
    if len(strides) > 1:
        raise LayoutError(
            f"vLLM's KV groups overlay each other with blocks {sorted(strides)} bytes apart, so a block's bytes belong "
            "to several of"
            " another group; not served"
        )
    ends = max(region.offset + region.bytes for region in together)
    if ends > first.offset + first.stride:
        raise LayoutError(
            f"vLLM's KV groups overlay each other shifted: a block's {ends - first.offset} bytes do not fit its stride "
            "of"
            f" {first.stride}; not served"
        )
    current = first
    for region in together[1:]:
        end = current.offset + current.bytes
        if region.offset <= end:
            current = current._replace(bytes=max(end, region.offset + region.bytes) - current.offset)
        else:
            yield current
            current = region
    yield current


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(map(_plain, value)) + ")"
    return str(getattr(value, "name", value)).removeprefix("torch.")
