"""Each kernel function as one torch op, `tpu_kernels::<kernel>_<function>`: CPU emulation, TPU, fake.

Defining an op loads neither jax nor the kernel; its first run does. Everything static is an argument, precision among
them, because torch_tpu's kernel cache does not know jax's precision setting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import hub

if TYPE_CHECKING:
    from .specs import KernelSpec

NAMESPACE = "tpu_kernels"
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float softcap, bool causal, "
    "bool has_validity, str precision, int block_q, int block_kv, int vmem_bytes) -> Tensor"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops: dict[tuple[KernelSpec, str], torch._ops.OpOverload] = {}
_lock = threading.Lock()

# torch.set_float32_matmul_precision speaks of the least precision allowed; kernels name jax's.
_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}


def op_for(spec: KernelSpec, function: str) -> torch._ops.OpOverload:
    """The op of one kernel function, defined on first request.

    Args of the op: q [B, Hq, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv], a range mask or None (then `causal` tells:
    query i sees keys 0..i, or every key), sinks [Hq] or None. Returns [B, Hq, Q, Dv], contiguous, in q's dtype.
    """
    key = (spec, function)
    op = _ops.get(key)
    if op is None:
        with _lock:
            op = _ops.get(key) or _ops.setdefault(key, _define(spec, function))
    return op


def _define(spec: KernelSpec, function: str) -> torch._ops.OpOverload:
    name = f"{spec.module}_{function}"
    _library.define(name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _first_run_loads(lambda: _emulated(spec, function)), "CPU")
    # The key that torch_tpu renames to "tpu"; it exists before torch_tpu has started.
    _library.impl(name, _first_run_loads(lambda: _on_tpu(spec, function)), "PrivateUse1")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _first_run_loads(build: Callable[[], Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    built: list[Callable[..., torch.Tensor]] = []

    def run(*args: object) -> torch.Tensor:
        if not built:
            built.append(build())
        return built[0](*args)

    return run


def _emulated(spec: KernelSpec, function: str) -> Callable[..., torch.Tensor]:
    kernel = hub.load_kernel(spec)
    from . import bridge

    return bridge.emulated(getattr(kernel.module, function))


def _on_tpu(spec: KernelSpec, function: str) -> Callable[..., torch.Tensor]:
    kernel = hub.load_kernel(spec)
    from . import bridge

    return bridge.on_tpu(getattr(kernel.module, function), f"{NAMESPACE}_jax::{spec.module}_{function}")


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def matmul_precision(dtype: torch.dtype, setting: str) -> str:
    """The kernel's precision argument under torch's float32 matmul `setting`: "highest", "high" or "default"."""
    return _PRECISIONS[setting] if dtype == torch.float32 else "default"
