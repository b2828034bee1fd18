# ruff: noqa: E501
"""Tiny configurations for any transformers model type: every size shrunk by the name of its field, nested parts included.

Nothing is known about a type beyond its default configuration, apart from the few in REPAIRS whose sizes depend on
each other in ways that names do not tell.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 16, 128
WINDOW = 6
# Ids from here on stand for images, audio and other special tokens; texts use the ids below.
FIRST_SPECIAL_ID = 100

_SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (HIDDEN, "hidden_size d_model n_embd embed_dim dim hidden_dim model_dim encoder_hidden_size decoder_hidden_size "
        "out_hidden_size projection_dim text_hidden_size output_dim embedding_size word_embed_proj_dim emb_dim lru_width "
        "vision_hidden_size cross_attention_hidden_size output_hidden_size projector_hidden_size encoder_hidden_dim "
        "decoder_hidden_dim d_embed text_dim vision_dim cross_attention_dim text_embed_dim vision_embed_dim "
        "pooler_output_size fusion_hidden_size fpn_hidden_size mamba_d_ssm backbone_hidden_size"),
        (HEADS, "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "n_attention_heads decoder_num_attention_heads encoder_num_attention_heads swa_num_attention_heads "
        "num_attn_heads text_num_heads vision_num_heads"),
        (HEAD_DIM, "head_dim d_kv attention_head_dim attn_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim "
        "qk_nope_head_dim index_head_dim query_pre_attn_scalar kv_lora_rank mamba_d_head mamba_head_dim kv_channels "
        "decoder_head_dim d_head num_mel_bins"),
        (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth num_decoder_layers "
        "num_encoder_layers num_blocks linear_num_key_heads index_n_heads num_experts_per_tok num_experts_per_token "
        "moe_topk moe_top_k moe_k top_k_experts topk num_selected_experts moe_num_active_primary_experts num_frames "
        "encoder_num_hidden_layers decoder_num_hidden_layers num_transformer_layers"),
        (32, "global_head_dim moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size expert_dim "
        "moe_shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_ffn_hidden_size image_size"),
        (96, "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim ffn_hidden_size d_inner "
        "intermediate_size_mlp dense_intermediate_size feedforward_dim feed_forward_hidden_size inner_dim "
        "decoder_intermediate_size encoder_intermediate_size block_ff_dim dim_feedforward shared_intermediate_size"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts linear_num_value_heads "
        "num_conv_pos_embedding_groups num_conv_pos_embeddings moe_num_primary_experts"),
        (1, "num_shared_experts n_shared_experts moe_num_shared_experts topk_group n_groups mamba_n_groups "
        "first_k_dense_replace num_nextn_predict_layers num_adapter_layers num_residual_layers"),
        (8, "patch_size qk_rope_head_dim mamba_d_state mamba_n_heads mamba_num_heads mamba_chunk_size index_topk "
        "hidden_size_per_layer_input laurel_rank state_size ssm_state_size rotary_dim num_queries num_latents "
        "partial_rotary_dim num_query_tokens swa_rope_head_dim"),
        (12, "v_head_dim"),
        (24, "q_lora_rank qk_head_dim"),
        (VOCAB, "vocab_size vocab_size_per_layer_input text_vocab_size decoder_vocab_size"),
        (256, "max_position_embeddings n_positions n_ctx max_target_positions max_seq_len max_sequence_length "
        "max_text_positions original_max_position_embeddings max_seq_length block_size"),
        (40, "max_source_positions max_audio_positions"),
        (WINDOW, "sliding_window attention_chunk_size local_attention attention_window sliding_window_size window"),
        (64, "num_position_embeddings max_2d_position_embeddings hidden_dim_per_head tie_dim"),
    )
    for name in names.split()
}  # fmt: skip
_KV_HEADS = frozenset("num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num swa_num_key_value_heads "
                      "num_global_key_value_heads n_head_kv decoder_num_key_value_heads".split())  # fmt: skip
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_VALUES: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_kv_shared_layers": 0,
    "n_group": 2,
}

# Only where one size must follow from another: dotted paths of fields.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
REPAIRS: dict[str, dict[str, Any]] = {
    **{name: {"text_config.rope_parameters": _MROPE} for name in "qwen2_vl qwen2_5_vl paddleocr_vl glm4v glm46v glm_ocr glmga".split()},
    **{name: {"rope_parameters": _MROPE} for name in "qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text glm4v_text glm_ocr_text glm_image_text".split()},
    "glm_image": {"text_config.rope_parameters": _MROPE},
    "glm4v_moe": {"text_config.rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}},
    **{name: {"text_config.eos_token_id": 2} for name in "clip aimv2 clipseg owlvit owlv2 metaclip_2 groupvit sam3".split()},
    **{name: {"eos_token_id": 2} for name in ("clip_text_model", "unispeech-sat", "qwen3_asr")},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "glm5_next": {"text_config.index_kpool": 4},
    "glm5_next_text": {"index_kpool": 4},
    "zaya": {"num_experts_per_tok": 1},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10, "input_size": 32},
    "mamba2": {"head_dim": 32},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "bailing_hybrid": {"n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "step3p7": {"text_config.sliding_window": WINDOW},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "luke": {"entity_vocab_size": VOCAB},
    "lilt": {"hidden_size": 96},
    "wav2vec2-bert": {"feature_projection_input_dim": HEAD_DIM},
    "mimi": {"upsample_groups": HIDDEN},
    "pocket_tts_audio_tokenizer": {"upsample_groups": HIDDEN},
    "csm": {"codec_config.upsample_groups": HIDDEN},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 100, "pad_token_id": 0},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of `model_type` with sizes of 64 and 2 layers (more where layers are of several kinds).

    Raises what the configuration itself raises for the type's defaults or for the small sizes.
    """
    kind = CONFIG_MAPPING[model_type]
    fields = _shrunk(kind(), {})
    for path, value in REPAIRS.get(model_type, {}).items():
        *parents, name = path.split(".")
        target = fields
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return kind(**fields)


