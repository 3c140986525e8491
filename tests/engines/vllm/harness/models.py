"""Tiny models with random weights, float32, made on the spot: a Llama, a Gemma 3 with sliding windows, a Qwen3-Next
with states.

Weights are larger than training would begin with, so that attention is sharp, logits lie apart and what a prompt said
hundreds of tokens ago still shows in the output: a wrong block must be seen. `test_harness.py` measures that.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from pathlib import Path
from typing import Any

VOCABULARY = 512
# How a model with states is run: its kernels take no float32, and states in it are the same however a prompt is cut
STATES = {
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
}
WINDOW_TOKENS = 96  # of a sliding layer: three blocks
_ADAPTER_RANK = 8
_VERSION = 1  # of what is made here; raise it with any change


def llama(folder: Path, seed: int = 7) -> None:
    """Two layers, four heads over two KV heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    save(LlamaForCausalLM(LlamaConfig(**shape_of(num_hidden_layers=2))), folder)


def gemma(folder: Path) -> None:
    """Six layers, every third with full attention, the others with a sliding window: vLLM makes several KV cache groups
    of them.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(11)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **shape_of(num_hidden_layers=6),
        layer_types=kinds,
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
    )
    save(Gemma3ForCausalLM(config), folder)


def qwen_next(folder: Path) -> None:
    """Four layers, three with a recurrent state and one with full attention: vLLM makes a KV cache group of each.

    Made for bfloat16.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(13)
    shared = shape_of(
        num_hidden_layers=4, num_key_value_heads=4, head_dim=128
    )  # 64 tokens of it are as large as a state
    config = Qwen3NextConfig(
        **shared,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    model = Qwen3NextForCausalLM(config)
    for layer in model.model.layers[:3]:
        with torch.no_grad():  # forget so slowly that a state remembers hundreds of tokens
            layer.linear_attn.A_log.fill_(math.log(0.002))
            layer.linear_attn.dt_bias.fill_(1.0)
    save(model, folder)


def llama_of_words(folder: Path) -> None:
    """The Llama with a tokenizer: a token a word, or one for all words it does not know."""
    llama(folder)
    _save_words(folder)


def llama_of_depth(folder: Path) -> None:
    """For benchmarks: eight layers, whose blocks of 32 tokens have 256 KiB; with the same tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(17)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    config = LlamaConfig(**shape_of(num_hidden_layers=8) | shape | {"initializer_range": 0.1})
    save(LlamaForCausalLM(config), folder)
    _save_words(folder)


def _save_words(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "The", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "."]
    words += [f"word-{at}" for at in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)


def adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter for the Llama: random weights, so large that keys and values are others with it.

    Over what was in the folder.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors, outputs = {}, {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    for layer in range(2):
        for name, output in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(_ADAPTER_RANK, 64, generator=generator) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(output, _ADAPTER_RANK, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _ADAPTER_RANK, "lora_alpha": 2 * _ADAPTER_RANK, "target_modules": list(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


KINDS = {
    "llama": llama,
    "llama-2": lambda folder: llama(folder, 8),
    "llama-words": llama_of_words,
    "llama-deep": llama_of_depth,
    "gemma": gemma,
    "qwen-next": qwen_next,
}


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


def shape_of(**more: Any) -> dict[str, Any]:
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


def save(model: Any, folder: Path) -> None:
    import torch

    model.to(torch.float32).save_pretrained(folder)
