"""Ahead-of-time compilation by libtpu, in the process that calls (run it in a worker: see `aot`).

`jax.experimental.topologies` gives compile-only devices; no TPU is needed or touched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from ..chip import tracing_for
from .targets import Target, target
from .worker import Stage, load


@functools.cache
def device_of(name: str) -> Any:
    """The compile-only device of a generation."""
    return topologies.get_topology_desc(platform="tpu", topology_name=target(name).topology).devices[0]


def load_function(reference: str) -> Callable[..., Any]:
    """A function named "package.module:name", or "path:name" (a .py file or a package's folder)."""
    place, _, name = reference.rpartition(":")
    path = Path(place)
    if path.suffix == ".py" or path.is_dir():
        return cast("Callable[..., Any]", functools.reduce(getattr, name.split("."), _module_at(path.resolve())))
    return cast("Callable[..., Any]", load(reference))


@functools.cache
def _module_at(path: Path) -> ModuleType:
    package = path.is_dir()
    # Two folders may hold packages of one name (two versions of a kernel): the path is part of the name.
    name = f"{path.stem.replace('-', '_')}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(
        name,
        path / "__init__.py" if package else path,
        submodule_search_locations=[str(path)] if package else None,
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is neither a Python file nor a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def lower_function(job: Mapping[str, Any], stage: Stage) -> tuple[Any, Any, dict[str, float]]:
    """Trace and lower a job's function for its target. Returns (traced, lowered, seconds by stage)."""
    stage("import")
    goal = target(job["target"])
    function = load_function(job["function"])
    arguments = job["arguments"]
    static = dict(job["static"])
    present = [
        jax.ShapeDtypeStruct(tuple(each["shape"]), np.dtype(jax.numpy.dtype(each["dtype"])))
        for each in arguments
        if each is not None
    ]

    def call(*arrays: Any) -> Any:
        remaining = iter(arrays)
        return function(*(None if each is None else next(remaining) for each in arguments), **static)

    where = SingleDeviceSharding(device_of(goal.name))
    jitted = jax.jit(call, in_shardings=where, out_shardings=where)
    seconds = {}
    with tracing_for(goal):
        stage("trace")
        started = time.perf_counter()
        traced = jitted.trace(*present)
        seconds["trace"] = time.perf_counter() - started
        stage("lower")
        started = time.perf_counter()
        lowered = traced.lower()
        seconds["lower"] = time.perf_counter() - started
    return traced, lowered, seconds


def compile_function(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `aot.FunctionJob`."""
    _, lowered, seconds = lower_function(job, stage)
    value = compile_lowered(lowered, seconds, stage, job.get("keep_hlo"))
    del value["hlo"]
    return value


def compile_lowered(lowered: Any, seconds: Mapping[str, float], stage: Stage, keep_hlo: str | None) -> dict[str, Any]:
    """Compile; the fields of `aot.Compiled`, and the optimised text as "hlo"."""
    stage("compile")
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = {**seconds, "compile": time.perf_counter() - started}
    hlo = compiled.as_text() or ""
    return {"seconds": seconds, **_memory(compiled.memory_analysis()), **_optimised(hlo, keep_hlo), "hlo": hlo}


def compile_module(job: Mapping[str, Any], stage: Stage, *, with_hlo: bool = False) -> dict[str, Any]:
    """A job of `aot.ModuleJob`; `with_hlo` adds the optimised text as "hlo"."""
    stage("import")
    goal = target(job["target"])
    text = Path(job["path"]).read_text()
    stage("compile")
    started = time.perf_counter()
    executable = compile_text(text, goal)
    seconds = {"compile": time.perf_counter() - started}
    hlo = "\n".join(module.to_string() for module in executable.hlo_modules())
    value = {
        "seconds": seconds,
        **_memory(executable.get_compiled_memory_stats()),
        **_optimised(hlo, job.get("keep_hlo")),
    }
    return value | ({"hlo": hlo} if with_hlo else {})


def compile_text(text: str, goal: Target) -> Any:
    """Compile StableHLO text for one device of the target; returns the unloaded executable.

    jax has no public way to compile a module it did not make, hence the private imports.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    device = device_of(goal.name)
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        return device.client.compile(module, executable_devices=_jax.DeviceList((device,)), compile_options=options)


def _memory(stats: Any) -> dict[str, int]:
    return {
        "argument_bytes": int(stats.argument_size_in_bytes),
        "output_bytes": int(stats.output_size_in_bytes),
        "temp_bytes": int(stats.temp_size_in_bytes),
        "code_bytes": int(stats.generated_code_size_in_bytes),
    }


_CUSTOM_CALL = re.compile(r'^\s*(?:ROOT )?%(\S+) = .*custom_call_target="tpu_custom_call"', re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*(?:(?:ROOT )?%\S+ = |\}$)", re.MULTILINE)
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')


def kernel_vmem(hlo: str) -> dict[str, int]:
    """Kernel call in an optimised HLO text -> bytes of VMEM that it takes (scratch and pipelined windows)."""
    found = {}
    for match in _CUSTOM_CALL.finditer(hlo):
        # A kernel's attributes may hold line breaks: the instruction ends where the next one begins.
        following = _INSTRUCTION.search(hlo, match.end())
        size = _SCOPED.search(hlo, match.end(), following.start() if following else len(hlo))
        found[match.group(1)] = int(size.group(1)) if size else 0
    return found


def _optimised(hlo: str, keep: str | None) -> dict[str, Any]:
    if keep:
        Path(keep).write_text(hlo)
    return {"kernel_vmem": kernel_vmem(hlo)}
