"""Routing: each request takes the kernel that can do it exactly, else the right fallback with the right reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tpu_kernels.reasons import REASONS
from tpu_kernels.request import AttentionRequest
from tpu_kernels.routing import decide, pick_function
from tpu_kernels.specs import KernelFunction, load_specs

PLAIN = AttentionRequest(
    batch=2,
    kv_batch=2,
    mask_batch=2,
    q_heads=8,
    kv_heads=2,
    q_len=64,
    kv_len=64,
    head_dim=64,
    v_head_dim=64,
    dtype=torch.bfloat16,
    device="tpu",
    mask="ranges",
    softcap=False,
    sinks=False,
    position_bias=False,
    dropout=False,
    needs_grad=False,
    output_attentions=False,
    selected_keys=False,
    unknown=(),
    disabled=False,
)


def spec():
    return next(spec for spec in load_specs() if spec.name == "range-attention")


def route(**changes):
    return decide(dataclasses.replace(PLAIN, **changes), (spec(),))


def test_plain_call_takes_the_kernel():
    got = route()
    assert (got.target, got.kernel, got.function, got.reason) == ("kernel", "range-attention", "forward", "kernel")
    assert got.name == "range-attention.forward"


@pytest.mark.parametrize("mask", ["none", "causal", "ranges", "ranges+validity"])
def test_all_range_masks_take_the_kernel(mask):
    assert route(mask=mask, mask_batch=0 if mask in ("none", "causal") else 2).target == "kernel"


def test_decode_takes_calls_whose_packed_rows_fit():
    (limit,) = [function.max_packed_rows for function in spec().functions if function.name == "decode"]
    assert route(q_len=1).function == "decode"
    assert route(q_len=limit // 4).function == "decode"
    assert route(q_len=limit // 4 + 1).function == "forward"


@pytest.mark.parametrize(("name", "paged"), [("decode", False), ("paged", True)])
def test_a_function_without_a_bound_takes_any_number_of_rows(name, paged):
    kernel = dataclasses.replace(spec(), functions=(KernelFunction("forward"), KernelFunction(name)))
    assert pick_function(dataclasses.replace(PLAIN, q_len=4096, paged=paged), kernel) == name


@pytest.mark.parametrize("mask", ["dense_bool", "dense_float"])
@pytest.mark.parametrize("q_len", [1, 4096])
def test_long_masks_of_pairs_take_their_own_function(mask, q_len):
    (least,) = [function.min_kv_len for function in spec().functions if function.name == "forward_dense"]
    for more in ({}, {"softcap": True, "sinks": True}, {"mask_batch": 1}, {"selected_keys": True}):
        assert route(mask=mask, q_len=q_len, kv_len=least, **more).name == "range-attention.forward_dense"
    assert route(mask=mask, q_len=q_len, kv_len=least - 1).target == "sdpa"


@pytest.mark.parametrize("q_len", [1, 64])
def test_a_call_that_needs_a_gradient_takes_the_function_that_keeps_the_lse(q_len):
    assert route(needs_grad=True, q_len=q_len).function == "forward_with_lse"
    assert route(needs_grad=True, mask="dense_bool").target == "sdpa"


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"disabled": True}, "sdpa", "disabled"),
        ({"device": "cuda"}, "sdpa", "device"),
        ({"dtype": torch.float16}, "sdpa", "dtype"),
        ({"dtype": torch.float64}, "sdpa", "dtype"),
        ({"dropout": True}, "sdpa", "dropout"),
        ({"position_bias": True}, "sdpa", "position_bias"),
        ({"mask": "dense_bool"}, "sdpa", "dense_mask"),
        ({"mask": "dense_float"}, "sdpa", "dense_mask"),
        ({"mask_batch": 1}, "sdpa", "mask_batch"),
        ({"head_dim": 1024}, "sdpa", "head_dim"),
        ({"kv_batch": 1}, "sdpa", "batch_broadcast"),
        ({"kv_len": 0}, "sdpa", "empty"),
        ({"mask": "dense_bool", "kv_len": 4096, "position_bias": True}, "sdpa", "position_bias"),
        ({"mask": "dense_bool", "kv_len": 4096, "needs_grad": True}, "sdpa", "dense_mask"),
        ({"selected_keys": True, "mask": "dense_bool"}, "sdpa", "selected_keys"),
        ({"selected_keys": True, "mask": "dense_bool", "sinks": True}, "eager", "selected_keys"),
        ({"output_attentions": True}, "eager", "output_attentions"),
        ({"unknown": ("wobble",)}, "sdpa", "unknown_kwarg"),
        ({"softcap": True, "dtype": torch.float16}, "eager", "dtype"),
        ({"sinks": True, "disabled": True}, "eager", "disabled"),
        ({"sinks": True, "mask": "dense_bool"}, "eager", "dense_mask"),
    ],
)
def test_refused_calls_fall_back_with_their_reason(changes, target, reason):
    got = route(**changes)
    assert (got.target, got.reason) == (target, reason)
    assert reason in REASONS


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ("gqa", {}, "gqa"),
        ("softcap", {"softcap": True}, "softcap"),
        ("sinks", {"sinks": True}, "sinks"),
        ("v_head_dim_may_differ", {"v_head_dim": 32}, "v_head_dim"),
        ("gradients", {"needs_grad": True}, "gradients"),
    ],
)
def test_a_kernel_without_the_capability_refuses(capability, changes, reason):
    able = spec()
    unable = dataclasses.replace(
        able, capabilities=dataclasses.replace(able.capabilities, **{capability: False})
    )
    got = decide(dataclasses.replace(PLAIN, **changes), (unable,))
    assert got.reason == reason
    assert got.refusals == (("range-attention", reason),)


def limited(**capabilities):
    able = spec()
    return dataclasses.replace(able, capabilities=dataclasses.replace(able.capabilities, **capabilities))


@pytest.mark.parametrize(
    ("capabilities", "changes", "reason"),
    [
        ({"length_multiple": 128}, {"q_len": 128, "kv_len": 256}, "kernel"),
        ({"length_multiple": 128}, {"q_len": 127, "kv_len": 256}, "length"),
        ({"length_multiple": 128}, {"q_len": 128, "kv_len": 257}, "length"),
        ({"max_kv_len": 64}, {}, "kernel"),
        ({"max_kv_len": 63}, {}, "length"),
        ({"head_dim_multiple": 32}, {"head_dim": 96}, "kernel"),
        ({"head_dim_multiple": 32}, {"head_dim": 72}, "head_dim"),
        ({"head_dim_multiple": 32}, {"v_head_dim": 72}, "head_dim"),
        ({"masks": ("none",)}, {"mask": "none", "mask_batch": 0}, "kernel"),
        ({"masks": ("none",)}, {"mask": "causal", "mask_batch": 0}, "kernel"),
        ({"masks": ("none",)}, {"mask": "ranges"}, "range_mask"),
        ({"masks": ("none", "ranges")}, {"mask": "ranges+validity"}, "range_mask"),
        ({"masks": ("none",)}, {"mask": "dense_float"}, "dense_mask"),
    ],
)
def test_limits_on_lengths_head_sizes_and_masks(capabilities, changes, reason):
    assert decide(dataclasses.replace(PLAIN, **changes), (limited(**capabilities),)).reason == reason


def test_the_next_kernel_takes_what_the_first_refuses():
    able = spec()
    no_gqa = dataclasses.replace(
        able, name="no-gqa", capabilities=dataclasses.replace(able.capabilities, gqa=False)
    )
    got = decide(PLAIN, (no_gqa, able))
    assert (got.target, got.kernel, got.refusals) == ("kernel", "range-attention", (("no-gqa", "gqa"),))


def test_no_kernel_installed_is_told():
    got = decide(PLAIN, ())
    assert (got.target, got.reason) == ("sdpa", "no_kernel")
