"""Flash attention under masks and biases that have an element for each query-key pair, written in Pallas for TPU.

A mask is packed first: 32 keys of a row become one int32, so that the kernel reads an eighth of a byte a pair. For each
block of query rows and tile of keys it is also known whether any row sees any key: tiles in which none does are not
computed, and key blocks of such tiles not copied; tiles in which every row sees every key need no mask. A bias is read
by blocks as it is.

Scores are transposed and pipelined as in `forward`: [keys, query rows]. Where the query rows of a KV head are few (a
tree of drafts after a long cache), those of all its query heads make one block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .arguments import check_dense_arguments
from .arithmetic import (
    LOG2E,
    LOWEST,
    UNKNOWN,
    any_set,
    dot,
    isolate,
    not_finite,
    positive_scale,
    sink_as_kept,
    softmax_step,
    with_sink,
)
from .blocks import Blocks, choose_dense_blocks

FOLDED_ROWS = 512  # query rows of all heads of a group, up to which they make one block
CHAIN = 4  # tiles in one straight line of code: more hide more of the latency between tiles
ENTRY, FULL = 16, 8  # of an entry of `_visits`
MOST_SCALARS = 1 << 17  # of what is known of tiles, in SMEM: half of the smallest


def forward_dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
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

    q, k, v, sinks and the options are those of `forward`. mask: bool, True where the query sees the key. bias: float32 or
    bfloat16, added to the scores after scale and softcap; -inf hides a key. Either may be None; each has 4 dimensions and
    broadcasts to [B, Hq, Q, KV].

    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_dense_arguments(q, k, v, mask, bias, sinks, scale, softcap, precision)
    q, scale = positive_scale(q, scale)
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    group = q_heads // kv_heads
    folded = group if group * q_len <= FOLDED_ROWS else 1  # query heads in one block of rows
    group, q_rows = group // folded, folded * q_len

    bias_itemsize = 0 if bias is None else bias.dtype.itemsize
    blocks, vmem_limit = choose_dense_blocks(
        q_rows, kv_len, head_dim, v_dim, q.dtype.itemsize, bias_itemsize, block_q, block_kv, vmem_bytes
    )
    rows, tile, n = blocks.rows, blocks.tile, blocks.kv // blocks.tile
    q_blocks, kv_blocks = -(-q_rows // rows), -(-kv_len // blocks.kv)

    def by_head(x: jax.Array) -> jax.Array:
        """[B or 1, KV heads or 1, group or 1, query rows, KV] of what broadcasts to [B, Hq, Q, KV]."""
        x = jnp.broadcast_to(x, (*x.shape[:2], q_len, kv_len))
        heads = (kv_heads, group, folded) if x.shape[1] > 1 else (1, 1, 1)
        x = x.reshape(x.shape[0], *heads, q_len, kv_len)
        x = jnp.broadcast_to(x, (*x.shape[:3], folded, q_len, kv_len))
        return x.reshape(*x.shape[:3], q_rows, kv_len)

    operands = [q.reshape(batch, kv_heads, group, q_rows, head_dim), k, v]
    bias_hides = bias is not None and bias.shape[1] > 1
    if bias is not None:
        if not bias_hides:
            mask = _visible(bias, mask)
        bias = by_head(bias)
    words = None
    if mask is not None:
        words, any_seen, all_seen = _pack(by_head(mask), blocks, q_blocks, kv_blocks)
    if mask is None or any_seen.size > MOST_SCALARS:
        any_seen = jnp.ones((1, 1, 1, q_blocks, kv_blocks * n), jnp.bool_)
        all_seen = jnp.arange(1, kv_blocks * n + 1) * tile <= kv_len if mask is None else ~any_seen
        all_seen = jnp.broadcast_to(all_seen, any_seen.shape)
    if bias_hides:
        all_seen = jnp.zeros_like(all_seen)
    visits, fetches = _visits(any_seen, all_seen, n)

    def row_of(shape: tuple[int, ...], b: Any, h: Any, g: Any, i: Any) -> Any:
        """Place of (b, h, g, i) in what has the leading dimensions `shape`, of which some may be 1."""
        place = 0
        for size, index in zip(shape, (b, h, g, i), strict=True):
            place = place * size + (index if size > 1 else 0)
        return place

    known = any_seen.shape[:4]

    def key_block(b, h, g, i, j, visits, fetches):
        return fetches[row_of(known, b, h, g, i) * kv_blocks + j]

    def part(shape: tuple[int, ...], b, h, g):
        return tuple(index if size > 1 else 0 for size, index in zip(shape, (b, h, g), strict=False))

    in_specs = [
        pl.BlockSpec((1, 1, 1, rows, head_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0)),
        pl.BlockSpec((1, 1, blocks.kv, head_dim), lambda b, h, g, i, j, *s: (b, h, key_block(b, h, g, i, j, *s), 0)),
        pl.BlockSpec((1, 1, blocks.kv, v_dim), lambda b, h, g, i, j, *s: (b, h, key_block(b, h, g, i, j, *s), 0)),
    ]
    if words is not None:
        shape = words.shape
        operands.append(words)
        in_specs.append(
            pl.BlockSpec(
                (1, 1, 1, n, words.shape[4], rows),
                lambda b, h, g, i, j, *s: (*part(shape, b, h, g), key_block(b, h, g, i, j, *s), 0, i),
            )
        )
    if bias is not None:
        bias_shape = bias.shape
        operands.append(bias)
        in_specs.append(
            pl.BlockSpec(
                (1, 1, 1, rows, blocks.kv),
                lambda b, h, g, i, j, *s: (*part(bias_shape, b, h, g), i, key_block(b, h, g, i, j, *s)),
            )
        )
    if sinks is not None:
        spread = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (q_heads, q_len)).reshape(kv_heads, group, 1, q_rows)
        operands.append(jnp.pad(spread, ((0, 0), (0, 0), (0, 0), (0, q_blocks * rows - q_rows))))
        in_specs.append(pl.BlockSpec((1, 1, 1, rows), lambda b, h, g, i, j, *_: (h, g, 0, i)))

    kernel = functools.partial(
        _kernel, blocks=blocks, kv_len=kv_len, row_of=functools.partial(row_of, known), kv_blocks=kv_blocks,
        scale=scale, softcap=softcap, precision=precision,
        has_words=words is not None, has_bias=bias is not None, bias_hides=bias_hides, has_sinks=sinks is not None,
    )  # fmt: skip
    pairs = batch * q_heads * q_len * kv_len
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, group, q_blocks, kv_blocks),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, 1, 1, rows, v_dim), lambda b, h, g, i, j, *_: (b, h, g, i, 0)),
            scratch_shapes=[
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((8, rows), jnp.float32),
                pltpu.VMEM((v_dim, rows), jnp.float32),
                pltpu.VMEM((2, tile, rows), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, q_rows, v_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            # Query blocks in order, on one core: what is known of a key block is kept for the next query block.
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (head_dim + v_dim),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size) + pairs * bias_itemsize,
        ),
        interpret=interpret,
        name="range_attention_forward_dense",
    )(visits, fetches, *operands)
    return out.reshape(batch, q_heads, q_len, v_dim)


def _visible(bias: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Bool, who sees whom under a bias that all heads share: a key with the dtype's lowest number counts as hidden, as its
    weight is 0, but for rows that have no other key."""
    seen = bias != -jnp.inf
    if mask is not None:
        seen = jnp.logical_and(seen, mask)
    lowest = jnp.finfo(bias.dtype).min
    weighty = jnp.logical_and(seen, jnp.logical_not(bias <= lowest))
    return jnp.where(weighty.any(-1, keepdims=True), weighty, seen)


