"""Llamas with random weights, made on the spot: no download, and no text to understand either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """A Llama's dimensions. Attention heads and KV heads are of the same size."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    dtype: str
    context_tokens: int = 8192

    @property
    def parameters(self) -> int:
        """Weights, embeddings among them."""
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        return 2 * self.vocabulary * self.hidden + self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return 2 * self.layers * self.kv_heads * self.head * (4 if self.dtype == "float32" else 2)

    @property
    def words(self) -> str:
        """What the table says of it."""
        return (
            f"Llama of {self.parameters / 1e6:,.0f} M random {self.dtype} parameters, {self.layers} layers,"
            f" {self.kv_bytes_per_token / 1024:g} KiB of KV a token"
        )


TINY = Shape(2, 64, 128, 4, 2, 32, 512, "float32")
MIDDLE = Shape(8, 512, 1536, 8, 2, 64, 8192, "float32")  # a step takes a CPU as long as a large model's takes a GPU
LARGE = Shape(16, 2048, 8192, 32, 8, 64, 32_000, "bfloat16")  # for a GPU


def make(shape: Shape, folder: str) -> str:
    """The folder of a model, made unless it is there. Needs transformers, so it runs where engines do."""
    made = Path(folder) / f"llama-{shape.parameters}-{shape.dtype}"
    if (made / "made.json").exists():
        return str(made)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=shape.context_tokens,
        initializer_range=0.3 if shape.hidden < 256 else 0.05,  # sharp enough that outputs depend on the prompt
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(made)
    (made / "made.json").write_text(json.dumps(shape._asdict()))
    return str(made)
