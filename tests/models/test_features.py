"""What transformers does with attention beyond plain generation: each feature through a tiny model, route asserted, numbers
against eager in float32 (emulated on CPU)."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

import tpu_kernels
from tools.tiny_configs import tiny_config

from .test_models import LENGTH, NEW, generate, prompts
from .tiny_models import _COMMON, DECODERS, SEQ2SEQ, TinyModel


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


def pair(tiny: TinyModel, **overrides):
    """The same weights under eager and under tpu_attention."""
    return tiny.build("eager", **overrides), tiny.build("tpu_attention", **overrides)


def routes(model) -> set[tuple[str, str]]:
    return {(row.route.partition(".")[0], row.reason) for row in tpu_kernels.explain(model).rows}


KERNEL = {("range-attention", "kernel")}


def same(got, want, atol=1e-5):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", pytest.param("bart", marks=pytest.mark.slow)])
def test_beam_search_reorders_the_cache(name):
    ids, mask = prompts((0, 3, 7))
    tiny = DECODERS.get(name, BART)
    if tiny is BART:
        ids, mask = ids.flip(1), mask.flip(1)
    want_model, model = pair(tiny)
    want, got = (generate(each, ids, mask, "dynamic", num_beams=3) for each in (want_model, model))
    assert torch.equal(got.sequences, want.sequences)
    assert routes(model) == KERNEL


def test_assisted_decoding_has_several_queries_after_a_cache():
    ids, mask = prompts((0,))
    ids, mask = ids[:1], mask[:1]
    tiny = DECODERS["llama"]
    results = {}
    for implementation in ("eager", "tpu_attention"):
        model, assistant = tiny.build(implementation), tiny.build(implementation, num_hidden_layers=1)
        with torch.no_grad():
            results[implementation] = model.generate(
                ids, attention_mask=mask, assistant_model=assistant, max_new_tokens=8, min_new_tokens=8, do_sample=False
            )
    assert torch.equal(results["tpu_attention"], results["eager"])
    assert routes(model) == KERNEL


def test_chunked_prefill_after_a_cache():
    """Queries 1 < Q < KV continue a dynamic cache, with padding."""
    ids, mask = prompts((0, 3, 7))
    logits = []
    for model in pair(DECODERS["mistral"]):
        with torch.no_grad():
            cache = transformers.DynamicCache(config=model.config)
            model(ids[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
            logits.append(model(ids[:, 7:], attention_mask=mask, past_key_values=cache).logits)
    same(logits[1], logits[0])
    assert routes(model) == KERNEL


def test_output_attentions_is_a_told_fallback_with_the_weights():
    ids, mask = prompts((0, 3, 7))
    outputs = []
    for model in pair(DECODERS["llama"]):
        with torch.no_grad():
            outputs.append(model(ids, attention_mask=mask, output_attentions=True))
    real = mask.bool()
    for want, got in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
        same(got.transpose(1, 2)[real], want.transpose(1, 2)[real])
    same(outputs[1].logits[real], outputs[0].logits[real])
    assert routes(model) == {("eager", "output_attentions")}


def test_generation_that_returns_weights_is_a_told_fallback_at_every_step():
    """As contrastive search and DoLa ask for them, with hidden states, and with padding."""
    ids, mask = prompts((0, 3, 7))
    want_model, model = pair(DECODERS["gemma2"])
    asked = {"output_attentions": True, "output_hidden_states": True}
    want, got = (generate(each, ids, mask, "dynamic", **asked) for each in (want_model, model))
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.attentions) == len(got.hidden_states) == NEW
    real = mask.bool()
    for step, (ours, theirs) in enumerate(zip(got.attentions, want.attentions, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert a is not None
            same(a.transpose(1, 2)[real] if step == 0 else a, b.transpose(1, 2)[real] if step == 0 else b)
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            same(a[real] if a.shape[1] > 1 else a, b[real] if b.shape[1] > 1 else b)
    assert routes(model) == {("eager", "output_attentions")}


@pytest.mark.thorough
def test_contrasting_layers_stays_on_the_kernel():
    """DoLa: the last layer's logits less those of an earlier layer. It reads hidden states, no weights."""
    ids, mask = prompts((0, 3, 7))
    found = []
    for model in pair(DECODERS["llama"]):
        cache, step, attend, logits = transformers.DynamicCache(config=model.config), ids, mask, []
        for _ in range(NEW):
            with torch.no_grad():
                out = model(step, attention_mask=attend, past_key_values=cache, output_hidden_states=True)
            early = model.lm_head(model.model.norm(out.hidden_states[1][:, -1])).log_softmax(-1)
            logits.append((out.logits[:, -1].log_softmax(-1) - early).detach())
            step = logits[-1].argmax(-1, keepdim=True)
            attend = torch.cat((attend, torch.ones_like(step)), 1)
        found.append(torch.stack(logits))
    assert found[0].abs().max() > 1e-3  # the layers differ
    same(found[1], found[0])
    assert routes(model) == KERNEL


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_contrastive_search_repeats_and_selects_the_cache(name):
    """Each prompt's cache is repeated for its likeliest tokens, one of which is kept: that least like what was before."""
    ids, mask = prompts((0, 3, 7))
    wide, found = 3, []
    for model in pair(DECODERS[name]):
        cache, penalties = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=cache, output_hidden_states=True)
            before, logits, attend, tokens = out.hidden_states[-1], out.logits[:, -1], mask, []
            for _ in range(NEW):
                odds, chosen = logits.softmax(-1).topk(wide, -1)
                cache.batch_repeat_interleave(wide)
                attend = torch.cat((attend, attend.new_ones(len(ids), 1)), 1)
                out = model(
                    chosen.reshape(-1, 1), attention_mask=attend.repeat_interleave(wide, 0), past_key_values=cache,
                    output_hidden_states=True,
                )  # fmt: skip
                after = out.hidden_states[-1].unflatten(0, (-1, wide))[:, :, 0]
                near = torch.cosine_similarity(after[:, :, None], before[:, None], dim=-1)
                near = near.masked_fill(attend[:, None, :-1] == 0, -1).amax(-1)
                penalties.append(near)
                best = (0.4 * odds - 0.6 * near).argmax(-1)
                rows = torch.arange(len(ids)) * wide + best
                cache.batch_select_indices(rows)
                logits, before = out.logits[rows, -1], torch.cat((before, out.hidden_states[-1][rows]), 1)
                tokens.append(chosen.gather(1, best[:, None]))
        found.append((torch.cat(tokens, 1), torch.stack(penalties)))
    assert torch.equal(found[1][0], found[0][0])
    same(found[1][1], found[0][1])
    assert routes(model) == KERNEL


