"""The StableHLO that torch_tpu itself makes, with no TPU: of a torch function, or a compiled module.

    with Emitter(target="v6e") as emitter:
        result = emitter.run(ModuleJob("tpu_kernels.offdevice.models:program", {...}), folder)
        print(result.ok, result.stage, result.error, result.graphs, result.graph_breaks)
        print(emitter.compile(result.modules[0]).temp_bytes)

JAX kernels that the program calls stand in the module. Off-device they are put there by this package and not
by torch_tpu's own injection, which needs a chip (see `torch_tpu_offline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from . import aot
from .aot import Array, Compiled, Static
from .process import Outcome, Worker
from .targets import target as find_target


@dataclasses.dataclass(frozen=True)
class FunctionJob:
    """Emit `function(*arguments, **static)`, run eagerly on placeholders.

    Attributes:
        function: "package.module:name", or "path:name" with a .py file or the folder of a package.
        arguments: positional tensors (dtypes by torch's name); None is passed as None.
        static: keyword arguments, JSON values.
    """

    function: str
    arguments: tuple[Array | None, ...]
    static: Mapping[str, Static] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ModuleJob:
    """Emit the program that `builder(**parameters)` returns (a `torch_trace.Program`), through torch.compile.

    Attributes:
        builder: "package.module:name" or "path:name".
        parameters: JSON values.
        fullgraph: a graph break is an error; without it breaks are counted.
    """

    builder: str
    parameters: Mapping[str, Any]
    fullgraph: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """What torch_tpu made.

    Attributes:
        ok: it emitted.
        stage: where it ended: start, import, build, trace, lower (also when ok).
        error: the error's type and text; empty when ok.
        modules: one file of StableHLO text for each graph.
        kernels: the op name of each JAX kernel call in them, in order.
        graphs, graph_breaks: as Dynamo counted.
        seconds: by stage.
    """

    ok: bool
    stage: str
    error: str
    modules: tuple[Path, ...] = ()
    kernels: tuple[str, ...] = ()
    graphs: int = 0
    graph_breaks: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Emitter:
    """A worker process that emits, and compiles, for one target: kernels are traced for the chip they will
    run on."""

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 300.0,
        environment: Mapping[str, str] | None = None,
        on_stage: Callable[[str, str], None] | None = None,
    ) -> None:
        self.target = find_target(target).name
        self._worker = Worker({"TPU_KERNELS_TARGET": self.target, **(environment or {})}, timeout=timeout, on_stage=on_stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: FunctionJob | ModuleJob, folder: Path, timeout: float | None = None) -> Emitted:
        """Emit one job; its modules are written to `folder`, which must exist."""
        payload: dict[str, Any] = {"target": self.target, "folder": str(folder)}
        if isinstance(job, FunctionJob):
            kind = "emit_function"
            payload |= {
                "function": job.function,
                "arguments": [None if each is None else dataclasses.asdict(each) for each in job.arguments],
                "static": dict(job.static),
            }
        else:
            kind = "emit_module"
            payload |= {
                "builder": job.builder,
                "parameters": dict(job.parameters),
                "fullgraph": job.fullgraph,
            }
        outcome = self.call(kind, payload, timeout)
        value = outcome.value
        return Emitted(
            outcome.ok,
            outcome.stage,
            outcome.error,
            **{**value, "modules": tuple(map(Path, value["modules"])), "kernels": tuple(value["kernels"])}
            if outcome.ok
            else {},
        )

    def compile(self, module: Path, timeout: float | None = None) -> Compiled:
        """Compile an emitted module for the target, in the same worker."""
        kind, payload = aot.request(aot.ModuleJob(module, self.target))
        return aot.compiled(self.target, self.call(kind, payload, timeout))

    def call(self, kind: str, payload: Mapping[str, Any], timeout: float | None = None) -> Outcome:
        """Run any job of `worker.KINDS` in the same worker."""
        return self._worker.call(kind, payload, timeout)

    def close(self) -> None:
        self._worker.close()
