"""Attention over a part of the keys, and the exact merge of such parts: what ring and context parallelism are made of.

A partial result is (out, lse): the attention output over the keys of that part, and the log of the softmax denominator
over them. Parts over disjoint keys merge to attention over all keys, in any order and grouping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import attention, masks, ops
from .reasons import REASONS
from .tuning import tuning_for


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    key_valid: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log of its softmax denominators, on a kernel. Differentiable through both results.

    Args:
        query: [B, Hq, Q, D]. key: [B, Hkv, KV, D]. value: [B, Hkv, KV, Dv].
        starts, ends: int [B, Q] or [Q]; row r sees keys starts[r] <= k < ends[r], counted in `key`. Default: every key.
            `position_ranges` makes them for causal and sliding-window attention on shards.
        key_valid: bool [B, KV]; False hides a key from every row.
        scaling: factor on the scores, default D ** -0.5. softcap: scores become softcap * tanh(scores / softcap).
            Sinks belong to no part: give them to `merge_partials`.

    Returns:
        (out [B, Hq, Q, Dv] in query's dtype, lse float32 [B, Hq, Q]). A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: for shapes or dtypes that do not fit, and where no installed kernel can do the call; SDPA returns no
            denominators, so there is no fallback.
    """
    batch, kv_len = query.shape[0], key.shape[2]
    mask = None
    if starts is not None or ends is not None or key_valid is not None:
        first = _bounds("starts", starts, 0, query)
        last = _bounds("ends", ends, kv_len, query)
        if key_valid is not None and (key_valid.dtype != torch.bool or tuple(key_valid.shape) != (batch, kv_len)):
            raise ValueError(
                f"key_valid is {key_valid.dtype} {tuple(key_valid.shape)}; expected bool ({batch}, {kv_len})."
            )
        mask = masks.encode_ranges(first, last, key_valid, kv_len)
    plan = attention.plan_with_lse(query, key, value, mask, bool(softcap))
    if plan.route.target != "kernel":
        raise ValueError(
            f"attention_with_lse: no installed kernel can do this call. {REASONS[plan.route.reason]}"
            + (f" ({plan.detail})" if plan.detail else "")
        )
    tuning = tuning_for(query.device.type, plan.route.function)
    op = getattr(getattr(torch.ops, ops.NAMESPACE), plan.op_name)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out, lse = op(
        query, key, value, mask, None, scale, float(softcap), False, key_valid is not None, plan.precision,
        tuning.block_q, tuning.block_kv, tuning.vmem_bytes,
    )  # fmt: skip
    return out, lse


def _bounds(name: str, given: torch.Tensor | None, default: int, query: torch.Tensor) -> torch.Tensor:
    """`given`, or `default` for every row, as [B, Q]."""
    shape = (query.shape[0], query.shape[2])
    if given is None:
        return torch.full(shape, default, dtype=torch.int32, device=query.device)
    if tuple(given.shape) not in (shape, shape[1:]):
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected {shape} or {shape[1:]}.")
    return given.expand(shape)


def merge_partials(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over disjoint parts of them. Exact, differentiable, in float32 inside.

    Args:
        outs: each part's output [B, Hq, Q, Dv], from `attention_with_lse`.
        lses: each part's log denominators [B, Hq, Q], -inf for rows that see no key of the part.
        sinks: [Hq], one more logit a head in the denominator, to be given once, in the last merge.

    Returns:
        (out in the dtype of outs[0], lse float32): what one call over all keys gives. Rows that see no key in any part
        have out 0 and lse -inf (the sink, where there are sinks). The pair is a partial result again.

    Raises:
        ValueError: when there is no part, or the parts differ in number or shape.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_partials needs as many lses as outs, at least one; got {len(outs)} and {len(lses)}.")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"partial results differ in shape: out {tuple(out.shape)} with lse {tuple(lse.shape)} beside out "
                f"{tuple(outs[0].shape)}; expected out [B, Hq, Q, Dv] with lse [B, Hq, Q], the same in every part."
            )
    denominators = [lse.float() for lse in lses]
    if sinks is not None:
        if sinks.shape != lses[0].shape[1:2]:
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}; expected one for each of {lses[0].shape[1]} heads.")
        denominators.append(sinks.float()[None, :, None].expand_as(lses[0]))
    parts = torch.stack(denominators)
    top = parts.amax(0).detach()
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    weights = torch.exp(parts - top)
    total = weights.sum(0)
    seen = total > 0
    safe = torch.where(seen, total, 1.0)  # a logarithm of 0 has no gradient
    merged = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, weight in zip(outs, weights[: len(outs)], strict=True):
        merged = merged + out.float() * (weight / safe).unsqueeze(-1)
    return merged.to(outs[0].dtype), torch.where(seen, top + torch.log(safe), float("-inf"))


def position_ranges(
    q_positions: torch.Tensor, kv_start: int, kv_len: int, *, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, ends) of causal attention when queries and keys are shards of a longer sequence.

    Args:
        q_positions: int [Q] or [B, Q], the queries' positions in the whole sequence, in any order.
        kv_start, kv_len: the keys' positions are kv_start ... kv_start + kv_len - 1.
        window: how many keys a query sees at most, itself included; None for no limit.

    Returns:
        Two int32 tensors of q_positions' shape: the key slots of this shard that each query sees. A query before all of
        the shard's keys sees none (start >= end).
    """
    ends = (q_positions + 1 - kv_start).clamp(0, kv_len)
    starts = torch.zeros_like(ends) if window is None else (q_positions + 1 - window - kv_start).clamp(0, kv_len)
    return starts.to(torch.int32), ends.to(torch.int32)
