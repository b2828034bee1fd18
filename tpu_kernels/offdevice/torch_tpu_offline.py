"""torch_tpu's own tracer and lowering with no TPU. Every private name of torch_tpu that this package uses
stands here.

torch_tpu can make StableHLO without a chip: a *placeholder* is a tensor on device "tpu" with no storage,
    operations on
placeholders are recorded, and `build_mlir` turns the record into a module. Three things ask for a chip, and
are replaced here, in this process only:

* the last step of `torch.compile(backend="tpu")`, which compiles and loads the module: here it is kept as
  text;
* the random number generators of the devices (there are none): a program that draws random numbers fails to
  emit;
* the injection of a JAX kernel into the module, which asks the client for its topology: here a kernel's
  outputs become arguments of the module and its inputs become results, and `splice` puts the kernel's code
  between them afterwards.

Never allocate a real tensor on device "tpu" in such a process: it waits for a chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .splice import KernelCall, splice

SUPPORTED_VERSIONS = ("0.2.0",)


class UnsupportedTorchTpuError(RuntimeError):
    """The installed torch_tpu is not one whose private names are known here."""


@dataclasses.dataclass
class Recorder:
    """What was lowered: one StableHLO text for each compiled graph, and the kernels in all of them."""

    modules: list[str] = dataclasses.field(default_factory=list)
    kernel_names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _KernelStore:
    """Stands in for torch_tpu's C++ kernel registry."""

    artifacts: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    calls: list[tuple[tuple[str, str], list[torch.Tensor], list[torch.Tensor]]] = dataclasses.field(default_factory=list)

    def lookup_custom_kernel(self, name: str, fingerprint: str) -> bool:
        return (name, fingerprint) in self.artifacts

    def register_custom_kernel(self, name: str, fingerprint: str, *, serialized_mlir_module: bytes) -> None:
        self.artifacts[name, fingerprint] = serialized_mlir_module

    def call_custom_kernel(
        self,
        name: str,
        fingerprint: str,
        *,
        inputs: Sequence[torch.Tensor],
        output_shapes: Sequence[torch.Tensor],
        donate_argnums: Sequence[int] = (),
        device_assignment: Sequence[int] = (),
    ) -> list[torch.Tensor]:
        outputs = [placeholder(each.shape, each.dtype) for each in output_shapes]
        self.calls.append(((name, fingerprint), list(inputs), outputs))
        return outputs


_store = _KernelStore()
_recorder = Recorder()
_started = False


def check_version() -> None:
    """Raise UnsupportedTorchTpuError when torch_tpu is absent or of a version that nobody has looked at."""
    try:
        version = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedTorchTpuError(
            f"torch_tpu is not installed; emission without a TPU needs {' or '.join(SUPPORTED_VERSIONS)}"
        ) from None
    if version not in SUPPORTED_VERSIONS:
        raise UnsupportedTorchTpuError(
            f"torch_tpu {version} is installed; off-device emission uses private interfaces of torch_tpu "
            f"{' or '.join(SUPPORTED_VERSIONS)} and would be a guess with any other"
        )


def start() -> None:
    """Make device "tpu" known to torch and replace what asks for a chip. Once a process; only in a worker
    process."""
    global _started
    if _started:
        return
    check_version()
    for variable in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY"):
        if variable not in os.environ:
            raise RuntimeError(f"{variable} is not set: run this in a worker process (offdevice.process)")
    from torch_tpu import _loader
    from torch_tpu._internal.compile import torch_tpu_compiled_executable as executables
    from torch_tpu._internal.device import _device_module
    from torch_tpu._internal.export import export
    from torch_tpu._internal.pallas import pallas

    _loader._init_device("tpu")
    generators = (torch.Generator(),)
    _device_module._DefaultGeneratorsProperty.__get__ = lambda self, instance, owner: generators
    export.tpu_torch_compile = _OfflineCompiler(export.tpu_torch_compile)
    pallas.tpu_torch_pallas = _store
    executables.TorchTpuCompiledExecutable.__call__ = _run_nothing
    # Programs that were never loaded cannot be serialised.
    torch._functorch.config.enable_autograd_cache = False
    _started = True


def _native() -> Any:
    from torch_tpu._internal.compile import tpu_torch_compile

    return tpu_torch_compile


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on device "tpu" without storage."""
    made: torch.Tensor = _native().placeholder(list(shape), dtype, False)
    return made


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Operations on placeholders are recorded, as they are when torch_tpu lowers a compiled graph."""
    from torch_tpu._internal import execution_mode

    with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        yield


@contextlib.contextmanager
def captured() -> Iterator[Recorder]:
    """Collect every module that is lowered in the block."""
    global _recorder
    before, _recorder = _recorder, Recorder()
    _store.calls.clear()
    try:
        yield _recorder
    finally:
        _recorder = before


def lower(results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> str:
    """StableHLO text of the recorded computation of `results` from `arguments`, kernels included."""
    native = _native()
    calls, _store.calls[:] = list(_store.calls), []
    kernel_inputs = [tensor for _, inputs, _ in calls for tensor in inputs]
    kernel_outputs = [tensor for _, _, outputs in calls for tensor in outputs]
    module = native.build_mlir([*results, *kernel_inputs], [*arguments, *kernel_outputs])
    text: str = native.serialize_mlir_text(module)
    if calls:
        text = splice(
            text,
            [KernelCall(_store.artifacts[key], len(inputs), len(outputs)) for key, inputs, outputs in calls],
            results=len(results),
            arguments=len(arguments),
        )
    _recorder.modules.append(text)
    _recorder.kernel_names += [name for (name, _), _, _ in calls]
    return text


class _OfflineCompiler:
    """torch_tpu's native compile module, except for what needs a chip."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._random_state = native.placeholder([2], torch.int64, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def traverse_and_compile(
        self, result_tensors: Sequence[torch.Tensor], argument_tensors: Sequence[torch.Tensor], **_: Any
    ) -> Any:
        lower(result_tensors, argument_tensors)
        return _CompileResult(None, _NotLoaded([(each.shape, each.dtype) for each in result_tensors]))

    def make_export_mode_device_generator(self, generator: torch.Generator) -> torch.Generator:
        return generator

    def set_export_mode_default_device_generator(self, generator: torch.Generator) -> None:
        pass

    def clear_export_mode_default_device_generators(self) -> None:
        pass

    def get_device_state_tensor(self, generator: torch.Generator) -> torch.Tensor:
        state: torch.Tensor = self._random_state
        return state


@dataclasses.dataclass
class _CompileResult:
    module: None
    executable: _NotLoaded


@dataclasses.dataclass
class _NotLoaded:
    """In the place of a loaded program: the shapes and dtypes of its outputs."""

    outputs: list[tuple[torch.Size, torch.dtype]]


def _run_nothing(self: Any, *args: Any, output_shapes: Any = None) -> Any:
    """In the place of running a program on a chip: fresh placeholders of the right shapes."""
    outputs = [placeholder(shape, dtype) for shape, dtype in self._executable.outputs]
    boxed = len(args) == 1 and isinstance(args[0], (list, tuple))
    arguments = list(args[0]) if boxed else list(args)
    result = self._reconstruct_fx_outputs_fn(arguments, outputs) if self._reconstruct_fx_outputs_fn else outputs
    if boxed and isinstance(args[0], list):
        args[0].clear()  # the calling convention of boxed functions
    return result
