"""Tiny random models of many types, made from configurations alone, with the geometry that makes each type special."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class TinyModel:
    """One model type. `config` overrides the common geometry; `routes` is what its attention calls must take."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    routes: frozenset[tuple[str, str]] = frozenset({("kernel", "kernel")})
    common: bool = True
    auto_class: Any = AutoModelForCausalLM

    def build(self, attn_implementation: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
        """The model with weights from a fixed seed, so that two builds differ only in their attention."""
        base = _COMMON if self.common else {}
        config = AutoConfig.for_model(self.model_type, **{**base, **self.config, **overrides})
        torch.manual_seed(0)
        model: PreTrainedModel = self.auto_class.from_config(config, attn_implementation=attn_implementation)
        return model.to(dtype).eval()


_WINDOW = {"sliding_window": 6}

DECODERS = {
    model.model_type: model
    for model in (
        TinyModel("llama"),
        TinyModel("qwen2"),
        TinyModel("qwen3"),
        TinyModel("mistral", _WINDOW),
        TinyModel("gemma2", _WINDOW),
        TinyModel("gemma3_text", _WINDOW),
        TinyModel("gpt_oss", {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
        TinyModel("phi3", {"sliding_window": 6}),
        TinyModel("cohere2", _WINDOW),
        TinyModel(
            "llama4_text", {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 96}
        ),
        TinyModel("glm4"),
        TinyModel("smollm3"),
        TinyModel("gpt_neox"),
        TinyModel("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 128,
                           "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}, common=False),
        TinyModel("exaone4", _WINDOW),
        TinyModel("granite"),
    )
}  # fmt: skip

ENCODERS = {
    model.model_type: model
    for model in (
        TinyModel("bert", {**_ENCODER, "vocab_size": 128, "pad_token_id": 0}, common=False, auto_class=AutoModel),
        TinyModel("vit", {**_ENCODER, "image_size": 40, "patch_size": 8}, common=False,
                  auto_class=AutoModelForImageClassification),
        TinyModel("siglip_vision_model", {**_ENCODER, "hidden_size": 144, "num_attention_heads": 2, "image_size": 40,
                                          "patch_size": 8}, common=False, auto_class=AutoModel),
    )
}  # fmt: skip

SEQ2SEQ = {
    model.model_type: model
    for model in (
        TinyModel("t5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
                         "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1},
                  routes=frozenset({("sdpa", "position_bias")}), common=False,
                  auto_class=AutoModelForSeq2SeqLM),
        TinyModel("whisper", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                              "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
                              "vocab_size": 128, "num_mel_bins": 16, "max_source_positions": 40,
                              "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
                              "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
                  common=False, auto_class=AutoModelForSpeechSeq2Seq),
    )
}  # fmt: skip
