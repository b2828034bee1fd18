"""Random attention calls, and attention in float64 to hold them against, written out pair by pair.

Compiling a shape's emulation takes a hundred times as long as running it. So most calls take their geometry (what a
program is compiled for) from a fixed list, drawn once from the same distribution as the fresh ones; ranges, validity,
values, layouts and poison are drawn anew for each call.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import tpu_kernels
from tpu_kernels import attention
from tpu_kernels.mask_encoding import encode_ranges

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER = torch.nn.Identity()
LENGTHS = (*range(1, 21), *(63, 64, 65, 127, 128, 129, 200, 257) * 2)


@dataclass(frozen=True)
class Geometry:
    """What a program is compiled for, and nothing else."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    mask: str
    softcap: float | None
    sinks: bool
    bias: bool
    scaling: float | None
    gradients: bool

    @property
    def reason(self) -> str:
        """The reason code that `explain()` must give."""
        if self.dtype == "float16":
            return "dtype"
        if self.bias:
            return "position_bias"
        return "dense_mask" if self.mask in ("bool", "float") else "kernel"


@dataclass(frozen=True)
class Call:
    """One random call; tensors and masks are made from `seed`."""

    geometry: Geometry
    seed: int
    magnitude: float
    ranges: str
    layout: str
    poison: float | None


Pick = Callable[[Sequence[Any]], Any]


def _geometry(pick: Pick) -> Geometry:
    head_dim = pick((8, 16, 40, 64, 72, 128))
    return Geometry(
        batch=pick((1, 2, 3)),
        kv_heads=pick((1, 2, 3)),
        group=pick((1, 1, 2, 3, 8)),
        q_len=pick(LENGTHS),
        kv_len=pick(LENGTHS),
        head_dim=head_dim,
        v_head_dim=pick((head_dim, head_dim, 24, 128)),
        dtype=pick(("float32", "float32", "bfloat16", "bfloat16", "float16")),
        mask=pick(("none", "causal", "ranges", "ranges", "ranges+validity", "ranges+validity", "bool", "float")),
        softcap=pick((None, None, None, 5.0, 50.0)),
        sinks=pick((False, False, True)),
        bias=pick((False, False, False, False, False, True)),
        scaling=pick((None, None, 1.0, 0.05)),
        gradients=pick((False,) * 7 + (True,)),
    )


@functools.cache
def listed(count: int, seed: int = 7) -> tuple[Geometry, ...]:
    """The first `count` geometries of a list that is fixed for each seed."""
    source = random.Random(seed)
    return tuple(_geometry(source.choice) for _ in range(count))


@st.composite
def calls(draw: Any, geometries: tuple[Geometry, ...], fresh: int) -> Call:
    """Calls of which one in `fresh` (0: none) has a geometry of its own, the others one of `geometries`."""
    if fresh and draw(st.integers(1, fresh)) == fresh:
        geometry = _geometry(lambda choices: draw(st.sampled_from(choices)))
    else:
        geometry = draw(st.sampled_from(geometries))
    # Gradients behind a softcap that saturates are 1 - tanh^2 near 1: rounding and nothing else, in SDPA's formula too.
    magnitudes = (1.0, 0.01) if geometry.gradients and geometry.softcap else (1.0, 0.01, 8.0)
    return Call(
        geometry=geometry,
        seed=draw(st.integers(0, 2**31)),
        magnitude=draw(st.sampled_from(magnitudes)),
        ranges=draw(st.sampled_from(("any", "ordered", "causal", "window", "empty rows", "one key"))),
        layout=draw(st.sampled_from(("plain", "transposed", "sliced", "expanded"))),
        poison=draw(st.sampled_from((None, math.nan, math.inf, -math.inf, 3e38))),
    )


def laid_out(shape: tuple[int, ...], layout: str, generator: torch.Generator, magnitude: float) -> torch.Tensor:
    batch, heads, length, dim = shape
    if layout == "transposed":  # as models make them: [B, S, H, D] seen as [B, H, S, D]
        made = torch.randn(batch, length, heads, dim, generator=generator).transpose(1, 2)
    elif layout == "sliced":  # a view into something larger, with a step
        made = torch.randn(batch, heads, 2 * length + 1, dim + 3, generator=generator)[:, :, 1::2, 1 : dim + 1]
    elif layout == "expanded":  # one sequence seen by the whole batch
        made = torch.randn(1, heads, length, dim, generator=generator)
    else:
        made = torch.randn(shape, generator=generator)
    return made * magnitude


