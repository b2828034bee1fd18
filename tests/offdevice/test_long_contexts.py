"""128k tokens, and the memory of training: compiled for generations of TPU. A window is a value of the ranges, so the
causal and the windowed call are one program."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
from test_compile_matrix import Cell, kernel_named, vmem_budget

from tpu_kernels.offdevice import aot
from tpu_kernels.offdevice.aot import Array, compile_all
from tpu_kernels.offdevice.emit import Emitter, FunctionJob
from tpu_kernels.offdevice.targets import TARGETS

_, MODULE = kernel_named("range-attention")
SMEM_BYTES = 1 << 20  # of one core, on every generation here
ROOT = Path(__file__).parents[2]
PLAIN, PROGRAMS = (Path(__file__).with_name(f"{name}.py") for name in ("plain_attention", "training_programs"))
TORCH_CALLS = ROOT / "benchmarks" / "torch_calls.py"
LONG = Cell(
    "range-attention", "forward", "bfloat16", "default", 128, 128, 4, 1 << 17, 1 << 17, True, False, 0.0, kv_heads=2, batch=1
)  # fmt: skip
DECODE = dataclasses.replace(LONG, function="decode", q_len=1)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_prefetched_scalars_of_128k_tokens_fit_scalar_memory(target, batch, monkeypatch):
    """Four numbers a block of query rows and one a tile of keys, with the blocks that the generation's budget gives."""
    monkeypatch.syspath_prepend(str(MODULE.parent))
    blocks, ranges = (importlib.import_module(f"range_attention.{name}") for name in ("blocks", "ranges"))
    chosen, _ = blocks.choose_blocks(LONG.q_len, LONG.kv_len, 128, 128, 2, 0, 0, vmem_budget(target))
    rows, keys = (jax.ShapeDtypeStruct((batch, LONG.q_len), kind) for kind in (np.int32, np.bool_))
    bounds = functools.partial(ranges.block_bounds, kv_len=LONG.kv_len, rows=chosen.rows, tile=chosen.tile)
    made = jax.eval_shape(bounds, rows, rows, keys)
    size = sum(4 * each.size for each in made)
    assert all(each.dtype == np.int32 for each in made)
    assert size <= SMEM_BYTES / 4, f"{size} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_128k_tokens(target, capsys):
    """Inference of one sequence, and of 8 at once: prefetched scalars that did not fit SMEM would not compile. What the
    kernel keeps in HBM beyond operands and results grows with rows and keys, not with their product."""
    cells = [LONG, DECODE, *(dataclasses.replace(each, batch=8) for each in (LONG, DECODE))]
    results = compile_all([each.job(target, MODULE, vmem_budget(target)) for each in cells], workers=2, timeout=400)
    with capsys.disabled():
        print()
        for cell, result in zip(cells, results, strict=True):
            print(f"{cell} batch {cell.batch}, compiled for {target}: {result.temp_bytes / 1024:.0f} KiB {result.error}")
            assert result.ok, (cell, result.error)
            # Two int32 a query row and one a key, laid out by blocks, and a sixteenth for what is known of blocks. Where XLA
            # parks them in VMEM they are not counted.
            assert result.temp_bytes <= cell.batch * (8 * cell.q_len + 4 * cell.kv_len) * 17 // 16, cell


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_gradients_of_128k_tokens(target, capsys):
    cell = dataclasses.replace(LONG, function="backward")
    (result,) = compile_all([cell.job(target, MODULE, vmem_budget(target))], workers=1, timeout=600)
    with capsys.disabled():
        print(f"\n{cell}, compiled for {target}: {result.temp_bytes / 1024:.0f} KiB {result.error}")
    assert result.ok, result.error
    assert result.temp_bytes <= gradient_bytes(1, cell.kv_heads * cell.group, cell.q_len, cell.kv_len)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_memory_of_training_at_8192_tokens(target, tmp_path, capsys):
    """HBM beyond operands and results of a training step: the kernel's two functions, SDPA as torch_tpu runs it with its own
    backward, and attention written out for XLA. docs/training.md has the line."""
    length, heads, kv_heads, dim = 8192, 8, 2, 128  # with 32 heads, what is written out exceeds the HBM of a v5e
    q, k = (Array("bfloat16", (1, each, length, dim)) for each in (heads, kv_heads))
    (plain,) = compile_all([aot.FunctionJob(f"{PLAIN}:attention_and_gradients", (q, k, k, q), target)], timeout=400)
    jobs = [
        FunctionJob(f"{PROGRAMS}:attention_and_gradients", (q, k, k, None, None, q)),
        FunctionJob(f"{TORCH_CALLS}:sdpa_and_gradients", (q, k, k, q)),
    ]
    with Emitter(target, timeout=400) as emitter:
        folders = [tmp_path / name for name in ("kernel", "sdpa")]
        for folder in folders:
            folder.mkdir()
        emitted = [emitter.run(job, folder) for job, folder in zip(jobs, folders, strict=True)]
        assert all(each.ok and len(each.modules) == 1 for each in emitted), [each.error for each in emitted]
        kernel, sdpa = (emitter.compile(each.modules[0]) for each in emitted)
    results = [kernel, sdpa, plain]
    assert all(each.ok for each in results), [each.error for each in results]
    line = f"| {target} | " + " | ".join(f"{each.temp_bytes / 2**20:.1f}" for each in results) + " |"
    with capsys.disabled():
        print(f"\n{line}")
    assert plain.temp_bytes >= heads * length * length * 2
    # No scores and no partial dq: what the gradients of 128k tokens are held to, and lse, from one kernel to the other.
    assert kernel.temp_bytes <= gradient_bytes(1, heads, length, length) + 4 * heads * length
    assert line in (ROOT / "docs" / "training.md").read_text()


def gradient_bytes(batch: int, heads: int, q_len: int, kv_len: int) -> int:
    """What `backward` may keep in HBM: numbers of float32 and int32 a row or a key, never a row and key.

    A row of a head: lse and delta, and both again by blocks. A row: its range, and by blocks. A key: its validity, by tiles.
    A sixteenth for what is known of blocks.
    """
    return batch * (16 * heads * q_len + 16 * q_len + 4 * kv_len) * 17 // 16
