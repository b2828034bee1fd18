"""The attention function that transformers calls: read the call -> route it -> run it.

Nothing here reads a tensor's values, so a call costs no device synchronisation and traces into one graph.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from . import fallback, masks, ops, paged_cache, specs, tensor_parallel
from .ledger import Ledger, layer_label
from .reasons import REASONS, FallbackError
from .request import AttentionRequest, MaskKind
from .routing import Route, decide
from .tuning import TABLE, Call, tuning_for

LEDGER = Ledger()

# Keyword arguments that do not change attention's result: bookkeeping of generation, losses and other layers.
_HARMLESS = frozenset(
    "position_ids cache_position use_cache max_length_q max_length_k deterministic output_hidden_states return_dict "
    "output_router_logits num_items_in_batch logits_indices logits_to_keep labels shift_labels "
    "encoder_hidden_states encoder_attention_mask cross_attn_layer_mask past_key_values position_embeddings "
    "seq_idx token_type_ids input_ids inputs_embeds return_attention_weights layer_idx is_training training".split()
)
# Keyword arguments that change the result and that neither a kernel, SDPA nor eager here honours: refused.
_REFUSED = {
    "block_table": "this call asks for attention on a block table; set max_blocks_per_request=0 in the continuous batching "
    "config",
    "head_mask": "head masks are not supported; use attn_implementation='eager'",
    "alibi": "ALiBi must arrive as position_bias or inside the mask; use attn_implementation='eager'",
}
# Decode under a growing cache meets a new key length at each step; padded to this, shapes change once in 128 steps.
_KV_BUCKET = 128
# Sizes of scaling and softcap that every kernel takes.
_SMALLEST, _LARGEST = 1e-30, 1e30
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do with every call that has these shapes, dtypes and options."""

    request: AttentionRequest
    route: Route
    detail: str
    op_name: str = ""
    precision: str = "default"
    blocks: tuple[int, int, int] = (0, 0, 0)


_plans: dict[tuple[Any, ...], _Plan] = {}
# A process whose shapes never repeat plans each call anew; this many plans are a few MB.
_MOST_PLANS = 4096


