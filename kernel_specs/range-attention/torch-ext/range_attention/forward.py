"""Flash attention on row ranges, written in Pallas for TPU.

Row r of batch element b sees key k when starts[b, r] <= k < ends[b, r] and, if key_valid is given, key_valid[b, k].

How it runs. The grid is (batch, KV head, query head of its group, query block, key block), the last dimension dynamic:
as many key blocks as the longest query block needs. Per query block, `ranges.block_bounds` gives the tiles of keys to
visit and those that need no mask arithmetic; they reach the kernel as prefetched scalars, so that key blocks outside
are neither computed nor copied. Scores, running maximum, sums and the accumulator are float32.

Everything is transposed: scores are [keys, query rows]. What is known of a row (its range, maximum, sum) then lies
along the lanes as it comes from memory, the maximum over keys needs no reduction across lanes, and rescaling the
accumulator [Dv, rows] costs Dv / 8 operations for 128 rows, whatever Dv is. The next tile's scores are computed while
this tile's softmax runs, and wait in VMEM: matrix and vector units work side by side, in a loop over tiles.

Values that a row does not see never reach it, also when they are NaN or infinite: see `arithmetic.isolate`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arguments import check_arguments
from .arithmetic import LOG2E, LOWEST, NO_KEY, column, dot, isolate, not_finite
from .blocks import LANES, Blocks, choose_blocks
from .ranges import NONE_VALID, block_bounds, by_block, clamp_ranges, drop_ranges_without_valid_keys

UNKNOWN = -1  # whether a key block holds a value that must not leak: 0, 1, or not looked at
CHAIN = 4  # full tiles in one straight line of code: more hide more of the latency between tiles


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
    check_arguments(q, k, v, starts, ends, key_valid, sinks, softcap, precision)
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
    check_arguments(q, k, v, starts, ends, key_valid, sinks, softcap, precision)
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
    if scale <= 0:  # the running maximum is kept on unscaled scores, which needs a positive scale
        q = -q if scale < 0 else jnp.zeros_like(q)
        scale = -scale or 1.0
    blocks, vmem_limit = choose_blocks(q_len, kv_len, head_dim, v_dim, q.dtype.itemsize, block_q, block_kv, vmem_bytes)
    rows, n = blocks.rows, blocks.kv // blocks.tile
    q_blocks, kv_blocks = -(-q_len // rows), -(-kv_len // blocks.kv)

    starts, ends = clamp_ranges(starts, ends, kv_len)
    if key_valid is not None:
        key_valid = key_valid.astype(jnp.bool_)
    bounds = block_bounds(starts, ends, key_valid, kv_len=kv_len, rows=rows, tile=blocks.tile)
    scalars = [x for x in bounds if x is not None]

    ranges = jnp.stack([by_block(starts, rows, rows), by_block(ends, rows, rows)], axis=2)  # [B, q_blocks, 2, rows]

    def kv_index(b, h, g, i, j, lo, hi, *_):
        first, last = lo[b * q_blocks + i] // n, (hi[b * q_blocks + i] + n - 1) // n - 1
        # Steps past this query block's last key block name the same block again: nothing is copied.
        return b, h, jnp.maximum(jnp.minimum(first + j, last), 0), 0

    operands = [q, k, v, ranges]
    in_specs = [
        pl.BlockSpec((1, 1, 1, rows, head_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0)),
        pl.BlockSpec((1, 1, blocks.kv, head_dim), kv_index),
        pl.BlockSpec((1, 1, blocks.kv, v_dim), kv_index),
        pl.BlockSpec((1, 1, 2, rows), lambda b, h, g, i, j, *_: (b, i, 0, 0)),
    ]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, kv_blocks * blocks.kv - kv_len)))
        operands.append(valid.reshape(batch, kv_blocks * n, 1, blocks.tile))
        in_specs.append(
            pl.BlockSpec((1, n, 1, blocks.tile), lambda b, h, g, i, j, *s: (b, kv_index(b, h, g, i, j, *s)[2], 0, 0))
        )
    if sinks is not None:
        spread = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (q_heads, rows))
        operands.append(spread.reshape(kv_heads, group, 1, rows))
        in_specs.append(pl.BlockSpec((1, 1, 1, rows), lambda b, h, g, i, j, *_: (h, g, 0, 0)))

    out_shape = [jax.ShapeDtypeStruct((batch, kv_heads, group, q_len, v_dim), q.dtype)]
    out_specs = [pl.BlockSpec((1, 1, 1, rows, v_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0))]
    if with_lse:
        out_shape.append(jax.ShapeDtypeStruct((batch, kv_heads, group, q_blocks, 1, rows), jnp.float32))
        out_specs.append(pl.BlockSpec((1, 1, 1, 1, 1, rows), lambda b, h, g, i, j, *_: (b, h, g, i, 0, 0)))

    steps: int | jax.Array = 1
    if kv_blocks > 1:
        last = (bounds.hi + n - 1) // n
        steps = jnp.maximum((last - bounds.lo // n).max(), 1)
    kernel = functools.partial(
        _kernel, blocks=blocks, q_blocks=q_blocks, kv_len=kv_len,
        scale=scale, softcap=softcap, precision=precision,
        has_valid=key_valid is not None, has_sinks=sinks is not None, with_lse=with_lse,
    )  # fmt: skip
    pairs = batch * q_heads * q_len * kv_len
    out, *lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group, q_blocks, steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((8, rows), jnp.float32),
                pltpu.VMEM((v_dim, rows), jnp.float32),
                pltpu.VMEM((2, blocks.tile, rows), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            # Query blocks in order, on one core: what is known of a key block is kept for the next query block.
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (head_dim + v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=interpret,
        name=name,
    )(*scalars, *operands)
    out = out.reshape(batch, q_heads, q_len, v_dim)
    return (out, lse[0].reshape(batch, q_heads, q_blocks * rows)[..., :q_len]) if with_lse else out


def _kernel(
    *refs, blocks: Blocks, q_blocks: int, kv_len: int, scale: float, softcap: float, precision: str,
    has_valid: bool, has_sinks: bool, with_lse: bool,
) -> None:  # fmt: skip
    it = iter(refs)
    lo_ref, hi_ref, full_lo_ref, full_hi_ref = (next(it) for _ in range(4))
    state_ref = next(it) if has_valid else None
    q_ref, k_ref, v_ref, ranges_ref = (next(it) for _ in range(4))
    valid_ref = next(it) if has_valid else None
    sink_ref = next(it) if has_sinks else None
    o_ref = next(it)
    lse_ref = next(it) if with_lse else None
    m_ref, l_ref, acc_ref, s_ref, leaks_ref = it

    rows, tile, n = blocks.rows, blocks.tile, blocks.kv // blocks.tile
    tiles = -(-kv_len // tile)
    if softcap:  # scores are kept as tanh values; `unit` turns a difference of kept scores into a power of two
        inner, unit = scale / softcap, softcap * LOG2E
    else:
        inner, unit = 1.0, scale * LOG2E

    b, i, j = pl.program_id(0), pl.program_id(3), pl.program_id(4)
    block = b * q_blocks + i
    lo, hi, full_lo, full_hi = lo_ref[block], hi_ref[block], full_lo_ref[block], full_hi_ref[block]
    first_block = lo // n
    used_blocks = (hi + n - 1) // n - first_block
    base = (first_block + j) * n  # first tile of this key block

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if sink_ref is None:
            m_ref[...] = jnp.full_like(m_ref, LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:
            sink = sink_ref[0, 0] * (LOG2E / unit)
            m = jnp.maximum(sink, LOWEST)
            m_ref[...] = m
            # The sums are kept per sublane: the sink counts once, in sublane 0.
            sublane = lax.broadcasted_iota(jnp.int32, l_ref.shape, 0)
            l_ref[...] = jnp.where(sublane == 0, jnp.exp2((sink - m) * unit), 0.0)

    def keys(t, size: int = tile, at: Any = 0) -> pl.Slice:
        return pl.ds(pl.multiple_of(t * tile + at, size), size)

    def values(t) -> jax.Array:
        """v of tile t, 0 past the last key: what lies there may be anything, and must not decide which way is taken."""
        v = v_ref[0, 0, keys(t), :]
        if kv_len % tile == 0:
            return v
        position = (base + t) * tile + lax.broadcasted_iota(jnp.int32, v.shape, 0)
        return jnp.where(position < kv_len, v.astype(jnp.float32), 0.0).astype(v.dtype)

    def scores(k: jax.Array) -> jax.Array:
        s = dot(k, q_ref[0, 0, 0], (1, 1), precision)
        return jnp.tanh(s * inner) if softcap else s

    def prepare(t, slot: int) -> None:
        s_ref[slot] = scores(k_ref[0, 0, keys(t), :])

    def seen(t, size: int = tile, at: Any = 0, started: bool = False) -> list[jax.Array]:
        """Who sees the `size` keys from key `at` of tile t on: bool [size, LANES] for each LANES rows.

        started: every range is known to begin before this tile.
        """
        position = (base + t) * tile + at + lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
        if valid_ref is not None:
            valid = valid_ref[0, t] if size == tile else valid_ref[0, t, :, pl.ds(pl.multiple_of(at, size), size)]
            position = jnp.where(column(valid, size) != 0, position, NO_KEY)
        ranges = [ranges_ref[0, 0, :, c : c + LANES] for c in range(0, rows, LANES)]
        if started:
            return [position < x[1:2] for x in ranges]
        return [jnp.logical_and(position >= x[0:1], position < x[1:2]) for x in ranges]

    def hide(s: jax.Array, visible: list[jax.Array]) -> jax.Array:
        shown = [jnp.where(x, s[:, c * LANES : (c + 1) * LANES], -jnp.inf) for c, x in enumerate(visible)]
        return jnp.concatenate(shown, axis=1)

    def softmax(s: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step of the online softmax: (weights [keys, rows], what to scale the accumulator by [1, rows])."""
        m_old = m_ref[...]
        by_sublane = s.reshape(s.shape[0] // 8, 8, rows)
        m_new = jnp.maximum(m_old, jnp.max(jnp.max(by_sublane, axis=0), axis=0, keepdims=True))
        p = jnp.exp2((by_sublane - m_new[None]) * unit)
        alpha = jnp.exp2((m_old - m_new) * unit)
        m_ref[...] = m_new
        l_ref[...] = alpha * l_ref[...] + jnp.sum(p, axis=0)
        return p.reshape(s.shape).astype(v_ref.dtype), alpha

    def accumulate(weights: jax.Array, alpha: jax.Array, v: jax.Array) -> None:
        acc_ref[...] = acc_ref[...] * alpha + dot(v, weights, (0, 0), precision)

    def chain(t, count: int, last) -> None:
        """`count` full tiles from t on, an even number. Tile t's scores are in slot 0; the following tile's will be."""
        for c in range(count):
            prepare(jnp.minimum(t + c + 1, last), (c + 1) % 2)
            accumulate(*softmax(s_ref[c % 2]), v_ref[0, 0, keys(t + c), :])

    def one(t, last, visible: list[jax.Array] | None) -> None:
        """One tile; the next one's scores take the place of this one's."""
        s = s_ref[0] if visible is None else hide(s_ref[0], visible)
        weights, alpha = softmax(s)
        prepare(jnp.minimum(t + 1, last), 0)
        accumulate(weights, alpha, v_ref[0, 0, keys(t), :] if visible is None else values(t))

    def isolated(t, last) -> None:
        """A masked tile with a value that must not leak: rare, so in small steps and short code."""

        def body(c, carry):
            k, v = isolate(k_ref[0, 0, keys(t, LANES, c * LANES), :], v_ref[0, 0, keys(t, LANES, c * LANES), :])
            accumulate(*softmax(hide(scores(k), seen(t, LANES, c * LANES))), v)
            return carry

        lax.fori_loop(0, tile // LANES, body, 0)
        prepare(jnp.minimum(t + 1, last), 0)

    @pl.when(j < used_blocks)
    def _():
        first, end = jnp.maximum(lo - base, 0), jnp.minimum(hi - base, n)

        # The same key block stays in VMEM from one query block to the next, and so does what is known of it.
        before = jnp.maximum(block - 1, 0)
        stays = jnp.logical_and(hi_ref[before] > 0, (hi_ref[before] + n - 1) // n - 1 == first_block)
        stays = jnp.logical_and(stays, jnp.logical_and(i > 0, j == 0))

        @pl.when(jnp.logical_not(stays))
        def _():
            leaks_ref[0] = UNKNOWN

        masks = True
        if state_ref is None:
            masks = jnp.logical_or(base + first < full_lo, base + end > full_hi)

        @pl.when(jnp.logical_and(masks, leaks_ref[0] == UNKNOWN))
        def _():
            def look(t, found):
                return jnp.bitwise_or(found, not_finite(values(t)))

            found = lax.fori_loop(0, n, look, jnp.zeros((8, v_ref.shape[-1]), jnp.int32))
            leaks_ref[0] = jnp.where(jnp.max(jnp.where(found != 0, 1.0, 0.0)) > 0.0, 1, 0)

        last = end - 1
        prepare(first, 0)

        def body(t):
            full = jnp.where(base + t >= full_lo, jnp.minimum(full_hi - base, end) - t, 0)
            if state_ref is not None:
                state = state_ref[b * tiles + base + t]
                full = jnp.minimum(full, state)
            none_valid = state == NONE_VALID if state_ref is not None else False

            size = 1
            for count in (2, CHAIN):
                size = jnp.where(full >= count, count, size)
            for count in (2, CHAIN):
                pl.when(size == count)(functools.partial(chain, t, count, last))
            pl.when(full == 1)(functools.partial(one, t, last, None))

            @pl.when(jnp.logical_and(full <= 0, jnp.logical_not(none_valid)))
            def _():
                leaks = leaks_ref[0] != 0
                started = base + t >= full_lo
                pl.when(leaks)(functools.partial(isolated, t, last))
                clean = jnp.logical_not(leaks)
                pl.when(jnp.logical_and(clean, started))(lambda: one(t, last, seen(t, started=True)))
                pl.when(jnp.logical_and(clean, jnp.logical_not(started)))(lambda: one(t, last, seen(t)))

            if state_ref is not None:
                pl.when(none_valid)(lambda: prepare(jnp.minimum(t + 1, last), 0))
            return t + size

        lax.while_loop(lambda t: t < end, body, first)

    @pl.when(j == jnp.maximum(used_blocks, 1) - 1)
    def _():
        total = jnp.sum(l_ref[...], axis=0, keepdims=True)
        # `start < end` also drops what a row without keys gathered in tiles that are full for its neighbours.
        nothing = jnp.logical_or(total == 0.0, ranges_ref[0, 0, 0:1] >= ranges_ref[0, 0, 1:2])
        out = jnp.where(nothing, 0.0, acc_ref[...] / jnp.where(total == 0.0, 1.0, total))
        o_ref[0, 0, 0] = out.T.astype(o_ref.dtype)
        if lse_ref is not None:
            lse = m_ref[...] * (unit / LOG2E) + jnp.log(jnp.where(total == 0.0, 1.0, total))
            lse_ref[0, 0, 0, 0] = jnp.where(nothing, -jnp.inf, lse)