def test_attention_dropout_in_training_is_a_told_fallback():
    ids, _ = prompts((0, 0, 0))
    model = DECODERS["llama"].build("tpu_attention", attention_dropout=0.5).train()
    with torch.no_grad():
        first, second = (model(ids).logits for _ in range(2))
    assert routes(model) == {("sdpa", "dropout")}
    assert not torch.equal(first, second)
    tpu_kernels.reset()
    model.eval()
    with torch.no_grad():
        model(ids)
    assert routes(model) == KERNEL


def test_float16_is_a_told_fallback_and_right():
    ids, mask = prompts((0, 3, 7))
    want, got = (model.to(torch.float16) for model in pair(DECODERS["llama"]))
    with torch.no_grad():
        want, result = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (want, got))
    same(result.float(), want.float(), atol=5e-3)
    assert routes(got) == {("sdpa", "dtype")}


def test_bfloat16_autocast_over_float32_weights():
    ids, mask = prompts((0, 3, 7))
    results = []
    for model in pair(DECODERS["llama"]):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results.append(model(ids, attention_mask=mask).logits.float()[mask.bool()])
    same(results[1], results[0], atol=2e-2)
    assert routes(model) == KERNEL


DEEPSEEK = TinyModel(
    "deepseek_v3",
    {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8,
    },
)  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_latent_attention_with_unequal_head_sizes(cache):
    ids, mask = prompts((0, 3, 7))
    want_model, model = pair(DEEPSEEK)
    want, got = generate(want_model, ids, mask, cache), generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(model) == KERNEL
    assert model.model.layers[0].self_attn.v_head_dim != model.model.layers[0].self_attn.qk_head_dim


