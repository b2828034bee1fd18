"""The calls that no kernel takes: SDPA at its best, and an exact eager attention for what SDPA refuses or drops."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention with native GQA and `is_causal` where that is exact.

    What lies in keys and values that no query sees (NaN in a cache's free slots, say) does not reach the result. A key
    that one query sees and another does not is a value of the call: NaN there reaches both, as in SDPA.

    Args:
        query: [B, Hq, Q, D]. key: [B, Hkv, KV, D]. value: [B, Hkv, KV, Dv].
        mask: bool (True = attend) or additive float, broadcastable to [B, Hq, Q, KV]; None for none.
        causal: query i sees keys 0..i (top-left aligned); only with mask None.
        scale: factor on the scores.
        dropout: probability, applied as SDPA applies it.
        position_bias: float, broadcastable to [B, Hq, Q, KV], added to the scaled scores.

    Returns:
        [B, Hq, Q, Dv].
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    if causal and kv_len > q_len:
        # Top-left causality never reaches keys past the first q_len (the empty tail of a static cache in prefill).
        key, value = key[:, :, :q_len], value[:, :, :q_len]
        if position_bias is not None:
            position_bias = position_bias[..., :q_len]
    # SDPA on CPU multiplies is_causal's -inf by the scale: NaN at 0, and the future alone below it. The sign goes to the
    # queries, which is exact; under masks too, since torch_tpu's compiler makes is_causal of a causal one.
    if not scale > 0:
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    key, value = _without_unseen(key, value, mask, position_bias)
    if position_bias is not None:
        mask, causal = _mask_with_bias(position_bias, mask, causal, query, key), False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, with float32 scores: scale, softcap, bias, mask, sinks, softmax.

    Arguments, and what becomes of keys that no query sees, as for `sdpa`; softcap 0.0 means none; sinks [Hq] join the
    softmax denominator, unscaled and unmasked.

    Returns:
        (output [B, Hq, Q, Dv] in query's dtype, weights [B, Hq, Q, KV] in query's dtype). A row that sees no key is 0.
    """
    _, q_heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    groups = q_heads // kv_heads
    if causal:
        mask = _top_left(q_len, kv_len, query.device)
    key, value = _without_unseen(key, value, mask, position_bias)
    # [B, Hkv, G, Q, D] against [B, Hkv, 1, KV, D]: the KV heads are broadcast, not repeated (as is a batch of one).
    grouped = query.unflatten(1, (kv_heads, groups))
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).float() * scale
    scores = scores.flatten(1, 2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias.float()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.float()
    # The maximum is taken over finite values only, so that a row without keys gives 0 / 0 nowhere.
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().reshape(1, q_heads, 1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top).detach()
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    weights = F.dropout(weights, dropout, training=True) if dropout else weights
    weights = weights.to(query.dtype)
    out = torch.matmul(weights.unflatten(1, (kv_heads, groups)), value.unsqueeze(2))
    return out.flatten(1, 2), weights


def _top_left(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Bool [1, 1, Q, KV]: query i sees keys 0..i."""
    rows = torch.arange(q_len, device=device)[:, None]
    return (torch.arange(kv_len, device=device)[None, :] <= rows)[None, None]


def _without_unseen(
    key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they are where some query sees them, so that 0 * NaN never meets what all of them hide.

    Hidden by False or -inf, weights are 0 whatever the scores: those keys become 0. transformers hides by the dtype's
    lowest number too, under which a row that sees nothing averages all values: there only NaN and Inf become 0.
    """
    for mask in masks:
        if mask is None:
            continue
        faint = None
        if mask.dtype == torch.bool:
            unseen = _by_kv_head(~mask, key.shape[1])
        else:
            unseen = _by_kv_head(mask == float("-inf"), key.shape[1])
            # Half of it: a mask to which a bias was added.
            faint = _by_kv_head(mask < torch.finfo(mask.dtype).min / 2, key.shape[1])
        key, value = (
            each.masked_fill(unseen if faint is None else unseen | (faint & ~torch.isfinite(each)), 0)
            for each in (key, value)
        )
    return key, value


def _by_kv_head(hidden: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Keys hidden from all queries, [B, Hkv, KV, 1], of hidden pairs [B, Hq, Q, KV]; any of the sizes may be 1."""
    keys = hidden.all(-2)
    if keys.shape[1] != 1:
        keys = keys.unflatten(1, (kv_heads, -1)).all(2)
    return keys[..., None]


def _mask_with_bias(
    bias: torch.Tensor, mask: torch.Tensor | None, causal: bool, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """One additive mask of bias and mask: -inf where a pair may not attend."""
    bias = bias.to(query.dtype)
    if causal:
        mask = _top_left(query.shape[2], key.shape[2], query.device)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.full((), float("-inf"), dtype=bias.dtype, device=bias.device))
    return bias + mask.to(query.dtype)
