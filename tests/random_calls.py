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
LONG = (2048, 2100)  # with so many keys a mask of pairs is a kernel's too
PAIRS = ("bool", "float")


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
    sinks: str  # "", "float32", or "same" as q
    bias: bool
    scaling: float | None
    gradients: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.scaling is None else self.scaling

    @property
    def reason(self) -> str:
        """The reason code that `explain()` must give."""
        if self.dtype == "float16":
            return "dtype"
        if self.bias:
            return "position_bias"
        return "dense_mask" if self.mask in PAIRS and (self.kv_len < min(LONG) or self.gradients) else "kernel"


@dataclass(frozen=True)
class Call:
    """One random call; tensors and masks are made from `seed`."""

    geometry: Geometry
    seed: int
    magnitude: float
    ranges: str
    shape: str  # of a mask of pairs
    layout: str
    poison: float | None


Pick = Callable[[Sequence[Any]], Any]


def _geometry(pick: Pick) -> Geometry:
    head_dim = pick((8, 16, 40, 64, 72, 128))
    mask = pick((
        "none", "causal", "window", "window both ways", "packed", "bool", "float",
        *("ranges", "ranges+validity") * 3,
    ))  # fmt: skip
    long = mask in PAIRS and pick((False, False, True))
    return Geometry(
        batch=1 if mask == "packed" else pick((1, 2, 3)),
        kv_heads=pick((1, 2, 3)),
        group=pick((1, 1, 2) if long else (1, 1, 2, 3, 8)),
        q_len=pick(LENGTHS),
        kv_len=pick(LONG if long else LENGTHS),
        head_dim=head_dim,
        v_head_dim=pick((head_dim, head_dim, 24, 128)),
        dtype=pick(("float32", "float32", "bfloat16", "bfloat16", "float16")),
        mask=mask,
        softcap=pick((None, None, None, 5.0, 50.0)),
        sinks=pick(("", "", "", "float32", "same")),
        bias=pick((False, False, False, False, False, True)),
        scaling=pick((None, None, None, 1.0, 0.05, -0.3, 0.0)),
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
        shape=draw(st.sampled_from(("for all heads", "one a head", "for all sequences", "of keys alone"))),
        layout=draw(st.sampled_from(("plain", "transposed", "length last", "sliced", "expanded"))),
        poison=draw(st.sampled_from((None, math.nan, math.inf, -math.inf, 3e38))),
    )