def test_head_sizes_that_differ_between_layers():
    """Layers of one model whose heads are 16 and 600 wide: each call is routed by itself."""
    wide = DECODERS["llama"].build("tpu_attention", head_dim=600, num_hidden_layers=1)
    narrow = DECODERS["llama"].build("tpu_attention", num_hidden_layers=1)
    narrow.model.layers.append(wide.model.layers[0])
    narrow.model.layers[1].self_attn.layer_idx = 1
    ids, _ = prompts((0, 0, 0))
    hidden = narrow.model.embed_tokens(ids)
    with torch.no_grad():
        for model in (narrow, wide):
            positions = torch.arange(LENGTH)[None]
            rotary = model.model.rotary_emb(hidden, positions)
            model.model.layers[-1 if model is wide else 0].self_attn(hidden, rotary, None)
    reasons = {(row.route.partition(".")[0], row.reason) for row in tpu_kernels.explain().rows}
    assert reasons == {("range-attention", "kernel"), ("sdpa", "head_dim")}


BART = TinyModel(
    "bart",
    {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    },
    common=False, auto_class=AutoModelForSeq2SeqLM,
)  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cross_attention_with_padding(cache):
    ids, mask = prompts((0, 3, 7))
    ids, mask = ids.flip(1), mask.flip(1)
    want_model, model = pair(BART)
    want, got = generate(want_model, ids, mask, cache), generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(model) == KERNEL


def test_the_learned_position_bias_of_t5_gets_its_gradient():
    ids, mask = prompts((0, 3, 7))
    gradients = []
    for model in pair(SEQ2SEQ["t5"]):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad)
    assert gradients[0].abs().max() > 0
    same(gradients[1], gradients[0], atol=1e-6)
    assert routes(model) == {("sdpa", "position_bias")}


def gemma3(implementation: str):
    config = transformers.Gemma3Config(
        text_config={**_COMMON, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4, image_token_index=100,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


def test_image_tokens_see_each_other():
    """Image blocks are bidirectional islands in a causal mask; windows and left padding beside them."""
    ids = torch.tensor([[0, 0, 5, 6, 100, 100, 100, 100, 7, 8, 9], [3, 4, 100, 100, 100, 100, 5, 100, 100, 100, 100]])
    mask = (ids != 0).long()
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    outputs = []
    for implementation in ("eager", "tpu_attention"):
        model = gemma3(implementation)
        with torch.no_grad():
            outputs.append(
                model(ids, attention_mask=mask, pixel_values=pixels, token_type_ids=(ids == 100).long()).last_hidden_state
            )
    same(outputs[1][mask.bool()], outputs[0][mask.bool()])
    assert routes(model) == KERNEL


def test_a_prefix_of_image_and_prompt_sees_itself_whole():
    """PaliGemma in training: what is not the answer (token type 0) is bidirectional, the answer causal; left padding too.

    Whether tokens of type 0 are one run is known from their values alone, so that mask is told to be dense.
    """
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_COMMON},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 8},
        image_token_index=100, hidden_size=64, projection_dim=64,
    )  # fmt: skip
    ids = torch.tensor([[0, 0, 100, 100, 100, 100, 5, 6, 7, 8, 9], [100, 100, 100, 100, 3, 4, 5, 6, 7, 8, 9]])
    mask = (ids != 0).long()
    answer = torch.zeros_like(ids)
    answer[:, 8:] = 1
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    outputs, other = [], ids.clone()
    other[:, 7] = 50  # the prompt's last token
    for implementation in ("eager", "tpu_attention"):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            states = [model(x, pixel_values=pixels, attention_mask=mask, token_type_ids=answer)[0] for x in (ids, other)]
        outputs.append(states[0])
    same(outputs[1][mask.bool()], outputs[0][mask.bool()])
    assert ((states[1] - states[0])[:, 2:7].abs().amax(-1) > 1e-4).all()  # earlier tokens of the prefix see it
    assert routes(model) == {("sdpa", "dense_mask"), *KERNEL}  # the vision tower has no mask
    tpu_kernels.reset()
    with torch.no_grad():
        model(ids, pixel_values=pixels, attention_mask=mask)  # causal, as in generation
    assert routes(model) == KERNEL


