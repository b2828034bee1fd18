"""Every head size that models have, multiples of 128 or not: compiled for generations of TPU."""

from __future__ import annotations

import pytest
from test_compile_matrix import Cell, kernel_named, vmem_budget

from tpu_kernels.offdevice.aot import compile_all

HEAD_DIMS = (32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256, 512)
LENGTHS = {"forward": (577, 577), "decode": (1, 1000), "forward_with_lse": (577, 577), "backward": (577, 577)}
_, MODULE = kernel_named("range-attention")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_every_head_size_compiles(target, capsys):
    cells = [
        Cell("range-attention", function, "bfloat16", "default", dim, dim, 4, *lengths, True, False, 0.0)
        for dim in HEAD_DIMS
        for function, lengths in LENGTHS.items()
    ]
    budget = vmem_budget(target)
    results = list(compile_all([cell.job(target, MODULE, budget) for cell in cells], workers=2, timeout=300))
    with capsys.disabled():
        print(f"\ncompiled for {target}: VMEM of the kernel in MiB, HBM beyond operands and results in KiB")
        for cell, result in zip(cells, results, strict=True):
            print(f"{cell} {result.vmem_bytes / 2**20:6.1f} {result.temp_bytes / 2**10:8.0f} {result.error}")
        print(f"{len(cells)} programs: {sum(result.ok for result in results)} compiled")
    for cell, result in zip(cells, results, strict=True):
        assert result.ok, (cell, result.error)
        assert 0 < result.vmem_bytes <= budget, cell