def laid_out(shape: tuple[int, ...], layout: str, generator: torch.Generator, magnitude: float) -> torch.Tensor:
    batch, heads, length, dim = shape
    if layout == "transposed":  # as models make them: [B, S, H, D] seen as [B, H, S, D]
        made = torch.randn(batch, length, heads, dim, generator=generator).transpose(1, 2)
    elif layout == "length last":
        made = torch.randn(batch, heads, dim, length, generator=generator).transpose(2, 3)
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
    """The tensors of a call. visible: bool, or None for every pair; added: float32 or wider, or None; said: by keyword."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    said: dict[str, Any]
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
    if sinks is not None and g.sinks == "same":
        sinks = sinks.to(dtype)
    mask = visible = added = bias = hidden = None
    rows, keys = torch.arange(g.q_len), torch.arange(g.kv_len)
    said: dict[str, Any] = {"is_causal": False}
    if g.mask == "causal":
        said["is_causal"] = True
        visible = keys <= rows[:, None] if g.q_len > 1 else None
    elif g.mask.startswith("window"):
        both, width = g.mask == "window both ways", int(torch.randint(1, g.kv_len + 3, (), generator=generator))
        said = {"is_causal": not both, "sliding_window": width}
        position = (rows if both or g.q_len > 1 else rows + g.kv_len - 1)[:, None]  # one query is the newest key's
        visible = (keys > position - width) & (keys < position + (width if both else 1))
    elif g.mask == "packed":
        said, visible = packed(g, generator)
    elif g.mask.startswith("ranges"):
        starts, ends = random_ranges(call.ranges, g.batch, g.q_len, g.kv_len, generator)
        visible = ((keys >= starts[..., None]) & (keys < ends[..., None]))[:, None]
        valid = None
        if g.mask == "ranges+validity":
            valid = torch.rand(g.batch, g.kv_len, generator=generator) < 0.7
            visible = visible & valid[:, None, None]
        mask = encode_ranges(starts, ends, valid, g.kv_len)
    elif g.mask in PAIRS:
        shape = {
            "for all heads": (g.batch, 1, g.q_len, g.kv_len), "one a head": (g.batch, heads, g.q_len, g.kv_len),
            "for all sequences": (1, 1, g.q_len, g.kv_len), "of keys alone": (g.batch, 1, 1, g.kv_len),
        }[call.shape]  # fmt: skip
        gone = torch.rand(shape, generator=generator) < 0.4
        gone |= torch.rand(g.kv_len, generator=generator) < 0.1  # for every row
        if g.mask == "bool":
            visible = mask = ~gone
        else:
            added = mask = torch.randn(gone.shape, generator=generator).masked_fill(gone, -math.inf).to(dtype)
    if call.poison is not None and visible is not None:
        seen = visible.expand(g.batch, visible.shape[1] if visible.ndim == 4 else 1, g.q_len, g.kv_len)
        hidden = ~seen.any(2).any(1)[:, None, :, None]  # [B, 1, KV, 1]: keys that no row of the sequence sees
    if g.bias:
        bias = torch.randn(1, heads, g.q_len, g.kv_len, generator=generator).to(dtype)
        added = bias if added is None else added.double() + bias.double()
    if call.layout == "expanded":
        q, k, v = (each.expand(shape) for each, shape in zip((q, k, v), shapes, strict=True))
    return Made(q, k, v, sinks, mask, bias, said, visible, added, hidden)


def packed(g: Geometry, generator: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    """(keywords, bool [Q, KV]) of up to four documents in a row; a document's last query is its last key's."""
    count = min(g.q_len, g.kv_len, 4)

    def bounds(length: int) -> list[int]:
        inner = (torch.randperm(length - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
        return [0, *inner, length]

    of_queries, of_keys = bounds(g.q_len), bounds(g.kv_len)
    causal = bool(torch.rand((), generator=generator) < 0.7)
    visible = torch.zeros(g.q_len, g.kv_len, dtype=torch.bool)
    for i in range(count):
        for row in range(of_queries[i], of_queries[i + 1]):
            last = of_keys[i + 1] - (of_queries[i + 1] - row) + 1 if causal else of_keys[i + 1]
            visible[row, of_keys[i] : max(of_keys[i], last)] = True
    lengths = (torch.tensor(each, dtype=torch.int32) for each in (of_queries, of_keys))
    return dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), lengths, strict=True)) | {"is_causal": causal}, visible


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, visible: torch.Tensor | None,
    added: torch.Tensor | None, geometry: Geometry, dtype: torch.dtype, scores_dtype: torch.dtype,
    flash: bool = False, tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
) -> torch.Tensor:  # fmt: skip
    """Attention with products in `dtype` and softmax in `scores_dtype`, [B, Q, Hq, Dv]; rows without keys are 0.

    flash: gradients by the formula that SDPA's own backward uses.
    """
    group = geometry.group
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = scores_of(q, k, visible, added, geometry, scores_dtype, tanh)
    if sinks is not None:  # one more key a head, whose value is 0
        sink = sinks.to(scores_dtype)[None, :, None, None]
        scores, v = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1), F.pad(v, (0, 0, 0, 1))
    out: torch.Tensor = _Weighted.apply(scores, v) if flash else _weights(scores).to(dtype) @ v
    return out.transpose(1, 2)


def scores_of(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor | None, added: torch.Tensor | None, geometry: Geometry,
    dtype: torch.dtype, tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
) -> torch.Tensor:  # fmt: skip
    """Scores in `dtype`, -inf where hidden; k has a head for each query head."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).to(dtype) * geometry.scale
    if geometry.softcap:
        scores = geometry.softcap * tanh(scores / geometry.softcap)
    if added is not None:
        scores = scores + added.to(scores.device, dtype)
    return scores if visible is None else scores.masked_fill(~visible.to(scores.device), -math.inf)


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
        wide = grad.to(weights.dtype)
        shared = (wide * out.to(weights.dtype)).sum(-1, keepdim=True)
        of_weights = wide @ v.to(weights.dtype).transpose(-1, -2)
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
    to 4 units in the last place on CPU, where torch's is by half a unit. Odd orders have SDPA's backward pass written out:
    the two sums whose difference a gradient is run in different orders there (in SDPA's own they do not, so that the
    difference of equal sums is exactly 0).
    """
    q, k, v = inputs
    visible, added, rows, tanh = made.visible, made.added, geometry.q_len, torch.tanh
    if order is not None:
        dims = torch.randperm(geometry.head_dim, generator=torch.Generator().manual_seed(order)).to(q.device)
        more, more_keys = -rows % 128, -geometry.kv_len % 128
        q, k, v = F.pad(q[..., dims], (0, 0, 0, more)), *(F.pad(x, (0, 0, 0, more_keys)) for x in (k[..., dims], v))
        if visible is None:
            visible = torch.ones(1, 1, rows, geometry.kv_len, dtype=torch.bool)
        visible = F.pad(visible.expand(*visible.shape[:-2], rows, geometry.kv_len), (0, more_keys, 0, more))
        if added is not None:
            added = F.pad(added.expand(*added.shape[:2], rows, geometry.kv_len), (0, more_keys, 0, more))
        tanh = _XlaTanh.apply
    if geometry.softcap or geometry.sinks or (order is not None and order % 2 and geometry.gradients):
        return written_out(q, k, v, sinks, visible, added, geometry, q.dtype, torch.float32, flash=True, tanh=tanh)[:, :rows]
    mask = visible
    if added is not None:
        mask = added.to(q.dtype)
        mask = mask if visible is None else mask.masked_fill(~visible, -math.inf)
    mask = None if mask is None else mask.to(q.device)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=geometry.scaling, enable_gqa=True)
    return out.transpose(1, 2)[:, :rows]


_FLUSHED = 2**12 * torch.finfo(torch.float32).tiny  # the terms of a row's or key's sum, each flushed to 0


def units(
    inputs: list[torch.Tensor], sinks: torch.Tensor | None, made: Made, call: Call, out: torch.Tensor
) -> list[float]:
    """What rounding alone may do to the output and the gradients, where the peer happens to be exact.

    Each is a sum of terms of both signs, and what rounding does to a sum is in proportion to the sum of the terms' sizes,
    whatever its order: one unit in the last place of the dtype for the largest such sum; two for a gradient, whose factors
    were rounded before. A gradient of scores is a difference of two sums, which float32 keeps: two of its units for their
    sizes. A weight is a power of a difference of scores: what float32 rounds off them is its relative error.
    Numbers below float32's smallest normal one are 0 to a TPU, and to XLA on CPU.
    inputs, sinks, out: float64; `out` is exact.
    """
    g = call.geometry
    q, k, v = inputs[0], *(each.repeat_interleave(g.group, 1) for each in inputs[1:])
    scores = scores_of(q, k, made.visible, made.added, g, torch.float64)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights, sink = _weights(scores).split((g.kv_len, int(sinks is not None)), -1)
    eps, fine = torch.finfo(DTYPES[g.dtype]).eps, torch.finfo(torch.float32).eps
    sizes = scores.abs().nan_to_num(posinf=0.0)
    eps = eps + fine * (sizes + sizes.amax(-1, keepdim=True))[..., : g.kv_len]
    largest = [float(((weights * eps) @ v.abs()).max())]
    if not g.gradients:
        return [_FLUSHED + each for each in largest]
    do, out = weights_of(call, out).transpose(1, 2), out.transpose(1, 2)
    shared = (do * out).sum(-1, keepdim=True)
    of_sums = (do.abs() * out.abs()).sum(-1, keepdim=True)
    slope = abs(g.scale) * (1 - ((scores[..., : g.kv_len] / g.softcap) ** 2).clamp(max=1) if g.softcap else 1.0)
    rounded = eps * (weights * (do @ v.transpose(2, 3) - shared)).abs() * slope
    rounded += fine * weights * (do.abs() @ v.abs().transpose(2, 3) + of_sums) * slope
    by_group = (g.kv_heads, g.group)
    largest.append(2 * float((rounded @ k.abs()).max()))
    largest.append(2 * float((rounded.transpose(2, 3) @ q.abs()).unflatten(1, by_group).sum(2).max()))
    largest.append(2 * float(((weights * eps).transpose(2, 3) @ do.abs()).unflatten(1, by_group).sum(2).max()))
    if sinks is not None:
        largest.append(2 * float((sink * (eps.amax(-1, keepdim=True) * shared.abs() + fine * of_sums)).sum((0, 2, 3)).max()))
    return [_FLUSHED + each for each in largest]


def significant_strides(x: torch.Tensor) -> list[int]:
    """Those of dimensions longer than 1: the others are never used, and torch's fake tensors do not promise them."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute error; infinite where there is a NaN."""
    return float((got.double() - exact).abs().amax().nan_to_num(math.inf)) if got.numel() else 0.0