def test_packed_image_patches_by_cu_seqlens():
    """The vision tower of Qwen2.5-VL passes bounds of images and windows, and no mask."""
    config = AutoConfig.for_model("qwen2_5_vl").vision_config
    settings = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
        "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    grid = torch.tensor([[1, 8, 12], [1, 4, 4]])
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(int(grid.prod(1).sum()), width, generator=torch.Generator().manual_seed(4))
    outputs = []
    for implementation in ("eager", "tpu_attention"):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            outputs.append(model(patches, grid_thw=grid))
    first, second = (output[0] if isinstance(output, tuple) else output.last_hidden_state for output in outputs)
    same(second, first)
    assert {row.reason for row in tpu_kernels.explain(model).rows} == {"kernel"}


def test_packed_documents_by_position_ids():
    """Document 2 of a packed row equals the document alone."""
    ids, _ = prompts((0, 0, 0))
    model = DECODERS["llama"].build("tpu_attention")
    row, positions = ids[:1], torch.cat((torch.arange(7), torch.arange(LENGTH - 7)))[None]
    with torch.no_grad():
        packed = model(row, position_ids=positions, use_cache=False).logits
        alone = model(row[:, 7:], use_cache=False).logits
    same(packed[:, 7:], alone)
    assert routes(model) == KERNEL


def test_sampling_and_repetition_do_not_touch_attention():
    ids, mask = prompts((0, 3, 7))
    results = []
    for model in pair(DECODERS["qwen3"]):
        torch.manual_seed(5)
        with torch.no_grad():
            results.append(
                model.generate(ids, attention_mask=mask, do_sample=True, top_k=20, temperature=0.7, max_new_tokens=NEW)
            )
    assert torch.equal(results[0], results[1])


def test_a_users_own_mask_of_four_dimensions():
    ids, _ = prompts((0, 0, 0))
    tree = (torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6)) < 0.5) | torch.eye(LENGTH).bool()
    additive = torch.zeros(tree.shape).masked_fill(~tree, torch.finfo(torch.float32).min)
    want_model, model = pair(DECODERS["llama"])
    with torch.no_grad():
        want = want_model(ids, attention_mask=additive).logits
        for mask in (tree, additive):
            same(model(ids, attention_mask=mask).logits, want)
    assert routes(model) == {("sdpa", "dense_mask")}


def test_an_integer_mask_of_four_dimensions_is_refused():
    ids, _ = prompts((0, 0, 0))
    model = DECODERS["llama"].build("tpu_attention")
    with pytest.raises(ValueError, match="dtype torch.int64; use bool"), torch.no_grad():
        model(ids, attention_mask=torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.int64))


SPARSE = {
    "axk2": "sdpa",
    "deepseek_v32": "sdpa",
    "glm_moe_dsa": "sdpa",
    "hy_v4": "eager",  # has sinks too
    "minimax_m3_vl": "sdpa",
}