def random_ranges(
    kind: str, batch: int, q_len: int, kv_len: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends [B, Q] of a kind; some reach past the keys on either side."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or (batch, q_len), generator=generator)

    starts, ends = integers(-3, kv_len + 3), integers(-3, kv_len + 5)
    if kind == "ordered":
        return torch.minimum(starts, ends), torch.maximum(starts, ends)
    if kind == "causal":  # behind left padding
        position = torch.arange(q_len) + kv_len - q_len
        return integers(0, kv_len, batch, 1).expand(batch, q_len), (position + 1).expand(batch, q_len)
    if kind == "window":
        position = (torch.arange(q_len) + kv_len - q_len).expand(batch, q_len)
        return position + 1 - integers(1, kv_len + 1, batch, 1), position + 1
    if kind == "empty rows":
        nothing = torch.rand(batch, q_len, generator=generator) < 0.5
        return torch.where(nothing, ends, 0), torch.where(nothing, ends, kv_len)
    if kind == "one key":
        return starts, starts + 1
    return starts, ends


@dataclass
class Made:
    """The tensors of a call. visible: bool, or None for every pair; added: float32 or wider, or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    causal: bool
    visible: torch.Tensor | None
    added: torch.Tensor | None
    hidden_keys: torch.Tensor | None


def make(call: Call) -> Made:
    g = call.geometry
    generator = torch.Generator().manual_seed(call.seed)
    heads, dtype = g.kv_heads * g.group, DTYPES[g.dtype]
    shapes = (
        (g.batch, heads, g.q_len, g.head_dim),
        (g.batch, g.kv_heads, g.kv_len, g.head_dim),
        (g.batch, g.kv_heads, g.kv_len, g.v_head_dim),
    )
    q, k, v = (laid_out(shape, call.layout, generator, call.magnitude).to(dtype) for shape in shapes)
    sinks = torch.randn(heads, generator=generator) * 3 if g.sinks else None
    mask = visible = added = bias = hidden = None
    keys = torch.arange(g.kv_len)
    causal = g.mask == "causal" and g.q_len > 1
    if causal:
        visible = keys <= torch.arange(g.q_len)[:, None]
    elif g.mask.startswith("ranges"):
        starts, ends = random_ranges(call.ranges, g.batch, g.q_len, g.kv_len, generator)
        visible = ((keys >= starts[..., None]) & (keys < ends[..., None]))[:, None]
        valid = None
        if g.mask == "ranges+validity":
            valid = torch.rand(g.batch, g.kv_len, generator=generator) < 0.7
            visible = visible & valid[:, None, None]
        mask = encode_ranges(starts, ends, valid, g.kv_len)
        if call.poison is not None:
            hidden = ~visible.any(2)[:, 0, :, None][:, None]  # [B, 1, KV, 1]: keys that no row of the sequence sees
    elif g.mask == "bool":
        visible = mask = torch.rand(g.batch, 1, g.q_len, g.kv_len, generator=generator) < 0.6
    elif g.mask == "float":
        gone = torch.rand(g.batch, 1, g.q_len, g.kv_len, generator=generator) < 0.3
        added = mask = torch.randn(gone.shape, generator=generator).masked_fill(gone, -math.inf).to(dtype)
    if g.bias:
        bias = torch.randn(1, heads, g.q_len, g.kv_len, generator=generator).to(dtype)
        added = bias if added is None else added.double() + bias.double()
    if call.layout == "expanded":
        q, k, v = (each.expand(shape) for each, shape in zip((q, k, v), shapes, strict=True))
    return Made(q, k, v, sinks, mask, bias, causal, visible, added, hidden)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, visible: torch.Tensor | None,
    added: torch.Tensor | None, geometry: Geometry, dtype: torch.dtype, scores_dtype: torch.dtype,
    flash: bool = False, tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
) -> torch.Tensor:  # fmt: skip
    """Attention with products in `dtype` and softmax in `scores_dtype`, [B, Q, Hq, Dv]; rows without keys are 0.

    flash: gradients by the formula that SDPA's own backward uses.
    """
    group = geometry.group
    scale = geometry.head_dim**-0.5 if geometry.scaling is None else geometry.scaling
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).to(scores_dtype) * scale
    if geometry.softcap:
        scores = geometry.softcap * tanh(scores / geometry.softcap)
    if added is not None:
        scores = scores + added.to(scores.device, scores_dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible.to(scores.device), -math.inf)
    if sinks is not None:  # one more key a head, whose value is 0
        sink = sinks.to(scores_dtype)[None, :, None, None]
        scores, v = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1), F.pad(v, (0, 0, 0, 1))
    out: torch.Tensor = _Weighted.apply(scores, v) if flash else _weights(scores).to(dtype) @ v
    return out.transpose(1, 2)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Softmax; 0 in rows of -inf alone."""
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(torch.isinf(top), 0.0, top).detach())
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


