"""A kernel function as the op calls it, for compilation by name in a worker."""

from __future__ import annotations

from typing import Any

import jax

from .. import bridge, hub
from ..specs import load_specs


def call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    sinks: jax.Array | None,
    *,
    kernel: str,
    function: str,
    **static: Any,
) -> Any:
    """`function` of the installed kernel called `kernel`, on the arguments of its torch op (see `ops`)."""
    spec = next(each for each in load_specs() if each.name == kernel)
    module = hub.load_kernel(spec).module
    facing = bridge.facing(function, spec.capabilities.takes_ranges)(getattr(module, function), interpret=False)
    return facing(q, k, v, mask, sinks, **static)
