"""Other libraries' attention kernels, under names that a worker process can import by path."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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


def _mask(kind: str, window: int, length: int, masks: Any) -> Any:
    """A mask of the splash family over [length, length]."""
    if kind == "full":
        return masks.FullMask((length, length))
    if kind == "window":  # window_size counts the keys before the row's own
        return masks.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
    return masks.CausalMask((length, length))


def _padded(length: int, block: int) -> int:
    """splash wants whole blocks, of whole lanes."""
    block = min(block, -(-length // 128) * 128)
    return -(-length // block) * block


def _segments(kind: str, document: int, length: int, padded: int) -> jax.Array | None:
    """Ids that keep documents, or real and padded keys, apart; None where nothing has to be."""
    positions = jnp.arange(padded, dtype=jnp.int32)
    if kind == "documents":
        return positions // document
    return (positions >= length).astype(jnp.int32) if padded > length and kind == "full" else None


def jax_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    grad_out: jax.Array | None,
    sees: str,
    window: int,
    document: int,
    block: int,
    variant: str,
    interpret: bool,
) -> Any:
    """JAX's splash attention, q [B, Hq, S, D], k and v [B, Hkv, S, D or Dv]. With grad_out: (out, dq, dk, dv)."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[2]
    padded = _padded(length, block)
    block = min(block, padded)
    blocks = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"), block),
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([_mask(sees, window, padded, masks)] * q.shape[1]), block_sizes=blocks, interpret=interpret
    )
    return _by_splash(splash, kernel, q, k, v, sinks, grad_out, _segments(sees, document, length, padded), padded)


def _by_splash(
    splash: Any,
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    grad_out: jax.Array | None,
    ids: jax.Array | None,
    padded: int,
) -> Any:
    """A kernel of the splash family over a batch; `splash` is its module, ids its segments over the padded length."""
    length = q.shape[2]
    segments = None if ids is None else splash.SegmentIds(ids, ids)

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=segments, sinks=None if sinks is None else sinks.astype(jnp.float32))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
        return jax.vmap(one)(*_fill_up((q, k, v), padded))[:, :, :length]

    return _with_gradients(attention, q, k, v, grad_out)


def _fill_up(tensors: tuple[jax.Array, ...], padded: int) -> list[jax.Array]:
    """[B, H, S, D] with S made `padded`."""
    return [jnp.pad(each, ((0, 0), (0, 0), (0, padded - each.shape[2]), (0, 0))) for each in tensors]


def torch_tpu_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    grad_out: jax.Array | None,
    sees: str,
    window: int,
    document: int,
    block: int,
    variant: str,
    interpret: bool,
) -> Any:
    """torch_tpu's `splash_sdpa`, by the JAX functions inside it: K and V repeated for the query heads, lse stored."""
    from torch_tpu._internal.ops.splash_attention import _make_splash_attention_fn

    heads, length = q.shape[1:3]
    forward, backward = _make_splash_attention_fn(
        length,
        heads,
        heads,
        is_causal=sees != "full",
        # It sees one key more than it is told.
        local_window_size=window - 1 if sees == "window" else None,
    )
    group = heads // k.shape[1]
    wide = [jnp.repeat(each, group, axis=1) if group > 1 else each for each in (k, v)]
    out, lse = forward(q, *wide)
    if grad_out is None:
        return out
    dq, *gradients = backward(q, *wide, out, lse, grad_out)
    dk, dv = (
        each.reshape(each.shape[0], k.shape[1], group, *each.shape[2:]).sum(2) if group > 1 else each for each in gradients
    )
    return out, dq, dk, dv


def jax_flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    grad_out: jax.Array | None,
    sees: str,
    window: int,
    document: int,
    block: int,
    variant: str,
    interpret: bool,
) -> Any:
    """JAX's older flash attention, q [B, Hq, S, D], k and v [B, Hkv, S, D]; it takes as many KV heads as query heads."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    heads, length = q.shape[1:3]
    group = heads // k.shape[1]
    padded = _padded(length, block)
    block = min(block, padded)
    # Keys of one copy in blocks of the half: the best of what was tried on it.
    inner = block // 2 if block > 256 and (block // 2) % 128 == 0 else block
    blocks = flash.BlockSizes(
        block_q=inner, block_k_major=block, block_k=inner, block_b=1,
        block_q_major_dkv=block, block_k_major_dkv=block, block_k_dkv=inner, block_q_dkv=inner,
        block_k_major_dq=block, block_k_dq=inner, block_q_dq=inner,
    )  # fmt: skip
    ids = _segments(sees, document, length, padded)
    segments = None
    if ids is not None:
        ids = jnp.broadcast_to(ids, (q.shape[0], padded))
        segments = flash.SegmentIds(ids, ids)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if group > 1:
            k, v = (jnp.repeat(each, group, axis=1) for each in (k, v))
        q, k, v = _fill_up((q, k, v), padded)
        out = flash.flash_attention(
            q, k, v, None, segments, causal=sees != "full", sm_scale=q.shape[-1] ** -0.5, block_sizes=blocks
        )
        return out[:, :, :length]

    return _with_gradients(attention, q, k, v, grad_out)


def tokamax_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    grad_out: jax.Array | None,
    sees: str,
    window: int,
    document: int,
    block: int,
    variant: str,
    interpret: bool,
) -> Any:
    """tokamax's splash attention, arguments as `jax_splash`'s.

    variant: "diagonal" skips masked parts of blocks on the diagonal; "stacked" computes a KV head's query heads together.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[2]
    padded = _padded(length, block)
    block = min(block, padded)
    config = dataclasses.replace(
        splash.SplashConfig.get_default(),
        block_q=block,
        block_kv=block,
        # Larger ones of its own best blocks are worked on in parts.
        block_kv_compute=512 if block > 1024 and variant != "diagonal" else block,
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), min(block, 1024)),
        use_base2_exp=True,
        qk_diag_skip=variant == "diagonal",
        num_stacked_q_heads=q.shape[1] // k.shape[1] if variant == "stacked" else 1,
        interpret=interpret,
    )
    kernel = splash.make_splash_mha(
        mask=_mask(sees, window, padded, masks), config=config, q_seq_shards=1, save_residuals=False
    )
    return _by_splash(splash, kernel, q, k, v, sinks, grad_out, _segments(sees, document, length, padded), padded)


def _with_gradients(
    attention: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, grad_out: jax.Array | None
) -> Any:
    if grad_out is None:
        return attention(q, k, v)
    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(grad_out)
