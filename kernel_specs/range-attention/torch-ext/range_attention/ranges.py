"""From row ranges to what each block of query rows has to read: plain JAX, O(B * (Q + KV)) work and memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import LANES

NO_KEY = 2**31 - 1  # position of a key that nobody may see: past every end
LEAST_IN_PAIRS = 4  # tiles
BAND = 256  # keys that a group of LANES rows reads when it sees no more: a window of 128 takes that many
# What `tile_state` says about the validity of one tile of keys, beside numbers above 0.
NONE_VALID, SOME_VALID = -1, 0


class BlockBounds(NamedTuple):
    """Which key tiles each block of query rows visits. All int32 and flat, because they are read as scalars.

    A tile is `tile` consecutive keys; tile t holds keys [t * tile, (t + 1) * tile). Entry b * blocks + i of the
    first four belongs to query block i of batch element b.
    """

    lo: jax.Array  # first tile that some row of the block sees
    hi: jax.Array  # one past the last such tile; lo == hi == 0 when no row sees a key
    full_lo: jax.Array  # tiles in [full_lo, full_hi) lie inside the range of every row that sees anything
    full_hi: jax.Array
    # [B * tiles] NONE_VALID, SOME_VALID, or how many tiles from this one on are all valid; None without validity
    tile_state: jax.Array | None


def clamp_ranges(starts: jax.Array, ends: jax.Array, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """int32 ranges cut to [0, kv_len], so that no later step can read past the keys."""
    starts = jnp.clip(starts.astype(jnp.int32), 0, kv_len)
    ends = jnp.clip(ends.astype(jnp.int32), 0, kv_len)
    return starts, ends


def drop_ranges_without_valid_keys(starts: jax.Array, ends: jax.Array, key_valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 ranges [B, Q], clamped; those in which key_valid [B, KV] has no key become (0, 0)."""
    starts, ends = clamp_ranges(starts, ends, key_valid.shape[1])
    before = jnp.cumsum(jnp.pad(key_valid.astype(jnp.bool_), ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    some = jnp.take_along_axis(before, starts, 1) < jnp.take_along_axis(before, ends, 1)
    return jnp.where(some, starts, 0), jnp.where(some, ends, 0)


def by_block(x: jax.Array, rows: int, lanes: int, fill: float = 0) -> jax.Array:
    """[..., Q] -> [..., blocks, lanes]: the rows of each block along the lanes, `fill` where there is no row."""
    lead = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*lead, (0, -x.shape[-1] % rows)], constant_values=fill)
    x = x.reshape(*x.shape[:-1], -1, rows)
    return jnp.pad(x, [*lead, (0, 0), (0, lanes - rows)], constant_values=fill)


