"""JAX's splash attention as a kernel: exact for what it takes, told for what it refuses, and only on request."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch

import tpu_kernels
from tpu_kernels import attention, masks, verify
from tpu_kernels.routing import decide
from tpu_kernels.specs import load_specs

from . import test_routing as routing_case
from .models.tiny_models import DECODERS

sys.path.insert(0, str(Path(__file__).parents[1] / "kernel_specs" / "splash-attention" / "torch-ext"))
from splash_attention import forward  # noqa: E402

NAME = "splash-attention"
STATIC = {
    "scale": 0.125, "softcap": 0.0, "block_q": 0, "block_kv": 0, "precision": "highest", "vmem_bytes": 0, "interpret": True,
    "causal": True,
}  # fmt: skip
TAKEN = [case for case in verify.parity_cases(large=False) if not case.masked]
LENGTHS = [
    verify.Case(f"{q_len} queries, {kv_len} keys, {'causal' if causal else 'full'}", 1, 2, 1, q_len, kv_len, 64,
                dtype="float32", causal=causal, masked=False)
    for q_len, kv_len, causal in ((384, 640, True), (640, 384, True), (384, 640, False), (1280, 1280, True))
]  # fmt: skip


@pytest.fixture
def named():
    """`register` under a name that is taken back afterwards."""
    tpu_kernels.register("tpu_splash", kernels=(NAME,))
    tpu_kernels.reset()
    yield "tpu_splash"
    tpu_kernels.unregister("tpu_splash")
    tpu_kernels.reset()


@pytest.mark.parametrize("case", TAKEN + LENGTHS, ids=lambda case: case.name)
def test_parity(case):
    result = verify.Suite("cpu", NAME).parity(case)
    assert result.passed, result


@pytest.mark.parametrize("scale", [0.3, -0.2, 2.0, 0.0])
def test_any_scale_is_exact_in_bfloat16(scale):
    """The scale is not rounded into q: against float64 of the same q, at scores large enough to tell."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 128, 96, generator=generator).bfloat16() for _ in range(3))
    q = q * 8
    out, _ = attention.tpu_attention(torch.nn.Identity(), q, k, v, None, scaling=scale, kernels=(NAME,))
    signed, positive = q * math.copysign(scale != 0, scale), abs(scale) or 1.0  # torch's own gives NaN for scale <= 0
    attend = torch.nn.functional.scaled_dot_product_attention
    exact, peer = (attend(*(x.to(dtype) for x in (signed, k, v)), is_causal=True, scale=positive).transpose(1, 2)
                   for dtype in (torch.float64, torch.bfloat16))  # fmt: skip
    allowed = 2 * (peer.double() - exact).abs().max() + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed


def test_keys_that_no_row_sees_are_not_read():
    q, k, v = (jnp.asarray(torch.randn(1, 1, length, 64, generator=torch.Generator().manual_seed(length)).numpy())
               for length in (128, 384, 384))  # fmt: skip
    clean = forward(q, k, v, None, None, None, None, **STATIC)
    bad = (x.at[:, :, 128:].set(jnp.nan) for x in (k, v))
    assert (forward(q, *bad, None, None, None, None, **STATIC) == clean).all()


X = jnp.zeros((1, 4, 128, 64))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"starts": jnp.zeros((1, 128), jnp.int32)}, "starts must be None"),
        ({"q": X[0]}, "q must have 4 dimensions"),
        ({"q": X[:, :, :100]}, "the length of q must be a multiple of 128, got 100"),
        ({"k": X[:, :, :1], "v": X[:, :, :1]}, "the length of k must be a multiple of 128, got 1"),
        ({"k": X[:, :3], "v": X[:, :3]}, "4 query heads are not a multiple of 3"),
        ({"v": X.astype(jnp.bfloat16)}, "all be float32 or all bfloat16"),
        ({"v": X[:, :2]}, "do not fit together"),
        ({"sinks": jnp.zeros((2,))}, r"sinks must be \(4,\)"),
        ({"softcap": -1.0}, "softcap must be 0"),
        ({"precision": "low"}, "precision must be"),
        ({"block_q": 64}, "block_q = 64 must be a multiple of 128 that divides the length 128"),
        ({"block_kv": 256}, "block_kv = 256 must be"),
    ],
)
def test_arguments_that_do_not_fit(changes, says):
    arguments = {"q": X, "k": X, "v": X, "starts": None, "ends": None, "key_valid": None, "sinks": None} | STATIC | changes
    with pytest.raises(ValueError, match=says):
        forward(**arguments)


