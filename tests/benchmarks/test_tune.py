"""The search for block sizes, with an estimator that answers at once."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from typer.testing import CliRunner

from benchmarks import estimate, shapes, tune
from benchmarks.__main__ import app
from benchmarks.implementations import IMPLEMENTATIONS, OURS
from tpu_kernels import tuning
from tpu_kernels.offdevice import aot

from .fake_estimator import MIB, FakeEstimator

TABLE = shapes.load()
TODAY = datetime.date(2026, 12, 2)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(FakeEstimator, "asked", [])
    monkeypatch.setattr(FakeEstimator, "tuned", {(256, 2048): 0.7e-3, (512, 1024): 0.5e-3, (128, 512): 2e-3})
    monkeypatch.setattr(estimate, "Estimator", FakeEstimator)
    return FakeEstimator


def search(tmp_path, name="causal-16x8-d128-4k", target="v6e"):
    todo = tune.tasks(TABLE[name], target)
    results = estimate.run(todo, target, estimate.Cache(tmp_path), estimator=FakeEstimator)
    return tune.best(target, [[(task, figure) for task, figure, _ in results]], TODAY)


def test_the_fastest_pair_is_found_with_what_says_so(tmp_path):
    row = search(tmp_path)
    assert (row.block_q, row.block_kv) == (512, 1024)
    assert (row.milliseconds, row.untuned_milliseconds) == (0.5, 1.0)
    assert row.how == "static schedule" and row.compiler.startswith("libtpu 0.") and row.date == "2026-12-02"
    assert len(row.kernel) == 12
    assert row.call == tuning.Call("forward", "bfloat16", "causal", 128, 128, 4096, 4096)


def test_small_gains_and_hungry_sizes_are_left(tmp_path, fake, monkeypatch):
    fake.tuned = {(512, 1024): 0.99e-3}
    small = search(tmp_path / "a")
    assert (small.block_q, small.block_kv, small.milliseconds) == (0, 0, 1.0)
    fake.tuned = {(512, 1024): 0.5e-3}
    monkeypatch.setattr(fake, "vmem", 80 * MIB)  # of a budget of 100
    hungry = search(tmp_path / "b")
    assert (hungry.block_q, hungry.block_kv, hungry.milliseconds) == (0, 0, 1.0)
    monkeypatch.setattr(fake, "broken", "call")
    assert search(tmp_path / "c") is None


def test_one_row_serves_shapes_that_calls_cannot_tell_apart():
    """A cache may be full or not: sizes that gain much on one and lose on the other are not taken."""
    full, part = (tune.tasks(TABLE[f"decode-b8-32x8-d128-{size}-of-8k"], "v6e")[:3] for size in ("8k", "1k"))

    def timed(tasks, times):
        return [(task, estimate.Figure("", "", "v6e", "", time * 1e-3)) for task, time in zip(tasks, times, strict=True)]

    row = tune.best("v6e", [timed(full, (1.0, 1.3, 1.0)), timed(part, (0.5, 0.1, 0.4))], TODAY)
    assert (row.block_kv, row.milliseconds, row.untuned_milliseconds) == (1024, 1.4, 1.5)
    assert tune.call_of(full[0].shape) == tune.call_of(part[0].shape) == row.call


def test_candidates_fit_the_lengths():
    def pairs(name):
        return [tune._blocks(task) for task in tune.tasks(TABLE[name], "v6e")]

    prefill = pairs("full-20-d64-1500")
    assert prefill[0] == (0, 0) and max(prefill) == (2048, 2048) and (1024, 512) in prefill
    decode = pairs("decode-b8-32x8-d128-8k-of-8k")
    assert decode == [(0, 0), *((0, kv) for kv in tune.BLOCK_KV)]


def test_what_cannot_be_tuned_says_why():
    for name in ("training-16x8-d128-4k", "packed-16x512-32x8-d128", "window1024-32x8-d128-32k"):
        with pytest.raises(tune.CannotTuneError, match=name):
            tune.call_of(TABLE[name])


def test_the_command_writes_a_table_that_calls_read(tmp_path, fake):
    path = tmp_path / "tuning.toml"
    options = ["tune", "--target", "v6e", "--out", str(path), "--cache", str(tmp_path / "cache")]
    done = CliRunner().invoke(app, [*options, "--shape", "causal-16x8-*", "--shape", "packed*"])
    assert done.exit_code == 0, done.output
    assert "passed over: packed-16x512" in done.output.replace("\n", "")
    rows = tuning.load_table(path)
    assert {row.call.head_dim for row in rows} == {128, 256}
    call = tune.call_of(TABLE["causal-16x8-d128-4k"])
    assert tuning.tuning_of("v6e", path, call) == tuning.Tuning(512, 1024, tuning.tuning_of("v6e").vmem_bytes)
    # A later search replaces its own rows only, also where nothing is better any more.
    asked = len(fake.asked)
    fake.tuned = {}
    again = CliRunner().invoke(app, [*options[:-1], str(tmp_path / "other"), "--shape", "causal-16x8-d128-4k"])
    assert again.exit_code == 0 and len(fake.asked) > asked
    assert {row.call.head_dim: row.block_q for row in tuning.load_table(path)} == {128: 0, 256: 512}
    known = len(fake.asked)
    CliRunner().invoke(app, [*options, "--shape", "causal-16x8-d256-4k"])
    assert len(fake.asked) == known  # what was searched is known
    nothing = CliRunner().invoke(app, [*options, "--shape", "packed*"])
    assert nothing.exit_code == 2 and "none of these shapes" in nothing.output


@pytest.mark.slow
def test_every_row_of_the_packaged_table_still_compiles():
    """Rows outlive the kernel that they were found with; sizes that no longer fit VMEM would break calls."""
    spec = IMPLEMENTATIONS[OURS].spec()
    rows = tuning.load_table(spec.folder / tuning.TABLE)
    if not rows:
        pytest.skip("the table has no rows")
    with aot.Compiler() as compiler:
        for row in rows:
            call = row.call
            lengths = (call.rows, 1) if call.function == "decode" else (2, call.rows)
            q = aot.Array(call.dtype, (1, *lengths, call.head_dim))
            k, v = (aot.Array(call.dtype, (1, 1, call.kv_len, size)) for size in (call.head_dim, call.v_head_dim))
            mask = aot.Array("int32", (1, 1, lengths[1], 2)) if call.mask == "ranges" else None
            static = {
                "kernel": OURS, "function": call.function, "scale": 0.1, "softcap": 0.0, "causal": call.mask == "causal",
                "has_validity": False, "precision": "default",
                **dataclasses.asdict(tuning.tuning_of(row.generation, spec.folder / tuning.TABLE, call)),
            }  # fmt: skip
            assert (static["block_q"], static["block_kv"]) == (row.block_q, row.block_kv)
            arguments = (q, k, v, mask, None)
            job = aot.FunctionJob("tpu_kernels.offdevice.kernel_call:call", arguments, row.generation, static)
            compiled = compiler.run(job)
            assert compiled.ok, f"{row}: {compiled.error}"
