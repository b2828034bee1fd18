"""The timing of a TPU's runner, with a clock of our own, and its calls emulated on CPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks import device, estimate, implementations, shapes
from benchmarks.implementations import BASE, IMPLEMENTATIONS, OURS
from tpu_kernels.offdevice import emit

TABLE = shapes.load()
PROGRAMS = Path(__file__).with_name("device_programs.py")


@pytest.fixture(scope="module")
def emitter():
    with emit.Emitter("v6e", timeout=200) as made:
        yield made


class Machine:
    """A device with a clock: launching takes `launch`, one call `takes`, and asking for one `asks` of the host's time."""

    def __init__(self, launch=0.010, asks=0.0001):
        self.now, self.busy_until, self.launch, self.asks = 0.0, 0.0, launch, asks
        self.calls = []

    def clock(self):
        return self.now

    def call(self, name, takes):
        machine = self

        class Out:
            def flatten(self):
                return self

            def __getitem__(self, _):
                return self

            def cpu(self):
                machine.now = max(machine.now, machine.busy_until) + machine.launch

        def run():
            machine.calls.append(name)
            machine.now += machine.asks
            machine.busy_until = max(machine.busy_until, machine.now) + takes()
            return Out()

        return run


def test_launch_latency_drops_out_and_rounds_are_interleaved():
    machine = Machine()
    calls = {0: machine.call("a", lambda: 0.002), 1: machine.call("b", lambda: 0.005)}
    samples = device.interleaved(calls, 5, machine.clock)
    assert [device.median_and_spread(samples[each][0])[0] for each in (0, 1)] == pytest.approx([0.002, 0.005])
    assert samples[0][1] == pytest.approx(machine.asks)
    # Warmed in turn, then five rounds: ab ba ab ba ab. Neighbours of one name are one here.
    assert "".join(name for name, _ in itertools.groupby(machine.calls)) == "ab" * 4


def test_spread_is_told():
    times = itertools.cycle([0.001, 0.002, 0.003])
    machine = Machine(launch=0.0)
    call = machine.call("a", lambda: next(times))
    seconds, spread = device.median_and_spread(device.interleaved({0: call}, 9, machine.clock)[0][0])
    assert 0.0015 < seconds < 0.0025 and spread > 0.01
    assert device.median_and_spread([2.0]) == (2.0, 0.0)
    assert device.median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 0.5)


def small(name, **changes):
    """A row of the table, small enough to be emulated."""
    return dataclasses.replace(TABLE[name], **{"q_heads": 4, "kv_heads": 2, "q_len": 256, "kv_len": 256, **changes})


SMALL = {
    "causal": small("causal-32x8-d64-4k"),
    "window": small("window1024-32x8-d128-32k", window=100, head_dim=64, v_head_dim=64),
    "documents": small("packed-16x512-32x8-d128", document=64, head_dim=64, v_head_dim=64),
    "full": small("full-20-d64-1500", kv_heads=4, q_len=200, kv_len=200),
    "decode": small("decode-b8-32x8-d128-1k-of-8k", q_len=1, batch=2, head_dim=64, v_head_dim=64, filled=70),
}


def figures(shape, names, rounds=2):
    todo = estimate.tasks([shape], [IMPLEMENTATIONS[name] for name in names], "v6e")
    todo = [task for task in todo if task.candidate is None or task.candidate.label in ("", "blocks of 512")]
    return {each.implementation: each for each in device.run(todo, "cpu", rounds=rounds)}


@pytest.mark.parametrize("kind", [pytest.param(each, marks=() if each == "window" else pytest.mark.slow) for each in SMALL])
def test_all_run_and_agree(kind):
    """Peers' masks, too, are what the table says: a window of w keys is not one of w + 1."""
    found = figures(SMALL[kind], [OURS, BASE, "sdpa-transformers", "jax-splash"])
    if kind == "decode":
        assert "no decode" in found.pop("jax-splash").error
    for each in found.values():
        assert each.seconds is not None, each.error
        assert each.how == "CPU, emulated"


@pytest.mark.slow
def test_a_training_step_runs():
    shape = small("training-16x8-d128-4k", head_dim=64, v_head_dim=64, q_len=128, kv_len=128)
    found = figures(shape, [OURS, BASE])
    assert found[OURS].seconds is not None, found[OURS].error
    assert "torch_tpu's" in found[BASE].error


def test_another_result_is_not_timed(monkeypatch):
    shape = small("causal-32x8-d64-4k", kv_heads=4)
    task = estimate.tasks([shape], [IMPLEMENTATIONS[OURS]], "v6e")[0]
    monkeypatch.setattr(device, "_ours", lambda task, inputs: (lambda q: q, (inputs.q,)))
    base = estimate.tasks([shape], [IMPLEMENTATIONS[BASE]], "v6e")[0]
    wrong, right = device.run([task, base], "cpu", rounds=1)
    assert wrong.seconds is None and "off SDPA's by" in wrong.error
    assert right.seconds is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "implementation", "label", "kernels"),
    [
        ("causal-16x8-d128-4k", OURS, "", 1),
        ("training-16x8-d128-4k", OURS, "", 2),
        ("window128-sinks-64x8-d64-4k", OURS, "", 1),
        ("causal-16x8-d128-4k", BASE, "", 0),
        ("training-16x8-d128-4k", BASE, "", 0),
        ("causal-16x8-d128-4k", "sdpa-transformers", "", 0),
        ("causal-16x8-d128-4k", "jax-splash", "blocks of 512", 1),
        ("causal-16x8-d128-4k", "jax-flash", "blocks of 1024", 1),
    ],
)
def test_what_a_tpu_would_be_given_is_one_graph_that_compiles(tmp_path, emitter, shape, implementation, label, kernels):
    """torch_tpu itself takes the runner's programs, JAX peers through its jax_op among them; no device runs them."""
    parameters = {"shape": shape, "implementation": implementation, "label": label}
    emitted = emitter.run(emit.ModuleJob(f"{PROGRAMS}:program", parameters), tmp_path)
    assert emitted.ok, emitted.error
    assert (emitted.graphs, emitted.graph_breaks, len(emitted.kernels)) == (1, 0, kernels)
    assert emitter.compile(emitted.modules[0]).ok


def test_dense_masks_say_what_ranges_say():
    for shape in SMALL.values():
        inputs = device.make_inputs(shape, "cpu")
        starts, ends = shape.ranges()
        rows, keys = torch.where(inputs.dense[0, 0] == 0)
        assert len(rows) == int((ends - starts).sum())
        assert bool((keys < torch.from_numpy(ends)[rows]).all()) and bool((keys >= torch.from_numpy(starts)[rows]).all())
        assert (inputs.mask is None) == (implementations.range_mask(shape) is None)
