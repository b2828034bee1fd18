"""Continuous batching with paged keys: the same tokens as transformers' own attention. Emulated on CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import tpu_kernels
from tests.models.tiny_models import DECODERS, TinyModel
from tpu_kernels.attention import tpu_attention

# Lengths around a page of 8 tokens; more requests than fit one batch of 24 tokens, so that they join and leave.
LENGTHS = (3, 8, 9, 17, 5, 1)
NEW = 6


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


def tokens(model, **config) -> list[list[int]]:
    make = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 120, (length,), generator=make).tolist() for length in LENGTHS]
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=32, max_batch_tokens=24, auto_switch_to_flash=False, max_blocks_per_request=0, **config
        ),
    )
    assert len(out) == len(prompts)
    ordered = sorted(out.values(), key=lambda each: int(each.request_id.rsplit("_", 1)[1]))
    assert all(each.error is None and len(each.generated_tokens) == NEW for each in ordered)
    return [each.generated_tokens for each in ordered]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss", "gemma3_text"])
def test_tokens_are_those_of_transformers_own_attention(model_type):
    reference = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"  # SDPA has neither softcap nor sinks
    wanted = tokens(DECODERS[model_type].build(reference))
    model = DECODERS[model_type].build("tpu_attention")
    with tpu_kernels.continuous_batching():
        made = tokens(model)
    explained = tpu_kernels.explain(model)
    same = sum(one == other for one, other in zip(made, wanted, strict=True))
    print(f"{model_type}: {same} of {len(LENGTHS)} requests the same as {reference}; {explained.kernel_calls} kernel calls, "
          f"{explained.fallback_calls} fell back")  # fmt: skip
    assert made == wanted
    assert explained.fallback_calls == 0 and explained.kernel_calls > 0


def test_one_request_joins_a_running_batch_and_stays_exact():
    model = DECODERS["llama"].build("tpu_attention", num_hidden_layers=1)
    wanted = tokens(DECODERS["llama"].build("sdpa", num_hidden_layers=1))
    with tpu_kernels.continuous_batching():
        assert tokens(model) == wanted
    assert tpu_kernels.explain(model).fallback_calls == 0


def test_the_name_is_admitted_within_the_block_only():
    model = TinyModel("llama").build("tpu_attention")
    original = ContinuousBatchingManager.switch_to_cb_friendly_attn
    with pytest.raises(ValueError, match="tpu_attention is not supported for continuous batching"):
        tokens(model)
    with tpu_kernels.continuous_batching():
        assert ContinuousBatchingManager.switch_to_cb_friendly_attn is not original
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is original


def test_other_names_are_still_tested():
    model = TinyModel("llama").build("sdpa")
    model.config._attn_implementation = "unheard_of"
    with tpu_kernels.continuous_batching(), pytest.raises(ValueError, match="unheard_of is not supported"):
        tokens(model)


def test_an_unknown_release_is_told(monkeypatch):
    monkeypatch.delattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")
    with pytest.raises(RuntimeError, match="in a way that is not known"), tpu_kernels.continuous_batching():
        pass


@pytest.mark.parametrize(
    ("kwargs", "chunk", "text"),
    [
        ({"cache": object()}, None, "cache=<object>"),
        ({"cache": "paged", "block_table": torch.zeros(1, 1)}, None, "max_blocks_per_request=0"),
        ({"cache": "paged"}, 8, "chunked attention"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kwargs, chunk, text, monkeypatch):
    module = torch.nn.Module()
    module.config = DECODERS["llama"].build("sdpa", num_hidden_layers=1).config
    module.config.attention_chunk_size = chunk
    if kwargs["cache"] == "paged":
        from transformers.generation.continuous_batching import PagedAttentionCache

        kwargs = kwargs | {"cache": object.__new__(PagedAttentionCache)}
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=text):
        tpu_attention(module, q, k, k, None, **kwargs)
