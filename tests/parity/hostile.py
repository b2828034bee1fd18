"""Kernels under JAX's checking interpreter, on one and two cores, their independent steps in several orders.

The interpreter raises on races between cores and on reads out of bounds, fills memory that nothing was written to with
NaN, has a block only after its copy was waited for, and takes the steps of grid dimensions that are declared parallel in an
order that a seed shuffles. `prove` runs a kernel under it and holds all its runs to the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ORDERS = 3  # on each number of cores
Order = tuple[tuple[tuple[int, ...], ...], ...]


def hostile(seed: int, cores: int = 2) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=cores, random_seed=seed,
        uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode="on_wait",
    )  # fmt: skip


class Steps:
    """The steps that one kernel call took, as the interpreter reports them."""

    def __init__(self, name: str, semantics: tuple[str, ...]) -> None:
        self.name = name
        self._parallel = [axis for axis, meaning in enumerate(semantics) if meaning == "parallel"]
        self._taken: dict[int, list[tuple[int, ...]]] = {}

    def record(self, token: jax.Array, point: tuple[jax.Array, ...], core: jax.Array) -> jax.Array:
        place = tuple(int(x) for x in point)
        self._taken.setdefault(int(core), []).append(tuple(place[axis] for axis in self._parallel))
        return token

    @property
    def order(self) -> Order:
        """Of each core, the independent steps in the order in which it came to them."""
        return tuple(tuple(dict.fromkeys(self._taken[core])) for core in sorted(self._taken))

    @property
    def in_a_row(self) -> int:
        """How many steps, one after another, the longest independent step is made of."""
        return max(Counter(itertools.chain(*self._taken.values())).values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """How long the parallel dimensions are."""
        return tuple(1 + max(along) for along in zip(*itertools.chain(*self._taken.values()), strict=True))


@contextlib.contextmanager
def recorded() -> Iterator[list[Steps]]:
    """Every kernel call within the block, in order, of those under the checking interpreter."""
    made: list[Steps] = []
    original = pl.pallas_call

    def pallas_call(kernel, *args, interpret=False, compiler_params=None, name=None, **more):  # type: ignore[no-untyped-def]
        if isinstance(interpret, pltpu.InterpretParams):
            steps = Steps(name or kernel.__name__, compiler_params.dimension_semantics)
            made.append(steps)
            interpret = dataclasses.replace(interpret, grid_point_recorder=steps.record)
        return original(kernel, *args, interpret=interpret, compiler_params=compiler_params, name=name, **more)

    with mock.patch.object(pl, "pallas_call", pallas_call):
        yield made


def possible_orders(sizes: tuple[int, ...]) -> int:
    """The interpreter shuffles each parallel dimension for itself."""
    return math.prod(math.factorial(size) for size in sizes)


@functools.cache
def order_of(sizes: tuple[int, ...], seed: int) -> Order:
    """The order that the seed gives parallel dimensions of these sizes, found with a kernel that does nothing."""

    def nothing(o_ref):  # type: ignore[no-untyped-def]
        o_ref[0] = 0

    with recorded() as calls:
        call = pl.pallas_call(
            nothing, grid=sizes, out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
            out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(sizes)),
            interpret=pltpu.InterpretParams(random_seed=seed),
        )  # fmt: skip
        jax.block_until_ready(call())
    return calls[0].order


def seeds_of_orders(grids: set[tuple[int, ...]]) -> list[int]:
    """The first seeds that give each grid ORDERS orders, or as many as it has."""
    chosen: list[int] = []
    lacking = {sizes: min(ORDERS, possible_orders(sizes)) for sizes in grids}
    for seed in range(200):
        found = {sizes: {order_of(sizes, each) for each in chosen} for sizes in grids}
        if all(len(found[sizes]) >= lacking[sizes] for sizes in grids):
            return chosen
        new = {sizes for sizes in grids if order_of(sizes, seed) not in found[sizes]}
        if any(len(found[sizes]) < lacking[sizes] for sizes in new):
            chosen.append(seed)
    raise AssertionError(f"no seeds below 200 give {lacking} orders")


def prove(
    run: Callable[[pltpu.InterpretParams], dict[str, torch.Tensor]], in_a_row: int = 1
) -> dict[str, torch.Tensor]:
    """What `run` returns under the checking interpreter, on one and on two cores, in ORDERS orders: always the same bits.

    in_a_row: how many dependent steps an independent one must be made of, so that something is carried between them.
    Raises whatever the interpreter finds, and AssertionError where the bits differ, or where the grid shows too little.
    """
    try:
        with recorded() as calls:
            first = run(hostile(0))
        assert calls, "no kernel was run under the checking interpreter"
        grids = {steps.sizes for steps in calls}
        seeds = seeds_of_orders(grids)
        met: dict[tuple[int, int], set[Order]] = {}
        for cores, seed in itertools.product((2, 1), seeds):
            if (cores, seed) == (2, 0):
                made, ran = first, calls
            else:
                with recorded() as ran:
                    made = run(hostile(seed, cores))
            assert [steps.name for steps in ran] == [steps.name for steps in calls]
            for index, steps in enumerate(ran):
                met.setdefault((cores, index), set()).add(steps.order)
            for name, x in first.items():
                # Not torch.equal: rows may hold NaN where a test put it.
                same = torch.equal(x.contiguous().view(torch.uint8), made[name].contiguous().view(torch.uint8))
                assert same, f"{name} depends on the order of independent steps: {cores} core(s), seed {seed}"
        for (cores, index), orders in met.items():
            steps = calls[index]
            wanted = min(ORDERS, possible_orders(steps.sizes))
            assert steps.in_a_row >= in_a_row, f"{steps.name}: {steps.in_a_row} steps in a row, not {in_a_row}"
            assert wanted > 1, f"{steps.name}: one independent step shows nothing, grid {steps.sizes}"
            assert len(orders) >= wanted, f"{steps.name}: {len(orders)} orders on {cores} core(s), not {wanted}"
    finally:
        # An exception leaves the interpreter's memory behind; what runs next must not see it.
        pltpu.reset_tpu_interpret_mode_state()
    return first
