"""A kernel's JAX functions as torch sees them: emulated on CPU through dlpack, and on TPU through torch_tpu.

Importing this module imports jax; nothing else in the package does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

KernelFunction = Callable[..., jax.Array]


def keep_jax_off_the_tpu() -> None:
    """Make jax trace on the CPU backend, unless the user chose a platform.

    The first trace opens jax's default backend. On a TPU host that would be the TPU, which torch_tpu holds.
    """
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def read_mask(
    mask: jax.Array | None, batch: int, q_len: int, kv_len: int, causal: bool, has_validity: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Unpack a range mask (encoding: mask_encoding.py) into starts, ends int32 [B, Q] and validity int32 [B, KV] or None."""
    if mask is None:
        rows = jnp.arange(q_len, dtype=jnp.int32)
        ends = jnp.minimum(rows + 1, kv_len) if causal else jnp.full((q_len,), kv_len, jnp.int32)
        return jnp.zeros((batch, q_len), jnp.int32), jnp.broadcast_to(ends, (batch, q_len)), None
    rows = mask[:, 0]
    starts, ends = rows[:, -q_len:, 0], rows[:, -q_len:, 1]
    if not has_validity:
        return starts, ends, None
    words = rows[:, :-q_len, :4].reshape(batch, -1, 1)
    bits = (words >> jnp.arange(32, dtype=jnp.int32)) & 1
    return starts, ends, bits.reshape(batch, -1)[:, :kv_len]


def torch_facing(function: KernelFunction, interpret: bool) -> Callable[..., jax.Array]:
    """The kernel function behind the op's flat signature: tensors first, then statics (torch_tpu's jax_op rules)."""

    def call(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        sinks: jax.Array | None,
        scale: float,
        softcap: float,
        causal: bool,
        has_validity: bool,
        precision: str,
        block_q: int,
        block_kv: int,
        vmem_bytes: int,
    ) -> jax.Array:
        starts, ends, key_valid = read_mask(mask, q.shape[0], q.shape[2], k.shape[2], causal, has_validity)
        return function(
            q,
            k,
            v,
            starts,
            ends,
            key_valid,
            sinks,
            scale=scale,
            softcap=softcap,
            block_q=block_q,
            block_kv=block_kv,
            precision=precision,
            vmem_bytes=vmem_bytes,
            interpret=interpret,
        )

    # torch_tpu evaluates annotations as objects.
    call.__annotations__ = {
        **dict.fromkeys(("q", "k", "v", "return"), jax.Array),
        **dict.fromkeys(("mask", "sinks"), jax.Array | None),
        **dict.fromkeys(("scale", "softcap"), float),
        **dict.fromkeys(("causal", "has_validity"), bool),
        "precision": str,
        **dict.fromkeys(("block_q", "block_kv", "vmem_bytes"), int),
    }
    return call


def _to_jax(tensor: torch.Tensor | None) -> jax.Array | None:
    if tensor is None:
        return None
    # dlpack refuses tensors that require grad, and expanded or step-sliced ones.
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def emulated(function: KernelFunction) -> Callable[..., torch.Tensor]:
    """The function on CPU tensors, by Pallas' interpreter under jax.jit (one trace for each shape and static)."""
    keep_jax_off_the_tpu()
    jitted = jax.jit(torch_facing(function, interpret=True), static_argnums=tuple(range(5, 13)))

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *static: Any,
    ) -> torch.Tensor:
        with jax.default_device(_cpu()):
            out = jitted(*(_to_jax(tensor) for tensor in (q, k, v, mask, sinks)), *static)
        # jax computes asynchronously and torch knows of no event to wait for.
        return torch.utils.dlpack.from_dlpack(out.block_until_ready())

    return call


@functools.cache
def _cpu() -> jax.Device:
    return jax.devices("cpu")[0]


def on_tpu(function: KernelFunction, name: str) -> Callable[..., torch.Tensor]:
    """The function on TPU tensors, through torch_tpu. `name` is the op name that torch_tpu registers ("ns::name")."""
    keep_jax_off_the_tpu()
    from torch.tpu.pallas import jax_op  # type: ignore[import-not-found]  # added to torch by torch_tpu

    return jax_op(name, torch_facing(function, interpret=False))