@pytest.mark.parametrize("name", SPARSE)
def test_models_that_select_keys_run_on_sdpa(name):
    """Fewer keys are selected than there are, in prefill and in decoding."""
    models = []
    for implementation in ("eager", "tpu_attention"):
        config = tiny_config(name)
        auto_class = AutoModelForCausalLM
        if name == "minimax_m3_vl":
            auto_class = AutoModelForImageTextToText
            config.text_config.layer_types = ["minimax_m3_sparse"] * config.text_config.num_hidden_layers
            config.text_config.index_block_size, config.text_config.index_topk_blocks = 2, 2
        else:
            config.index_topk = 4
        torch.manual_seed(0)
        models.append(auto_class.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval())
    ids, mask = prompts((0, 3, 7))
    want, got = (generate(model, ids, mask, "dynamic") for model in models)
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(models[1]) == {(SPARSE[name], "selected_keys")}


@pytest.mark.parametrize("name", ["wav2vec2", "hubert", "data2vec-audio"])
def test_padded_audio_stays_on_the_kernel(name):
    """These models compute on the padding mask, but not on the attention mask made of it."""
    sound = torch.randn(2, 4000, generator=torch.Generator().manual_seed(7))
    keep = torch.ones(2, 4000, dtype=torch.long)
    keep[0, 2500:] = 0
    outputs = []
    for implementation in ("eager", "tpu_attention"):
        torch.manual_seed(0)
        model = AutoModel.from_config(tiny_config(name), attn_implementation=implementation, dtype=torch.float32).eval()
        with torch.no_grad():
            outputs.append(model(sound * keep, attention_mask=keep).last_hidden_state)
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(2500)))
    assert 1 < frames < outputs[0].shape[1]
    for row, length in ((0, frames), (1, None)):
        same(outputs[1][row, :length], outputs[0][row, :length])
    assert routes(model) == KERNEL


GEMMA4 = TinyModel(
    "gemma4_text",
    {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
)  # fmt: skip


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_gemma4_has_wider_heads_in_full_layers(cache, shared):
    ids, mask = prompts((0, 3, 7))
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": GEMMA4.config["layer_types"] * 2}
    want_model, model = pair(GEMMA4, **(layers if shared else {}))
    want, got = generate(want_model, ids, mask, cache), generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(model) == KERNEL
    assert {layer.self_attn.head_dim for layer in model.model.layers} == {16, 32}


@pytest.mark.slow
def test_gemma4_with_the_head_sizes_that_it_has():
    """512 in full layers, 256 in layers with a window."""
    ids, mask = prompts((0, 3, 7))
    want_model, model = pair(GEMMA4, head_dim=256, global_head_dim=512)
    want, got = generate(want_model, ids, mask, "static"), generate(model, ids, mask, "static")
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(model) == KERNEL
    assert {layer.self_attn.head_dim for layer in model.model.layers} == {256, 512}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_latent_attention_with_the_head_sizes_that_deepseek_has(cache):
    """192 of query and key, 128 of value."""
    ids, mask = prompts((0, 3, 7))
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
    want_model, model = pair(DEEPSEEK, **sizes)
    want, got = generate(want_model, ids, mask, cache), generate(model, ids, mask, cache)
    assert torch.equal(got.sequences, want.sequences)
    same(torch.stack(got.logits), torch.stack(want.logits))
    assert routes(model) == KERNEL
    attention = model.model.layers[0].self_attn
    assert (attention.qk_head_dim, attention.v_head_dim) == (192, 128)


def test_gemma4_audio_gets_the_masks_that_it_is_made_for():
    features = torch.randn(2, 80, 128, generator=torch.Generator().manual_seed(8))
    keep = torch.ones(2, 80, dtype=torch.bool)
    keep[0, 48:] = False
    config = AutoConfig.for_model("gemma4_audio", hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    outputs = []
    for implementation in ("eager", "tpu_attention"):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
        with torch.no_grad():
            outputs.append(model(features, keep).last_hidden_state)
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])
