"""Decoding on a paged cache: keys and values in pages of a pool, found by a block table; written in Pallas for TPU.

The grid is (request, step); a step copies a few pages from HBM, whole and each once for all heads, and only pages that
hold a key that some row sees. A page's tokens and heads lie together as its rows, so all query heads meet all of
them in one product, and scores of another head's keys are hidden like those out of range: a decoding step waits for HBM,
not for the arithmetic that this wastes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arguments import check_paged_arguments
from .arithmetic import LOG2E, LOWEST, any_set, column, dot, isolate, not_finite, sink_as_kept
from .blocks import DEFAULT_VMEM_BYTES, LANES, round_up
from .ranges import by_block

_STEP_TOKENS = 512  # a step copies pages of about as many tokens: small pages would leave HBM waiting for steps
_TILE = 1024  # columns (tokens times heads) in one softmax update


def paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    precision: str,
    vmem_bytes: int,
    interpret: bool,
) -> jax.Array:
    """Attention of few rows a request to keys in pages.

    Args:
        q: [B, Hq, Q, D], float32 or bfloat16; Hq * Q rows are held at once.
        k_pages: [pages, page, Hkv, D]. v_pages: [pages, page, Hkv, Dv].
        block_table: int32 [B, M]; key t of request b is slot t % page of page block_table[b, t // page]. Entries past the
            last key in range are not read.
        starts, ends: int32 [B, Q]; row r sees keys starts[b, r] <= t < ends[b, r], at most M * page.
        sinks: [Hq] or None.

    Returns:
        [B, Hq, Q, Dv] in q's dtype; rows that see no key are 0.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_paged_arguments(q, k_pages, v_pages, block_table, starts, ends, sinks, scale, softcap, precision)
    batch, q_heads, q_len, head_dim = q.shape
    pages, page, kv_heads, v_dim = v_pages.shape
    columns, itemsize = page * kv_heads, q.dtype.itemsize
    rows = round_up(q_heads * q_len, 32 // itemsize)
    lanes = round_up(rows, LANES)
    limit = int(0.95 * (vmem_bytes or DEFAULT_VMEM_BYTES))
    n = _pages_a_step(page, block_table.shape[1], rows, columns, head_dim, v_dim, itemsize, limit)

    end = block_table.shape[1] * page
    starts, ends = (jnp.clip(x.astype(jnp.int32), 0, end) for x in (starts, ends))
    live = starts < ends
    first = jnp.where(live, starts, end).min(1) // page
    used = jnp.maximum(-(-jnp.where(live, ends, 0).max(1) // page) - first, 0)  # pages of each request
    first = jnp.where(used > 0, first, 0)
    table = jnp.clip(block_table.astype(jnp.int32), 0, pages - 1)
    held = _held(table, first, used, n)

    def per_row(x: jax.Array) -> jax.Array:
        """[B, Q] -> [B, 1, lanes], the same for every head."""
        return by_block(jnp.tile(x, (1, q_heads)), rows, lanes)

    heads = jnp.repeat(jnp.arange(q_heads, dtype=jnp.int32) // (q_heads // kv_heads), q_len)
    heads = by_block(jnp.tile(heads, (batch, 1)), rows, lanes)
    facts = jnp.concatenate([per_row(starts), per_row(ends), heads], axis=1)  # [B, 3, lanes]
    index = jnp.arange(columns, dtype=jnp.int32)
    where = jnp.stack([index // kv_heads, index % kv_heads])  # slot and head of each column
    packed = jnp.pad(q.reshape(batch, q_heads * q_len, head_dim), ((0, 0), (0, rows - q_heads * q_len), (0, 0)))

    def page_index(i: int):
        """Operand i of a step: its page, or the one it had before, which is not copied again."""

        def at(b, j, table, first, used, held):
            page = table[b * block_table.shape[1] + jnp.minimum(first[b] + j * n + i, block_table.shape[1] - 1)]
            return jnp.where(j * n + i < used[b], page, held[b * n + i]), 0, 0

        return at

    operands = [packed, facts, where]
    in_specs = [
        pl.BlockSpec((1, rows, head_dim), lambda b, j, *_: (b, 0, 0)),
        pl.BlockSpec((1, 3, lanes), lambda b, j, *_: (b, 0, 0)),
        pl.BlockSpec((2, columns), lambda b, j, *_: (0, 0)),
    ]
    if sinks is not None:
        spread = jnp.repeat(sinks.astype(jnp.float32), q_len)[None]
        operands.append(by_block(spread, rows, lanes)[0])  # [1, lanes]
        in_specs.append(pl.BlockSpec((1, lanes), lambda b, j, *_: (0, 0)))
    for pool, size in ((k_pages, head_dim), (v_pages, v_dim)):
        operands += [pool.reshape(pages, columns, size)] * n
        in_specs += [pl.BlockSpec((1, columns, size), page_index(i)) for i in range(n)]

    steps = jnp.maximum(-(-used.max() // n), 1) if block_table.shape[1] > n else 1
    seen = batch * block_table.shape[1] * page
    out = pl.pallas_call(
        functools.partial(
            _kernel, n=n, page=page, scale=scale, softcap=softcap, precision=precision, has_sinks=sinks is not None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, rows, v_dim), lambda b, j, *_: (b, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, v_dim), jnp.float32),
                *[pltpu.VMEM((rows, LANES), jnp.int32)] * 3,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, rows, v_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * q_heads * q_len * seen * (head_dim + v_dim),
            transcendentals=q_heads * q_len * seen,
            bytes_accessed=itemsize * (2 * q.size + seen * kv_heads * (head_dim + v_dim)),
        ),
        interpret=interpret,
        name="range_attention_paged",
    )(table.reshape(-1), first, used, held, *operands)
    return out[:, : q_heads * q_len].reshape(batch, q_heads, q_len, v_dim)


def _pages_a_step(
    page: int, most: int, rows: int, columns: int, head_dim: int, v_dim: int, itemsize: int, limit: int
) -> int:
    """How many pages one step copies: as many as make a long copy and fit VMEM twice, at most `most`."""
    held = 2 * itemsize * columns * (round_up(head_dim, LANES) + round_up(v_dim, LANES))
    work = 6 * 4 * rows * min(columns, _TILE)
    return max(1, min(_STEP_TOKENS // page, most, 8, (limit - work) // held))


def _held(table: jax.Array, first: jax.Array, used: jax.Array, n: int) -> jax.Array:
    """[B * n]: the page that operand i of a step has once request b is done, this request's or an earlier one's."""
    i = jnp.arange(n, dtype=jnp.int32)
    last = first[:, None] + i + (used[:, None] - 1 - i) // n * n
    own = jnp.take_along_axis(table, jnp.clip(last, 0, table.shape[1] - 1), axis=1)
    request = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    latest = lax.cummax(jnp.where(i < used[:, None], request, -1), axis=0)
    return jnp.where(latest < 0, 0, jnp.take_along_axis(own, jnp.maximum(latest, 0), axis=0)).reshape(-1)


def _kernel(
    table_ref, first_ref, used_ref, held_ref, *refs,
    n: int, page: int, scale: float, softcap: float, precision: str, has_sinks: bool,
) -> None:  # fmt: skip
    it = iter(refs)
    q_ref, facts_ref, where_ref = (next(it) for _ in range(3))
    sink_ref = next(it) if has_sinks else None
    k_refs, v_refs = [next(it) for _ in range(n)], [next(it) for _ in range(n)]
    o_ref, m_ref, l_ref, acc_ref, start_ref, end_ref, head_ref = it
    b, j = pl.program_id(0), pl.program_id(1)
    rows, columns = q_ref.shape[1], where_ref.shape[1]
    used = used_ref[b]

    @pl.when(j == 0)
    def _():
        for i, ref in enumerate((start_ref, end_ref, head_ref)):
            ref[...] = column(facts_ref[0, i : i + 1, :], rows)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if sink_ref is None:
            m_ref[...] = jnp.full_like(m_ref, LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:
            sink = sink_as_kept(column(sink_ref[...], rows), 1.0)
            m = jnp.maximum(sink, LOWEST)
            m_ref[...] = m
            l_ref[...] = jnp.exp2(sink - m)

    def update(k: jax.Array, v: jax.Array, slots: jax.Array, heads: jax.Array, base: jax.Array) -> None:
        """One step of the online softmax. k, v: [columns, D]; slots, heads: [1, columns]; base: position of slot 0."""
        s = dot(q_ref[0], k, (1, 1), precision) * scale
        if softcap:
            s = jnp.tanh(s / softcap) * softcap
        position = base + slots
        seen = jnp.logical_and(position >= start_ref[:, :1], position < end_ref[:, :1])
        s = jnp.where(jnp.logical_and(seen, heads == head_ref[:, :1]), s * LOG2E, -jnp.inf)
        m_old = m_ref[:, :1]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - m_new)
        alpha = jnp.exp2(m_old - m_new)
        m_ref[...] = jnp.broadcast_to(m_new, m_ref.shape)
        l_ref[...] = alpha * l_ref[...] + jnp.sum(p, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * alpha + dot(p.astype(v.dtype), v, (1, 0), precision)

    tile = _TILE if columns % _TILE == 0 else columns
    for i in range(n):
        base = (first_ref[b] + j * n + i) * page

        def work(clean: bool, i: int = i, base: jax.Array = base) -> None:
            for c in range(0, columns, tile):
                at = pl.ds(c, tile)
                k, v = k_refs[i][0, at, :], v_refs[i][0, at, :]
                if clean:
                    k, v = isolate(k, v)
                update(k, v, where_ref[0:1, at], where_ref[1:2, at], base)

        active = j * n + i < used
        if (columns * q_ref.dtype.itemsize) % 32:  # less than whole hardware tiles: not looked through, always cleaned
            pl.when(active)(functools.partial(work, True))
            continue

        @pl.when(active)
        def _(i: int = i, work=work) -> None:
            strange = any_set(not_finite(v_refs[i][0]))
            pl.when(strange)(functools.partial(work, True))
            pl.when(jnp.logical_not(strange))(functools.partial(work, False))

    @pl.when(j == jnp.maximum(lax.div(used + n - 1, n), 1) - 1)
    def _():
        total = l_ref[:, :1]
        nothing = jnp.logical_or(total == 0.0, start_ref[:, :1] >= end_ref[:, :1])
        out = jnp.where(nothing, 0.0, acc_ref[...] / jnp.where(total == 0.0, 1.0, total))
        o_ref[0] = out.astype(o_ref.dtype)
