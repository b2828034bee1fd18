"""Flash attention on row ranges, written in Pallas for TPU.

Row r of batch element b sees key k when starts[b, r] <= k < ends[b, r] and, if key_valid is given, key_valid[b, k].

How it runs. The grid is (batch, KV head, query head of its group, some blocks of query rows, key block), the last
dimension dynamic: as many key blocks as the longest step needs. Per block of rows, `ranges.block_bounds` gives the
tiles of keys to visit and those that need no mask arithmetic; they reach the kernel as prefetched scalars, so that key
blocks outside are neither computed nor copied. Scores, running maximum, sums and the accumulator are float32. What a
step does is in `forward_kernel`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arguments import check_arguments
from .arithmetic import narrow_matrix_units, positive_scale
from .blocks import LANES, choose_blocks, length_last
from .forward_kernel import kernel
from .forward_step import Layout, Plan
from .ranges import (
    BAND,
    bands,
    block_bounds,
    by_block,
    clamp_ranges,
    drop_ranges_without_valid_keys,
    pairs,
    step_bounds,
    triangular,
)

LONGEST_PAIRED = 256  # values longer than this, and float32, make the code of a pair long and gain little


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    key_valid: jax.Array | None,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    block_q: int,
    block_kv: int,
    precision: str,
    vmem_bytes: int,
    interpret: bool,
) -> jax.Array:
    """Attention output [B, Hq, Q, Dv], in q's dtype; rows that see no key are 0.

    q [B, Hq, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv], all float32 or all bfloat16; Hq a multiple of Hkv, and
    query head h reads KV head h // (Hq // Hkv). starts, ends: int32 [B, Q] key slots, clamped to [0, KV] here.
    key_valid: bool or integer [B, KV] or None. sinks: [Hq] or None; one more logit a head that takes weight and gives
    nothing, neither scaled nor masked. softcap: 0.0 for none, else scores become softcap * tanh(scores / softcap)
    after the scale and before the mask. block_q, block_kv: 0 = choose. precision: of float32 products, "default",
    "high" or "highest" (bfloat16 has one precision). vmem_bytes: VMEM of one core, 0 = 16 MiB.
    interpret: True emulates on CPU; `pltpu.InterpretParams(...)` is taken as well.

    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_arguments(q, k, v, starts, ends, key_valid, sinks, scale, softcap, precision)
    return attend(
        q, k, v, starts, ends, key_valid, sinks,
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret, name="range_attention_forward",
    )  # fmt: skip


