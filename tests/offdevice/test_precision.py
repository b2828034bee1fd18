"""Fault kind 40, float32 computed as bfloat16: what libtpu makes of the products' precision, counted in its programs.

A float32 product at full precision is six of bfloat16 on the matrix units, at three passes ("high") three.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_compile_matrix import Cell, kernel_named, vmem_budget

from tpu_kernels.offdevice.schedule import Estimator
from tpu_kernels.offdevice.targets import TARGETS

_, MODULE = kernel_named("range-attention")
LENGTHS = {"forward": (128, 128), "forward_with_lse": (128, 128), "decode": (1, 512), "backward": (128, 128)}


def products(estimator: Estimator, function: str, dtype: str, precision: str) -> dict[str, int]:
    """How many slots of the matrix units each kernel of one call takes."""
    q_len, kv_len = LENGTHS[function]
    cell = Cell("range-attention", function, dtype, precision, 128, 128, 1, q_len, kv_len, False, False, 0.0,
                kv_heads=1, batch=1)  # fmt: skip
    target = estimator.target.name
    rows = {3: np.zeros((1, q_len), int).tolist(), 4: np.full((1, q_len), kv_len).tolist()}
    result = estimator.function(cell.job(target, MODULE, vmem_budget(target)), rows)
    assert result.ok and not result.refused, result.error + result.refused
    return {kernel.name: sum(path[2] * path[3] for path in kernel.paths) for kernel in result.kernels}


@pytest.mark.parametrize(
    ("name", "function"),
    [
        pytest.param(*each, marks=() if each == ("v6e", "decode") else pytest.mark.thorough)
        for each in itertools.product(TARGETS, LENGTHS)
    ],
)
def test_passes_of_the_matrix_unit(name, function, estimators):
    get = estimators(name)
    whole, high, plain, one = (
        products(get, function, *each)
        for each in (("float32", "highest"), ("float32", "high"), ("float32", "default"), ("bfloat16", "default"))
    )
    print(f"{name} {function}: highest {whole}, high {high}, default {plain}, bfloat16 {one}")
    assert whole and all(plain.values()) and all(one.values())
    for kernel in whole:
        assert whole[kernel] == 6 * plain[kernel]
        assert high[kernel] == 3 * one[kernel]
