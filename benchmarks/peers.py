"""Other libraries' attention kernels, under names that a worker process can import by path."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


def tokamax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    block_q: int,
    block_kv: int,
    block_kv_compute: int,
    q_layout: int,
    k_layout: int,
    v_layout: int,
    use_experimental_scheduler: bool,
    use_base2_exp: bool,
) -> jax.Array:
    """tokamax 0.0.17's forward attention on TPU as its timed op composes it, q, k, v [B, S, H, D].

    Its own entry point chooses the configuration by itself; here it is given.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[1]
    config = dataclasses.replace(
        splash.SplashConfig.get_default(),
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv_compute,
        q_layout=splash.QKVLayout(q_layout),
        k_layout=splash.QKVLayout(k_layout),
        v_layout=splash.QKVLayout(v_layout),
        use_experimental_scheduler=use_experimental_scheduler,
        use_base2_exp=use_base2_exp,
    )
    mask = masks.CausalMask(shape=(length, length), shard_count=1) if causal else masks.FullMask((length, length))
    make = functools.partial(
        splash.make_splash_mha,
        config=config,
        save_residuals=False,
        mask_value=float(jnp.finfo(jnp.float32).min),
        downcast_smem_data=False,
        q_seq_shards=1,
    )
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    q, k, v = (jnp.swapaxes(each, 1, 2) for each in (q, k, v))
    out = jax.vmap(make(mask=mask))(q, k, v)
    return jnp.swapaxes(out, 1, 2)
