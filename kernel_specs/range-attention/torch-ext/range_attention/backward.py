"""Gradients of attention on row ranges, written in Pallas for TPU.

They recompute the weights from the forward pass's lse, block by block: in one kernel for all three gradients
(`backward_fused`) where VMEM holds a KV head's keys and sums, else in the two below:

- dq: per block of query rows, over the key blocks that the rows see; grid and bounds are those of `forward`.
- dk and dv: per block of keys, over the query blocks that see it, of every query head of the KV head's group.

The sum over the group happens in float32 accumulators, so nothing is repeated and no partial result leaves the chip. HBM
beside the operands and results holds only numbers a row: delta, lse, ranges. As in `forward`, tiles that every row of a
block sees whole run without mask arithmetic, and values that a row does not see never reach it, nor it them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import backward_fused
from .arguments import check_arguments
from .arithmetic import column, dot
from .backward_tiles import finite, for_tiles, tile_slice, weights_and_gradients
from .blocks import LANES, Blocks, choose_backward_blocks, choose_fused_blocks
from .ranges import NO_KEY, block_bounds, by_block, clamp_ranges, query_bounds


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    key_valid: jax.Array | None,
    sinks: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    dlse: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    block_q: int,
    block_kv: int,
    precision: str,
    vmem_bytes: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dsinks), each with the shape and dtype of its input; dsinks is None without sinks.

    The first seven arguments and the options: those of the `forward_with_lse` call; out [B, Hq, Q, Dv] and lse float32
    [B, Hq, Q]: its results. do: the gradient of out. dlse: the gradient of lse, float32 [B, Hq, Q], or None for zero.
    block_q is rounded up to a multiple of 128. Rows that see no key, and keys that no row sees, get 0.

    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_arguments(q, k, v, starts, ends, key_valid, sinks, scale, softcap, precision)
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    for name, x in (("out", out), ("do", do)):
        if x.shape != (batch, q_heads, q_len, v_dim) or x.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {(batch, q_heads, q_len, v_dim)}, got {x.dtype} {x.shape}")
    for name, rows in (("lse", lse), ("dlse", dlse)):
        if rows is not None and (rows.shape != (batch, q_heads, q_len) or rows.dtype != jnp.float32):
            raise ValueError(f"{name} must be float32 {(batch, q_heads, q_len)}, got {rows.dtype} {rows.shape}")

    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if dlse is not None:  # d lse / d score is the weight, which every score's gradient is a multiple of
        delta = delta - dlse
    dsinks = None
    if sinks is not None:
        weight = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
        shares = jnp.where(lse > -jnp.inf, weight * delta, 0.0)
        dsinks = -jnp.sum(shares, axis=(0, 2)).astype(sinks.dtype)

    heads = (batch, kv_heads, q_heads // kv_heads)
    dq, dk, dv = _gradients(
        q.reshape(*heads, q_len, head_dim), k, v, do.reshape(*heads, q_len, v_dim),
        lse.reshape(*heads, q_len), delta.reshape(*heads, q_len), *clamp_ranges(starts, ends, kv_len),
        None if key_valid is None else key_valid.astype(jnp.bool_),
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret,
    )  # fmt: skip
    return dq.reshape(q.shape), dk, dv, dsinks


def _gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, lse: jax.Array, delta: jax.Array,
    starts: jax.Array, ends: jax.Array, key_valid: jax.Array | None, *,
    scale: float, softcap: float, block_q: int, block_kv: int, precision: str, vmem_bytes: int, interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The kernel calls. q, do: [B, Hkv, G, Q, D or Dv]; lse, delta: [B, Hkv, G, Q]; ranges clamped."""
    batch, kv_heads, group, q_len, head_dim = q.shape
    kv_len, v_dim = v.shape[2:]
    sizes = (q_len, kv_len, head_dim, v_dim, q.dtype.itemsize, block_q, block_kv, vmem_bytes)
    fused = choose_fused_blocks(*sizes)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # there is nothing to weigh: weights of 0
    if fused is not None:
        return backward_fused.gradients(
            q, k, v, do, lse, delta, starts, ends, key_valid, blocks=fused[0], vmem_limit=fused[1],
            scale=scale, softcap=softcap, precision=precision, interpret=interpret,
        )  # fmt: skip
    blocks, vmem_limit = choose_backward_blocks(*sizes)
    rows, n = blocks.rows, blocks.kv // blocks.tile
    q_blocks, kv_blocks = -(-q_len // rows), -(-kv_len // blocks.kv)
    bounds = block_bounds(starts, ends, key_valid, kv_len=kv_len, rows=rows, tile=blocks.tile, full_needs_every_row=True)
    scalars = [x for x in bounds if x is not None]

    # Rows along the lanes.
    stats = jnp.stack([by_block(lse, rows, rows, jnp.inf), by_block(delta, rows, rows)], axis=4)
    ranges = jnp.stack([by_block(starts, rows, rows), by_block(ends, rows, rows)], axis=2)
    operands = [q, k, v, do, stats, ranges]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, kv_blocks * blocks.kv - kv_len)))
        operands.append(valid.reshape(batch, kv_blocks * n, 1, blocks.tile))

    def in_specs(q_index: Any, kv_index: Any) -> list[pl.BlockSpec]:
        """q_index(grid indices and scalars) -> (batch, KV head, head of the group, query block); kv_index -> key block."""
        specs = [
            pl.BlockSpec((1, 1, 1, rows, head_dim), lambda *s: (*q_index(*s), 0)),
            pl.BlockSpec((1, 1, blocks.kv, head_dim), lambda *s: (s[0], s[1], kv_index(*s), 0)),
            pl.BlockSpec((1, 1, blocks.kv, v_dim), lambda *s: (s[0], s[1], kv_index(*s), 0)),
            pl.BlockSpec((1, 1, 1, rows, v_dim), lambda *s: (*q_index(*s), 0)),
            pl.BlockSpec((1, 1, 1, 1, 2, rows), lambda *s: (*q_index(*s), 0, 0)),
            pl.BlockSpec((1, 1, 2, rows), lambda *s: (s[0], q_index(*s)[3], 0, 0)),
        ]
        if key_valid is not None:
            specs.append(pl.BlockSpec((1, n, 1, blocks.tile), lambda *s: (s[0], kv_index(*s), 0, 0)))
        return specs

    pairs = batch * kv_heads * group * q_len * kv_len
    common = dict(
        blocks=blocks, q_blocks=q_blocks, tiles=-(-kv_len // blocks.tile),
        scale=scale, softcap=softcap, precision=precision, has_valid=key_valid is not None,
    )  # fmt: skip

    def kv_index(b, h, g, i, j, lo, hi, *_):
        first, last = lo[b * q_blocks + i] // n, (hi[b * q_blocks + i] + n - 1) // n - 1
        # Steps past this query block's last key block name the same block again: nothing is copied.
        return jnp.maximum(jnp.minimum(first + j, last), 0)

    kv_steps: int | jax.Array = 1
    if kv_blocks > 1:
        kv_steps = jnp.maximum(((bounds.hi + n - 1) // n - bounds.lo // n).max(), 1)
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, **common),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group, q_blocks, kv_steps),
            in_specs=in_specs(lambda b, h, g, i, j, *_: (b, h, g, i), kv_index),
            out_specs=pl.BlockSpec((1, 1, 1, rows, head_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0)),
            scratch_shapes=[
                pltpu.VMEM((rows, head_dim), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (2 * head_dim + v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + do.size + k.size + v.size),
        ),
        interpret=interpret,
        name="range_attention_dq",
    )(*scalars, *operands)

    first, last = query_bounds(bounds, batch, kv_blocks, n)

    def q_index(b, h, c, g, j, lo, hi, full_lo, full_hi, first, last, *_):
        block = b * kv_blocks + c
        i = first[block] + j
        # Steps past this key block's last query block fetch the next head's first one, or nothing.
        ahead = jnp.logical_and(i >= last[block], g + 1 < group)
        i = jnp.where(ahead, first[block], jnp.minimum(i, last[block] - 1))
        return b, h, jnp.where(ahead, g + 1, g), jnp.maximum(i, 0)

    q_steps: int | jax.Array = 1
    if q_blocks > 1:
        q_steps = jnp.maximum((last - first).max(), 1)
    out_index = lambda b, h, c, g, j, *_: (b, h, c, 0)  # noqa: E731
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, **common, kv_blocks=kv_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars) + 2,
            grid=(batch, kv_heads, kv_blocks, group, q_steps),
            in_specs=in_specs(q_index, lambda b, h, c, g, j, *_: c),
            out_specs=[
                pl.BlockSpec((1, 1, blocks.kv, head_dim), out_index),
                pl.BlockSpec((1, 1, blocks.kv, v_dim), out_index),
            ],
            scratch_shapes=[
                pltpu.VMEM((blocks.kv, head_dim), jnp.float32),
                pltpu.VMEM((blocks.kv, v_dim), jnp.float32),
                *([pltpu.VMEM((blocks.kv, LANES), jnp.int32)] if key_valid is not None else []),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * (head_dim + v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (q.size + do.size + 2 * (k.size + v.size)),
        ),
        interpret=interpret,
        name="range_attention_dkv",
    )(*scalars[:4], first, last, *scalars[4:], *operands)
    return dq, dk, dv


