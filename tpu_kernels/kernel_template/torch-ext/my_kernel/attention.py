"""Attention on row ranges, written in Pallas: one step a head and block of query rows, with every key at once in VMEM."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 128  # query rows of a step


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    key_valid: jax.Array | None,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    block_q: int,
    block_kv: int,
    precision: str,
    vmem_bytes: int,
    interpret: bool,
) -> jax.Array:
    """softmax(softcap(scale * q k^T), where row r sees key c if starts[b, r] <= c < ends[b, r] and key_valid[b, c]) v.

    q [B, Hq, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv], starts and ends int32 [B, Q], key_valid [B, KV] or None, sinks
    [Hq] or None (one more logit of each row, neither scaled nor masked). Returns [B, Hq, Q, Dv] in q's dtype; rows that see
    no key are 0.

    softcap: 0 for none. block_q: query rows of a step, 0 for the kernel's choice. block_kv is not used: a step takes all
    keys. precision: of float32 products, "default", "high" or "highest". vmem_bytes: what the kernel may use, 0 for the
    compiler's own limit. interpret: emulate on CPU.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    group = heads // kv_heads
    rows = min(block_q or ROWS, q_len)
    valid = jnp.ones((batch, kv_len), jnp.int32) if key_valid is None else key_valid.astype(jnp.int32)
    logits = jnp.full((heads,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)

    # Weight 0 times NaN is NaN: values that no row of the batch element sees must not be read as they are.
    live = starts < ends
    first = jnp.where(live, starts, kv_len).min(1)[:, None]
    last = jnp.where(live, ends, 0).max(1)[:, None]
    keys = jnp.arange(kv_len, dtype=jnp.int32)
    seen = (keys >= first) & (keys < last) & (valid != 0)
    v = jnp.where(seen[:, None, :, None], v, jnp.zeros((), v.dtype))

    out = pl.pallas_call(
        functools.partial(_kernel, scale=scale, softcap=softcap, precision=precision),
        grid=(batch, heads, pl.cdiv(q_len, rows)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, rows, head_dim), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((1, 1, kv_len, head_dim), lambda b, h, i: (b, h // group, 0, 0)),
            pl.BlockSpec((1, 1, kv_len, v_dim), lambda b, h, i: (b, h // group, 0, 0)),
            pl.BlockSpec((1, rows, 1), lambda b, h, i: (b, i, 0)),
            pl.BlockSpec((1, rows, 1), lambda b, h, i: (b, i, 0)),
            pl.BlockSpec((1, 1, kv_len), lambda b, h, i: (b, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, rows, v_dim), lambda b, h, i: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=vmem_bytes or None
        ),
        interpret=interpret,
        name="my_kernel",
    )(logits, q, k, v, starts[..., None], ends[..., None], valid[:, None])
    return jnp.asarray(out)


def _kernel(
    sinks_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, starts_ref: Any, ends_ref: Any, valid_ref: Any, out_ref: Any, *,
    scale: float, softcap: float, precision: str,
) -> None:  # fmt: skip
    q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
    dot = functools.partial(
        lax.dot_general,
        # Mosaic has no three-pass product of float32: "high" gets the next better one.
        precision=lax.Precision.DEFAULT if precision == "default" else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    s = dot(q, k, (((1,), (1,)), ((), ()))) * scale  # [rows, KV]
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    keys = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    visible = (keys >= starts_ref[0]) & (keys < ends_ref[0]) & (valid_ref[0] != 0)
    s = jnp.where(visible, s, -jnp.inf)
    sink = sinks_ref[pl.program_id(1)]
    top = jnp.maximum(s.max(1, keepdims=True), sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp(s - top)
    total = p.sum(1, keepdims=True) + jnp.exp(sink - top)
    out = dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    out_ref[0, 0] = (out / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)
