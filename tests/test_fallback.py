"""The fallbacks against attention written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_kernels import fallback

B, HQ, HKV, Q, KV, D = 2, 6, 2, 5, 9, 8


def reference(q, k, v, allowed, scale, softcap=0.0, sinks=None, bias=None):
    """Row by row in float64, with Python loops over batch, head and query. allowed: [B, Q, KV] or [B, Hq, Q, KV]."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                scores = (k[b, group].double() @ q[b, h, i].double()) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if bias is not None:
                    scores = scores + bias[0, h, i].double()
                keys = (allowed[b, i] if allowed.dim() == 3 else allowed[b, h, i]).nonzero()[:, 0]
                if len(keys) == 0:
                    continue
                weights = torch.exp(scores[keys])
                total = weights.sum() + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                out[b, h, i] = (weights / total) @ v[b, group, keys].double()
    return out


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(B, HQ, Q, D, generator=generator)
    k = torch.randn(B, HKV, KV, D, generator=generator)
    v = torch.randn(B, HKV, KV, D + 2, generator=generator)
    allowed = torch.rand(B, Q, KV, generator=generator) < 0.6
    allowed[0, 2] = False  # a row without keys
    return q, k, v, allowed


def top_left(q_len, kv_len):
    return torch.ones(B, q_len, kv_len, dtype=torch.bool).tril()


def close(got, want):
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("run", ["sdpa", "eager"])
def test_bool_mask_gqa_and_empty_rows(run, tensors):
    q, k, v, allowed = tensors
    got = getattr(fallback, run)(q, k, v, allowed[:, None], causal=False, scale=0.3)
    got = got[0] if run == "eager" else got
    close(got, reference(q, k, v, allowed, 0.3))
    assert (got[0, :, 2] == 0).all()


@pytest.mark.parametrize("run", ["sdpa", "eager"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 9), (5, 5), (9, 5)])
def test_causal_is_aligned_at_the_first_key(run, q_len, kv_len):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(B, HKV, n, D, generator=generator) for n in (q_len, kv_len, kv_len))
    got = getattr(fallback, run)(q, k, v, None, causal=True, scale=0.3)
    close(got[0] if run == "eager" else got, reference(q, k, v, top_left(q_len, kv_len), 0.3))