def _dq_kernel(
    *refs, blocks: Blocks, q_blocks: int, tiles: int, scale: float, softcap: float, precision: str, has_valid: bool
) -> None:
    it = iter(refs)
    lo_ref, hi_ref, full_lo_ref, full_hi_ref = (next(it) for _ in range(4))
    state_ref = next(it) if has_valid else None
    q_ref, k_ref, v_ref, do_ref, stats_ref, ranges_ref = (next(it) for _ in range(6))
    valid_ref = next(it) if has_valid else None
    dq_ref, acc_ref, start_ref, end_ref, lse_ref, delta_ref = it

    rows, tile, n = blocks.rows, blocks.tile, blocks.kv // blocks.tile
    chunks = range(0, tile, LANES)
    b, i, j = pl.program_id(0), pl.program_id(3), pl.program_id(4)
    block = b * q_blocks + i
    lo, hi = lo_ref[block], hi_ref[block]
    first_block = lo // n
    used_blocks = (hi + n - 1) // n - first_block
    base = (first_block + j) * n

    @pl.when(j == 0)
    def _():
        start_ref[...] = column(ranges_ref[0, 0, 0:1], rows)
        end_ref[...] = column(ranges_ref[0, 0, 1:2], rows)
        lse_ref[...] = column(stats_ref[0, 0, 0, 0, 0:1], rows)
        delta_ref[...] = column(stats_ref[0, 0, 0, 0, 1:2], rows)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(t, k_clean: jax.Array, seen_of: Any) -> None:
        k, v = k_ref[0, 0, tile_slice(t, tile), :], v_ref[0, 0, tile_slice(t, tile), :]
        s = dot(q_ref[0, 0, 0], k, (1, 1), precision)
        dp = dot(do_ref[0, 0, 0], v, (1, 1), precision)
        parts = []
        for c in chunks:
            lanes = slice(c, c + LANES)
            _, ds = weights_and_gradients(s[:, lanes], dp[:, lanes], lse_ref[...], delta_ref[...], scale, softcap)
            if seen_of is not None:
                ds = jnp.where(seen_of(c), ds, 0.0)
            parts.append(ds.astype(k.dtype))
        acc_ref[...] += dot(jnp.concatenate(parts, axis=1), k_clean, (1, 0), precision)

    def full_tile(t) -> None:
        add(t, k_ref[0, 0, tile_slice(t, tile), :], None)

    def masked_tile(t) -> None:
        def seen(c: int) -> jax.Array:
            position = (base + t) * tile + c + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            if valid_ref is not None:
                position = jnp.where(valid_ref[0, t, :, c : c + LANES] != 0, position, NO_KEY)
            return jnp.logical_and(position >= start_ref[...], position < end_ref[...])

        add(t, finite(k_ref[0, 0, tile_slice(t, tile), :]), seen)

    for_tiles(
        masked_tile, full_tile, active=j < used_blocks, base=base, n=n, tiles=tiles, b=b,
        bounds=(lo, hi, full_lo_ref[block], full_hi_ref[block]), state_ref=state_ref,
    )  # fmt: skip

    @pl.when(j == jnp.maximum(used_blocks, 1) - 1)
    def _():
        dq_ref[0, 0, 0] = (acc_ref[...] * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    *refs, blocks: Blocks, q_blocks: int, kv_blocks: int, tiles: int, scale: float, softcap: float, precision: str,
    has_valid: bool,
) -> None:  # fmt: skip
    """Scores are transposed here, [keys, rows]: what is known of a row lies along the lanes as it comes."""
    it = iter(refs)
    lo_ref, hi_ref, full_lo_ref, full_hi_ref, first_ref, last_ref = (next(it) for _ in range(6))
    state_ref = next(it) if has_valid else None
    q_ref, k_ref, v_ref, do_ref, stats_ref, ranges_ref = (next(it) for _ in range(6))
    valid_ref = next(it) if has_valid else None
    dk_ref, dv_ref, dk_acc_ref, dv_acc_ref = (next(it) for _ in range(4))
    position_ref = next(it) if has_valid else None

    rows, tile, n = blocks.rows, blocks.tile, blocks.kv // blocks.tile
    chunks = range(0, rows, LANES)
    b, c, g, j = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first, last = first_ref[b * kv_blocks + c], last_ref[b * kv_blocks + c]
    block = b * q_blocks + jnp.minimum(first + j, q_blocks - 1)
    base = c * n

    def positions(t) -> jax.Array:
        return (base + t) * tile + lax.broadcasted_iota(jnp.int32, (tile, LANES), 0)

    @pl.when(jnp.logical_and(g == 0, j == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
        if position_ref is not None:
            for t in range(n):
                valid = column(valid_ref[0, t], tile) != 0
                position_ref[t * tile : (t + 1) * tile, :] = jnp.where(valid, positions(t), NO_KEY)

    def add(t, q_clean: jax.Array, do_clean: jax.Array, seen_of: Any) -> None:
        k, v = k_ref[0, 0, tile_slice(t, tile), :], v_ref[0, 0, tile_slice(t, tile), :]
        s = dot(k, q_ref[0, 0, 0], (1, 1), precision)
        dp = dot(v, do_ref[0, 0, 0], (1, 1), precision)
        weights, parts = [], []
        for at in chunks:
            lanes = slice(at, at + LANES)
            lse, delta = stats_ref[0, 0, 0, 0, 0:1, lanes], stats_ref[0, 0, 0, 0, 1:2, lanes]
            p, ds = weights_and_gradients(s[:, lanes], dp[:, lanes], lse, delta, scale, softcap)
            if seen_of is not None:
                seen = seen_of(lanes)
                # A NaN of `do` shows in delta, and must show in dv where `do` itself was cleaned.
                p, ds = jnp.where(seen, p + (delta - delta), 0.0), jnp.where(seen, ds, 0.0)
            weights.append(p.astype(k.dtype))
            parts.append(ds.astype(k.dtype))
        dv_acc_ref[tile_slice(t, tile), :] += dot(jnp.concatenate(weights, axis=1), do_clean, (1, 0), precision)
        dk_acc_ref[tile_slice(t, tile), :] += dot(jnp.concatenate(parts, axis=1), q_clean, (1, 0), precision)

    def full_tile(t) -> None:
        add(t, q_ref[0, 0, 0], do_ref[0, 0, 0], None)

    def masked_tile(t) -> None:
        position = positions(t) if position_ref is None else position_ref[tile_slice(t, tile), :]

        def seen(lanes: slice) -> jax.Array:
            start, end = ranges_ref[0, 0, 0:1, lanes], ranges_ref[0, 0, 1:2, lanes]
            return jnp.logical_and(position >= start, position < end)

        add(t, finite(q_ref[0, 0, 0]), finite(do_ref[0, 0, 0]), seen)

    for_tiles(
        masked_tile, full_tile, active=first + j < last, base=base, n=n, tiles=tiles, b=b,
        bounds=(lo_ref[block], hi_ref[block], full_lo_ref[block], full_hi_ref[block]), state_ref=state_ref,
    )  # fmt: skip

    @pl.when(jnp.logical_and(g == pl.num_programs(3) - 1, j == jnp.maximum(last - first, 1) - 1))
    def _():
        dk_ref[0, 0] = (dk_acc_ref[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc_ref[...].astype(dv_ref.dtype)
