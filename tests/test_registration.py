"""register() and unregister(), and every way of transformers to choose the attention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoModelForCausalLM

import tpu_kernels
from tpu_kernels import attention, masks, registration

from .models.tiny_models import DECODERS


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()
    yield
    for name in registration.registered_names():
        tpu_kernels.unregister(name)
    tpu_kernels.register()


@pytest.fixture
def saved(tmp_path):
    """A tiny Llama with a tokenizer in a folder, and token ids for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    DECODERS["llama"].build("eager").save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(tmp_path)
    return tmp_path


def runs_on_the_kernel(model, ids=None) -> None:
    tpu_kernels.reset()
    ids = torch.arange(3, 15)[None] if ids is None else ids
    with torch.no_grad():
        model(ids)
    table = tpu_kernels.explain(model)
    assert table.rows and {row.reason for row in table.rows} == {"kernel"}, str(table)


def test_both_functions_are_registered_and_told():
    done = tpu_kernels.register()
    assert AttentionInterface()["tpu_attention"] is attention.tpu_attention
    assert AttentionMaskInterface()["tpu_attention"] is masks.tpu_attention_mask
    assert done.name == "tpu_attention"
    assert "range-attention" in done.kernels
    assert 'attn_implementation="tpu_attention"' in str(done) and "range-attention" in str(done)


def test_another_name_and_unregister():
    tpu_kernels.register("my_tpu")
    assert AttentionInterface()["my_tpu"] is attention.tpu_attention
    tpu_kernels.unregister("my_tpu")
    assert "my_tpu" not in AttentionInterface().valid_keys()
    assert "my_tpu" not in AttentionMaskInterface().valid_keys()
    assert "tpu_attention" in AttentionInterface().valid_keys()
    with pytest.raises(ValueError, match=r"'my_tpu' is not registered by tpu_kernels \(registered: 'tpu_attention'\)"):
        tpu_kernels.unregister("my_tpu")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sdpa", "transformers' own"),
        ("eager", "transformers' own"),
        ("tpu_flash", '"flash"'),
        ("my_sdpa", '"sdpa"'),
        ("flex_attention_tpu", '"flex_attention"'),
        ("paged|tpu", '"|"'),
        ("org/attention", "org/repo"),
        ("", "non-empty"),
        (None, "non-empty"),
    ],
)
def test_names_that_transformers_would_misread_are_refused(name, why):
    with pytest.raises(ValueError, match="cannot register attention name") as caught:
        tpu_kernels.register(name)
    assert why in str(caught.value) and "'tpu_attention'" in str(caught.value)


def test_a_name_that_is_taken_is_left_alone():
    def other():
        pass

    AttentionInterface.register("taken", other)
    try:
        with pytest.raises(ValueError, match="'taken' already belongs to"):
            tpu_kernels.register("taken")
        assert AttentionInterface()["taken"] is other
    finally:
        del AttentionInterface._global_mapping["taken"]


@pytest.mark.parametrize("package", ["jax", "kernels", "transformers"])
@pytest.mark.parametrize("state", ["missing", "old"])
def test_a_package_that_is_missing_or_old_is_named_and_nothing_is_registered(package, state, monkeypatch):
    tpu_kernels.unregister()
    if state == "missing":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    else:
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == package else version(name))
    with pytest.raises(ImportError, match=f"pip install '{package}>="):
        tpu_kernels.register()
    assert "tpu_attention" not in AttentionInterface().valid_keys()
    assert "tpu_attention" not in AttentionMaskInterface().valid_keys()


def test_without_torch_tpu_the_registration_says_that_there_is_no_tpu(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch_tpu" else find(name, *rest))
    (note,) = tpu_kernels.register().notes
    assert "torch_tpu is not installed" in note


def test_from_pretrained(saved):
    runs_on_the_kernel(AutoModelForCausalLM.from_pretrained(saved, attn_implementation="tpu_attention"))


def test_by_config(saved):
    config = AutoConfig.from_pretrained(saved, attn_implementation="tpu_attention")
    runs_on_the_kernel(AutoModelForCausalLM.from_pretrained(saved, config=config))
    runs_on_the_kernel(AutoModelForCausalLM.from_config(config))


def test_after_loading_and_back(saved):
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="sdpa")
    model.set_attn_implementation("tpu_attention")
    runs_on_the_kernel(model)
    model.set_attn_implementation("sdpa")
    tpu_kernels.reset()
    with torch.no_grad():
        model(torch.arange(3, 15)[None])
    assert tpu_kernels.explain(model).rows == ()


def test_one_part_of_a_composite_model():
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 1, **size},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **size},
    )
    model = AutoModel.from_config(config, attn_implementation={"text_config": "tpu_attention", "vision_config": "eager"})
    model.eval()
    runs_on_the_kernel(model)
    assert model.vision_tower.config._attn_implementation == "eager"
    model.set_attn_implementation({"text_config": "eager", "vision_config": "tpu_attention"})
    tpu_kernels.reset()
    with torch.no_grad():
        model(torch.arange(3, 15)[None])
    assert tpu_kernels.explain(model).rows == ()
    with torch.no_grad():
        model.vision_tower(torch.randn(1, 3, 16, 16))
    assert {row.reason for row in tpu_kernels.explain(model).rows} == {"kernel"}


def test_pipeline(saved):
    generate = transformers.pipeline(
        "text-generation", model=str(saved), model_kwargs={"attn_implementation": "tpu_attention"}, device="cpu"
    )
    (answer,) = generate("w5 w6 w7", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("w5 w6 w7")
    table = tpu_kernels.explain(generate.model)
    assert table.total_calls and {row.reason for row in table.rows} == {"kernel"}


def test_a_saved_model_does_not_ask_for_the_plugin(saved, tmp_path):
    """Loading a checkpoint that was saved under tpu_attention must work where this package is absent."""
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="tpu_attention")
    model.save_pretrained(tmp_path / "again")
    assert "tpu_attention" not in json.loads((tmp_path / "again" / "config.json").read_text()).values()


def test_a_model_that_asks_after_unregister_fails_in_transformers(saved):
    tpu_kernels.unregister()
    with pytest.raises(ValueError, match="tpu_attention"):
        AutoModelForCausalLM.from_pretrained(saved, attn_implementation="tpu_attention")


def test_a_name_may_be_bound_to_chosen_kernels():
    done = tpu_kernels.register("tpu_chosen", kernels=["range-attention"])
    assert done.kernels == ("range-attention",)
    model = DECODERS["llama"].build("tpu_chosen")
    runs_on_the_kernel(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    again = tpu_kernels.register("tpu_chosen")
    assert AttentionInterface()["tpu_chosen"] is attention.tpu_attention and again.kernels[0] == "range-attention"


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ("range-attention", r"must be a sequence of kernel names, such as \('range-attention',\)"),
        ((), "must name at least one kernel"),
        (("range-attention", "range-attention"), "none twice"),
        (("no-such-kernel",), "'no-such-kernel' is not installed; installed: range-attention"),
    ],
)
def test_kernels_that_cannot_be_chosen(kernels, says):
    with pytest.raises(ValueError, match=says):
        tpu_kernels.register("tpu_chosen", kernels=kernels)
    assert "tpu_chosen" not in AttentionInterface()