@pytest.mark.parametrize("run", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_position_bias_is_added_unscaled(run, kind, tensors):
    q, k, v, allowed = tensors
    bias = torch.randn(1, HQ, Q, KV, generator=torch.Generator().manual_seed(5))
    mask, causal = None, False
    if kind == "none":
        allowed = torch.ones_like(allowed)
    elif kind == "causal":
        causal, allowed = True, top_left(Q, KV)
    elif kind == "bool":
        mask = allowed[:, None]
    else:
        mask = torch.zeros(B, 1, Q, KV).masked_fill(~allowed[:, None], float("-inf"))
    got = getattr(fallback, run)(q, k, v, mask, causal=causal, scale=0.3, position_bias=bias)
    close(got[0] if run == "eager" else got, reference(q, k, v, allowed, 0.3, bias=bias))


def test_eager_softcap_before_mask_and_sinks_in_the_denominator(tensors):
    q, k, v, allowed = tensors
    sinks = torch.tensor([-5.0, 0.0, 5.0, 2.0, -1.0, 20.0])
    got, weights = fallback.eager(20 * q, k, v, allowed[:, None], causal=False, scale=0.3, softcap=4.0, sinks=sinks)
    close(got, reference(20 * q, k, v, allowed, 0.3, softcap=4.0, sinks=sinks))
    assert (weights.sum(-1) < 1).all()
    assert (weights[0, :, 2] == 0).all()


def test_eager_gradients_are_finite_with_empty_rows(tensors):
    q, k, v, allowed = (tensor.clone() for tensor in tensors)
    sinks = torch.zeros(HQ, requires_grad=True)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, _ = fallback.eager(q, k, v, allowed[:, None], causal=False, scale=0.3, softcap=4.0, sinks=sinks)
    out.sum().backward()
    for tensor in (q, k, v, sinks):
        assert torch.isfinite(tensor.grad).all()
    assert (q.grad[0, :, 2] == 0).all()


def masked(kind, allowed, dtype=torch.float32):
    """The mask of a kind, and what it allows."""
    if kind == "none":
        return None, torch.ones_like(allowed)
    if kind == "causal":
        return None, top_left(Q, KV)
    if kind == "bool":
        return allowed[:, None], allowed
    hidden = float("-inf") if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(B, 1, Q, KV, dtype=dtype).masked_fill(~allowed[:, None], hidden), allowed


def equal_with_gradients(run, got_inputs, want_inputs, mask, allowed, bias=None, atol=2e-6, **options):
    """Output and gradients of a fallback against those of the reference, which is given other numbers in hidden keys."""
    got_inputs, want_inputs = ([x.detach().clone().requires_grad_() for x in each] for each in (got_inputs, want_inputs))
    added = {} if bias is None else {"position_bias": bias.to(got_inputs[0].dtype)}
    got = getattr(fallback, run)(*got_inputs, mask, **added, **options)
    got = got[0] if run == "eager" else got
    want = reference(*want_inputs, allowed, options["scale"], bias=bias)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (got.double() * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=atol)
    for ours, exact in zip(got_inputs, want_inputs, strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad.double(), atol=2 * atol, rtol=2 * atol)


@pytest.mark.parametrize("run", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "-inf"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3, 1e-30, -1e-30])
def test_any_scale(run, kind, biased, scale, tensors):
    q, k, v, allowed = tensors
    inputs = (q, k, v[..., :D])  # with values of another size torch takes other code, which has no fault here
    allowed = allowed | (torch.arange(KV) == 1)
    mask, allowed = masked(kind, allowed)
    bias = torch.randn(1, HQ, Q, KV, generator=torch.Generator().manual_seed(5)) if biased else None
    equal_with_gradients(run, inputs, inputs, mask, allowed, bias, causal=kind == "causal", scale=scale)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_any_scale_in_float16_beside_dropout(scale, tensors):
    """Other code of torch: half precision, and the path with dropout (here of nothing that shows)."""
    q, k, v = (x[..., :D] for x in tensors[:3])
    close16 = {"atol": 5e-3, "rtol": 5e-3}
    want = reference(q.half(), k.half(), v.half(), top_left(Q, KV), scale)
    got = fallback.sdpa(q.half(), k.half(), v.half(), None, causal=True, scale=scale)
    torch.testing.assert_close(got.double(), want, **close16)
    dropped = fallback.sdpa(q, k, v, None, causal=True, scale=scale, dropout=1e-12)
    close(dropped, reference(q, k, v, top_left(Q, KV), scale))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("run", ["sdpa", "eager"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["causal", "bool", "-inf", "lowest"])
def test_poison_in_keys_that_no_query_sees(kind, biased, run, poison, tensors):
    """Under causality the tail that no row reaches; under a mask, keys that differ between the examples."""
    q, k, v, allowed = tensors
    v = v if biased else v[..., :D]  # torch has other code for values of the queries' size
    allowed = allowed | (torch.arange(KV) == 0)
    allowed[0, :, [1, 4]] = False
    allowed[1, :, 7:] = False
    mask, allowed = masked(kind, allowed)
    bias = torch.randn(1, HQ, Q, KV, generator=torch.Generator().manual_seed(5)) if biased else None
    hidden = ~allowed.any(1)[:, None, :, None]
    assert 4 <= hidden.sum() <= 8
    poisoned = (q, *(x.masked_fill(hidden, poison) for x in (k, v)))
    equal_with_gradients(run, poisoned, (q, k, v), mask, allowed, bias, causal=kind == "causal", scale=0.3)


@pytest.mark.parametrize("run", ["sdpa", "eager"])
def test_poison_under_masks_that_differ_between_heads(run, tensors):
    """A key of a KV head is free only when no query head of its group sees it; a mask of one example serves all."""
    q, k, v, _ = tensors
    allowed = torch.ones(B, HQ, Q, KV, dtype=torch.bool)
    allowed[:, : HQ // HKV, :, 3] = False  # hidden from the first KV head's group alone
    allowed[:, 3, :, 5] = False  # from one head of a group: seen
    poisoned_k, poisoned_v = k.clone(), v.clone()
    for each in (poisoned_k, poisoned_v):
        each[:, 0, 3] = float("nan")
    equal_with_gradients(run, (q, poisoned_k, poisoned_v), (q, k, v), allowed[:1], allowed, causal=False, scale=0.3)


@pytest.mark.parametrize("run", ["sdpa", "eager"])
def test_a_mask_over_every_query_and_every_head_at_once(run, tensors):
    q, k, v, _ = tensors
    keep = torch.arange(KV) < 6
    mask = keep.expand(1, 1, 1, KV)
    poisoned = (q, *(x.masked_fill(~keep[:, None], float("nan")) for x in (k, v)))
    equal_with_gradients(run, poisoned, (q, k, v), mask, keep.expand(B, Q, KV), causal=False, scale=0.3)
    hidden = torch.zeros(B, 1, 1, 1, dtype=torch.bool)  # of the first example every key
    hidden[0] = True
    allowed = ~hidden[:, 0].expand(B, Q, KV)
    poisoned = (q, *(x.masked_fill(hidden, float("nan")) for x in (k, v)))
    equal_with_gradients(run, poisoned, (q, k, v), ~hidden, allowed, causal=False, scale=0.3)


@pytest.mark.parametrize("run", ["sdpa", "eager"])
def test_finite_numbers_in_hidden_keys_still_count_in_rows_that_see_nothing(run, tensors):
    """transformers' additive masks: such a row is the average of all values, and stays it."""
    q, k, v, allowed = tensors
    allowed[:, :, 4] = False
    mask, _ = masked("lowest", allowed)
    got = getattr(fallback, run)(q, k, v, mask, causal=False, scale=0.3)
    got = got[0] if run == "eager" else got
    close(got[0, :, 2], v.double().mean(2)[0].repeat_interleave(HQ // HKV, 0))


def test_poison_that_some_query_sees_is_not_hidden(tensors):
    q, k, v, allowed = tensors
    allowed[:, :, 4] = False
    allowed[0, 1, 4] = True
    v[:, :, 4] = float("nan")
    assert fallback.sdpa(q, k, v, allowed[:, None], causal=False, scale=0.3)[0, :, 1].isnan().all()