def block_bounds(
    starts: jax.Array, ends: jax.Array, key_valid: jax.Array | None, *,
    kv_len: int, rows: int, tile: int, full_needs_every_row: bool = False,
) -> BlockBounds:  # fmt: skip
    """Tile bounds of every block of `rows` query rows.

    starts, ends: int32 [B, Q], clamped to [0, kv_len]. key_valid: bool [B, kv_len] or None.
    Rows that see nothing do not count: they neither widen [lo, hi) nor narrow [full_lo, full_hi), because the
    kernel zeroes them at the end whatever was accumulated for them. With `full_needs_every_row` a block that has such
    a row, or is not filled with rows, has no full tiles: what `backward` sums over rows must not meet them unmasked.
    """
    batch, q_len = starts.shape
    blocks = -(-q_len // rows)
    tiles = -(-kv_len // tile)
    live = starts < ends

    def per_block(values: jax.Array, neutral: int) -> jax.Array:
        values = jnp.where(live, values, neutral)
        values = jnp.pad(values, ((0, 0), (0, blocks * rows - q_len)), constant_values=neutral)
        return values.reshape(batch, blocks, rows)

    lo = per_block(starts, kv_len).min(-1) // tile
    hi = -(-per_block(ends, 0).max(-1) // tile)
    full_lo = -(-per_block(starts, 0).max(-1) // tile)
    full_hi = per_block(ends, kv_len).min(-1) // tile

    if full_needs_every_row:
        every_row = jnp.pad(live, ((0, 0), (0, blocks * rows - q_len))).reshape(batch, blocks, rows).all(-1)
        full_hi = jnp.where(every_row, full_hi, 0)

    tile_state = None
    if key_valid is not None:
        padded = jnp.pad(key_valid, ((0, 0), (0, tiles * tile - kv_len))).reshape(batch, tiles, tile)
        any_valid, all_valid = padded.any(-1), padded.all(-1)
        index = jnp.arange(tiles, dtype=jnp.int32)
        broken = lax.cummin(jnp.where(all_valid, tiles, index), axis=1, reverse=True)  # the next tile not all valid
        tile_state = jnp.where(any_valid, broken - index, NONE_VALID)
        # Whole tiles of padding at either end are not visited at all.
        lo = jnp.maximum(lo, jnp.where(any_valid, index, tiles).min(-1, keepdims=True))
        hi = jnp.minimum(hi, jnp.where(any_valid, index + 1, 0).max(-1, keepdims=True))

    empty = lo >= hi
    lo, hi = jnp.where(empty, 0, lo), jnp.where(empty, 0, hi)
    lo, hi, full_lo, full_hi = (x.astype(jnp.int32).reshape(-1) for x in (lo, hi, full_lo, full_hi))
    return BlockBounds(lo, hi, full_lo, full_hi, None if tile_state is None else tile_state.reshape(-1))


def query_bounds(bounds: BlockBounds, batch: int, kv_blocks: int, tiles_per_block: int) -> tuple[jax.Array, jax.Array]:
    """Which query blocks see each key block: int32 [B * kv_blocks] first, and one past the last; 0 and 0 for none.

    Blocks between the two need not all see it. The comparison of all blocks with all is fused into the reduction.
    """
    lo, hi = bounds.lo.reshape(batch, 1, -1), bounds.hi.reshape(batch, 1, -1)
    base = jnp.arange(kv_blocks, dtype=jnp.int32)[None, :, None] * tiles_per_block
    sees = jnp.maximum(lo, base) < jnp.minimum(hi, base + tiles_per_block)
    index = jnp.arange(lo.shape[2], dtype=jnp.int32)
    first = jnp.where(sees, index, lo.shape[2]).min(-1)
    last = jnp.where(sees, index + 1, 0).max(-1)
    return jnp.where(last > 0, first, 0).reshape(-1), last.reshape(-1)


def step_bounds(bounds: BlockBounds, steps: int, tiles_per_block: int) -> tuple[jax.Array, jax.Array]:
    """First key block, and one past the last, of `steps` equal parts of the query blocks: int32 [steps]; 0, 0: none."""
    lo, hi = bounds.lo.reshape(steps, -1), bounds.hi.reshape(steps, -1)
    end = (-(-hi // tiles_per_block)).max(-1)
    first = jnp.where(lo < hi, lo // tiles_per_block, end[:, None]).min(-1)
    return first, end


def triangular(starts: jax.Array, ends: jax.Array, bounds: BlockBounds, tile: int) -> jax.Array:
    """int32 [B * blocks]: 1 where nobody sees the upper half of a block's last tile, and all see the lower half.

    That is, the tile, of as many keys as a block has rows, lies past every start, and row group c (of LANES rows)
    ends in its c-th part of LANES keys. Rows that see nothing do not count.
    """
    live = (starts < ends).reshape(-1, tile // LANES, LANES)
    last = ((bounds.hi - 1) * tile)[:, None]
    part = last + LANES * jnp.arange(tile // LANES, dtype=jnp.int32)
    start = jnp.where(live, starts.reshape(live.shape), 0).max(-1)
    low = jnp.where(live, ends.reshape(live.shape), NO_KEY).min(-1)
    high = jnp.where(live, ends.reshape(live.shape), 0).max(-1)
    return ((start <= last) & (low >= part) & (high <= part + LANES)).all(-1).astype(jnp.int32)


def bands(starts: jax.Array, ends: jax.Array, bounds: BlockBounds, rows: int, tile: int, kv: int) -> jax.Array:
    """int32 [B * blocks * groups]: where the BAND keys begin that a group of LANES rows reads, in units of LANES keys.

    Counted from the first key of the key block (of `kv` keys, more than BAND). A block of rows is a band when all its
    keys lie in one key block and each group sees none outside its BAND consecutive ones; a block that is no band, or
    whose tiles are as short, has -1 everywhere.
    """
    live = (starts < ends).reshape(-1, rows // LANES, LANES)
    first = jnp.where(live, starts.reshape(live.shape), NO_KEY).min(-1)
    last = jnp.where(live, ends.reshape(live.shape), 0).max(-1)
    origin = (bounds.lo * tile // kv * kv)[:, None]
    at = jnp.minimum((first - origin) // LANES * LANES, kv - BAND)
    fits = (last == 0) | ((at >= 0) & (last - origin <= at + BAND))
    band = fits.all(-1) & (bounds.hi * tile <= origin[:, 0] + kv) & ((bounds.hi - bounds.lo) * tile > BAND)
    return jnp.where(band[:, None], jnp.where(last == 0, 0, at // LANES), -1).reshape(-1).astype(jnp.int32)


def pairs(bounds: BlockBounds, triangle: jax.Array | None, subs: int) -> jax.Array:
    """int32 [B * blocks]: which blocks of query rows go together with the next one, as far as tiles are full for both.

    0 for no pair; else twice the end of those tiles, of which there is an even number from the first one on, and one more
    where both blocks then end in a triangle (see `triangular`), the second a tile later. The first of a pair has an even
    place among the `subs` blocks of a step. Few tiles are not worth it.
    """
    fields = bounds.lo, bounds.hi, bounds.full_lo, bounds.full_hi
    lo, hi, full_lo, full_hi = (x.reshape(-1, subs) for x in fields)
    (lo, lo_b), (hi, hi_b), (full_lo, full_lo_b), (full_hi, full_hi_b) = (
        (x[:, :-1], x[:, 1:]) for x in (lo, hi, full_lo, full_hi)
    )
    count = jnp.maximum(jnp.minimum(jnp.minimum(full_hi, full_hi_b), jnp.minimum(hi, hi_b)) - lo, 0) // 2 * 2
    end = lo + count
    alike = (lo == lo_b) & (lo < hi) & (lo < hi_b) & (jnp.maximum(full_lo, full_lo_b) <= lo)
    alike &= jnp.arange(subs - 1) % 2 == 0
    together = jnp.zeros_like(alike)
    if triangle is not None:
        cut = triangle.reshape(-1, subs) != 0
        together = cut[:, :-1] & cut[:, 1:] & (hi == end + 1) & (hi_b == end + 2) & (full_hi_b == end + 1)
    found = jnp.where(alike & ((count >= LEAST_IN_PAIRS) | together), 2 * end + together.astype(jnp.int32), 0)
    return jnp.pad(found, ((0, 0), (0, 1))).reshape(-1).astype(jnp.int32)
