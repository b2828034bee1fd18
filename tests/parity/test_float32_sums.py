"""Fault kind 40, float32 computed as bfloat16 and sums kept in bfloat16: what every function hands to the compiler.

Read from the traced program, as it goes to Mosaic. What libtpu makes of it: tests/offdevice/test_precision.py.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from range_attention_reference import range_attention

ROWS = jax.ShapeDtypeStruct((1, 256), jnp.int32)
# Their result holds what was added up, or the exponent of what was.
SUMS = {"add", "add_any", "cumsum", "dot_general", "exp", "exp2", "log", "reduce_max", "reduce_sum", "sub"}


def arguments(function: str, dtype: Any) -> tuple[Any, ...]:
    struct = jax.ShapeDtypeStruct
    q, k = struct((1, 4, 256, 64), dtype), struct((1, 2, 256, 64), dtype)
    sinks = struct((4,), jnp.float32)
    if function == "backward":
        return q, k, k, ROWS, ROWS, None, sinks, q, struct((1, 4, 256), jnp.float32), q, None
    if function == "forward_dense":
        return q, k, k, struct((1, 1, 256, 256), bool), struct((1, 4, 256, 256), dtype), sinks
    if function == "paged":
        one, pool = struct((1, 4, 1, 64), dtype), struct((8, 64, 2, 64), dtype)
        rows = struct((1, 1), jnp.int32)
        return one, pool, pool, struct((1, 4), jnp.int32), rows, rows, sinks
    return q, k, k, ROWS, ROWS, None, sinks


def kernel_equations(jaxpr: Any, inside: bool = False) -> Iterator[Any]:
    """Of everything inside a Pallas call."""
    for equation in jaxpr.eqns:
        if inside:
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernel_equations(inner, inside or equation.primitive.name == "pallas_call")


def traced(function: str, dtype: Any, precision: str) -> Any:
    static = dict(scale=0.1, softcap=20.0, precision=precision, vmem_bytes=0, interpret=False)
    if function != "paged":
        static |= dict(block_q=0, block_kv=0)
    call = functools.partial(getattr(range_attention, function), **static)
    return list(kernel_equations(jax.make_jaxpr(call)(*arguments(function, dtype)).jaxpr))


FUNCTIONS = ["forward", "forward_with_lse", "decode", "backward", "forward_dense", "paged"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_and_exponents_are_float32(function: str, dtype: Any) -> None:
    found = set()
    for equation in traced(function, dtype, "default"):
        name = equation.primitive.name
        for variable in equation.outvars:
            kind = getattr(variable.aval, "dtype", None)
            if name in SUMS and kind is not None and jnp.issubdtype(kind, jnp.floating):
                assert kind == jnp.float32, equation
                found.add(name)
    assert {"dot_general", "add"} <= found and found & {"exp", "exp2"}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_products_have_the_precision_that_was_asked_for(function: str, precision: str) -> None:
    products = [each for each in traced(function, jnp.float32, precision) if each.primitive.name == "dot_general"]
    assert products
    for each in products:
        kinds = {variable.aval.dtype for variable in each.invars}
        asked = each.params["precision"]
        if precision == "high":  # three products of bfloat16 parts
            assert kinds == {jnp.dtype(jnp.bfloat16)}
        else:
            assert kinds == {jnp.dtype(jnp.float32)} and asked == (getattr(jax.lax.Precision, precision.upper()),) * 2
    plain = [each for each in traced(function, jnp.float32, "default") if each.primitive.name == "dot_general"]
    assert len(products) == len(plain) * (3 if precision == "high" else 1)
