"""Fault kind 26, blocks that do not fit VMEM: libtpu's own limit on both sides of it, on every generation.

That the chosen blocks of every function fit is test_compile_matrix.py's.
"""

from __future__ import annotations

import dataclasses

import pytest
from test_compile_matrix import Cell, kernel_named, vmem_budget

from tpu_kernels.offdevice.aot import compile_all
from tpu_kernels.offdevice.targets import TARGETS

_, MODULE = kernel_named("range-attention")
BYTES_A_KEY = 2 * 2 * (128 + 128)  # key and value in bfloat16, each held twice: one is worked on, the next copied


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_what_does_not_fit_is_refused_by_name_and_half_of_it_fits(target):
    budget = vmem_budget(target)
    half = budget // 2 // BYTES_A_KEY // 1024 * 1024
    jobs = []
    for keys in (half, 2 * half + 1024):
        cell = Cell("range-attention", "forward", "bfloat16", "default", 128, 128, 1, 128, 4 * keys, False, False, 0.0,
                    kv_heads=1, batch=1)  # fmt: skip
        job = cell.job(target, MODULE, budget)
        jobs.append(dataclasses.replace(job, static={**job.static, "block_kv": keys}))
    fits, refused = compile_all(jobs, workers=1, timeout=300)
    assert fits.ok and budget / 2 * 0.9 < fits.vmem_bytes <= budget, (fits.error, fits.vmem_bytes)
    assert (refused.ok, refused.stage) == (False, "compile")
    assert "RESOURCE_EXHAUSTED" in refused.error and "vmem" in refused.error.lower()
    assert "range_attention_forward" in refused.error
