"""Continuous batching with paged keys: the same tokens as transformers' own attention. Emulated on CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache, initialization

import tpu_kernels
from tests.models.tiny_models import DECODERS, TinyModel
from tpu_kernels.attention import tpu_attention

# Lengths around a page of 8 tokens; more requests than fit one batch of 24 tokens, so that they join and leave.
LENGTHS = (3, 8, 9, 17, 5, 1)
FEW = (3, 9, 17)  # fewer shapes to trace
NEW = 6


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


def tokens(model, lengths=LENGTHS, **config) -> list[list[int]]:
    make = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 120, (length,), generator=make).tolist() for length in lengths]
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=32, max_batch_tokens=24, auto_switch_to_flash=False, **config
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


def test_a_model_that_is_never_run_on_sdpa_is_causal_and_windowed_here_too():
    """For such models no mask means every key, but continuous batching gives bounds instead of masks."""
    model = DECODERS["gpt_oss"].build("tpu_attention", num_hidden_layers=2)
    wanted = tokens(DECODERS["gpt_oss"].build("eager", num_hidden_layers=2), FEW[:2])
    with tpu_kernels.continuous_batching():
        assert tokens(model, FEW[:2]) == wanted


def calls_by_route(model) -> dict[str, int]:
    rows = tpu_kernels.explain(model).rows
    return {route: sum(row.calls for row in rows if row.route == route) for route in {row.route for row in rows}}


@pytest.fixture(scope="module")
def wanted():
    return tokens(DECODERS["llama"].build("sdpa", num_hidden_layers=1), FEW)


@pytest.mark.thorough
def test_requests_join_and_leave_a_running_batch_and_decode_on_block_tables(wanted):
    model = DECODERS["llama"].build("tpu_attention", num_hidden_layers=1)
    with tpu_kernels.continuous_batching():
        assert tokens(model, FEW) == wanted
    calls = calls_by_route(model)
    print(calls)
    assert calls.keys() <= {"range-attention.paged", "range-attention.forward", "range-attention.decode"}
    assert calls["range-attention.paged"] > 0


def test_without_block_tables_pages_are_gathered(wanted):
    model = DECODERS["llama"].build("tpu_attention", num_hidden_layers=1)
    with tpu_kernels.continuous_batching():
        assert tokens(model, FEW, max_blocks_per_request=0) == wanted
    assert "range-attention.paged" not in calls_by_route(model)


def test_what_falls_back_gathers_from_the_block_table(wanted, monkeypatch):
    monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")
    model = DECODERS["llama"].build("tpu_attention", num_hidden_layers=1)
    with tpu_kernels.continuous_batching():
        assert tokens(model, FEW) == wanted
    assert set(calls_by_route(model)) == {"sdpa"}


class Allocator:
    """Two layers' pages of one pool, as transformers lays them out: this layer's keys and values in every fourth page."""

    layer_type, index, write_trash_index = "full_attention", 0, 24 * 8

    def __init__(self, pages: int, page: int = 8):
        self.pool = torch.zeros(4 * pages, page, 2, 16)

    def get_cache_for_block_table(self, layer_idx):
        return self.pool[2:-1], self.pool[3:]


def decode(lengths: list[int], table: list[list[int]], rows: int, **kwargs):
    """One step: (what tpu_attention gives, what SDPA gives on each request by itself, the pool). Rows beyond the requests
    pad the batch, as transformers pads it for compilation."""
    make = torch.Generator().manual_seed(0)
    allocator = Allocator(pages=12)
    q, k, v = (torch.randn(1, heads, rows, 16, generator=make) for heads in (4, 2, 2))
    expected = torch.zeros(1, rows, 4, 16)
    keys, values = allocator.get_cache_for_block_table(0)
    for r, (length, own) in enumerate(zip(lengths, table, strict=True)):
        context = torch.randn(2, 2, length, 16, generator=make)
        context[0, :, -1], context[1, :, -1] = k[0, :, r], v[0, :, r]
        for t in range(length - 1):
            keys[own[t // 8], t % 8], values[own[t // 8], t % 8] = context[:, :, t]
        window = kwargs.get("sliding_window") or length
        given = [x[None, :, -window:] for x in context]
        whole = torch.nn.functional.scaled_dot_product_attention(q[:, :, r : r + 1], *given, enable_gqa=True)
        expected[0, r] = whole[0, :, 0]
    module = torch.nn.Module()
    module.layer_idx, module.config = 0, DECODERS["llama"].build("sdpa", num_hidden_layers=1).config
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: allocator}
    most = max(map(len, table))
    rows_of_table = [row + [-1] * (most - len(row)) for row in table] + [[-1] * most] * (rows - len(table))
    bounds = torch.tensor([0, *lengths, *[0] * (rows - len(lengths))]).cumsum(0).int()
    out, _ = tpu_attention(
        module, q, k, v, None, cache=cache, block_table=torch.tensor([rows_of_table], dtype=torch.int32),
        cu_seq_lens_k={"full_attention": bounds}, cu_seq_lens_q=torch.arange(rows + 1), max_length_k={"full_attention": 1},
        **kwargs,
    )  # fmt: skip
    return out, expected, allocator


def test_a_padded_batch_writes_and_reads_nothing_of_the_requests():
    out, expected, allocator = decode([9, 1, 16], [[8, 20], [12], [4, 16]], rows=8)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    used = {page for table in ([8, 20], [12], [4, 16]) for each in table for page in (each + 2, each + 3)}
    trash = {24 + 2, 24 + 3}
    touched = set(allocator.pool.flatten(1).any(1).nonzero().flatten().tolist())
    assert touched <= used | trash


@pytest.mark.parametrize("window", [5, 40])
def test_a_window_counts_on_a_block_table(window):
    out, expected, _ = decode([9, 17], [[8, 20], [12, 4, 16]], rows=2, sliding_window=window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_table_for_other_requests_is_refused():
    with pytest.raises(ValueError, match="block table for 2 requests and 3 tokens"):
        decode_mismatched()


def decode_mismatched():
    module = torch.nn.Module()
    module.layer_idx, module.config = 0, DECODERS["llama"].build("sdpa", num_hidden_layers=1).config
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: Allocator(pages=4)}
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    tpu_attention(
        module, q, k, k, None, cache=cache, block_table=torch.zeros(1, 2, 1, dtype=torch.int32),
        cu_seq_lens_k={"full_attention": torch.arange(3)}, max_length_k={"full_attention": 1},
    )  # fmt: skip


def test_the_name_is_admitted_within_the_block_only():
    model = TinyModel("llama").build("tpu_attention")
    original = ContinuousBatchingManager.switch_to_cb_friendly_attn
    tables = initialization.ensure_decode_fast_path_is_available
    with pytest.raises(ValueError, match="tpu_attention is not supported for continuous batching"):
        tokens(model)
    with tpu_kernels.continuous_batching():
        assert ContinuousBatchingManager.switch_to_cb_friendly_attn is not original
        assert initialization.ensure_decode_fast_path_is_available is not tables
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is original
    assert initialization.ensure_decode_fast_path_is_available is tables


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
        ({"cache": "paged"}, 8, "chunked attention"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kwargs, chunk, text, monkeypatch):
    module = torch.nn.Module()
    module.config = DECODERS["llama"].build("sdpa", num_hidden_layers=1).config
    module.config.attention_chunk_size = chunk
    if kwargs["cache"] == "paged":
        kwargs = kwargs | {"cache": object.__new__(PagedAttentionCache)}
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=text):
        tpu_attention(module, q, k, k, None, **kwargs)
