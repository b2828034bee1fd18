"""Two neighbouring blocks of query rows of the forward kernel, taking turns over the tiles that are full for both.

While one block's softmax runs, the other one's products do: neither waits for its own. `ranges.pairs` finds them.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .arithmetic import UNKNOWN
from .forward_rows import NOTHING, TILE, Rows
from .forward_step import ENDED, READY, RESUME, Step

CHAINS = (2, 4, 6)  # tiles, for both blocks, in one straight line of code
LONG_CHAINS = (2, 4, 8)  # where a key block is long enough to use them twice
NARROW_CHAINS = (2,)  # where products take long themselves: latency counts less, and libtpu orders short code better
LAST = 2  # tiles in one straight line with the two triangles after them


class Pair:
    """Blocks `i` and `i + 1` of the query rows of a step. Scores of the first lie in slot 0, of the second in slot 1."""

    def __init__(self, step: Step, i: Any) -> None:
        self.step, self.refs = step, step.refs
        self.a, self.b = Rows(step, i), Rows(step, i + 1)
        narrow = step.plan.narrow
        long_chains = NARROW_CHAINS if narrow else LONG_CHAINS
        self.long = step.tiles >= 2 * long_chains[-1]
        self.chains = [count for count in (long_chains if narrow or self.long else CHAINS) if count <= step.tiles]
        if narrow and self.refs.acc.shape[0] == 2:
            # Known when traced: what adds to one accumulator need not wait for what reads the other.
            self.a.slot, self.b.slot = 0, 1

    def prepare(self, t: Any) -> None:
        """The first block's scores of tile t, or past its last one those of the first tile of the block after the pair."""
        a, b = self.a, self.b
        more = t < a.end
        k = self.step.keys(jnp.where(more, t, b.next_first))
        self.refs.scores[0] = a.scores(k, jnp.where(more, a.i, b.next))

    def prepare_second(self, t: Any) -> None:
        self.refs.scores[1] = self.b.scores(self.step.keys(t), self.b.i)

    def turns(self, t: Any, count: int, triangle: bool = False) -> Any:
        """`count` tiles from t on but for the last product with values; returns its (weights, scale), None for no tile.

        triangle: the tile after them is a triangle for the first block.
        """
        a, b, scores, late = self.a, self.b, self.refs.scores, None
        for c in range(count):
            self.prepare_second(t + c)
            if late is not None:
                b.accumulate(*late, self.step.values(t + c - 1))
            now = a.softmax(scores[0])
            if triangle and c + 1 == count:
                a.prepare_triangle(t + count, 0)
            else:
                self.prepare(t + c + 1)
            a.accumulate(*now, self.step.values(t + c))
            late = b.softmax(scores[1])
        return late

    def chain(self, t: Any, count: int) -> None:
        """`count` tiles from t on."""
        self.b.accumulate(*self.turns(t, count), self.step.values(t + count - 1))

    def some_tiles(self, stop: Any, t: Any) -> Any:
        """As many tiles from t on as a chain takes; returns the next tile."""
        size = self.chains[0]
        for count in self.chains[1:]:
            size = jnp.where(stop - t >= count, count, size)
        for count in self.chains:
            pl.when(size == count)(functools.partial(self.chain, t, count))
        return t + size

    def ending(self, t: Any, count: int) -> None:
        """`count` tiles from t on, the first block's last, full for the second, the second's last, and both outputs."""
        a, b, step = self.a, self.b, self.step
        late, last = self.turns(t, count, triangle=True), t + count
        self.prepare_second(last)
        if late is not None:
            b.accumulate(*late, step.values(last - 1))
        sides = a.triangle(last, 0)
        b.prepare_triangle(last + 1, 0)
        a.finish(last, sides)
        b.accumulate(*b.softmax(self.refs.scores[1]), step.values(last))
        sides = b.triangle(last + 1, 0)
        b.prepare(last + 2, 0)
        b.finish(last + 1, sides)

    def run(self) -> None:
        """What the two do together, up to the tile where they go on by themselves, or their end."""
        a, b, step, leaks, way = self.a, self.b, self.step, self.refs.leaks, self.refs.way
        pair = self.refs.pair[a.block]

        @pl.when(a.begins)  # they begin in the same tile
        def _():
            a.begin()
            b.begin()

        pl.when(way[READY] != TILE)(lambda: self.prepare(a.first))
        t = (pair >> 1) - step.base
        if not step.whole:
            t = a.first + (jnp.maximum(jnp.minimum(t, step.tiles) - a.first, 0) & ~1)
        if self.refs.triangle is None:
            self.full_tiles(t)
            self.leave(t)
            return
        together = step.ends_together(pair)
        if not step.whole:
            together = jnp.logical_and(together, t == (pair >> 1) - step.base)
        pl.when(jnp.logical_and(together, leaks[0] == UNKNOWN))(step.look_for_leaks)
        together = jnp.logical_and(together, leaks[0] == 0)
        # In a short key block, only tiles that a longest chain leaves over are worth the longer ending.
        take = jnp.logical_and(together, self.long or lax.rem(t - a.first, self.chains[-1]) == LAST)
        stop = jnp.where(take, jnp.maximum(t - LAST, a.first), t)
        self.full_tiles(stop)

        @pl.when(together)
        def _():
            way[READY], way[RESUME] = jnp.where(b.next_ready, TILE, NOTHING), ENDED
            for count in (0, LAST) if step.tiles > LAST else (0,):
                pl.when(t - stop == count)(functools.partial(self.ending, stop, count))

        pl.when(jnp.logical_not(together))(lambda: self.leave(t))

    def full_tiles(self, stop: Any) -> None:
        """The tiles before `stop`."""
        lax.while_loop(lambda t: t < stop, functools.partial(self.some_tiles, stop), self.a.first)

    def leave(self, t: Any) -> None:
        """Where the two do not end in triangles: output of those that end before tile t, where the rest goes on."""
        a, b, way = self.a, self.b, self.refs.way
        over = jnp.logical_and(t == a.end, t == b.end)
        pl.when(jnp.logical_and(over, a.ends))(a.flush_kept)
        pl.when(jnp.logical_and(over, b.ends))(b.flush_kept)
        left = jnp.where(over, b.next_ready, t < a.end)
        way[READY], way[RESUME] = jnp.where(left, TILE, NOTHING), jnp.where(over, ENDED, t)
