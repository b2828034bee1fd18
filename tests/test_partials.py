"""attention_with_lse and merge_partials against one call over all keys, and against float64 formulas."""

from __future__ import annotations

import pytest
import torch

import tpu_kernels
from tpu_kernels import attention_with_lse, merge_partials, position_ranges


def tensors(q_len: int, kv_len: int, heads=(4, 2), dtype=torch.float32, seed: int = 0):
    make = torch.Generator().manual_seed(seed)
    shapes = ((2, heads[0], q_len, 16), (2, heads[1], kv_len, 16), (2, heads[1], kv_len, 16))
    return tuple(torch.randn(shape, generator=make).to(dtype) for shape in shapes)


def exact(q, k, v, seen, scale=0.25, sinks=None):
    """(out, lse) in float64. seen: bool [B or 1, Q, KV]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) * scale).masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return weights[..., : k.shape[2]] @ v, lse


def parts_of(q, k, v, cuts, window=None):
    """One causal partial result for each run of keys between two cuts; queries are the last rows of the sequence."""
    positions = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    parts = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        starts, ends = position_ranges(positions, start, end - start, window=window)
        parts.append(attention_with_lse(q, k[:, :, start:end], v[:, :, start:end], starts=starts, ends=ends))
    return parts


def causal(q_len: int, kv_len: int, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)[None]
    return ((distance >= 0) & (distance < (window or kv_len)))[None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_parts_are_attention_over_all_keys(window, with_sinks):
    q, k, v = tensors(16, 24)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    out, lse = merge_partials(*zip(*parts_of(q, k, v, (0, 8, 16, 24), window), strict=True), sinks=sinks)
    wanted, wanted_lse = exact(q, k, v, causal(16, 24, window), sinks=sinks)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-6)


def test_merging_in_groups_gives_the_same():
    q, k, v = tensors(16, 24)
    parts = parts_of(q, k, v, (0, 8, 16, 24))
    together = merge_partials(*zip(*parts, strict=True))
    pair = merge_partials(*zip(*parts[1:], strict=True))
    in_groups = merge_partials(*zip(pair, parts[0], strict=True))
    for one, other in zip(together, in_groups, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_one_call_gives_the_denominators():
    q, k, v = tensors(16, 24)
    out, lse = attention_with_lse(q, k, v, scaling=0.5)
    wanted, wanted_lse = exact(q, k, v, torch.ones(1, 16, 24, dtype=torch.bool), scale=0.5)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-6)


def test_hidden_keys_count_in_no_denominator():
    q, k, v = tensors(16, 24)
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, 3:9] = False
    out, lse = attention_with_lse(q, k, v, key_valid=valid)
    wanted, wanted_lse = exact(q, k, v, valid[:, None].expand(2, 16, 24))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-6)


def test_rows_that_see_nothing_anywhere_are_zero_and_have_finite_gradients():
    q, k, v = tensors(16, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    nothing = torch.zeros(16, dtype=torch.int32)
    ends = nothing.clone()
    ends[4:] = 8
    parts = [
        attention_with_lse(q, k[:, :, :8], v[:, :, :8], starts=nothing, ends=ends),
        attention_with_lse(q, k[:, :, 8:], v[:, :, 8:], starts=nothing, ends=nothing),
    ]
    out, lse = merge_partials(*zip(*parts, strict=True))
    assert torch.equal(out[:, :, :4], torch.zeros_like(out[:, :, :4]))
    assert torch.isneginf(lse[:, :, :4]).all() and torch.isfinite(lse[:, :, 4:]).all()
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert torch.equal(leaves[1].grad[:, :, 8:], torch.zeros_like(k[:, :, 8:]))


def test_a_sink_takes_rows_that_see_nothing():
    sinks = torch.tensor([2.0, -1.0])
    nothing = [torch.zeros(1, 2, 3, 4)], [torch.full((1, 2, 3), float("-inf"))]
    out, lse = merge_partials(*nothing, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))


def test_large_scores_neither_overflow_nor_lose_the_smaller_part():
    out = [torch.full((1, 1, 1, 2), 1.0), torch.full((1, 1, 1, 2), 3.0)]
    lse = [torch.full((1, 1, 1), 5000.0), torch.full((1, 1, 1), 5000.0)]
    merged, merged_lse = merge_partials(out, lse)
    assert torch.equal(merged, torch.full((1, 1, 1, 2), 2.0))
    torch.testing.assert_close(merged_lse, torch.full((1, 1, 1), 5000.0 + 0.6931472))


def test_gradients_through_the_merge_are_those_of_one_call():
    q, k, v = tensors(16, 16)
    weight, weight_lse = torch.randn(q.shape), torch.randn(q.shape[:-1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = merge_partials(*zip(*parts_of(*leaves, (0, 8, 16)), strict=True))
    made = torch.autograd.grad((out * weight).sum() + (lse * weight_lse).sum(), leaves)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*doubles, causal(16, 16))
    wanted = torch.autograd.grad((out * weight).sum() + (lse * weight_lse).sum(), doubles)
    for mine, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_parts_merge_to_bfloat16_accuracy():
    q, k, v = tensors(16, 24, dtype=torch.bfloat16)
    out, lse = merge_partials(*zip(*parts_of(q, k, v, (0, 8, 24)), strict=True))
    wanted, wanted_lse = exact(q, k, v, causal(16, 24))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # Parts and result are each rounded to 8 bits, and the weights of the parts to as many inside the kernel.
    assert (out.double() - wanted).abs().max() <= 3 * 2**-8 * wanted.abs().max()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], []), "at least one"),
        (([torch.zeros(1, 1, 2, 4)], []), "1 and 0"),
        (([torch.zeros(1, 1, 2, 4)], [torch.zeros(1, 1, 3)]), r"lse \(1, 1, 3\)"),
        (([torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)], [torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)]), "differ"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        merge_partials(*arguments)


def test_sinks_of_another_number_of_heads_are_refused():
    with pytest.raises(ValueError, match="each of 3 heads"):
        merge_partials([torch.zeros(1, 3, 2, 4)], [torch.zeros(1, 3, 2)], sinks=torch.zeros(2))


def test_calls_that_no_kernel_can_do_are_refused(monkeypatch):
    q, k, v = tensors(8, 8)
    with pytest.raises(ValueError, match="starts has shape"):
        attention_with_lse(q, k, v, starts=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="key_valid is torch.int64"):
        attention_with_lse(q, k, v, key_valid=torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not compute in this dtype"):
        attention_with_lse(q.half(), k.half(), v.half())
    monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")
    with pytest.raises(ValueError, match="TPU_KERNELS_DISABLE"):
        attention_with_lse(q, k, v)


def test_they_are_public():
    for name in ("attention_with_lse", "merge_partials", "position_ranges"):
        assert name in tpu_kernels.__all__ and callable(getattr(tpu_kernels, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tpu_kernels.nothing  # noqa: B018