class _Weighted(torch.autograd.Function):
    """softmax(scores) v with the backward pass of flash attention: what all scores of a row share comes from the output."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = _weights(scores)
        out = weights.to(v.dtype) @ v
        ctx.save_for_backward(weights, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, v, out = ctx.saved_tensors
        shared = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
        of_weights = (grad @ v.transpose(-1, -2)).to(weights.dtype)
        return weights * (of_weights - shared), weights.to(v.dtype).transpose(-1, -2) @ grad


class _XlaTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        import jax.numpy as jnp

        room = 1 << x.numel().bit_length()  # few lengths, since each is compiled
        padded = F.pad(x.detach().cpu().reshape(-1), (0, room - x.numel()))
        made = torch.from_dlpack(jnp.tanh(jnp.from_dlpack(padded)))[: x.numel()].reshape(x.shape).to(x.device)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        return grad * (1 - made * made)


def peer(
    inputs: list[torch.Tensor], sinks: torch.Tensor | None, made: Made, geometry: Geometry, order: int | None
) -> torch.Tensor:
    """SDPA in the call's dtype, [B, Q, Hq, Dv]; eager with a float32 softmax where SDPA cannot (softcap, sinks).

    order: None for the call as it is. Else the same call as part of a longer one, of whole blocks of 128 rows and 128 keys
    as kernels compute it, the head's dimensions in the order of that number: torch sums the products of small matrices in
    shorter chains, which makes its errors on a few rows or keys several times smaller. And tanh is XLA's, which is off by up
    to 4 units in the last place on CPU, where torch's is by half a unit.
    """
    q, k, v = inputs
    visible, added, rows, tanh = made.visible, made.added, geometry.q_len, torch.tanh
    if order is not None:
        dims = torch.randperm(geometry.head_dim, generator=torch.Generator().manual_seed(order)).to(q.device)
        more, more_keys = -rows % 128, -geometry.kv_len % 128
        q, k, v = F.pad(q[..., dims], (0, 0, 0, more)), *(F.pad(x, (0, 0, 0, more_keys)) for x in (k[..., dims], v))
        if visible is None:
            visible = torch.ones(1, 1, rows, geometry.kv_len, dtype=torch.bool)
        visible = F.pad(visible, (0, more_keys, 0, more))
        added = None if added is None else F.pad(added, (0, more_keys, 0, more))
        tanh = _XlaTanh.apply
    if geometry.softcap or geometry.sinks:
        return written_out(q, k, v, sinks, visible, added, geometry, q.dtype, torch.float32, flash=True, tanh=tanh)[:, :rows]
    mask = visible
    if added is not None:
        mask = added.to(q.dtype)
        mask = mask if visible is None else mask.masked_fill(~visible, -math.inf)
    mask = None if mask is None else mask.to(q.device)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=geometry.scaling, enable_gqa=True)
    return out.transpose(1, 2)[:, :rows]


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute error; infinite where there is a NaN."""
    return float((got.double() - exact).abs().amax().nan_to_num(math.inf)) if got.numel() else 0.0


Computed = tuple[torch.Tensor, ...]