def tpu_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    *,
    kernels: tuple[str, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface (`AttentionInterface.register`), on a TPU kernel where one is exact.

    Args:
        module: the attention module; read for `is_causal` (default True) and to name the layer in `explain()`.
        query: [B, Hq, Q, D]. key: [B, Hkv, KV, D]. value: [B, Hkv, KV, Dv]. Hkv divides Hq; query head h reads KV
            head h // (Hq / Hkv).
        attention_mask: None; a range mask made by `masks.tpu_attention_mask`; or a 4-D mask broadcastable to
            [B, Hq, Q, KV], bool (True = attend) or float (added to the scores). With a mask, only the mask counts.
        dropout: probability on the weights. scaling: factor on the scores, default D ** -0.5.
        is_causal: with no mask and Q > 1, query i sees keys 0..i; overrides `module.is_causal`.
        sliding_window: with no mask, how many keys a query sees, itself included.
        softcap: scores become softcap * tanh(scores / softcap), before the mask.
        s_aux, sinks: [Hq], one more logit a head in the softmax denominator, neither scaled nor masked.
        position_bias: float, broadcastable to [B, Hq, Q, KV], added to the scaled scores.
        output_attentions: also return the weights (then eager).
        cu_seq_lens_q, cu_seq_lens_k: int [R + 1], with no mask: the bounds of R packed sequences in a batch of 1.
        indices: integer [B, Q, N], the keys that a query may see, besides what the mask hides (sparse attention).
        block_indices: the same for blocks of keys, as `module.indexer` numbers them.
        kernels: names of the only kernels that may take the call, in order; bound by `register(name, kernels=...)`.

    Returns:
        (output [B, Q, Hq, Dv] contiguous in query's dtype, weights [B, Hq, Q, KV] or None).

    Raises:
        ValueError, TypeError: for arguments that no route can honour; the text names argument, value and remedy.
        FallbackError: in strict mode, where a call would have fallen back.
        hub.KernelLoadError: when the kernel cannot be loaded.
    """
    if type(query) is not torch.Tensor and isinstance(query, DTensor):
        return tensor_parallel.on_local_tensors(
            functools.partial(tpu_attention, kernels=kernels), module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, sliding_window=sliding_window, softcap=softcap,
            s_aux=s_aux, sinks=sinks, position_bias=position_bias, output_attentions=output_attentions,
            cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, **kwargs,
        )  # fmt: skip
    pages = None
    continuous = kwargs.get("cache") is not None
    if continuous and kwargs.get("block_table") is not None:
        pages = paged_cache.write_pages(module, key, value, cu_seq_lens_k, sliding_window, kwargs)
        # From here on a batch of requests with one query each.
        query, attention_mask = query.transpose(0, 2), pages.mask()
        cu_seq_lens_q = cu_seq_lens_k = None
    elif continuous:
        bounds = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        key, value, attention_mask = paged_cache.read_cache(module, key, value, attention_mask, kwargs, bounds)
        cu_seq_lens_k = bounds["cu_seq_lens_k"]
    compiling = torch.compiler.is_compiling()
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as autocast does for SDPA
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    sinks = s_aux if s_aux is not None else sinks
    if sinks is not None:
        sinks = tensor_parallel.local_sinks(sinks)
    unknown = tuple(sorted(_unknown(kwargs))) if kwargs else ()
    if scaling is None:
        if query.shape[-1] == 0:
            raise ValueError(f"query {tuple(query.shape)} has head_dim 0, which has no default scaling; pass one.")
        scaling = query.shape[-1] ** -0.5
    elif isinstance(scaling, torch.Tensor):
        raise TypeError("scaling is a tensor; pass a float (multiply the query by it for a learned scale).")
    if not compiling:  # a float may be symbolic in a graph, which a comparison would make one of many; kernels check too
        _check_numbers(scaling, softcap, dropout)
    causal = False
    if attention_mask is None:
        # Continuous batching gives bounds and no mask, whatever the model means by none.
        if not continuous and masks.no_mask_means_every_key(module):
            is_causal, sliding_window = False, None
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if sliding_window is not None and sliding_window < 0:
            raise ValueError(f"sliding_window is {sliding_window}; pass the number of keys a query sees, or None for all.")
        if cu_seq_lens_q is not None or sliding_window:
            attention_mask = _ranges_from_kwargs(query, key, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
        causal = causal and attention_mask is None and query.shape[-2] > 1
    selected = indices is not None or block_indices is not None
    if selected:
        attention_mask = _selected_keys(module, query, key, attention_mask, causal, indices, block_indices)
        causal = False
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (position_bias is not None and position_bias.requires_grad)
        or (attention_mask is not None and attention_mask.requires_grad)
    )
    disabled, strict, precision, transformed = settings()
    k_shape, v_shape = (key.shape, value.shape) if pages is None else pages.shapes()
    facts = (
        query.shape,
        k_shape,
        v_shape,
        query.dtype,
        key.dtype,
        value.dtype,
        (query.device, key.device, value.device),
        None if attention_mask is None else (attention_mask.shape, attention_mask.dtype, attention_mask.device),
        None if sinks is None else sinks.shape,
        None if position_bias is None else position_bias.shape,
        causal,
        bool(softcap),
        dropout > 0.0,
        needs_grad,
        bool(output_attentions),
        selected,
        unknown,
        disabled,
        precision,
        kernels,
        pages is not None,
        transformed,
    )
    if compiling:
        plan = _make_plan(*facts)
    else:
        found = _plans.get(facts)
        if found is None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            found = _plans[facts] = _make_plan(*facts)
            LEDGER.met(found.request, found.route)
        plan = found
    route = plan.route
    if strict and route.target != "kernel":
        raise FallbackError(_strict_message(module, plan))
    if compiling:
        _count_traced(
            layer_label(module), route.target, route.reason, route.kernel, route.function, plan.detail, device
        )
    else:
        LEDGER.count(module, route, plan.detail, device)
        if not continuous and cu_seq_lens_q is None and kwargs.get("position_ids") is not None:
            LEDGER.met_positions(
                module, kwargs["position_ids"], attention_mask, query.shape[2], key.shape[2], device
            )

    weights = None
    if pages is not None and route.function != "paged":
        key, value = pages.gather()
    if pages is not None and route.function == "paged":
        out = getattr(torch.ops.tpu_kernels, plan.op_name)(
            query, pages.keys, pages.values, pages.table, pages.starts, pages.ends, sinks, float(scaling),
            float(softcap or 0.0), plan.precision, plan.blocks[2],
        )  # fmt: skip
    elif route.target == "kernel":
        out = _run_kernel(plan, query, key, value, attention_mask, sinks, scaling, softcap or 0.0, causal, compiling)
    else:
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            attention_mask = masks.expand_range_mask(attention_mask, query.shape[2], key.shape[2])
        common: dict[str, Any] = {
            "causal": causal, "scale": scaling, "dropout": dropout, "position_bias": position_bias
        }  # fmt: skip
        if route.target == "eager":
            out, weights = fallback.eager(
                query, key, value, attention_mask, softcap=softcap or 0.0, sinks=sinks, **common
            )
        else:
            out = fallback.sdpa(query, key, value, attention_mask, **common)
    out = out.transpose(1, 2)
    if pages is not None:
        out = out.transpose(0, 1)  # the requests are the one row's tokens again
    return out.contiguous(), weights if output_attentions else None


def _run_kernel(
    plan: _Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    causal: bool,
    compiling: bool,
) -> torch.Tensor:
    has_validity = plan.request.mask == "ranges+validity"
    kv_len = key.shape[2]
    if not compiling and plan.route.function == "decode" and _pads_keys(mask, kv_len):
        padding = (0, 0, 0, -kv_len % _KV_BUCKET)
        mask = _bound_ranges(mask, query, kv_len, causal, has_validity)
        key, value, causal = F.pad(key, padding), F.pad(value, padding), False
    op = getattr(torch.ops.tpu_kernels, plan.op_name)
    out = op(
        query, key, value, mask, sinks, float(scaling), float(softcap), causal, has_validity, plan.precision, *plan.blocks
    )
    return out[0] if plan.route.function == "forward_with_lse" else out


def _pads_keys(mask: torch.Tensor | None, kv_len: int) -> bool:
    """Whether an eager decode step is brought to whole buckets, as explicit ranges: without a mask also one that has
    whole buckets, which would be one more program."""
    return mask is None or kv_len % _KV_BUCKET != 0


def _bound_ranges(
    mask: torch.Tensor | None, query: torch.Tensor, kv_len: int, causal: bool, has_validity: bool
) -> torch.Tensor:
    """The mask as explicit ranges that end at kv_len, for keys about to be padded beyond it."""
    q_len = query.shape[2]
    if mask is None:
        rows = torch.arange(q_len, device=query.device, dtype=torch.int32)
        ends = (rows + 1).clamp(max=kv_len) if causal else torch.full_like(rows, kv_len)
        return torch.stack((torch.zeros_like(ends), ends), -1).expand(query.shape[0], 1, q_len, 2).contiguous()
    if not has_validity:
        return mask[..., :2].clamp(max=kv_len)
    return torch.cat((mask[:, :, :-q_len], mask[:, :, -q_len:].clamp(max=kv_len)), 2)


def _ranges_from_kwargs(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    window: int | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> torch.Tensor | None:
    """Ranges for a call without a mask that carries a window or packed bounds; None where they restrict nothing."""
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    rows = torch.arange(q_len, device=query.device)
    if cu_q is not None:
        rows = rows.to(cu_q.dtype)
        if batch != 1:
            raise ValueError(
                f"cu_seq_lens_q was given with batch size {batch} and no attention_mask; packed bounds describe a batch "
                "of 1. Flatten the batch, or pass an attention mask."
            )
        cu_k = cu_q if cu_k is None else cu_k
        segment = torch.searchsorted(cu_q, rows, right=True).clamp(max=cu_q.shape[0] - 1)
        starts, ends = cu_k[segment - 1], cu_k[segment]
        # Causality inside a segment is aligned at its last query, as for a cache longer than the queries.
        position = rows - cu_q[segment] + ends
        starts, ends = torch.broadcast_tensors(starts, ends)
    else:
        # Rows stand at 0..q_len - 1, or one query after a cache at its newest key.
        last = kv_len if causal and q_len == 1 else q_len
        if window is not None and window >= last and (causal or window >= kv_len):
            return None
        starts, ends = torch.zeros_like(rows), torch.full_like(rows, kv_len)
        # One query after the cache is the newest key; several without a mask are aligned at the first key.
        position = rows + (kv_len - 1 if causal and q_len == 1 else 0)
    if causal:
        ends = torch.minimum(ends, position + 1)
    if window:
        starts = torch.maximum(starts, position - window + 1)
        if not causal:
            ends = torch.minimum(ends, position + window)
    return masks.encode_ranges(
        starts.to(torch.int32).expand(batch, q_len), ends.to(torch.int32).expand(batch, q_len), None, kv_len
    )


def _selected_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
) -> torch.Tensor:
    """The mask of each pair with the model's selection of keys in it, as the model makes it for SDPA and eager itself."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is not None and mask.dtype == torch.int32:
        mask = masks.expand_range_mask(mask, q_len, kv_len)
    elif mask is None:
        seen = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=query.device)
        mask = seen.tril() if causal else seen
    if indices is not None:
        if indices.dim() != 3 or indices.shape[1] != q_len:
            raise ValueError(f"indices have shape {tuple(indices.shape)}; expected [B, {q_len}, keys selected].")
        chosen = torch.zeros((indices.shape[0], q_len, kv_len), dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        mask = mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
    if block_indices is not None:
        build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
        if build is None:
            raise ValueError(
                f"tpu_attention got block_indices=... from {type(module).__name__}, which has no indexer.build_block_mask "
                "to say what they mean; use attn_implementation='eager' for this model."
            )
        mask = build(block_indices, mask, kv_len, query.dtype, query.device, None)
    return mask


def _make_plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    devices: tuple[torch.device, torch.device, torch.device],
    mask_facts: tuple[torch.Size, torch.dtype, torch.device] | None,
    sinks_shape: torch.Size | None,
    bias_shape: torch.Size | None,
    causal: bool,
    softcap: bool,
    dropout: bool,
    needs_grad: bool,
    output_attentions: bool,
    selected: bool,
    unknown: tuple[str, ...],
    disabled: bool,
    precision: str,
    kernels: tuple[str, ...] | None,
    paged: bool = False,
    transformed: bool = False,
) -> _Plan:
    """Validate the facts of a call and route it. Pure, and traceable by Dynamo."""
    _check_devices(devices, None if mask_facts is None else mask_facts[2])
    _check_shapes(q_shape, k_shape, v_shape, (dtype, k_dtype, v_dtype), sinks_shape)
    device = devices[0].type
    mask_shape, mask_dtype = (None, None) if mask_facts is None else mask_facts[:2]
    batch = k_shape[0] if q_shape[0] == 1 else q_shape[0]  # learned queries are not repeated for each example
    wanted = (batch, q_shape[1], q_shape[2], k_shape[2])
    mask = _mask_kind(mask_shape, mask_dtype, wanted, causal)
    request = AttentionRequest(
        batch=q_shape[0],
        kv_batch=k_shape[0] if k_shape[0] == v_shape[0] else -1,
        mask_batch=0 if mask_shape is None else mask_shape[0],
        q_heads=q_shape[1],
        kv_heads=k_shape[1],
        q_len=q_shape[2],
        kv_len=k_shape[2],
        head_dim=q_shape[3],
        v_head_dim=v_shape[3],
        dtype=dtype,
        device=device,
        mask=mask,
        softcap=softcap,
        sinks=sinks_shape is not None,
        position_bias=bias_shape is not None,
        dropout=dropout,
        needs_grad=needs_grad,
        output_attentions=output_attentions,
        selected_keys=selected,
        unknown=unknown,
        disabled=disabled,
        paged=paged,
        transformed=transformed,
    )
    route = decide(request, installed_specs(kernels))
    if route.target != "kernel":
        return _Plan(request, route, _detail(request, route.reason))
    op_name = ops.op_name(route.kernel, route.function)
    if device == "cpu":  # emulated: the kernel chooses, whatever the lengths, which may be symbolic
        blocks = _blocks(device, route.function)
    else:  # torch_tpu's graphs are of one length each: int() makes a symbolic one a constant
        group = request.group_size if route.function == "decode" else 1
        blocks = _blocks(
            device, route.function, route.kernel, str(dtype).removeprefix("torch."), "ranges" if mask_facts else mask,
            int(q_shape[3]), int(v_shape[3]), int(q_shape[2] * group), int(k_shape[2]),
        )  # fmt: skip
    return _Plan(request, route, "", op_name, ops.matmul_precision(dtype, precision), blocks)


def forget_plans() -> None:
    """Plan anew at the next calls, so that shapes are counted anew."""
    _plans.clear()


def plan_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: bool,
) -> _Plan:
    """The plan of a call that needs the softmax denominators, which only the training forward gives."""
    disabled, _, precision, transformed = settings()
    return _make_plan(
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        (query.device, key.device, value.device),
        None if mask is None else (mask.shape, mask.dtype, mask.device),
        None,
        None,
        causal=False,
        softcap=softcap,
        dropout=False,
        needs_grad=True,
        output_attentions=False,
        selected=False,
        unknown=(),
        disabled=disabled,
        precision=precision,
        kernels=None,
        transformed=transformed,
    )


