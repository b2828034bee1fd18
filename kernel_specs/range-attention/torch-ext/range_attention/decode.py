"""Decoding: few query rows against a long cache."""

import jax
import jax.numpy as jnp

from .forward import attend, check_arguments


def decode(
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
    """Same contract as `forward`, for calls where Q * (Hq // Hkv) is small.

    The query heads of one KV group are packed into the rows of one block, so that every key and value is read once a
    KV head, and only the key blocks between the lowest start and the highest end are read.
    """
    check_arguments(q, k, v, starts, ends, key_valid, sinks, softcap, precision)
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    sink_rows = None
    if sinks is not None:
        sink_rows = jnp.repeat(sinks.astype(jnp.float32), q_len).reshape(kv_heads, 1, group * q_len)
    out = attend(
        q.reshape(batch, kv_heads, 1, group * q_len, head_dim), k, v,
        jnp.tile(starts, (1, group)), jnp.tile(ends, (1, group)), key_valid, sink_rows,
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret, name="range_attention_decode",
    )  # fmt: skip
    return out.reshape(batch, q_heads, q_len, v.shape[-1])
