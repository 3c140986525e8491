"""Tiny models with random weights, float32, made on the spot: a Llama and a Gemma 3 with sliding windows.

Weights are larger than training would begin with, so that attention is sharp, logits lie apart and what a prompt said hundreds of tokens
ago still shows in the output: a wrong block must be seen. `test_harness.py` measures that.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW_TOKENS = 96  # of a sliding layer: three blocks
_VERSION = 1  # of what is made here; raise it with any change


def llama(folder: Path, seed: int = 7) -> None:
    """Two layers, four heads over two KV heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    _save(LlamaForCausalLM(LlamaConfig(**_shared(num_hidden_layers=2))), folder)


def gemma(folder: Path) -> None:
    """Six layers, every third with full attention, the others with a sliding window: vLLM makes several KV cache groups of them."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(11)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **_shared(num_hidden_layers=6),
        layer_types=kinds,
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
    )
    _save(Gemma3ForCausalLM(config), folder)


KINDS = {"llama": llama, "llama-2": lambda folder: llama(folder, 8), "gemma": gemma}


def make(kind: str, folder: str) -> str:
    """The folder of a model, made unless it is there. Needs transformers, so it runs where engines do."""
    made = Path(folder) / f"{kind}-{_VERSION}"
    if not made.exists():
        new = made.with_name(f"{made.name}.{uuid.uuid4().hex}")
        KINDS[kind](new)
        try:
            new.rename(made)  # whole or not at all; another test process may have been quicker
        except OSError:
            shutil.rmtree(new)
    return str(made)


def _shared(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }


def _save(model: Any, folder: Path) -> None:
    import torch

    model.to(torch.float32).save_pretrained(folder)
