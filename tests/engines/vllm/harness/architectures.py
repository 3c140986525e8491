"""A small configuration of every architecture of vLLM's registry that can have one: what a checkpoint's config.json
says.

Most are the defaults of a configuration class: of transformers, where one of its auto mappings names the architecture
or a class is named like it, or of vLLM. Models whose configuration is code beside their weights have one written here:
sizes are made up, kinds of layers are not. An attribute that a default leaves out, and vLLM's model asks for, is one
of `USUAL`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_MOST_LAYERS = 8
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
_SUFFIX = re.compile(r"(For[A-Z]\w*|Model|LMHeadModel|RealtimeGeneration|ChatModel)$")
_FIRST = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)


class Configuration(NamedTuple):
    """What makes one architecture.

    Attributes:
        values: of its config.json.
        arguments: of vLLM's EngineArgs, besides.
        environment: variables that the engine needs.
        on_cpu: the model computes numbers while it is made, so it cannot be on the meta device.
        remote: the class of its configuration, where neither transformers nor vLLM has one.
    """

    values: dict[str, Any]
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    on_cpu: bool
    remote: type | None


class _Entry(NamedTuple):
    """What is written here of an architecture: where its configuration begins, and what is different.

    Attributes:
        source: ("transformers", model type), ("vllm", class), ("written", model type), or None for what its name says.
        remove: values that are not written down.
        class_name: of its configuration; vLLM asks some for it.
        whole: all layers are made.
    """

    source: tuple[str, str] | None
    values: dict[str, Any]
    remove: tuple[str, ...] = ()
    class_name: str = "Remote"
    arguments: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    on_cpu: bool = False
    whole: bool = False


def usual(**values: Any) -> _Entry:
    """The configuration of its name, with some values."""
    return _Entry(None, values)


def of_transformers(model_type: str, **values: Any) -> _Entry:
    """A default of transformers, with some values."""
    return _Entry(("transformers", model_type), values)


def of_vllm(class_name: str, **values: Any) -> _Entry:
    """A default of vLLM, with some values."""
    return _Entry(("vllm", class_name), values)


def written(model_type: str, **values: Any) -> _Entry:
    """A decoder's configuration that no class has, with some values."""
    return _Entry(("written", model_type), DECODER | values)


def wrapping(model_type: str, text: dict[str, Any], **values: Any) -> _Entry:
    """The configuration of a model of images around a language model, that no class has."""
    sizes = {"hidden_size": 512, "vocab_size": 1024, "text_config": text, "vision_config": TOWER}
    return _Entry(("written", model_type), sizes | WRAPPER | values)


