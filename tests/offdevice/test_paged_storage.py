"""What decoding on pages takes from HBM beside the pages: transformers' own storage, and a pool for each layer. Compiled,
not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpu_kernels.offdevice.aot import Array, FunctionJob, compile_all
from tpu_kernels.offdevice.emit import Emitter
from tpu_kernels.offdevice.emit import FunctionJob as EmitJob

MODULE = Path(__file__).parents[2] / "kernel_specs" / "range-attention" / "torch-ext" / "range_attention"
PAGE, KV_HEADS, DIM = 64, 8, 128


def pages_of_the_byte_tensor(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Pages of the second layer's keys, by the views that transformers' FullAttentionCacheAllocator makes."""
    tokens = pool.shape[0] // (2 * 2 * KV_HEADS * DIM)
    flat = pool.view(torch.bfloat16).view(tokens, 2, KV_HEADS, DIM).view(tokens * 2, KV_HEADS, DIM)
    return torch.index_select(flat[2 * PAGE :].view(-1, PAGE, KV_HEADS, DIM), 0, table)


@pytest.mark.slow
def test_a_view_of_bytes_is_copied_whole(tmp_path):
    size, pages = 64 << 20, 16
    with Emitter("v6e") as emitter:
        job = EmitJob(f"{__file__}:pages_of_the_byte_tensor", (Array("uint8", (size,)), Array("int32", (pages,))))
        emitted = emitter.run(job, tmp_path)
        assert emitted.ok, emitted.error
        compiled = emitter.compile(emitted.modules[0])
    assert compiled.ok, compiled.error
    read = pages * PAGE * KV_HEADS * DIM * 2
    print(f"compiled for v6e: for {read >> 20} MiB of a pool of {size >> 20} MiB it copies {compiled.temp_bytes >> 20} MiB")
    assert compiled.temp_bytes > 0.9 * size > 10 * read


@pytest.mark.slow
def test_a_pool_of_the_models_dtype_is_read_where_it_lies():
    """Head size 128; XLA lays out others anew for any Mosaic kernel."""
    requests, most, pages = 32, 16, 1024
    jobs = [
        FunctionJob(
            f"{MODULE}:paged",
            (
                Array(dtype, (requests, group * kv_heads, 1, DIM)), *[Array(dtype, (pages, 256, kv_heads, DIM))] * 2,
                Array("int32", (requests, most)), *[Array("int32", (requests, 1))] * 2, None,
            ),
            target,
            {"scale": 0.1, "softcap": 0.0, "precision": "default", "vmem_bytes": 50 << 20, "interpret": False},
        )
        for target in ("v6e", "tpu7x") for dtype in ("bfloat16", "float32") for kv_heads, group in ((8, 4), (2, 4))
    ]  # fmt: skip
    for job, result in zip(jobs, compile_all(jobs), strict=True):
        assert result.ok, result.error
        print(f"compiled for {job.target}: pool {result.argument_bytes >> 20} MiB, beyond it {result.temp_bytes >> 10} KiB")
        assert result.temp_bytes <= 1 << 20 and result.argument_bytes >= 256 << 20
