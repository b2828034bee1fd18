"""One block of query rows in a grid step of the forward kernel: the ways through its tiles of keys, and its output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .arithmetic import (
    LOG2E,
    LOWEST,
    UNKNOWN,
    column,
    dot,
    flip,
    in_sublanes,
    isolate,
    sink_as_kept,
    softmax_step,
    top,
    with_sink,
)
from .blocks import LANES
from .forward_step import ALONE, Step, take
from .ranges import BAND, NO_KEY, NONE_VALID

CHAINS = (2, 4)  # full tiles in one straight line of code: more hide more of the latency between tiles
LONG_CHAINS = (2, 4, 8)  # where a key block is long enough to use them twice
LONG_CODE_CHAINS = (2,)  # where products take long themselves: latency counts less, and code is six times as long
LATE = 4  # tiles of the shortest chain that counts as long
NOTHING, TILE, BANDS = 0, 1, 2  # whose scores the next block of rows finds ready


class Rows:
    """Block `i` of the query rows of a step."""

    def __init__(self, step: Step, i: Any, resume: Any = None, next_resume: Any = None) -> None:
        """resume: the tile where the block goes on after a `Pair`, or ALONE; next_resume: the same of the next block."""
        refs, subs = step.refs, step.plan.blocks.subs
        self.step, self.refs, self.plan, self.i = step, step.refs, step.plan, i
        self.rows, self.tile = step.plan.blocks.rows, step.plan.blocks.tile
        self.long_code = refs.q.dtype == jnp.float32 or refs.acc.shape[1] > 256
        self.groups = range(0, self.rows, LANES)
        self.block = block = step.number * subs + i
        # Neighbours have accumulators of their own.
        kept = refs.acc.shape[0]
        self.slot = i if kept == subs else i & (kept - 1)
        lo, hi, self.full_lo, self.full_hi = refs.lo[block], refs.hi[block], refs.full_lo[block], refs.full_hi[block]
        self.first, self.end = step.tiles_here(lo, hi)
        if resume is not None:
            self.first = jnp.where(resume == ALONE, self.first, resume)
        self.some = self.first < self.end
        # In which key block the rows begin, and in which they end.
        self.begins = step.has_tile(lo, lo < hi)
        if resume is not None:
            self.begins = jnp.logical_and(self.begins, resume == ALONE)
        self.ends = step.has_tile(hi - 1, lo < hi)
        # The next block of rows, whose first scores are computed beside this one's last softmax.
        self.next = jnp.minimum(i + 1, subs - 1)
        next_block = step.number * subs + self.next
        next_first, next_end = step.tiles_here(refs.lo[next_block], refs.hi[next_block])
        if next_resume is not None:
            next_first = jnp.where(next_resume == ALONE, next_first, next_resume)
        next_some = next_first < next_end
        self.next_first = jnp.where(next_some, next_first, 0)
        self.next_ready = jnp.logical_and(self.some, jnp.logical_and(i + 1 < subs, next_some))

    # -- scores ---------------------------------------------------------------------------------------------------

    def scores(self, k: jax.Array, i: Any, at: int = 0, size: int = 0) -> jax.Array:
        """k of some keys x q of block i (or of `size` rows from row `at` of it on) -> [keys, rows]."""
        layout = self.plan.layout
        q = take(self.refs.q, i * self.rows + at, size or self.rows, layout.q)
        s = dot(k, q, (int(not layout.k), int(not layout.q)), self.plan.precision)
        return jnp.tanh(s * self.step.inner) if self.plan.softcap else s

    def prepare(self, t: Any, slot: int) -> None:
        """Scores of tile t, or past the last one those of the next block's first tile."""
        more = t < self.end
        k = self.step.keys(jnp.where(more, t, self.next_first))
        self.refs.scores[slot] = self.scores(k, jnp.where(more, self.i, self.next))

    def prepare_triangle(self, t: Any, slot: int) -> None:
        """Scores of the squares of tile t that somebody sees."""
        for at in self.groups:
            s = self.scores(self.step.keys(t, at, LANES), self.i, at, self.rows - at)
            self.refs.scores[slot, at : at + LANES, at:] = s

    def visible(self, first: Any, size: int, group: int, valid: jax.Array | None = None, started: bool = False) -> jax.Array:
        """Who of a group of LANES rows sees the `size` keys from position `first` on: bool [size, LANES].

        valid: [1, size] or None. started: every range is known to begin before.
        """
        start = self.refs.ranges[self.i, 0:1, group : group + LANES]
        end = self.refs.ranges[self.i, 1:2, group : group + LANES]
        position = first + lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
        if valid is not None:
            position = jnp.where(column(valid, size) != 0, position, NO_KEY)
        if started:
            return position < end
        # One comparison for both ends: a position before the start is far past the end as an unsigned number.
        return (position - start).astype(jnp.uint32) < (end - start).astype(jnp.uint32)

    def masked(self, s: jax.Array, t: Any, at: Any = 0, started: bool = False) -> jax.Array:
        """Scores of keys from key `at` of tile t on, -inf where the row does not see the key."""
        size, valid = s.shape[0], None
        if self.refs.valid is not None:
            here = slice(None) if size == self.tile else pl.ds(pl.multiple_of(at, size), size)
            valid = self.refs.valid[t, :, here]
        first = (self.step.base + t) * self.tile + at
        shown = [self.visible(first, size, g, valid, started) for g in self.groups]
        return hidden(s, shown)

    # -- online softmax -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        lowest = jnp.full((1, self.rows), LOWEST, jnp.float32)
        self.refs.maximum[self.slot], self.refs.total[self.slot] = self.first_sums(lowest)

    def first_sums(self, maximum: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(maximum, sums) before any key: see `with_sink`."""
        sink = None if self.refs.sink is None else sink_as_kept(self.refs.sink[...], self.step.unit)
        return with_sink(maximum, sink, self.step.unit)

    def softmax(self, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        refs, slot = self.refs, self.slot
        return softmax_step(s, refs.maximum.at[slot], refs.total.at[slot], self.step.unit, refs.v.dtype)

    def accumulate(self, weights: jax.Array, alpha: jax.Array, v: jax.Array) -> None:
        self.refs.acc[self.slot] = self.refs.acc[self.slot] * alpha + self.step.weigh(v, weights)

    def flush(self, acc: jax.Array, total: jax.Array, maximum: jax.Array) -> None:
        """The output of acc [Dv, rows]."""
        refs, i, rows = self.refs, self.i, self.rows
        total = jnp.sum(total, axis=0, keepdims=True)
        # `start < end` also drops what a row without keys gathered in tiles that are full for its neighbours.
        nothing = jnp.logical_or(total == 0.0, refs.ranges[i, 0:1] >= refs.ranges[i, 1:2])
        total = jnp.where(total == 0.0, 1.0, total)
        out = jnp.where(nothing, 0.0, acc / total)
        here = pl.ds(pl.multiple_of(i * rows, LANES), rows)
        if self.plan.layout.out:
            refs.out[:, here] = out.astype(refs.out.dtype)
        else:
            refs.out[here, :] = out.T.astype(refs.out.dtype)
        if refs.lse is not None:
            lse = maximum * (self.step.unit / LOG2E) + jnp.log(total)
            refs.lse[i] = jnp.where(nothing, -jnp.inf, lse)

    def flush_kept(self) -> None:
        refs, slot = self.refs, self.slot
        self.flush(refs.acc[slot], refs.total[slot], refs.maximum[slot])
        refs.acc[slot] = jnp.zeros(refs.acc.shape[1:], jnp.float32)

    # -- tiles ----------------------------------------------------------------------------------------------------
    # Each way finds the scores of its first tile in slot 0, and leaves there those of what follows.

    def chain(self, t: Any, count: int) -> None:
        """`count` full tiles from t on, an even number.

        In a long chain each product with values is issued a tile late, so that nothing waits for its softmax.
        """
        late = None
        for c in range(count):
            self.prepare(t + c + 1, (c + 1) % 2)
            if late is not None:
                self.accumulate(*late, self.step.values(t + c - 1))
            late = self.softmax(self.refs.scores[c % 2])
            if count < LATE or c + 1 == count:
                self.accumulate(*late, self.step.values(t + c))
                late = None

    def one(self, t: Any, full: bool) -> None:
        """One tile; the next one's scores take the place of this one's."""
        s = self.refs.scores[0]
        weights, alpha = self.softmax(s if full else self.masked(s, t))
        self.prepare(t + 1, 0)
        self.accumulate(weights, alpha, self.step.values(t) if full else self.step.known_values(t))

    def isolated(self, t: Any) -> None:
        """A masked tile with a value that must not leak: rare, so in small steps and short code."""
        layout = self.plan.layout

        def body(c, carry):
            k, v = self.step.keys(t, c * LANES, LANES), self.step.values(t, c * LANES, LANES)
            k, v = (flip(x) if last else x for x, last in ((k, layout.k), (v, layout.v)))
            k, v = isolate(k, v)
            k, v = (flip(x) if last else x for x, last in ((k, layout.k), (v, layout.v)))
            self.accumulate(*self.softmax(self.masked(self.scores(k, self.i), t, c * LANES)), v)
            return carry

        lax.fori_loop(0, self.tile // LANES, body, 0)
        self.prepare(t + 1, 0)

    def ending(self, t: Any, count: int, triangle: bool) -> None:
        """`count` full tiles from t on, the rows' last tile, which is masked, and the output."""
        refs, step = self.refs, self.step
        last = t + count
        for c in range(count):
            if c + 1 == count and triangle:
                self.prepare_triangle(last, count % 2)
            else:
                self.prepare(t + c + 1, (c + 1) % 2)
            self.accumulate(*self.softmax(refs.scores[c % 2]), step.values(t + c))
        if triangle:
            sides = self.triangle(last, count % 2)
        else:
            sides = [(*self.softmax(self.masked(refs.scores[count % 2], last, started=True)), self.tile)]
        self.prepare(last + 1, 0)
        self.finish(last, sides)

    def triangle(self, t: Any, slot: int) -> list[tuple[jax.Array, jax.Array, int]]:
        """`triangle_side` of both halves of the rows, whose scores lie in `slot`."""
        return [self.triangle_side(t, slot, side) for side in range(2)]

    def finish(self, last: Any, sides: list[tuple[jax.Array, jax.Array, int]]) -> None:
        """The output, after the last tile: sides [(weights, scale of the accumulator, keys)] of it from left to right."""
        refs, step, slot = self.refs, self.step, self.slot
        accs, at = [], 0
        for weights, alpha, size in sides:
            columns = slice(at, at + weights.shape[1])
            accs.append(refs.acc[slot, :, columns] * alpha + step.weigh(step.known_values(last, size), weights))
            at = columns.stop
        refs.acc[slot] = jnp.zeros(refs.acc.shape[1:], jnp.float32)
        self.flush(jnp.concatenate(accs, axis=1), refs.total[slot], refs.maximum[slot])

    def triangle_side(self, t: Any, slot: int, side: int) -> tuple[jax.Array, jax.Array, int]:
        """`softmax` of the left or right half of the rows in a tile of which they see the keys up to the diagonal.

        Returns (weights, scale of the accumulator, how many keys of the tile they are of).
        """
        refs, unit, half = self.refs, self.step.unit, self.rows // 2
        columns, size = slice(side * half, (side + 1) * half), (side + 1) * half
        scores = []
        for at in range(columns.start, columns.stop, LANES):
            lanes, square = slice(at, at + LANES), slice(at, at + LANES)
            above = [refs.scores[slot, :at, lanes]] if at else []
            seen = self.visible((self.step.base + t) * self.tile + at, LANES, at, started=True)
            scores.append(jnp.concatenate([*above, jnp.where(seen, refs.scores[slot, square, lanes], -jnp.inf)], axis=0))
        scores = [in_sublanes(s) for s in scores]
        old = refs.maximum[self.slot, :, columns]
        new = jnp.maximum(old, jnp.concatenate([top(s) for s in scores], axis=1))
        weights, sums = [], []
        for g, s in enumerate(scores):
            p = jnp.exp2((s - new[None, :, g * LANES : (g + 1) * LANES]) * unit)
            sums.append(jnp.sum(p, axis=0))
            p = p.reshape(-1, LANES).astype(refs.v.dtype)
            unseen = [jnp.zeros((size - p.shape[0], LANES), p.dtype)] if p.shape[0] < size else []
            weights.append(jnp.concatenate([p, *unseen], axis=0))
        alpha = jnp.exp2((old - new) * unit)
        refs.maximum[self.slot, :, columns] = new
        refs.total[self.slot, :, columns] = alpha * refs.total[self.slot, :, columns] + jnp.concatenate(sums, axis=1)
        return jnp.concatenate(weights, axis=1), alpha, size

    # -- bands ----------------------------------------------------------------------------------------------------

    def band_first(self, i: Any, group: int) -> Any:
        """The first key that row group `group` of block i reads, counted from the key block's first."""
        block = self.step.number * self.plan.blocks.subs + i
        return jnp.maximum(self.refs.band[block * len(self.groups) + group // LANES], 0) * LANES

    def prepare_band(self, i: Any) -> None:
        for g in self.groups:
            k = take(self.refs.k, self.band_first(i, g), BAND, self.plan.layout.k)
            self.refs.scores[0, :BAND, g : g + LANES] = self.scores(k, i, g, LANES)

    def whole_band(self) -> None:
        """All that the rows see, and the output: each group of LANES rows has its own BAND keys."""
        step, kv = self.step, self.plan.blocks.kv
        firsts = [self.band_first(self.i, g) for g in self.groups]
        origin = step.kv_block * kv
        seen = [self.visible(origin + first, BAND, g) for first, g in zip(firsts, self.groups, strict=True)]
        s = hidden(self.refs.scores[0, :BAND], seen)
        by_sublane = in_sublanes(s)
        maximum, total = self.first_sums(jnp.maximum(top(by_sublane), LOWEST))
        p = jnp.exp2((by_sublane - maximum[None]) * step.unit)
        total = total + jnp.sum(p, axis=0)
        weights = p.reshape(s.shape).astype(self.refs.v.dtype)
        self.prepare_band(self.next)
        accs = []
        for first, g in zip(firsts, self.groups, strict=True):
            v = take(self.refs.v, first, BAND, self.plan.layout.v)
            if self.plan.kv_len % kv:
                v = step.cut(v, origin + first)
            accs.append(step.weigh(v, weights[:, g : g + LANES]))
        self.flush(jnp.concatenate(accs, axis=1), total, maximum)

    # -- the way through ------------------------------------------------------------------------------------------

    def run(self, ready: Any) -> Any:
        """What this block of rows has to do with this key block. ready, and the result: whose scores lie in slot 0."""
        refs, step = self.refs, self.step
        masks: Any = True
        if refs.tile_state is None:
            masks = jnp.logical_or(step.base + self.first < self.full_lo, step.base + self.end > self.full_hi)
        unknown = refs.leaks[0] == UNKNOWN
        pl.when(jnp.logical_and(jnp.logical_and(masks, self.some), unknown))(step.look_for_leaks)

        band = jnp.bool_(False)
        if refs.band is not None:
            band = jnp.logical_and(refs.band[self.block * len(self.groups)] >= 0, refs.leaks[0] == 0)

            @pl.when(band)
            def _():
                pl.when(ready != BANDS)(lambda: self.prepare_band(self.i))
                self.whole_band()

        pl.when(jnp.logical_not(band))(lambda: self.tile_by_tile(ready))
        return jnp.where(self.next_ready, jnp.where(band, BANDS, TILE), NOTHING)

    def tile_by_tile(self, ready: Any) -> None:
        pl.when(self.begins)(self.begin)
        pl.when(jnp.logical_and(self.some, ready != TILE))(lambda: self.prepare(self.first, 0))
        last = jnp.maximum(self.end - 1, 0)
        endings = self.endings(last)
        stop, ended = self.end, False
        for here, count, _ in endings:
            stop = jnp.where(here, last - count, stop)
            ended = jnp.logical_or(ended, here)
        lax.while_loop(lambda t: t < stop, functools.partial(self.some_tiles, stop), self.first)
        for here, count, triangle in endings:
            pl.when(here)(functools.partial(self.ending, last - count, count, triangle))
        pl.when(jnp.logical_and(self.ends, jnp.logical_not(ended)))(self.flush_kept)

    def endings(self, last: Any) -> list[tuple[Any, int, bool]]:
        """When to take which `ending`: (condition, full tiles in it, whether the last tile is a triangle).

        Its last tile is masked, past every row's start, and free of surprises. Every ending is code of its own: those
        that are rare for the shape at hand are left out, and the tiles before the last then run in the loop.
        """
        base, tile_state, triangle = self.step.base, self.refs.tile_state, self.refs.triangle
        fits = jnp.logical_and(jnp.logical_and(self.ends, self.some), self.refs.leaks[0] == 0)
        fits = jnp.logical_and(fits, jnp.logical_and(base + last >= self.full_lo, base + last >= self.full_hi))
        if tile_state is not None:
            return [(jnp.logical_and(fits, self.state(last) != NONE_VALID), 0, False)]
        full = jnp.where(base + last == self.full_hi, last - jnp.maximum(self.first, self.full_lo - base), 0)
        # An even number is left to the loop, which has no odd chains.
        full = jnp.where(full <= 0, 0, 2 - full % 2)
        most = 0 if self.long_code else min(2, self.step.tiles - 1)
        some = [(jnp.logical_and(fits, full == count), count) for count in range(most + 1)] if most else [(fits, 0)]
        if triangle is None:
            return [(here, count, False) for here, count in some]
        cut = triangle[self.block] != 0
        found = [(jnp.logical_and(here, cut), count, True) for here, count in some]
        if self.plan.kv_len % self.tile == 0:  # else also rows that see all keys end in a masked tile
            some = [(fits, 0)]
        return found + [(jnp.logical_and(here, jnp.logical_not(cut)), count, False) for here, count in some]

    def state(self, t: Any) -> Any:
        return self.refs.tile_state[self.step.batch * self.step.all_tiles + self.step.base + t]

    def some_tiles(self, stop: Any, t: Any) -> Any:
        """Tile t, and when it is full as many of the full ones after it as a chain takes; returns the next tile."""
        base, refs = self.step.base, self.refs
        full = jnp.where(base + t >= self.full_lo, jnp.minimum(self.full_hi - base, stop) - t, 0)
        none_valid = False
        if refs.tile_state is not None:
            full = jnp.minimum(full, self.state(t))
            none_valid = self.state(t) == NONE_VALID
        # Long runs of full tiles go in pairs, where there are such.
        chains = LONG_CHAINS if refs.pair is None and self.step.tiles >= 2 * LONG_CHAINS[-1] else CHAINS
        chains = [count for count in (LONG_CODE_CHAINS if self.long_code else chains) if count <= self.step.tiles]
        size = 1
        for count in chains:
            size = jnp.where(full >= count, count, size)
        for count in chains:
            pl.when(size == count)(functools.partial(self.chain, t, count))
        pl.when(full == 1)(lambda: self.one(t, full=True))

        @pl.when(jnp.logical_and(full <= 0, jnp.logical_not(none_valid)))
        def _():
            leaks = refs.leaks[0] != 0
            pl.when(leaks)(lambda: self.isolated(t))
            pl.when(jnp.logical_not(leaks))(lambda: self.one(t, full=False))

        if refs.tile_state is not None:
            pl.when(jnp.logical_and(full <= 0, none_valid))(lambda: self.prepare(t + 1, 0))
        return t + size


def hidden(s: jax.Array, visible: list[jax.Array]) -> jax.Array:
    """s [keys, rows], -inf where not visible; visible: [keys, LANES] for each LANES rows."""
    return jnp.concatenate(
        [jnp.where(seen, s[:, c * LANES : (c + 1) * LANES], -jnp.inf) for c, seen in enumerate(visible)], axis=1
    )
