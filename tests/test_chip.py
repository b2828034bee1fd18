"""Kernels are told the chip that they are traced for."""

import inspect
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels import bridge
from tpu_kernels.chip import tracing_for
from tpu_kernels.offdevice.targets import TARGETS


def times_generation(x: jax.Array) -> jax.Array:
    return x * pltpu.get_tpu_info().generation


@pytest.fixture
def for_torch_tpu(monkeypatch):
    """What torch_tpu is given to trace, for a generation."""

    def given(generation):
        made = {}
        pallas = types.SimpleNamespace(jax_op=lambda name, function: made.update({name: function}))
        monkeypatch.setitem(sys.modules, "torch.tpu.pallas", pallas)
        monkeypatch.setattr(bridge, "generation", lambda: generation)
        bridge.on_tpu(times_generation, "ns::name")
        return made["ns::name"]

    return given


@pytest.mark.parametrize(("name", "generation"), [("v4", 4), ("v5e", 5), ("v5p", 5), ("v6e", 6), ("tpu7x", 7)])
def test_what_torch_tpu_traces_sees_the_chip(for_torch_tpu, name, generation):
    traced = for_torch_tpu(name)
    assert inspect.signature(traced) == inspect.signature(times_generation)
    assert jax.jit(traced)(jnp.ones(3)).tolist() == [generation] * 3
    assert jax.sharding.get_abstract_mesh().abstract_device is None  # nothing stays behind


def test_a_chip_that_somebody_set_stays_where_ours_is_unknown(for_torch_tpu):
    with tracing_for(TARGETS["v6e"]):
        assert jax.jit(for_torch_tpu(""))(jnp.ones(1)).tolist() == [6]


def test_an_unknown_chip_is_told_by_jax(for_torch_tpu):
    with pytest.raises(ValueError, match="Unsupported TPU device kind"):
        jax.jit(for_torch_tpu(""))(jnp.ones(1))
