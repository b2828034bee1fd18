"""Peers' kernels and small faulty functions, under names that a worker process can import by path."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks


def splash_causal(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """JAX's splash attention, causal, q [Hq, S, D] scaled already, k and v [Hkv, S, D]."""
    heads, length, _ = q.shape
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    blocks = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    return splash.make_splash_mqa_single_device(mask, block_sizes=blocks)(q, k, v)


def splash_gqa(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """JAX's splash attention, causal, q [B, Hq, S, D], k and v [B, Hkv, S, D]."""
    heads, length = q.shape[1:3]
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    blocks = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    return jax.vmap(kernel)(q * jnp.asarray(0.1, q.dtype), k, v)


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def times_generation(x: jax.Array) -> jax.Array:
    """Multiplies by the generation of the chip it is traced for."""
    return x * pltpu.get_tpu_info().generation


def optional_second(x: jax.Array, y: jax.Array | None, z: jax.Array, *, scale: float) -> jax.Array:
    assert y is None
    return (x + z) * scale


def refuses_to_trace(x: jax.Array) -> jax.Array:
    raise ValueError("head_dim 7 is odd")


def needs_too_much_vmem(x: jax.Array) -> jax.Array:
    """Compiles nowhere: its scratch is bigger than any core's VMEM."""

    def kernel(x_ref, o_ref, scratch):
        scratch[0] = x_ref[...]
        o_ref[...] = scratch[0]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((4096, *x.shape), x.dtype)],
    )(x)


def lowers_nowhere(x: jax.Array) -> jax.Array:
    """Traces, but Mosaic has no lowering for what the kernel does."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.linalg.cholesky(x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def dies(x: jax.Array) -> jax.Array:
    os.write(2, b"the compiler fell over\n")
    os.abort()


def never_ends(x: jax.Array) -> jax.Array:
    time.sleep(3600)
    return x


def sum_of_first_blocks(lengths: jax.Array, x: jax.Array, *, block: int) -> jax.Array:
    """Row block b of x [B * block, N] doubled over its first lengths[b] column blocks; the others are skipped."""
    batch = lengths.shape[0]

    def kernel(lengths_ref, x_ref, o_ref):
        @pl.when(pl.program_id(1) < lengths_ref[pl.program_id(0)])
        def _():
            o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)

    spec = pl.BlockSpec((block, block), lambda b, j, lengths_ref: (b, jnp.minimum(j, lengths_ref[b] - 1)))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(batch, x.shape[1] // block), in_specs=[spec], out_specs=spec
    )
    return pl.pallas_call(
        kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="first_blocks"
    )(lengths, x)
