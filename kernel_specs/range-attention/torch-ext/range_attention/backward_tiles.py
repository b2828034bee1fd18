"""What the kernels of `backward` share: the weights of a tile again, and which tiles a block of query rows visits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .ranges import NONE_VALID


def weights_and_gradients(
    s: jax.Array, dp: jax.Array, lse: jax.Array, delta: jax.Array, scale: float, softcap: float
) -> tuple[jax.Array, jax.Array]:
    """From products q k and do v to the weights and the gradient of the products q k, which lacks the factor scale."""
    # Not powers of two with the factor folded into scale and lse: the larger numbers round worse, all alike in a row.
    if softcap:
        t = jnp.tanh(s * (scale / softcap))
        p = jnp.exp(t * softcap - lse)
        return p, p * (dp - delta) * (1.0 - t * t)
    p = jnp.exp(s * scale - lse)
    return p, p * (dp - delta)


def finite(x: jax.Array) -> jax.Array:
    """x with 0 for NaN and infinities: weight 0 times one of those is NaN.

    Where the weight is not 0, the product q k or do v of the same row and key has already made the result NaN.
    """
    x32 = x.astype(jnp.float32)
    return jnp.where(jnp.abs(x32) < jnp.inf, x32, 0.0).astype(x.dtype)


def for_tiles(
    body: Any, full_body: Any, *, active: jax.Array, base: jax.Array, n: int, tiles: int, b: jax.Array,
    bounds: tuple[jax.Array, jax.Array, jax.Array, jax.Array], state_ref: Any,
) -> None:  # fmt: skip
    """Calls body(t) or full_body(t) for the tiles t of one key block that one query block has to visit.

    base: the key block's first tile. bounds: lo, hi, full_lo, full_hi of the query block.
    """
    lo, hi, full_lo, full_hi = bounds

    def one(t, carry):
        full = jnp.logical_and(base + t >= full_lo, base + t < full_hi)
        if state_ref is None:
            partly = jnp.logical_not(full)
        else:
            state = state_ref[b * tiles + base + t]
            full = jnp.logical_and(full, state > 0)
            partly = jnp.logical_and(jnp.logical_not(full), state != NONE_VALID)
        pl.when(full)(lambda: full_body(t))
        pl.when(partly)(lambda: body(t))
        return carry

    @pl.when(active)
    def _():
        lax.fori_loop(jnp.maximum(lo - base, 0), jnp.minimum(hi - base, n), one, 0)


def tile_slice(t: Any, tile: int) -> pl.Slice:
    return pl.ds(pl.multiple_of(t * tile, tile), tile)
