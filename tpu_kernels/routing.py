"""Which kernel function, or which fallback, takes a call: request x kernel specs -> Route. Imports no jax.

`decide` is pure Python over plain data, so Dynamo can trace it (also with symbolic lengths).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .request import AttentionRequest
from .specs import KernelFunction, KernelSpec

_DENSE = ("dense_bool", "dense_float")
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call runs. target "kernel" has kernel and function names; else "sdpa" or "eager" with reason code(s).

    refusals: (kernel name, reason code) for each kernel that was asked and refused, in order.
    """

    target: Literal["kernel", "sdpa", "eager"]
    reason: str
    kernel: str = ""
    function: str = ""
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """"range-attention.forward", "sdpa" or "eager"."""
        return f"{self.kernel}.{self.function}" if self.target == "kernel" else self.target


def decide(request: AttentionRequest, specs: tuple[KernelSpec, ...]) -> Route:
    """The first kernel in `specs` that can do the call exactly, else the fallback with the reason of the first refusal."""
    refusals: list[tuple[str, str]] = []
    reason = _refused_by_all(request)
    if reason is None:
        for spec in specs:
            reason = refusal(request, spec)
            if reason is None:
                return Route("kernel", "kernel", spec.name, pick_function(request, spec), tuple(refusals))
            refusals.append((spec.name, reason))
    # SDPA drops sinks and refuses softcap, and keeps no weights: those calls are only right in eager. It also lacks
    # forward-mode derivatives on some devices.
    eager = request.softcap or request.sinks or request.output_attentions or request.transformed
    first = refusals[0][1] if refusals else (reason or "no_kernel")
    return Route("eager" if eager else "sdpa", first, refusals=tuple(refusals))


def _refused_by_all(request: AttentionRequest) -> str | None:
    """Reasons that do not depend on a kernel's capabilities."""
    if request.disabled:
        return "disabled"
    if request.transformed:
        return "transformed"
    if request.unknown:
        return "unknown_kwarg"
    if request.output_attentions:
        return "output_attentions"
    if request.q_len == 0 or request.kv_len == 0 or request.batch == 0 or request.head_dim == 0 or request.v_head_dim == 0:
        return "empty"
    if request.batch != request.kv_batch:
        return "batch_broadcast"
    return None


def refusal(request: AttentionRequest, spec: KernelSpec) -> str | None:
    """The code of the first reason why `spec` cannot do `request` exactly, or None when it can."""
    can = spec.capabilities
    if request.device not in can.devices:
        return "device"
    if _DTYPE_NAMES.get(request.dtype, "") not in can.dtypes:
        return "dtype"
    if request.dropout and not can.dropout:
        return "dropout"
    if request.needs_grad and not can.gradients:
        return "gradients"
    if request.position_bias and not can.position_bias:
        return "position_bias"
    mask = "none" if request.mask == "causal" else request.mask
    if mask in _DENSE:
        if mask not in can.masks or request.needs_grad or request.kv_len < _function(spec, "forward_dense").min_kv_len:
            return "selected_keys" if request.selected_keys else "dense_mask"
    elif mask not in can.masks:
        return "range_mask"
    elif request.mask_batch != 0 and request.mask_batch != request.batch:
        return "mask_batch"
    if request.head_dim > can.max_head_dim or request.v_head_dim > can.max_head_dim:
        return "head_dim"
    unit = can.head_dim_multiple
    if unit > 1 and (request.head_dim % unit or request.v_head_dim % unit):
        return "head_dim"
    unit = can.length_multiple  # where there is none, symbolic lengths under torch.compile get no guard
    if unit > 1 and (request.q_len % unit or request.kv_len % unit):
        return "length"
    if can.max_kv_len and request.kv_len > can.max_kv_len:
        return "length"
    if request.head_dim != request.v_head_dim and not can.v_head_dim_may_differ:
        return "v_head_dim"
    if request.q_heads != request.kv_heads and not can.gqa:
        return "gqa"
    if request.softcap and not can.softcap:
        return "softcap"
    if request.sinks and not can.sinks:
        return "sinks"
    return None


def _function(spec: KernelSpec, name: str) -> KernelFunction:
    for function in spec.functions:
        if function.name == name:
            return function
    raise LookupError(f"kernel {spec.name} has no function {name}")


def pick_function(request: AttentionRequest, spec: KernelSpec) -> str:
    """"forward_dense" under a mask of pairs; "forward_with_lse" when a gradient is needed; "paged" for keys in pages;
    "decode" when the query rows of one KV group are few enough to be packed; else "forward". Keys in pages are gathered for
    the others."""
    if request.mask in _DENSE:
        return "forward_dense"
    if request.needs_grad:
        return "forward_with_lse"
    packed = [("decode", request.q_len * request.group_size)]
    if request.paged:
        packed.insert(0, ("paged", request.q_len * request.q_heads))
    bounds = {function.name: function.max_packed_rows for function in spec.functions}
    for name, rows in packed:
        if name in bounds and rows <= (bounds[name] or rows):  # 0 is no bound
            return name
    return "forward"