Computed = tuple[torch.Tensor, ...]


def weights_of(call: Call, out: torch.Tensor) -> torch.Tensor:
    """What the gradients are taken of: a weighted sum of the output."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(call.seed + 1)).to(out)


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
    gradients = torch.autograd.grad((out * weights_of(call, out)).sum(), [*inputs, *([] if sinks is None else [sinks])])
    return (out.detach().cpu(), *(each.cpu() for each in gradients))


def check(call: Call, device: str = "cpu") -> tuple[str, bool]:
    """Make the call and hold it against float64: (the reason code of its route, whether a longer peer was needed).

    The largest error, of the output and of each gradient, is at most twice the peer's in the same dtype on the same inputs,
    plus what rounding alone may do (`units`). Fake tensors give the same shape and strides.
    """
    g, made = call.geometry, make(call)
    mask, bias = (None if each is None else each.to(device) for each in (made.mask, made.bias))
    inputs = [each.to(device) for each in (made.q, made.k, made.v)]
    sinks = None if made.sinks is None else made.sinks.to(device)

    said = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in made.said.items()}

    def attend(inputs: list[torch.Tensor], sinks: torch.Tensor | None) -> torch.Tensor:
        return attention.tpu_attention(
            LAYER, *inputs, mask, scaling=g.scaling, softcap=g.softcap, s_aux=sinks, position_bias=bias, **said
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
    wanted = (g.batch, g.q_len, g.kv_heads * g.group, g.v_head_dim)
    assert got.shape == wanted, f"{call}\n{row}: shape {tuple(got.shape)}"
    assert got.is_contiguous() and got.dtype == DTYPES[g.dtype], f"{call}\n{row}: {got.stride()}, {got.dtype}"
    mode = FakeTensorMode()
    given = (*inputs, sinks, mask, bias, *said.values())
    with mode, torch.no_grad():
        q, k, v, fake_sinks, fake_mask, fake_bias, *of_said = (
            mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given
        )
        faked = attention.tpu_attention(
            LAYER, q, k, v, fake_mask, scaling=g.scaling, softcap=g.softcap, s_aux=fake_sinks, position_bias=fake_bias,
            **dict(zip(said, of_said, strict=True)),
        )[0]  # fmt: skip
    facts = [(each.shape, significant_strides(each), each.dtype) for each in (faked, got)]
    assert facts[0] == facts[1], f"{call}\n{row}: shape, strides, dtype of fake tensors {facts[0]}, of real ones {facts[1]}"

    wide = [each.cpu().double() for each in inputs]
    wide_sinks = None if sinks is None else sinks.cpu().double()

    def formula(inputs: list[torch.Tensor], sinks: torch.Tensor | None) -> torch.Tensor:
        return written_out(*inputs, sinks, made.visible, made.added, g, torch.float64, torch.float64)

    exact = with_gradients(formula, wide, wide_sinks, call)
    errors = [error_of(mine, right) for mine, right in zip(ours, exact, strict=True)]
    allowed = units(wide, wide_sinks, made, call, exact[0])
    theirs = [0.0] * len(errors)
    for order in (None, *range(8)):
        compute = functools.partial(peer, made=made, geometry=g, order=order)
        made_by_peer = with_gradients(lambda inputs, sinks, compute=compute: compute(inputs, sinks), inputs, sinks, call)
        assert all(each.isfinite().all() for each in made_by_peer), f"{call}: the peer's numbers are no measure"
        theirs = [max(old, error_of(each, right)) for old, each, right in zip(theirs, made_by_peer, exact, strict=True)]
        if all(error <= 2 * other + unit for error, other, unit in zip(errors, theirs, allowed, strict=True)):
            return row.reason, order is not None
    names = ("output", "dq", "dk", "dv", "dsinks")[: len(errors)]
    numbers = zip(names, errors, theirs, allowed, strict=True)
    lines = [f"{name}: error {error:.2e}, SDPA's {other:.2e}, unit {unit:.1e}" for name, error, other, unit in numbers]
    raise AssertionError("\n".join((str(call), str(row), *lines)))