PLAIN = dataclasses.replace(routing_case.PLAIN, q_len=256, kv_len=256, mask="causal", mask_batch=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "kernel"),
        ({"mask": "none", "kv_len": 512, "v_head_dim": 128, "softcap": True, "sinks": True}, "kernel"),
        ({"mask": "ranges", "mask_batch": 2}, "range_mask"),
        ({"mask": "ranges+validity", "mask_batch": 2}, "range_mask"),
        ({"mask": "dense_bool"}, "dense_mask"),
        ({"q_len": 250}, "length"),
        ({"kv_len": 257}, "length"),
        ({"q_len": 1}, "length"),
        ({"kv_len": 65536 + 128}, "length"),
        ({"head_dim": 320}, "head_dim"),
        ({"dtype": torch.float16}, "dtype"),
        ({"needs_grad": True}, "gradients"),
    ],
)
def test_what_it_takes_and_refuses(changes, reason):
    spec = next(spec for spec in load_specs() if spec.name == NAME)
    got = decide(dataclasses.replace(PLAIN, **changes), (spec,))
    assert (got.reason, got.kernel) == (reason, NAME if reason == "kernel" else "")


@pytest.mark.parametrize(
    ("what", "reason"),
    [("window", "range_mask"), ("rows without keys", "range_mask"), ("odd length", "length"), ("more keys", "range_mask")],
)
def test_what_it_cannot_do_runs_on_sdpa_with_the_right_numbers(what, reason):
    """A window (splash's own sees one key more), rows that see no key, lengths that splash would cut, and queries that
    stand at the end of longer keys (splash aligns at the first): refused, told, and right."""
    q_len, kv_len = {"odd length": (200, 200), "more keys": (128, 256)}.get(what, (128, 128))
    q, k, v = (torch.randn(2, 2, length, 32, generator=torch.Generator().manual_seed(length))
               for length in (q_len, kv_len, kv_len))  # fmt: skip
    ends = torch.arange(kv_len - q_len + 1, kv_len + 1).expand(2, q_len)
    starts = {"window": ends - 5, "rows without keys": torch.full_like(ends, 40)}.get(what, torch.zeros_like(ends))
    mask = None if what == "odd length" else masks.encode_ranges(starts.clamp(min=0), ends, None, kv_len)
    tpu_kernels.reset()
    out, _ = attention.tpu_attention(torch.nn.Identity(), q, k, v, mask, kernels=(NAME,))
    (row,) = tpu_kernels.explain().rows
    assert (row.route, row.reason) == ("sdpa", reason)
    keys = torch.arange(kv_len)
    visible = (keys >= starts[..., None]) & (keys < ends[..., None])
    scores = (q.double() @ k.double().transpose(2, 3) * 32**-0.5).masked_fill(~visible[:, None], -math.inf)
    want = (torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()).transpose(1, 2)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)


def test_only_calls_that_ask_for_it_take_it(named):
    assert NAME not in tpu_kernels.register().kernels
    assert NAME not in [spec.name for spec in attention.installed_specs()]
    model = DECODERS["llama"].build(named)
    ids = torch.arange(256).remainder(90).reshape(2, 128) + 3
    got = {}
    for name, route in ((named, "splash-attention.forward"), ("tpu_attention", "range-attention.forward"), ("eager", None)):
        model.set_attn_implementation(name)
        tpu_kernels.reset()
        with torch.no_grad():
            got[name] = model(ids, use_cache=False).logits
        if route:
            assert {row.route for row in tpu_kernels.explain(model).rows} == {route}
    torch.testing.assert_close(got[named], got["eager"], atol=2e-6, rtol=0)
    torch.testing.assert_close(got["tpu_attention"], got["eager"], atol=2e-6, rtol=0)


def test_a_padded_batch_is_refused_and_told(named):
    model = DECODERS["llama"].build(named)
    ids = torch.full((2, 128), 7)
    padding = torch.ones_like(ids)
    padding[1, :9] = 0
    with torch.no_grad():
        model(ids, attention_mask=padding)
    assert {(row.route, row.reason) for row in tpu_kernels.explain(model).rows} == {("sdpa", "range_mask")}
