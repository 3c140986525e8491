"""What the engine asks of kvbm: a block manager, and its HBM pool as KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvbm.core.errors import LayoutError
from kvbm.core.ids import NamespaceId, SequenceHash, Tier
from kvbm.demo.engine.weights import ModelShape


class HeldPrefix(Protocol):
    """A run of held blocks: its depth in blocks, their HBM slots in order, and how many each tier had."""

    @property
    def depth(self) -> int: ...
    @property
    def slots(self) -> list[int]: ...
    @property
    def hits(self) -> Mapping[Tier, int]: ...


class PagedPool(Protocol):
    """The HBM pool: uint8 [slots, block_bytes]."""

    @property
    def tensor(self) -> Tensor: ...


class ManagerCalls(Protocol):
    """What an engine asks of kvbm. Hashes are packed, 16 bytes a block, in prompt order."""

    @property
    def hbm(self) -> PagedPool:
        """The pool the engine computes in."""

    def hash_tokens(self, tokens: list[int], root: SequenceHash, block_tokens: int, /) -> bytes:
        """Hashes of the full blocks; with the hash of an earlier block as root, the chain goes on from it."""

    def acquire(self, namespace_id: NamespaceId, hashes: bytes, /) -> HeldPrefix:
        """The longest held run, brought to HBM and pinned."""

    def allocate(self, count: int, namespace_id: NamespaceId, /) -> list[int] | None:
        """HBM slots to write, for blocks of a namespace; None when short."""

    def create(
        self, namespace_id: NamespaceId, parent: SequenceHash, start: int, hashes: bytes, slots: list[int], /
    ) -> list[int]:
        """Declare blocks full, `start` blocks after the chain's beginning; answers the slots that hold them, pinned."""

    def unpin(self, slots: list[int], /) -> None:
        """Blocks acquired or created, no longer used by the caller, in prompt order."""

    def release(self, slots: list[int], /) -> None:
        """Slots allocated and never created."""


def pool_view(raw: Tensor, shape: ModelShape, block_tokens: int) -> Tensor:
    """The HBM pool's bytes as KV of a model, sharing memory.

    Args:
        raw: uint8 [slots, block_bytes], contiguous.
    Returns: [slots, layers, 2, block_tokens, kv_heads, head_dim] in the model's dtype.
    Raises: LayoutError: the slots have another size than the model's blocks.
    """
    wanted_bytes = shape.block_bytes(block_tokens)
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != wanted_bytes:
        raise LayoutError(
            f"HBM pool is {raw.dtype} {list(raw.shape)}, the model's blocks are uint8 [slots, {wanted_bytes}]; "
            f"open the pool with block_bytes {wanted_bytes}"
        )
    return raw.view(shape.torch_dtype).view(raw.shape[0], *shape.block_shape(block_tokens))
