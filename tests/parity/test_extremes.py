"""The ends of float32: q, k, v, gradients, sinks, scale and softcap are exact there, or refused by name."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from range_attention_reference import (
    Call,
    allowed_error,
    check,
    check_gradients,
    make_call,
    output_gradient,
    reference,
    reference_gradients,
    run,
    run_gradients,
)

# After the reference, which puts the kernel's folder on the path.
from range_attention import arithmetic  # isort: skip

FUNCTIONS = ("forward", "decode")
PRECISIONS = ("default", "high", "highest")
ENDS = np.array([[1, 2, 70, 130]])
# Three passes carry 16 bits, so that this is the largest number they do not round up past float32's last.
LARGEST = {"f32": torch.finfo(torch.float32).max * (1 - 2.0**-16), "bf16": torch.finfo(torch.bfloat16).max}
SMALLEST = torch.finfo(torch.float32).tiny  # below it TPUs have 0
ROUNDING = {"default": 2.0**-21, "high": 2.0**-15, "highest": 2.0**-21}  # of products, beside their largest


def small_call(seed: int = 0, dtype: str = "f32", **fields: Any) -> Call:
    return make_call(seed, dtype, 1, 1, 1, 4, 140, 16, ends=ENDS, **fields)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_at_both_ends(precision: str) -> None:
    """ "high" adds up bfloat16 parts, and float32's largest numbers round to infinity in bfloat16."""
    largest = np.float32([1, -1, 0.999, -0.998]) * np.float32(LARGEST["f32"])
    for numbers in (largest, largest * np.float32(1e-5), np.float32([SMALLEST, -SMALLEST, 3e-38, 1e-30])):
        a, b = numbers[:, None], np.float32([[1.0, 0.5, -0.25]])
        exact = a.astype(np.float64) * b
        for made in (
            arithmetic.dot(jnp.asarray(a), jnp.asarray(b), (1, 0), precision),
            arithmetic.dot(jnp.asarray(b.T), jnp.asarray(a.T), (1, 0), precision).T,
        ):
            np.testing.assert_allclose(made, exact, rtol=2.0**-16, atol=SMALLEST)
    for strange in (np.inf, -np.inf, np.nan):
        made = arithmetic.dot(jnp.full((8, 1), strange), jnp.full((1, 8), 0.5), (1, 0), precision)
        np.testing.assert_array_equal(made, np.full((8, 8), strange, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_at_both_ends(function: str, precision: str, dtype: str) -> None:
    for size in (LARGEST[dtype], SMALLEST, 1e-30):
        call = small_call(dtype=dtype)
        call.q.zero_()
        call.v[:] = size  # of one key: sums of several such numbers overflow
        call.v[:, :, 1:] *= torch.linspace(-1, 1, 139)[:, None] / 1000
        expected = reference(call)
        error = (run(call, function, block_kv=128, precision=precision).double() - expected).abs().max()
        assert error <= (ROUNDING[precision] if dtype == "f32" else 2.0**-8) * size + SMALLEST, (error, size)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_queries_and_keys_at_both_ends(function: str, precision: str) -> None:
    normal = small_call()
    for q_size in (1e30, 1e-30):
        call = dataclasses.replace(normal, q=normal.q * q_size, k=normal.k / q_size)
        out, expected = run(call, function, block_kv=128, precision=precision), reference(call)
        # Scores of several units: their rounding is that of the weights.
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * ROUNDING[precision])


@pytest.mark.parametrize("function", [pytest.param("forward", marks=pytest.mark.slow), "decode"])
def test_large_hidden_numbers(function: str) -> None:
    """The last 0.4 % below float32's largest, hidden: no bit changes, under three passes as under six."""
    most = torch.finfo(torch.float32).max
    for precision in ("high", "highest"):
        call = small_call()
        clean = run(call, function, block_kv=128, precision=precision)
        for poison in (most, -most, math.inf, math.nan):
            call.k[:, :, 130:], call.v[:, :, 130:] = poison, poison
            assert torch.equal(run(call, function, block_kv=128, precision=precision), clean), (precision, poison)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_gradients_at_both_ends(precision: str) -> None:
    normal = small_call()
    for size in (1e30, 1e-30):
        for call, factor in (
            (dataclasses.replace(normal, q=normal.q * size, k=normal.k / size), 1.0),
            (dataclasses.replace(normal, v=normal.v / size), size),
            (normal, size),
        ):
            do = output_gradient(call) * factor
            made, expected = run_gradients(call, do, block_kv=128, precision=precision), reference_gradients(call, do)
            if precision == "highest":
                check_gradients(call, do, block_kv=128)
            for name in ("dq", "dk", "dv"):
                error, largest = (made[name].double() - expected[name]).abs().max(), expected[name].abs().max()
                assert error <= 8 * ROUNDING[precision] * largest, (name, size, factor, error, largest)


@pytest.mark.slow
@pytest.mark.parametrize("function", [*FUNCTIONS, "gradients"])
def test_sinks_beside_every_scale(function: str) -> None:
    """A sink is exact also where float32 does not hold sink / scale. A score of its size rounds by that many units."""
    for scale in (1e-30, -1e-30, 1e-10, 0.25, 0.0):
        for softcap in (0.0, 3.0):
            if scale and softcap and abs(scale) < 1e-20:
                continue  # nearly refused: see below
            for sink in (3e38, 1e9, 20.0, -100.0, -3e38, -math.inf):
                fields = {"scale": scale, "softcap": softcap, "sinks": np.array([sink], np.float32)}
                call = small_call(1, **fields)
                if function == "gradients":
                    made = run_gradients(call, output_gradient(call), block_kv=128)
                    assert all(each.isfinite().all() for name, each in made.items() if name != "lse"), (scale, sink)
                    if abs(sink) <= 1e9 and abs(scale) > 1e-5:  # of others dq and dk are nearly nothing
                        check_gradients(call, block_kv=128)
                    continue
                out, expected = run(call, function, block_kv=128), reference(call)
                rounding = 2.0**-23 * (abs(sink) if abs(sink) < 100 else 0.0) * expected.abs().max()
                error = (out.double() - expected).abs().max()
                assert error <= allowed_error(call, expected) + rounding, (scale, softcap, sink)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("scale", "softcap"), [(1e-30, 0.0), (-1e-20, 1e-20), (0.25, 1e-30), (0.25, 1e29), (1e30, 1.0)])
def test_scale_and_softcap_at_their_ends(function: str, scale: float, softcap: float) -> None:
    check(small_call(2, scale=scale, softcap=softcap), function, block_kv=128)


@pytest.mark.parametrize(("name", "scale", "softcap"), [
    ("scale must", math.nan, 0.0), ("scale must", math.inf, 0.0), ("scale must", 1e-31, 0.0), ("scale must", -1e31, 0.0),
    ("softcap must", 0.25, -1.0), ("softcap must", 0.25, math.nan), ("softcap must", 0.25, math.inf),
    ("softcap must", 0.25, 1e-31), ("scale / softcap must", 1e-20, 1e20),
])  # fmt: skip
def test_what_float32_does_not_hold_is_refused(name: str, scale: float, softcap: float) -> None:
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=name):
            run(small_call(scale=scale, softcap=softcap), function)
    with pytest.raises(ValueError, match=name):
        run_gradients(small_call(scale=scale, softcap=softcap), torch.zeros(1, 1, 4, 16))
