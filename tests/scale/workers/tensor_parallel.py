"""Saved models loaded with DistributedConfig(tp_size=...) and run by this many processes. Rank 0 compares with the
single-process run that the test saved beside each model; every rank reports what its attention saw.

usage: tensor_parallel.py FOLDER CASE...      FOLDER/CASE: model, case.json, expected.pt
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank import report
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import tpu_kernels
from tpu_kernels.attention import tpu_attention

SEEN: list[dict[str, Any]] = []


def watched(module, query, key, value, attention_mask, **kwargs):
    """tpu_attention, noting what transformers hands over."""
    sinks = kwargs.get("s_aux")
    SEEN.append(
        {
            "kinds": [type(each).__name__ for each in (query, key, value)],
            "heads": [query.shape[1], key.shape[1]],
            "sinks": None if sinks is None else type(sinks).__name__,
        }
    )
    return tpu_attention(module, query, key, value, attention_mask, **kwargs)


def run(folder: Path) -> dict[str, Any]:
    """What one case gave in this rank."""
    case = json.loads((folder / "case.json").read_text())
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    plan = case["tp_plan"]
    if plan == "replicate":
        plan = tpu_kernels.tensor_parallel_plan(AutoConfig.from_pretrained(folder / "model"), size)
    SEEN.clear()
    tpu_kernels.reset()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        attn_implementation="tpu_attention",
        distributed_config=DistributedConfig(tp_size=size, tp_plan=plan),
    ).eval()
    expected = torch.load(folder / "expected.pt")
    ids, mask = expected["ids"], expected["mask"]
    told: dict[str, Any] = {"plan": plan}
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        seen = mask.bool()
        told["logits"] = (logits - expected["logits"])[seen].abs().max().item()
        told["largest"] = expected["logits"].abs().max().item()
        for cache in ("dynamic", "static"):
            options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options
            )
            told[cache] = torch.equal(out, expected["tokens"])
    model.train()
    model.zero_grad()
    model(ids, attention_mask=mask).logits.square().mean().backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    told["gradient"] = (gradient - expected["gradient"]).abs().max().item()
    told["largest gradient"] = expected["gradient"].abs().max().item()
    told["seen"] = SEEN[0]
    explained = tpu_kernels.explain(model)
    told["fallbacks"], told["calls"] = explained.fallback_calls, explained.total_calls
    merged = tpu_kernels.gather_explanations(model)
    told["merged"] = {"ranks": merged.ranks, "calls": merged.total_calls, "notes": merged.notes, "text": str(merged)}
    return told


def dtensors() -> dict[str, Any]:
    """The attention function on DTensors, heads split over the mesh, against plain tensors."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 16, generator=make) for heads in (8, 4, 4))
    sinks = torch.randn(8, generator=make)
    module = torch.nn.Module()
    told: dict[str, Any] = {}
    for name, placement in (("split", Shard(1)), ("replicated", Replicate())):
        leaves = [distribute_tensor(each, mesh, [placement]).requires_grad_() for each in (q, k, v)]
        spread = distribute_tensor(sinks, mesh, [Shard(0) if name == "split" else Replicate()])
        out, _ = tpu_attention(module, *leaves, None, s_aux=spread)
        wanted, _ = tpu_attention(module, q, k, v, None, s_aux=sinks)
        told[name] = {
            "kind": type(out).__name__,
            "error": (out.full_tensor() - wanted).abs().max().item(),
            "local heads": out.to_local().shape[2],
        }
        plain = [each.clone().requires_grad_() for each in (q, k, v)]
        grads = torch.autograd.grad(tpu_attention(module, *plain, None, s_aux=sinks)[0].square().sum(), plain)
        made = torch.autograd.grad(out.square().sum(), leaves)
        told[name]["gradient error"] = max(
            (each.full_tensor() - other).abs().max().item() for each, other in zip(made, grads, strict=True)
        )
    refused = {
        "lengths split": [distribute_tensor(each, mesh, [Shard(2)]) for each in (q, k, v)],
        "keys plain": [distribute_tensor(q, mesh, [Shard(1)]), k, v],
    }
    for name, arguments in refused.items():
        try:
            tpu_attention(module, *arguments, None)
        except ValueError as error:
            told[name] = str(error)
    return told


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    tpu_kernels.register()
    AttentionInterface.register("tpu_attention", watched)
    told: dict[str, Any] = {}
    for name in cases:
        try:
            told[name] = dtensors() if name == "dtensors" else run(folder / name)
        except (ValueError, RuntimeError) as error:
            told[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    report(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
