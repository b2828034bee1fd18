"""Random calls over the whole request space against attention in float64, written out pair by pair.

Whatever route a call takes, the numbers must be right: the largest error is at most twice that of the same formula computed
in the call's own dtype, plus one unit in the last place of the largest output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tpu_kernels
from tpu_kernels.attention import tpu_attention
from tpu_kernels.mask_encoding import encode_ranges

DIMS = (8, 16, 40, 64, 72, 128)
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from((63, 64, 65, 127, 128, 129, 200, 257)))


@dataclass(frozen=True)
class Call:
    """One random call; tensors are made from `seed`."""

    seed: int
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    magnitude: float
    mask: str
    softcap: float | None
    sinks: bool
    bias: bool
    scaling: float | None
    layout: str


@st.composite
def calls(draw) -> Call:
    head_dim = draw(st.sampled_from(DIMS))
    return Call(
        seed=draw(st.integers(0, 2**31)),
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 1, 2, 3, 8))),
        q_len=draw(LENGTHS),
        kv_len=draw(LENGTHS),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from((head_dim, head_dim, 24, 128))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16))),
        magnitude=draw(st.sampled_from((1.0, 0.01, 8.0))),
        mask=draw(st.sampled_from(("none", "causal", "ranges", "ranges+validity", "bool", "float"))),
        softcap=draw(st.sampled_from((None, None, None, 5.0, 50.0))),
        sinks=draw(st.sampled_from((False, False, True))),
        bias=draw(st.sampled_from((False, False, False, True))),
        scaling=draw(st.sampled_from((None, None, 1.0, 0.05))),
        layout=draw(st.sampled_from(("plain", "transposed", "sliced", "expanded"))),
    )


def laid_out(shape, layout: str, generator, dtype, magnitude) -> torch.Tensor:
    batch, heads, length, dim = shape
    if layout == "transposed":  # as models make them: [B, S, H, D] seen as [B, H, S, D]
        made = torch.randn(batch, length, heads, dim, generator=generator).transpose(1, 2)
    elif layout == "sliced":  # a view into something larger, with a step
        made = torch.randn(batch, heads, 2 * length + 1, dim + 3, generator=generator)[:, :, 1::2, 1 : dim + 1]
    elif layout == "expanded":  # one sequence seen by the whole batch
        made = torch.randn(1, heads, length, dim, generator=generator).expand(shape)
    else:
        made = torch.randn(shape, generator=generator)
    return (made * magnitude).to(dtype) if layout != "expanded" else (made[:1] * magnitude).to(dtype).expand(shape)


def random_ranges(call: Call, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Any starts and ends, also past the keys, before them, and empty."""
    shape = (call.batch, call.q_len)
    return (
        torch.randint(-3, call.kv_len + 3, shape, generator=generator),
        torch.randint(-3, call.kv_len + 5, shape, generator=generator),
    )


def reference(q, k, v, visible, added, scale, softcap, sinks, dtype) -> torch.Tensor:
    """Attention in `dtype`, [B, Q, Hq, Dv]; rows without keys are 0."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added.to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores.double(), -1).nan_to_num(0.0).to(dtype)[..., : k.shape[2]]
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def check(call: Call) -> str:
    generator = torch.Generator().manual_seed(call.seed)
    make = lambda shape: laid_out(shape, call.layout, generator, call.dtype, call.magnitude)  # noqa: E731
    heads = call.kv_heads * call.group
    q = make((call.batch, heads, call.q_len, call.head_dim))
    k = make((call.batch, call.kv_heads, call.kv_len, call.head_dim))
    v = make((call.batch, call.kv_heads, call.kv_len, call.v_head_dim))
    sinks = torch.randn(heads, generator=generator) * 3 if call.sinks else None
    added = visible = mask = None
    causal = False
    pairs = (call.batch, 1, call.q_len, call.kv_len)
    keys = torch.arange(call.kv_len)
    if call.mask == "causal":
        causal = call.q_len > 1
        visible = keys <= torch.arange(call.q_len)[:, None] if causal else None
    elif call.mask.startswith("ranges"):
        starts, ends = random_ranges(call, generator)
        visible = ((keys >= starts[..., None]) & (keys < ends[..., None]))[:, None]
        valid = None
        if call.mask == "ranges+validity":
            valid = torch.rand(call.batch, call.kv_len, generator=generator) < 0.7
            visible = visible & valid[:, None, None]
        mask = encode_ranges(starts, ends, valid, call.kv_len)
    elif call.mask == "bool":
        visible = mask = torch.rand(pairs, generator=generator) < 0.6
    elif call.mask == "float":
        hidden = torch.rand(pairs, generator=generator) < 0.3
        added = mask = torch.randn(pairs, generator=generator).masked_fill(hidden, -math.inf).to(call.dtype)
    bias = None
    if call.bias:
        bias = torch.randn(1, heads, call.q_len, call.kv_len, generator=generator).to(call.dtype)
        added = bias if added is None else added.double() + bias.double()
    scale = call.head_dim**-0.5 if call.scaling is None else call.scaling

    tpu_kernels.reset()
    with torch.no_grad():
        got, _ = tpu_attention(
            torch.nn.Identity(), q, k, v, mask, scaling=call.scaling, softcap=call.softcap, s_aux=sinks,
            position_bias=bias, is_causal=causal,
        )  # fmt: skip
    (row,) = tpu_kernels.explain().rows
    assert got.is_contiguous() and got.dtype == call.dtype
    assert got.shape == (call.batch, call.q_len, heads, call.v_head_dim)

    options = (visible, added, scale, call.softcap, sinks)
    exact = reference(q, k, v, *options, torch.float64)
    same_dtype = (reference(q, k, v, *options, call.dtype).double() - exact).abs().max()
    unit = torch.finfo(call.dtype).eps * exact.abs().max()
    error = (got.double() - exact).abs().max()
    assert error <= 2 * same_dtype + unit, f"{call}\n{row}: error {error:.2e}, in the same dtype {same_dtype:.2e}"
    return row.reason


@pytest.mark.slow
@given(calls())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
def test_many_random_calls_are_right_on_any_route(call):
    check(call)


def test_random_calls_are_right_on_any_route():
    """The same few each time; most of them run on the kernel, and some on each fallback."""
    reasons = set()

    @given(calls())
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def collect(call):
        reasons.add(check(call))

    collect()
    assert {"kernel", "dtype", "dense_mask", "position_bias"} <= reasons
