"""Flash attention on row ranges, written in Pallas for TPU.

Row r of batch element b sees key k when starts[b, r] <= k < ends[b, r] and, if key_valid is given, key_valid[b, k].

How it runs. The grid is (batch, KV head, query-head block, query block, key block), the last dimension dynamic: as
many key blocks as the longest query block needs. Per query block, `ranges.block_bounds` gives the tiles of keys to
visit and those that need no mask arithmetic; they reach the kernel as prefetched scalars, so that key blocks outside
are neither computed nor copied. Scores, running maximum, sums and the accumulator are float32.

Values that a row does not see never reach it, also when they are NaN or infinite: see `_isolate`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import LANES, Blocks, choose_blocks, round_up
from .ranges import ALL_VALID, NONE_VALID, block_bounds, by_block, clamp_ranges, drop_ranges_without_valid_keys

LOG2E = math.log2(math.e)
# The running maximum starts at the lowest finite float32 and hidden scores are -inf: their difference is -inf, its
# exponential exactly 0, and a row that has seen no key yet needs no special case.
_LOWEST = float(jnp.finfo(jnp.float32).min)
NO_KEY = 2**31 - 1  # position of a key that nobody may see: past every end


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
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    sink_rows = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group, 1)
    out = attend(
        q.reshape(batch, kv_heads, group, q_len, head_dim), k, v, starts, ends, key_valid, sink_rows,
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret, name="range_attention_forward",
    )  # fmt: skip
    return out.reshape(batch, q_heads, q_len, v.shape[-1])


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
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.astype(jnp.float32).reshape(kv_heads, group, 1)
        if key_valid is not None:  # such a row's sum would hold the sink
            starts, ends = drop_ranges_without_valid_keys(starts, ends, key_valid)
    out, lse = attend(
        q.reshape(batch, kv_heads, group, q_len, head_dim), k, v, starts, ends, key_valid, sink_rows,
        scale=scale, softcap=softcap, block_q=block_q, block_kv=block_kv, precision=precision,
        vmem_bytes=vmem_bytes, interpret=interpret, name="range_attention_forward_with_lse", with_lse=True,
    )  # fmt: skip
    return out.reshape(batch, q_heads, q_len, v.shape[-1]), lse.reshape(batch, q_heads, q_len)


def check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array,
    key_valid: jax.Array | None, sinks: jax.Array | None, softcap: float, precision: str,
) -> None:  # fmt: skip
    """Raises ValueError naming the first argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, heads, length, head_dim], got shape {x.shape}"
            )
    batch, q_heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    if q.dtype not in (jnp.float32, jnp.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != (batch, kv_heads, kv_len, head_dim) or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"shapes of q, k, v do not fit together: {q.shape}, {k.shape}, {v.shape}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    if starts.shape != (batch, q_len) or ends.shape != (batch, q_len):
        raise ValueError(f"starts and ends must be {(batch, q_len)}, got {starts.shape} and {ends.shape}")
    if key_valid is not None and key_valid.shape != (batch, kv_len):
        raise ValueError(f"key_valid must be {(batch, kv_len)}, got {key_valid.shape}")
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks must be {(q_heads,)}, got {sinks.shape}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if precision not in ("default", "high", "highest"):
        raise ValueError(f'precision must be "default", "high" or "highest", got {precision!r}')


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array,
    key_valid: jax.Array | None, sink_rows: jax.Array | None, *,
    scale: float, softcap: float, block_q: int, block_kv: int, precision: str, vmem_bytes: int,
    interpret: bool, name: str, with_lse: bool = False,
) -> Any:  # fmt: skip
    """The kernel call. q: [B, Hkv, G, Q, D]; sink_rows: float32 [Hkv, G, Q or 1] or None.

    Returns [B, Hkv, G, Q, Dv], and with `with_lse` a float32 [B, Hkv, G, Q] beside it.
    """
    batch, kv_heads, group, q_len, head_dim = q.shape
    kv_len, v_dim = v.shape[2], v.shape[3]
    if scale <= 0:  # the running maximum is kept on unscaled scores, which needs a positive scale
        q = -q if scale < 0 else jnp.zeros_like(q)
        scale = -scale or 1.0
    heads = 1
    blocks, vmem_limit = choose_blocks(
        q_len, kv_len, heads, head_dim, v_dim, q.dtype.itemsize, block_q, block_kv, vmem_bytes
    )
    rows, n = blocks.rows, blocks.kv // blocks.tile
    q_blocks, kv_blocks = -(-q_len // rows), -(-kv_len // blocks.kv)
    lanes = round_up(rows, LANES)

    starts, ends = clamp_ranges(starts, ends, kv_len)
    if key_valid is not None:
        key_valid = key_valid.astype(jnp.bool_)
    bounds = block_bounds(starts, ends, key_valid, kv_len=kv_len, rows=rows, tile=blocks.tile)
    scalars = [x for x in bounds if x is not None]

    ranges = jnp.stack([by_block(starts, rows, lanes), by_block(ends, rows, lanes)], axis=2)  # [B, q_blocks, 2, lanes]

    def kv_index(b, h, g, i, j, lo, hi, *_):
        first, last = lo[b * q_blocks + i] // n, (hi[b * q_blocks + i] + n - 1) // n - 1
        # Steps past this query block's last key block name the same block again: nothing is copied.
        return b, h, jnp.maximum(jnp.minimum(first + j, last), 0), 0

    operands = [q, k, v, ranges]
    in_specs = [
        pl.BlockSpec((1, 1, heads, rows, head_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0)),
        pl.BlockSpec((1, 1, blocks.kv, head_dim), kv_index),
        pl.BlockSpec((1, 1, blocks.kv, v_dim), kv_index),
        pl.BlockSpec((1, 1, 2, lanes), lambda b, h, g, i, j, *_: (b, i, 0, 0)),
    ]
    if key_valid is not None:
        valid = jnp.pad(key_valid.astype(jnp.int32), ((0, 0), (0, kv_blocks * blocks.kv - kv_len)))
        operands.append(valid.reshape(batch, kv_blocks * n, 1, blocks.tile))
        in_specs.append(
            pl.BlockSpec(
                (1, n, 1, blocks.tile), lambda b, h, g, i, j, *s: (b, kv_index(b, h, g, i, j, *s)[2], 0, 0)
            )
        )
    if sink_rows is not None:
        per_row = sink_rows.shape[-1] > 1
        spread = sink_rows if per_row else jnp.broadcast_to(sink_rows, (*sink_rows.shape[:2], rows))
        operands.append(by_block(spread, rows, lanes)[:, :, :, None])  # [Hkv, G, sink blocks, 1, lanes]
        in_specs.append(
            pl.BlockSpec((1, heads, 1, 1, lanes), lambda b, h, g, i, j, *_: (h, g, i if per_row else 0, 0, 0))
        )

    out_shape = [jax.ShapeDtypeStruct((batch, kv_heads, group, q_len, v_dim), q.dtype)]
    out_specs = [pl.BlockSpec((1, 1, heads, rows, v_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0))]
    if with_lse:  # rows along the lanes: O(Q) memory, where a column would be padded to 128 lanes
        out_shape.append(jax.ShapeDtypeStruct((batch, kv_heads, group, q_blocks, 1, lanes), jnp.float32))
        out_specs.append(
            pl.BlockSpec((1, 1, heads, 1, 1, lanes), lambda b, h, g, i, j, *_: (b, h, g, i, 0, 0))
        )

    steps: int | jax.Array = 1
    if kv_blocks > 1:
        last = (bounds.hi + n - 1) // n
        steps = jnp.maximum((last - bounds.lo // n).max(), 1)
    kernel = functools.partial(
        _kernel, blocks=blocks, q_blocks=q_blocks, tiles=-(-kv_len // blocks.tile),
        scale=scale, softcap=softcap, precision=precision,
        has_valid=key_valid is not None, has_sinks=sink_rows is not None, with_lse=with_lse,
    )  # fmt: skip
    pairs = batch * kv_heads * group * q_len * kv_len
    out, *lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group // heads, q_blocks, steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((heads * rows, LANES), jnp.float32),
                pltpu.VMEM((heads * rows, LANES), jnp.float32),
                pltpu.VMEM((heads * rows, v_dim), jnp.float32),
                pltpu.VMEM((heads * rows, LANES), jnp.int32),
                pltpu.VMEM((heads * rows, LANES), jnp.int32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
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
    if not with_lse:
        return out
    return out, lse[0][..., :rows].reshape(batch, kv_heads, group, q_blocks * rows)[..., :q_len]


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: str) -> jax.Array:
    """a x b over one dimension of each, float32 result."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    product = functools.partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    if a.dtype == jnp.bfloat16:
        return product(a, b)
    if precision == "high":  # Mosaic has no three-pass product: written out
        a_hi, b_hi = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        a_lo = (a - a_hi.astype(jnp.float32)).astype(jnp.bfloat16)
        b_lo = (b - b_hi.astype(jnp.float32)).astype(jnp.bfloat16)
        return product(a_hi, b_hi) + (product(a_hi, b_lo) + product(a_lo, b_hi))
    return product(a, b, precision=lax.Precision.HIGHEST if precision == "highest" else lax.Precision.DEFAULT)


def _isolate(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes a non-finite value of a key reach exactly the rows that see the key.

    Weight 0 times NaN is NaN, so a hidden key's value must not meet the product with the weights. Non-finite entries
    of v become 0, and the same key's entries of k become NaN instead: its scores are NaN, which the mask drops for
    the rows that do not see the key and which turns the whole output row NaN for those that do.
    """
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    clean = jnp.where(finite, v.astype(jnp.float32), 0.0).astype(v.dtype)
    if v.shape == k.shape:
        k_ok = finite
    else:
        k_ok = jnp.min(jnp.where(finite, 1.0, 0.0), axis=1, keepdims=True) > 0.0
    return jnp.where(k_ok, k.astype(jnp.float32), jnp.nan).astype(k.dtype), clean


def column(row: jax.Array, rows: int) -> jax.Array:
    """[1, lanes] -> [rows, LANES]: entry r of the row, in every lane of row r."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:rows]


def row_of(x: jax.Array, lanes: int) -> jax.Array:
    """The reverse of `column`: [rows, LANES], the same in every lane -> [1, lanes]; 0 in lanes past the rows."""
    if x.shape[0] < lanes:
        x = jnp.concatenate([x, jnp.zeros((lanes - x.shape[0], LANES), x.dtype)], axis=0)
    return x.T[:1]


def over_lanes(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], the same in every lane -> [rows, width]."""
    if width % LANES:
        return jnp.tile(x, (1, width // LANES + 1))[:, :width]
    return x if width == LANES else jnp.tile(x, (1, width // LANES))


def _kernel(
    *refs, blocks: Blocks, q_blocks: int, tiles: int, scale: float, softcap: float, precision: str,
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
    m_ref, l_ref, acc_ref, start_ref, end_ref = it

    _, _, heads, rows, head_dim = q_ref.shape
    v_dim = v_ref.shape[-1]
    tile, n = blocks.tile, blocks.kv // blocks.tile
    chunks = range(0, tile, LANES)
    if (
        softcap
    ):  # scores are kept as tanh values; `unit` turns a difference of kept scores into a power of two
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
        for ref, row in ((start_ref, 0), (end_ref, 1)):
            values = column(ranges_ref[0, 0, row : row + 1, :], rows)
            for h in range(heads):
                ref[h * rows : (h + 1) * rows, :] = values
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if sink_ref is None:
            m_ref[...] = jnp.full_like(m_ref, _LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:
            for h in range(heads):
                sink = column(sink_ref[0, h, 0], rows) * (LOG2E / unit)
                m = jnp.maximum(sink, _LOWEST)
                # The sums are kept per lane: the sink counts once, in lane 0.
                lane = lax.broadcasted_iota(jnp.int32, m.shape, 1)
                m_ref[h * rows : (h + 1) * rows, :] = m
                l_ref[h * rows : (h + 1) * rows, :] = jnp.where(lane == 0, jnp.exp2((sink - m) * unit), 0.0)

    def scores(t, k) -> jax.Array:
        q = q_ref[0, 0].reshape(heads * rows, head_dim)
        s = dot(q, k, (1, 1), precision)
        return jnp.tanh(s * inner) if softcap else s

    def update(s: list[jax.Array], v: jax.Array) -> None:
        """One step of the online softmax. s: the scores of one tile in chunks of LANES keys, hidden ones -inf."""
        m_old = m_ref[...]
        top = functools.reduce(jnp.maximum, s)
        m_new = jnp.maximum(m_old, jnp.max(top, axis=1, keepdims=True))
        p = [jnp.exp2((x - m_new) * unit) for x in s]
        alpha = jnp.exp2((m_old - m_new) * unit)
        m_ref[...] = m_new
        l_ref[...] = alpha * l_ref[...] + functools.reduce(jnp.add, p)
        weights = jnp.concatenate([x.astype(v.dtype) for x in p], axis=1)
        acc_ref[...] = acc_ref[...] * over_lanes(alpha, v_dim) + dot(weights, v, (1, 0), precision)

    def tile_slice(t) -> pl.Slice:
        return pl.ds(t * tile if isinstance(t, int) else pl.multiple_of(t * tile, tile), tile)

    def full_tile(t, s: jax.Array) -> None:
        update([s[:, c : c + LANES] for c in chunks], v_ref[0, 0, tile_slice(t), :])

    def masked_tile(t) -> None:
        k, v = _isolate(k_ref[0, 0, tile_slice(t), :], v_ref[0, 0, tile_slice(t), :])
        s = scores(t, k)
        start, end = start_ref[...], end_ref[...]
        shown = []
        for c in chunks:
            position = (base + t) * tile + c + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            if valid_ref is not None:
                position = jnp.where(valid_ref[0, t, :, c : c + LANES] != 0, position, NO_KEY)
            seen = jnp.logical_and(position >= start, position < end)
            shown.append(jnp.where(seen, s[:, c : c + LANES], -jnp.inf))
        update(shown, v)

    def state(t):
        return ALL_VALID if state_ref is None else state_ref[b * tiles + base + t]

    def is_full(t):
        full = jnp.logical_and(base + t >= full_lo, base + t < full_hi)
        return full if state_ref is None else jnp.logical_and(full, state(t) == ALL_VALID)

    active = j < used_blocks
    all_full = jnp.logical_and(base >= full_lo, base + n <= full_hi)
    if state_ref is not None:
        # A block that is all inside full bounds has no tile past the last one, so these reads are in bounds.
        for t in range(n):
            safe = jnp.minimum(b * tiles + base + t, state_ref.shape[0] - 1)
            all_full = jnp.logical_and(all_full, state_ref[safe] == ALL_VALID)
    all_full = jnp.logical_and(active, all_full)

    @pl.when(all_full)
    def _():
        s = scores(0, k_ref[0, 0, tile_slice(0), :])
        for t in range(n):
            # The next product is issued before this softmax, so that matrix and vector units work side by side.
            following = scores(t + 1, k_ref[0, 0, tile_slice(t + 1), :]) if t + 1 < n else s
            full_tile(t, s)
            s = following

    @pl.when(jnp.logical_and(active, jnp.logical_not(all_full)))
    def _():
        def body(t, carry):
            full = is_full(t)

            @pl.when(full)
            def _():
                full_tile(t, scores(t, k_ref[0, 0, tile_slice(t), :]))

            @pl.when(jnp.logical_and(jnp.logical_not(full), state(t) != NONE_VALID))
            def _():
                masked_tile(t)

            return carry

        lax.fori_loop(jnp.maximum(lo - base, 0), jnp.minimum(hi - base, n), body, 0)

    @pl.when(j == jnp.maximum(used_blocks, 1) - 1)
    def _():
        total = jnp.sum(l_ref[...], axis=1, keepdims=True)
        # `start < end` also drops what a row without keys gathered in tiles that are full for its neighbours.
        nothing = jnp.logical_or(total == 0.0, start_ref[:, :1] >= end_ref[:, :1])
        out = jnp.where(nothing, 0.0, acc_ref[...] / jnp.where(total == 0.0, 1.0, total))
        o_ref[0, 0] = out.reshape(heads, rows, v_dim).astype(o_ref.dtype)
        if lse_ref is not None:
            lse = m_ref[...] * (unit / LOG2E) + jnp.log(jnp.where(total == 0.0, 1.0, total))
            lse = jnp.where(nothing, -jnp.inf, lse)
            for h in range(heads):
                lse_ref[0, 0, h, 0] = row_of(lse[h * rows : (h + 1) * rows], lse_ref.shape[-1])
