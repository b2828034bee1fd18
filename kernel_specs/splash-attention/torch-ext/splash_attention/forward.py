"""JAX's splash attention (jax.experimental.pallas.ops.tpu) under the function contract of tpu-kernels.

What splash leaves to its caller is done here: the batch, the scale, block sizes that divide the lengths, and keys that no
row sees, which splash would multiply by weights of 0 (NaN stays NaN).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

LENGTH_MULTIPLE = 128
_BLOCKS = (1024, 512, 256, LENGTH_MULTIPLE)
_KEYS_AT_ONCE = 512  # of a block: the scores of so many keys lie in VMEM as float32
# Bytes of a block of rows of q and v: what fits the 16 MiB of VMEM that v4 has, at every head size to 256.
_BLOCK_BYTES = 5 << 18


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array | None,
    ends: jax.Array | None,
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
    causal: bool,
) -> jax.Array:
    """Attention output [B, Hq, Q, Dv] in q's dtype: every row sees every key or, if causal, row i keys 0..i.

    q [B, Hq, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv], all float32 or all bfloat16; Q and KV multiples of 128; Hq a
    multiple of Hkv, and query head h reads KV head h // (Hq // Hkv). starts, ends, key_valid: None. sinks: [Hq] or None;
    one more logit a head, neither scaled nor masked. softcap: 0.0 for none. block_q, block_kv: 0 = choose, else they must
    divide the lengths. precision: of float32 products, "default", "high" or "highest"; "high" is as "highest", since
    Mosaic has no three-pass product. vmem_bytes is not used: splash cannot be told, and its blocks fit the compiler's own
    limit. interpret: emulate on CPU.

    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    _check(q, k, v, starts, ends, key_valid, sinks, softcap, precision)
    heads, q_len = q.shape[1:3]
    if causal and k.shape[2] > q_len:  # no row sees the keys beyond
        k, v = k[:, :, :q_len], v[:, :, :q_len]
    kv_len = k.shape[2]
    q, k = _scaled(q, k, scale)
    largest = _BLOCK_BYTES // ((q.shape[-1] + v.shape[-1]) * q.dtype.itemsize)
    rows, keys = _block("block_q", block_q, q_len, largest), _block("block_kv", block_kv, kv_len, largest)
    mask = masks.CausalMask((q_len, kv_len)) if causal else masks.FullMask((q_len, kv_len))
    attend = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(rows, keys, math.gcd(keys, _KEYS_AT_ONCE)),
        attn_logits_soft_cap=softcap or None,
        interpret=interpret,
    )
    with jax.default_matmul_precision("default" if precision == "default" else "highest"):
        return jax.vmap(lambda q, k, v: attend(q, k, v, sinks=sinks))(q, k, v)


def _scaled(q: jax.Array, k: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """q and k whose product is scale times theirs, for a kernel that has no scale.

    bfloat16 holds scale * q only where scale is a power of two (D = 64, 256). Else scale * q is held as the sum of two
    bfloat16 halves along the head dimension, which takes twice as many products with k, and none more with v.
    """
    product = q.astype(jnp.float32) * scale
    if q.dtype == jnp.float32 or abs(math.frexp(scale)[0]) in (0.0, 0.5):
        return product.astype(q.dtype), k
    high = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)  # XLA may drop a cast there and back
    halves = jnp.concatenate((high, product - high), axis=-1).astype(q.dtype)
    return halves, jnp.concatenate((k, k), axis=-1)


def _block(name: str, wanted: int, length: int, largest: int) -> int:
    if not wanted:
        return next(size for size in _BLOCKS if length % size == 0 and size <= largest)
    if wanted % LENGTH_MULTIPLE or length % wanted:
        raise ValueError(f"{name} = {wanted} must be a multiple of {LENGTH_MULTIPLE} that divides the length {length}")
    return wanted


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None, ends: jax.Array | None,
    key_valid: jax.Array | None, sinks: jax.Array | None, softcap: float, precision: str,
) -> None:  # fmt: skip
    """Raises ValueError naming the first argument that does not fit."""
    for name, given in (("starts", starts), ("ends", ends), ("key_valid", key_valid)):
        if given is not None:
            raise ValueError(f"{name} must be None: this kernel does full and causal attention only (causal=...)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, length, head_dim], got shape {x.shape}")
    if q.dtype not in (jnp.float32, jnp.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    batch, heads, _, head_dim = q.shape
    if (k.shape[0], k.shape[3]) != (batch, head_dim) or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"shapes of q, k, v do not fit together: {q.shape}, {k.shape}, {v.shape}")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads are not a multiple of {k.shape[1]} KV heads")
    for name, length in (("q", q.shape[2]), ("k", k.shape[2])):
        if length == 0 or length % LENGTH_MULTIPLE:  # splash leaves the rest of such a length out
            raise ValueError(f"the length of {name} must be a multiple of {LENGTH_MULTIPLE}, got {length}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be {(heads,)}, got {sinks.shape}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if precision not in ("default", "high", "highest"):
        raise ValueError(f'precision must be "default", "high" or "highest", got {precision!r}')
