"""An attention layer split over four chips by heads, compiled for them: prints its collectives as JSON.

usage: sharded_layer.py TOPOLOGY

Projections are left to XLA's partitioner, which may insert what collectives it wants; the kernel stands in a shard_map,
each chip with its own heads, as transformers' tensor parallelism hands them to it.
"""

from __future__ import annotations

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_kernels.offdevice import kernel_call

HIDDEN, Q_HEADS, KV_HEADS, DIM = 2048, 16, 8, 128
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")


def attend(function: str, q, k, v, mask):
    return kernel_call.call(
        q, k, v, mask, None, kernel="range-attention", function=function, scale=DIM**-0.5, softcap=0.0, causal=False,
        has_validity=False, precision="default", block_q=0, block_kv=0, vmem_bytes=100 << 20,
    )  # fmt: skip


def layer(function, mesh, split, x, keys, values, mask, w_q, w_k, w_v, w_o):
    """x [B, Q, hidden] replicated. keys, values: None, or a cache [B, Hkv, KV, D]."""

    def heads(w, count):
        return (x @ w).reshape(*x.shape[:2], count, DIM).swapaxes(1, 2)

    if keys is None:
        keys, values = heads(w_k, KV_HEADS), heads(w_v, KV_HEADS)
    rows = P(split[0]) if split else P()
    on_each_chip = jax.shard_map(
        functools.partial(attend, function), mesh=mesh, in_specs=(split, split, split, rows), out_specs=split,
        check_vma=False,
    )  # fmt: skip
    out = on_each_chip(heads(w_q, Q_HEADS), keys, values, mask)
    return out.swapaxes(1, 2).reshape(*x.shape[:2], Q_HEADS * DIM) @ w_o


def told(mesh, function: str, q_len: int, kv_len: int, split) -> dict:
    """What the optimised program of one layer holds. split: of what the kernel takes and gives, [B, heads, length, D]."""
    batch = mesh.size

    def array(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    cache = None if function == "forward" else array((batch, KV_HEADS, kv_len, DIM), P(None, "tp"))
    arguments = (
        array((batch, q_len, HIDDEN), P()), cache, cache, array((batch, 1, q_len, 2), P(), jnp.int32),
        array((HIDDEN, Q_HEADS * DIM), P(None, "tp")), array((HIDDEN, KV_HEADS * DIM), P(None, "tp")),
        array((HIDDEN, KV_HEADS * DIM), P(None, "tp")), array((Q_HEADS * DIM, HIDDEN), P("tp", None)),
    )  # fmt: skip
    jitted = jax.jit(functools.partial(layer, function, mesh, split), out_shardings=NamedSharding(mesh, P()))
    hlo = jitted.lower(*arguments).compile().as_text()
    # One instruction a line; asynchronous ones begin as "all-reduce-start".
    pattern = re.compile(rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    found = [(match.group(1), line.strip()) for line in hlo.splitlines() if (match := pattern.search(line))]
    return {
        "partitions": int(re.search(r"num_partitions=(\d+)", hlo).group(1)),
        "whole output": batch * Q_HEADS * q_len * DIM,
        "kernels": [line.strip()[:200] for line in hlo.splitlines() if "tpu_custom_call" in line],
        "collectives": [name for name, _ in found],
        "lines": [line[:300] for _, line in found],
    }


def main(topology: str) -> None:
    mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices), ("tp",))
    by_heads, by_batch = P(None, "tp"), P("tp")
    print(
        json.dumps(
            {
                "prefill": told(mesh, "forward", 512, 512, by_heads),
                "decode": told(mesh, "decode", 1, 4096, by_heads),
                # A kernel that wants another split than the projections give: what resharding looks like here.
                "prefill, by batch": told(mesh, "forward", 512, 512, by_batch),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