def text(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    """The language model in another one."""
    return DECODER | {"model_type": model_type, "architectures": [architecture]} | values


def default(model_type: str, **values: Any) -> dict[str, Any]:
    """The defaults of transformers, inside of another configuration."""
    return {"_default": model_type} | values


DECODER: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "use_expert_bias": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": 192,
}
TOWER: dict[str, Any] = {
    "hidden_size": 256,
    "image_size": 224,
    "patch_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "intermediate_size": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    "initializer_factor": 1.0,
    "depth": 2,
    "embed_dim": 256,
    "num_heads": 4,
    "in_channels": 3,
    "mlp_ratio": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 512,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "width": 256,
    "layers": 2,
    "heads": 4,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [],
    "num_position_embeddings": 256,
    "use_bias": False,
}
WRAPPER: dict[str, Any] = {
    "force_image_size": 224,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internlm2-chat",
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_token_id": 5,
    "video_token_id": 6,
    "image_token_index": 5,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
}
# What vLLM's models ask of a configuration whose defaults do not say it.
USUAL: dict[str, Any] = (
    DECODER
    | EXPERTS
    | {
        "activation_function": "gelu",
        "additional_vocab_size": 128,
        "apply_vit_abs_pos_embed": True,
        "att_impl_type": "GQA",
        "attention_gate_func": None,
        "attention_layer_norm": False,
        "attention_multiplier": 1.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_logit_softcapping": None,
        "audio_encoder_conf": {},
        "audio_token_id": 7,
        "bias": False,
        "block_auto_adjust_ff_dim": True,
        "block_dim": 512,
        "block_ff_dim": 1024,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "clip_qkv": None,
        "compress_rope_theta": 1e4,
        "decoder_sparse_step": 1,
        "deepstack_visual_indexes": [],
        "dense_intermediate_size": 512,
        "dim_model_base": 256,
        "downsample_factor": 4,
        "drop_vision_last_layer": False,
        "embed_dim": 512,
        "embedding_dim": 128,
        "embedding_dropout": 0.0,
        "embedding_multiplier": 1.0,
        "embedding_size": 1024,
        "encoder_downsample_rate": 2,
        "expert_hidden_dim": 256,
        "ffn_hidden_size": 1024,
        "final_logit_softcapping": None,
        "fp32_residual_connection": False,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "heads": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_dropout": 0.0,
        "hidden_dropout_prob": 0.0,
        "hidden_stride": 2,
        "hop_length": 160,
        "im_patch_id": 5,
        "image_size": 224,
        "image_tag_type": "",
        "image_token_id": 5,
        "image_token_index": 5,
        "img_context_token_id": 5,
        "img_token_compression_config": {},
        "index_head_dim": 128,
        "index_n_heads": 8,
        "index_topk": 256,
        "indexer_rope_interleave": False,
        "layer_group_size": 4,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "layer_norm_type": "rms",
        "layernorm_epsilon": 1e-5,
        "layernorm_num_groups": 1,
        "layers": 2,
        "logits_scaling": 1.0,
        "ls_init_value": 0.1,
        "mhc": False,
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "mla_use_nope": False,
        "mlp_bias": False,
        "mlp_only_layers": [],
        "mlp_ratio": 4.0,
        "mm_hidden_size": 256,
        "moe_gate_bias": False,
        "moe_shared_expert_intermediate_size": 256,
        "mova_num_experts": 0,
        "mova_num_experts_per_tok": 0,
        "multi_query_group_num": 2,
        "multimodal_projector_bias": True,
        "n_head": 8,
        "n_layer": 4,
        "norm_after": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "num_blocks": 2,
        "num_channels": 3,
        "num_hash_layers": 0,
        "num_layers": 4,
        "num_local_experts": 8,
        "num_mtp_modules": 0,
        "num_patches": 256,
        "o_groups": 4,
        "o_lora_rank": 256,
        "original_rope": True,
        "output_dim": 512,
        "padded_vocab_size": 1024,
        "partial_rotary_factor": 1.0,
        "patch_size": 14,
        "pixel_hidden_size": 1280,
        "pixel_shuffle_factor": 4,
        "position_embedding_type": "absolute",
        "post_norm": True,
        "projector_bias": False,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 512,
        "q_lora_rank": 512,
        "qk_layernorm": False,
        "qkv_bias": False,
        "qkv_proj_bias": False,
        "query_key_norm": False,
        "query_pre_attn_scalar": 64,
        "residual_multiplier": 1.0,
        "rope_head_dim": 64,
        "rope_local_theta": 1e4,
        "rotary_dim": 64,
        "rotary_emb_base": 1e4,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "route_norm": True,
        "route_scale": 1.0,
        "router_scaling_factor": 1.0,
        "router_score_func": "sigmoid",
        "sampling_rate": 16000,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "score_func": "sigmoid",
        "short_conv_kernel_size": 4,
        "sliding_window_size": 128,
        "spatial_conv_size": 2,
        "spatial_merge_size": 2,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 1e4,
        "swa_v_head_dim": 64,
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 7.0,
        "template": "internlm2",
        "temporal_conv_size": 2,
        "temporal_patch_size": 2,
        "type_vocab_size": 2,
        "use_abs_posemb": True,
        "use_bias": False,
        "use_cls_token": False,
        "use_embed_norm": False,
        "use_ln_post": True,
        "use_ln_pre": True,
        "use_mup": False,
        "use_qk_norm": False,
        "use_qkv_bias": False,
        "use_rope2d": True,
        "use_temporal_conv": True,
        "v_head_dim": 64,
        "video_token_id": 6,
        "vision_feature_layer": -1,
        "vision_n_heads": 8,
        "visual_token_window_size": 64,
        "vit_hidden_size": 256,
        "vit_window_attn_types": [-1, -1],
        "weight_tying": False,
        "width": 512,
        "window_size": 400,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    }
)
_QWEN2 = text("qwen2", "Qwen2ForCausalLM")
_QWEN3 = text("qwen3", "Qwen3ForCausalLM")
_LLAMA = text("llama", "LlamaForCausalLM")
_DEEPSEEK = default("deepseek_v2", architectures=["DeepseekV2ForCausalLM"], num_hidden_layers=4)
_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
# Mamba and attention, without experts, whose kernel no CPU has.
_NEMOTRON_H = {"layers_block_type": ["mamba", "mlp", "full_attention", "mamba", "mlp"]}
_DELTA = {  # Kimi's delta attention
    "short_conv_kernel_size": 4,
    "head_dim": 128,
    "num_heads": 8,
    "kda_layers": [1, 2, 3, 5, 6, 7],
    "full_attn_layers": [4, 8],
}
_KIMI = LATENT | {
    "linear_attn_config": _DELTA,
    "num_hidden_layers": 8,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "mla_use_nope": True,
}
_BAILING = EXPERTS | LATENT | {"layer_group_size": 4, "no_kda_lora": True, "kda_safe_gate": True}
_INKLING = {
    "local_layer_ids": [0, 1, 2, 4, 5, 6],
    "num_hidden_layers": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "shared_expert_sink": True,
    "use_sconv": True,
}
_SPARSE = {
    "output_gate_type": "silu",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 256,
    "indexer_compress_ratio": 4,
}
_CHATGLM = {
    "num_layers": 4,
    "padded_vocab_size": 1024,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "kv_channels": 64,
    "num_attention_heads": 8,
    "seq_length": 4096,
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "rope_ratio": 1,
    "original_rope": True,
}
_DEEPSEEK_V4 = (
    DECODER
    | EXPERTS
    | LATENT
    | {"head_dim": 512, "q_lora_rank": 512, "compress_ratios": [0, 4, 128, 4], "sliding_window": 128}
)
_BLOCK = {
    "attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
}
_BERT = {"hidden_act": "gelu", "num_key_value_heads": 8}
_NEW = written("new", **_BERT, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True)._replace(
    class_name="NewConfig"
)
_CLIP_OF_GLM = {
    "hidden_size": 256,
    "image_size": 224,
    "patch_size": 14,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "in_channels": 3,
    "hidden_act": "gelu",
    "intermediate_size": 512,
    "layer_norm_eps": 1e-5,
    "dropout_prob": 0.0,
    "scaling_factor": 8,
    "num_positions": 257,
}
_CONFORMER = {  # CohereAsr's encoder
    "d_model": 512,
    "n_heads": 8,
    "n_layers": 2,
    "feat_in": 80,
    "feat_out": -1,
    "ff_expansion_factor": 4,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 64,
    "conv_kernel_size": 9,
    "pos_emb_max_len": 5000,
    "self_attention_model": "rel_pos",
    "xscaling": False,
    "untie_biases": True,
    "causal_downsampling": False,
    "conv_context_size": None,
    "conv_norm_type": "batch_norm",
    "att_context_size": [-1, -1],
    "use_bias": True,
    "dropout": 0.0,
}
_SPECTROGRAM = {
    "features": 80,
    "sample_rate": 16000,
    "window_size": 0.025,
    "window_stride": 0.01,
    "n_fft": 512,
    "window": "hann",
    "normalize": "per_feature",
    "dither": 0.0,
    "log": True,
    "frame_splicing": 1,
    "pad_to": 0,
    "pad_value": 0.0,
}
_SEQUENCE_DECODER = {
    "num_attention_heads": 8,
    "hidden_size": 512,
    "num_layers": 4,
    "inner_size": 1024,
    "max_sequence_length": 1024,
    "hidden_act": "relu",
}
_PHI_IMAGES = {"hd_transform_order": "sub_glb", "use_hd_transform": True, "with_learnable_separator": True}
_RUNNER_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

