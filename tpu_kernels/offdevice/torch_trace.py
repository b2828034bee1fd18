"""Emission of torch programs by torch_tpu, in the process that calls (run it in a worker: see `emit`)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import torch_tpu_offline as offline
from .targets import target
from .worker import Stage


@dataclasses.dataclass
class Program:
    """A call to be emitted: `function(*args, **kwargs)`, tensors anywhere on device "meta" (or with values,
    unused).

    Attributes:
        function: an nn.Module, or a function.
        args, kwargs: tensors, in any nesting that torch's pytree knows.
        holders: further objects whose tensor and device attributes the call uses (a static cache's layers).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    holders: tuple[object, ...] = ()


def emit_function(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `emit.FunctionJob`: the function runs eagerly on placeholders, and what it records is
    lowered."""
    stage("import")
    from ..chip import tracing_for
    from .compiler import load_function

    offline.start()
    function = load_function(job["function"])
    arguments = [
        None if each is None else offline.placeholder(each["shape"], getattr(torch, each["dtype"]))
        for each in job["arguments"]
    ]
    seconds: dict[str, float] = {}
    with (
        offline.captured() as recorder,
        offline.recording(),
        torch.no_grad(),
        tracing_for(target(job["target"])),
    ):
        stage("trace")
        with _timed(seconds, "trace"):
            results = function(*arguments, **job["static"])
        stage("lower")
        with _timed(seconds, "lower"):
            tensors = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
            offline.lower(tensors, [each for each in arguments if each is not None])
    return _written(recorder, job["folder"], seconds) | {"graphs": 1, "graph_breaks": 0}


def emit_module(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `emit.ModuleJob`: the program goes through torch.compile(backend="tpu")."""
    stage("import")
    from ..chip import tracing_for
    from .compiler import load_function

    offline.start()
    build = load_function(job["builder"])
    stage("build")
    seconds: dict[str, float] = {}
    with _timed(seconds, "build"):
        program: Program = build(**job["parameters"])
        placed = _on_placeholders(program)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stage("trace")
    with (
        offline.captured() as recorder,
        offline.recording(),
        torch.no_grad(),
        tracing_for(target(job["target"])),
        _timed(seconds, "trace"),
    ):
        compiled = torch.compile(placed.function, backend="tpu", fullgraph=job["fullgraph"], dynamic=False)
        compiled(*placed.args, **placed.kwargs)
    counters = torch._dynamo.utils.counters
    return _written(recorder, job["folder"], seconds) | {
        "graphs": len(recorder.modules),
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _on_placeholders(program: Program) -> Program:
    """The program with each tensor replaced by a placeholder of its shape and dtype; shared tensors stay
    shared."""
    made: dict[int, torch.Tensor] = {}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = offline.placeholder(tensor.shape, tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=False)
            made[id(tensor)] = new
        return made[id(tensor)]

    if isinstance(program.function, torch.nn.Module):
        for module in program.function.modules():
            stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for store in stores:
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = place(tensor)
    for holder in program.holders:
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, name, place(value))
            elif isinstance(value, torch.device):
                setattr(holder, name, torch.device("tpu"))
    args, kwargs = pytree.tree_map_only(torch.Tensor, place, (program.args, program.kwargs))
    return Program(program.function, args, kwargs)


def _written(recorder: offline.Recorder, folder: str, seconds: dict[str, float]) -> dict[str, Any]:
    paths = []
    for index, text in enumerate(recorder.modules):
        path = Path(folder) / f"graph{index}.mlir"
        path.write_text(text)
        paths.append(str(path))
    return {"modules": paths, "kernels": recorder.kernel_names, "seconds": seconds}


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Any:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
