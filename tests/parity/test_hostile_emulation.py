"""The kernel under JAX's checking interpreter: races, reads of memory nobody wrote, steps in any order.

The plain interpreter (interpret=True) and the checking one see different faults, so each case runs under both. Steps of
grid dimensions that are declared parallel run on two emulated cores, in an order that the seed shuffles; memory that
nothing was written to holds NaN; a block is not there before its copy is waited for.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hostile import ORDERS, hostile, order_of, possible_orders, prove, seeds_of_orders
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from range_attention_reference import blocks, check, check_gradients, make_call, output_gradient, run, run_gradients
from test_dense_masks import check as check_dense
from test_dense_masks import some, tensors

SEEDS = (0, 1)


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    """An exception leaves the checking interpreter's memory behind; the next test must not see it."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


CASES = {
    "forward": ("forward", dict(block_q=16, block_kv=128)),
    "forward, two tiles a block": ("forward", dict(block_q=0, block_kv=256)),
    "decode": ("decode", dict(block_kv=128)),
}


@pytest.mark.parametrize(
    "extras", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "all extras"]
)
@pytest.mark.parametrize("case", [
    pytest.param(name, marks=[pytest.mark.thorough] if "two tiles" in name else []) for name in CASES
])  # fmt: skip
def test_checking_interpreter(case: str, extras: bool) -> None:
    function, options = CASES[case]
    q_len = 3 if function == "decode" else 33
    rng = np.random.default_rng(len(case))
    starts, ends = rng.integers(-3, 301, (2, q_len)), rng.integers(0, 304, (2, q_len))
    starts[1, :16], ends[1, :16] = 0, 300  # full tiles too
    call = make_call(0, "f32", 2, 2, 1, q_len, 300, 24, 40, starts=starts, ends=ends)
    if extras:
        call.valid = rng.random((2, 300)) < 0.7
        call.valid[0, 128:256] = False
        call.sinks = np.array([0.5, -1.0], np.float32)
        call.softcap = 3.0
    plain = check(call, function, **options)
    for seed in SEEDS:
        out = check(call, function, interpret=hostile(seed), **options)
        torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("way", "width", "length", "options"), [
    ("triangles", 0, 600, {}),
    ("bands", 128, 600, {}),
    pytest.param("pairs over two key blocks", 0, 1100, dict(block_q=128, block_kv=896), marks=pytest.mark.thorough),
    pytest.param("steps of several blocks of rows", 300, 2304, dict(block_q=128, block_kv=512), marks=pytest.mark.thorough),
])  # fmt: skip
def test_ways_of_forward(way: str, width: int, length: int, options: dict[str, int]) -> None:
    """Which way such a call takes is shown in test_forward_ways; here two heads share what is known of a key block."""
    ends = np.arange(1, length + 1)[None]
    call = make_call(3, "bf16", 1, 4, 2, length, length, 64, starts=np.maximum(ends - (width or length), 0), ends=ends)
    plain, *outs = (check(call, interpret=how, **options) for how in (True, *map(hostile, SEEDS)))
    assert all(torch.equal(out, outs[0]) for out in outs)
    # XLA, which compiles the plain emulation, fuses products and sums: a result here and there rounds to its neighbour.
    torch.testing.assert_close(outs[0], plain, rtol=2**-7, atol=0)
    assert (outs[0] != plain).float().mean() < 1e-4


