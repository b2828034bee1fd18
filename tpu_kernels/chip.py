"""The chip that a kernel is traced for, where a kernel can ask: jax's abstract device (`pltpu.get_tpu_info()` reads it)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from .offdevice.targets import Target


@contextlib.contextmanager
def tracing_for(goal: Target | None) -> Iterator[None]:
    """Kernels traced in the block see this chip; with None, what they saw before."""
    if goal is None:
        yield
        return
    device = AbstractDevice(device_kind=goal.device_kind, num_cores=goal.cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield
