"""The transformer: RMSNorm, RoPE, grouped-query attention and SwiGLU over one paged KV pool.

Keys and values live only in the pool, [slots, layers, 2, block_tokens, kv_heads, head_dim]: one slot is one contiguous
block. A sequence reaches them through its block table, the slots of its blocks in prompt order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvbm.core.errors import LayoutError
from kvbm.demo.engine.weights import ModelShape, Weights

__all__ = ["DecodeInput", "Model", "ModelShape", "Weights"]

NORM_EPSILON = 1e-6


class DecodeInput(NamedTuple):
    """One sequence of a decode step: its last token, that token's position from 0, and its block table."""

    token: int
    position: int
    block_table: Sequence[int]


class _Targets(NamedTuple):
    """Where N new tokens stand: positions, and the slot and place in the block their KV goes to. int64 [N] each."""

    positions: Tensor
    slots: Tensor
    offsets: Tensor


class Model:
    """Runs the weights against a pool on the same device. It holds no state besides them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.shape = weights.shape
        half = torch.arange(0, self.shape.head_dim, 2, device=weights.device, dtype=torch.float32)
        self._frequencies = self.shape.rope_theta ** (-half / self.shape.head_dim)  # [head_dim / 2]

    def prefill(self, tokens: Sequence[int], start: int, block_table: Sequence[int], pool: Tensor) -> Tensor:
        """Compute a chunk of a prompt: write its KV and give the logits after its last token.

        The chunk attends to everything before it, so positions 0 … start - 1 must already be in the pool.

        Args:
            tokens: T token ids, at least 1, at positions start … start + T - 1.
            start: position of the first one, from 0.
            block_table: slots in prompt order, enough for start + T tokens.
            pool: [slots, layers, 2, block_tokens, kv_heads, head_dim].
        Returns: float32 logits, [vocab].
        Raises: LayoutError: the pool, the block table or the tokens do not fit the model.
        """
        end = start + len(tokens)
        block_tokens = self._check_pool(pool)
        if not tokens or start < 0:
            raise LayoutError(
                f"prefill of {len(tokens)} tokens from position {start}; give at least 1 token, from 0 on"
            )
        self._check_tokens(tokens, end)
        blocks = _blocks_for(end, block_table, block_tokens, pool)
        table = torch.tensor(blocks, device=pool.device)
        positions = torch.arange(start, end, device=pool.device)
        targets = _Targets(positions, table[positions // block_tokens], positions % block_tokens)
        # rows are the chunk's tokens, columns all positions up to its end; a whole prompt is plain causal attention
        mask = positions[:, None] >= torch.arange(end, device=pool.device) if start else None

        def attend(layer: int, queries: Tensor) -> Tensor:
            held = pool[:, layer].index_select(0, table)  # [blocks, 2, block_tokens, kv_heads, head_dim]
            keys, values = held.transpose(0, 1).flatten(1, 2)[:, :end].transpose(1, 2)  # [kv_heads, end, head_dim] each
            return self._attention(queries.transpose(0, 1)[None], keys[None], values[None], mask)[0].transpose(0, 1)

        with torch.inference_mode():
            hidden = self._layers(torch.tensor(tokens, device=pool.device), targets, pool, attend)
            return self._logits(hidden[-1:])[0]

    def decode(self, batch: Sequence[DecodeInput], pool: Tensor) -> Tensor:
        """Compute one token for each of n sequences: write its KV and give the logits after it.

        Args:
            batch: n sequences, at least 1, of any lengths.
            pool: [slots, layers, 2, block_tokens, kv_heads, head_dim].
        Returns: float32 logits, [n, vocab].
        Raises: LayoutError: the pool, a block table or a token does not fit the model.
        """
        block_tokens = self._check_pool(pool)
        if not batch:
            raise LayoutError("decode of 0 sequences; give at least 1")
        tables = []
        for token, position, block_table in batch:
            if position < 0:
                raise LayoutError(f"decode at position {position}; positions count from 0")
            self._check_tokens((token,), position + 1)
            tables.append(_blocks_for(position + 1, block_table, block_tokens, pool))
        longest = max(len(blocks) for blocks in tables)
        # a shorter table is padded with its own first slot: what lies there is masked below
        padded = torch.tensor([[*b, *[b[0]] * (longest - len(b))] for b in tables], device=pool.device)
        positions = torch.tensor([entry.position for entry in batch], device=pool.device)
        slots = padded.gather(1, positions[:, None] // block_tokens)[:, 0]
        targets = _Targets(positions, slots, positions % block_tokens)
        hidden_from = torch.arange(longest * block_tokens, device=pool.device) > positions[:, None]  # [n, tokens]
        mask = ~hidden_from[:, None, None, :]

        def attend(layer: int, queries: Tensor) -> Tensor:
            held = pool[:, layer].index_select(0, padded.flatten()).reshape(*padded.shape, *pool.shape[2:])
            held = held.transpose(1, 2).flatten(2, 3)  # [n, 2, tokens, kv_heads, head_dim]
            held = held.masked_fill(hidden_from[:, None, :, None, None], 0)  # never-written bytes may be NaN
            keys, values = held.transpose(2, 3).unbind(1)  # [n, kv_heads, tokens, head_dim] each
            return self._attention(queries[:, :, None], keys, values, mask)[:, :, 0]

        with torch.inference_mode():
            tokens = torch.tensor([entry.token for entry in batch], device=pool.device)
            return self._logits(self._layers(tokens, targets, pool, attend))

    def _layers(self, tokens: Tensor, at: _Targets, pool: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Hidden states [N, width] of N tokens; each layer writes its KV to the pool, then attends over it.

        Args:
            attend: (layer, queries [N, heads, head_dim]) → [N, heads, head_dim].
        """
        shape, count = self.shape, len(tokens)
        angles = at.positions[:, None] * self._frequencies
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]  # [N, 1, head_dim / 2]
        hidden = self.weights.embedding[tokens]
        for index, layer in enumerate(self.weights.layers):
            normed = functional.rms_norm(hidden, (shape.width,), layer.attention_norm, NORM_EPSILON)
            queries = functional.linear(normed, layer.query).view(count, shape.heads, shape.head_dim)
            keys = functional.linear(normed, layer.key).view(count, shape.kv_heads, shape.head_dim)
            values = functional.linear(normed, layer.value).view(count, shape.kv_heads, shape.head_dim)
            pool[:, index, 0][at.slots, at.offsets] = _rotate(keys, cosines, sines)
            pool[:, index, 1][at.slots, at.offsets] = values
            mixed = attend(index, _rotate(queries, cosines, sines))
            hidden = hidden + functional.linear(mixed.reshape(count, -1), layer.output)
            normed = functional.rms_norm(hidden, (shape.width,), layer.ffn_norm, NORM_EPSILON)
            gated = functional.silu(functional.linear(normed, layer.gate)) * functional.linear(normed, layer.up)
            hidden = hidden + functional.linear(gated, layer.down)
        return hidden

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Grouped-query attention over [n, heads, tokens, head_dim]; causal when there is no mask."""
        grouped = self.shape.heads != self.shape.kv_heads
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = functional.rms_norm(hidden, (self.shape.width,), self.weights.final_norm, NORM_EPSILON)
        return functional.linear(normed, self.weights.head).float()

    def _check_pool(self, pool: Tensor) -> int:
        """The pool's block_tokens. Raises LayoutError when it cannot hold this model's blocks."""
        block_tokens = pool.shape[3] if pool.dim() == 6 else 0
        if block_tokens < 1 or tuple(pool.shape[1:]) != self.shape.block_shape(block_tokens):
            wanted = f"[slots, {self.shape.layers}, 2, block_tokens, {self.shape.kv_heads}, {self.shape.head_dim}]"
            raise LayoutError(f"pool is {list(pool.shape)}, the model wants {wanted}; make the pool for this model")
        if pool.dtype != self.shape.torch_dtype or pool.device != self.weights.device:
            raise LayoutError(
                f"pool is {pool.dtype} on {pool.device}, the weights are {self.shape.torch_dtype} on "
                f"{self.weights.device}; use one dtype and Weights.to(device)"
            )
        return block_tokens

    def _check_tokens(self, tokens: Sequence[int], end: int) -> None:
        """Raises LayoutError when a token is outside the vocabulary or the sequence too long."""
        if min(tokens) < 0 or max(tokens) >= self.shape.vocab:
            raise LayoutError(
                f"tokens from {min(tokens)} to {max(tokens)}, the model knows 0 to {self.shape.vocab - 1}; "
                f"use its vocabulary"
            )
        if end > self.shape.max_tokens:
            raise LayoutError(f"{end} tokens, the model takes {self.shape.max_tokens}; shorten the sequence")


def _blocks_for(end: int, block_table: Sequence[int], block_tokens: int, pool: Tensor) -> Sequence[int]:
    """The part of a block table that holds positions 0 … end - 1. Raises LayoutError when it is short or wrong."""
    count = -(-end // block_tokens)
    if len(block_table) < count:
        raise LayoutError(
            f"block table has {len(block_table)} slots of {block_tokens} tokens, {end} tokens want {count}; "
            f"allocate the slots first"
        )
    blocks = block_table[:count]
    if min(blocks) < 0 or max(blocks) >= pool.shape[0]:
        raise LayoutError(
            f"block table names slots {min(blocks)} to {max(blocks)}, the pool has 0 to {pool.shape[0] - 1}; "
            f"use slots of this pool"
        )
    return blocks


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """RoPE: turn element i of the first half of each head with element i of the second, in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(heads.dtype)
