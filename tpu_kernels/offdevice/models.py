"""transformers models as programs to be emitted: configuration only, no weights (every tensor on device
"meta")."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import EncoderDecoderCache

from .torch_trace import Program

Phase = Literal["prefill", "decode"]


class NoDecodeError(ValueError):
    """The model generates nothing."""


def program(
    config: Mapping[str, Any],
    *,
    attention: str,
    phase: Phase,
    batch: int,
    prompt: int,
    cache: int = 0,
    dtype: str = "bfloat16",
    padding: bool = True,
) -> Program:
    """A model's forward pass, as a `torch_trace.Program`.

    Args:
        config: fields of a transformers configuration, `model_type` among them.
        attention: the attention implementation ("sdpa", "tpu_attention").
        phase: "prefill": `prompt` tokens and no cache; "decode": one token after `prompt` tokens in a static
            cache.
        batch: sequences.
        prompt: tokens of a sequence (of the encoder's input, for an encoder-decoder model's prefill).
        cache: slots of the static cache.
        dtype: of the weights.
        padding: give a 2-D padding mask.
    """
    if attention == "tpu_attention":
        import tpu_kernels

        tpu_kernels.register()
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = model_class(made)._from_config(made, attn_implementation=attention, dtype=getattr(torch, dtype)).eval()
        return forward(model, phase=phase, batch=batch, prompt=prompt, cache=cache, padding=padding)


def sdpa_call(
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    v_head_dim: int,
    dtype: str,
    dense_mask: bool,
    scale: float,
) -> Program:
    """One attention call as transformers' "sdpa" makes it in a compiled model, as a `torch_trace.Program`.

    dense_mask: a mask [batch, 1, q_len, kv_len] is given, already as numbers to add: layers of a model share that work.
    """
    with torch.device("meta"):
        kind = getattr(torch, dtype)
        query = torch.empty(batch, q_heads, q_len, head_dim, dtype=kind)
        key = torch.empty(batch, kv_heads, kv_len, head_dim, dtype=kind)
        value = torch.empty(batch, kv_heads, kv_len, v_head_dim, dtype=kind)
        mask = torch.empty(batch, 1, q_len, kv_len, dtype=kind) if dense_mask else None
    return Program(_Sdpa(q_heads // kv_heads, scale), (query, key, value, mask))


class _Sdpa(torch.nn.Module):
    is_causal = False

    def __init__(self, groups: int, scale: float) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out = sdpa_attention_forward(self, query, key, value, mask, scaling=self.scale)[0]
        return out.transpose(1, 2)  # as kernels leave it: the transposition belongs to what follows in either case


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that `generate()` would be called on for this configuration, or the bare encoder."""
    from transformers.models.auto import modeling_auto as auto

    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_MAPPING,
    ):
        # BERT and Whisper's decoder have a causal head too, but nobody generates with it alone.
        if mapping is auto.MODEL_FOR_CAUSAL_LM_MAPPING and (is_encoder(config) or config.is_encoder_decoder):
            continue
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            chosen: type[PreTrainedModel] = found[0] if isinstance(found, (list, tuple)) else found
            return chosen
    raise ValueError(f"transformers has no model for a configuration of type {type(config).__name__}")


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether the model is an encoder by itself (BERT): one pass over the input, no decode."""
    return getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder


def forward(model: PreTrainedModel, *, phase: Phase, batch: int, prompt: int, cache: int, padding: bool) -> Program:
    """The forward call of one phase. Call under `torch.device("meta")`."""
    config = model.config
    if config.is_encoder_decoder:
        return _encoder_decoder(model, phase=phase, batch=batch, prompt=prompt, cache=cache)
    if phase == "prefill":
        kwargs: dict[str, Any] = {"input_ids": torch.zeros(batch, prompt, dtype=torch.int64)}
        if padding:
            kwargs["attention_mask"] = torch.ones(batch, prompt, dtype=torch.int64)
        if not is_encoder(config):
            kwargs["use_cache"] = False
        return Program(model, kwargs=_with_positions(model, kwargs, batch, prompt))
    if is_encoder(config):
        raise NoDecodeError(f"{config.model_type} is an encoder: it makes one pass over its input")
    slots = StaticCache(config=config, max_cache_len=cache)
    _fill(model, slots, batch, prompt)
    kwargs = {
        "input_ids": torch.zeros(batch, 1, dtype=torch.int64),
        "past_key_values": slots,
        "use_cache": True,
    }
    if padding:
        kwargs["attention_mask"] = torch.ones(batch, cache, dtype=torch.int64)
    return Program(model, kwargs=_with_positions(model, kwargs, batch, 1), holders=tuple(slots.layers))


def _with_positions(model: PreTrainedModel, kwargs: dict[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """Qwen-VL's three-part positions are computed by the caller (`generate`), on the host."""
    text = model.config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in parameters:
        kwargs["position_ids"] = torch.zeros(3, batch, tokens, dtype=torch.int64)
    return kwargs


def _fill(model: PreTrainedModel, slots: StaticCache, batch: int, tokens: int) -> None:
    """Bring a static cache into the state it has after `tokens` tokens, with the model's own K and V shapes.

    One forward pass on "meta" tells the shapes, whatever the architecture.
    """
    with _eager_attention(model):
        model(
            input_ids=torch.zeros(batch, tokens, dtype=torch.int64),
            past_key_values=slots,
            use_cache=True,
            **_with_positions(model, {}, batch, tokens),
        )


@contextlib.contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention inside: a pass that only finds shapes is not to be routed or counted."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(chosen)


def _encoder_decoder(model: PreTrainedModel, *, phase: Phase, batch: int, prompt: int, cache: int) -> Program:
    config = model.config
    main = model.main_input_name
    if main == "input_features":  # Whisper: two mel frames an encoder position
        features = torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype)
        encoder_length = config.max_source_positions
    else:
        features = torch.zeros(batch, prompt, dtype=torch.int64)
        encoder_length = prompt
    if phase == "prefill":
        return Program(
            model,
            kwargs={
                main: features,
                "decoder_input_ids": torch.zeros(batch, 4, dtype=torch.int64),
                "use_cache": False,
            },
        )
    from transformers.modeling_outputs import BaseModelOutput

    own = StaticCache(config=config, max_cache_len=cache)
    cross = StaticCache(config=config, max_cache_len=encoder_length)
    slots = EncoderDecoderCache(own, cross)
    states: Any = torch.zeros(batch, encoder_length, config.d_model, dtype=model.dtype)
    call = {
        "encoder_outputs": BaseModelOutput(last_hidden_state=states),
        "past_key_values": slots,
        "use_cache": True,
    }
    with _eager_attention(model):
        model(decoder_input_ids=torch.zeros(batch, 4, dtype=torch.int64), **call)
    return Program(
        model,
        kwargs={"decoder_input_ids": torch.zeros(batch, 1, dtype=torch.int64), **call},
        holders=(*own.layers, *cross.layers),
    )
