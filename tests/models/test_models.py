"""Tiny random models of many types: tpu_attention against eager in float32, route asserted, emulated on CPU."""

from __future__ import annotations

import pytest
import torch
import transformers

import tpu_kernels

from .tiny_models import DECODERS, ENCODERS, SEQ2SEQ, TinyModel

# Left padding of the three prompts; the padded length is the same, so that shapes are shared between cases.
PADS = {"padded": (0, 3, 7), "unpadded": (0, 0, 0)}
LENGTH, NEW = 12, 6


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


def prompts(pads) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 120, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask


def generate(model, ids, mask, cache: str, **kwargs):
    if cache == "static":
        kwargs |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **kwargs,
        )


def compare_generation(tiny: TinyModel, pads: str, cache: str) -> None:
    ids, mask = prompts(PADS[pads])
    want = generate(tiny.build("eager"), ids, mask, cache)
    model = tiny.build("tpu_attention")
    got = generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, want.sequences)
    for step_got, step_want in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(step_got, step_want, atol=1e-5, rtol=0)
    table = tpu_kernels.explain(model)
    assert {(row.route.partition(".")[0], row.reason) for row in table.rows} == {
        ("range-attention" if target == "kernel" else target, reason) for target, reason in tiny.routes
    }
    assert not table.never_called
    steps = 2 * NEW  # two layers, one prefill and NEW - 1 decode steps
    assert table.total_calls == steps


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoder_equals_eager(name, pads, cache):
    compare_generation(DECODERS[name], pads, cache)


def test_bert_equals_eager_on_real_tokens():
    ids, mask = prompts((0, 3, 7))
    ids, mask = ids.flip(1), mask.flip(1)  # padded on the right
    outputs = {}
    for implementation in ("eager", "tpu_attention"):
        model = ENCODERS["bert"].build(implementation)
        with torch.no_grad():
            outputs[implementation] = model(ids, attention_mask=mask).last_hidden_state
    assert_routes(model, ENCODERS["bert"])
    real = mask.bool()
    torch.testing.assert_close(outputs["tpu_attention"][real], outputs["eager"][real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit", "siglip_vision_model"])
def test_vision_tower_equals_eager(name):
    pixels = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(2))
    outputs = {}
    for implementation in ("eager", "tpu_attention"):
        model = ENCODERS[name].build(implementation)
        with torch.no_grad():
            outputs[implementation] = model(pixels)[0]
    assert_routes(model, ENCODERS[name])
    torch.testing.assert_close(outputs["tpu_attention"], outputs["eager"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_t5_equals_eager(cache):
    ids, mask = prompts((0, 3, 7))
    ids, mask = ids.flip(1), mask.flip(1)
    want = generate(SEQ2SEQ["t5"].build("eager"), ids, mask, cache)
    model = SEQ2SEQ["t5"].build("tpu_attention")
    got = generate(model, ids, mask, cache)
    assert_routes(model, SEQ2SEQ["t5"])
    assert torch.equal(got.sequences, want.sequences)
    for step_got, step_want in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(step_got, step_want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_whisper_equals_eager(cache):
    features = torch.randn(2, 16, 80, generator=torch.Generator().manual_seed(2))
    extra = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    results = {}
    for implementation in ("eager", "tpu_attention"):
        model = SEQ2SEQ["whisper"].build(implementation)
        with torch.no_grad():
            results[implementation] = model.generate(
                features,
                max_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **extra,
            )
    assert_routes(model, SEQ2SEQ["whisper"])
    got, want = results["tpu_attention"], results["eager"]
    assert torch.equal(got.sequences, want.sequences)
    for step_got, step_want in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(step_got, step_want, atol=1e-5, rtol=0)


def assert_routes(model, tiny: TinyModel) -> None:
    table = tpu_kernels.explain(model)
    assert {(row.route.partition(".")[0], row.reason) for row in table.rows} == {
        ("range-attention" if target == "kernel" else target, reason) for target, reason in tiny.routes
    }, str(table)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_padded_row_equals_the_prompt_run_alone(name):
    tiny = DECODERS[name]
    ids, mask = prompts((0, 3, 7))
    model = tiny.build("tpu_attention")
    batch = generate(model, ids, mask, "static")
    for row, pad in enumerate((0, 3, 7)):
        alone = generate(model, ids[row : row + 1, pad:], mask[row : row + 1, pad:], "dynamic")
        assert torch.equal(alone.sequences[0], batch.sequences[row, pad:])
        for step_batch, step_alone in zip(batch.logits, alone.logits, strict=True):
            torch.testing.assert_close(step_batch[row], step_alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama4_text"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_id_of_a_pad_token_changes_nothing(name, cache):
    ids, mask = prompts((0, 3, 7))
    model = DECODERS[name].build("tpu_attention")
    want = generate(model, ids, mask, cache)
    other = torch.where(mask.bool(), ids, torch.full_like(ids, 99))
    got = generate(model, other, mask, cache)
    assert torch.equal(got.sequences[:, LENGTH:], want.sequences[:, LENGTH:])
    for step_got, step_want in zip(got.logits, want.logits, strict=True):
        assert torch.equal(step_got, step_want)


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_a_model_that_ignores_the_interface_is_reported(name):
    """ALiBi models among them: they compute attention themselves, whatever the name."""
    settings = {"n_layer": 1, "n_layers": 1, "n_head": 4, "n_heads": 4, "hidden_size": 32, "d_model": 32, "vocab_size": 64}
    config = getattr(transformers, f"{name}Config")(**settings)
    kind = getattr(transformers, f"{name}ForCausalLM")
    ids = torch.arange(1, 5)[None]
    logits = []
    for implementation in ("eager", "tpu_attention"):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)
    table = tpu_kernels.explain(model)
    assert table.never_called == (f"{name}ForCausalLM",)
    assert f"{name}ForCausalLM" in str(table)
    assert table.total_calls == 0


def test_the_other_alibi_model_takes_no_new_attention_name():
    """Falcon picks its attention class from a list of its own: a refusal, and no other attention behind the user's back."""
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True, vocab_size=64)
    with pytest.raises(KeyError, match="tpu_attention"):
        transformers.FalconForCausalLM._from_config(config, attn_implementation="tpu_attention")