def _detail(request: AttentionRequest, reason: str) -> str:
    """What exactly the reason refers to, for the routing table."""
    if reason == "unknown_kwarg":
        return ", ".join(request.unknown)
    if reason == "dtype":
        return str(request.dtype).removeprefix("torch.")
    if reason == "device":
        return request.device
    if reason == "dense_mask":
        return "bool" if request.mask == "dense_bool" else "float"
    return ""


def _unknown(kwargs: dict[str, Any]) -> list[str]:
    """Names of keyword arguments with a value that this package does not know; those known to be unsupported raise."""
    names = []
    for name, value in kwargs.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _REFUSED:
            raise ValueError(f"tpu_attention got {name}=..., which it cannot honour: {_REFUSED[name]}.")
        names.append(name)
    return names


def _check_numbers(scaling: float, softcap: float | None, dropout: float) -> None:
    """Refuse what no attention means, and factors that float32 does not hold beside their inverse and their products."""
    size = abs(scaling)
    if size != 0.0 and not _SMALLEST <= size <= _LARGEST:
        raise ValueError(f"scaling is {scaling}; use 0 or a number from {_SMALLEST:g} to {_LARGEST:g} in size.")
    if softcap and not _SMALLEST <= softcap <= _LARGEST:
        raise ValueError(
            f"softcap is {softcap}; use a number from {_SMALLEST:g} to {_LARGEST:g}, or None for no cap on the scores."
        )
    if softcap and size != 0.0 and not _SMALLEST <= size / softcap <= _LARGEST:
        raise ValueError(
            f"scaling / softcap is {scaling} / {softcap}; it must be from {_SMALLEST:g} to {_LARGEST:g} in size. "
            "Such a cap changes no score: pass None for it."
        )
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}; it is a probability, from 0 to 1.")


