"""Decoding: few query rows against a long cache, written in Pallas for TPU.

The query heads of one KV group are packed into the rows of one block, along the sublanes (`forward` has them along the
lanes, of which it fills at least 128). The grid is (batch, group of KV heads, key block): each key and value is read
once, and only the key blocks between the lowest start and the highest end are read at all.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arguments import check_arguments
from .arithmetic import LOWEST, column, dot, flip, isolate, positive_scale, score_units, sink_as_kept
from .blocks import DECODE_AHEAD, LANES, Blocks, choose_decode_blocks, length_last, round_up
from .ranges import NO_KEY, NONE_VALID, block_bounds, by_block, clamp_ranges


def decode(
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
    """Same contract as `forward`, for calls where Q * (Hq // Hkv) is small.

    The query heads of one KV group are packed into the rows of one block, so that every key and value is read once a
    KV head, and only the key blocks between the lowest start and the highest end are read. block_q is not used.
    """
    check_arguments(q, k, v, starts, ends, key_valid, sinks, scale, softcap, precision)
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    packed = q_heads // kv_heads * q_len
    q = q.reshape(batch, kv_heads, packed, head_dim)
    q, scale = positive_scale(q, scale)
    blocks, vmem_limit = choose_decode_blocks(
        packed, kv_heads, kv_len, head_dim, v_dim, q.dtype.itemsize, block_kv, vmem_bytes
    )
    rows, n, heads = blocks.rows, blocks.kv // blocks.tile, blocks.subs
    kv_blocks = -(-kv_len // blocks.kv)
    lanes = round_up(rows, LANES)

    starts, ends = (jnp.tile(x, (1, q_heads // kv_heads)) for x in clamp_ranges(starts, ends, kv_len))
    if key_valid is not None:
        key_valid = key_valid.astype(jnp.bool_)
    bounds = block_bounds(starts, ends, key_valid, kv_len=kv_len, rows=rows, tile=blocks.tile)
    scalars = [x for x in bounds if x is not None]
    ranges = jnp.concatenate([by_block(starts, rows, lanes), by_block(ends, rows, lanes)], axis=1)  # [B, 2, lanes]

    def kv_index(b, h, j, lo, hi, *_):
        first, last = lo[b] // n, (hi[b] + n - 1) // n - 1
        # Steps past this batch element's last key block name the same block again: nothing is copied.
        return jnp.maximum(jnp.minimum(first + j, last), 0)

    # Keys and values are read as they lie in memory.
    k_last, v_last = length_last(kv_len, head_dim), length_last(kv_len, v_dim)

    def along_keys(width: int, last: bool) -> pl.BlockSpec:
        if last:
            return pl.BlockSpec((1, heads, width, blocks.kv), lambda b, h, *rest: (b, h, 0, kv_index(b, h, *rest)))
        return pl.BlockSpec((1, heads, blocks.kv, width), lambda b, h, *rest: (b, h, kv_index(b, h, *rest), 0))

    operands = [q, *(jnp.swapaxes(x, 2, 3) if last else x for x, last in ((k, k_last), (v, v_last))), ranges]
    in_specs = [
        pl.BlockSpec((1, heads, rows, head_dim), lambda b, h, j, *_: (b, h, 0, 0)),
        along_keys(head_dim, k_last),
        along_keys(v_dim, v_last),
        pl.BlockSpec((1, 2, lanes), lambda b, h, j, *_: (b, 0, 0)),
    ]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, kv_blocks * blocks.kv - kv_len)))
        operands.append(valid.reshape(batch, kv_blocks * n, 1, blocks.tile))
        in_specs.append(pl.BlockSpec((1, n, 1, blocks.tile), lambda b, *rest: (b, kv_index(b, *rest), 0, 0)))
    if sinks is not None:
        spread = jnp.repeat(sinks.astype(jnp.float32), q_len).reshape(kv_heads, packed)
        operands.append(by_block(spread, rows, lanes))  # [Hkv, 1, lanes]
        in_specs.append(pl.BlockSpec((heads, 1, lanes), lambda b, h, j, *_: (h, 0, 0)))

    steps: int | jax.Array = 1
    if kv_blocks > 1:
        steps = jnp.maximum(((bounds.hi + n - 1) // n - bounds.lo // n).max(), 1)
    kernel = functools.partial(
        _kernel, blocks=blocks, tiles=-(-kv_len // blocks.tile), k_last=k_last, v_last=v_last,
        scale=scale, softcap=softcap, precision=precision, has_valid=key_valid is not None, has_sinks=sinks is not None,
    )  # fmt: skip
    pairs = batch * q_heads * q_len * kv_len
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads // heads, steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, heads, rows, v_dim), lambda b, h, j, *_: (b, h, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, v_dim), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, packed, v_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (head_dim + v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=interpret,
        name="range_attention_decode",
    )(*scalars, *operands)
    return out.reshape(batch, q_heads, q_len, v_dim)


def over_lanes(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], the same in every lane -> [rows, width]."""
    if width % LANES:
        return jnp.tile(x, (1, width // LANES + 1))[:, :width]
    return x if width == LANES else jnp.tile(x, (1, width // LANES))


def _kernel(
    *refs, blocks: Blocks, tiles: int, k_last: bool, v_last: bool,
    scale: float, softcap: float, precision: str, has_valid: bool, has_sinks: bool,
) -> None:  # fmt: skip
    it = iter(refs)
    lo_ref, hi_ref, full_lo_ref, full_hi_ref = (next(it) for _ in range(4))
    state_ref = next(it) if has_valid else None
    q_ref, k_ref, v_ref, ranges_ref = (next(it) for _ in range(4))
    valid_ref = next(it) if has_valid else None
    sink_ref = next(it) if has_sinks else None
    o_ref = next(it)
    m_ref, l_ref, acc_ref, start_ref, end_ref = it

    rows, heads = blocks.rows, blocks.subs
    v_dim = o_ref.shape[-1]
    tile, n = blocks.tile, blocks.kv // blocks.tile
    chunks = range(0, tile, LANES)
    inner, unit = score_units(scale, softcap)

    b, j = pl.program_id(0), pl.program_id(2)
    lo, hi, full_lo, full_hi = lo_ref[b], hi_ref[b], full_lo_ref[b], full_hi_ref[b]
    first_block = lo // n
    used_blocks = (hi + n - 1) // n - first_block
    base = (first_block + j) * n  # first tile of this key block

    @pl.when(j == 0)
    def _():
        start_ref[...] = column(ranges_ref[0, 0:1, :], rows)
        end_ref[...] = column(ranges_ref[0, 1:2, :], rows)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if sink_ref is None:
            m_ref[...] = jnp.full_like(m_ref, LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:
            for h in range(heads):
                sink = sink_as_kept(column(sink_ref[h], rows), unit)
                m = jnp.maximum(sink, LOWEST)
                # The sums are kept per lane: the sink counts once, in lane 0.
                lane = lax.broadcasted_iota(jnp.int32, m.shape, 1)
                m_ref[h] = m
                l_ref[h] = jnp.where(lane == 0, jnp.exp2((sink - m) * unit), 0.0)

    def keys(h: int, t) -> jax.Array:
        return k_ref[0, h, :, tile_slice(t)] if k_last else k_ref[0, h, tile_slice(t), :]

    def values(h: int, t) -> jax.Array:
        return v_ref[0, h, :, tile_slice(t)] if v_last else v_ref[0, h, tile_slice(t), :]

    def scores(h: int, k: jax.Array, last: bool) -> jax.Array:
        s = dot(q_ref[0, h], k, (1, 0 if last else 1), precision)
        return jnp.tanh(s * inner) if softcap else s

    def update(h: int, s: list[jax.Array], v: jax.Array, last: bool) -> None:
        """One step of a head's online softmax. s: the scores of one tile in chunks of LANES keys, hidden ones -inf."""
        m_old = m_ref[h]
        top = functools.reduce(jnp.maximum, s)
        m_new = jnp.maximum(m_old, jnp.max(top, axis=1, keepdims=True))
        p = [jnp.exp2((x - m_new) * unit) for x in s]
        alpha = jnp.exp2((m_old - m_new) * unit)
        m_ref[h] = m_new
        l_ref[h] = alpha * l_ref[h] + functools.reduce(jnp.add, p)
        weights = jnp.concatenate([x.astype(v.dtype) for x in p], axis=1)
        acc_ref[h] = acc_ref[h] * over_lanes(alpha, v_dim) + dot(weights, v, (1, 1 if last else 0), precision)

    def tile_slice(t) -> pl.Slice:
        return pl.ds(t * tile if isinstance(t, int) else pl.multiple_of(t * tile, tile), tile)

    def full_tile(h: int, t, s: jax.Array) -> None:
        update(h, [s[:, c : c + LANES] for c in chunks], values(h, t), v_last)

    def masked_tile(h: int, t) -> None:
        k, v = keys(h, t), values(h, t)
        k, v = isolate(flip(k) if k_last else k, flip(v) if v_last else v)
        s = scores(h, k, last=False)
        start, end = start_ref[...], end_ref[...]
        shown = []
        for c in chunks:
            position = (base + t) * tile + c + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            if valid_ref is not None:
                position = jnp.where(valid_ref[0, t, :, c : c + LANES] != 0, position, NO_KEY)
            seen = jnp.logical_and(position >= start, position < end)
            shown.append(jnp.where(seen, s[:, c : c + LANES], -jnp.inf))
        update(h, shown, v, last=False)

    def state(t):
        return 1 if state_ref is None else state_ref[b * tiles + base + t]

    def is_full(t):
        full = jnp.logical_and(base + t >= full_lo, base + t < full_hi)
        return full if state_ref is None else jnp.logical_and(full, state(t) > 0)

    active = j < used_blocks
    all_full = jnp.logical_and(base >= full_lo, base + n <= full_hi)
    if state_ref is not None:
        # A block outside the full bounds may lie past the last tile: read the last one's state then.
        all_full = jnp.logical_and(all_full, state_ref[jnp.minimum(b * tiles + base, state_ref.shape[0] - 1)] >= n)
    all_full = jnp.logical_and(active, all_full)

    @pl.when(all_full)
    def _():
        turns = [(h, t) for t in range(n) for h in range(heads)]
        # Products with keys are issued some turns before their softmax, so that matrix and vector units work side by side.
        waiting = [scores(h, keys(h, t), k_last) for h, t in turns[:DECODE_AHEAD]]
        for turn, (h, t) in enumerate(turns):
            waiting += [scores(h2, keys(h2, t2), k_last) for h2, t2 in turns[turn + DECODE_AHEAD : turn + DECODE_AHEAD + 1]]
            full_tile(h, t, waiting.pop(0))

    @pl.when(jnp.logical_and(active, jnp.logical_not(all_full)))
    def _():
        def body(t, carry):
            full = is_full(t)

            @pl.when(full)
            def _():
                for h in range(heads):
                    full_tile(h, t, scores(h, keys(h, t), k_last))

            @pl.when(jnp.logical_and(jnp.logical_not(full), state(t) != NONE_VALID))
            def _():
                for h in range(heads):
                    masked_tile(h, t)

            return carry

        lax.fori_loop(jnp.maximum(lo - base, 0), jnp.minimum(hi - base, n), body, 0)

    @pl.when(j == jnp.maximum(used_blocks, 1) - 1)
    def _():
        for h in range(heads):
            total = jnp.sum(l_ref[h], axis=1, keepdims=True)
            # `start < end` also drops what a row without keys gathered in tiles that are full for its neighbours.
            nothing = jnp.logical_or(total == 0.0, start_ref[:, :1] >= end_ref[:, :1])
            out = jnp.where(nothing, 0.0, acc_ref[h] / jnp.where(total == 0.0, 1.0, total))
            o_ref[0, h] = out.astype(o_ref.dtype)