def forward_with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    key_valid: jax.Array | None,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    block_q: int,
    block_kv: int,
    precision: str,
    vmem_bytes: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`forward`, and what `backward` needs of it: (out [B, Hq, Q, Dv], lse float32 [B, Hq, Q]).

    lse is the natural logarithm of the sum of the exponentials of a row's visible scores, the sink's included; -inf
    for rows that see no key.
    """
    check_arguments(q, k, v, starts, ends, key_valid, sinks, scale, softcap, precision)
    if sinks is not None and key_valid is not None:  # such a row's sum would hold the sink
        starts, ends = drop_ranges_without_valid_keys(starts, ends, key_valid)
    return attend(
        q, k, v, starts, ends, key_valid, sinks,
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret, name="range_attention_forward_with_lse", with_lse=True,
    )  # fmt: skip


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array,
    key_valid: jax.Array | None, sinks: jax.Array | None, *,
    scale: float, softcap: float, block_q: int, block_kv: int, precision: str, vmem_bytes: int,
    interpret: bool, name: str, with_lse: bool = False,
) -> Any:  # fmt: skip
    """The kernel call, arguments as `forward` has them.

    Returns [B, Hq, Q, Dv], and with `with_lse` a float32 [B, Hq, Q] beside it.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    group = q_heads // kv_heads
    q = q.reshape(batch, kv_heads, group, q_len, head_dim)
    q, scale = positive_scale(q, scale)
    blocks, vmem_limit = choose_blocks(q_len, kv_len, head_dim, v_dim, q.dtype.itemsize, block_q, block_kv, vmem_bytes)
    rows, subs, n = blocks.rows, blocks.subs, blocks.kv // blocks.tile
    q_steps, kv_blocks = -(-q_len // (rows * subs)), -(-kv_len // blocks.kv)
    layout = Layout(
        length_last(q_len, head_dim), length_last(kv_len, head_dim), length_last(kv_len, v_dim), length_last(q_len, v_dim)
    )

    starts, ends = clamp_ranges(starts, ends, kv_len)
    no_rows = ((0, 0), (0, q_steps * subs * rows - q_len))
    starts, ends = jnp.pad(starts, no_rows), jnp.pad(jnp.maximum(starts, ends), no_rows)
    if key_valid is not None:
        key_valid = key_valid.astype(jnp.bool_)
    bounds = block_bounds(starts, ends, key_valid, kv_len=kv_len, rows=rows, tile=blocks.tile)
    kv_first, kv_end = step_bounds(bounds, batch * q_steps, n)
    operands: dict[str, jax.Array] = {"kv_first": kv_first, "kv_end": kv_end}
    operands |= {name: x for name, x in bounds._asdict().items() if x is not None}
    if key_valid is None and rows == blocks.tile and rows % (2 * LANES) == 0:
        operands["triangle"] = triangular(starts, ends, bounds, blocks.tile)
    if key_valid is None and blocks.kv > BAND <= blocks.tile:
        operands["band"] = bands(starts, ends, bounds, rows, blocks.tile, blocks.kv)
    if key_valid is None and subs > 1 < n and q.dtype == jnp.bfloat16 and v_dim <= LONGEST_PAIRED:
        operands["pair"] = pairs(bounds, operands.get("triangle"), subs)
    scalars = len(operands)

    def kv_index(b, h, g, i, j, kv_first, kv_end, *_):
        first, last = kv_first[b * q_steps + i], kv_end[b * q_steps + i] - 1
        # Steps past the last key block name the same block again: nothing is copied.
        return jnp.maximum(jnp.minimum(first + j, last), 0)

    def along_queries(width: int, last: bool) -> pl.BlockSpec:
        if last:
            return pl.BlockSpec((None, None, None, width, subs * rows), lambda b, h, g, i, j, *_: (b, h, g, 0, i))
        return pl.BlockSpec((None, None, None, subs * rows, width), lambda b, h, g, i, j, *_: (b, h, g, i, 0))

    def along_keys(width: int, last: bool) -> pl.BlockSpec:
        if last:
            return pl.BlockSpec((None, None, width, blocks.kv), lambda b, h, *rest: (b, h, 0, kv_index(b, h, *rest)))
        return pl.BlockSpec((None, None, blocks.kv, width), lambda b, h, *rest: (b, h, kv_index(b, h, *rest), 0))

    def laid(x: jax.Array, last: bool) -> jax.Array:
        return jnp.swapaxes(x, -1, -2) if last else x

    operands |= {"q": laid(q, layout.q), "k": laid(k, layout.k), "v": laid(v, layout.v)}
    operands["ranges"] = jnp.stack([by_block(starts, rows, rows), by_block(ends, rows, rows)], axis=2)
    in_specs = [
        along_queries(head_dim, layout.q),
        along_keys(head_dim, layout.k),
        along_keys(v_dim, layout.v),
        pl.BlockSpec((None, subs, 2, rows), lambda b, h, g, i, j, *_: (b, i, 0, 0)),
    ]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, kv_blocks * blocks.kv - kv_len)))
        operands["valid"] = valid.reshape(batch, kv_blocks * n, 1, blocks.tile)
        in_specs.append(pl.BlockSpec((None, n, 1, blocks.tile), lambda b, *rest: (b, kv_index(b, *rest), 0, 0)))
    if sinks is not None:
        spread = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (q_heads, rows))
        operands["sink"] = spread.reshape(kv_heads, group, 1, rows)
        in_specs.append(pl.BlockSpec((None, None, 1, rows), lambda b, h, g, i, j, *_: (h, g, 0, 0)))

    heads = (batch, kv_heads, group)
    outputs = ["out"]
    out_shape = [jax.ShapeDtypeStruct((*heads, v_dim, q_len) if layout.out else (*heads, q_len, v_dim), q.dtype)]
    out_specs = [along_queries(v_dim, layout.out)]
    if with_lse:
        outputs.append("lse")
        out_shape.append(jax.ShapeDtypeStruct((*heads, q_steps * subs, 1, rows), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, None, subs, 1, rows), lambda b, h, g, i, j, *_: (b, h, g, i, 0, 0)))

    # Blocks of rows whose sums wait: for the next key block, or for their neighbour.
    kept = subs if kv_blocks > 1 else min(subs, 2)
    scratch = {
        "maximum": pltpu.VMEM((kept, 1, rows), jnp.float32),
        "total": pltpu.VMEM((kept, 8, rows), jnp.float32),
        "acc": pltpu.VMEM((kept, v_dim, rows), jnp.float32),
        "scores": pltpu.VMEM((2, blocks.tile, rows), jnp.float32),
        "leaks": pltpu.SMEM((1,), jnp.int32),
        "way": pltpu.SMEM((2,), jnp.int32),
    }
    # The heads of a group go over the same keys, so what is known of a key block serves them all; but where a chip
    # has two cores and nothing else to divide between them, it divides the heads.
    heads_in_order = batch * kv_heads % 2 == 0
    plan = Plan(
        blocks=blocks, layout=layout, q_steps=q_steps, heads_in_order=heads_in_order, kv_len=kv_len,
        scale=scale, softcap=softcap, precision=precision, narrow=narrow_matrix_units(),
        operands=(*operands, *outputs, *scratch),
    )  # fmt: skip
    products = batch * q_heads * q_len * kv_len
    out, *lse = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(batch, kv_heads, group, q_steps, jnp.maximum((kv_end - kv_first).max(), 1) if kv_blocks > 1 else 1),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary" if heads_in_order else "parallel", *["arbitrary"] * 2),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * (head_dim + v_dim),
            transcendentals=products,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=interpret,
        name=name,
    )(*operands.values())
    out = laid(out, layout.out).reshape(batch, q_heads, q_len, v_dim)
    if not with_lse:
        return out
    sums = lse[0].reshape(batch, q_heads, -1)[..., :q_len]
    if sinks is not None:  # never less than the sink; where float32 does not hold sink / scale, the kernel's would be
        sums = jnp.where(sums > -jnp.inf, jnp.maximum(sums, sinks.astype(jnp.float32)[None, :, None]), sums)
    return out, sums
