"""How large errors of gradients are, the kernel's beside torch's, over enough samples to tell a bias from luck.

The largest error of one sample is one number's luck: roundings that fall together. Over SEEDS samples of the same call two
figures of a gradient compare: the root of the mean squared error, and the mean of the samples' largest errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from range_attention_reference import (
    Call,
    make_call,
    output_gradient,
    reference,
    reference_gradients,
    run_gradients,
    torch_gradients,
)
from test_range_attention_kernel import causal, packed, padded, window

GRADIENTS = ("dq", "dk", "dv", "dsinks")
SEEDS = range(8)
Q = KV = 200
SINKS = np.array([0.5, -1, 2, 0], np.float32)
LEFT = padded([60, 0], KV, "left")
CAUSAL = causal(2, Q, KV)
# One call for each feature, with everything that goes with it in practice.
FEATURES: dict[str, dict[str, Any]] = {
    "causal, grouped heads": CAUSAL,
    "every key": {},
    "one KV head": {**CAUSAL, "kv_heads": 1},
    "window of 50": window(2, Q, KV, 50),
    "packed documents": packed(2, [90, 110]),
    "left padding": {**CAUSAL, "valid": LEFT},
    "softcap 5": {**CAUSAL, "softcap": 5.0},
    "sinks": {**CAUSAL, "sinks": SINKS},
    "window, padding, softcap, sinks": {**window(2, Q, KV, 50), "valid": LEFT, "softcap": 5.0, "sinks": SINKS},
    "D 192, Dv 128": {**CAUSAL, "dim": 192, "v_dim": 128},
    "D 72": {**CAUSAL, "dim": 72},
}


class Errors(NamedTuple):
    """Of one gradient over all samples, against float64. `largest`: the mean of the samples' largest errors."""

    rms: float
    largest: float


def feature_call(feature: str, dtype: str, seed: int) -> Call:
    """Batch 2, 4 query heads and, unless the feature says otherwise, 2 KV heads of 64."""
    fields = {"kv_heads": 2, "dim": 64, "v_dim": 0} | FEATURES[feature]
    sizes = [fields.pop(name) for name in ("kv_heads", "dim", "v_dim")]
    return make_call(seed, dtype, 2, 4, sizes[0], Q, KV, *sizes[1:], **fields)


def gradient_errors(feature: str, dtype: str, seeds: Iterable[int] = SEEDS) -> dict[str, dict[str, Errors]]:
    """Gradient -> {"kernel", "torch", "exact products"} -> errors.

    Exact products (float32 without softcap and sinks only): the kernel's formulas with each sum of products rounded once.
    """
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for seed in seeds:
        call = feature_call(feature, dtype, seed)
        do = output_gradient(call, seed)
        exact = reference_gradients(call, do)
        candidates = {"kernel": run_gradients(call, do), "torch": torch_gradients(call, do)}
        if dtype == "f32" and not call.softcap and call.sinks is None:
            candidates["exact products"] = with_exact_products(call, do, exact["lse"])
        for who, made in candidates.items():
            for name in candidates["torch"].keys() & made.keys():
                error = (made[name].double() - exact[name]).nan_to_num(nan=0.0).flatten()
                found.setdefault(name, {}).setdefault(who, []).append(error)
    return {name: {who: errors_of(x) for who, x in found[name].items()} for name in GRADIENTS if name in found}


def errors_of(samples: list[torch.Tensor]) -> Errors:
    rms = torch.cat(samples).square().mean().sqrt().item()
    return Errors(rms, float(np.mean([x.abs().max().item() for x in samples])))


def with_exact_products(call: Call, do: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the backward kernel computes, of float32 numbers, but for the order in which it sums products."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).float()

    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    delta = (do * reference(call).float()).sum(-1, keepdim=True)
    lse = lse.float()[..., None].nan_to_num(neginf=torch.inf)
    p = torch.exp(product(call.q, k.mT) * call.scale - lse).masked_fill(~torch.from_numpy(call.mask)[:, None], 0.0)
    ds = p * (product(do, v.mT) - delta)
    dk, dv = product(ds.mT, call.q) * call.scale, product(p.mT, do)
    return {"dq": product(ds, k) * call.scale} | {
        name: x.unflatten(1, (-1, group)).sum(2) for name, x in (("dk", dk), ("dv", dv))
    }
