"""Run as a program: trace models on fake "tpu" tensors through the real torch_tpu device and print one JSON line each.

A process of its own, because starting torch_tpu renames a device for the whole process.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import torch
import torch_tpu  # noqa: F401
from torch._subclasses import FakeTensorMode
from torch_tpu import _loader
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import tpu_kernels

_loader._init_device("tpu")

GEOMETRY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def trace(model_type: str, phase: str) -> dict[str, object]:
    torch._dynamo.reset()
    tpu_kernels.reset()
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(), torch.device("tpu"), torch.no_grad():
        config = AutoConfig.for_model(model_type, **GEOMETRY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="tpu_attention", dtype=torch.bfloat16)
        model.eval()
        compiled = torch.compile(model, fullgraph=True, backend=capture, dynamic=False)
        ids = torch.zeros(2, 48, dtype=torch.int64)
        padding = torch.ones(2, 48, dtype=torch.int64)
        if phase == "prefill":
            out = compiled(input_ids=ids, attention_mask=padding, use_cache=False)
        else:
            cache = StaticCache(config=config, max_cache_len=256)
            model(input_ids=ids, attention_mask=padding, past_key_values=cache, use_cache=True)
            step = torch.ones(2, 49, dtype=torch.int64)
            out = compiled(input_ids=ids[:, :1], attention_mask=step, past_key_values=cache, use_cache=True)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    shapes = [
        tuple(node.meta["example_value"].shape)
        for graph in graphs
        for node in graph.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor)
    ]
    rows = tpu_kernels.explain(model).rows
    return {
        "model": model_type,
        "phase": phase,
        "graphs": len(graphs),
        "device": str(out.logits.device),
        "kernel_nodes": sorted(target for target in targets if "range_attention" in target),
        "sdpa_nodes": [target for target in targets if "scaled_dot_product" in target],
        "score_sized": [shape for shape in shapes if len(shape) >= 2 and shape[-2:] == (48, 48)],
        "reasons": sorted({row.reason for row in rows}),
    }


if __name__ == "__main__":
    tpu_kernels.register()
    for case in sys.argv[1:]:
        print(json.dumps(trace(*case.split(":"))), flush=True)
