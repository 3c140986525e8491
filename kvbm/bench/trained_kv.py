"""KV of a small transformer trained here: the model of the demo's engine, on the bytes of kvbm's own sources.

What a coder gains depends on how keys and values are distributed, and those of random weights are not distributed as
those of a model that has learned something. A minute on a CPU is enough for a model that has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvbm.core.errors import MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor

    from kvbm.demo.engine import ModelShape, Weights

_BATCH, _WINDOW = 8, 128  # sequences a step, tokens of each
_PROMPT = 1024  # tokens of a sequence whose KV is kept
_RATE = 2e-3
_HELD_OUT = 0.1  # of the text, which training never sees and whose KV is kept


class TrainedKv(NamedTuple):
    """KV as an engine keeps it: keys after RoPE, then values.

    Attributes:
        blocks: (n, block_bytes) uint8, each [layers, 2, block_tokens, kv_heads, head_dim] bfloat16.
        shape: layers, 2, block_tokens, kv_heads, head_dim.
        losses: nats a byte over each tenth of the training.
    """

    blocks: np.ndarray
    shape: tuple[int, ...]
    losses: list[float]


def trained_kv(
    steps: int, blocks: int, seed: int, block_tokens: int = 16, step: Callable[[], object] = lambda: None
) -> TrainedKv:
    """Train for so many steps, then compute the KV of text that was held out.

    Args:
        step: called after each step.
    Raises: MissingExtraError: no torch.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "engine") from error
    from kvbm.demo.engine import Model, ModelShape, Weights

    shape = ModelShape(vocab=256, layers=4, width=256, heads=4, kv_heads=2, head_dim=64, ffn_width=640)
    text = np.frombuffer(_text(), dtype=np.uint8)
    cut = int(len(text) * (1 - _HELD_OUT))
    weights, losses = _train(shape, torch.from_numpy(text[:cut].astype(np.int64)), steps, seed, step)
    half = msgspec.structs.replace(shape, dtype="bfloat16")
    model = Model(Weights(half, {name: tensor.to(torch.bfloat16) for name, tensor in weights.tensors.items()}))
    held = [int(token) for token in text[cut:]]
    dims = half.block_shape(block_tokens)
    pool = torch.zeros((blocks, *dims), dtype=torch.bfloat16)
    in_prompt = _PROMPT // block_tokens
    for first in range(0, blocks, in_prompt):
        table = list(range(first, min(first + in_prompt, blocks)))
        start = first * block_tokens % (len(held) - _PROMPT)
        model.prefill(held[start : start + len(table) * block_tokens], 0, table, pool)
    rows = pool.view(torch.uint8).reshape(blocks, -1).numpy()
    return TrainedKv(rows, dims, losses)


def _text() -> bytes:
    """The sources of this package, one behind the other in the order of their names."""
    root = Path(__file__).parents[1]
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))


def _train(
    shape: ModelShape, tokens: Tensor, steps: int, seed: int, step: Callable[[], object]
) -> tuple[Weights, list[float]]:
    """Weights after so many steps of AdamW on random windows, and the loss on the way."""
    import torch
    from torch.nn import functional

    from kvbm.demo.engine import Weights

    drawn = Weights.random(shape, seed)
    scale = {"embedding": 0.02 * shape.width**0.5 / 8, "query": 1 / 3}  # of a random model's sharp gains
    tensors = {
        name: (tensor * scale.get(name.rpartition(".")[2], 1.0)).requires_grad_()
        for name, tensor in drawn.tensors.items()
    }
    weights = Weights(shape, tensors)
    optimiser = torch.optim.AdamW(tensors.values(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=max(steps, 2))
    random = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - _WINDOW - 1, (_BATCH, 1), generator=random)
        windows = tokens[starts + torch.arange(_WINDOW + 1)]
        logits = _forward(weights, windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        optimiser.step()
        rates.step()
        losses.append(loss.item())
        step()
    trained = {name: tensor.detach() for name, tensor in tensors.items()}
    tenth = max(1, steps // 10)
    return Weights(shape, trained), [float(np.mean(losses[at : at + tenth])) for at in range(0, steps, tenth)]


def _forward(weights: Weights, tokens: Tensor) -> Tensor:
    """Logits [sequences, tokens, vocab]: what `Model.prefill` computes, of many sequences, without a pool and with
    gradients.
    """
    import torch
    from torch.nn import functional

    from kvbm.demo.engine.model import NORM_EPSILON, _rotate

    shape = weights.shape
    sequences, length = tokens.shape
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angles = torch.arange(length)[:, None] * shape.rope_theta ** (-half / shape.head_dim)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]

    def heads(hidden: Tensor, matrix: Tensor, count: int) -> Tensor:
        return functional.linear(hidden, matrix).view(sequences, length, count, shape.head_dim)

    def normed(hidden: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (shape.width,), gain, NORM_EPSILON)

    hidden = weights.embedding[tokens]
    for layer in weights.layers:
        before = normed(hidden, layer.attention_norm)
        queries = _rotate(heads(before, layer.query, shape.heads), cosines, sines)
        keys = _rotate(heads(before, layer.key, shape.kv_heads), cosines, sines)
        values = heads(before, layer.value, shape.kv_heads)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        hidden = hidden + functional.linear(mixed.transpose(1, 2).flatten(2), layer.output)
        before = normed(hidden, layer.ffn_norm)
        gated = functional.silu(functional.linear(before, layer.gate)) * functional.linear(before, layer.up)
        hidden = hidden + functional.linear(gated, layer.down)
    return functional.linear(normed(hidden, weights.final_norm), weights.head)
