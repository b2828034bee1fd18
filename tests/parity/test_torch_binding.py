"""The kernel module on its own, bound to stock transformers with SDPA's masks."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from range_attention_reference import range_attention
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

attention = range_attention.flash_attn_forward


def inputs(q_len: int, kv_len: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    sizes = ((2, heads, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 16))
    return [torch.randn(size, generator=g).to(dtype) for size in sizes]


def module(**fields: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=2, **fields)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry a call, True when the kernel ran it."""
    binding = sys.modules[attention.__module__]
    calls: list[bool] = []
    decide = binding._kernel_can

    def record(*arguments: Any) -> bool:
        calls.append(decide(*arguments))
        return calls[-1]

    monkeypatch.setattr(binding, "_kernel_can", record)
    return calls


@pytest.mark.parametrize("lengths", [(9, 9), (9, 20), (20, 9), (1, 20)])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_no_mask_means_what_it_means_to_sdpa(
    lengths: tuple[int, int], is_causal: bool | None, kernel_calls: list[bool]
) -> None:
    q, k, v = inputs(*lengths)
    for layer in (module(), module(is_causal=False)):
        out, weights = attention(layer, q, k, v, None, is_causal=is_causal)
        expected, _ = sdpa_attention_forward(layer, q, k, v, None, is_causal=is_causal)
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
        assert weights is None and out.is_contiguous()
    assert kernel_calls == [True, True]


def test_masks(kernel_calls: list[bool]) -> None:
    q, k, v = inputs(1, 20)
    padding = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    padding[0, ..., :7] = False
    q9, k9, v9 = inputs(9, 9)
    square = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~square, torch.finfo(torch.float32).min)
    for tensors, mask in (((q, k, v), padding), ((q9, k9, v9), square), ((q9, k9, v9), additive)):
        out, _ = attention(module(), *tensors, mask)
        torch.testing.assert_close(out, sdpa_attention_forward(module(), *tensors, mask)[0], rtol=2e-6, atol=2e-6)
    assert kernel_calls == [True, False, False]


@pytest.mark.parametrize("masked", [False, True])
def test_softcap_sinks_and_bias_are_never_dropped(masked: bool, kernel_calls: list[bool]) -> None:
    """The kernel (no mask) and the written-out formula (mask) against each other and against plain torch."""
    q, k, v = inputs(9, 9)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9) if masked else None
    sinks, bias = torch.tensor([-1.0, 0.0, 1.0, 3.0]), torch.randn(1, 4, 9, 9)

    def expected(softcap: float | None, s_aux: torch.Tensor | None, position_bias: torch.Tensor | None) -> torch.Tensor:
        s = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 4
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s if position_bias is None else s + position_bias
        s = s.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        total = s.exp().sum(-1, keepdim=True)
        total = total if s_aux is None else total + s_aux.double().exp()[None, :, None, None]
        return (s.exp() / total @ v.double().repeat_interleave(2, 1)).transpose(1, 2).float()

    for extras in (dict(softcap=0.5), dict(s_aux=sinks), dict(softcap=2.0, s_aux=sinks), dict(position_bias=bias)):
        wanted = expected(**{"softcap": None, "s_aux": None, "position_bias": None, **extras})
        out, _ = attention(module(), q, k, v, mask, **extras)
        torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-6)
    assert kernel_calls == [not masked] * 3 + [False]


def test_window_without_a_mask() -> None:
    q, k, v = inputs(20, 20)
    distance = torch.arange(20)[:, None] - torch.arange(20)[None]
    mask = ((distance >= 0) & (distance < 5)).expand(2, 1, 20, 20)
    expected, _ = sdpa_attention_forward(module(), q, k, v, mask)
    out, _ = attention(module(), q, k, v, None, sliding_window=5)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    out, _ = attention(module(), q.half(), k.half(), v.half(), None, sliding_window=5)  # not by the kernel
    torch.testing.assert_close(out.float(), expected, rtol=5e-3, atol=5e-3)
    one, _ = attention(module(), q[:, :, -1:], k, v, None, sliding_window=5)  # a decoding step: the newest row
    torch.testing.assert_close(one[:, 0], expected[:, -1], rtol=2e-6, atol=2e-6)
    unmasked, _ = attention(module(), q, k, v, None, sliding_window=20)
    torch.testing.assert_close(unmasked, attention(module(), q, k, v, None)[0])
    with pytest.raises(ValueError, match="sliding_window"):
        attention(module(), q, k, v, None, sliding_window=5, is_causal=False)


def test_gradients_dropout_and_half_go_to_sdpa(kernel_calls: list[bool]) -> None:
    q, k, v = inputs(9, 9)
    k.requires_grad_()
    attention(module(), q, k, v, None)[0].sum().backward()
    assert k.grad is not None
    sinks = torch.zeros(4, requires_grad=True)
    attention(module(), q.detach(), k.detach(), v, None, s_aux=sinks)[0].sum().backward()
    assert sinks.grad is not None and sinks.grad.abs().sum() > 0
    with torch.no_grad():
        attention(module(), q, k, v, None)
        attention(module(), q, k, v, None, dropout=0.5)
        attention(module(), q.half(), k.half(), v.half(), None)
    assert kernel_calls == [False, False, True, False, False]


def test_compiles_to_one_graph() -> None:
    q, k, v = inputs(9, 9)
    layer = torch.nn.Linear(1, 1)  # any module
    compiled = torch.compile(lambda *x: attention(layer, *x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attention(layer, q, k, v)[0])


def test_a_model_in_stock_transformers() -> None:
    AttentionInterface.register("range_attention_alone", attention)
    AttentionMaskInterface.register("range_attention_alone", sdpa_mask)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 9))
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    results = {}
    for name in ("eager", "range_attention_alone"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits = [model(ids).logits, model(ids, attention_mask=padding).logits[1, 4:]]
            tokens = model.generate(ids, attention_mask=padding, max_new_tokens=5, do_sample=False)
        results[name] = (*logits, tokens)
    for ours, theirs in zip(results["range_attention_alone"], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
