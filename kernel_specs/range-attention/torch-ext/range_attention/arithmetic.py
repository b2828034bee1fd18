"""What the kernels of this folder compute with: products, the softmax's constants, values that must not leak."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from .blocks import LANES

LOG2E = math.log2(math.e)
# The running maximum starts at the lowest finite float32 and hidden scores are -inf: their difference is -inf, its
# exponential exactly 0, and a row that has seen no key yet needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)
_LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)
UNKNOWN = -1  # whether a key block holds a value that must not leak: 0, 1, or not looked at


def narrow_matrix_units() -> bool:
    """Whether the chip that is traced for is known to have matrix units of 128 x 128 (v4, v5e, v5p), not 256 x 256.

    Who traces tells it by jax's abstract device; jax's own devices are not asked, as they may be another platform's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu" and pltpu.get_tpu_info().mxu_column_size == 128


def score_units(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, unit) for scores kept as they come from the product, or with softcap as tanh(product * inner).

    A difference of kept scores x unit is a power of two.
    """
    return (scale / softcap, softcap * LOG2E) if softcap else (1.0, scale * LOG2E)


def positive_scale(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """(q, scale) of the same scores with a positive scale: maxima are kept of scores that lack it."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (jnp.zeros_like(q), 1.0)


def sink_as_kept(sink: jax.Array, unit: float) -> jax.Array:
    """Sinks as scores are kept (see `score_units`). Finite at the top: what is past it leaves nothing to the keys."""
    return jnp.minimum(sink * (LOG2E / unit), -LOWEST)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: str) -> jax.Array:
    """a x b over one dimension of each, float32 result."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    product = functools.partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    if a.dtype == jnp.bfloat16:
        return product(a, b)
    if precision == "high":  # Mosaic has no three-pass product: written out
        (a_hi, a_lo), (b_hi, b_lo) = _halves(a), _halves(b)
        return product(a_hi, b_hi) + (product(a_hi, b_lo) + product(a_lo, b_hi))
    return product(a, b, precision=lax.Precision.HIGHEST if precision == "highest" else lax.Precision.DEFAULT)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers for a float32 one. The last 0.4 % below float32's largest would round to infinity."""
    hi = jnp.clip(x, -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16).astype(jnp.bfloat16)
    return hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)


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


def any_set(found: jax.Array) -> jax.Array:
    """Whether some element of `not_finite`'s result is not 0: a scalar bool."""
    return jnp.max(jnp.where(found != 0, 1.0, 0.0)) > 0.0


def in_sublanes(s: jax.Array) -> jax.Array:
    """[keys, columns] -> [keys / 8, 8, columns]"""
    return s.reshape(s.shape[0] // 8, 8, s.shape[1])


def top(by_sublane: jax.Array) -> jax.Array:
    """The maximum over keys: [1, columns]."""
    return jnp.max(jnp.max(by_sublane, axis=0), axis=0, keepdims=True)


def softmax_step(s: jax.Array, maximum: Any, total: Any, unit: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """One step of the online softmax over scores [keys, rows], of which a difference x `unit` is a power of two.

    maximum [1, rows], total [8, rows] (sums of each sublane's keys): references, brought up to date.
    Returns (weights [keys, rows] in `dtype`, what to scale the accumulator by [1, rows]).
    """
    old, by_sublane = maximum[...], in_sublanes(s)
    new = jnp.maximum(old, top(by_sublane))
    p = jnp.exp2((by_sublane - new[None]) * unit)
    alpha = jnp.exp2((old - new) * unit)
    maximum[...] = new
    total[...] = alpha * total[...] + jnp.sum(p, axis=0)
    return p.reshape(s.shape).astype(dtype), alpha


def with_sink(maximum: jax.Array, sink: jax.Array | None, unit: float) -> tuple[jax.Array, jax.Array]:
    """(maximum [1, rows] with the sink, sums [8, rows] of the sink alone). sink: [1, rows] as scores are kept, or None."""
    shape = (8, maximum.shape[1])
    if sink is None:
        return maximum, jnp.zeros(shape, jnp.float32)
    maximum = jnp.maximum(sink, maximum)
    # The sums are kept per sublane: the sink counts once, in sublane 0.
    sublane = lax.broadcasted_iota(jnp.int32, shape, 0)
    return maximum, jnp.where(sublane == 0, jnp.exp2((sink - maximum) * unit), 0.0)


def column(row: jax.Array, rows: int) -> jax.Array:
    """[1, lanes] -> [rows, LANES]: entry r of the row, in every lane of row r."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:rows]


def flip(x: jax.Array) -> jax.Array:
    """x transposed; by way of float32, which every generation can transpose."""
    return x.astype(jnp.float32).T.astype(x.dtype)
