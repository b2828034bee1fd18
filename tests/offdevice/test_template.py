"""The kernel that `tpu-kernels init` writes compiles for every generation that its spec.toml names."""

from __future__ import annotations

import pytest

from tpu_kernels.offdevice.aot import Array, Compiler, FunctionJob
from tpu_kernels.scaffold import write_kernel
from tpu_kernels.specs import read_spec

STATIC = {
    "scale": 0.1, "softcap": 0.0, "block_q": 0, "block_kv": 0, "precision": "default", "vmem_bytes": 0, "interpret": False,
}  # fmt: skip


@pytest.mark.slow
def test_it_compiles_up_to_its_limits(tmp_path):
    spec = read_spec(write_kernel("small-attention", tmp_path))
    can = spec.capabilities
    function = f"{spec.folder / 'torch-ext' / spec.module}:forward"
    shapes = [(dtype, can.max_head_dim, length, can.max_kv_len) for dtype in can.dtypes for length in (1, 1000)]
    with Compiler() as compiler:
        for generation in can.generations:
            for dtype, dim, q_len, kv_len in shapes:
                q, kv = Array(dtype, (1, 4, q_len, dim)), Array(dtype, (1, 2, kv_len, dim))
                rows = Array("int32", (1, q_len))
                result = compiler.run(FunctionJob(function, (q, kv, kv, rows, rows, None, None), generation, STATIC))
                assert result.ok, f"{generation} {dtype} D{dim} Q{q_len} KV{kv_len}: {result.stage}: {result.error}"
