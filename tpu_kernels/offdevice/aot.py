"""Compile kernel functions and StableHLO modules for a TPU generation, with no TPU.

    with Compiler() as compiler:
        result = compiler.run(
            FunctionJob(
                function="kernel_specs/x/torch-ext/x:forward",
                arguments=(Array("bfloat16", (1, 8, 4096, 128)), ...),
                static={"scale": 0.1},
                target="v6e",
            )
        )
        print(result.ok, result.stage, result.error, result.vmem_bytes, result.temp_bytes)

Results are "compiled for v6e": libtpu's own compiler accepted the program. Nothing has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from .process import Outcome, Worker, run_all
from .targets import target

Static = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Shape and dtype (numpy's or ml_dtypes' name) of one argument."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FunctionJob:
    """Compile `function(*arguments, **static)`.

    Attributes:
        function: "package.module:name", or "path:name" with a .py file or the folder of a package.
        arguments: positional arrays; None is passed as None.
        static: keyword arguments, JSON values.
        target: v4, v5e, v5p, v6e or tpu7x.
        keep_hlo: file to write the optimised HLO to.
    """

    function: str
    arguments: tuple[Array | None, ...]
    target: str
    static: Mapping[str, Static] = dataclasses.field(default_factory=dict)
    keep_hlo: Path | None = None


@dataclasses.dataclass(frozen=True)
class ModuleJob:
    """Compile the StableHLO text in the file `path`."""

    path: Path
    target: str
    keep_hlo: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What libtpu said.

    Attributes:
        ok: it compiled.
        stage: where it ended: start, import, trace, lower, compile (also when ok).
        error: the error's type and text; empty when ok.
        target: the generation.
        kernel_vmem: kernel call -> bytes of VMEM (scratch and pipelined windows).
        argument_bytes, output_bytes, temp_bytes, code_bytes: HBM. Temp 0 does not mean that nothing was
            materialised: XLA parks buffers in VMEM where they fit.
        seconds: trace, lower, compile.
    """

    ok: bool
    stage: str
    error: str
    target: str
    kernel_vmem: Mapping[str, int] = dataclasses.field(default_factory=dict)
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def vmem_bytes(self) -> int:
        """VMEM of the hungriest kernel in the program; 0 when it has none."""
        return max(self.kernel_vmem.values(), default=0)


class Compiler:
    """A worker process that compiles job after job. One thread at a time; two Compilers are fine."""

    def __init__(self, *, timeout: float = 300.0, on_stage: Callable[[str, str], None] | None = None) -> None:
        self._worker = Worker(timeout=timeout, on_stage=on_stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: FunctionJob | ModuleJob, timeout: float | None = None) -> Compiled:
        """Compile one job. An unknown target raises; everything else is in the result."""
        kind, payload = request(job)
        return compiled(job.target, self._worker.call(kind, payload, timeout))

    def close(self) -> None:
        self._worker.close()


def compile_all(jobs: Iterable[FunctionJob | ModuleJob], *, workers: int = 1, timeout: float = 300.0) -> Iterator[Compiled]:
    """Compile jobs on `workers` processes; results come in the order of the jobs."""
    jobs = list(jobs)
    outcomes = run_all([request(job) for job in jobs], workers=workers, timeout=timeout)
    for job, outcome in zip(jobs, outcomes, strict=True):
        yield compiled(job.target, outcome)


def request(job: FunctionJob | ModuleJob) -> tuple[str, dict[str, Any]]:
    """The worker's form of a job: (kind, JSON-able dict)."""
    payload: dict[str, Any] = {
        "target": target(job.target).name,
        "keep_hlo": str(job.keep_hlo) if job.keep_hlo else None,
    }
    if isinstance(job, ModuleJob):
        return "compile_module", payload | {"path": str(job.path)}
    arguments = [None if each is None else dataclasses.asdict(each) for each in job.arguments]
    return "compile_function", payload | {
        "function": job.function,
        "arguments": arguments,
        "static": dict(job.static),
    }


def compiled(name: str, outcome: Outcome) -> Compiled:
    """A worker's outcome as a result."""
    return Compiled(outcome.ok, outcome.stage, outcome.error, target(name).name, **outcome.value)
