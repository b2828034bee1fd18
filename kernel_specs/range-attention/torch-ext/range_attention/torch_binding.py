"""The kernel as an attention function of stock transformers, without any plugin.

A kernel module that has `flash_attn_forward` and `supports_flash_attn` can be named as `attn_implementation`;
transformers then hands it SDPA's masks: None, or 4-D with True (or 0.0) where a query may attend. What the kernel
cannot do exactly goes to SDPA, or, where SDPA itself would drop something, to the formula written out below.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F

from .decode import decode
from .forward import forward

supports_flash_attn = True

_OP = "range_attention_v1::attend"
_MAX_HEAD_DIM = 512
_MAX_PACKED_ROWS = 64  # up to this many rows a KV head, the query heads of a group are packed into one block
# torch names the least precision that float32 products may have; the kernel takes jax's names.
_PRECISION = {"highest": "highest", "high": "high", "medium": "default"}


def flash_attn_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, Q, Hq, Dv] and None, for query [B, Hq, Q, D], key [B, Hkv, KV, D], value [B, Hkv, KV, Dv].

    Of the keyword arguments these change the result: is_causal (default: the module's, else True; counts only without
    a mask and for Q > 1, aligned at the first key, as for SDPA), sliding_window (counts only without a mask: with one,
    the mask says it already), softcap, s_aux (attention sinks [Hq]) and position_bias (added to the scaled scores).

    The kernel runs float32 and bfloat16 on TPU (emulated on CPU) without a mask, or with a boolean one that is the
    same for all heads and queries, as in decoding; no gradients, no dropout, no position_bias.
    """
    softcap, sinks, bias = kwargs.get("softcap"), kwargs.get("s_aux"), kwargs.get("position_bias")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    q_len, kv_len = query.shape[2], key.shape[2]
    causal = bool(causal) and attention_mask is None and q_len > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window") or kv_len
    if attention_mask is not None or window >= kv_len:
        window = 0
    elif not causal and q_len > 1:
        raise ValueError(f"sliding_window={window} without a mask needs causal attention (got is_causal=False)")

    if _kernel_can(query, key, value, attention_mask, dropout, sinks, bias):
        valid = None
        if attention_mask is not None:
            valid = attention_mask[:, 0, 0].expand(query.shape[0], kv_len)
        precision = _precision()
        out = _op(query, key, value, valid, sinks, float(scale), float(softcap or 0.0), causal, window, precision)
    else:
        if window:  # only without a mask: the window becomes one
            attention_mask, causal = _window_mask(q_len, kv_len, window, query.device), False
        if softcap is None and sinks is None and bias is None:
            out = F.scaled_dot_product_attention(
                query, key, value, attention_mask, dropout, causal, scale=scale, enable_gqa=True
            )
        else:
            out = _written_out(query, key, value, attention_mask, dropout, causal, scale, softcap, sinks, bias)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.assume_constant_result  # Dynamo cannot trace torch's getter; it guards on the setting by itself
def _precision() -> str:
    return _PRECISION[torch.get_float32_matmul_precision()]


def _kernel_can(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    sinks: torch.Tensor | None, bias: torch.Tensor | None,
) -> bool:  # fmt: skip
    learned = [query, key, value] if sinks is None else [query, key, value, sinks]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in learned)
    same_for_all_rows = mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    return (
        query.device.type in ("tpu", "cpu")
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= _MAX_HEAD_DIM
        and query.shape[1] % key.shape[1] == 0
        and same_for_all_rows
        and not (dropout or wants_gradient or bias is not None)
    )


def _window_mask(q_len: int, kv_len: int, window: int, device: torch.device) -> torch.Tensor:
    """Bool [1, 1, Q, KV]: each row's last `window` keys, counted from its own; a single row is the newest."""
    last = torch.arange(q_len, device=device)[:, None] if q_len > 1 else kv_len - 1
    slots = torch.arange(kv_len, device=device)[None]
    return ((slots <= last) & (slots > last - window))[None, None]


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    causal: bool, scale: float, softcap: float | None, sinks: torch.Tensor | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """softmax(softcap(scale * q k^T) + bias, masked, with sinks) v, in float32; rows that see nothing are 0."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, 0.0)
    return F.dropout(weights, dropout).to(value.dtype) @ value


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None, sinks: jax.Array | None, scale: float,
    softcap: float, causal: bool, window: int, precision: str, interpret: bool,
) -> jax.Array:  # fmt: skip
    """The kernel behind the op, on jax arrays. window: 0 for none."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    ends = jnp.minimum(jnp.arange(1, q_len + 1, dtype=jnp.int32), kv_len)
    if not causal:
        ends = jnp.full_like(ends, kv_len)
    starts = jnp.arange(1, q_len + 1, dtype=jnp.int32) if causal else ends
    starts = starts - window if window else jnp.zeros_like(ends)
    few_rows = q_len * (heads // k.shape[1]) <= _MAX_PACKED_ROWS
    return (decode if few_rows else forward)(
        q, k, v, jnp.broadcast_to(starts, (batch, q_len)), jnp.broadcast_to(ends, (batch, q_len)), valid, sinks,
        scale=scale, softcap=softcap, block_q=0, block_kv=0, precision=precision, vmem_bytes=0, interpret=interpret,
    )  # fmt: skip


@torch.library.custom_op(_OP, mutates_args=(), device_types="cpu")
def _op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None, sinks: torch.Tensor | None,
    scale: float, softcap: float, causal: bool, window: int, precision: str,
) -> torch.Tensor:  # fmt: skip
    arrays = [None if x is None else jax.dlpack.from_dlpack(x.detach().contiguous()) for x in (q, k, v, valid, sinks)]
    with jax.default_device(jax.devices("cpu")[0]):
        out = _emulated(*arrays, scale, softcap, causal, window, precision, True)
    # jax returns before it has computed, and owns the memory: torch gets a finished copy.
    return torch.from_dlpack(jax.block_until_ready(out)).clone()


@_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))


@torch.library.impl(_OP, "PrivateUse1")  # the key that torch_tpu renames to "tpu"; it need not have started yet
def _(*arguments: Any) -> torch.Tensor:
    return _on_tpu()(*arguments, False)


@functools.cache
def _on_tpu() -> Any:
    # torch_tpu owns the device and jax here only traces; its first trace would open the TPU if nothing was chosen.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    return torch.tpu.pallas.jax_op(_OP + "_jax", _attend)


_emulated = jax.jit(_attend, static_argnums=(5, 6, 7, 8, 9, 10))