def _pack(mask: jax.Array, blocks: Blocks, q_blocks: int, kv_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(words, any, all) of a bool mask [b, h, g, rows, KV].

    words int32 [b, h, g, tiles, W, padded rows]: bit i of word w of a tile is its key i * W + w. any, all: bool
    [b, h, g, query blocks, tiles], whether some row of the block sees some key of the tile, and every row every key.
    """
    tile, rows = blocks.tile, blocks.rows
    lead, (q_rows, kv_len) = mask.shape[:3], mask.shape[3:]
    tiles = kv_blocks * blocks.kv // tile
    pad_rows, pad_keys = q_blocks * rows - q_rows, tiles * tile - kv_len
    mask = jnp.pad(mask, ((0, 0),) * 4 + ((0, pad_keys),)).reshape(*lead, q_rows, tiles, tile)

    # The matrix unit packs: powers of two are exact in bfloat16, and sums of them below 2**16 in float32.
    width = max(8, tile // 32)
    key = jnp.arange(tile)
    bit, word = key // width, key % width
    powers = jnp.where(word[:, None] == jnp.arange(width), 2.0 ** (bit % 16)[:, None], 0.0)
    halves = jnp.concatenate([jnp.where(bit[:, None] // 16 == half, powers, 0.0) for half in (0, 1)], axis=1)
    sums = jnp.einsum(
        "bhgqtk,kw->bhgtwq", mask.astype(jnp.float32), halves, precision=lax.Precision.DEFAULT
    ).astype(jnp.int32)
    words = sums[..., :width, :] | (sums[..., width:, :] << 16)

    def by_block(fill: int) -> jax.Array:
        x = jnp.pad(words, ((0, 0),) * 5 + ((0, pad_rows),), constant_values=fill)
        return x.reshape(*lead, tiles, width, q_blocks, rows)

    every_key = -1 if tile == 32 * width else (1 << tile // width) - 1
    any_seen = (by_block(0) != 0).any((-3, -1)).swapaxes(-1, -2)
    all_seen = (by_block(every_key) == every_key).all((-3, -1)).swapaxes(-1, -2)
    return by_block(0).reshape(*lead, tiles, width, q_blocks * rows), any_seen, all_seen


def _visits(any_seen: jax.Array, all_seen: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """What the kernel reads as scalars, flat. any_seen, all_seen: bool [b, h, g, query blocks, tiles].

    For each row of tiles, entry t (tiles + 1 of them) is ENTRY times the first tile from t on that is visited (`tiles` for
    none), plus FULL if all of it is seen, plus how many tiles from it on (CHAIN at most) are visited and as full as it. And
    for each row of key blocks of n tiles, the block to have in VMEM: one without visits names another.
    """
    tiles = any_seen.shape[-1]
    index = jnp.arange(tiles, dtype=jnp.int32)
    kind = any_seen.astype(jnp.int32) + all_seen  # 0 not visited, 1 masked, 2 full
    run = jnp.ones_like(kind)
    after = ((0, 0),) * 4 + ((0, 1),)
    alike = jnp.pad(kind[..., :-1] == kind[..., 1:], after)
    for _ in range(CHAIN - 1):
        run = jnp.where(alike, jnp.minimum(jnp.pad(run[..., 1:], after) + 1, CHAIN), 1)
    entry = jnp.where(any_seen, ENTRY * index + FULL * all_seen + run, ENTRY * tiles)
    visits = lax.cummin(entry, axis=entry.ndim - 1, reverse=True)
    visits = jnp.pad(visits, after, constant_values=ENTRY * tiles)
    visited = any_seen.reshape(*any_seen.shape[:-1], tiles // n, n).any(-1)
    block = jnp.arange(tiles // n, dtype=jnp.int32)
    before = lax.cummax(jnp.where(visited, block, -1), axis=visited.ndim - 1)
    first = jnp.where(visited, block, tiles // n).min(-1, keepdims=True)
    fetches = jnp.where(before >= 0, before, first % (tiles // n))
    return visits.reshape(-1), fetches.astype(jnp.int32).reshape(-1)


def _kernel(
    *refs, blocks: Blocks, kv_len: int, kv_blocks: int, row_of: Any, scale: float, softcap: float, precision: str,
    has_words: bool, has_bias: bool, bias_hides: bool, has_sinks: bool,
) -> None:  # fmt: skip
    it = iter(refs)
    visits_ref, fetches_ref, q_ref, k_ref, v_ref = (next(it) for _ in range(5))
    words_ref = next(it) if has_words else None
    bias_ref = next(it) if has_bias else None
    sink_ref = next(it) if has_sinks else None
    o_ref, m_ref, l_ref, acc_ref, s_ref, leaks_ref = it

    tile, n = blocks.tile, blocks.kv // blocks.tile
    # Scores are kept without their last factor, `kept`, unless a bias is added to them.
    inner, kept = (scale / softcap, softcap) if softcap else (1.0, scale)
    if has_bias:
        inner, kept = inner if softcap else scale, 1.0
    b, h, g, i, j = (pl.program_id(axis) for axis in range(5))
    place = row_of(b, h, g, i)
    entries = place * (kv_blocks * n + 1)
    end = (j + 1) * n  # one past the last tile of this key block

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        sink = None if sink_ref is None else sink_as_kept(sink_ref[0, 0], kept * LOG2E)
        m_ref[...], l_ref[...] = with_sink(jnp.full_like(m_ref, LOWEST), sink, kept * LOG2E)

    def keys(t) -> pl.Slice:
        return pl.ds(pl.multiple_of((t - j * n) * tile, tile), tile)

    def values(t) -> jax.Array:
        """v of tile t, 0 past the last key: what lies there may be anything."""
        v = v_ref[0, 0, keys(t), :]
        if kv_len % tile == 0:
            return v
        position = t * tile + lax.broadcasted_iota(jnp.int32, v.shape, 0)
        return jnp.where(position < kv_len, v.astype(jnp.float32), 0.0).astype(v.dtype)

    def scores(k: jax.Array) -> jax.Array:
        s = dot(k, q_ref[0, 0, 0], (1, 1), precision)
        s = s if inner == 1.0 else s * inner
        s = jnp.tanh(s) if softcap else s
        return softcap * s if softcap and has_bias else s

    def biased(s: jax.Array, t) -> jax.Array:
        if bias_ref is None:
            return s
        bias = bias_ref[0, 0, 0, :, keys(t)].astype(jnp.float32).T
        # -inf plus a score that is NaN would show. Where the mask was made of the bias, it hides such keys.
        return jnp.where(bias == -jnp.inf, -jnp.inf, s + bias) if bias_hides else s + bias

    def hide(s: jax.Array, t) -> jax.Array:
        if words_ref is not None:
            words = words_ref[0, 0, 0, t - j * n]
            width = words.shape[0]
            shown = [
                jnp.where(jnp.bitwise_and(words, 1 << bit if bit < 31 else -(1 << 31)) != 0, s[at : at + width], -jnp.inf)
                for bit, at in enumerate(range(0, tile, width))
            ]
            return jnp.concatenate(shown, axis=0)
        if kv_len % tile == 0:
            return s
        position = t * tile + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        return jnp.where(position < kv_len, s, -jnp.inf)

    def softmax(s: jax.Array) -> tuple[jax.Array, jax.Array]:
        return softmax_step(s, m_ref, l_ref, kept * LOG2E, v_ref.dtype)

    def accumulate(weights: jax.Array, alpha: jax.Array, v: jax.Array) -> None:
        acc_ref[...] = acc_ref[...] * alpha + dot(v, weights, (0, 0), precision)

    def prepare(t, slot: int) -> None:
        s_ref[slot] = scores(k_ref[0, 0, keys(t), :])

    def chain(t, following, count: int, full: bool) -> None:
        """`count` tiles from t on, 1 or even. Tile t's scores wait in slot 0; the following tile's will."""
        for c in range(count):
            s = biased(s_ref[c % 2], t + c)
            weights, alpha = softmax(s if full else hide(s, t + c))
            prepare(t + c + 1 if c + 1 < count else following, 0 if count == 1 else (c + 1) % 2)
            accumulate(weights, alpha, v_ref[0, 0, keys(t + c), :] if full else values(t + c))

    def isolated(t, following) -> None:
        """A masked tile with a value that must not leak: rare."""
        k, v = isolate(k_ref[0, 0, keys(t), :], v_ref[0, 0, keys(t), :])
        accumulate(*softmax(hide(biased(scores(k), t), t)), v)
        prepare(following, 0)

    first = visits_ref[entries + j * n]

    @pl.when(first < ENTRY * end)
    def _():
        # The same key block stays in VMEM from one query block to the next, and so does what is known of it.
        before = jnp.maximum(place - 1, 0) * kv_blocks + kv_blocks - 1
        stays = jnp.logical_and(i > 0, j == 0)
        stays = jnp.logical_and(stays, fetches_ref[before] == fetches_ref[place * kv_blocks])

        @pl.when(jnp.logical_not(stays))
        def _():
            leaks_ref[0] = UNKNOWN

        prepare(first // ENTRY, 0)

        def body(entry):
            t, full, run = entry // ENTRY, entry // FULL % 2 == 1, entry % FULL
            masked = jnp.logical_not(full)

            @pl.when(jnp.logical_and(masked, leaks_ref[0] == UNKNOWN))
            def _():
                def look(c, found):
                    return jnp.bitwise_or(found, not_finite(values(j * n + c)))

                found = lax.fori_loop(0, n, look, jnp.zeros((8, v_ref.shape[-1]), jnp.int32))
                leaks_ref[0] = jnp.where(any_set(found), 1, 0)

            leaks = jnp.logical_and(masked, leaks_ref[0] == 1)
            run = jnp.minimum(jnp.where(leaks, 1, run), end - t)
            size = jnp.where(run >= CHAIN, CHAIN, jnp.where(run >= 2, 2, 1))
            following = visits_ref[entries + t + size]
            then = jnp.minimum(following // ENTRY, end - 1)

            pl.when(leaks)(functools.partial(isolated, t, then))
            for count in (1, 2, CHAIN):
                now = jnp.logical_and(size == count, jnp.logical_not(leaks))
                pl.when(jnp.logical_and(now, full))(functools.partial(chain, t, then, count, full=True))
                pl.when(jnp.logical_and(now, masked))(functools.partial(chain, t, then, count, full=False))
            return following

        lax.while_loop(lambda entry: entry < ENTRY * end, body, first)

    @pl.when(j == kv_blocks - 1)
    def _():
        total = jnp.sum(l_ref[...], axis=0, keepdims=True)
        out = jnp.where(total == 0.0, 0.0, acc_ref[...] / jnp.where(total == 0.0, 1.0, total))
        o_ref[0, 0, 0] = out.T.astype(o_ref.dtype)
