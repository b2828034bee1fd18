"""The fallbacks against attention written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_kernels import fallback

B, HQ, HKV, Q, KV, D = 2, 6, 2, 5, 9, 8


def reference(q, k, v, allowed, scale, softcap=0.0, sinks=None, bias=None):
    """Row by row in float64, with Python loops over batch, head and query."""
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
                keys = allowed[b, i].nonzero()[:, 0]
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