_WRITTEN: dict[str, _Entry] = {
    "DeepseekV32ForCausalLM": of_transformers("deepseek_v32"),
    "FunASRForConditionalGeneration": written("funasr"),
    "IQuestLoopCoderForCausalLM": written("iquestloopcoder"),
    "InternLM2ForCausalLM": written("internlm2"),
    "InternLM2ForRewardModel": written("internlm2"),
    "MiniCPMForCausalLM": written("minicpm"),
    "MolmoForCausalLM": written("molmo"),
    "Param2MoEForCausalLM": written("param2moe", **EXPERTS),
    "SolarForCausalLM": written("solar"),
    "TeleFLMForCausalLM": written("teleflm"),
    "MossAudioModel": written("mossaudio")._replace(on_cpu=True),
    "ApertusForCausalLM": usual(
        hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2
    )._replace(on_cpu=True),
    "BailingMoeForCausalLM": written(
        "bailing_moe",
        **EXPERTS | {"score_function": "softmax", "use_expert_bias": False, "moe_router_enable_expert_bias": False},
    ),
    "BailingMoeV2ForCausalLM": written("bailing_moe_v2", **EXPERTS),
    "BailingMoeV2_5ForCausalLM": written("bailing_hybrid", **EXPERTS, **LATENT, layer_group_size=4),
    "BailingMoeV3ForCausalLM": written("bailing_hybrid", **_BAILING),
    "BailingMoeV3VLForConditionalGeneration": usual(text_config={"no_kda_lora": True, "kda_safe_gate": True})._replace(
        whole=True
    ),
    "BeeForConditionalGeneration": wrapping("bee", _QWEN3, vision_config=default("siglip_vision_model")),
    "BertSpladeSparseEmbeddingModel": of_transformers("bert"),
    "BgeM3EmbeddingModel": of_transformers("xlm-roberta"),
    "BloomForCausalLM": usual()._replace(on_cpu=True),
    "ClefOmniForJointSchema": of_transformers(
        "qwen3_omni_moe",
        joint_head_config={
            "hidden_size": 2048,
            "width": 256,
            "routing_layers": 2,
            "layers": 1,
            "heads": 4,
            "feedforward": 512,
        },
    ),
    "CohereAsrForConditionalGeneration": written(
        "cohere_asr",
        is_encoder_decoder=True,
        transf_decoder={"config_dict": _SEQUENCE_DECODER},
        head={"num_classes": 1024, "hidden_size": 512},
        encoder=_CONFORMER,
        preprocessor=_SPECTROGRAM,
    )._replace(on_cpu=True),
    "CohereCompassForConditionalGeneration": usual(tie_word_embeddings=True),
    "ColBERTJinaRobertaModel": written(
        "xlm-roberta-flash",
        **_BERT,
        position_embedding_type="rotary",
        emb_pooler=None,
        use_flash_attn=False,
        load_trained_adapters=False,
    )._replace(class_name="XLMRobertaFlashConfig"),
    "ColBERTLfm2Model": of_transformers("lfm2"),
    "ColBERTModernBertModel": of_transformers("modernbert"),
    "ColModernVBertForRetrieval": written(
        "modernvbert_written", text_config=default("modernbert"), vision_config=default("siglip_vision_model")
    ),
    "ColQwen3_5": of_transformers("qwen3_5", retrieval_attention_contract="causal"),
    "Cosmos3ForConditionalGeneration": of_transformers("qwen3_vl"),
    "DbrxForCausalLM": usual(
        ffn_config={"_instead": True, "ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 1},
        attn_config={"_instead": True, "kv_n_heads": 2, "clip_qkv": 8},
    ),
    "DeciLMForCausalLM": written("nemotron-nas", block_configs=[_BLOCK] * 4),
    "DeepseekForCausalLM": written("deepseek", **EXPERTS),
    "DeepseekOCR2ForCausalLM": of_vllm(
        "DeepseekVLV2Config",
        tile_tag="2D",
        language_config=_DEEPSEEK,
        projector_config={"projector_type": "linear", "input_dim": 896, "n_embed": 1280},
    )._replace(remove=("text_config",)),
    "DeepseekOCRForCausalLM": of_vllm("DeepseekVLV2Config", tile_tag="2D", language_config=_DEEPSEEK)._replace(
        remove=("text_config",)
    ),
    "DeepseekV4ForCausalLM": of_vllm("DeepseekV4Config", **_DEEPSEEK_V4),
    "DeepseekV4ForConditionalGeneration": of_vllm("DeepseekV4Config", **_DEEPSEEK_V4),
    "DeepseekV41ForCausalLM": of_vllm("DeepseekV41Config", **_DEEPSEEK_V4),
    "DeepseekVLV2ForCausalLM": of_vllm("DeepseekVLV2Config", tile_tag="2D", language_config=_DEEPSEEK)._replace(
        remove=("text_config",)
    ),
    "DiffusionGemmaForBlockDiffusion": usual()._replace(environment=_RUNNER_V2),
    "DotsOCRForCausalLM": written("dots_ocr", vision_config=TOWER),
    "Eagle2_5_VLForConditionalGeneration": wrapping("eagle_2_5_vl", _QWEN2),
    "Ernie4_5_VLMoeForConditionalGeneration": usual(vision_config={"embed_dim": 1280, "hidden_size": 1280}),
    "ExaoneForCausalLM": written("exaone", activation_function="silu"),
    "FireRedASR2ForConditionalGeneration": written(
        "fireredasr2", audio_encoder_conf={"idim": 80, "n_layers_enc": 2, "n_head": 4, "d_model": 512}
    )._replace(on_cpu=True),
    "FunAudioChatForConditionalGeneration": usual(audio_config={"pad_token_id": 0, "codebook_size": 512}),
    "GLM4VForCausalLM": written("chatglm_4v", **_CHATGLM, vision_config=_CLIP_OF_GLM),
    "Gemma3nForCausalLM": usual()._replace(on_cpu=True),
    "Gemma3nForConditionalGeneration": usual()._replace(on_cpu=True),
    "Gemma4ForConditionalGeneration": usual(vision_config=default("gemma4_vision")),
    "Gemma4UnifiedForConditionalGeneration": usual(vision_config=default("gemma4_unified_vision")),
    "Glm5NextForCausalLM": of_transformers("glm5_next", text_config={"mla_use_nope": True}),
    "Glm5NextForConditionalGeneration": usual(text_config={"mla_use_nope": True}),
    "Granite4VisionForConditionalGeneration": usual(
        deepstack_layer_map=[],
        downsample_rate="1/2",
        text_config=default("granite", architectures=["GraniteForCausalLM"], _instead=True),
    ),
    "GraniteMoeHybridForCausalLM": usual(
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2, num_hidden_layers=8, position_embedding_type="rope"
    ),
    "GteModel": written("gte", **_BERT, position_embedding_type="rotary")._replace(class_name="GteConfig"),
    "GteNewForSequenceClassification": _NEW,
    "GteNewModel": _NEW,
    "H2OVLChatModel": wrapping("h2ovl_chat", _LLAMA),
    "HCXVisionV2ForCausalLM": wrapping("hyperclovax_vlm", _LLAMA),
    "HF_ColBERT": of_transformers("bert"),
    "HYV3ForCausalLM": usual(first_k_dense_replace=1, head_dim=128, expert_hidden_dim=256),
    "HfMoondream": written("moondream3", text_config=DECODER, vision_config=TOWER),
    "HunYuanDenseV1ForCausalLM": usual(head_dim=128),
    "HunYuanMoEV1ForCausalLM": usual(head_dim=128),
    "HunYuanVLForConditionalGeneration": usual(text_config={"head_dim": 128}, head_dim=128),
    "InklingForCausalLM": of_vllm("InklingModelConfig", **_INKLING),
    "InklingForConditionalGeneration": usual(text_config=_INKLING),
    "InternS1ProForConditionalGeneration": of_transformers("qwen3_vl_moe"),
    "InternS2MobiusForConditionalGeneration": of_transformers("qwen3_5_moe"),
    "InternS2PreviewForConditionalGeneration": of_transformers("qwen3_5_moe"),
    "InternVLChatModel": wrapping("internvl_chat", _QWEN2),
    "JinaEmbeddingsV5Model": of_transformers("qwen3"),
    "JinaForRanking": of_transformers("qwen3"),
    "JinaVLForRanking": of_transformers("qwen2_vl"),
    "K2HorizonForCausalLM": written("k2_horizon", **EXPERTS),
    "KananaVForConditionalGeneration": wrapping(
        "kanana-1.5-v",
        _LLAMA,
        projector_config={
            "hidden_size": 256,
            "mlp_depth": 2,
            "encoder_hidden_size": 256,
            "output_hidden_size": 512,
            "merge_size": 2,
            "pos_emb": True,
            "pos_emb_size": 256,
            "depth": 1,
            "mlp_ratio": 1,
            "projector_type": "dynamic-cabstractor",
            "prenorm": False,
            "num_eos_tokens": 0,
        },
    ),
    "KeyeForConditionalGeneration": written("Keye", vision_config=TOWER),
    "KeyeVL1_5ForConditionalGeneration": written("KeyeVL1_5", vision_config=TOWER),
    "KimiK25ForConditionalGeneration": of_vllm("Kimi_K25Config"),
    "KimiK3ForConditionalGeneration": usual(text_config=_KIMI),
    "KimiLinearForCausalLM": usual(**_KIMI | {"q_lora_rank": None}),
    "Lfm2ForCausalLM": usual(layer_types=["conv", "conv", "full_attention", "conv"], num_hidden_layers=4),
    "Lfm2VlForConditionalGeneration": usual(
        text_config={"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
    ),
    "Lfm2MoeForCausalLM": usual(layer_types=["conv", "conv", "full_attention", "conv"], num_hidden_layers=4),
    "Llama4ForCausalLM": of_transformers("llama4_text"),
    "LlamaBidirectionalForSequenceClassification": written("llama_bidirec", pooling="avg"),
    "LlamaBidirectionalModel": written("llama_bidirec", pooling="avg"),
    "LlamaNemotronVLForSequenceClassification": wrapping(
        "llama_nemotron_vl_rerank", _LLAMA, llm_config=_LLAMA | {"pooling": "avg"}
    ),
    "LlamaNemotronVLModel": wrapping("llama_nemotron_vl", _LLAMA, llm_config=_LLAMA | {"pooling": "avg"}),
    "Llama_Nemotron_Nano_VL": wrapping("Llama_Nemotron_Nano_VL", _LLAMA),
    "LlavaOnevision2ForConditionalGeneration": wrapping("llava_onevision2", _QWEN3),
    "LongcatFlashNgramForCausalLM": of_transformers("longcat_flash", oe_vocab_size_ratio=1)._replace(
        environment=_RUNNER_V2
    ),
    "MiMoForCausalLM": written("mimo"),
    "MiMoV2FlashForCausalLM": usual(hybrid_layer_pattern=[0] + [1] * 47, moe_layer_freq=[0] + [1] * 47),
    "MiMoV2ForCausalLM": written(
        "mimo_v2", **EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]}, hybrid_layer_pattern=[0, 1, 1, 1]
    ),
    "MiMoV2OmniForCausalLM": written(
        "mimo_v2_omni",
        **EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
        hybrid_layer_pattern=[0, 1, 1, 1],
        vision_config=TOWER,
        audio_config={},
    ),
    "MiniCPMO": written(
        "minicpmo",
        vision_config=TOWER,
        version="2.6",
        query_num=64,
        audio_config={"model_type": "whisper"},
        audio_pool_step=2,
    ),
    "MiniCPMV": written("minicpmv", vision_config=TOWER, version="2.6", query_num=64),
    "MiniMaxM3SparseForCausalLM": written(
        "minimax_m3_text", **EXPERTS | {"moe_layer_freq": [0, 1, 1, 1], "hidden_act": "swigluoai"}
    ),
    "MiniMaxM3SparseForConditionalGeneration": usual(vision_config=TOWER),
    "MistralLarge3ForCausalLM": written("deepseek_v3_written", **EXPERTS, **LATENT),
    "Molmo2ForConditionalGeneration": written("molmo2", vit_config=TOWER, adapter_config={}),
    "Moondream3ForCausalLM": written("moondream3", text_config=DECODER, vision_config=TOWER),
    "MoonshotKimiaForCausalLM": written("kimi_audio", whisper_config={}),
    "NVLM_D": wrapping("NVLM_D", _QWEN2),
    "NemotronForCausalLM": usual(num_key_value_heads=8),
    "NemotronHForCausalLM": of_transformers("nemotron_h", **_NEMOTRON_H),
    "NemotronHPuzzleForCausalLM": of_transformers("nemotron_h", **_NEMOTRON_H),
    "NomicBertModel": written(
        "nomic_bert",
        num_key_value_heads=8,
        n_embd=512,
        n_inner=1024,
        n_positions=2048,
        activation_function="swiglu",
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
    )._replace(class_name="NomicBertConfig"),
    "OpenCUAForConditionalGeneration": wrapping("opencua", _QWEN2),
    "OpenPanguVLForConditionalGeneration": written("openpangu_vl", vision_config=TOWER),
    "OrionForCausalLM": written("orion"),
    "Ovis": of_vllm(
        "OvisConfig",
        llm_config=_QWEN2,
        hidden_size=512,
        visual_tokenizer_config={
            "model_type": "siglip_visual_tokenizer",
            "backbone_config": {"model_type": "siglip_vision_model"},
        },
    ),
    "PanguEmbeddedForCausalLM": written("PanguEmbedded"),
    "PanguProMoEV2ForCausalLM": written("PanguProMoE", **EXPERTS, **LATENT),
    "PanguUltraMoEForCausalLM": written("pangu_ultra_moe", **EXPERTS, **LATENT),
    "Phi3VForCausalLM": written(
        "phi3_v",
        vision_config=TOWER,
        img_processor={
            "layer_idx": -2,
            "image_dim_out": 1024,
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
        embd_layer=_PHI_IMAGES | {"embedding_cls": "image", "projection_cls": "mlp"},
    ),
    "Phi4ForCausalLMV": written("phi4-siglip", vision_config=TOWER),
    "Phi4MMForCausalLM": written(
        "phi4mm",
        img_processor=None,
        embd_layer={
            "image_embd_layer": _PHI_IMAGES | {"crop_size": 448, "image_token_compression_cls": "avg_pool_2d"},
            "audio_embd_layer": {"embedding_cls": "audio", "compression_rate": 8, "downsample_rate": 1},
        },
        audio_processor={
            "name": "cascades",
            "config": {
                "chunk_size": -1,
                "left_chunk": 18,
                "input_size": 80,
                "attention_dim": 512,
                "attention_heads": 8,
            },
        },
    ),
    "PixtralForConditionalGeneration": wrapping(
        "pixtral_written",
        text("mistral", "MistralForCausalLM"),
        vision_config={
            "hidden_size": 256,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 14,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "rope_theta": 1e4,
            "image_token_id": 5,
        },
    ),
    "Plamo3ForCausalLM": written(
        "plamo3",
        layer_types=_WINDOWS,
        sliding_window=512,
        interleaved_sliding_window=[512, 512, 512, None],
    ),
    "Qwen3ASRForcedAlignerForTokenClassification": of_vllm("Qwen3ASRConfig", thinker_config={"classify_num": 16}),
    "Qwen4ExpForCausalLM": of_transformers("qwen4_exp_text", **_SPARSE),
    "Qwen4ExpForConditionalGeneration": usual(text_config=_SPARSE),
    "RForConditionalGeneration": wrapping("r", _QWEN3, vision_config=default("siglip_vision_model")),
    "Rnj1ForCausalLM": written("rnj1", layer_types=_WINDOWS, sliding_window=512),
    "SarvamMLAForCausalLM": written("sarvam_mla", **EXPERTS, **LATENT),
    "SarvamMoEForCausalLM": written("sarvam_moe", **EXPERTS),
    "SkyworkR1VChatModel": wrapping("skywork_chat", _QWEN2),
    "Step1ForCausalLM": written("step1", num_attention_groups=2)._replace(on_cpu=True),
    "Step3TextForCausalLM": usual(moe_layers_enum="1,2,3"),
    "Step3VLForConditionalGeneration": usual(
        text_config={"architectures": ["Step3TextForCausalLM"], "moe_layers_enum": "1,2,3"}
    ),
    "Step3p5ForCausalLM": usual(max_position_embeddings=4096),
    "Step3p7ForConditionalGeneration": usual(
        text_config={"architectures": ["Step3p5ForCausalLM"], "max_position_embeddings": 4096}
    ),
    "StepVLForConditionalGeneration": wrapping("step_robotics", _QWEN3),
    "TeleChat2ForCausalLM": written("telechat", hidden_layers=4),
    "TransformersEmbeddingModel": of_transformers("llama"),
    "TransformersForSequenceClassification": of_transformers("llama"),
    "TransformersMoEEmbeddingModel": of_transformers("mixtral"),
    "TransformersMoEForSequenceClassification": of_transformers("mixtral"),
    "TransformersMultiModalEmbeddingModel": of_transformers("qwen2_5_vl"),
    "TransformersMultiModalForCausalLM": of_transformers("qwen2_5_vl"),
    "TransformersMultiModalForSequenceClassification": of_transformers("gemma3"),
    "TransformersMultiModalMoEForCausalLM": of_transformers("qwen3_vl_moe"),
    "UltravoxModel": usual(text_config=_LLAMA, audio_config=default("whisper"))._replace(
        remove=("wrapped_model_config",)
    ),
    "UnlimitedOCRForCausalLM": of_vllm(
        "UnlimitedOCRConfig",
        tile_tag="2D",
        sliding_window=128,
        language_config=_DEEPSEEK
        | {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "use_mla": False}
        | {"topk_method": "greedy", "sliding_window": 128},
    )._replace(
        remove=("text_config",),
        arguments={"attention_backend": "TRITON_ATTN", "mm_encoder_attn_backend": "TORCH_SDPA"},
    ),
    "VoyageQwen3BidirectionalEmbedModel": of_transformers("qwen3"),
} | {
    name: written(
        name,
        text_config=default("nemotron_h", architectures=["NemotronHForCausalLM"], dtype="bfloat16", **_NEMOTRON_H),
        vision_config=TOWER | {"args": {"model": "vit_huge_patch16_224"}},
        **WRAPPER,
    )
    for name in (
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    )
}


def configuration(name: str) -> Configuration:
    """A configuration of an architecture. Raises LookupError: there is none."""
    entry = _WRITTEN.get(name) or _Entry(None, {})
    source = entry.source or _source(name)
    if source is None:
        raise LookupError
    kind, what = source
    remote = None
    if kind == "written":
        remote = _remote(what, entry.class_name)
        values: dict[str, Any] = {"model_type": what}
    else:
        values = _defaults(kind, what)
    values = _with(values, entry.values)
    for key in entry.remove:
        values.pop(key, None)
    values = _with_defaults(values)
    if not entry.whole:
        values = _small(values)
    return Configuration(values | {"architectures": [name]}, entry.arguments, entry.environment, entry.on_cpu, remote)


def _source(name: str) -> tuple[str, str] | None:
    """Where the configuration of a name is: of itself, or of another one that vLLM has the same class for."""
    from vllm.model_executor.models import registry

    models = registry.ModelRegistry.models
    same = [
        other
        for other in sorted(models)
        if (models[other].module_name, models[other].class_name) == (models[name].module_name, models[name].class_name)
    ]
    found: Iterator[tuple[str, str] | None] = (_named(one) for one in (name, *same, models[name].class_name))
    return next(filter(None, found), None)


def _named(name: str) -> tuple[str, str] | None:
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    types, classes = _sources()
    if name in types:
        model_type = types[name]
        its_own: Any = dict.get(_CONFIG_REGISTRY, model_type)
        return ("vllm", its_own) if isinstance(its_own, str) else ("transformers", model_type)
    bases = (_SUFFIX.sub("", name), name)
    return next((classes[key] for base in bases if (key := f"{base}Config".lower().replace("_", "")) in classes), None)


@functools.cache
def _sources() -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Model types of architectures, and classes of configurations by their names in lower case."""
    import vllm.transformers_utils.configs as configs
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    mappings = [key for key in vars(modeling_auto) if key.endswith("_MAPPING_NAMES")]
    types: dict[str, str] = {}
    for key in sorted(mappings, key=lambda one: (_FIRST.index(one) if one in _FIRST else len(_FIRST), one)):
        for model_type, names in getattr(modeling_auto, key).items():
            for name in names if isinstance(names, tuple | list) else (names,):
                types.setdefault(name, model_type)
    classes: dict[str, tuple[str, str]] = {}
    for model_type, class_name in CONFIG_MAPPING_NAMES.items():
        classes.setdefault(class_name.lower(), ("transformers", model_type))
    classes |= {class_name.lower(): ("vllm", class_name) for class_name in configs.__all__}
    return types, classes


def _defaults(kind: str, what: str) -> dict[str, Any]:
    import vllm.transformers_utils.configs as configs
    from transformers import CONFIG_MAPPING

    class_ = CONFIG_MAPPING[what] if kind == "transformers" else getattr(configs, what)
    values: dict[str, Any] = json.loads(class_().to_json_string(use_diff=False))
    return values


def _with(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Values with others in their place, below too; `_instead` leaves out what was there."""
    mixed = dict(values)
    for key, value in others.items():
        before = mixed.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and not value.get("_instead"):
            mixed[key] = _with(before, value)
        else:
            mixed[key] = copy.deepcopy(value)
            if isinstance(value, dict):
                mixed[key].pop("_instead", None)
    return mixed


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    mixed = {key: _with_defaults(value) if isinstance(value, dict) else value for key, value in values.items()}
    model_type: Any = mixed.pop("_default", None)
    return _defaults("transformers", str(model_type)) | mixed if model_type else mixed


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """With few layers, of each kind that there is."""
    small = {key: _small(value) if isinstance(value, dict) else value for key, value in values.items()}
    if "per_layer_config" in small:
        return small
    for key in _COUNTS:
        layers = small.get(key)
        if not isinstance(layers, int) or layers <= _MOST_LAYERS:
            continue
        of_layers = {at: one for at, one in small.items() if isinstance(one, list) and len(one) == layers}
        kept = _MOST_LAYERS
        for kinds in of_layers.values():
            if all(isinstance(kind, str | int) for kind in kinds):
                while set(kinds[:kept]) != set(kinds):
                    kept += 1
        small |= {key: kept} | {at: kinds[:kept] for at, kinds in of_layers.items()}
    return small


def _remote(model_type: str, name: str) -> type:
    """A class of configurations that takes what it is given."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    class Remote(PreTrainedConfig):  # type: ignore[misc]
        def __init__(self, **values: Any) -> None:
            for key, value in values.items():
                if isinstance(value, dict) and key.endswith("config"):
                    inner = dict(value)
                    its_type = inner.pop("model_type", None)
                    known = its_type in CONFIG_MAPPING
                    values[key] = CONFIG_MAPPING[its_type](**inner) if known else Remote(**value)
                elif key == "block_configs":
                    values[key] = [_Readable({at: _Readable(part) for at, part in one.items()}) for one in value]
            its_type = values.pop("model_type", model_type)
            super().__init__(**values)
            for key, value in values.items():
                if not hasattr(self, key):
                    setattr(self, key, value)
            self.model_type = its_type

        def keys(self) -> list[str]:
            return [key for key in vars(self) if not key.startswith("_")]

        def __getitem__(self, key: str) -> Any:
            return getattr(self, key)

        def get(self, key: str, otherwise: Any = None) -> Any:
            return getattr(self, key, otherwise)

    Remote.model_type = model_type
    Remote.__name__ = name
    return Remote


class _Readable(dict[str, Any]):
    """A dict whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)
