"""Fault kind 46, operands in a layout that the kernel does not expect: views as models make them, through every function.

Emulated here; traced by torch_tpu and compiled: tests/offdevice/test_layouts_compiled.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_kernels import masks
from tpu_kernels.attention import tpu_attention

from .test_attention import Layer, only_row

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()


def heads_last(x):
    """[B, S, H, D] turned, as most models make it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def length_last(x):
    return x.mT.contiguous().mT


def batch_inside(x):
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def part_of_a_projection(x):
    """Between others' heads, at an offset."""
    return F.pad(x.transpose(1, 2), (0, 0, 3, 2))[:, :, 3:-2].transpose(1, 2)


def part_of_a_cache(x):
    return F.pad(x, (0, 0, 5, 9))[:, :, 5:-9]


def part_of_a_head(x):
    """As latent attention splits heads: a row's numbers do not begin where a word of 64 bytes does."""
    return F.pad(x, (3, 4))[..., 3:-4]


def every_other(x):
    return x.repeat_interleave(2, -1)[..., ::2]


LAYOUTS = [heads_last, length_last, batch_inside, part_of_a_projection, part_of_a_cache, part_of_a_head, every_other]
FUNCTIONS = {  # name: (queries, keys, mask, gradients)
    "forward": (40, 40, None, False),
    "decode": (1, 9, None, False),
    "forward_with_lse": (9, 9, "ranges", True),
    "forward_dense": (8, 2048, "dense", False),
    "sdpa": (8, 12, "dense", True),
}

NAMES = [pytest.param(each, marks=pytest.mark.thorough) if each == "forward_dense" else each for each in FUNCTIONS]


def made(q_len, kv_len):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    return [torch.randn(BATCH, *size, DIM, generator=generator) for size in sizes]


def mask_of(kind, q_len, kv_len):
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(1)
    if kind == "dense":
        return torch.rand(BATCH, 1, q_len, kv_len, generator=generator) < 0.7
    ends = torch.randint(1, kv_len + 1, (BATCH, q_len), generator=generator)
    return masks.encode_ranges(ends - 3, ends, torch.rand(BATCH, kv_len, generator=generator) < 0.8, kv_len)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", NAMES)
def test_a_view_gives_the_bits_of_the_tensor(function, layout):
    q_len, kv_len, kind, learns = FUNCTIONS[function]
    whole, mask = made(q_len, kv_len), mask_of(kind, q_len, kv_len)
    views = [layout(x) for x in whole]
    assert all(torch.equal(view, x) for view, x in zip(views, whole, strict=True))
    assert not views[1].is_contiguous() and views[1].stride() != whole[1].stride()
    results = []
    for tensors, at in ((whole, mask), (views, None if mask is None else length_last(mask))):
        leaves = [x.detach().requires_grad_(learns) for x in tensors]
        out, _ = tpu_attention(Layer(), *leaves, at)
        results.append([out])
        if learns:
            # The gradient too comes in another layout.
            wanted = out.detach().cos()
            results[-1] += torch.autograd.grad(out, leaves, layout(wanted) if tensors is views else wanted)
    assert only_row().route.removeprefix("range-attention.") == function
    for x, view in zip(*results, strict=True):
        assert view.shape == x.shape
        torch.testing.assert_close(view, x, atol=0 if function != "sdpa" else 2e-6, rtol=0)


@pytest.mark.parametrize("function", NAMES)
def test_expanded_operands_take_no_memory_and_are_read_right(function):
    """One key and value for a whole batch, strides of 0."""
    q_len, kv_len, kind, learns = FUNCTIONS[function]
    q, k, v = made(q_len, kv_len)
    k, v = (x[:1, :1].expand(BATCH, KV_HEADS, -1, -1) for x in (k, v))
    mask = mask_of(kind, q_len, kv_len)
    with torch.set_grad_enabled(learns):
        pairs = (k, v), (k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format))
        got = [tpu_attention(Layer(), q.clone().requires_grad_(learns), *each, mask)[0] for each in pairs]
    torch.testing.assert_close(*got, atol=0 if function != "sdpa" else 2e-6, rtol=0)