def _shrunk(config: PreTrainedConfig, special_ids: dict[str, int]) -> dict[str, Any]:
    """Constructor arguments that make `config` small. `special_ids` keeps one id for one name in all nested parts."""
    have = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    names = config.attribute_map
    fields: dict[str, Any] = {}
    layers = next((have[name] for name in _LAYERS if isinstance(have.get(name), int)), 0)
    chosen = _chosen_layers(have, layers)
    for name, value in have.items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = {"model_type": value.model_type, **_shrunk(value, special_ids)}
        elif name in _VALUES:
            if value is not None:
                fields[name] = _VALUES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            fields[name] = special_ids.setdefault(name, FIRST_SPECIAL_ID + len(special_ids) % (VOCAB - FIRST_SPECIAL_ID))
        elif name in _KV_HEADS and isinstance(value, int):
            all_heads = next((have[head] for head in ("num_attention_heads", "num_heads", "n_head") if head in have), 0)
            fields[name] = HEADS if value == all_heads else min(value, KV_HEADS)
        elif name in _LAYERS and value == layers and layers:
            fields[name] = len(chosen)
        elif isinstance(value, (list, tuple)):
            if len(value) == layers and layers > 2 and not name.startswith("stage"):
                fields[name] = [value[index] for index in chosen]
            elif name in ("image_size", "patch_size"):
                fields[name] = [_SIZES[name]] * len(value)
            elif name == "depths":
                fields[name] = [1] * len(value)
            elif name == "conv_dim":
                fields[name] = [32] * len(value)
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            fields[name] = _tiny_rope(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value and name in _SIZES:
            fields[name] = _SIZES[name]
    if "qk_rope_head_dim" in fields and have.get("head_dim") in (have["qk_rope_head_dim"], have.get("qk_head_dim")):
        same = have["head_dim"] == have["qk_rope_head_dim"]
        fields["head_dim"] = fields["qk_rope_head_dim"] if same else fields["qk_head_dim"]
    if any(isinstance(have.get(name), (list, tuple)) for name in ("num_heads", "num_attention_heads", "hidden_sizes")):
        # Stages of several widths: their sizes hang together, and the defaults are small.
        for name in ("embed_dim", "hidden_size", "hidden_dim", "patch_size", "intermediate_size", "embedding_size"):
            fields.pop(name, None)
    return {names.get(name, name): value for name, value in fields.items()}


def _chosen_layers(have: dict[str, Any], layers: int) -> list[int]:
    """Indices of layers to keep: the first of each kind, and at least two."""
    kinds = [value for name, value in have.items()
             if isinstance(value, (list, tuple)) and len(value) == layers and layers > 2
             and all(isinstance(item, (str, int, bool)) for item in value)]  # fmt: skip
    chosen: list[int] = []
    for values in kinds:
        for kind in dict.fromkeys(values):
            index = list(values).index(kind)
            # Lists that number layers rather than name their kind have as many kinds as layers.
            if len(set(values)) <= 4 and index not in chosen:
                chosen.append(index)
    for index in range(layers):
        if len(chosen) < 2 and index not in chosen:
            chosen.append(index)
    return sorted(chosen)


def _tiny_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters with tables as long as a small head needs; one set of parameters per kind of layer allowed."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _tiny_rope(value)
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        elif name in ("long_factor", "short_factor"):
            small[name] = [1.0] * (HEAD_DIM // 2)
        elif name == "original_max_position_embeddings":
            small[name] = 128
        else:
            small[name] = value
    return small


def parameter_count(config: PreTrainedConfig, auto_class: Any) -> int | None:
    """How many parameters a model of this configuration has, counted without memory; None where that cannot be done."""
    import torch

    with contextlib.suppress(Exception), torch.device("meta"):
        return sum(parameter.numel() for parameter in auto_class.from_config(config).parameters())
    return None