def _check_devices(
    devices: tuple[torch.device, torch.device, torch.device], mask_device: torch.device | None
) -> None:
    for name, device in zip(("key", "value", "attention_mask"), (*devices[1:], mask_device), strict=True):
        if device is not None and device != devices[0]:
            raise ValueError(f"{name} is on {device} but query is on {devices[0]}. Move the inputs to the model's device.")


def _check_shapes(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    sinks: torch.Size | None,
) -> None:
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        raise ValueError(f"query, key and value must be 4-D [B, H, S, D]; got {tuple(q)}, {tuple(k)}, {tuple(v)}.")
    if eight := [name for name, dtype in zip(("query", "key", "value"), dtypes, strict=True) if dtype.itemsize == 1]:
        raise ValueError(
            f"{', '.join(eight)} came in 8 bits ({dtypes[0]}, {dtypes[1]}, {dtypes[2]}), without a scale to read "
            "them by. Keep such a cache as transformers' QuantizedCache(backend='fp8'), which hands over "
            "keys and values in the model's dtype, or cast them first."
        )
    if dtypes[0] != dtypes[1] or dtypes[0] != dtypes[2]:
        raise ValueError(
            f"query, key and value have different dtypes ({dtypes[0]}, {dtypes[1]}, {dtypes[2]}). Load the model in one "
            "dtype, or run it under torch.autocast."
        )
    if k[1] != v[1] or k[2] != v[2]:
        raise ValueError(f"key {tuple(k)} and value {tuple(v)} differ in heads or length.")
    if q[3] != k[3]:
        raise ValueError(f"query has head_dim {q[3]} but key has {k[3]}.")
    if k[1] == 0 or q[1] % k[1] != 0:
        raise ValueError(
            f"query has {q[1]} heads, which is not a multiple of the {k[1]} key heads. Under tensor parallelism, choose a "
            "tp_size that divides the number of KV heads, or replicate q/k/v/o projections in tp_plan."
        )
    if sinks is not None and tuple(sinks) != (q[1],):
        raise ValueError(
            f"sinks have shape {tuple(sinks)}; expected one value for each of {q[1]} query heads. Under tensor parallelism, "
            "the tp_plan that splits the projections must split the sinks too (\"...self_attn.sinks\": \"colwise\")."
        )


