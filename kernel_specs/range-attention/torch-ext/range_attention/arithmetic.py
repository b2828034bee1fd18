"""What the kernels of this folder compute with: products, the softmax's constants, values that must not leak."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from .blocks import LANES

LOG2E = math.log2(math.e)
# The running maximum starts at the lowest finite float32 and hidden scores are -inf: their difference is -inf, its
# exponential exactly 0, and a row that has seen no key yet needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)


def score_units(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, unit) for scores kept as they come from the product, or with softcap as tanh(product * inner).

    A difference of kept scores x unit is a power of two.
    """
    return (scale / softcap, softcap * LOG2E) if softcap else (1.0, scale * LOG2E)


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


def isolate(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def not_finite(x: jax.Array) -> jax.Array:
    """int32 [8, columns] that is 0 where x [rows, columns], float32 or bfloat16, is finite in all rows: integer arithmetic.

    rows: a multiple of 8, 16 at least. Adding one to an exponent of all ones carries into the sign's place, which was
    cleared before.
    """
    # Two bfloat16 lie in each 32 bits.
    exponent, one = (0x7F800000, 0x00800000) if x.dtype == jnp.float32 else (0x7F807F80, 0x00800080)
    sign = -0x80000000 if x.dtype == jnp.float32 else 0x80008000 - 2**32
    carried = jnp.bitwise_and(pltpu.bitcast(x, jnp.int32), exponent) + one
    rows = carried.shape[0]
    parts = [carried[min(r, rows - 8) : min(r, rows - 8) + 8] for r in range(0, rows, 8)]  # the last may overlap
    return jnp.bitwise_and(functools.reduce(jnp.bitwise_or, parts), sign)


def column(row: jax.Array, rows: int) -> jax.Array:
    """[1, lanes] -> [rows, LANES]: entry r of the row, in every lane of row r."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:rows]


def flip(x: jax.Array) -> jax.Array:
    """x transposed; by way of float32, which every generation can transpose."""
    return x.astype(jnp.float32).T.astype(x.dtype)
