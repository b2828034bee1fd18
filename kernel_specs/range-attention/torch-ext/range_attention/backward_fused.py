"""dq, dk and dv in one kernel: every pair's weight is recomputed once, for five products a tile instead of seven.

All keys of a KV head, and the float32 sums of dk and dv, stay in VMEM while the query rows of the head's group go by: so
the head's grid steps follow each other on one core. Scores are transposed as in `forward`, [keys, rows]: what is known of
a row lies along the lanes as it comes, and dq is summed as [D, rows].

Where several tiles are seen whole by several blocks of rows, they are one piece of work: the matrix units then wait less
for each other's results. Other pairs go square by square, a tile of keys by a block of rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arithmetic import column, dot
from .backward_tiles import finite, weights_and_gradients
from .blocks import LANES, Blocks
from .ranges import NO_KEY, NONE_VALID, block_bounds, by_block

WIDE = 2  # tiles of a piece of work


def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, lse: jax.Array, delta: jax.Array,
    starts: jax.Array, ends: jax.Array, key_valid: jax.Array | None, *,
    blocks: Blocks, vmem_limit: int, scale: float, softcap: float, precision: str, interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The kernel call. q, do: [B, Hkv, G, Q, D or Dv]; lse (+inf for rows without keys), delta: [B, Hkv, G, Q]."""
    batch, kv_heads, group, q_len, head_dim = q.shape
    kv_len, v_dim = v.shape[2:]
    rows, subs, n = blocks.rows, blocks.subs, blocks.kv // blocks.tile
    q_steps = -(-q_len // (rows * subs))

    def along_rows(x: jax.Array, fill: float = 0) -> jax.Array:
        x = by_block(x, rows * subs, rows * subs, fill)
        return x.reshape(*x.shape[:-2], q_steps * subs, rows)

    stats = jnp.stack([along_rows(lse, jnp.inf), along_rows(delta)], axis=4)
    ranges = jnp.stack([along_rows(starts), along_rows(ends)], axis=2)
    no_rows = ((0, 0), (0, q_steps * subs * rows - q_len))
    bounds = block_bounds(
        jnp.pad(starts, no_rows), jnp.pad(ends, no_rows), key_valid,
        kv_len=kv_len, rows=rows, tile=blocks.tile, full_needs_every_row=True,
    )  # fmt: skip
    scalars = [x for x in bounds if x is not None]
    operands = [q, k, v, do, stats, ranges]
    of_rows = lambda b, h, g, i, *_: (b, h, g, i, 0)  # noqa: E731
    of_keys = lambda b, h, *_: (b, h, 0, 0)  # noqa: E731
    in_specs = [
        pl.BlockSpec((None, None, None, subs * rows, head_dim), of_rows),
        pl.BlockSpec((None, None, blocks.kv, head_dim), of_keys),
        pl.BlockSpec((None, None, blocks.kv, v_dim), of_keys),
        pl.BlockSpec((None, None, None, subs * rows, v_dim), of_rows),
        pl.BlockSpec((None, None, None, subs, 2, rows), lambda b, h, g, i, *_: (b, h, g, i, 0, 0)),
        pl.BlockSpec((None, subs, 2, rows), lambda b, h, g, i, *_: (b, i, 0, 0)),
    ]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, blocks.kv - kv_len)))
        operands.append(valid.reshape(batch, n, 1, blocks.tile))
        in_specs.append(pl.BlockSpec((None, n, 1, blocks.tile), lambda b, *_: (b, 0, 0, 0)))

    pairs = batch * kv_heads * group * q_len * kv_len
    dq, dk, dv = pl.pallas_call(
        functools.partial(
            _kernel, blocks=blocks, q_steps=q_steps, tiles=-(-kv_len // blocks.tile),
            scale=scale, softcap=softcap, precision=precision, has_valid=key_valid is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group, q_steps),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((None, None, None, subs * rows, head_dim), of_rows),
                pl.BlockSpec((None, None, blocks.kv, head_dim), of_keys),
                pl.BlockSpec((None, None, blocks.kv, v_dim), of_keys),
            ],
            scratch_shapes=[
                pltpu.VMEM((head_dim, subs * rows), jnp.float32),
                pltpu.VMEM((blocks.kv, head_dim), jnp.float32),
                pltpu.VMEM((blocks.kv, v_dim), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (3 * head_dim + 2 * v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + do.size + 2 * (k.size + v.size)),
        ),
        interpret=interpret,
        name="range_attention_backward",
    )(*scalars, *operands)  # fmt: skip
    return dq, dk, dv


def _kernel(
    *refs, blocks: Blocks, q_steps: int, tiles: int, scale: float, softcap: float, precision: str, has_valid: bool
) -> None:
    it = iter(refs)
    lo_ref, hi_ref, full_lo_ref, full_hi_ref = (next(it) for _ in range(4))
    state_ref = next(it) if has_valid else None
    q_ref, k_ref, v_ref, do_ref, stats_ref, ranges_ref = (next(it) for _ in range(6))
    valid_ref = next(it) if has_valid else None
    dq_ref, dk_ref, dv_ref, dq_acc_ref, dk_acc_ref, dv_acc_ref = it

    rows, tile, n, subs = blocks.rows, blocks.tile, blocks.kv // blocks.tile, blocks.subs
    b, g, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first_block = (b * q_steps + i) * subs

    def every_tile(body: Any) -> None:
        def one(t, carry):
            body(pl.ds(pl.multiple_of(t * tile, tile), tile))
            return carry

        lax.fori_loop(0, n, one, 0)

    @pl.when(jnp.logical_and(g == 0, i == 0))
    def _():
        def clear(keys: pl.Slice) -> None:
            for acc in (dk_acc_ref, dv_acc_ref):
                acc[keys, :] = jnp.zeros((tile, acc.shape[1]), jnp.float32)

        every_tile(clear)

    dq_acc_ref[...] = jnp.zeros_like(dq_acc_ref)

    def add(sub: Any, some_subs: int, t: Any, some_tiles: int, masked: bool) -> None:
        """Tiles from t on by blocks of rows from `sub` on."""
        size = some_subs * rows
        keys = pl.ds(pl.multiple_of(t * tile, tile), some_tiles * tile)
        here = pl.ds(sub * size if isinstance(sub, int) else pl.multiple_of(sub * size, rows), size)
        q, do, k, v = q_ref[here, :], do_ref[here, :], k_ref[keys, :], v_ref[keys, :]
        s = dot(k, q, (1, 1), precision)
        dp = dot(v, do, (1, 1), precision)
        if masked:
            q, do, k = finite(q), finite(do), finite(k)
            position = t * tile + lax.broadcasted_iota(jnp.int32, (tile, LANES), 0)
            if valid_ref is not None:
                position = jnp.where(column(valid_ref[t], tile) != 0, position, NO_KEY)
        weights, parts = [], []
        for at in range(0, size, LANES):
            block, lanes = sub + at // rows, slice(at % rows, at % rows + LANES)
            lse, delta = stats_ref[block, 0:1, lanes], stats_ref[block, 1:2, lanes]
            p, ds = weights_and_gradients(s[:, at : at + LANES], dp[:, at : at + LANES], lse, delta, scale, softcap)
            if masked:
                start, end = ranges_ref[block, 0:1, lanes], ranges_ref[block, 1:2, lanes]
                seen = jnp.logical_and(position >= start, position < end)
                # A NaN of `do` shows in delta, and must show in dv where `do` itself was cleaned.
                p, ds = jnp.where(seen, p + (delta - delta), 0.0), jnp.where(seen, ds, 0.0)
            weights.append(p.astype(k.dtype))
            parts.append(ds.astype(k.dtype))
        ds = jnp.concatenate(parts, axis=1)
        dv_acc_ref[keys, :] += dot(jnp.concatenate(weights, axis=1), do, (1, 0), precision)
        dk_acc_ref[keys, :] += dot(ds, q, (1, 0), precision)
        dq_acc_ref[:, here] += dot(k, ds, (0, 0), precision)

    def square(sub: Any, t: Any) -> None:
        """What the block of rows `sub` sees of tile t."""
        block = first_block + sub
        visited = jnp.logical_and(t >= lo_ref[block], t < hi_ref[block])
        full = jnp.logical_and(t >= full_lo_ref[block], t < full_hi_ref[block])
        if state_ref is not None:
            state = state_ref[b * tiles + jnp.minimum(t, tiles - 1)]
            full, visited = jnp.logical_and(full, state > 0), jnp.logical_and(visited, state != NONE_VALID)
        pl.when(jnp.logical_and(visited, full))(lambda: add(sub, 1, t, 1, masked=False))
        pl.when(jnp.logical_and(visited, jnp.logical_not(full)))(lambda: add(sub, 1, t, 1, masked=True))

    # What all blocks of rows of this step see, together.
    lo, hi, full_lo, full_hi = tiles, 0, 0, tiles
    for block in (first_block + sub for sub in range(subs)):
        some = lo_ref[block] < hi_ref[block]
        lo = jnp.minimum(lo, jnp.where(some, lo_ref[block], tiles))
        hi = jnp.maximum(hi, hi_ref[block])
        full_lo, full_hi = jnp.maximum(full_lo, full_lo_ref[block]), jnp.minimum(full_hi, full_hi_ref[block])
    wide = min(WIDE, n)

    def piece(u, carry):
        t = u * wide
        full = jnp.logical_and(t >= full_lo, t + wide <= full_hi)
        if state_ref is not None:
            full = jnp.logical_and(full, state_ref[b * tiles + t] >= wide)
        pl.when(full)(lambda: add(0, subs, t, wide, masked=False))

        @pl.when(jnp.logical_not(full))
        def _():
            def one(x, carry):
                square(x // wide, t + x % wide)
                return carry

            lax.fori_loop(0, subs * wide, one, 0)

        return carry

    lax.fori_loop(lo // wide, (hi + wide - 1) // wide, piece, 0)
    dq_ref[...] = (dq_acc_ref[...].T * scale).astype(dq_ref.dtype)

    @pl.when(jnp.logical_and(g == pl.num_programs(2) - 1, i == q_steps - 1))
    def _():
        def put(keys: pl.Slice) -> None:
            dk_ref[keys, :] = (dk_acc_ref[keys, :] * scale).astype(dk_ref.dtype)
            dv_ref[keys, :] = dv_acc_ref[keys, :].astype(dv_ref.dtype)

        every_tile(put)