def test_query_blocks_that_share_key_blocks() -> None:
    """What is known of a key block is kept for the next query block: windows that move, a block without keys, one NaN."""
    rng = np.random.default_rng(5)
    q_len, kv_len = 500, 700
    ends = np.minimum(np.arange(q_len) + 1 + np.repeat([0, 130, 300, 260], 128)[:q_len], kv_len)
    starts = np.maximum(ends - rng.integers(1, 200, q_len), 0)
    starts[256:384] = ends[256:384]  # a query block that sees nothing
    starts[np.arange(q_len) % 3 == 0] = np.maximum(starts[np.arange(q_len) % 3 == 0], 151)  # key 150 is hidden from these
    call = make_call(4, "f32", 1, 2, 1, q_len, kv_len, 16, starts=starts[None], ends=ends[None])
    call.v[0, 0, 150] = float("nan")
    sees = (starts <= 150) & (ends > 150)
    assert sees.any() and not sees[:64].any() and not sees[384:].any()
    options = {"block_q": 128, "block_kv": 256}
    plain = run(call, "forward", **options)
    assert torch.equal(torch.isnan(plain).any(-1)[0, 0], torch.from_numpy(sees))
    call.v[0, 0, 150] = 0.0
    clean = check(call, "forward", **options)
    torch.testing.assert_close(plain[:, :, ~sees], clean[:, :, ~sees], rtol=1e-6, atol=1e-6)
    call.v[0, 0, 150] = float("nan")
    hostile_out = run(call, "forward", interpret=hostile(0), **options)
    torch.testing.assert_close(hostile_out, plain, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_lies_past_the_last_key_changes_no_bit(dtype: str) -> None:
    ends = (120 + np.arange(20))[None]
    call = make_call(6, dtype, 1, 1, 1, 20, 149, 16, starts=np.zeros((1, 20), int), ends=ends)
    outs = [
        run(call, "forward", interpret=pltpu.InterpretParams(uninitialized_memory=memory), block_kv=512)
        for memory in ("nan", "zero")
    ]
    assert torch.equal(outs[0], outs[1])


@pytest.mark.slow
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "all extras"])
def test_gradients(extras: bool) -> None:
    """Several query blocks, heads and key blocks add to the same accumulators, across steps that come in any order."""
    rng = np.random.default_rng(7)
    starts, ends = rng.integers(-3, 301, (2, 150)), rng.integers(0, 304, (2, 150))
    starts[1, :128], ends[1, :128] = 0, 300  # full tiles too
    call = make_call(3, "f32", 2, 2, 1, 150, 300, 24, 40, starts=starts, ends=ends)
    if extras:
        call.valid = rng.random((2, 300)) < 0.7
        call.valid[0, 128:256] = False
        call.valid[1, :256] = True
        call.sinks = np.array([0.5, -1.0], np.float32)
        call.softcap = 3.0
    options = dict(block_q=128, block_kv=128)
    plain = check_gradients(call, **options)
    for seed in SEEDS:
        made = check_gradients(call, interpret=hostile(seed), **options)
        for name, expected in plain.items():
            torch.testing.assert_close(made[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_decode_of_several_kv_heads_a_step() -> None:
    """Heads share a step's copies, each with sums of its own; a second key block adds to them."""
    rng = np.random.default_rng(8)
    starts, ends = rng.integers(-3, 301, (2, 3)), rng.integers(0, 304, (2, 3))
    call = make_call(8, "f32", 2, 8, 4, 3, 300, 24, 40, starts=starts, ends=ends)
    call.valid = rng.random((2, 300)) < 0.7
    call.sinks = rng.normal(size=8).astype(np.float32)
    chosen, _ = blocks.choose_decode_blocks(6, 4, 300, 24, 40, 4, 128, 0)
    assert chosen.subs > 1 and chosen.kv < 300
    plain = check(call, "decode", block_kv=128)
    for seed in SEEDS:
        torch.testing.assert_close(
            check(call, "decode", block_kv=128, interpret=hostile(seed)), plain, rtol=1e-6, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_masks_of_pairs(dtype: str) -> None:
    """Empty, full and mixed tiles of a mask, a bias, sinks and softcap; several blocks of rows and keys."""
    mask = some(2, 1, 150, 600)
    mask[:, :, :, 128:384] = False
    mask[1, :, 128:, 384:512] = True
    q, k, v = tensors(dtype, 2, 4, 2, 150, 600, 24)
    bias = torch.randn(1, 4, 150, 600, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=q.dtype)
    options = {"softcap": 3.0, "block_q": 128, "block_kv": 256}
    plain = check_dense(q, k, v, mask, bias, sinks, **options)
    made = [check_dense(q, k, v, mask, bias, sinks, interpret=hostile(seed), **options) for seed in SEEDS]
    assert torch.equal(*made)
    tolerance = 1e-6 if dtype == "f32" else 0.0  # the plain interpreter is compiled, and not bit for bit in float32
    torch.testing.assert_close(made[0], plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", ["forward", "decode"])
def test_shapes_smaller_than_a_block(function: str) -> None:
    """Nearly all of every block lies outside the arrays, where the interpreter has NaN."""
    call = make_call(1, "f32", 1, 2, 1, 1, 3, 5, 7)
    check(call, function)
    check(call, function, interpret=hostile(0))


def test_gradients_of_shapes_smaller_than_a_block() -> None:
    call = make_call(1, "f32", 1, 2, 1, 1, 3, 5, 7)
    check_gradients(call, interpret=hostile(0))


# --- what is found -------------------------------------------------------------------------------------------------
# Without these, the tests above and those of test_hostile_table.py could pass because nothing is checked.


def planted(kernel: Any, *, grid: int = 4, **more: Any) -> Any:
    """interpret -> {"out": result} of a kernel on [8 * grid, 128] ones, the steps of its grid declared independent."""
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))

    def run(interpret: Any) -> dict[str, torch.Tensor]:
        call = pl.pallas_call(
            kernel, grid=(grid,), interpret=interpret,
            out_shape=jax.ShapeDtypeStruct((8 * grid, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            **{"in_specs": [block], "out_specs": block} | more,
        )  # fmt: skip
        return {"out": torch.from_dlpack(jax.block_until_ready(call(jnp.ones((8 * grid, 128), jnp.float32)))).clone()}

    return run


def test_a_kernel_without_faults_passes() -> None:
    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    assert (prove(planted(double))["out"] == 2).all()


def test_a_race_is_found() -> None:
    def accumulate(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] += x_ref[...]  # every step adds to the same block, although the steps are declared independent

    with pytest.raises(Exception, match="(?i)race"):
        prove(planted(accumulate, out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0))))


def test_dependence_on_the_order_is_found() -> None:
    """Each step writes a block of its own, and counts the steps before it: no race, no unwritten memory."""

    def count(x_ref: Any, o_ref: Any, count_ref: Any) -> None:
        count_ref[0] = jnp.where(pl.program_id(0) == 0, 0, count_ref[0]) + 1
        o_ref[...] = x_ref[...] * count_ref[0]

    with pytest.raises(AssertionError, match="out depends on the order of independent steps"):
        prove(planted(count, scratch_shapes=[pltpu.SMEM((1,), jnp.int32)]))


def test_a_grid_of_one_step_is_no_proof() -> None:
    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    with pytest.raises(AssertionError, match="one independent step shows nothing"):
        prove(planted(double, grid=1))
    with pytest.raises(AssertionError, match="1 steps in a row, not 2"):
        prove(planted(double), in_a_row=2)


def test_a_run_without_the_checking_interpreter_is_no_proof() -> None:
    with pytest.raises(AssertionError, match="no kernel was run"):
        prove(lambda interpret: {})


def test_memory_that_nobody_wrote_is_nan() -> None:
    def read(x_ref: Any, o_ref: Any, scratch_ref: Any) -> None:
        o_ref[...] = x_ref[...] + scratch_ref[...]

    run = planted(read, scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)])
    assert prove(run)["out"].isnan().all() and run(True)["out"].isnan().all()