def with_gradients(
    compute: Callable[[list[torch.Tensor], torch.Tensor | None], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    call: Call,
) -> Computed:
    """(output, and in a call with gradients those of q, k, v and sinks), on the CPU, of a weighted sum of the output."""
    wanted = call.geometry.gradients
    inputs = [each.detach().clone().requires_grad_() if wanted else each for each in inputs]
    if wanted and sinks is not None:
        sinks = sinks.detach().clone().requires_grad_()
    with torch.set_grad_enabled(wanted):
        out = compute(inputs, sinks)
    if not wanted:
        return (out.cpu(),)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(call.seed + 1)).to(out)
    gradients = torch.autograd.grad((out * weights).sum(), [*inputs, *([] if sinks is None else [sinks])])
    return (out.detach().cpu(), *(each.cpu() for each in gradients))


def check(call: Call, device: str = "cpu") -> tuple[str, bool]:
    """Make the call and hold it against float64: (the reason code of its route, whether a longer peer was needed).

    The largest error, of the output and of each gradient, is at most twice the peer's in the same dtype on the same inputs,
    plus one unit in the last place of the largest number (two for a gradient). Fake tensors give the same shape and strides.
    """
    g, made = call.geometry, make(call)
    mask, bias = (None if each is None else each.to(device) for each in (made.mask, made.bias))
    inputs = [each.to(device) for each in (made.q, made.k, made.v)]
    sinks = None if made.sinks is None else made.sinks.to(device)

    def attend(inputs: list[Any], sinks: Any, mask: Any = mask, bias: Any = bias) -> torch.Tensor:
        return attention.tpu_attention(
            LAYER, *inputs, mask, scaling=g.scaling, softcap=g.softcap, s_aux=sinks, position_bias=bias,
            is_causal=made.causal,
        )[0]  # fmt: skip

    def attend_poisoned(inputs: list[torch.Tensor], sinks: torch.Tensor | None) -> torch.Tensor:
        if made.hidden_keys is not None and g.reason == "kernel":
            hidden = made.hidden_keys.to(device)
            inputs = [inputs[0], *(each.masked_fill(hidden, call.poison) for each in inputs[1:])]
        return attend(inputs, sinks)

    tpu_kernels.reset()
    ours = with_gradients(attend_poisoned, inputs, sinks, call)
    (row,) = tpu_kernels.explain(LAYER).rows
    assert row.reason == g.reason, f"{call}\n{row}: expected {g.reason}"
    got = ours[0]
    assert got.shape == (g.batch, g.q_len, g.kv_heads * g.group, g.v_head_dim)
    assert got.is_contiguous() and got.dtype == DTYPES[g.dtype]
    mode = FakeTensorMode()
    fakes = [None if each is None else mode.from_tensor(each) for each in (*inputs, sinks, mask, bias)]
    with mode, torch.no_grad():
        faked = attend(fakes[:3], *fakes[3:])
    assert (faked.shape, faked.stride(), faked.dtype) == (got.shape, got.stride(), got.dtype)

    def formula(inputs: list[torch.Tensor], sinks: torch.Tensor | None) -> torch.Tensor:
        return written_out(*inputs, sinks, made.visible, made.added, g, torch.float64, torch.float64)

    exact = with_gradients(
        formula, [each.cpu().double() for each in inputs], None if sinks is None else sinks.cpu().double(), call
    )
    errors = [error_of(mine, right) for mine, right in zip(ours, exact, strict=True)]
    eps = torch.finfo(DTYPES[g.dtype]).eps
    allowed = [(1 if i == 0 else 2) * eps * float(right.abs().max()) for i, right in enumerate(exact)]
    theirs = [0.0] * len(errors)
    for order in (None, *range(8)):
        compute = functools.partial(peer, made=made, geometry=g, order=order)
        made_by_peer = with_gradients(lambda inputs, sinks, compute=compute: compute(inputs, sinks), inputs, sinks, call)
        theirs = [max(old, error_of(each, right)) for old, each, right in zip(theirs, made_by_peer, exact, strict=True)]
        if all(error <= 2 * other + unit for error, other, unit in zip(errors, theirs, allowed, strict=True)):
            return row.reason, order is not None
    names = ("output", "dq", "dk", "dv", "dsinks")[: len(errors)]
    numbers = zip(names, errors, theirs, allowed, strict=True)
    lines = [f"{name}: error {error:.2e}, SDPA's {other:.2e}, unit {unit:.1e}" for name, error, other, unit in numbers]
    raise AssertionError("\n".join((str(call), str(row), *lines)))
