"""Qwen3-Next models for engines of several ranks and for one that is as large as users' own.

`python -m tests.engines.vllm.harness.state_models KIND FOLDER` makes one where transformers is, and prints its folder.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.harness import models

ALTERNATING = ["linear_attention", "full_attention"] * 2  # each of two stages has both
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
_MAKE_WAIT_S = 280.0


def for_ranks(folder: Path) -> None:
    """Four layers, every second with full attention, two heads of states: two stages or two ranks can share it.

    Made for bfloat16. 64 tokens of attention are as large as a state: vLLM's kernel for states goes by as many tokens,
    and rounds otherwise where a prompt is cut in between.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(19)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**_config(layer_types=ALTERNATING, **_HEADS)))
    for layer in model.model.layers[::2]:
        with torch.no_grad():  # forget so slowly that a state remembers hundreds of tokens
            layer.linear_attn.A_log.fill_(math.log(0.002))
            layer.linear_attn.dt_bias.fill_(1.0)
    models.save(model, folder)


def make(kind: str, folder: Path) -> str:
    """The folder of such a model, made in a process of its own unless it is there."""
    command = [sys.executable, "-m", __name__, kind, str(folder)]
    made = subprocess.run(command, check=True, timeout=_MAKE_WAIT_S, stdout=subprocess.PIPE, text=True)
    return made.stdout.splitlines()[-1]


def without_weights(folder: Path) -> str:
    """A configuration alone, for `load_format="dummy"`: hidden size 256, three layers of states and one of attention.

    vLLM makes its blocks 384 tokens long, for a state takes as much as so many tokens of attention.
    """
    shape = _config(
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        hidden_size=256,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def _config(**more: Any) -> dict[str, Any]:
    return models.shape_of(num_hidden_layers=4) | {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **more,
    }


models.KINDS["qwen-next-ranks"] = for_ranks

if __name__ == "__main__":
    print(models.make(sys.argv[1], sys.argv[2]))
