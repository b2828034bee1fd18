"""What the functions of this kernel ask of their arguments."""

import jax
import jax.numpy as jnp

# Factors on scores that float32 holds together with their inverse and with what they are multiplied by.
_SMALLEST, _LARGEST = 1e-30, 1e30


def check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array,
    key_valid: jax.Array | None, sinks: jax.Array | None, scale: float, softcap: float, precision: str,
) -> None:  # fmt: skip
    """Raises ValueError naming the first argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, length, head_dim], got shape {x.shape}")
    batch, q_heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    if q.dtype not in (jnp.float32, jnp.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != (batch, kv_heads, kv_len, head_dim) or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"shapes of q, k, v do not fit together: {q.shape}, {k.shape}, {v.shape}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    if key_valid is not None and key_valid.shape != (batch, kv_len):
        raise ValueError(f"key_valid must be {(batch, kv_len)}, got {key_valid.shape}")
    check_rows(q, starts, ends, sinks, scale, softcap, precision)


def check_rows(
    q: jax.Array, starts: jax.Array, ends: jax.Array, sinks: jax.Array | None, scale: float, softcap: float, precision: str
) -> None:
    """The same for what does not depend on how keys are laid out."""
    batch, q_heads, q_len, _ = q.shape
    if starts.shape != (batch, q_len) or ends.shape != (batch, q_len):
        raise ValueError(f"starts and ends must be {(batch, q_len)}, got {starts.shape} and {ends.shape}")
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks must be {(q_heads,)}, got {sinks.shape}")
    if scale != 0 and not _SMALLEST <= abs(scale) <= _LARGEST:
        raise ValueError(f"scale must be 0 or from {_SMALLEST:g} to {_LARGEST:g} in size, got {scale}")
    if softcap != 0 and not _SMALLEST <= softcap <= _LARGEST:
        raise ValueError(f"softcap must be 0 (none) or from {_SMALLEST:g} to {_LARGEST:g}, got {softcap}")
    if softcap != 0 and scale != 0 and not _SMALLEST <= abs(scale) / softcap <= _LARGEST:
        raise ValueError(f"scale / softcap must be from {_SMALLEST:g} to {_LARGEST:g} in size, got {scale} / {softcap}")
    if precision not in ("default", "high", "highest"):
        raise ValueError(f'precision must be "default", "high" or "highest", got {precision!r}')


def check_paged_arguments(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_table: jax.Array, starts: jax.Array, ends: jax.Array,
    sinks: jax.Array | None, scale: float, softcap: float, precision: str,
) -> None:  # fmt: skip
    """`check_arguments` for keys in pages found by a block table."""
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {x.shape}")
    batch, q_heads, _, head_dim = q.shape
    if q.dtype not in (jnp.float32, jnp.bfloat16) or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(
            f"q, k_pages, v_pages must all be float32 or all bfloat16, got {q.dtype}, {k_pages.dtype}, {v_pages.dtype}"
        )
    if k_pages.shape[3] != head_dim or k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"shapes of q, k_pages, v_pages do not fit together: {q.shape}, {k_pages.shape}, {v_pages.shape}")
    if q_heads % k_pages.shape[2]:
        raise ValueError(f"{q_heads} query heads are not a multiple of {k_pages.shape[2]} KV heads")
    if block_table.ndim != 2 or block_table.shape[0] != batch or block_table.shape[1] == 0:
        raise ValueError(f"block_table must be [{batch}, pages of a request], got {block_table.shape}")
    check_rows(q, starts, ends, sinks, scale, softcap, precision)


def check_dense_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, bias: jax.Array | None,
    sinks: jax.Array | None, scale: float, softcap: float, precision: str,
) -> None:  # fmt: skip
    """`check_arguments` for a mask and a bias of pairs."""
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2]) if q.ndim == 4 else (), jnp.int32)
    check_arguments(q, k, v, rows, rows, None, sinks, scale, softcap, precision)
    wanted = (*q.shape[:3], k.shape[2])
    for name, x, dtypes in (("mask", mask, (jnp.bool_,)), ("bias", bias, (jnp.float32, jnp.bfloat16))):
        if x is None:
            continue
        if x.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(jnp.dtype(each).name for each in dtypes)}, got {x.dtype}")
        if x.ndim != 4 or any(have not in (1, want) for have, want in zip(x.shape, wanted, strict=True)):
            raise ValueError(f"{name} must broadcast to {wanted}, got shape {x.shape}")
