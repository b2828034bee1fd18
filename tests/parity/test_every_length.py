"""Every pair of lengths and every head size that models have, emulated on CPU against float64, with few heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from range_attention_reference import check, check_gradients, forget_programs, make_call
from test_range_attention_kernel import causal

LENGTHS = (*range(1, 21), 127, 128, 129, 255, 256, 257, 577, 1000, 1500, 4992)
DIMS = (32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256, 512)
DECODED = 64  # rows up to which routing takes decode
NUMBERS = 512  # outputs at least: two largest errors, the kernel's and torch's, compare only over samples that are not tiny


@pytest.fixture(autouse=True)
def _programs_of_one_length() -> Iterator[None]:
    """A thousand compiled programs at once exceed the memory maps that a process may have: a segmentation fault."""
    yield
    forget_programs()


def check_lengths(q_len: int, kv_len: int, functions: tuple[str, ...] = ("forward", "decode")) -> None:
    """Each row sees every key, and causally from the end; rows without keys where there are more queries than keys."""
    heads = -(-NUMBERS // (8 * q_len))
    for function in functions:
        if function == "decode" and q_len > DECODED:
            continue
        for fields in ({}, causal(1, q_len, kv_len)):
            check(make_call(q_len * 7919 + kv_len, "f32", 1, heads, 1, q_len, kv_len, 8, **fields), function)


@pytest.mark.parametrize("q_len", [19, 129])
def test_some_lengths(q_len: int) -> None:
    check_lengths(q_len, 148 - q_len)


@pytest.mark.slow
@pytest.mark.parametrize("kv_len", LENGTHS)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_every_pair_of_lengths(q_len: int, kv_len: int) -> None:
    check_lengths(q_len, kv_len)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_size(dim: int, dtype: str) -> None:
    fields = causal(1, 140, 300)
    check(make_call(dim, dtype, 1, 2, 1, 140, 300, dim, **fields))
    check(make_call(dim, dtype, 1, 2, 1, 3, 300, dim, **causal(1, 3, 300)), "decode")
    check_gradients(make_call(dim, dtype, 1, 2, 1, 140, 300, dim, **fields))


@pytest.mark.slow
def test_gradients_of_a_batch_with_wide_heads_and_padding() -> None:
    valid = np.ones((8, 200), bool)
    for b in range(8):
        valid[b, : 13 * b] = False
    check_gradients(make_call(5, "bf16", 8, 2, 1, 200, 200, 512, **causal(8, 200, 200), valid=valid))
