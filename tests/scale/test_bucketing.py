"""Prompts padded to buckets: the same results, and few shapes. Emulated on CPU."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from transformers import AutoConfig

import tpu_kernels
from tests.models.tiny_models import TinyModel
from tests.test_routing import PLAIN
from tpu_kernels import PromptBuckets, ledger, routing

_SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
          "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


def generate(model, ids, **kwargs):
    with torch.no_grad():
        return model.generate(
            **(ids if isinstance(ids, dict) else {"input_ids": ids}), max_new_tokens=4, min_new_tokens=4, do_sample=False,
            output_logits=True, return_dict_in_generate=True, disable_compile=True, **kwargs,
        )  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_padding_to_a_bucket_changes_nothing(model_type):
    model = TinyModel(model_type, {"sliding_window": 6} if model_type == "gemma3_text" else {}).build("tpu_attention")
    buckets = PromptBuckets((8, 16), max_new_tokens=4)
    cache = buckets.cache(model.config)
    for length in (5, 8, 11):
        ids = torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))
        plain = generate(model, ids)
        padded = generate(model, buckets.pad({"input_ids": ids}, 0), past_key_values=cache)
        assert torch.equal(padded.sequences[:, buckets.length_for(length) :], plain.sequences[:, length:])
        for one, other in zip(padded.logits, plain.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
        cache.reset()
    assert tpu_kernels.explain(model).fallback_calls == 0


def requests(number: int = 200) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (number,), generator=make).tolist()
    return [torch.randint(3, 120, (1, length), generator=make) for length in lengths]


@pytest.mark.slow
def test_200_requests_meet_as_many_shapes_as_buckets_and_one_for_decoding(monkeypatch):
    model = TinyModel("llama", _SMALL).build("tpu_attention")
    buckets = PromptBuckets.up_to(64, max_new_tokens=4, shortest=16)
    assert buckets.lengths == (16, 32, 64)
    prompts = requests()
    cache = buckets.cache(model.config)
    for ids in prompts:
        generate(model, buckets.pad({"input_ids": ids}, 0), past_key_values=cache)
        cache.reset()
    bucketed = tpu_kernels.explain(model)
    assert bucketed.total_calls == 200 * 4 and bucketed.fallback_calls == 0
    assert {(shape.q_len, shape.kv_len) for shape in bucketed.shapes} == {(16, 68), (32, 68), (64, 68), (1, 68)}
    assert len(bucketed.shapes) == len(buckets.lengths) + 1
    assert not any("distinct shapes" in note for note in bucketed.notes)

    tpu_kernels.reset()
    monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")  # shapes are counted all the same, without a trace for each
    for ids in prompts:
        generate(model, ids)
    plain = tpu_kernels.explain(model)
    print(f"200 requests of 1 to 64 tokens: {len(plain.shapes)} shapes as they come, {len(bucketed.shapes)} in buckets")
    assert len(plain.shapes) > 60
    (note,) = plain.notes
    assert f"{len(plain.shapes)} distinct shapes" in note and " ".join(note.split()) in " ".join(str(plain).split())
    assert "number of keys has" in note and "number of queries (prompt length) has" in note and "batch size" not in note
    assert "PromptBuckets" in note and "max_cache_len" in note


def test_a_changing_size_is_warned_of_once_on_a_tpu(caplog):
    book = ledger.Ledger()
    route = routing.Route("kernel", "kernel", "range-attention", "forward")
    with caplog.at_level(logging.WARNING, "tpu_kernels"):
        for batch in range(1, 15):
            # On "tpu" each shape is a compilation.
            request = dataclasses.replace(PLAIN, batch=batch, kv_batch=batch, device="tpu")
            book.met(request, route)
    (told,) = caplog.messages
    assert "batch size has 10 values (1 to 10)" in told and "keep the batch size fixed" in told
    assert "number of" not in told


def test_lengths_are_those_that_hold_the_prompt():
    buckets = PromptBuckets((8, 16), max_new_tokens=4)
    assert [buckets.length_for(n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16] and buckets.cache_len == 20
    with pytest.raises(ValueError, match="17 tokens is longer than the longest bucket, 16"):
        buckets.length_for(17)
    for lengths, new in (((), 1), ((8, 8), 1), ((0, 8), 1), ((8,), 0)):
        with pytest.raises(ValueError, match="increasing"):
            PromptBuckets(lengths, new)


def test_a_mask_is_kept_and_other_inputs_are_refused():
    buckets = PromptBuckets((4,), max_new_tokens=1)
    ids = torch.tensor([[0, 5, 6]])
    padded = buckets.pad({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1]])}, 9)
    assert padded["input_ids"].tolist() == [[9, 0, 5, 6]] and padded["attention_mask"].tolist() == [[0, 0, 1, 1]]
    with pytest.raises(ValueError, match="got also pixel_values"):
        buckets.pad({"input_ids": ids, "pixel_values": ids}, 0)


def test_a_recurrent_state_is_refused():
    with pytest.raises(ValueError, match="linear_attention"):
        PromptBuckets((8,), max_new_tokens=1).cache(AutoConfig.for_model("qwen3_next", num_hidden_layers=4))
