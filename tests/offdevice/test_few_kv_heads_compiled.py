"""Fault kind 43, one or three KV heads in bfloat16: every function, compiled for v6e."""

from __future__ import annotations

import pytest
from test_compile_matrix import Cell, kernel_named, vmem_budget

from tpu_kernels.offdevice.aot import compile_all

TARGET = "v6e"
SPEC, MODULE = kernel_named("range-attention")
LENGTHS = {"decode": (1, 300), "paged": (1, 300), "forward_dense": (5, 300)}


@pytest.mark.thorough
def test_few_kv_heads_in_bfloat16():
    cells = [
        Cell("range-attention", function, "bfloat16", "default", 64, 64, group, *LENGTHS.get(function, (130, 130)), True,
             False, 0.0, kv_heads=kv_heads)
        for function in SPEC["functions"]
        for kv_heads, group in ((1, 1), (1, 8), (3, 1))
    ]  # fmt: skip
    budget = vmem_budget(TARGET)
    results = compile_all([cell.job(TARGET, MODULE, budget) for cell in cells], workers=1, timeout=300)
    for cell, result in zip(cells, results, strict=True):
        assert result.ok, (str(cell), cell.kv_heads, result.error)
        assert 0 < result.vmem_bytes <= budget, str(cell)
    assert len({cell.function for cell in cells}) >= 6
