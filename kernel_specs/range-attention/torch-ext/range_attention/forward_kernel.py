"""The body of the forward kernel: several blocks of query rows against one block of keys.

Everything is transposed: scores are [keys, query rows]. What is known of a row (its range, maximum, sum) then lies
along the lanes as it comes from memory, the maximum over keys needs no reduction across lanes, and rescaling the
accumulator [Dv, rows] costs Dv / 8 operations for 128 rows, whatever Dv is. The next tile's scores are computed while
this tile's softmax runs, and wait in VMEM: matrix and vector units work side by side, in a loop over tiles, and from
one block of query rows to the next.

Values that a row does not see never reach it, also when they are NaN or infinite: see `arithmetic.isolate`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .forward_pairs import Pair
from .forward_rows import NOTHING, Rows
from .forward_step import ALONE, ENDED, READY, RESUME, Plan, Refs, Step


def kernel(*refs: Any, plan: Plan) -> None:
    step = Step(plan, Refs(**dict(zip(plan.operands, refs, strict=True))))
    pl.when(jnp.logical_and(step.row_step == 0, step.key_step == 0))(step.clear)

    @pl.when(step.kv_block < jnp.maximum(step.kv_end, 1))
    def _():
        pl.when(jnp.logical_not(step.key_block_stays()))(step.forget)
        if step.refs.pair is None:
            lax.fori_loop(0, plan.blocks.subs, lambda i, ready: Rows(step, i).run(ready), NOTHING)
        else:
            step.refs.way[READY] = NOTHING
            pl.loop(0, plan.blocks.subs, step=2)(lambda i: maybe_paired(step, i))


def maybe_paired(step: Step, i: Any) -> None:
    """Blocks `i` and `i + 1` of the query rows, together as far as they go so, and then each by itself."""
    way, subs = step.refs.way, step.plan.blocks.subs
    way[RESUME] = ALONE
    pl.when(step.goes_in_a_pair(i))(lambda: Pair(step, i).run())
    resume = way[RESUME]

    @pl.when(resume != ENDED)
    def _():
        @pl.loop(i, i + 2 if subs % 2 == 0 else jnp.minimum(i + 2, subs))
        def _(j):
            way[READY] = Rows(step, j, resume, jnp.where(j == i, resume, ALONE)).run(way[READY])
