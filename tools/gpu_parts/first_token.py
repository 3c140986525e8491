"""The first token of a prompt whose KV lies in HOST: its blocks are copied and its last tokens computed; beside
computing all of it.

What is computed is one layer of each kind with random numbers: its matrix products and its attention. Left out are
norms, activations, the recurrence of recurrent layers, what ranks tell each other, embedding and logits, and a token's
experts are one product. All of it makes computing look faster than it is, and so the copy look worse. Attention is the
quickest that torch has; an engine's own may be quicker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.copies import IN, Moves
from gpu_parts.devices import Device
from gpu_parts.report import FirstTokenRow, Measured, measured
from gpu_parts.shapes import Attention, Layer, Shape

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]  # none keeps all scores


class TokenPlan(NamedTuple):
    """How much is measured.

    Attributes:
        lengths: of prompts, in tokens; multiples of the copies' run.
        samples: of each number, after one that warms up.
    """

    lengths: tuple[int, ...] = (8192, 32768, 131072)
    samples: int = 3


SMALL = TokenPlan(lengths=(128, 256, 512), samples=2)


def measure(shape: Shape, device: Device, plan: TokenPlan, moves: Moves, tokens: int) -> FirstTokenRow:
    """One length.

    The copy goes over the run's slots and rows as often as the prompt has runs; HOST's part is larger than any cache.
    """
    runs = max(1, round(tokens / moves.plan.run_tokens))
    move = moves.move("kvbm auto", IN)

    def copy() -> None:
        for _ in range(runs):
            move()

    copied = _scaled(_sampled(plan.samples, _by_wall(device, copy)), 1e3)
    with torch.inference_mode():
        stepped = _model_ms(shape, device, plan, shape.block_tokens, tokens)
        computed = _model_ms(shape, device, plan, tokens, tokens)
    from_host_ms = copied.value + stepped.value
    return FirstTokenRow(
        shape=shape.name,
        tokens=tokens,
        copied_bytes=runs * moves.run_bytes,
        copy_ms=copied,
        step_ms=stepped,
        from_host_ms=from_host_ms,
        computed_ms=computed,
        times=computed.value / from_host_ms,
    )


def _model_ms(shape: Shape, device: Device, plan: TokenPlan, rows: int, tokens: int) -> Measured:
    """All layers of the last `rows` tokens of a prompt: those of a step one after the other, those of a prompt by one
    of each kind.
    """
    whole: list[float] = [0.0] * plan.samples
    for layer in shape.layers:
        repeat = layer.alike if rows < tokens else 1
        work = layer_work(layer, device, rows, tokens)

        def all_of_it(work: Callable[[], object] = work, repeat: int = repeat) -> None:
            for _ in range(repeat):
                work()

        device.settle()
        times = _sampled(plan.samples, lambda all_of_it=all_of_it: device.timed(all_of_it))  # type: ignore[misc]
        whole = [so_far + one * layer.alike / repeat for so_far, one in zip(whole, times, strict=True)]
        del work, all_of_it
    return _scaled(whole, 1e3)


def layer_work(layer: Layer, device: Device, rows: int, tokens: int) -> Callable[[], object]:
    """One layer of the last `rows` of so many tokens, with tensors of its own; what it returns is its attention's
    output, or its last product's.
    """
    made = {wide: _random(device, rows, wide) for wide in {wide for wide, _ in layer.products}}
    weights = [(wide, _random(device, out, wide)) for wide, out in layer.products]
    attend = None if layer.attention is None else _attention(layer.attention, device, rows, tokens)

    def work() -> torch.Tensor:
        last = None
        for wide, weight in weights:
            last = functional.linear(made[wide], weight)
        if attend is not None:
            return attend()
        assert last is not None
        return last

    return work


def _attention(attention: Attention, device: Device, rows: int, tokens: int) -> Callable[[], torch.Tensor]:
    heads, kv_heads, dim, latent = attention
    if latent and rows < tokens:
        return _latent_attention(attention, device, rows, tokens)
    queries = _random(device, 1, heads, rows, dim)
    keys, values = (
        _random(device, 1, kv_heads, tokens, dim) for _ in range(2)
    )  # narrower values are filled up, as kernels do
    whole = rows == tokens

    def attend(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=whole, enable_gqa=heads != kv_heads
            )

    best = quickest(attend, device)
    return lambda: attend(best)


def quickest(attend: Callable[[SDPBackend], object], device: Device) -> SDPBackend:
    """Of the fused attentions that take these sizes.

    Raises RuntimeError: none does; the message says why each refuses.
    """
    took_s: dict[SDPBackend, float] = {}
    refused = []
    for backend in FUSED:
        try:
            attend(backend)
            device.settle()
            took_s[backend] = device.timed(partial(attend, backend))
        except RuntimeError as error:
            refused.append(f"{backend.name}: {str(error)[:100]}")
    if not took_s:
        raise RuntimeError(f"no fused attention takes these sizes: {'; '.join(refused)}")
    return min(took_s, key=lambda backend: took_s[backend])


def _latent_attention(attention: Attention, device: Device, rows: int, tokens: int) -> Callable[[], torch.Tensor]:
    """A step over latent vectors: queries are brought into their space, so all heads share one key."""
    wide = attention.latent + attention.dim // 3  # 512 + 64 where keys have 128 + 64
    queries, vectors = _random(device, attention.heads * rows, wide), _random(device, tokens, wide)

    def attend() -> torch.Tensor:
        scores = torch.softmax(queries @ vectors.T, dim=-1)
        return scores @ vectors[:, : attention.latent]

    return attend


def _random(device: Device, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device=device.torch_device) * 0.02


def _by_wall(device: Device, work: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        device.settle()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return timed


def _sampled(samples: int, timed: Callable[[], float]) -> list[float]:
    """The first one is the warm-up."""
    return [timed() for _ in range(samples + 1)][1:]


def _scaled(values: list[float], scale: float) -> Measured:
    return measured([value * scale for value in values])