def _mask_kind(
    shape: torch.Size | None, dtype: torch.dtype | None, wanted: tuple[int, int, int, int], causal: bool
) -> MaskKind:
    """`wanted` is [B, Hq, Q, KV]."""
    q_len, kv_len = wanted[2:]
    if shape is None or dtype is None:
        return "causal" if causal else "none"
    if len(shape) != 4:
        raise ValueError(
            f"attention_mask has shape {tuple(shape)}; tpu_attention takes 4-D masks. A 2-D padding mask reaches it only "
            "when the mask function is not registered: call tpu_kernels.register() before the forward pass."
        )
    if dtype == torch.int32 and masks.is_range_shape(shape, q_len, kv_len):
        return "ranges+validity" if shape[2] != q_len else "ranges"
    if dtype == torch.int32:
        masks.check_range_mask_shape(shape, q_len, kv_len)
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ValueError(
            f"attention_mask {tuple(shape)} has dtype {dtype}; use bool (True = attend) or float (added to the scores)."
        )
    for axis, (have, want) in enumerate(zip(shape, wanted, strict=True)):
        if have != 1 and have != want:
            raise ValueError(
                f"attention_mask {tuple(shape)} does not fit [B, Hq, Q, KV] = {wanted} in axis {axis}."
            )
    return "dense_bool" if dtype == torch.bool else "dense_float"


