"""Each kernel function as one torch op, `tpu_kernels::<kernel>_<function>`: CPU emulation, TPU, fake, autograd.

The op of `forward_with_lse` is differentiable, through the op of `backward`; the others are for inference.

Defining an op loads neither jax nor the kernel; its first run does. Everything static is an argument, precision among
them, because torch_tpu's kernel cache does not know jax's precision setting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import hub
from .interrupts import interrupts_wait
from .tuning import tuning_for

if TYPE_CHECKING:
    from .specs import KernelSpec

NAMESPACE = "tpu_kernels"
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks"
_GRADIENT_INPUTS = "Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse"
_STATIC = (
    "float scale, float softcap, bool causal, bool has_validity, str precision, int block_q, int block_kv, int vmem_bytes"
)
_SCHEMAS = {
    "forward": f"({_INPUTS}, {_STATIC}) -> Tensor",
    "decode": f"({_INPUTS}, {_STATIC}) -> Tensor",
    "paged": (
        "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor starts, Tensor ends, Tensor? sinks, "
        "float scale, float softcap, str precision, int vmem_bytes) -> Tensor"
    ),
    "forward_dense": f"({_INPUTS}, {_STATIC}) -> Tensor",
    "forward_with_lse": f"({_INPUTS}, {_STATIC}) -> (Tensor, Tensor)",
    "backward": f"({_INPUTS}, {_GRADIENT_INPUTS}, {_STATIC}) -> (Tensor, Tensor, Tensor, Tensor)",
}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops: dict[tuple[KernelSpec, str], torch._ops.OpOverload] = {}
_lock = threading.Lock()

# torch.set_float32_matmul_precision speaks of the least precision allowed; kernels name jax's.
_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}


def op_for(spec: KernelSpec, function: str) -> torch._ops.OpOverload:
    """The op of one kernel function, defined on first request.

    Args of the op: q [B, Hq, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv], a range mask or None (then `causal` tells:
    query i sees keys 0..i, or every key), sinks [Hq] or None. Returns [B, Hq, Q, Dv], contiguous, in q's dtype.
    forward_dense takes a bool or float mask that broadcasts to [B, Hq, Q, KV].

    paged takes keys and values in pages [pages, page, Hkv, D], block_table int32 [B, M], starts and ends int32 [B, Q].

    forward_with_lse returns the log of the softmax denominators beside it, float32 [B, Hq, Q]. backward also takes
    these two and their gradients (None for lse: zero), and returns the gradients of q, k, v and of sinks ([Hq];
    zeros without sinks).
    """
    key = (spec, function)
    op = _ops.get(key)
    if op is None:
        with _lock:
            op = _ops.get(key) or _ops.setdefault(key, _define(spec, function))
    return op


def op_name(kernel: str, function: str) -> str:
    """The op's name in the namespace tpu_kernels. Kernel names are unique, module names need not be."""
    return f"{kernel.replace('-', '_')}_{function}"


def _define(spec: KernelSpec, function: str) -> torch._ops.OpOverload:
    name = op_name(spec.name, function)
    _library.define(name + _SCHEMAS[function], tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _first_run_loads(lambda: _emulated(spec, function)), "CPU")
    # The key that torch_tpu renames to "tpu"; it exists before torch_tpu has started.
    _library.impl(name, _first_run_loads(lambda: _on_tpu(spec, function)), "PrivateUse1")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[function], lib=_library)
    if function == "forward_with_lse":
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", _gradients_of(op_name(spec.name, "backward")), setup_context=_save, lib=_library
        )
    elif function == "backward":
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_second_derivative, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, sinks, scale, softcap, causal, has_validity, precision, *_ = inputs
    ctx.save_for_backward(q, k, v, mask, sinks, *output)
    ctx.static = (scale, softcap, causal, has_validity, precision)
    ctx.set_materialize_grads(False)


def _gradients_of(backward_op: str) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def gradients(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 13
        q, k, v, mask, sinks, out, lse = ctx.saved_tensors
        tuning = tuning_for(q.device.type, "backward")
        made = getattr(getattr(torch.ops, NAMESPACE), backward_op)(
            q, k, v, mask, sinks, out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse,
            *ctx.static, tuning.block_q, tuning.block_kv, tuning.vmem_bytes,
        )  # fmt: skip
        dq, dk, dv, dsinks = made
        wanted = ctx.needs_input_grad
        return (
            dq if wanted[0] else None,
            dk if wanted[1] else None,
            dv if wanted[2] else None,
            None,
            dsinks if wanted[4] else None,
            *(None,) * 8,
        )

    return gradients


def _no_second_derivative(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "tpu_attention has no second derivatives (create_graph=True). Use attn_implementation='eager' where they are needed."
    )


def _first_run_loads(build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    built: list[Callable[..., Any]] = []

    def run(*args: object) -> Any:
        if not built:
            built.append(build())
        return built[0](*args)

    return run


def _load(spec: KernelSpec) -> Any:
    """The kernel's module. Before it jax is imported, whole, Ctrl-C or not."""
    # Where jax is missing, loading the kernel says so with all that belongs to it.
    with interrupts_wait(), contextlib.suppress(ModuleNotFoundError):
        import jax.experimental.pallas.tpu  # noqa: F401
    return hub.load_kernel(spec).module


def _emulated(spec: KernelSpec, function: str) -> Callable[..., Any]:
    module = _load(spec)
    from . import bridge

    facing = bridge.facing(function, spec.capabilities.takes_ranges)(getattr(module, function), interpret=True)
    return bridge.emulated(facing, bridge.PAGED_STATIC if function == "paged" else bridge.STATIC)


def _on_tpu(spec: KernelSpec, function: str) -> Callable[..., Any]:
    module = _load(spec)
    from . import bridge

    facing = bridge.facing(function, spec.capabilities.takes_ranges)
    name = f"{NAMESPACE}_jax::{op_name(spec.name, function)}"
    return bridge.on_tpu(facing(getattr(module, function), interpret=False), name)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def _fake_forward_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_forward(q, k, v), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, ...]:
    dsinks = q.new_empty((q.shape[1],), dtype=torch.float32 if sinks is None else sinks.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _fake_forward,
    "decode": _fake_forward,
    "paged": _fake_forward,
    "forward_dense": _fake_forward,
    "forward_with_lse": _fake_forward_with_lse,
    "backward": _fake_backward,
}


def matmul_precision(dtype: torch.dtype, setting: str) -> str:
    """The kernel's precision argument under torch's float32 matmul `setting`: "highest", "high" or "default"."""
    return _PRECISIONS[setting] if dtype == torch.float32 else "default"