def test_a_block_that_is_never_written_is_nan_under_the_plain_interpreter() -> None:
    """The checking one writes back what the buffer holds: this is why both are run."""

    def skip(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) != 2)
        def _() -> None:
            o_ref[...] = x_ref[...]

    out = planted(skip)(True)["out"]
    assert out[16:24].isnan().all() and (out[:16] == 1).all()


def test_a_read_out_of_bounds_is_found() -> None:
    def read(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[pl.ds(8 * (pl.program_id(0) // 3), 8), :]

    with pytest.raises(Exception, match="(?i)out.of.bounds"):
        prove(planted(read))


def test_a_block_used_before_its_copy_was_waited_for_is_found() -> None:
    def copy(x_ref: Any, o_ref: Any, buffer_ref: Any, semaphore: Any) -> None:
        ahead = pltpu.make_async_copy(x_ref.at[pl.ds(8 * pl.program_id(0), 8)], buffer_ref, semaphore)
        ahead.start()
        o_ref[...] = buffer_ref[...]
        ahead.wait()

    run = planted(
        copy, in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )  # fmt: skip
    try:
        found = prove(run)["out"].isnan().any()
    except Exception as error:  # noqa: BLE001 -- the race detector may speak first, in jax's own exception
        found = "race" in str(error).lower()
    assert found


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (1, 3)])
def test_seeds_give_different_orders(sizes: tuple[int, ...]) -> None:
    seeds = seeds_of_orders({sizes})
    assert len({order_of(sizes, seed) for seed in seeds}) == min(ORDERS, possible_orders(sizes)) == len(seeds)
    every = sorted(itertools.product(*(range(size) for size in sizes)))
    assert all(sorted(order_of(sizes, seed)[0]) == every for seed in seeds)


def test_poison_under_the_checking_interpreter() -> None:
    """Poisoned slots past the filled length: what is hidden stays hidden there too."""
    call = make_call(2, "f32", 1, 2, 1, 2, 300, 16, ends=np.array([[129, 130]]))
    clean = run(call, "decode", block_kv=128)
    call.k[:, :, 130:] = float("nan")
    call.v[:, :, 130:] = float("inf")
    out = run(call, "decode", block_kv=128, interpret=hostile(0))
    torch.testing.assert_close(out, clean, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_poisoned_gradients_under_the_checking_interpreter() -> None:
    ends = np.broadcast_to(np.minimum(np.arange(1, 131), 100), (1, 130)).copy()
    ends[0, 7] = 0
    call = make_call(4, "f32", 1, 2, 1, 130, 140, 16, ends=ends)
    do = output_gradient(call)
    clean = run_gradients(call, do)
    call.k[:, :, 100:], call.v[:, :, 100:] = float("nan"), float("inf")
    call.q[:, :, 7], do[:, :, 7] = float("inf"), float("nan")
    made = run_gradients(call, do, interpret=hostile(0))
    for name, expected in clean.items():
        torch.testing.assert_close(made[name], expected, rtol=1e-5, atol=1e-5)