def _strict_message(module: torch.nn.Module, plan: _Plan) -> str:
    lines = [f"strict mode: {layer_label(module)} would run on {plan.route.name}. {REASONS[plan.route.reason]}"]
    if plan.detail:
        lines.append(f"({plan.detail})")
    lines += [f"{kernel} refused: {REASONS[code]}" for kernel, code in plan.route.refusals]
    return "\n".join(lines)


_strict = False
_by_default: tuple[str, ...] | None = None
_known: dict[str, specs.KernelSpec] = {}


def set_strict(strict: bool) -> None:
    """Raise FallbackError instead of falling back."""
    global _strict
    _strict = strict


def installed_specs(names: tuple[str, ...] | None = None) -> tuple[specs.KernelSpec, ...]:
    """The kernels that calls may be routed to, in order of preference; their ops are defined with them.

    Args:
        names: only these, in this order; by default all installed ones that are not on request.

    Raises:
        specs.SpecError: for a spec.toml that cannot be read, or a name that is not installed.
    """
    if _by_default is None:
        _install()
    assert _by_default is not None
    chosen = _by_default if names is None else names
    for name in chosen:
        if name not in _known:
            raise specs.SpecError(
                f"kernel {name!r} is not installed; installed: {', '.join(_known)}. {specs.VARIABLE} adds folders."
            )
    return tuple([_known[name] for name in chosen])


