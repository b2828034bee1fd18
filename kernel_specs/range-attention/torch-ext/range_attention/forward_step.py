"""A grid step of the forward kernel: its operands, which key block it has, and what is known of that block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .arithmetic import UNKNOWN, any_set, dot, not_finite, score_units
from .blocks import LANES, Blocks

# What a block of query rows leaves to the next one where there are pairs: whose scores lie in slot 0, and the tile where
# the second of a pair goes on, or one of the two numbers below.
READY, RESUME = 0, 1
ALONE, ENDED = -1, -2


class Layout(NamedTuple):
    """Which operands have the length as their last dimension, [.., D, length]: see `blocks.length_last`."""

    q: bool
    k: bool
    v: bool
    out: bool


class Plan(NamedTuple):
    """What is known when the kernel is traced."""

    blocks: Blocks
    layout: Layout
    q_steps: int  # grid steps along the query rows
    heads_in_order: bool  # whether the heads of a group follow each other on one core
    kv_len: int
    scale: float
    softcap: float
    precision: str
    narrow: bool  # matrix units of 128 x 128, see `arithmetic.narrow_matrix_units`
    operands: tuple[str, ...]  # names of `Refs`, in the kernel's order


class Refs(NamedTuple):
    """The kernel's operands, outputs and scratch; None where a call has none."""

    # Scalars. Entries of the first two belong to grid steps, of the others to blocks of query rows.
    kv_first: Any  # first key block, and one past the last
    kv_end: Any
    lo: Any  # see ranges.BlockBounds
    hi: Any
    full_lo: Any
    full_hi: Any
    triangle: Any = None  # see ranges.triangular
    band: Any = None  # see ranges.bands
    pair: Any = None  # see ranges.pairs
    tile_state: Any = None

    q: Any = None  # [subs * rows, D], or as `Layout` says; k and v likewise
    k: Any = None
    v: Any = None
    ranges: Any = None  # [subs, 2, rows]: starts, ends
    valid: Any = None  # [tiles, 1, tile]
    sink: Any = None  # [1, rows]
    out: Any = None
    lse: Any = None  # [subs, 1, rows]

    maximum: Any = None  # [kept, 1, rows]
    total: Any = None  # [kept, 8, rows]: sums of each sublane's keys
    acc: Any = None  # [kept, Dv, rows]; 0 before a block of rows begins
    scores: Any = None  # [2, tile, rows]
    leaks: Any = None  # [1]
    way: Any = None  # [2]: see READY and RESUME


def take(ref: Any, at: Any, size: int, last: bool) -> jax.Array:
    """`size` positions along the length of an operand of one head; `at` is a multiple of 128."""
    at = pl.ds(at if isinstance(at, int) else pl.multiple_of(at, LANES), size)
    return ref[:, at] if last else ref[at, :]


