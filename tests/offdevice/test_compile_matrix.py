"""Every kernel function x every generation x dtypes, head sizes, lengths, groups and features: it compiles,
or routing provably never sends the call there.

A sliding window, packed documents and the like are values of the ranges, not another program, so they are not
cells of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import tomllib
from pathlib import Path

import pytest

from tpu_kernels.offdevice.aot import Array, Compiled, FunctionJob, compile_all
from tpu_kernels.offdevice.targets import TARGETS

SPECS = Path(__file__).parents[2] / "kernel_specs"
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
GROUPS = (1, 4, 8)
DTYPES = ("bfloat16", "float32")
LENGTHS = {
    "forward": ((1024, 1024), (577, 577), (300, 1300)),
    "decode": ((1, 4096), (1, 1000), (3, 2048)),
    "paged": ((1, 4096), (1, 1000), (3, 2048)),
    "forward_with_lse": ((4096, 4096), (577, 577), (300, 1300)),
    "backward": ((4096, 4096), (577, 577), (300, 1300)),
    "forward_dense": ((2048, 2048), (577, 4000), (32, 4096), (1, 2100)),
}
# (key validity, sinks, softcap)
FEATURES = (
    (True, False, 0.0),
    (False, True, 0.0),
    (False, False, 50.0),
    (True, True, 30.0),
    (False, False, 0.0),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call of one kernel function, for every generation."""

    kernel: str
    function: str
    dtype: str
    precision: str
    head_dim: int
    v_head_dim: int
    group: int
    q_len: int
    kv_len: int
    validity: bool
    sinks: bool
    softcap: float
    kv_heads: int = 2
    batch: int = 2

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        marks = [name for name, used in (("valid", self.validity), ("sinks", self.sinks), ("softcap", self.softcap)) if used]
        return (
            f"{self.kernel}.{self.function} {self.dtype:8} {self.precision:7} D {dims:7} group {self.group} "
            f"Q {self.q_len:4} KV {self.kv_len:4} {'+'.join(marks) or '-'}"
        )

    def job(self, target: str, module: Path, vmem_bytes: int) -> FunctionJob:
        q_heads = self.group * self.kv_heads
        rows = Array("int32", (self.batch, self.q_len))
        masks: tuple[Array | None, ...] = (rows, rows, Array("int32", (self.batch, self.kv_len)) if self.validity else None)
        if self.function == "forward_dense":  # in place of validity a bias, all heads' or each head's
            heads = 1 if self.sinks else q_heads
            masks = (None, Array(self.dtype, (1, heads, self.q_len, self.kv_len)))
            if not self.validity:
                masks = (Array("bool", (self.batch, 1, self.q_len, self.kv_len)), None)
        arguments = (
            Array(self.dtype, (self.batch, q_heads, self.q_len, self.head_dim)),
            Array(self.dtype, (self.batch, self.kv_heads, self.kv_len, self.head_dim)),
            Array(self.dtype, (self.batch, self.kv_heads, self.kv_len, self.v_head_dim)),
            *masks,
            Array(self.dtype, (q_heads,)) if self.sinks else None,
        )
        if self.function == "paged":
            return self.paged_job(target, module, vmem_bytes)
        if self.function == "backward":
            out = Array(self.dtype, (self.batch, q_heads, self.q_len, self.v_head_dim))
            lse = Array("float32", (self.batch, q_heads, self.q_len))
            arguments += (out, lse, out, None)
        static = {
            "scale": self.head_dim**-0.5,
            "softcap": self.softcap,
            "block_q": 0,
            "block_kv": 0,
            "precision": self.precision,
            "vmem_bytes": vmem_bytes,
            "interpret": False,
        }
        return FunctionJob(f"{module}:{self.function}", arguments, target, static)


    def paged_job(self, target: str, module: Path, vmem_bytes: int) -> FunctionJob:
        """The keys in pages of 64 tokens."""
        q_heads, most = self.group * self.kv_heads, -(-self.kv_len // 64)
        rows = Array("int32", (self.batch, self.q_len))
        arguments = (
            Array(self.dtype, (self.batch, q_heads, self.q_len, self.head_dim)),
            *(Array(self.dtype, (self.batch * most, 64, self.kv_heads, dim)) for dim in (self.head_dim, self.v_head_dim)),
            Array("int32", (self.batch, most)),
            rows,
            rows,
            Array(self.dtype, (q_heads,)) if self.sinks else None,
        )
        static = {"scale": self.head_dim**-0.5, "softcap": self.softcap, "precision": self.precision}
        static |= {"vmem_bytes": vmem_bytes, "interpret": False}
        return FunctionJob(f"{module}:{self.function}", arguments, target, static)


def kernels() -> list[tuple[dict, Path]]:
    """Those that take ranges and any length. `test_splash_attention` compiles the one that does not."""
    found = []
    for path in sorted(SPECS.glob("*/spec.toml")):
        spec = tomllib.loads(path.read_text())
        if "ranges" in spec["capabilities"]["masks"]:
            found.append((spec, path.parent / "torch-ext" / spec["kernel"]["module"]))
    assert found, f"no kernel that takes ranges in {SPECS}"
    return found


def kernel_named(name: str) -> tuple[dict, Path]:
    """One of `kernels`: its spec.toml, and its module's folder."""
    return next(each for each in kernels() if each[0]["kernel"]["name"] == name)


def cells(spec: dict) -> list[Cell]:
    """All head sizes and dtypes; groups, lengths and features go round, so that their pairs meet.

    Decode meets every group at every head size. Forward compiles slower (float32 at full precision slowest),
    and its
    program depends on the group only through an index: all groups at two head sizes, full precision at two.
    So it is with the two functions of training, of which forward_with_lse is forward and one more output.
    """
    can = spec["capabilities"]
    made = []
    features = itertools.cycle(FEATURES)
    for function in spec["functions"]:
        assert function in LENGTHS, f"no cells are written for kernel function {function!r}"
        lengths, turn = itertools.cycle(LENGTHS[function]), itertools.cycle(GROUPS)
        for dtype, dims in itertools.product(DTYPES, HEAD_DIMS):
            if function == "forward_with_lse" and dims not in {(64, 64), (128, 128), (192, 128)}:
                continue
            if function == "forward_dense" and dims not in {(64, 64), (128, 128), (192, 128), (512, 512)}:
                continue
            swept = function in ("decode", "paged") or (dtype == "bfloat16" and dims in {(64, 64), (128, 128)})
            full = dtype == "float32" and (function in ("decode", "paged") or dims in {(64, 64), (192, 128)})
            for group in GROUPS if swept else (next(turn),):
                validity, sinks, softcap = next(features)
                q_len, kv_len = next(lengths)
                made.append(
                    Cell(
                        spec["kernel"]["name"],
                        function,
                        dtype,
                        "highest" if full else "default",
                        *dims,
                        group,
                        q_len,
                        kv_len,
                        validity and "ranges+validity" in can["masks"],
                        sinks and can["sinks"],
                        softcap if can["softcap"] else 0.0,
                    )
                )
    return made


def vmem_budget(target: str) -> int:
    """What routing gives a kernel on this generation (`tuning`), in bytes."""
    from tpu_kernels import tuning

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_KERNELS_TARGET", target)
        tuning.generation.cache_clear()
        tuning.tuning_for.cache_clear()
        budget = tuning.tuning_for("tpu", "forward").vmem_bytes
    tuning.generation.cache_clear()
    tuning.tuning_for.cache_clear()
    assert 0 < budget <= TARGETS[target].vmem_bytes
    return budget


def refused(cell: Cell, spec: dict, target: str) -> str:
    """Why routing does not send this call to the kernel on this generation; empty when it does."""
    can = spec["capabilities"]
    if cell.dtype not in can["dtypes"]:
        return "dtype"
    if max(cell.head_dim, cell.v_head_dim) > can["max_head_dim"]:
        return "head_dim"
    if cell.head_dim != cell.v_head_dim and not can["v_head_dim_may_differ"]:
        return "v_head_dim"
    if cell.group > 1 and not can["gqa"]:
        return "gqa"
    if target not in can["generations"]:
        return "generation"
    return ""


def mark(result: Compiled | None, reason: str) -> str:
    if result is None:
        return reason
    return f"{result.vmem_bytes / 2**20:.1f}" if result.ok else f"FAILS {result.stage}"


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "module"), [pytest.param(*each, id=each[0]["kernel"]["name"]) for each in kernels()])
def test_every_function_compiles_for_every_generation(spec, module, capsys):
    rows = cells(spec)
    budgets = {name: vmem_budget(name) for name in TARGETS}
    # By generation: neighbouring jobs share what libtpu keeps for a generation.
    wanted = [(cell, name) for name in TARGETS for cell in rows if not refused(cell, spec, name)]
    started = time.monotonic()
    jobs = [cell.job(name, module, budgets[name]) for cell, name in wanted]
    results = dict(zip(wanted, compile_all(jobs, workers=2, timeout=120), strict=True))
    seconds = time.monotonic() - started
    failed = {each: result for each, result in results.items() if not result.ok}
    with capsys.disabled():
        width = max(len(str(cell)) for cell in rows)
        print(f"\ncompiled by libtpu; VMEM of the kernel in MiB, or why routing refuses\n{'':{width}}  ", end="")
        print("  ".join(f"{name:>7}" for name in TARGETS))
        for cell in rows:
            row = [mark(results.get((cell, name)), refused(cell, spec, name)) for name in TARGETS]
            print(f"{cell!s:{width}}  " + "  ".join(f"{each:>7}" for each in row))
        total = len(rows) * len(TARGETS)
        print(
            f"{total} cells: {len(results) - len(failed)} compiled, {total - len(results)} refused by routing, "
            f"{len(failed)} failed; {seconds:.0f} s"
        )
    assert not failed, "\n".join(f"{name}: {cell}: {each.error}" for (cell, name), each in failed.items())
    for (cell, name), result in results.items():
        assert result.vmem_bytes <= budgets[name], f"{name}: {cell} takes {result.vmem_bytes} bytes of VMEM"


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "module"), [pytest.param(*each, id=each[0]["kernel"]["name"]) for each in kernels()])
def test_training_keeps_only_numbers_a_row_in_hbm(spec, module, capsys):
    """No scores and no partial dq: beyond operands and results, 32 bytes a query row and head at most.

    At this length nothing that grows with its square, and no copy of an operand, could hide in VMEM. Head size 128,
    because others are laid out anew for any Mosaic kernel (minor dimension a multiple of 128).
    """
    length, kv_heads, group = 16384, 2, 4
    names = [each for each in ("forward_with_lse", "backward") if each in spec["functions"]]
    jobs = {}
    for name, function, dtype in itertools.product(TARGETS, names, DTYPES):
        cell = Cell(
            spec["kernel"]["name"], function, dtype, "default", 128, 128, group, length, length, True, False, 0.0,
            kv_heads=kv_heads, batch=1,
        )  # fmt: skip
        jobs[name, function, dtype] = cell.job(name, module, vmem_budget(name))
    results = dict(zip(jobs, compile_all(jobs.values(), workers=2, timeout=120), strict=True))
    with capsys.disabled():
        print(f"\nHBM beyond operands and results, S {length}, {kv_heads * group} query heads, KiB")
        for each, result in results.items():
            print(f"{' '.join(each):40} {result.temp_bytes / 1024:8.0f} {result.error}")
    for each, result in results.items():
        assert result.ok, (each, result.error)
        assert result.temp_bytes <= 32 * kv_heads * group * length, each
