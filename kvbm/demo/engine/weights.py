"""The shape of a model and its weights: random from a seed, or read from a file."""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from kvbm.core.errors import ConfigError, LayoutError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Random matrices have standard deviation gain / sqrt(fan in). Sharp queries let the context choose the next token: with
# 1.0 a random model soon repeats one token for ever.
RANDOM_GAINS = {"embedding": 8.0, "query": 3.0}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a decoder-only transformer.

    Attributes:
        vocab: token ids run from 0 to vocab - 1; at least 2.
        layers, width: how many layers, and elements of the residual stream.
        heads, kv_heads: query heads, and the key/value heads they share evenly.
        head_dim: elements of one head, even because RoPE turns pairs.
        ffn_width: elements inside the feed-forward part.
        rope_theta: base of the RoPE frequencies.
        max_tokens: longest sequence, prompt and generated tokens together.
        dtype: element type of weights and KV: "float32", "bfloat16" or "float16".
    Raises: LayoutError: dimensions that make no sense together.
    """

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_theta: float = 10_000.0
    max_tokens: int = 4096
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "max_tokens"):
            if getattr(self, name) < 1:
                raise LayoutError(f"model shape: {name} is {getattr(self, name)}; it must be at least 1")
        if self.vocab < 2:
            raise LayoutError(f"model shape: vocab is {self.vocab}; it must be at least 2")
        if self.heads % self.kv_heads:
            raise LayoutError(
                f"model shape: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly; make heads a multiple"
            )
        if self.head_dim % 2:
            raise LayoutError(f"model shape: head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if self.rope_theta <= 0:
            raise LayoutError(f"model shape: rope_theta is {self.rope_theta}; it must be above 0")
        if self.dtype not in DTYPES:
            raise LayoutError(f"model shape: dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch name of `dtype`."""
        return DTYPES[self.dtype]

    def block_shape(self, block_tokens: int) -> tuple[int, int, int, int, int]:
        """Dimensions of one block: [layers, 2 (key, value), block_tokens, kv_heads, head_dim]."""
        return (self.layers, 2, block_tokens, self.kv_heads, self.head_dim)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block."""
        return prod(self.block_shape(block_tokens)) * self.torch_dtype.itemsize

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → dimensions of every weight, matrices as [out, in]; the order in which random weights are drawn."""
        query_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "attention_norm": (self.width,),
            "query": (query_width, self.width),
            "key": (kv_width, self.width),
            "value": (kv_width, self.width),
            "output": (self.width, query_width),
            "ffn_norm": (self.width,),
            "gate": (self.ffn_width, self.width),
            "up": (self.ffn_width, self.width),
            "down": (self.width, self.ffn_width),
        }
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab, self.width)}
        for index in range(self.layers):
            shapes |= {f"layers.{index}.{name}": dims for name, dims in layer.items()}
        return shapes | {"final_norm": (self.width,), "head": (self.vocab, self.width)}


class LayerWeights(NamedTuple):
    """Weights of one layer; dimensions as in `ModelShape.tensor_shapes`."""

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Weights:
    """All weights of a model, immutable by custom.

    Args:
        shape: the model's dimensions.
        tensors: one tensor for each name of `ModelShape.tensor_shapes`, all on one device.
    Raises: LayoutError: a tensor is absent, unknown, or has other dimensions or another dtype than the shape says.
    """

    def __init__(self, shape: ModelShape, tensors: dict[str, Tensor]) -> None:
        wanted = shape.tensor_shapes()
        if wanted.keys() != tensors.keys():
            absent, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
            raise LayoutError(f"weights: absent {absent}, unknown {unknown}; the file belongs to another model shape")
        for name, dims in wanted.items():
            found = tensors[name]
            if tuple(found.shape) != dims or found.dtype != shape.torch_dtype:
                raise LayoutError(
                    f"weights: {name} is {list(found.shape)} {found.dtype}, the model shape wants {list(dims)} "
                    f"{shape.torch_dtype}; use the weights made for this shape"
                )
        self.shape = shape
        self.tensors = tensors
        self.embedding, self.final_norm, self.head = tensors["embedding"], tensors["final_norm"], tensors["head"]
        self.layers = [
            LayerWeights(**{name: tensors[f"layers.{index}.{name}"] for name in LayerWeights._fields})
            for index in range(shape.layers)
        ]

    @classmethod
    def random(cls, shape: ModelShape, seed: int) -> Self:
        """Weights drawn from a seed on the CPU: the same numbers on every device. Norms are ones."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, dims in shape.tensor_shapes().items():
            if len(dims) == 1:
                tensors[name] = torch.ones(dims, dtype=shape.torch_dtype)
                continue
            gain = RANDOM_GAINS.get(name.rpartition(".")[2], 1.0)
            tensors[name] = (torch.randn(dims, generator=generator) * gain / dims[1] ** 0.5).to(shape.torch_dtype)
        return cls(shape, tensors)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Weights from a file that `save` wrote; nothing in the file is executed.

        Raises:
            ConfigError: the file is absent, cannot be read, or is no weights file of this engine.
            LayoutError: its tensors contradict its shape.
        """
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConfigError(f"weights file {path} does not exist; write one with Weights.save") from None
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            # torch's own words run over several sentences, and advise to load what could run code
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no file of torch's"
            raise ConfigError(f"weights file {path} cannot be read ({reason}); write it with Weights.save") from error
        if not isinstance(stored, dict) or stored.keys() != {"shape", "tensors"}:
            raise ConfigError(f"weights file {path} lacks 'shape' and 'tensors'; write it with Weights.save")
        try:
            shape = msgspec.convert(stored["shape"], ModelShape)
            tensors = msgspec.convert(stored["tensors"], dict[str, Tensor])
        except msgspec.ValidationError as error:
            raise ConfigError(f"weights file {path}: {error}; write it with Weights.save") from error
        return cls(shape, tensors)

    def save(self, path: Path) -> None:
        """Write shape and tensors to a file that `load` reads."""
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        torch.save({"shape": msgspec.to_builtins(self.shape), "tensors": tensors}, path)

    def to(self, device: torch.device | str) -> Weights:
        """The same weights on another device."""
        return Weights(self.shape, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device