def _install() -> None:
    global _by_default
    loaded = specs.load_specs()
    for spec in loaded:
        make_known(spec)
    _by_default = tuple([spec.name for spec in loaded if not spec.on_request])


def make_known(spec: specs.KernelSpec) -> None:
    """Define the ops of `spec`, so that calls which name it may take it. Raises SpecError when its name is taken."""
    first = _known.get(spec.name, spec)
    if first != spec:
        specs.check_names([first, spec])
    for function in spec.functions:
        ops.op_for(spec, function.name)
    _known[spec.name] = spec


def settings() -> tuple[bool, bool, str, bool]:
    """(disabled, strict, float32 matmul precision, transformed): from TPU_KERNELS_DISABLE; TPU_KERNELS_STRICT or
    `register(strict=...)`; `torch.set_float32_matmul_precision`; and whether torch.func or forward-mode AD differentiates
    what runs. torch.compile reads them once, when it traces; it traces anew under another transform.
    """
    if torch.compiler.is_compiling():
        return _traced_settings()
    return _read_settings()


def _read_settings() -> tuple[bool, bool, str, bool]:
    return (
        _on("TPU_KERNELS_DISABLE"),
        _strict or _on("TPU_KERNELS_STRICT"),
        torch.get_float32_matmul_precision(),
        _transformed(),
    )


def _transformed() -> bool:
    """Whether torch.func's grad, vjp or jvp is at work, or a level of forward-mode AD is open.

    The ops have the derivative of autograd only. Under a transform they would give none, or 0, and say nothing.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    return any(level.key() in _DERIVATIVES for level in torch._C._functorch.get_interpreter_stack() or ())


def _on(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


@torch.compiler.assume_constant_result
def _traced_settings() -> tuple[bool, bool, str, bool]:
    return _read_settings()


@torch.compiler.assume_constant_result
def _blocks(device: str, function: str, kernel: str = "", *call: Any) -> tuple[int, int, int]:
    """(block_q, block_kv, vmem_bytes); call: the further fields of a tuning.Call, by which the kernel's table is read."""
    if call:
        tuning = tuning_for(device, function, _known[kernel].folder / TABLE, Call(function, *call))
    else:
        tuning = tuning_for(device, function)
    return tuning.block_q, tuning.block_kv, tuning.vmem_bytes


@torch.compiler.assume_constant_result
def _count_traced(
    label: str, target: Any, reason: str, kernel: str, function: str, detail: str, device: str
) -> bool:
    LEDGER.count_traced(label, Route(target, reason, kernel, function), detail, device)
    return True
