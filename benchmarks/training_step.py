"""A training step of a kernel's attention, for compilation by name in a worker."""

from __future__ import annotations

from typing import Any

import jax

from tpu_kernels import bridge, hub
from tpu_kernels.specs import load_specs


def forward_and_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    sinks: jax.Array | None,
    grad_out: jax.Array,
    *,
    kernel: str,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """out, dq, dk, dv and the sinks' gradient, by the two ops that autograd runs for the installed kernel `kernel`."""
    spec = next(each for each in load_specs() if each.name == kernel)
    module = hub.load_kernel(spec).module
    forward = bridge.facing_torch(module.forward_with_lse, interpret=False, results=2)
    backward = bridge.backward_facing_torch(module.backward, interpret=False)
    out, lse = forward(q, k, v, mask, sinks, **static)
    return out, *backward(q, k, v, mask, sinks, out, lse, grad_out, None, **static)
