"""Odd lengths and head sizes through tpu_attention, emulated on CPU, against attention written out in float64."""

from __future__ import annotations

import pytest
import torch

import tpu_kernels
from tpu_kernels.attention import tpu_attention

LENGTHS = (1, 2, 3, 7, 13, 20, 127, 128, 129, 255, 256, 257, 577)
DIMS = (32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256, 512)


def check(q_len: int, kv_len: int, dim: int, causal: bool) -> None:
    tpu_kernels.register()
    tpu_kernels.reset()
    generator = torch.Generator().manual_seed(q_len * 7919 + kv_len)
    q, k, v = (torch.randn(1, 1, length, dim, generator=generator) for length in (q_len, kv_len, kv_len))
    layer = torch.nn.Identity()
    got = tpu_attention(layer, q, k, v, None, is_causal=causal)[0].transpose(1, 2)
    scores = q.double() @ k.double().mT * dim**-0.5
    if causal and q_len > 1:
        scores = scores.masked_fill(~torch.ones(q_len, kv_len, dtype=torch.bool).tril(), float("-inf"))
    torch.testing.assert_close(got.double(), scores.softmax(-1) @ v.double(), atol=5e-6, rtol=0)
    assert {row.reason for row in tpu_kernels.explain().rows} == {"kernel"}


@pytest.mark.parametrize("index", range(len(DIMS)))
def test_each_length_and_head_size_once(index):
    check(LENGTHS[index], LENGTHS[(index * 5 + 3) % len(LENGTHS)], DIMS[index], causal=index % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kv_len", [1, 129, 1000, 1500, 4992])
@pytest.mark.parametrize("q_len", [1, 20, 257])
def test_long_keys(q_len, kv_len):
    check(q_len, kv_len, dim=72, causal=True)
