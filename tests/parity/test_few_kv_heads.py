"""Fault kind 43, one or three KV heads in bfloat16, of which a TPU packs two rows in a word: every function, emulated.

Compiled: tests/offdevice/test_few_kv_heads_compiled.py.
"""

import numpy as np
import pytest
import test_dense_masks
import test_paged
from range_attention_reference import check, check_gradients, make_call

HEADS = [(6, 3), (1, 1), (8, 1), (3, 3)]


def holes(kv_heads: int, q_len: int, kv_len: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(kv_heads)
    ends = rng.integers(1, kv_len + 1, (2, q_len))
    return dict(starts=np.maximum(ends - 90, 0), ends=ends, valid=rng.random((2, kv_len)) < 0.8)


@pytest.mark.parametrize("heads", [*HEADS[:1], *(pytest.param(each, marks=pytest.mark.thorough) for each in HEADS[1:])])
@pytest.mark.parametrize("function", ["forward", "decode", "forward_with_lse and backward", "forward_dense", "paged"])
def test_few_kv_heads_in_bfloat16(function: str, heads: tuple[int, int]) -> None:
    if function == "forward":
        check(make_call(0, "bf16", 2, *heads, 33, 150, 64, **holes(heads[1], 33, 150)), function)
    elif function == "decode":
        check(make_call(1, "bf16", 2, *heads, 1, 150, 64, **holes(heads[1], 1, 150)), function)
    elif function == "forward_dense":
        mask = test_dense_masks.some(2, heads[0], 5, 300)
        test_dense_masks.check(*test_dense_masks.tensors("bf16", 2, *heads, 5, 300, 64), mask)
    elif function == "paged":
        test_paged.check(test_paged.decoding("bf16", *heads, 64), 16)
    else:
        check_gradients(make_call(2, "bf16", 2, *heads, 33, 150, 64, **holes(heads[1], 33, 150)))