class Step:
    """One step of the grid."""

    def __init__(self, plan: Plan, refs: Refs) -> None:
        self.plan, self.refs = plan, refs
        self.inner, self.unit = score_units(plan.scale, plan.softcap)
        self.tiles = plan.blocks.kv // plan.blocks.tile  # of a key block
        self.whole = plan.kv_len <= plan.blocks.kv  # the key block has every key: it is block 0
        self.all_tiles = -(-plan.kv_len // plan.blocks.tile)
        self.batch, _, self.head, self.row_step, self.key_step = (pl.program_id(axis) for axis in range(5))
        self.number = self.batch * plan.q_steps + self.row_step
        self.kv_first, self.kv_end = refs.kv_first[self.number], refs.kv_end[self.number]
        self.kv_block = self.kv_first + self.key_step
        self.base = 0 if self.whole else self.kv_block * self.tiles  # the key block's first tile

    def goes_in_a_pair(self, i: Any) -> Any:
        """Whether block i of the query rows has something to do in this key block together with the next one."""
        block = self.number * self.plan.blocks.subs + i
        pair = self.refs.pair[block]
        if self.whole:
            return pair > 0
        end = (pair >> 1) - self.base
        some = jnp.minimum(end, self.tiles) - jnp.maximum(self.refs.lo[block] - self.base, 0) >= 2
        return jnp.logical_and(pair > 0, jnp.logical_or(some, self.ends_together(pair)))

    def ends_together(self, pair: Any) -> Any:
        """Whether a pair's two last tiles are triangles (as `ranges.pairs` says) and lie in this key block."""
        together = (pair & 1) == 1
        if self.whole:
            return together
        end = (pair >> 1) - self.base
        return jnp.logical_and(together, jnp.logical_and(end >= 0, end + 2 <= self.tiles))

    def tiles_here(self, lo: Any, hi: Any) -> tuple[Any, Any]:
        """Those of the tiles [lo, hi) that lie in this key block, counted from its first."""
        if self.whole:
            return lo, hi
        return jnp.maximum(lo - self.base, 0), jnp.minimum(hi - self.base, self.tiles)

    def has_tile(self, tile: Any, some: Any) -> Any:
        """Whether this key block has `tile`, or is the step's first where there is not `some` tile."""
        return True if self.whole else jnp.where(some, tile // self.tiles, self.kv_first) == self.kv_block

    def clear(self) -> None:
        acc = self.refs.acc

        def body(slot, carry):
            acc[slot] = jnp.zeros(acc.shape[1:], jnp.float32)
            return carry

        lax.fori_loop(0, acc.shape[0], body, 0)

    def key_block_stays(self) -> Any:
        """Whether this step has the key block of the one before: what is known of it then stays as well."""
        last_of_head = (self.batch + 1) * self.plan.q_steps - 1
        end = self.refs.kv_end[jnp.where(self.row_step > 0, self.number - 1, last_of_head)]
        follows = self.row_step > 0
        if self.plan.heads_in_order:
            follows = jnp.logical_or(follows, self.head > 0)
        same = jnp.logical_and(end > 0, end - 1 == self.kv_first)
        return jnp.logical_and(self.key_step == 0, jnp.logical_and(follows, same))

    def forget(self) -> None:
        self.refs.leaks[0] = UNKNOWN

    def look_for_leaks(self) -> None:
        """Whether a value of this key block is not finite."""
        refs, tiles = self.refs, self.tiles
        least = min if self.whole else jnp.minimum

        def look(t, found):
            return jnp.bitwise_or(found, not_finite(self.values(t)))

        columns = self.plan.blocks.tile if self.plan.layout.v else refs.v.shape[-1]
        found = jnp.zeros((8, columns), jnp.int32)
        if self.plan.kv_len % self.plan.blocks.tile:
            whole = least(self.plan.kv_len // self.plan.blocks.tile - self.base, tiles)
            found = lax.fori_loop(0, whole, look, found)
            found = jnp.bitwise_or(found, not_finite(self.known_values(least(whole, tiles - 1))))
        else:
            found = lax.fori_loop(0, least(self.all_tiles - self.base, tiles), look, found)
        refs.leaks[0] = jnp.where(any_set(found), 1, 0)

    def keys(self, t: Any, at: Any = 0, size: int = 0) -> jax.Array:
        """k of tile t, or of `size` keys from key `at` of it on."""
        return take(self.refs.k, t * self.plan.blocks.tile + at, size or self.plan.blocks.tile, self.plan.layout.k)

    def values(self, t: Any, at: Any = 0, size: int = 0) -> jax.Array:
        """v of tile t, or of `size` keys from key `at` of it on."""
        tile = self.plan.blocks.tile
        return take(self.refs.v, t * tile + at, size or tile, self.plan.layout.v)

    def known_values(self, t: Any, size: int = 0) -> jax.Array:
        """`values` from the tile's first key on, and 0 past the last key of all."""
        v = self.values(t, 0, size)
        return v if self.plan.kv_len % self.plan.blocks.tile == 0 else self.cut(v, (self.base + t) * self.plan.blocks.tile)

    def cut(self, v: jax.Array, first: Any) -> jax.Array:
        """v, 0 past the last key: what lies there may be anything, and must not decide which way is taken."""
        position = first + lax.broadcasted_iota(jnp.int32, v.shape, int(self.plan.layout.v))
        return jnp.where(position < self.plan.kv_len, v.astype(jnp.float32), 0.0).astype(v.dtype)

    def weigh(self, v: jax.Array, weights: jax.Array) -> jax.Array:
        """v of some keys x their weights [keys, rows] -> [Dv, rows]."""
        return dot(v, weights, (int(self.plan.layout.v), 0), self.plan.precision)
